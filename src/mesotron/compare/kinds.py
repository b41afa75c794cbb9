"""Kinds of runs that can be compared: `mesotron train`, `ppo snake` and `vla train`.

A kind sets up the config of a run and reads its folder. As a script this file runs one cell.
"""

import hashlib
import json
import math
import re
import statistics
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from mesotron.compare.record import Contender, Verdict
from mesotron.config import (
    CompareConfig,
    ObjectiveName,
    OptimConfig,
    SnakeConfig,
    TrainConfig,
    VlaTrainConfig,
    base,
)
from mesotron.config.flags import read_setting
from mesotron.recipes import RECIPES, make_recipe
from mesotron.rewards.call import is_own
from mesotron.runs import RunFolder
from mesotron.runs.files import Row, write_json
from mesotron.runs.trust import code_names, search_working_folder
from mesotron.runs.workers import resolve
from mesotron.spectral.routing import SPECTRAL_RULES
from mesotron.watch.diagnosis import diagnose
from mesotron.watch.engine import Engine

Scores = dict[str, float]  # by problem
Config = TypeVar("Config")

# Errors of a run whose weights are not finite: before saving, and when PyTorch samples from them.
NOT_FINITE = ("weights are not finite", "probability tensor contains either `inf`, `nan`")
UPDATES = f"optim/({'|'.join(SPECTRAL_RULES)}).*/update_rms"  # of hidden matrices
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RULE: list[str] = _TABLES["rule"]  # how a comparison is made fair; `tournament` fills it in
XLA_ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}


class Health(NamedTuple):
    verdict: Verdict
    cause: str | None
    story: str  # the watch's diagnosis in words


class Outcome(NamedTuple):
    scores: Scores  # after training
    start: Scores  # before training; empty if it was not measured
    seconds: float  # time of the training steps
    tokens: float
    steps: int
    health: Health
    update_ratio: float | None  # median RMS of an update / rate; None if it is not logged


