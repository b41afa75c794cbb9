"""Pilot of the VLA study: does a recorded step equal a plain one, how fast is it, and how many
steps does the task need? A minute or two on a GPU.

    python -m benchmarks.vla.pilot --world object10 --state runs/vla_study --out results

Writes WORLD.pilot.json to STATE and OUT, from which `study.py` takes its budgets: the small one is
where Muon's success on validation scenes is nearest 0.5, the full one where it has nearly ended.
"""

from __future__ import annotations

import json
import time
import traceback
from typing import Any

from benchmarks._lib.crew import say_with_seconds
from benchmarks._lib.results import write_json
from benchmarks.vla.cell import EXECUTE, WAVE, Bench, train_config
from benchmarks.vla.plan import make_cell
from benchmarks.vla.study import fill_in, make_data, make_parser

BUDGETS = (300, 600, 1200, 2400, 4800)
RATE = 5e-3
RATES = (2.5e-3, 5e-3, 1e-2)  # of which the curve takes the best
ADAMW_RATE = 5e-4
AUXILIARY = (1e-3, 3e-3, 1e-2)
SHORT = 500  # steps in which rates are compared, by their loss
COMPARED = 8  # steps
MOST_GAP = 0.1  # between the losses of plain and recorded steps; sums of a GPU have no fixed order
NEAR_END = 0.9  # of the best success
LEARNED = 0.3
KINDS = ("plain", "recorded")
SHARING = 1.15  # what a step takes of a GPU that changes between processes, over one alone


def main() -> None:
    parser = make_parser()
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--short", type=int, default=SHORT)
    parser.add_argument("--study-seconds", type=float, default=400, help="time of the study itself")
    given = fill_in(parser.parse_args())
    deadline = time.time() + given.seconds
    say = say_with_seconds()
    for folder in (given.state, given.out):
        folder.mkdir(parents=True, exist_ok=True)

    make_data(given, say)
    bench = Bench(given, deadline)
    say(f"{len(bench.demos):,} observations loaded")

    pilot = Pilot(bench, say)
    pilot.try_recording()
    pilot.time_steps()
    pilot.find_rates()
    pilot.follow_curve()

    found = pilot.found
    say(f"recorded {found.get('graph')}, rates {found['rates']}, budgets {found.get('budgets')}")


class Pilot:
    """Results, on disk as they come; each question builds on the answers before it.

    Args:
        bench: the demonstrations and the settings.
        say: prints a sentence.
    """

    def __init__(self, bench: Bench, say: Any) -> None:
        self.bench = bench
        self.given = bench.given
        self.say = say
        self.found: dict[str, Any] = {
            "world": self.given.world,
            "compared": {},
            "speed": {},
            "rates": {},
            "curve": [],
        }

    def try_recording(self) -> None:
        """Whether recorded steps equal plain ones; if not, the study uses plain ones."""
        if self.given.device != "cuda" or not self.given.graph:
            return

        compared = self.found["compared"]
        for head in self.given.heads:
            for name in ("muon_pion", "adamw", "pion"):
                compared[f"{head}/{name}"] = self.attempt(compare, head, name)

        largest = max(one.get("gap", 1.0) for one in compared.values())
        self.given.graph = largest < MOST_GAP
        self.found["graph"] = self.given.graph
        self.keep()

    def time_steps(self) -> None:
        """How long a step takes."""
        for name in ("muon", "adamw"):
            self.found["speed"][name] = self.attempt(measure_speed, self.given.heads[0], name)
        self.keep()

    def find_rates(self) -> None:
        """Auxiliary rates of Muon and AdamW, then Muon's own beside its."""
        rates = self.found["rates"]
        short = self.given.short
        for key, name, rate in (("aux", "muon", RATE), ("aux_adamw", "adamw", ADAMW_RATE)):
            tried = self.attempt(try_auxiliary, name, rate, short)
            if "best" in tried:
                rates[key] = tried["best"]

        self.given.aux = rates.get("aux", self.given.aux)
        self.found["rate"] = self.attempt(try_rates, short).get("best", RATE)
        self.keep()

    def follow_curve(self) -> None:
        """Muon's success by budget while there is time, and the study's budgets from it."""
        speed = self.found["speed"]["muon"]
        alone = min(speed.get(f"{kind} {self.given.batch}", 1e9) for kind in KINDS)
        affordable = self.given.study_seconds / (SHARING * alone / 1000)

        for steps in self.given.budgets:
            if time.time() > self.bench.deadline:
                break

            self.found["curve"].append(self.attempt(learn, self.found["rate"], steps))
            points = []
            for point in self.found["curve"]:
                if "success" in point:
                    points.append(point)

            self.found["budgets"] = choose(points, affordable)
            self.keep()

    def attempt(self, work: Any, *args: Any) -> dict[str, Any]:
        """Run a function and report its result or its failure."""
        try:
            found = work(self.bench, *args)
        except Exception:
            found = {"error": traceback.format_exc()}

        shown = found.get("error") or json.dumps(found)
        self.say(f"{work.__name__} {' '.join(str(arg) for arg in args)}: {shown}")

        return found

    def keep(self) -> None:
        """Write the results to the study's state and to the output folder."""
        for folder in (self.given.state, self.given.out):
            write_json(self.found, folder / f"{self.given.world}.pilot.json", indent=1)


