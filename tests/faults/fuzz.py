"""Random input for everything that reads files or text: one sentence or an answer, no traceback.

A target is a Hypothesis strategy and a function; an exception that escapes the function, an exit
code that means a bug, and more than one line of complaint are failures. Hypothesis shrinks them.
"""

import contextlib
import io
import json
import math
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from faults.kills import say
from mesotron import cli
from mesotron.config import SftConfig, SnakeConfig, TrainConfig, VlaTrainConfig
from mesotron.config.base import flags_of, to_plain

SECONDS = 60  # per input; a machine that is shared is slow
MAX_FILE = 2**20
CODES = {0, 1, 2, 3, 4}  # documented; `watch --json` has 3 and 4
CONFIGS = {
    "train": TrainConfig,
    "sft": SftConfig,
    "vla train": VlaTrainConfig,
    "ppo snake": SnakeConfig,
}
METRICS = (
    "step",
    "reward",
    "loss",
    "entropy",
    "kl",
    "grad_norm",
    "clip_ratio",
    "facts/correct",
    "completions/mean_length",
    "groups/zero_signal",
    "time/step",
    "eval/greedy",
)

# Values

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 10**400, 2**63, 1e308, math.nan, math.inf])
)
texts = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "\0", "\x1b[2J", "../x", "\ud800", "a" * 5000, "é"])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda x: st.one_of(st.lists(x, max_size=4), st.dictionaries(texts, x, max_size=4)),
    max_leaves=8,
)


def mutated(config_type: type) -> st.SearchStrategy[Any]:
    """A config as it is saved, with some of its values replaced, removed or added."""
    plain = to_plain(config_type())
    sections = [name for name, value in plain.items() if isinstance(value, dict)]
    names = [(name, None) for name in plain]
    names += [(section, name) for section in sections for name in plain[section]]

    def apply(changes: dict[tuple[str, str | None], Any]) -> Any:
        changed = json.loads(json.dumps(plain))
        for (first, second), value in changes.items():
            if second is None:
                changed[first] = value
            elif isinstance(changed[first], dict):
                changed[first][second] = value

        return changed

    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3).map(apply)


# TOML

literals = st.one_of(
    st.integers().map(str),
    st.floats().map(lambda x: str(x).replace("e+", "e")),
    texts.map(lambda x: json.dumps(x)),
    st.booleans().map(lambda x: str(x).lower()),
    st.sampled_from(
        [
            "1979-05-27T07:32:00Z",
            "07:32:00",
            "[]",
            "{}",
            "[[1], ['a']]",
            "{a = 1}",
            "0x1F",
            "1" + "0" * 5000,
            "[" * 500 + "]" * 500,
            "nan",
            "inf",
            "''",
        ]
    ),
)
keys = st.one_of(
    st.sampled_from([flag.removeprefix("--").replace("-", "_") for flag in flags_of(TrainConfig)]),
    st.sampled_from([field.name for field in fields(TrainConfig)]),
    st.text("abc.[]='\" ", min_size=1, max_size=6),
)
toml_lines = st.one_of(
    st.tuples(keys, literals).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    keys.map(lambda key: f"[{key}]"),
    st.text(max_size=15),
)
toml = st.lists(toml_lines, max_size=5).map("\n".join)

# Rows and logs

rows = st.lists(
    st.dictionaries(st.one_of(st.sampled_from(METRICS), texts), scalars | values, max_size=5),
    max_size=6,
)
events = st.lists(
    st.fixed_dictionaries(
        {"step": numbers},
        optional={
            "kind": st.sampled_from(["watch", "guard"]) | values,
            "detector": st.sampled_from(["nonfinite", "entropy_collapse"]) | values,
            "severity": values,
            "evidence": values,
            "changes": values,
            "action": values,
        },
    ),
    max_size=3,
)
json_lines = rows.map(lambda rows: "\n".join(json.dumps(row) for row in rows))
steps = st.lists(numbers, min_size=3, max_size=12)
csvs = st.tuples(st.lists(texts, min_size=1, max_size=4), steps).map(
    lambda pair: ",".join(pair[0]) + "\n" + "\n".join(f"{x},{x}" for x in pair[1])
)
consoles = steps.map(
    lambda xs: "\n".join(
        f"step:{k} - actor/entropy:{x} - critic/rewards/mean:{x}" for k, x in enumerate(xs)
    )
)
dicts = steps.map(lambda xs: "\n".join(str({"loss": x, "step": k}) for k, x in enumerate(xs)))
logs = st.tuples(
    st.one_of(
        *(
            x.map(lambda text: text.encode("utf-8", "surrogatepass"))
            for x in (json_lines, csvs, consoles, dicts, st.text())
        ),
        st.binary(max_size=200),
    ),
    st.sampled_from([".jsonl", ".json", ".csv", ".log", ".txt", ".parquet", ".wandb", ".db", ""]),
)

# Answers and rewards

latex = st.lists(
    st.sampled_from(
        [
            *"0123456789.,-+/%^_{}()$ ",
            r"\frac",
            r"\boxed{",
            "}",
            r"\sqrt",
            "\\text{",
            "<answer>",
            "</answer>",
            "####",
            "pi",
            "10^{9999999}",
            "½",
            "٣",
            "\0",
        ]
    ),
    max_size=12,
).map("".join)
answers = st.tuples(st.one_of(latex, st.text(max_size=30)), st.one_of(latex, texts), st.booleans())
scores = st.one_of(values, st.lists(scalars, min_size=2, max_size=2))


# Targets


class Traceback(AssertionError):
    """Input that ended in something other than a sentence or an answer."""


def accept(config: Any) -> int:
    return 0


