"""Trains the tiny model in an environment of verifiers, and on a server of OpenEnv.

    python -m benchmarks.environments.run vf runs/vf             # where verifiers is installed
    python -m benchmarks.environments.run openenv runs/openenv   # where openenv-core is
    python -m benchmarks.environments.run collect runs/vf runs/openenv

The two cannot be installed together. `collect` writes result.json.gz and curves.png beside this
file. Both environments are in tests/support/environments, and the server is started here.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._lib.pictures import save_picture
from benchmarks._lib.results import write_json
from mesotron import cli
from mesotron.runs import RunFolder

HERE = Path(__file__).parent
WORLDS = HERE.parents[1] / "tests" / "support" / "environments"
SYSTEM = r"Solve the problem step by step. Put the final answer in \boxed{}."
SETTINGS = (
    "--model tiny --steps 36 --batch 8 --group 8 --max-tokens 96 --task.num-eval 40 --lr 1e-3 "
    "--optim.aux-lr 1e-3 --seed 0 --device cpu --threads 1"
)
STEM = "environment/"
PATIENCE = 120  # seconds for a server to start


def train(kind: str, out: str) -> int:
    if kind == "vf":
        sys.path.append(str(WORLDS))
        return cli.main(["train", "--env", "vf:vf_arith", *SETTINGS.split(), "--out", out])

    with server() as address:
        more = ["--task.num-train", "500", "--task.system", SYSTEM]
        words = ["train", "--env", f"openenv:{address}", *SETTINGS.split(), *more]
        return cli.main([*words, "--out", out])


@contextmanager
def server() -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]

    command = [sys.executable, str(WORLDS / "openenv_arith.py"), str(port)]
    with subprocess.Popen(command) as process:
        for _ in range(PATIENCE):
            time.sleep(1)
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break

        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def collect(paths: list[str]) -> dict[str, Any]:
    """The rewards of each step, and the held-out scores."""
    result = {}
    for path in paths:
        run = RunFolder(Path(path))
        rows = []
        for row in run.rows("metrics"):
            kept = {"step": row["step"], "reward": row["reward"]}
            for name, value in row.items():
                if name.startswith(STEM):
                    kept[name.split("/", 2)[2]] = value

            rows.append(kept)

        kind = run.config["task"]["env"][0].partition(":")[0]
        scores = {name: run.load(name)["greedy"]["reward"] for name in ("before", "after")}
        result[kind] = {"rows": rows, **scores}

    return result


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    titles = {"vf": "verifiers (at most 1.2)", "openenv": "OpenEnv (at most 1)"}
    for axes, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        rows = result[kind]["rows"]
        steps = [row["step"] for row in rows]
        axes.plot(steps, [row["reward"] for row in rows], label="reward")
        axes.plot(steps, [row["turns"] for row in rows], label="turns", color="0.6")
        axes.set(title=title, xlabel="step", ylim=(0, 2))
        axes.legend(frameon=False)

    save_picture(figure, path, dpi=110)


def main() -> int:
    action, *paths = sys.argv[1:]
    if action != "collect":
        return train(action, paths[0])

    result = collect(paths)
    write_json(result, HERE / "result.json.gz")
    draw(result, HERE / "curves.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
