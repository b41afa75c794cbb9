"""State without pickle: a tree of plain values goes to JSON, its tensors to safetensors beside it.

A tensor in the JSON is its name in the safetensors file. Nothing that is read can run code, and
whatever is neither plain nor a tensor is refused when it is written, not when it is missed.
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

# How JSON says what it has no word for. A dictionary of such a key alone is never plain state.
TENSOR, TUPLE, PAIRS = "__tensor__", "__tuple__", "__pairs__"
SHARD = "__shard__"  # a process's own part of a tensor that is spread over several


def save_state(folder: Path, name: str, tree: Any) -> None:
    """Write a tree as NAME.json and, if it holds tensors, NAME.safetensors.

    Args:
        folder: where.
        name: of the files, without ending.
        tree: dictionaries, lists, tuples, numbers, words, None and tensors, at any depth.

    Raises:
        ValueError: something in the tree is of another kind; the text says where.
    """
    tensors: dict[str, Tensor] = {}
    plain = take_tensors_out(tree, name, tensors)
    (folder / f"{name}.json").write_text(json.dumps(plain))
    if tensors:
        save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str) -> Any:
    """Read what `save_state` wrote; tensors come back on the CPU."""
    path = folder / f"{name}.safetensors"
    tensors = load_file(path) if path.exists() else {}
    return put_tensors_back(json.loads((folder / f"{name}.json").read_text()), tensors)


def take_tensors_out(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON can hold it; the tensors go to `tensors` under their paths."""
    if isinstance(tree, DTensor):
        tensors[path] = alone(tree.to_local())
        return {SHARD: path}
    if isinstance(tree, Tensor):
        tensors[path] = alone(tree)
        return {TENSOR: path}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if isinstance(tree, dict):
        items = [
            (key, take_tensors_out(item, f"{path}.{key}", tensors)) for key, item in tree.items()
        ]
        words = all(isinstance(key, str) for key in tree)
        return dict(items) if words else {PAIRS: [[key, item] for key, item in items]}
    if type(tree) in (list, tuple):
        items = [take_tensors_out(item, f"{path}.{k}", tensors) for k, item in enumerate(tree)]
        return items if type(tree) is list else {TUPLE: items}
    kind = type(tree).__name__
    raise ValueError(f"{path} is of type {kind}; a checkpoint holds plain values and tensors")


def put_tensors_back(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree that `take_tensors_out` made plain."""
    if isinstance(plain, list):
        return [put_tensors_back(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {TENSOR}:
        return tensors[plain[TENSOR]]
    if plain.keys() == {SHARD}:
        return Shard(tensors[plain[SHARD]])
    if plain.keys() == {TUPLE}:
        return tuple(put_tensors_back(item, tensors) for item in plain[TUPLE])
    if plain.keys() == {PAIRS}:
        return {key: put_tensors_back(item, tensors) for key, item in plain[PAIRS]}
    return {key: put_tensors_back(item, tensors) for key, item in plain.items()}


@dataclass(frozen=True)
class Shard:
    """A process's own part of a spread tensor, before it is known how that is spread."""

    local: Tensor

    def like(self, spread: DTensor) -> DTensor:
        """The whole tensor of which this is a part, spread as another one is."""
        return DTensor.from_local(
            self.local.to(spread.device),
            spread.device_mesh,
            spread.placements,
            run_check=False,
            shape=spread.shape,
            stride=spread.stride(),
        )


def alone(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the CPU with a memory of its own: safetensors refuses shared ones."""
    found = tensor.detach().cpu().contiguous()
    shared = found.untyped_storage().nbytes() != found.nbytes
    return found.clone() if shared or found.data_ptr() == tensor.data_ptr() else found


def random_state() -> dict[str, Any]:
    """The states of every global random generator: Python's, NumPy's, torch's."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every global random generator where `random_state` found it."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
