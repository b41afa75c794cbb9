"""Sites: every place of a model where a parameter is stored, with the modules around it.

Routing asks questions that a bare `named_parameters()` cannot answer: which module type owns this
tensor, which attention block encloses it, which config describes that block. A `Site` carries the
answers. Wrappers that change names but not meaning (PEFT, torch.compile, checkpointing,
parametrizations) are looked through. Optional libraries are recognised here and only if somebody
has already imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Children under these names play the role of the module above them.
_TRANSPARENT = frozenset(
    {"base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module"}
)


@dataclass(frozen=True)
class Site:
    """One stored occurrence of a parameter.

    Args:
        name: the full dotted name, as `named_parameters` spells it.
        leaf: the attribute on the owner, e.g. "weight".
        param: the tensor itself.
        owner: the module that stores it.
        path: names from the root to the owner, wrappers left out.
        modules: the modules of `path`, root first; one longer than `path`.
    """

    name: str
    leaf: str
    param: nn.Parameter
    owner: nn.Module
    path: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def called(self) -> str:
        """What the owner is called by its parent: "q_proj" in
        `layers.0.self_attn.q_proj.weight`."""
        return self.path[-1] if self.path else ""

    @property
    def parent(self) -> nn.Module:
        """The module that holds the owner, wrappers left out; the owner itself at the root."""
        return self.modules[-2] if len(self.modules) > 1 else self.owner

    @property
    def config(self) -> Any | None:
        """The Transformers config of the nearest enclosing module, so that a vision tower answers
        for itself."""
        config_class = imported_class("transformers.configuration_utils", "PreTrainedConfig")
        if config_class is None:
            return None
        for module in reversed(self.modules):
            config = getattr(module, "config", None)
            if isinstance(config, config_class):
                return self._layer_config(config)
        return None

    def _layer_config(self, config: Any) -> Any:
        """Configs whose layers differ (Gemma 4) answer per layer; others for all layers."""
        if not getattr(config, "is_heterogeneous", False):
            return config
        marks = [getattr(module, "layer_idx", None) for module in reversed(self.modules)]
        layer = next((mark for mark in marks if isinstance(mark, int)), None)
        return config if layer is None else config.per_layer_config[layer]


def find_int(sources: Iterable[object], names: Iterable[str]) -> int | None:
    """The first positive integer that one of `sources`, modules or configs, keeps under one of
    `names`."""
    for source in sources:
        for name in names:
            try:
                value = getattr(source, name, None)
            except RuntimeError:  # a config whose layers differ has no answer for the whole model
                value = None
            if isinstance(value, int) and value > 0:
                return value
    return None


def words(text: str) -> frozenset[str]:
    """A set of names, written as one line."""
    return frozenset(text.split())


def imported_class(module: str, name: str) -> type | None:
    """A class of an optional library, or None when nobody imported that library.

    An object of the class can only exist after its module was imported, so nothing is missed and
    nothing is loaded.
    """
    loaded = sys.modules.get(module)
    return getattr(loaded, name, None) if loaded is not None else None


def is_a(module: nn.Module, library: str, name: str) -> bool:
    """Whether `module` is an instance of an optional library's class."""
    cls = imported_class(library, name)
    return cls is not None and isinstance(module, cls)


def walk(model: nn.Module) -> Iterator[Site]:
    """Every (module, parameter) pair of the model; tied parameters and shared modules once per
    name.

    Example:
        >>> [site.name for site in walk(nn.Sequential(nn.Linear(2, 3)))]
        ['0.weight', '0.bias']
    """
    yield from _walk(model, "", (), (model,))


def _walk(
    module: nn.Module, prefix: str, path: tuple[str, ...], chain: tuple[nn.Module, ...]
) -> Iterator[Site]:
    for leaf, param in module._parameters.items():
        if param is not None:
            yield Site(prefix + leaf, leaf, param, module, path, chain)
    for name, child in module._modules.items():
        if child is None:
            continue
        below = f"{prefix}{name}."
        if name == "parametrizations":
            yield from _parametrized(module, child, below, path, chain)
        elif name == "modules_to_save" and isinstance(child, nn.ModuleDict):
            for adapter, copy in child.items():  # a trained copy plays its original's role
                yield from _walk(copy, f"{below}{adapter}.", path, (*chain[:-1], copy))
        elif name in _TRANSPARENT or isinstance(module, (DataParallel, DistributedDataParallel)):
            yield from _walk(child, below, path, (*chain[:-1], child))
        else:
            yield from _walk(child, below, (*path, name), (*chain, child))


def _parametrized(
    module: nn.Module,
    lists: nn.Module,
    prefix: str,
    path: tuple[str, ...],
    chain: tuple[nn.Module, ...],
) -> Iterator[Site]:
    """`torch.nn.utils.parametrize` keeps `weight` as `parametrizations.weight.original`: still this
    module's weight."""
    for leaf, originals in lists._modules.items():
        for part, param in originals._parameters.items() if originals is not None else ():
            if param is not None:
                spelled = leaf if part == "original" else f"{leaf}.{part}"
                yield Site(f"{prefix}{leaf}.{part}", spelled, param, module, path, chain)
