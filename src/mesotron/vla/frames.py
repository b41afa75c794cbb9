"""Demonstrations as tensors: batches by row, and an order of rows that depends on the step alone.

What a step reads is a function of (seed, step), so that a resumed run needs no memory of the data.

Legend: M observations, B batch, C cameras, K actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mesotron.vla.interface import Demos
from mesotron.vla.policy import Body, Inputs, Targets

# Images that need more than this stay in the host's memory and go to the GPU batch by batch.
MOST_ON_DEVICE = 16 * 2**30


class Frames:
    """All observations of some demonstrations, ready to be batched.

    Args:
        demos: as loaded.
        chunk: K.
        encode: instructions to word numbers, the policy's own.
        device: where batches go; images lie there too if they fit.
    """

    def __init__(
        self,
        demos: Demos,
        chunk: int,
        encode: Callable[[list[str]], Tensor],
        device: torch.device,
    ) -> None:
        actions, real = demos.chunks(np.arange(len(demos)), chunk)
        self.device = device
        self._images = stack_cameras(demos, device)
        self._state = torch.from_numpy(demos.state).float().to(device)
        self._words = encode(demos.tasks).to(device)
        self._task = torch.from_numpy(demos.task_index).long().to(device)
        self._actions = torch.from_numpy(actions).float().to(device)
        self._real = torch.from_numpy(real).to(device)
        where = demos.where
        self._where = None if where is None else torch.from_numpy(where).float().to(device)

    def __len__(self) -> int:
        return len(self._state)

    @property
    def is_on_device(self) -> bool:
        """Whether a batch is made without the host's memory."""
        return self._images is None or self._images.device.type == self.device.type

    @property
    def has_where(self) -> bool:
        """Whether the position of the named object is known."""
        return self._where is not None

    def batch(self, rows: Tensor) -> tuple[Inputs, Targets]:
        """Some observations and what is to be learned from them; `rows` int64 [B]."""
        here = rows.to(self.device)
        images = None
        if self._images is not None:
            images = self._images[rows.to(self._images.device)].to(self.device)
        where = None if self._where is None else self._where[here]
        told = self._task[here]
        words = self._words
        if len(words) > len(rows):  # fewer to encode one by one
            words, told = words[told], torch.arange(len(rows), device=self.device)
        seen = Inputs(images, self._state[here], words, told)
        return seen, Targets(self._actions[here], self._real[here], where)


def stack_cameras(demos: Demos, device: torch.device) -> Tensor | None:
    """Images as uint8 [M, C, 3, H, W], on the device if they fit there; None without cameras."""
    if not demos.images:
        return None
    size = sum(images.nbytes for images in demos.images.values())
    home = device if size <= MOST_ON_DEVICE else torch.device("cpu")
    parts = [torch.from_numpy(images).to(home) for images in demos.images.values()]
    return torch.stack(parts, dim=1).permute(0, 1, 4, 2, 3).contiguous()


def body_of(demos: Demos) -> Body:
    """What a policy for these demonstrations sees and moves."""
    shapes = {name: images.shape[1:3] for name, images in demos.images.items()}
    sizes = {side for shape in shapes.values() for side in shape}
    if len(sizes) > 1:
        spelled = ", ".join(f"{name} {h}x{w}" for name, (h, w) in shapes.items())
        raise ValueError(f"the policy takes square images of one size, and these are {spelled}")
    pixels = sizes.pop() if sizes else 0
    return Body(tuple(shapes), pixels, demos.state.shape[1], demos.action.shape[1])


class Order:
    """Rows in a new random order each epoch, by step.

    Args:
        num_rows: M.
        seed: of the orders.

    Example:
        >>> order = Order(5, seed=0)
        >>> sorted(torch.cat([order.rows(0, 3), order.rows(1, 3)])[:5].tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed = num_rows, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.long)

    def rows(self, step: int, size: int) -> Tensor:
        """The rows of a step, int64 [size]; steps count from 0."""
        found: list[Tensor] = []
        first, missing = step * size, size
        while missing:
            epoch, place = divmod(first, self.num_rows)
            found.append(self._permuted(epoch)[place : place + missing])
            first, missing = first + len(found[-1]), missing - len(found[-1])
        return torch.cat(found)

    def _permuted(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            self._permutation = torch.randperm(self.num_rows, generator=generator)
            self._epoch = epoch
        return self._permutation


def mix(seed: int, number: int) -> int:
    """A seed of 32 bits that depends on both numbers; torch's CPU generator reads no more bits.

    Example:
        >>> mix(0, 1) == mix(1, 0)
        False
    """
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
