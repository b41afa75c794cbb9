"""Every optimizer that the step benchmark can time, ours and others', by name.

Peers are imported on use; one that is not installed is left out with a message. All are built over
the same parameters with the same rate, momentum and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks._lib.shapes import Projection
from mesotron.optim import Muon, Pion
from mesotron.spectral import Filter, high_pass, muon, pion, polar_express

LR = 1e-4
MOMENTUM = 0.95
DECAY = 0.01
MEMORY_SHARE = 0.5  # of the free GPU memory, for the states held at one time
Build = Callable[[list[Tensor], list[Projection]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Peer:
    """An optimizer for hidden matrices.

    Args:
        build: (parameters, their shapes) -> optimizer.
        package: the module it needs, None if it is ours or torch's.
        filter: the filter whose float64 oracle its update is compared with; None has none.
        half: whether it multiplies in a 16-bit dtype whatever the hardware.
        aux: the rule of the embedding when that is stepped too, "adamw" or "sgd".
        cuda: whether it needs a GPU.
        per_head: whether attention is filtered head by head.
    """

    build: Build
    package: str | None = None
    filter: Filter | None = None
    half: bool = False
    aux: str = "adamw"
    cuda: bool = False
    per_head: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None if it can."""
        if self.package and not find_spec(self.package):
            return f"the package that provides {self.package!r} is not installed"
        if self.cuda and device.type != "cuda":
            return "needs a CUDA device"

        return None


