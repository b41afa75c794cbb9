"""Objectives by name: one file each, which holds the loss and its published values.

The name of the file is the name in the config. To add an objective, add a file:

    @objective("mine", about="what it does", paper="arXiv ...", epsilon=0.2, epsilon_high=0.2)
    def mine(inputs: LossInputs) -> PolicyLoss:
        values = inputs.clipped()
        return PolicyLoss(inputs.mean_over_sequences(inputs.weigh(values)), inputs.clip_metrics())

These files do not import torch at the top: `mesotron plan` reads their values without it. `inputs`
(`grpo.LossInputs`) has what losses share, and tensors have methods for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mesotron.config.registry import OBJECTIVES

if TYPE_CHECKING:
    from torch import Tensor

    from mesotron.config import ObjectiveConfig

Voter = Literal["policy", "anchor"]


class Mean(NamedTuple):
    """A mean of token losses."""

    value: Tensor  # of this micro-batch
    share: Tensor  # its part in the loss of the whole update


class PolicyLoss(NamedTuple):
    """The policy term of a loss, and metrics over all processes."""

    mean: Mean
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, the published values it is used with, and where its labels come from."""

    name: str
    about: str  # one line for tables
    paper: str
    loss: Callable[..., PolicyLoss]
    trl_loss: str  # the loss_type that TRL is told
    epsilon: float | None = None  # clip width; None where the loss has no lower clip
    epsilon_high: float | None = None  # upper clip width, or the largest ratio itself
    beta: float = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    level: Literal["token", "sequence"] = "token"  # of importance ratios
    cov_share: float | None = None  # of the tokens that are treated differently
    voters: tuple[Voter, ...] = ()  # whose answers label the prompts; empty where rewards train
    momentum_schedule: Literal["constant", "cosine"] = "constant"  # of the anchor
    one_update: Literal["", "equals grpo", "has no effect"] = ""  # per rollout
    weighs_sequences: bool = False  # by itself, so the sampler is corrected token by token
    options: dict[str, float] = field(default_factory=dict)  # of the loss, with their defaults

    @property
    def is_self_labeled(self) -> bool:
        return bool(self.voters)

    @property
    def is_anchored(self) -> bool:
        """Whether a slow average of the policy votes, too."""
        return "anchor" in self.voters

    @property
    def anchor_labels(self) -> bool:
        """Whether the anchor votes alone."""
        return self.voters == ("anchor",)

    @property
    def shares_group(self) -> bool:
        """Whether policy and anchor together write the completions of a group."""
        return self.voters == ("policy", "anchor")


def objective(
    name: str, *, about: str, paper: str, trl_loss: str = "", **published: Any
) -> Callable[[Callable[..., PolicyLoss]], Callable[..., PolicyLoss]]:
    """Registers a loss as an objective; `published` are fields of `Objective`."""

    def register(loss: Callable[..., PolicyLoss]) -> Callable[..., PolicyLoss]:
        registered = Objective(
            name=name,
            about=about,
            paper=paper,
            loss=loss,
            trl_loss=trl_loss or name,
            **published,
        )
        OBJECTIVES.add(name, registered, loss.__module__)

        return loss

    return register


def get(name: str) -> Objective:
    return OBJECTIVES[name]


def get_loss(config: ObjectiveConfig) -> Objective:
    """Whose loss a config trains with: the self-labeled ones may borrow GMPO's."""
    return get(config.name if config.loss == "grpo" else config.loss)


def resolve(objective: str | ObjectiveConfig, generations: int) -> ObjectiveConfig:
    """Fill open fields with the published values; raise ValueError for what contradicts the name.

    `generations` are the completions per prompt, the anchor's included.

    Example:
        >>> resolved = resolve("mgrpo", generations=8)
        >>> resolved.beta, resolved.momentum_generations
        (0.005, 2)
    """
    given = as_config(objective)
    published = get(given.name)
    clip = get_loss(given)
    N = anchor_generations(given, published, generations)

    high = clip.epsilon_high if given.epsilon is None else given.epsilon
    resolved = replace(
        given,
        epsilon=clip.epsilon if given.epsilon is None else given.epsilon,
        epsilon_high=high if given.epsilon_high is None else given.epsilon_high,
        beta=published.beta if given.beta is None else given.beta,
        cov_share=given.cov_share or published.cov_share,
        scale_rewards=given.scale_rewards or published.scale_rewards,
        momentum_generations=N,
    )

    if published.shares_group:
        if generations <= N:
            raise ValueError(f"objective.momentum_generations = {N} leaves none of {generations}")
        if not given.loss_on_momentum and generations - N < 2:
            raise ValueError(
                "one completion has no baseline: raise rollout.generations to 4 or more"
            )

    return resolved


def as_config(objective: str | ObjectiveConfig) -> ObjectiveConfig:
    from mesotron.config import ObjectiveConfig  # whose defaults are checked by this module

    if isinstance(objective, ObjectiveConfig):
        return objective

    return ObjectiveConfig(name=objective)


def anchor_generations(config: ObjectiveConfig, objective: Objective, generations: int) -> int:
    """How many completions of each prompt the anchor samples."""
    if not objective.is_anchored:
        return 0
    if config.momentum_generations is not None:
        return config.momentum_generations

    if objective.shares_group:
        return max(1, generations // 4)

    return generations


def trained_generations(config: ObjectiveConfig, generations: int) -> int:
    """How many completions per prompt enter the loss: TRL's `num_generations`."""
    if get(config.name).shares_group and not config.loss_on_momentum:
        return generations - (config.momentum_generations or 0)
    return generations
