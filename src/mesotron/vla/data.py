"""Demonstrations as tensors: batches by row, and an order of rows from seed and step alone."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mesotron.vla.interface import Demos
from mesotron.vla.policy import Body, Inputs, Targets

MAX_BYTES_ON_DEVICE = 16 * 2**30  # of images; more stay in host memory


class Frames:
    """Observations ready for batches on `device`; `encode` turns instructions into token ids."""

    def __init__(
        self, demos: Demos, chunk: int, encode: Callable[[list[str]], Tensor], device: torch.device
    ) -> None:
        actions, real = demos.chunks(np.arange(len(demos)), chunk)
        self.device = device
        self._images: Tensor | None = None

        if demos.images:
            size = sum(images.nbytes for images in demos.images.values())

            if size <= MAX_BYTES_ON_DEVICE:
                home = device
            else:
                home = torch.device("cpu")

            views = [torch.from_numpy(images).to(home) for images in demos.images.values()]

            # uint8 [M, C, 3, H, W]
            self._images = (
                torch.stack(views, dim=1)
                .permute(
                    0,
                    1,
                    4,
                    2,
                    3,
                )
                .contiguous()
            )

        self._state = torch.from_numpy(demos.state).float().to(device)
        self._text_ids = encode(demos.tasks).to(device)
        self._task = torch.from_numpy(demos.task_index).long().to(device)
        self._actions = torch.from_numpy(actions).float().to(device)
        self._real = torch.from_numpy(real).to(device)
        where = demos.where

        if where is None:
            self._where = None
        else:
            self._where = torch.from_numpy(where).float().to(device)

    def __len__(self) -> int:
        return len(self._state)

    @property
    def is_on_device(self) -> bool:
        return self._images is None or self._images.device.type == self.device.type

    def batch(self, rows: Tensor) -> tuple[Inputs, Targets]:
        """Observations and targets of `rows`, int64 [B]."""
        local = rows.to(self.device)
        images = None
        if self._images is not None:
            images = self._images[rows.to(self._images.device)].to(self.device)

        where = None if self._where is None else self._where[local]
        text_ids = self._text_ids

        text_index = self._task[local]
        if len(text_ids) > len(rows):  # cheaper to encode one per row
            text_ids = text_ids[text_index]
            text_index = torch.arange(len(rows), device=self.device)

        inputs = Inputs(images, self._state[local], text_ids, text_index)
        return inputs, Targets(self._actions[local], self._real[local], where)


def body_of(demos: Demos) -> Body:
    shapes = {name: images.shape[1:3] for name, images in demos.images.items()}
    sizes = {side for shape in shapes.values() for side in shape}
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {h}x{w}" for name, (h, w) in shapes.items())
        raise ValueError(f"images must be square and of one size, not {listed}")

    return Body(tuple(shapes), max(sizes, default=0), demos.state.shape[1], demos.action.shape[1])


class RowOrder:
    """Rows in a new random order each epoch, by step."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.long)

    def rows(self, step: int, size: int) -> Tensor:
        """The rows of a step, int64 [size]; steps count from 0."""
        parts: list[Tensor] = []
        first = step * size

        missing = size
        while missing:
            epoch, place = divmod(first, self.num_rows)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
                self._permutation = torch.randperm(self.num_rows, generator=generator)
                self._epoch = epoch

            parts.append(self._permutation[place : place + missing])
            first = first + len(parts[-1])
            missing = missing - len(parts[-1])

        return torch.cat(parts)


def mix_seed(seed: int, number: int) -> int:
    """A seed from two numbers; 32 bits, since torch's CPU generator uses no more."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
