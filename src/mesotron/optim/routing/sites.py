"""Sites: every place in a model where a parameter is stored, with the modules around it.

Routing needs more than `named_parameters()`: the type of the owning module, the enclosing attention
block, the config of that block. Wrappers that change names but not meaning (PEFT, torch.compile,
checkpointing, parametrizations) are looked through.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mesotron.spectral.routing import Site, words

NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("names.toml").read_text())
_TRANSPARENT = words(NAMES["transparent"])


@dataclass(frozen=True)
class ModuleSite(Site):
    leaf: str  # the attribute on the owner: "weight"
    param: nn.Parameter
    owner: nn.Module  # the module that stores it
    path: tuple[str, ...]  # names from the root to the owner, without wrappers
    modules: tuple[nn.Module, ...]  # the modules of `path`, root first; one longer than `path`

    @property
    def owner_name(self) -> str:
        """The owner's name in its parent: "q_proj" in `layers.0.self_attn.q_proj.weight`."""
        return self.path[-1] if self.path else ""

    @property
    def parent(self) -> nn.Module:
        """The module that holds the owner, without wrappers; the owner itself at the root."""
        if len(self.modules) > 1:
            return self.modules[-2]

        return self.owner

    @property
    def config(self) -> Any | None:
        """The Transformers config of the nearest enclosing module (a vision tower has its own)."""
        config_class = imported_class("transformers.configuration_utils", "PreTrainedConfig")
        if config_class is None:
            return None

        configs = (getattr(module, "config", None) for module in reversed(self.modules))
        config = next((c for c in configs if isinstance(c, config_class)), None)
        if not getattr(config, "is_heterogeneous", False):
            return config

        # Layers with different configs (Gemma 4).
        indices = [getattr(module, "layer_idx", None) for module in reversed(self.modules)]
        layer = next((index for index in indices if isinstance(index, int)), None)

        if layer is None:
            return config

        return config.per_layer_config[layer]  # type: ignore[union-attr]


def find_int(sources: Iterable[object], names: Iterable[str]) -> int | None:
    """The first positive integer attribute among `names` of `sources` (modules or configs)."""
    for source in sources:
        for name in names:
            try:
                value = getattr(source, name, None)
            except RuntimeError:  # a config with different layers has no value for the whole model
                value = None

            if isinstance(value, int) and value > 0:
                return value

    return None


def imported_class(module: str, name: str) -> type | None:
    """A class of an optional library, or None if that is not imported (then no instance exists)."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return getattr(loaded, name, None)

    return None


def is_a(module: nn.Module, library: str, name: str) -> bool:
    cls = imported_class(library, name)
    return cls is not None and isinstance(module, cls)


def walk(
    module: nn.Module,
    prefix: str = "",
    path: tuple[str, ...] = (),
    chain: tuple[nn.Module, ...] = (),
) -> Iterator[ModuleSite]:
    """Every (module, parameter) pair of a model; tied parameters once per name. `chain` holds the
    modules above and `module` itself."""
    chain = chain or (module,)
    own = ((leaf, leaf, param) for leaf, param in module._parameters.items())
    yield from _sites(own, prefix, path, chain)

    for name, child in module._modules.items():
        if child is None:
            continue

        below = f"{prefix}{name}."
        if name == "parametrizations":
            yield from _sites(_originals(child), below, path, chain)
        elif name == "modules_to_save" and isinstance(child, nn.ModuleDict):
            for adapter, copy in child.items():  # a trained copy has its original's role
                yield from walk(copy, f"{below}{adapter}.", path, (*chain[:-1], copy))
        elif name in _TRANSPARENT or isinstance(module, (DataParallel, DistributedDataParallel)):
            yield from walk(child, below, path, (*chain[:-1], child))
        else:
            yield from walk(child, below, (*path, name), (*chain, child))


def _sites(
    parameters: Iterable[tuple[str, str, nn.Parameter | None]],
    prefix: str,
    path: tuple[str, ...],
    chain: tuple[nn.Module, ...],
) -> Iterator[ModuleSite]:
    """The sites of the last module of a chain, from attributes, names and parameters."""
    for leaf, name, param in parameters:
        if param is not None:
            yield ModuleSite(
                name=prefix + name,
                shape=tuple(param.shape),
                leaf=leaf,
                param=param,
                owner=chain[-1],
                path=path,
                modules=chain,
            )


def _originals(parametrizations: nn.Module) -> Iterator[tuple[str, str, nn.Parameter | None]]:
    """`parametrizations.weight.original` is still its module's weight."""
    for leaf, originals in parametrizations._modules.items():
        if originals is None:
            continue

        for part, param in originals._parameters.items():
            plain = leaf if part == "original" else f"{leaf}.{part}"
            yield plain, f"{leaf}.{part}", param
