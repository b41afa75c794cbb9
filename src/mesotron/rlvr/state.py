"""State without pickle: a tree of plain values goes to NAME.json, its tensors to NAME.safetensors.

Nothing that is read can run code. A dict whose only key is one of the markers below is not plain
state: it stands for a tensor, a tuple, or a dict with keys that are not strings.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.runs.links import open_own

TENSOR = "__tensor__"
SHARD = "__shard__"  # a process's part of a sharded tensor
TUPLE = "__tuple__"
PAIRS = "__pairs__"


def save_state(folder: Path, name: str, tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    plain = take_tensors_out(tree, name, tensors)
    with open_own(folder / f"{name}.json", "w") as file:
        file.write(json.dumps(plain))

    if tensors:
        save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str) -> Any:
    with open_own(folder / f"{name}.json") as file:
        plain = json.loads(file.read())

    path = folder / f"{name}.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return put_tensors_back(plain, tensors)


def take_tensors_out(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with names in place of tensors, which are collected under these names."""
    if isinstance(tree, DTensor):
        tensors[path] = own_memory(tree.to_local())
        return {SHARD: path}

    if isinstance(tree, Tensor):
        tensors[path] = own_memory(tree)
        return {TENSOR: path}

    if tree is None or type(tree) in (bool, int, float, str):
        return tree

    if isinstance(tree, dict):
        return take_out_of_dict(tree, path, tensors)

    if type(tree) in (list, tuple):
        items = [take_tensors_out(item, f"{path}.{k}", tensors) for k, item in enumerate(tree)]
        if type(tree) is list:
            return items

        return {TUPLE: items}

    raise ValueError(f"{path} is a {type(tree).__name__}; checkpoints hold plain values, tensors")


def take_out_of_dict(tree: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    items = []
    for key, item in tree.items():
        items.append((key, take_tensors_out(item, f"{path}.{key}", tensors)))

    has_names = all(isinstance(key, str) for key in tree)
    if has_names:
        return dict(items)

    return {PAIRS: [list(item) for item in items]}


def put_tensors_back(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [put_tensors_back(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain

    if plain.keys() == {TENSOR}:
        return tensors[plain[TENSOR]]
    if plain.keys() == {SHARD}:
        return Shard(tensors[plain[SHARD]])
    if plain.keys() == {TUPLE}:
        return tuple(put_tensors_back(plain[TUPLE], tensors))

    pairs = plain[PAIRS] if plain.keys() == {PAIRS} else plain.items()
    return {key: put_tensors_back(item, tensors) for key, item in pairs}


@dataclass(frozen=True)
class Shard:
    """A process's part of a sharded tensor, before its placement is known."""

    local: Tensor

    def like(self, other: DTensor) -> DTensor:
        return DTensor.from_local(
            self.local.to(other.device),
            other.device_mesh,
            other.placements,
            run_check=False,
            shape=other.shape,
            stride=other.stride(),
        )


def own_memory(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with its own storage, which safetensors requires."""
    plain = tensor.detach().cpu().contiguous()
    is_part = plain.untyped_storage().nbytes() != plain.nbytes
    is_same = plain.data_ptr() == tensor.data_ptr()

    return plain.clone() if is_part or is_same else plain


# Random states of a process


def random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    keys = torch.from_numpy(np.asarray(keys).astype(np.int64))

    return {
        "python": random.getstate(),
        "numpy": (name, keys, *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])

    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