class Kind(ABC):
    """A kind of run; the fields up to `optims` are set from kinds.toml, except `config_type`."""

    name: ClassVar[str]
    config_type: ClassVar[type]
    command: ClassVar[str]  # the "module:function" that runs a config
    extra: ClassVar[str]  # whose packages a run needs
    measure: str  # what a score is, in words
    unit: ClassVar[str]  # what a rate means for the contenders, in a sentence
    curve: str  # the metric whose curve is timed against the threshold
    falls: ClassVar[bool] = False  # whether that curve falls as the run learns
    floor: ClassVar[float] = 0.0  # score of every problem for a diverged run
    before: ClassVar[str] = "before training"  # what the scores at the start are
    problems_setting: ClassVar[str]  # the setting for the number of problems
    always: ClassVar[Sequence[str]]  # settings of every run
    contested: ClassVar[Sequence[str]]  # settings that differ between contenders
    placed: ClassVar[Sequence[str]] = ("seed", "out", "resume")  # or runs
    usual: ClassVar[Sequence[str]]  # default optimizers
    optims: ClassVar[dict[str, dict[str, Any]]]  # description and settings of the optimizers

    recipe: str  # name of the recipe
    config: Any  # the recipe's config with the changes: shared by all runs
    base_rate: float  # the recipe's learning rate in AdamW's unit

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name
        for key, value in _TABLES[name].items():
            setattr(cls, key, value)

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        self.recipe = recipe
        for name in (read_setting(self.config_type, one)[0] for one in changes):
            if name in self.contested:
                raise ValueError(f"--{name} is each contender's own: use --optims and --rates")
            if name in self.placed:
                raise ValueError(f"--set {name}: every run gets its own, leave it out")

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        if objectives:
            raise ValueError(f"there is no objective {objectives[0]!r} here: remove --objectives")

        for name in optims:
            _check_known("optimizer", name, self.optims)

        return [
            Contender(
                name=x,
                optim=x,
                about=self.optims[x]["about"],
            )
            for x in optims
        ]

    @abstractmethod
    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> Any: ...

    def probe(self, contender: Contender, seed: int, run: Path) -> Any | None:
        """A short run that measures the size of a contender's updates; None if not needed."""
        return None

    @property
    def num_problems(self) -> int:
        """Requested problems for choosing and ranking together; data may have fewer."""
        return attrgetter(self.problems_setting)(self.config)

    @abstractmethod
    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        """Scores before and after training; the second is empty for unfinished runs."""

    @abstractmethod
    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Training seconds and tokens spent up to each row."""

    def environment(self, threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads)}

    def update_ratio(self, run: RunFolder, rows: Sequence[Row]) -> float | None:
        return None

    def outcome(self, path: Path, last_line: str = "") -> Outcome | None:
        """Results of a run; None if it has neither finished nor diverged (to the floor's score)."""
        if not (path / "config.json").is_file():
            return None

        run = RunFolder(path)
        rows = run.rows("metrics")
        start, scores = self.evaluations(run)
        error = last_line if run.result is None and is_not_finite(last_line) else ""

        diverged = diverged_at(rows) is not None or bool(error)
        if diverged and not scores:
            scores = dict.fromkeys(start, min([self.floor, *start.values()]))  # rewards below 0

        if not rows or (run.result is None and not diverged):
            return None

        seconds, tokens = self.cost(rows)
        costs = (seconds[-1], tokens[-1], int(rows[-1]["step"]))

        return Outcome(
            scores,
            start,
            *costs,
            health_of(rows, error),
            self.update_ratio(run, rows),
        )


class Language(Kind, name="rlvr"):
    """`mesotron train RECIPE`; a score is the greedy accuracy on held-out problems."""

    config_type = TrainConfig
    shorter: ClassVar[dict[str, Sequence[str]]]  # recipe -> settings
    # The contender's own settings; schedule, momentum, decay and clipping are the recipe's.
    own = ("name", "per_head", "promote", "cutoff", "rank", "scale", "aux_lr")
    probe_steps = 12  # momentum has half settled by then
    probe_problems = 8

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        super().__init__(recipe, changes)
        self.config: TrainConfig = change(
            make_recipe(recipe), (*self.shorter.get(recipe, ()), *self.always, *changes)
        )

        if self.config.task.data and is_own(self.config.reward):
            self.measure = "mean reward on held-out prompts"
            self.curve = "reward"

        optim = self.config.optim
        if optim.scale not in ("rms", "moonlight"):
            raise ValueError(f"optim.scale={optim.scale}: compare in AdamW's unit, optim.scale=rms")

        self.base_rate = optim.lr
        if optim.name in SPECTRAL_RULES and optim.aux_lr is not None:
            self.base_rate = optim.aux_lr  # AdamW has another rate than the matrices

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        for name in objectives:
            _check_known("objective", name, get_args(ObjectiveName))

        made = []
        for optim in optims:
            about, _ = self.optim_config(optim)
            for objective in objectives or (self.config.objective.name,):
                name = f"{optim}+{objective}" if len(objectives) > 1 else optim
                made.append(
                    Contender(
                        name=name,
                        optim=optim,
                        objective=objective,
                        about=about,
                    )
                )

        return made

    def optim_config(self, optim: str) -> tuple[str, OptimConfig]:
        """Description and config of an optimizer; `pion:promote=2` is a variant."""
        name, _, variant = optim.partition(":")
        _check_known("optimizer", name, self.optims)
        settings = dict(self.optims[name])
        about = settings.pop("about")
        own = OptimConfig(**settings)
        config = replace(self.config.optim, **{field: getattr(own, field) for field in self.own})
        if {"lr", "name"} & {text.partition("=")[0].strip() for text in variant.split(",")}:
            raise ValueError(f"--optims {optim}: rates are searched (--rates), the name is {name}")

        if variant:
            about = f"{about}, with {variant.replace(',', ', ')}"
            config = change(config, variant.split(","))

        return about, config

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> TrainConfig:
        optim = self.optim_config(contender.optim)[1]
        # Embeddings, norms and head keep AdamW's rate; SGD's has another unit and its own default.
        if optim.name in SPECTRAL_RULES and optim.aux_lr is None:
            optim = replace(optim, aux_lr=rate)

        return replace(
            self.config,
            optim=replace(optim, lr=rate * gain),
            objective=replace(self.config.objective, name=contender.objective),
            seed=seed,
            out=run,
        )

    def probe(self, contender: Contender, seed: int, run: Path) -> TrainConfig | None:
        if self.optim_config(contender.optim)[1].name == "adamw":
            return None  # AdamW's own step is the unit

        config = self.settings(contender, self.base_rate, seed, run)
        return replace(
            config,
            steps=min(config.steps, self.probe_steps),
            task=replace(config.task, num_eval=min(config.task.num_eval, self.probe_problems)),
            # Constant, since rows log the rate of the auxiliary rule, not of the matrices.
            optim=replace(config.optim, schedule="constant", warmup=0.0),
        )

    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        def scores(name: str) -> Scores:
            result = run.load(name) or {"transcripts": []}
            kind = "reward" if result.get("measure") == "reward" else "correct"
            return {one["id"]: float(one[kind] or 0.0) for one in result["transcripts"]}

        return scores("before"), scores("after") if run.result is not None else {}

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        seconds = list(accumulate(row.get("step_time", 0.0) for row in rows))
        return seconds, [float(row.get("num_tokens", 0.0)) for row in rows]

    def update_ratio(self, run: RunFolder, rows: Sequence[Row]) -> float | None:
        """Of the hidden matrices, in the later half; None for AdamW, or if the rate changed."""
        optim = run.config["optim"]
        if optim["schedule"] != "constant" or optim["warmup"] > 0 or not optim["lr"] > 0:
            return None

        updates = [
            value
            for row in rows[len(rows) // 2 :]
            for name, value in row.items()
            if re.fullmatch(UPDATES, name) and math.isfinite(value)
        ]
        return statistics.median(updates) / optim["lr"] if updates else None


class Games(Kind, name="ppo"):
    """`mesotron ppo snake`; a score is the fruit of a greedy game."""

    config_type = SnakeConfig

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        super().__init__(recipe, changes)
        self.config: SnakeConfig = change(SnakeConfig(gif=False), changes)
        self.base_rate = self.config.lr

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> SnakeConfig:
        # Muon's rate is the spectral norm of a step; the RMS change of a weight by a step of full
        # rank is that over sqrt(inputs). What Pion's filter removes is not compensated.
        muon_lr = 0.2 * rate * gain * math.sqrt(self.config.d_model)
        rates = {
            "lr": rate,
            "muon_lr": muon_lr,
            "aux_adam_lr": rate,
        }

        place = {"save_dir": run.parent, "run_name": run.name}
        optim = {"optim": contender.optim, "use_muon": False}

        return replace(
            self.config,
            **optim,
            **rates,
            **place,
            seed=seed,
        )

    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        if (result := run.result) is None:
            return {}, {}
        # Games start alike in all runs.
        games = {f"game-{k}": float(x) for k, x in enumerate(result["greedy_games"][0])}
        return dict.fromkeys(games, float(result["baselines"]["random_masked"])), games

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        return [row["time/seconds"] for row in rows], [row["time/env_steps"] for row in rows]

    def environment(self, threads: int) -> dict[str, str]:
        return super().environment(threads) | (XLA_ONE_THREAD if threads == 1 else {})


class Robots(Kind, name="vla"):
    """`mesotron vla train`; a score is the success of a seeded episode."""

    config_type = VlaTrainConfig

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        from mesotron.vla.demos import is_lerobot

        super().__init__(recipe, changes)

        # The rules are the contenders', but a strength of Pion is only valid beside Pion.
        strength = any(one.startswith(("optim.promote", "optim.cutoff")) for one in changes)
        pion = ("optim.action=pion",) if strength else ()
        self.config: VlaTrainConfig = change(VlaTrainConfig(), (*self.always, *pion, *changes))
        if is_lerobot(self.config.demos):
            raise ValueError(f"{self.config.demos} is a LeRobotDataset, which has no simulator")

        self.base_rate = self.config.optim.lr

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> VlaTrainConfig:
        rule = {"pion_action": "muon", "lowrank": "low_rank"}.get(contender.optim, contender.optim)
        rules: dict[str, Any] = {name.removeprefix("optim."): rule for name in self.contested}
        if contender.optim == "pion_action":
            rules["action"] = "pion"

        if "pion" not in rules.values():
            rules |= {"promote": None, "cutoff": None}

        optim = replace(self.config.optim, lr=rate * gain, **rules)
        return replace(
            self.config,
            optim=optim,
            seed=seed,
            out=run,
        )

    @property
    def num_problems(self) -> int:
        from mesotron.vla.demos import trusted_world
        from mesotron.vla.worlds import build_world

        world = trusted_world(self.config.demos, self.config.trust)
        return self.config.episodes * len(build_world(world).tasks)

    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        if (evaluation := run.load("evaluation")) is None or run.result is None:
            return {}, {}
        episodes = evaluation["success"]["episodes"]
        return {}, {f"{one['task']} {one['seed']}": float(one["success"]) for one in episodes}

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        steps = [0, *(row["step"] for row in rows)]
        since = zip(rows, steps)
        seconds = accumulate(row.get("time/step", 0.0) * (row["step"] - k) for row, k in since)

        return list(seconds), [float(step * self.config.batch) for step in steps[1:]]


OTHERS: dict[str, type[Kind]] = {"snake": Games, "vla": Robots}  # not recipes of mesotron train


def make_kind(recipe: str, changes: Sequence[str] = ()) -> Kind:
    if recipe == CompareConfig.recipe and any(one.startswith("task.data=") for one in changes):
        recipe = "own"
    _check_known("recipe", recipe, (*RECIPES, *OTHERS))
    return OTHERS.get(recipe, Language)(recipe, changes)


def _check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = base.suggest(name, known)
        raise ValueError(f"unknown {what} {name!r}{hint}: choose from {', '.join(known)}")


def diverged_at(rows: Sequence[Row]) -> int | None:
    for row in rows:
        losses = [v for k, v in row.items() if k == "loss" or k.startswith("loss/")]
        if not all(map(math.isfinite, losses)):
            return int(row["step"])

    return None


def is_not_finite(last_line: str) -> bool:
    return any(error in last_line for error in NOT_FINITE)


def health_of(rows: Sequence[Row], error: str = "") -> Health:
    engine = Engine()
    events = [event for row in rows for event in engine.update(row)]
    diagnosis = diagnose(rows, engine, events)
    verdict: Verdict = "healthy" if diagnosis.condition == "unknown" else diagnosis.condition

    text = diagnosis.text()
    if (step := diverged_at(rows)) is not None:
        verdict = "diverged"
        text = f"diverged at step {step}: {text}"
    elif error:
        verdict = "diverged"
        text = f"diverged after step {int(rows[-1]['step'])}: {error}"

    return Health(verdict, diagnosis.cause, text)


def is_for_choosing(problem: str) -> bool:  # rates, not for ranking
    return hashlib.sha256(problem.encode()).digest()[0] % 2 == 0


def change(config: Config, changes: Iterable[str]) -> Config:
    """A config with some values replaced by NAME=VALUE. Nested names have dots, lists commas; none
    is None unless the setting has a choice of that name.

    >>> change(TrainConfig(), ["rollout.prompts=8", "task.levels=1,2"]).task.levels
    (1, 2)
    """
    flags = base.flags_of(type(config))
    with base.unchecked():  # several changes may only be valid together
        for item in changes:
            name, text = read_setting(type(config), item)
            if name.startswith("trl."):
                config = replace(config, trl=(*config.trl, f"{name[4:]}={text}"))  # pyright: ignore
                continue

            _, kind = flags[f"--{name.replace('_', '-')}"]
            config = _replace_at(config, name.split("."), _read(kind, text, item))

    return base.validate(config)


def _replace_at(config: Any, path: list[str], value: Any) -> Any:
    if len(path) > 1:
        value = _replace_at(getattr(config, path[0]), path[1:], value)
    return replace(config, **{path[0]: value})


def _read(kind: Any, text: str, item: str) -> Any:
    """Text as a value of a type; the first alternative of a union that takes it."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    choices = [name for one in kinds if get_origin(one) is Literal for name in get_args(one)]
    if NoneType in kinds and text == "none" and "none" not in choices:
        return None

    for one in kinds:
        if one is not NoneType and (value := _read_one(one, text, item)) is not None:
            return value

    raise ValueError(f"{item!r}: {text!r} is not {base.describe_type(kind)}")


def _read_one(kind: Any, text: str, item: str) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], part, item) for part in text.split(",") if part)
    if get_origin(kind) is Literal:
        return {str(one): one for one in get_args(kind)}.get(text)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())

    try:
        return kind(text)
    except ValueError:
        return None


def cell_command(path: Path, kind: str, config: Any) -> list[str]:
    write_json(path, {"kind": kind, "config": base.to_plain(config)})
    return [sys.executable, "-P", "-m", "mesotron.compare.kinds", str(path)]


def run_cell(path: Path) -> int:
    values = json.loads(path.read_text(encoding="utf-8"))
    kind = next(kind for kind in (Language, Games, Robots) if kind.name == values["kind"])

    config: Any = base.from_plain(kind.config_type, values["config"], str(path))
    if code_names(config):  # of the tournament's own command: `Progress.settings` checked it
        search_working_folder()

    return resolve(kind.command)(config)


if __name__ == "__main__":
    sys.exit(run_cell(Path(sys.argv[1])))
