"""The reward of a completion: a weighted sum of named parts.

A part is built in (`builtin/`) or a user's own (`own.py`). A completion without a verdict from any
part, such as one whose gold answer cannot be read, gets None and is skipped.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean, pvariance
from typing import Any

from mesotron.answers.facts import Facts, Judge
from mesotron.config import RewardConfig, TrainConfig
from mesotron.config.base import suggest
from mesotron.config.registry import REWARDS
from mesotron.rewards.own import OwnReward, Scores, ToScore, try_own
from mesotron.rewards.registry import Judged
from mesotron.tasks.problem import Problem, digest, own_row

log = logging.getLogger("mesotron")

HUGE = 1e30
MAX_WORDS = 20_000  # of a text that are given to the reward as tokens
MAX_UNSCORED = 3  # calls at the start without one reward, after which a run stops


class Reward:
    """A reward ready to be called; `make_reward` builds it from a config."""

    def __init__(self, config: RewardConfig, judge: Judge, max_tokens: int) -> None:
        check_reward(config)
        self.config = config
        self.judge = judge
        self.max_tokens = max_tokens
        self.weights = dict(zip(config.parts, config.weights or [1.0] * len(config.parts)))
        self.own = {name: OwnReward(name) for name in config.parts if name not in REWARDS}
        self.built_in = {name: REWARDS[name] for name in config.parts if name in REWARDS}

        # Surrounds each call of a user's function, with its name.
        self.waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.latest: dict[str, Scores] = {}  # of the last call, by part
        self.unscored = 0.0  # calls up to now if none gave a reward

    def __call__(
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        golds: Sequence[str | None],
        truncated: Sequence[bool],
        rows: Sequence[Mapping[str, Any]] | None = None,
        facts: Sequence[Facts] | None = None,
    ) -> Scores:
        """The reward of each completion; None where any part has no verdict. `completion_ids` are
        without padding, `golds` None where unknown, `truncated` True where cut at `max_tokens`.
        `rows` of the dataset are for your own functions; `facts` are the judge's if not given.
        ValueError if your function raised, or did not return one finite number or None each."""
        if facts is None:
            facts = self.judge.judge(completions, golds, truncated)
        if rows is None:
            rows = [{} for _ in completions]

        batch = ToScore(
            completions=completions,
            completion_ids=completion_ids,
            golds=golds,
            truncated=truncated,
            facts=facts,
            rows=rows,
            max_tokens=self.max_tokens,
        )
        self.latest = {name: self._score(name, batch) for name in self.weights}

        totals = weighted_sums(self.latest, self.weights, len(completions))
        self._count_unscored(totals)
        return totals

    def _score(self, name: str, batch: ToScore) -> Scores:
        if name in self.own:
            with self.waiting(f"the reward {name}"):
                return self.own[name](batch)

        part = self.built_in[name]
        scores: Scores = []
        for completion in self._judged(batch):
            has_verdict = completion.facts.graded or not part.needs_gold
            scores.append(part.score(completion) if has_verdict else None)

        return scores

    def _judged(self, batch: ToScore) -> list[Judged]:
        judged = []
        columns = zip(batch.facts, batch.completion_ids, batch.golds, batch.rows, strict=True)
        for facts, ids, gold, row in columns:
            completion = Judged(
                facts=facts,
                ids=ids,
                gold=gold or "",
                config=self.config,
                max_tokens=self.max_tokens,
                played=row.get("played"),
            )
            judged.append(completion)

        return judged

    def _count_unscored(self, totals: Scores) -> None:
        """Count calls without one reward, until one gives a reward; warn of the first."""
        if not totals:
            return

        if any(total is not None for total in totals):
            self.unscored = -math.inf
            return

        self.unscored += 1
        if self.unscored != 1:
            return

        without_verdict = []
        for name, scores in self.latest.items():
            if None in scores:
                without_verdict.append(name)

        names = ", ".join(without_verdict)

        if ":" in names:
            fix = ""
        else:
            fix = ": check that the gold answers can be parsed"

        message = "none of %d completions has a reward: %s gave no verdict%s"
        log.warning(message, len(totals), names, fix)


def weighted_sums(parts: Mapping[str, Scores], weights: Mapping[str, float], count: int) -> Scores:
    """Sums over the parts, None where one has no verdict. They stay finite; the trainer narrows
    them further, and warns."""
    totals: Scores = []
    for i in range(count):
        terms = []
        for name, weight in weights.items():
            score = parts[name][i]
            if score is not None:
                terms.append(max(-HUGE, min(HUGE, weight * score)))

        is_whole = len(terms) == len(weights)
        totals.append(math.fsum(terms) if is_whole else None)

    return totals


def make_reward(config: RewardConfig, judge: Judge, max_tokens: int) -> Reward:
    r"""Build the reward that a config describes, for completions of up to `max_tokens`.

    Example:
        >>> from mesotron.answers.formats import FORMATS
        >>> from mesotron.answers.verify import Verifier
        >>> reward = make_reward(RewardConfig(), Judge(FORMATS["boxed"], Verifier()), 48)
        >>> texts = [r"\boxed{7}", r"\boxed{8}", "7"]
        >>> reward(texts, [[1], [1], [1]], ["7", "7", "7"], [False, False, False])
        [1.1, 0.1, 0.0]
    """
    return Reward(config, judge, max_tokens)


def score_texts(reward: Reward, texts: Sequence[str], problems: Sequence[Problem]) -> Scores:
    """The reward of texts that no model wrote; their words stand for tokens."""
    return reward(
        texts,
        [word_ids(text) for text in texts],
        [problem.gold for problem in problems],
        [False] * len(texts),
        [own_row(problem) for problem in problems],
    )


def word_ids(text: str) -> list[int]:
    """Words as tokens, without a tokenizer."""
    return [digest(word) % 50_000 for word in text.split()[:MAX_WORDS]]


def call_alone(score: Callable[[], Scores]) -> Scores:
    return score()


def as_reward_function(
    reward: Reward, call: Callable[[Callable[[], Scores]], Scores] = call_alone
) -> Callable[..., Scores]:
    """A `Reward` as TRL calls reward functions, named "reward" in the metrics. `call` lets several
    processes fail together."""

    def scores(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> Scores:
        def score() -> Scores:
            totals = reward(
                completion_texts(completions),
                completion_ids,
                golds=columns["gold"],
                truncated=columns["truncated"],
                rows=columns["row"],
                facts=columns["facts"],
            )
            refuse_silence(reward)
            return totals

        totals = call(score)
        log_metric = columns.get("log_metric")
        if log_metric is not None:
            for name, value in part_metrics(reward, totals).items():
                log_metric(name, value)

        return totals

    scores.__name__ = "reward"
    return scores


def refuse_silence(reward: Reward) -> None:
    """Stop a run whose own reward has given no verdict since its start."""
    silent = []
    for name in reward.own:
        if set(reward.latest[name]) == {None}:
            silent.append(name)

    if silent and reward.unscored >= MAX_UNSCORED:
        raise ValueError(
            f"the reward {', '.join(silent)} returned None for every completion so far: return "
            "numbers, and None only to skip a completion"
        )


def part_metrics(reward: Reward, totals: Scores) -> dict[str, float]:
    """Mean of every part of the last call, the share of the total's variance that it explains
    (covariance with the total over the total's variance; shares add up to 1), and the largest."""
    scored = [i for i, total in enumerate(totals) if total is not None]
    if len(reward.weights) < 2 or not scored:
        return {}

    total = [totals[i] or 0.0 for i in scored]
    variance = pvariance(total)
    metrics: dict[str, float] = {}
    shares = []

    for name, weight in reward.weights.items():
        part = [reward.latest[name][i] or 0.0 for i in scored]
        metrics[f"reward/part/{name}"] = fmean(part)

        if variance > 0:
            product = weight * fmean(x * y for x, y in zip(part, total)) / variance
            share = product - weight * fmean(part) * fmean(total) / variance
            metrics[f"reward/part/{name}/variance_share"] = share
            shares.append(share)

    if shares:
        metrics["reward/largest_part"] = max(shares)

    return metrics


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """What the model wrote last. An episode may end with a tool's result, which is no answer."""
    texts = []
    for completion in completions:
        if isinstance(completion, str):
            texts.append(completion)
            continue

        last = completion[-1]
        is_result = last.get("role") == "tool"
        texts.append("" if is_result else str(last.get("content") or ""))

    return texts


def is_unfinished(completion: str | list[dict[str, Any]]) -> bool:
    """Whether an episode ends before the model's answer: with a call, or with its result."""
    if isinstance(completion, str):
        return False

    last = completion[-1]
    return last.get("role") == "tool" or bool(last.get("tool_calls"))


def check_reward(config: RewardConfig) -> None:
    """Refuse a name that is neither built in nor code."""
    for name in config.parts:
        if name not in REWARDS and ":" not in name:
            known = suggest(name, REWARDS) or f" (known: {', '.join(REWARDS)})"
            raise ValueError(f"--reward {name!r} is unknown{known}; or give file.py:name")


def own_parts(config: RewardConfig) -> list[str]:
    """The parts that are the user's own."""
    return [name for name in config.parts if name not in REWARDS]


def is_own(config: RewardConfig) -> bool:
    """Whether every part is the user's own, so that no answer format is needed."""
    return len(own_parts(config)) == len(config.parts)


def needs_gold(config: RewardConfig) -> bool:
    return any(name in REWARDS and REWARDS[name].needs_gold for name in config.parts)


def try_reward(config: RewardConfig, problem: Problem, max_tokens: int) -> None:
    """Call the user's own parts on one row."""
    for name in own_parts(config):
        try_own(name, problem, max_tokens)


def reads_answers(config: TrainConfig) -> bool:
    """Whether answers are searched for in completions; an environment and own rewards alone do not
    need them."""
    if config.task.env:
        return False

    return config.objective.is_self_labeled or not (
        config.task.has_own_data and is_own(config.reward)
    )
