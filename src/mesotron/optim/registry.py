"""What an update rule is, and how a file registers one.

A rule for matrices is one file in `rules`, with a class under `@rule`: the filter that its matrices
pass by default, and what follows the filter. A rule for everything else (vectors, embeddings,
heads) is one file in `auxiliary`. The file has the rule's name; `mesotron.config.rules` has the
registries, which know the names without torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES

State = dict[str, Any]  # of one parameter, as `torch.optim` keeps it
Group = dict[str, Any]  # a param group, as `torch.optim` keeps it


class Ruled(Protocol):
    """An optimizer that steps its matrices by one rule, such as `Muon`."""

    rule: str


Class = TypeVar("Class", bound=type[Ruled])


class AuxiliaryBatch(NamedTuple):
    """Parameters of one group and one device; the lists have one entry for each."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]  # an empty one is filled
    group: Group
    found_inf: Tensor | None  # a float tensor on the device; 1 leaves everything unchanged
    streams: Sequence[int]  # of the random rounding, from `rounding_seed`

    def pick(self, numbers: list[int]) -> "AuxiliaryBatch":
        return self._replace(
            params=[self.params[k] for k in numbers],
            grads=[self.grads[k] for k in numbers],
            states=[self.states[k] for k in numbers],
            streams=[self.streams[k] for k in numbers],
        )


class Lines(NamedTuple):
    """A state with one number for each line of the longer side of some blocks."""

    state: Tensor  # [blocks, long side], updated in place
    finite: Tensor | None  # a 0-d bool that masks the update; None: the gradient is finite


class Finish(Protocol):
    """Changes filtered blocks X, [B, m, n], by the lines of each parameter in the batch."""

    def __call__(self, X: Tensor, lines: list[Lines], beta2: float) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for matrices: momentum, a spectral filter, and what follows the filter."""

    name: str
    about: str
    optimizer: type[Ruled]
    filter: str  # by default
    finish: Finish | None  # None: the filtered direction is the step
    line_state: str  # the key of the state that `finish` reads
    sharded: bool  # steps DTensors
    products: bool  # steps LoRA's B A as one matrix


@dataclass(frozen=True, kw_only=True)
class AuxiliaryRule:
    """A rule for single elements, without a view of matrices.

    `update` steps a batch; its flag says whether PyTorch's fused kernel may run. `direction` is a
    sample of the step over the learning rate, from a sample of the gradient, for the statistics."""

    name: str
    about: str
    new_state: Callable[[Tensor], State]
    update: Callable[[AuxiliaryBatch, bool], None]
    direction: Callable[[AuxiliaryBatch, Tensor], Tensor]
    state_bytes: int  # for each weight, in float32
    lr: float | None = None  # beside matrices, if in another unit than theirs


def rule(
    name: str,
    *,
    about: str,
    filter: str = "muon",
    finish: Finish | None = None,
    line_state: str = "line_moment",
    sharded: bool = True,
    products: bool = True,
) -> Callable[[Class], Class]:
    """Register a rule for matrices, and the decorated class as the optimizer of that name.

    Args:
        name: of the rule, of its file and of the optimizer.
        about: what happens to hidden matrices, for tables of optimizers.
        filter: what the matrices pass by default; see `mesotron.spectral.FILTERS`.
        finish: what follows the filter, from one state for each line of the longer side.
        line_state: the key of that state.
        sharded: the rule steps matrices that are sharded over ranks (not with `finish`).
        products: the rule steps LoRA's B A as one matrix (not with `finish`).
    """

    def register(cls: Class) -> Class:
        cls.rule = name
        entry = Rule(
            name=name,
            about=about,
            optimizer=cls,
            filter=filter,
            finish=finish,
            line_state=line_state,
            sharded=sharded and finish is None,
            products=products and finish is None,
        )
        SPECTRAL_RULES.add(name, entry, cls.__module__)

        return cls

    return register


def auxiliary_rule(rule: AuxiliaryRule) -> AuxiliaryRule:
    """Register a rule for everything but matrices."""
    AUXILIARY_RULES.add(rule.name, rule, rule.update.__module__)
    return rule
