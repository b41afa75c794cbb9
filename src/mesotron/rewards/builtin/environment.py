"""What an environment pays."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "environment",
    about="what the environment of `--env` pays for the episode",
    note="the reward of every run with `--env`, unless it names others; an episode that failed has "
    "none",
    needs_gold=False,
)
def environment(completion: Judged) -> float | None:
    if completion.played is None:
        return None

    return completion.played.reward
