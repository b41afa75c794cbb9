"""A step recorded once as a CUDA graph and replayed: one launch in place of more than a thousand.

A small policy's step takes the GPU a few milliseconds and Python ten times that. Recording wants
work of fixed shapes that nothing on the host decides; who calls this promises that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Work = Callable[[], dict[str, Tensor]]
# Ordinary steps before the recording: they make state and plans, choose kernels and compile them.
WARM_UPS = 3


class Replay:
    """Does the same work again and again, from the fourth time on as a graph.

    Args:
        work: reads and writes tensors that stay where they are. What it does on the host is done
            while it is recorded and not when it is replayed.
        device: a CUDA device.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work = work
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: dict[str, Tensor] = {}
        self._num_calls = 0

    def __call__(self) -> dict[str, Tensor]:
        """Do the work once; returns what it found, in tensors that the next call overwrites."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            if self._num_calls < WARM_UPS:
                self._found = self._work()
            else:
                self._recorded().replay()
        here.wait_stream(self._stream)
        self._num_calls += 1
        return self._found

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """The graph; recording does nothing but record."""
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._found = self._work()
            self._graph = graph
        return self._graph