def _ours(cls: type[Muon] | type[Pion], per_head: bool = False, **options: object) -> Build:
    def build(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
        views: dict[str, list[Tensor]] = {}
        for p, shape in zip(params, shapes, strict=True):
            views.setdefault(shape.view(per_head), []).append(p)

        rule = "pion" if cls is Pion else "muon"
        groups = [
            {
                "params": v,
                "view": k,
                "rule": rule,
                "name": k,
            }
            for k, v in views.items()
        ]

        return cls(groups, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **options)  # type: ignore

    return build


def _adamw_fused(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
    capturable = params[0].is_cuda  # so that a graph of it can be timed too
    return torch.optim.AdamW(
        params,
        lr=LR,
        weight_decay=DECAY,
        fused=True,
        capturable=capturable,
    )


def _torch_muon(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        params,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
    )


def _muon_optimizer(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
    from muon import SingleDeviceMuon  # pyright: ignore[reportMissingImports]

    # Its weight_decay is annotated as int by accident of the default 0.
    return SingleDeviceMuon(params, lr=LR, weight_decay=DECAY, momentum=MOMENTUM)  # type: ignore


def _pytorch_optimizer(method: Literal["newton_schulz", "gram_newton_schulz"]) -> Build:
    def build(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
        from pytorch_optimizer import Muon as KozistrMuon  # pyright: ignore[reportMissingImports]

        groups = [{"params": params, "use_muon": True}]

        return KozistrMuon(
            groups,
            lr=LR,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            ns_method=method,
        )

    return build


def _dion(name: str, **options: object) -> Build:
    """An optimizer of the package; its kernels are Triton's where `use_triton` is set."""

    def build(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
        import dion  # pyright: ignore[reportMissingImports]

        return getattr(dion, name)(params, lr=LR, weight_decay=DECAY, **options)

    return build


def _emerging_muon(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import (  # pyright: ignore
        Muon as EmergingMuon,
    )

    # A Triton kernel for its symmetric products, where there is a GPU that it knows.
    return EmergingMuon(
        params,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        nesterov=True,
        use_syrk=params[0].is_cuda,
    )


def _gram_newton_schulz(params: list[Tensor], shapes: list[Projection]) -> torch.optim.Optimizer:
    from gram_newton_schulz.muon import Muon as GramMuon  # pyright: ignore[reportMissingImports]

    kernels = find_spec("quack") is not None  # its CuTeDSL kernels are a package of their own

    return GramMuon(
        params,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ns_coefficients=[list(triple) for triple in muon().steps],
        ns_use_kernels=kernels,
    )


DION: dict[str, Any] = {"package": "dion", "half": True, "cuda": True}
PEERS = {
    "adamw_fused": Peer(_adamw_fused),
    "muon": Peer(_ours(Muon), filter=muon()),
    "muon_bf16": Peer(_ours(Muon, momentum_dtype="bfloat16"), filter=muon()),
    "polar_express": Peer(_ours(Muon, filter="polar_express"), filter=polar_express()),
    "pion": Peer(_ours(Pion), filter=pion()),
    "pion_promote2": Peer(_ours(Pion, promote=2), filter=pion(promote=2)),
    "pion_noise": Peer(_ours(Pion, cutoff="noise"), filter=high_pass("noise")),
    "pion_per_head": Peer(_ours(Pion, per_head=True), filter=pion(), per_head=True),
    "muon_sgd": Peer(_ours(Muon, aux="sgd"), filter=muon(), aux="sgd"),
    "torch_muon": Peer(_torch_muon, filter=muon(), half=True),
    "muon_optimizer": Peer(
        _muon_optimizer,
        package="muon",
        filter=muon(),
        half=True,
    ),
    "pytorch_optimizer": Peer(
        _pytorch_optimizer("newton_schulz"), package="pytorch_optimizer", filter=muon(), half=True
    ),
    "pytorch_optimizer_gram": Peer(
        _pytorch_optimizer("gram_newton_schulz"),
        package="pytorch_optimizer",
        filter=muon(),
        half=True,
    ),
    "gram_newton_schulz": Peer(
        _gram_newton_schulz, package="gram_newton_schulz", filter=muon(), half=True, cuda=True
    ),
    "dion": Peer(_dion("Muon", mu=MOMENTUM, nesterov=True), **DION),
    "dion_triton": Peer(_dion("Muon", mu=MOMENTUM, nesterov=True, use_triton=True), **DION),
    "dion_normuon": Peer(_dion("NorMuon", mu=MOMENTUM, nesterov=True, use_triton=True), **DION),
    "dion2": Peer(_dion("Dion2", use_triton=True, triton_post_ortho=True), **DION),
    "emerging_muon": Peer(_emerging_muon, package="emerging_optimizers", half=True, cuda=True),
}


def auxiliary(peer: Peer, embedding: nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of the embedding beside a peer's: AdamW fused, or SGD for muon_sgd."""
    if peer.aux == "sgd":
        return torch.optim.SGD(
            [embedding], lr=LR, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY, fused=True
        )

    return torch.optim.AdamW(
        [embedding],
        lr=LR,
        weight_decay=DECAY,
        fused=True,
    )


class Built:
    """One contender's optimizers, stepped together."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """One whole step."""
        for optimizer in self.optimizers:
            optimizer.step()


class Workbench:
    """Parameters with gradients on a device, and the optimizers built over them.

    Args:
        shapes: the hidden matrices, float32.
        embedding: (rows, cols) of an embedding to step as well, or None.
        device: where they live.
    """

    def __init__(
        self, shapes: list[Projection], embedding: tuple[int, int] | None, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.shapes = shapes
        self.device = device
        sizes = [(p.rows, p.cols) for p in shapes] + ([embedding] if embedding else [])

        params = [nn.Parameter(torch.randn(size, device=device) * 0.02) for size in sizes]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3

        self.matrices = params[: len(shapes)]
        self.embedding = params[-1] if embedding else None

    @property
    def num_parameters(self) -> int:
        """Of all tensors that are stepped."""
        tensors = self.matrices + ([] if self.embedding is None else [self.embedding])
        return sum(p.numel() for p in tensors)

    def build(self, peer: Peer) -> Built:
        """A peer's optimizer over the matrices, and one over the embedding if there is one."""
        optimizers = [peer.build(list(self.matrices), self.shapes)]
        if self.embedding is not None:
            optimizers.append(auxiliary(peer, self.embedding))
        return Built(optimizers)

    def num_at_once(self) -> int:
        """How many optimizers' states may be held together, at up to 8 bytes a parameter."""
        if self.device.type != "cuda":
            return len(PEERS)
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, int(MEMORY_SHARE * free // (8 * self.num_parameters)))
