"""DAPO's soft overlong penalty (arXiv 2503.14476, equation 13)."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "overlong",
    about="0, then to −1 over the last `overlong_buffer` tokens; −1 if truncated",
    note="DAPO, arXiv 2503.14476, equation 13",
    needs_gold=False,
)
def overlong(completion: Judged) -> float:
    if completion.facts.truncated:
        return -1.0

    buffer = completion.config.overlong_buffer
    excess = len(completion.ids) - (completion.max_tokens - buffer)
    share = min(1.0, max(0.0, excess / buffer))
    return 0.0 - share  # not -0.0
