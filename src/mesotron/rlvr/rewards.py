"""Rewards: the weighted sum of named parts, each a number for a completion or no verdict at all.

A part reads the completion's facts and tokens (`PARTS`), or is a Python function of yours, given
as `module:function`. A completion whose gold cannot be read gets None: skipped, never rewarded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from mesotron.config.training import RewardConfig
from mesotron.rlvr.answers.facts import Facts, Judge
from mesotron.rlvr.answers.numbers import distance, other_unit, read_number
from mesotron.rlvr.own_reward import call_own, import_own

log = logging.getLogger("mesotron")
Scores = list[float | None]


@dataclass(frozen=True)
class Completion:
    """What the built-in parts read of one completion, and the settings they share."""

    facts: Facts
    ids: Sequence[int]
    gold: str | None
    config: RewardConfig
    max_tokens: int

    def graded(self, score: float) -> float | None:
        """The score, or None where there is no gold to compare with."""
        return score if self.facts.graded else None


def sparse(completion: Completion) -> float | None:
    """1 for a right answer in its format, else 0: no way up for a model that has neither."""
    return completion.graded(float(completion.facts.correct))


def two_part(completion: Completion) -> float | None:
    """`format_share` for the format, right or wrong, and 1 more for a right answer in it."""
    facts = completion.facts
    return completion.graded(
        completion.config.format_share * facts.formatted + float(facts.correct)
    )


def near(completion: Completion) -> float | None:
    """1 for a right answer, less for a wrong number the farther off it is: half at `near_unit`.

    1 / (1 + distance / near_unit), in the format alone: wrong answers can be told apart, so a group
    without a right one still teaches. Both 51% and 0.51 are one off 50%. What is no plain number,
    or has another unit than the gold, is right or earns nothing.
    """
    facts = completion.facts
    if facts.correct or not facts.formatted:
        return completion.graded(float(facts.correct))
    answer, gold = facts.number, read_number(completion.gold or "")
    if answer is None or gold is None or other_unit(answer, gold):
        return completion.graded(0.0)
    # Exact to the end: a number of a thousand digits is far off, and no float.
    off = distance(answer, gold) / Fraction(completion.config.near_unit)
    return completion.graded(float(1 / (1 + off)))


def correct(completion: Completion) -> float | None:
    """1 for a right answer wherever it stands, in the format or not."""
    facts = completion.facts
    return completion.graded(float(facts.correct or facts.correct_unformatted))


def format(completion: Completion) -> float | None:
    """1 for an answer in its format, right or wrong; needs no gold."""
    return float(completion.facts.formatted)


def length(completion: Completion) -> float | None:
    """1 - tokens / max_tokens for a right answer, 0 for a wrong one: short where it can be.

    A linear form of the length reward of Yeo et al., Demystifying Long Chain-of-Thought
    Reasoning, 2025 (arXiv 2502.03373); wrong answers are not pressed to be short.
    """
    share = min(1.0, len(completion.ids) / completion.max_tokens)
    return completion.graded(float(completion.facts.correct) * (1 - share))


def repetition(completion: Completion) -> float | None:
    """Minus the share of 4-grams of tokens that were there before, 0 to nearly -1 (2502.03373)."""
    from mesotron.probes import repetition  # torch, which a refused setting does not wait for

    return 0.0 - repetition([completion.ids])["completions/repetition"]


def overlong(completion: Completion) -> float | None:
    """DAPO's soft overlong punishment: 0, then from 0 to -1 over the last `overlong_buffer` tokens.

    Yu et al., DAPO, 2025 (arXiv 2503.14476), equation 13; a truncated completion gets -1.
    """
    if completion.facts.truncated:
        return -1.0
    buffer = completion.config.overlong_buffer
    excess = len(completion.ids) - (completion.max_tokens - buffer)
    return -min(1.0, max(0.0, excess / buffer)) or 0.0  # not -0.0


PARTS: dict[str, Callable[[Completion], float | None]] = {
    part.__name__: part
    for part in (two_part, sparse, near, correct, format, length, repetition, overlong)
}


class Reward:
    """A reward that is ready to be called; `make_reward` builds it from a config."""

    def __init__(self, config: RewardConfig, judge: Judge, max_tokens: int) -> None:
        check_reward(config, max_tokens)
        self.config = config
        self.judge = judge
        self.max_tokens = max_tokens
        self.weights = dict(zip(config.parts, config.weights or [1.0] * len(config.parts)))
        self._own = {name: import_own(name) for name in config.parts if name not in PARTS}

    def __call__(
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        golds: Sequence[str | None],
        truncated: Sequence[bool],
        rows: Sequence[Mapping[str, Any]] | None = None,
        facts: Sequence[Facts] | None = None,
    ) -> Scores:
        """The reward of each completion; None where any part has no verdict.

        Args:
            completions: the sampled texts.
            completion_ids: their token ids, without padding.
            golds: the right answers, None where there is none.
            truncated: whether each completion was cut at `max_tokens`.
            rows: each completion's row of the dataset, for functions of your own.
            facts: what the judge found; judged here if not given.

        Raises:
            ValueError: if a function of your own raises, or returns what is no list of finite
                numbers; it names the function and the completion's index.
        """
        parts = self.score_parts(completions, completion_ids, golds, truncated, rows, facts)
        weighed = [(weight, parts[name]) for name, weight in self.weights.items()]
        totals = [
            _total([(w, scores[i]) for w, scores in weighed]) for i in range(len(completions))
        ]
        if totals and all(total is None for total in totals):
            guilty = ", ".join(name for name, scores in parts.items() if None in scores)
            log.warning(
                "none of %d completions has a reward (%s has no verdict): nothing is learned from "
                "them; are the right answers readable?", len(totals), guilty,
            )  # fmt: skip
        return totals

    def score_parts(
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        golds: Sequence[str | None],
        truncated: Sequence[bool],
        rows: Sequence[Mapping[str, Any]] | None = None,
        facts: Sequence[Facts] | None = None,
    ) -> dict[str, Scores]:
        """Each part's own scores, unweighted, by the part's name; arguments as in the call."""
        if facts is None:
            facts = self.judge.judge(completions, golds, truncated)
        given = {
            "completions": list(completions),
            "completion_ids": list(completion_ids),
            "golds": list(golds),
            "truncated": list(truncated),
            "facts": list(facts),
            "rows": list(rows) if rows is not None else [{} for _ in completions],
        }
        _check_lengths(given)
        scored = [
            Completion(fact, ids, gold, self.config, self.max_tokens)
            for fact, ids, gold in zip(facts, completion_ids, golds)
        ]
        return {
            name: [PARTS[name](completion) for completion in scored]
            if name in PARTS
            else call_own(name, self._own[name], given, self.max_tokens)
            for name in self.weights
        }


def make_reward(config: RewardConfig, judge: Judge, max_tokens: int) -> Reward:
    r"""The reward that a config describes.

    Args:
        config: names of the parts and their weights.
        judge: turns completions into facts.
        max_tokens: longest completion, in tokens.

    Raises:
        ValueError: for an unknown part, a function that cannot be imported, or weights and
            shares that make no sense.

    Example:
        >>> from mesotron.rlvr.answers.formats import FORMATS
        >>> from mesotron.rlvr.answers.verify import Verifier
        >>> reward = make_reward(RewardConfig(), Judge(FORMATS["boxed"], Verifier()), 48)
        >>> texts = [r"\boxed{7}", r"\boxed{8}", "7"]
        >>> reward(texts, [[1], [1], [1]], ["7", "7", "7"], [False, False, False])
        [1.1, 0.1, 0.0]
    """
    return Reward(config, judge, max_tokens)


def _total(scores: list[tuple[float, float | None]]) -> float | None:
    values = [weight * score for weight, score in scores if score is not None]
    return math.fsum(values) if len(values) == len(scores) else None


def check_reward(config: RewardConfig, max_tokens: int) -> None:
    """Refuse unknown parts, and weights and shares that make no sense; see `make_reward`."""
    for name in config.parts:
        if name not in PARTS and ":" not in name:
            close = get_close_matches(name, PARTS, n=1)
            hint = f"did you mean {close[0]}" if close else f"there are {', '.join(PARTS)}"
            raise ValueError(f"there is no reward part {name!r}: {hint}, or give module:function")
    if not config.parts or len(set(config.parts)) < len(config.parts):
        raise ValueError(f"reward parts {config.parts}: name at least one, and none twice")
    if config.weights and len(config.weights) != len(config.parts):
        raise ValueError(
            f"{len(config.weights)} weights for {len(config.parts)} reward parts: give one for each"
        )
    if not all(map(math.isfinite, config.weights)):
        raise ValueError(f"reward weights {config.weights} must be finite numbers")
    if config.weights and not any(config.weights):
        raise ValueError(f"reward weights {config.weights} pay nothing: give one that is not 0")
    if not 0 <= config.format_share < 1:
        raise ValueError(
            f"format_share={config.format_share} must be from 0 to below 1: a right answer pays 1"
        )
    if not 0 < config.timeout < math.inf:
        raise ValueError(
            f"--reward.timeout {config.timeout:g} must be a finite number of seconds above 0: "
            "without it one answer could hold up the run for ever"
        )
    if not 0 < config.near_unit < math.inf:
        raise ValueError(
            f"near_unit={config.near_unit} must be a finite distance above 0, at which near pays "
            "one half"
        )
    if "overlong" in config.parts and not 0 < config.overlong_buffer <= max_tokens:
        raise ValueError(
            f"overlong_buffer={config.overlong_buffer} must be from 1 to the {max_tokens} tokens "
            "of the longest completion"
        )


def _check_lengths(given: dict[str, list[Any]]) -> None:
    sizes = {name: len(values) for name, values in given.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"a reward needs as many of each, and got {sizes}")
