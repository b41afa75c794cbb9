"""Config of `mesotron plan`: a training run's own, and how fast it is taken to be."""

from dataclasses import dataclass

from mesotron.config.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig(TrainConfig):
    """Reckon a run before it starts: updates, completions, tokens, hours, dollars."""

    calibrate: bool = False
    """Make three steps of the run on this machine, and reckon with their pace."""

    seconds_per_step: float | None = None
    """The pace, if it is known: seconds of one optimizer step."""

    tokens_per_second: float | None = None
    """The pace in another way: tokens sampled in a second, training included."""

    completion_tokens: float | None = None
    """Tokens of a usual completion; measured by --calibrate, else half of the longest."""
