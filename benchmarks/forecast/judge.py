"""Judges forecasts by what came, beside the naive one: it stays as it is."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.forecast.cases import NORMAL_80, Case
from benchmarks.forecast.fit import Model
from mesotron.watch import forecast as product
from mesotron.watch.detectors import wilson
from mesotron.watch.forecast import Forecast, forecast

ASKED = (0.1, 0.2, 0.5)
GROUPS: dict[str, Callable[["Judged"], bool]] = {
    "all": lambda one: True,
    "public": lambda one: one.is_public,
    "ours": lambda one: not one.is_public,
}
USUAL_PROBLEMS = 200  # of an evaluation that does not say how many it has


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A forecast and what came, in the reward's own units."""

    source: str
    name: str
    is_public: bool
    share: float
    outcome: str
    said: str
    chances: dict[str, float]
    scale: float  # of the reward
    present: float
    end: float
    interval: tuple[float, float, float]  # middle, low, high
    naive: tuple[float, float]
    score: float | None  # the last held-out one
    score_interval: tuple[float, float, float] | None
    naive_score: tuple[float, float] | None
    hopeless: bool

    def to_record(self) -> dict[str, Any]:
        record = asdict(self)
        for name, value in record.items():
            if isinstance(value, float):
                record[name] = float(f"{value:.5g}")
            elif isinstance(value, tuple):
                record[name] = [float(f"{x:.5g}") for x in value]
            elif isinstance(value, dict):
                record[name] = {key: round(x, 4) for key, x in value.items()}

        return record


@contextmanager
def fitted(model: Model) -> Iterator[None]:
    """Forecasts with these coefficients; their track record is not known yet."""
    usual = product.fitted
    product.fitted = lambda: model | {"record": [{"share": 0.2}]}  # type: ignore[assignment]
    try:
        yield
    finally:
        product.fitted = usual


def judge(case: Case, model: Model) -> Judged:
    """Ask the product, by the rows as they were logged."""
    with fitted(model):
        given = forecast(case.seen(), steps=case.steps)

    assert given.reward is not None, given.why
    assert given.present is not None
    present = given.present
    score, score_interval, naive_score = judge_score(case, given)

    return Judged(
        source=case.run.source,
        name=case.run.name,
        is_public=case.run.is_public,
        share=case.share,
        outcome=case.outcome,
        said=given.outcome,
        chances=dict(given.probabilities),
        scale=case.present.scale,
        present=present,
        end=case.end,
        interval=(given.reward.value, given.reward.low, given.reward.high),
        naive=(present - case.naive, present + case.naive),
        score=score,
        score_interval=score_interval,
        naive_score=naive_score,
        hopeless=given.is_hopeless,
    )


def judge_score(case: Case, given: Forecast) -> tuple[Any, Any, Any]:
    """The held-out score that came, its interval and the naive one; None without evaluations."""
    if case.final_score is None or given.heldout is None:
        return None, None, None

    now = float(case.scores[-1, 1])
    share = min(max(now, 0.05), 0.95)
    naive = NORMAL_80 * math.sqrt(2 * share * (1 - share) / problems_of(case))
    interval = (given.heldout.value, given.heldout.low, given.heldout.high)
    return case.final_score, interval, (now - naive, now + naive)


def problems_of(case: Case) -> float:
    for row in case.run.rows:
        if "eval/problems" in row:
            return row["eval/problems"]

    return USUAL_PROBLEMS


def summarize(judged: Sequence[Judged]) -> dict[str, Any]:
    """The figures of each group at each share."""
    summary: dict[str, Any] = {}
    for group, belongs in GROUPS.items():
        for share in ASKED:
            some = [one for one in judged if belongs(one) and one.share == share]
            summary[f"{group} at {share}"] = figures(some)

    return summary


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    scored = [one for one in judged if one.score is not None]
    hopeless = [one for one in judged if one.hopeless]
    return {
        "runs": len(judged),
        "outcomes": dict(Counter(one.outcome for one in judged)),
        "said": dict(Counter(one.said for one in judged)),
        "inside": counted([lies(one.end, *one.interval[1:]) for one in judged]),
        "naive inside": counted([lies(one.end, *one.naive) for one in judged]),
        "hits": counted([one.said == one.outcome for one in judged]),
        "naive hits": counted([one.outcome == "plateau" for one in judged]),
        "confusion": confusion(judged),
        "log loss": fmean(-math.log(max(one.chances[one.outcome], 1e-6)) for one in judged),
        "width": median((one.interval[2] - one.interval[1]) / one.scale for one in judged),
        "naive width": median((one.naive[1] - one.naive[0]) / one.scale for one in judged),
        "error": median(abs(one.end - one.interval[0]) / one.scale for one in judged),
        "naive error": median(abs(one.end - one.present) / one.scale for one in judged),
        "interval score": interval_score(judged, naive=False),
        "naive interval score": interval_score(judged, naive=True),
        "scored": len(scored),
        "score inside": counted([lies(one.score, *one.score_interval[1:]) for one in scored]),
        "naive score inside": counted([lies(one.score, *one.naive_score) for one in scored]),
        "hopeless": len(hopeless),
        "hopeless that learned": sum(one.outcome == "learn" for one in hopeless),
    }


def lies(value: float, low: float, high: float) -> bool:
    return low <= value <= high


def counted(hits: Sequence[bool]) -> dict[str, float] | None:
    """A share with Wilson's 95% interval."""
    if not hits:
        return None

    low, high = wilson(sum(hits), len(hits) - sum(hits))
    return {"value": fmean(hits), "low": low, "high": high}


def confusion(judged: Sequence[Judged]) -> dict[str, int]:
    """What was said and what came, as in "learn plateau"."""
    return dict(sorted(Counter(f"{one.said} {one.outcome}" for one in judged).items()))


def interval_score(judged: Sequence[Judged], naive: bool) -> float:
    """Width and ten times what lies outside, as a mean: the smaller the better. A miss counts at
    most one range of the reward."""
    scores = []
    for one in judged:
        low, high = one.naive if naive else one.interval[1:]
        miss = max(low - one.end, one.end - high, 0.0) / one.scale
        scores.append((high - low) / one.scale + 10 * min(miss, 1.0))

    return fmean(scores)


def record_of(summary: dict[str, Any], crossed: dict[str, Any]) -> list[dict[str, float]]:
    """What the package prints beside a forecast: the reporting half, and of the sources that were
    left out in turn those of others."""
    records = []
    for share in ASKED:
        record: dict[str, float] = {"share": share}
        groups = {"": summary[f"all at {share}"], "public_": crossed[f"public at {share}"]}
        for prefix, each in groups.items():
            record[f"{prefix}runs"] = each["runs"]
            for name in ("inside", "naive inside", "hits", "naive hits"):
                record[prefix + name.replace(" ", "_")] = round(each[name]["value"], 3)

        records.append(record)

    return records
