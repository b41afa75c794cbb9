"""The committed references: help pages, parsed command lines and verdicts on public logs.

`references` returns what they should be; `update` writes them. Nothing here depends on the machine.
This file alone imports modules of the package that are not public.
"""

import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERDICTS = "verdicts.json"
ESTIMATES = "estimates.json"


def update() -> None:
    """Write every reference; verdicts only where the public logs are."""
    os.environ["COLUMNS"] = "100"
    for old in [*(HERE / "help").glob("*.txt"), *(HERE / "parsed").glob("*.json")]:
        old.unlink()

    texts = help_pages() | parsed_lines() | {ESTIMATES: estimates()}
    if public_runs() is not None:
        texts[VERDICTS] = verdicts()

    for name, text in texts.items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


# Help pages


def commands() -> list[str]:
    from mesotron.cli import COMMANDS

    return list(COMMANDS)


def help_pages() -> dict[str, str]:
    """File name -> text of `--help` and of `--help-all` of every command, and of the overview."""
    pages = {"help/overview.txt": run_main([])[1]}
    for command in commands():
        words = command.split()
        short = run_main([*words, "--help"])[1]
        whole = run_main([*words, "--help-all"])[1]

        name = "_".join(words)
        pages[f"help/{name}.txt"] = short

        if whole != short:
            pages[f"help/{name}_all.txt"] = whole

    return pages


def run_main(words: list[str]) -> tuple[int, str]:
    """Exit code and standard output of the command line.

    It runs here, where no `runs/last` is that would give `mesotron eval` other defaults."""
    from mesotron.cli import main

    output = io.StringIO()
    with chdir(HERE), redirect_stdout(output), redirect_stderr(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)

    return code, output.getvalue()


# Parsed command lines


def parsed_lines() -> dict[str, str]:
    """The defaults of every command in full, and what each command line changes in them."""
    with chdir(HERE):
        defaults = all_defaults()
        changes = {
            "recipes": [f"train {name}" for name in recipes()],
            "lines": (HERE / "lines.txt").read_text(encoding="utf-8").splitlines(),
        }

        files = {"parsed/defaults.json": to_json(defaults)}
        for name, lines in changes.items():
            table = {}
            for line in lines:
                command = command_of(line)
                table[line] = changed(parse(line.split()), defaults.get(command, {}))

            files[f"parsed/{name}.json"] = to_json(table)

    return files


def all_defaults() -> dict[str, dict[str, Any]]:
    """The settings of each command without arguments, where it can be called so."""
    defaults = {}
    for command in commands():
        try:
            defaults[command] = parse(command.split())
        except ValueError:  # it needs an argument
            continue

    return defaults


def command_of(line: str) -> str:
    from mesotron.cli import split_name

    return split_name(line.split())[0]


def recipes() -> list[str]:
    from mesotron.recipes import RECIPES

    return list(RECIPES)


def parse(words: list[str]) -> dict[str, Any]:
    """The settings that a command line gives, by dotted names."""
    from mesotron import cli
    from mesotron.config.base import to_plain

    name, rest = cli.split_name(words)
    command = cli.COMMANDS[name]
    config = cli.parse(command.config_type, rest, f"mesotron {name}", command.presets)

    return dict(flatten(to_plain(config)))


def flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def changed(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    absent = object()
    return {key: value for key, value in settings.items() if defaults.get(key, absent) != value}


# Verdicts on public logs


def public_runs() -> Path | None:
    """The folder of public logs; they belong to their authors and are not in this repository."""
    for parent in HERE.parents:
        folder = parent / "shared" / "data" / "public_runs"
        if folder.is_dir():
            return folder

    return None


def verdicts() -> str:
    """Log -> verdict, cause and findings, by `mesotron watch LOG --json`."""
    folder = public_runs()
    table = {}
    for path in sorted(folder.glob("*/*.jsonl.gz")):
        table[path.relative_to(folder).as_posix()] = verdict(path)

    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def verdict(path: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        log.write_bytes(gzip.decompress(path.read_bytes()))
        code, output = run_main(["watch", str(log), "--json"])

    if not output:
        return {"exit_code": code}

    record = json.loads(output)
    events = [f"{event['detector']} {event['severity']}" for event in record["events"]]

    return {
        "verdict": record["verdict"],
        "cause": record["cause"],
        "onset": record["onset"],
        "events": sorted(set(events)),
    }


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


# Estimates

PLANNED = (
    "",
    "--gpu 4090 --lora 16",
    "--gpu 4090 --lora 16 --model.load 4bit --rollout.no-fast",
    "--gpu h100 --model.dtype float32 --optim adamw",
    "--gpu h200 --rollout.no-fast --model.gradient-checkpointing",
    "--gpu a100 --objective.beta 0.04 --rollout.updates 2 --average 0.9",
    "--gpu h100 --objective.name corewarding --rollout.micro-batch 4",
    "--gpu h100 --rollout.vllm colocate --optim.no-fused",
    "--gpu t4 --lora 8 --optim pion --model.gradient-checkpointing",
    "--gpu l4 --sft-steps 200 --sft.batch 64",
    "--gpu h100 --sft-steps 200 --sft.batch 512",
    "--gpu h200 --model.dtype bfloat16 --rollout.no-fast",
)
MODELS = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-4B")


def estimates() -> str:
    """Seconds and GiB by part that `mesotron plan` computes before anything has run."""
    from mesotron import cli
    from mesotron.rlvr.plan.estimate import predict
    from mesotron.rlvr.plan.setup import Lengths
    from mesotron.rlvr.plan.shapes import find_shape

    command = cli.COMMANDS["plan"]
    table = {}
    for model in MODELS:
        for words in PLANNED:
            line = f"--model {model} {words}".strip()
            config = cli.parse(command.config_type, line.split(), "golden", command.presets)
            shape = find_shape(model)
            lengths = Lengths(prompt=100, completion=200, longest=300)
            found = predict(config, shape, config.gpu, lengths)
            table[line] = {
                "seconds": found.seconds,
                "supervised": found.supervised,
                "memory": found.memory,
                "needed": found.needed,
            }

    return to_json(round_numbers(table))


def round_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: round_numbers(inner) for key, inner in value.items()}

    return float(f"{value:.6g}")