def run(*args: str, accepted: bool = False) -> None:
    """`mesotron ARGS`; `accepted`: only as far as its settings."""
    output = io.StringIO()
    errors = io.StringIO()

    commands = cli.COMMANDS
    if accepted:
        target = f"{__name__}:accept"
        commands = {name: one._replace(target=target) for name, one in commands.items()}

    with (
        mock.patch.object(cli, "COMMANDS", commands),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = cli.main([*args])

    text = errors.getvalue()
    complaints = []
    for line in text.splitlines():
        if line.startswith("mesotron:"):
            complaints.append(line)

    if code not in CODES or (code == 2 and len(complaints) != 1) or "Traceback" in text:
        raise Traceback(f"{args} returned {code}: {text[-500:]}")


def as_file(folder: Path, name: str, text: str | bytes) -> Path:
    if isinstance(text, str):
        data = text.encode("utf-8", "surrogatepass")
    else:
        data = text

    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:MAX_FILE])

    return path


def fuzz_toml(text: str, folder: Path) -> None:
    file = as_file(folder, "own.toml", text)
    for command in ("train", "vla train"):
        run(*command.split(), "--config", str(file), accepted=True)


def fuzz_config(case: tuple[str, Any], folder: Path) -> None:
    from mesotron.rlvr.train import resume_plan

    command, value = case
    run_folder = as_file(folder, "run/config.json", json.dumps(value)).parent
    (run_folder / "checkpoints").mkdir()
    run(*command.split(), "--resume", str(run_folder), accepted=True)
    run("eval", str(run_folder), accepted=True)

    with contextlib.suppress(ValueError):
        resume_plan(cli.parse(TrainConfig, ["--resume", str(run_folder)]))


def fuzz_rows(case: tuple[list[Any], list[Any], Any], folder: Path) -> None:
    metrics, events, other = case
    run_folder = as_file(folder, "run/config.json", json.dumps(to_plain(TrainConfig()))).parent
    for name, rows in (("metrics", metrics), ("events", events)):
        as_file(run_folder, f"{name}.jsonl", "\n".join(json.dumps(row) for row in rows))

    for name in ("env", "result", "spent", "routing"):
        as_file(run_folder, f"{name}.json", json.dumps(other))

    run("watch", str(run_folder))
    run("report", str(run_folder), "--out", str(folder / "page.html"))


def fuzz_log(case: tuple[bytes, str], folder: Path) -> None:
    data, suffix = case
    file = as_file(folder, f"log{suffix}", data)
    run("watch", str(file), "--json")


def fuzz_answer(case: tuple[str, str, bool], folder: Path) -> None:
    from mesotron.answers.formats import FORMATS
    from mesotron.answers.lenient import lenient_answer
    from mesotron.answers.numbers import distance, read_number, same_number

    text, gold, complete = case
    for name in FORMATS:
        found = FORMATS[name].extract(text, complete=complete)
        if found is not None and found not in text:
            raise Traceback(f"{name} read {found!r} from {text!r}, which does not have it")

    lenient_answer(text, complete=complete)
    a = read_number(text)

    b = read_number(gold)
    if a is not None and b is not None:
        if same_number(a, b) != same_number(b, a) and a == b:
            raise Traceback(f"{text!r} and {gold!r}")
        distance(a, b)

    if a is not None and not same_number(a, a):
        raise Traceback(f"{text!r} is not the same as itself")


def fuzz_reward(value: Any, folder: Path) -> None:
    from mesotron.rewards.own import check_scores, finish

    with contextlib.suppress(ValueError):
        for score in check_scores("own:f", finish(value), 2):
            if score is not None and not (type(score) is float and math.isfinite(score)):
                raise Traceback(f"{value!r} became {score!r}")


@dataclass(frozen=True)
class Target:
    strategy: st.SearchStrategy[Any]
    check: Callable[[Any, Path], None]
    share: float  # of the inputs


configs = st.one_of(
    *(st.tuples(st.just(name), mutated(kind) | values) for name, kind in CONFIGS.items())
)
TARGETS = {
    "toml": Target(toml, fuzz_toml, 0.03),
    "config": Target(configs, fuzz_config, 0.04),
    "rows": Target(st.tuples(rows, events, values), fuzz_rows, 0.06),
    "log": Target(logs, fuzz_log, 0.2),
    "answer": Target(answers, fuzz_answer, 0.35),
    "reward": Target(scores, fuzz_reward, 0.32),
}


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise Traceback(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)

    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    inputs = {}
    failures = []
    for name, target in TARGETS.items():
        try:
            inputs[name] = fuzz(name, round(args.inputs * target.share), seed=args.seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise

            notes = " ".join(getattr(error, "__notes__", ()))
            failures.append(f"{name}: {type(error).__name__}: {error} {notes}"[:2000])
            say(failures[-1])

        say(f"{name}: {inputs.get(name, 'a traceback')}")

    return {
        "inputs": sum(inputs.values()),
        "by_target": inputs,
        "tracebacks": len(failures),
        "failures": failures,
        "good": not failures,
    }


def fuzz(name: str, inputs: int, *, seed: int | None = None) -> int:
    """Try so many inputs; returns how many were tried. The first failure is raised, shrunk."""
    target = TARGETS[name]
    tried = 0
    phases = [Phase.explicit, Phase.generate, Phase.shrink]

    @settings(
        max_examples=inputs,
        derandomize=seed is None,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(target.strategy)
    def check(value: Any) -> None:
        nonlocal tried
        tried += 1

        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        try:
            with time_limit(SECONDS):
                target.check(value, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    (check if seed is None else hypothesis.seed(seed)(check))()
    return tried