def compare(bench: Bench, head: str, name: str) -> dict[str, Any]:
    """The losses of a few steps, plain and recorded, from the same weights."""
    cell = make_cell(head, name, ADAMW_RATE if name == "adamw" else RATE, steps=100)
    losses = {}
    graph = bench.given.graph

    for recorded in (False, True):
        bench.given.graph = recorded
        trainer = bench.make_trainer(cell)
        losses[recorded] = [float(trainer.advance()["loss"]) for _ in range(COMPARED)]
        trainer.statistics()  # must be readable after a replay

    bench.given.graph = graph
    plain = losses[False]
    recorded = losses[True]
    gap = max(abs(a - b) / abs(a) for a, b in zip(plain, recorded, strict=True))
    return {"gap": gap, "plain": plain, "recorded": recorded}


def measure_speed(bench: Bench, head: str, name: str) -> dict[str, Any]:
    """Milliseconds of a step, plain and recorded, at the study's batch and others."""
    import torch

    given = bench.given
    graph = given.graph
    batch = given.batch
    on_gpu = given.device == "cuda"

    sizes = [(False, batch)]
    if graph and on_gpu:
        sizes += [(True, batch // 2), (True, batch), (True, 2 * batch)]

    found = {}
    for recorded, size in sizes:
        given.graph = recorded
        given.batch = size
        trainer = bench.make_trainer(make_cell(head, name, RATE, steps=100))
        advance(trainer, 6)
        start = time.perf_counter()
        advance(trainer, 40)
        found[f"{KINDS[recorded]} {size}"] = round(1000 * (time.perf_counter() - start) / 40, 3)

    given.graph = graph
    given.batch = batch
    if on_gpu:
        found["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def advance(trainer: Any, steps: int) -> None:
    """Make steps and wait for the last one."""
    for _ in range(steps):
        loss = trainer.advance()["loss"]
    float(loss)


def try_auxiliary(bench: Bench, name: str, rate: float, steps: int) -> dict[str, Any]:
    """The losses of a short training by auxiliary rate, and the best of these."""
    given = bench.given
    aux_before = given.aux
    aux_adamw_before = given.aux_adamw

    losses = {}
    for aux in AUXILIARY:
        given.aux = given.aux_adamw = aux
        losses[aux] = loss_of(bench, name, rate, steps)

    given.aux = aux_before
    given.aux_adamw = aux_adamw_before
    return {"best": min(losses, key=losses.__getitem__), "losses": losses}


def try_rates(bench: Bench, steps: int) -> dict[str, Any]:
    """The losses of a short training by Muon's rate, and the best of these."""
    losses = {rate: loss_of(bench, "muon", rate, steps) for rate in RATES}
    return {"best": min(losses, key=losses.__getitem__), "losses": losses}


def loss_of(bench: Bench, name: str, rate: float, steps: int) -> float:
    cell = make_cell(bench.given.heads[0], name, rate, steps, seed=100)
    return bench.train(bench.make_trainer(cell), cell)["loss"]


def learn(bench: Bench, rate: float, steps: int) -> dict[str, Any]:
    """Muon's success on validation scenes after so many steps, by all cores."""
    import torch

    from mesotron.vla.interface import VALIDATION_SEED
    from mesotron.vla.policy import make_act
    from mesotron.vla.rollout import evaluate

    given = bench.given
    start = time.time()
    cell = make_cell(given.heads[0], "muon", rate, steps, seed=100)
    trainer = bench.make_trainer(cell)
    loss = bench.train(trainer, cell)["loss"]
    trained = time.time() - start

    narrow = torch.autocast(given.device, torch.bfloat16, enabled=given.device == "cuda")
    act = narrow(make_act(trainer.policy, given.device))
    seeds = range(VALIDATION_SEED, VALIDATION_SEED + given.validation)
    world = bench.demos.world
    assert world is not None
    played = evaluate(act, world, seeds, execute=EXECUTE, batch=WAVE)

    return {
        "steps": steps,
        "success": played.success,
        "loss": loss,
        "tasks": {task: right / total for task, (right, total) in played.by_task.items()},
        "train_seconds": round(trained, 1),
        "seconds": round(time.time() - start, 1),
        "batch": train_config(given, cell).batch,
    }


def choose(curve: list[dict[str, Any]], affordable: float) -> dict[str, int]:
    """Budgets from Muon's learning curve; nothing while nothing was learned.

    Args:
        curve: steps and success of some trainings.
        affordable: steps that the study has time for.

    Returns:
        small: nearest to a success of 0.5; full: the first that is near the best, as long as one
        head's trainings (about 26 small and 20 full ones) fit into two thirds of the time, and the
        small one a third of it at most; long: where the curve was best, or twice the full one.
    """
    if not curve or max(point["success"] for point in curve) < LEARNED:
        return {}

    small = min(curve, key=lambda point: abs(point["success"] - 0.5))["steps"]
    best = max(curve, key=lambda point: point["success"])
    near = NEAR_END * best["success"]
    later = []
    for p in curve:
        if p["success"] >= near and p["steps"] > small:
            later.append(p["steps"])

    full = min(later, default=2 * small)
    full = min(full, max(100, round(affordable * 2 / 3 / (20 + 26 / 3), -2)))
    small = min(small, full // 3)
    return {"small": int(small), "full": int(full), "long": int(max(2 * full, best["steps"]))}


if __name__ == "__main__":
    main()
