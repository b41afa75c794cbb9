"""Short correct answers: a linear form of the reward of Yeo et al., 2025 (arXiv 2502.03373)."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "length",
    about="1 − tokens / max_tokens for a correct answer, else 0",
    note="after arXiv 2502.03373, linear",
)
def length(completion: Judged) -> float:
    share = min(1.0, len(completion.ids) / completion.max_tokens)
    return float(completion.facts.correct) * (1 - share)
