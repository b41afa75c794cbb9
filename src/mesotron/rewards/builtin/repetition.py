"""Minus the share of repeated 4-grams, from 0 to nearly -1 (arXiv 2502.03373)."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "repetition",
    about="− share of the 4-grams of tokens that occurred before",
    note="arXiv 2502.03373",
    needs_gold=False,
)
def repetition(completion: Judged) -> float:
    from mesotron import probes  # imports torch, which config checks must not wait for

    share = probes.repetition([completion.ids])["completions/repetition"]
    return 0.0 - share  # not -0.0
