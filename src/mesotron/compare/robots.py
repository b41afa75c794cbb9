"""Runs of `mesotron vla train` as cells: behaviour cloning, judged by success in the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mesotron.compare.changes import change
from mesotron.compare.kind import Kind, Row
from mesotron.compare.record import Contender
from mesotron.config import VlaTrainConfig
from mesotron.runs import RunFolder
from mesotron.runs.resume import settings_to_resume
from mesotron.vla.demos import read_manifest, world_of
from mesotron.vla.lerobot import is_lerobot
from mesotron.vla.worlds import build_world

# Rules of the parts vision, language, fusion and action.
OPTIMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw": ("AdamW on every weight", ("adamw",) * 4),
    "muon": ("Muon on all hidden matrices", ("muon",) * 4),
    "pion_action": (
        "Pion on the action module, Muon on the rest",
        ("muon", "muon", "muon", "pion"),
    ),
    "pion": ("Pion on all hidden matrices", ("pion",) * 4),
    "lowrank": ("Muon's top directions, by an exact SVD", ("low_rank",) * 4),
}
PARTS = ("vision", "language", "fusion", "action")
# Cells run side by side, so that one has no processors to spare for its evaluation.
ALWAYS = ("guard=warn", "save_every=0", "keep=1", "probe_every=0", "workers=1")


class Robots(Kind):
    """`mesotron vla train`; a score is whether a seeded episode succeeded.

    Example:
        >>> kind = Robots("vla", ("demos=.", "optim.lr=0.002"))
        >>> kind.base_rate, len(kind.contenders(kind.usual, []))
        (0.002, 5)
    """

    name = "vla"
    measure = "share of episodes that succeeded"
    unit = (
        "Rates are AdamW's, of the hidden matrices: a spectral step of full rank changes a weight "
        "as much as AdamW's usual 0.2 of the rate. What a filter takes away is not made up for, "
        "since parts of one policy have different filters. The rest has one rate in all runs."
    )
    curve = "loss/action"
    falls = True
    problems_setting = "episodes"
    usual = tuple(OPTIMS)

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        self.recipe = recipe
        self.config: VlaTrainConfig = change(VlaTrainConfig(), (*ALWAYS, *changes))
        if not self.config.demos.exists():
            raise ValueError(
                f"there are no demonstrations in {self.config.demos}: make some with mesotron vla "
                "demos, and name them by --set demos=FOLDER"
            )
        if is_lerobot(self.config.demos):
            raise ValueError(
                f"{self.config.demos} is a LeRobotDataset, which knows no world to judge a policy "
                "in: compare on demonstrations of mesotron vla demos"
            )
        if self.config.episodes < 1:
            raise ValueError("episodes=0 leaves nothing to judge by: leave it out of --set")

    @property
    def base_rate(self) -> float:
        """That of hidden matrices."""
        return self.config.optim.lr

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        """The optimizers; behaviour cloning is the only objective."""
        if objectives:
            raise ValueError(f"cloning has no objective {objectives[0]!r}: leave --objectives out")
        for name in optims:
            if name not in OPTIMS:
                raise ValueError(f"unknown optimizer {name!r}: choose from {', '.join(OPTIMS)}")
        return [Contender(name=x, optim=x, objective="", about=OPTIMS[x][0]) for x in optims]

    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> VlaTrainConfig:
        """The policy with an optimizer at a rate."""
        rules = dict(zip(PARTS, OPTIMS[contender.optim][1], strict=True))
        strength = {} if "pion" in rules.values() else {"promote": None, "cutoff": None}
        optim = replace(self.config.optim, lr=rate * gain, **rules, **strength)
        return replace(self.config, optim=optim, seed=seed, out=run)

    @property
    def num_problems(self) -> int:
        """Episodes of all tasks of the demonstrations' world."""
        world = world_of(read_manifest(self.config.demos))
        return self.config.episodes * len(build_world(world).tasks)

    def uses_gpu(self) -> bool:
        """Unless the recipe, or --set device=cpu, says otherwise."""
        return self.config.device != "cpu"

    def resuming(self, run: Path) -> VlaTrainConfig:
        """`--resume`: the run knows its own settings."""
        return settings_to_resume(VlaTrainConfig, run)

    def evaluations(self, run: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
        """Success of each episode of each task; an untrained policy is not measured."""
        found = run.load("evaluation")
        if found is None or run.result is None:
            return {}, {}
        episodes = found["success"]["episodes"]
        return {}, {f"{one['task']} {one['seed']}": float(one["success"]) for one in episodes}

    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Seconds of the steps, and frames that were read."""
        seconds, spent, before = [], 0.0, 0
        for row in rows:
            spent += row.get("time/step", 0.0) * (row["step"] - before)
            before = row["step"]
            seconds.append(spent)
        return seconds, [float(row["step"] * self.config.batch) for row in rows]
