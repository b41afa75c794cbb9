"""What each rank runs in test_sharded.py: the same training sharded and unsharded."""

import copy
import logging
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from transformers import Qwen2Config, Qwen2ForCausalLM

import mesotron
from mesotron.optim import Muon, Pion
from mesotron.optim import step as module
from mesotron.optim.clipping import clip_gradients
from mesotron.optim.matrix import apply_filter
from mesotron.optim.sharding.step import Agreement

# (view or auxiliary rule, shape). On four ranks: chunks of unequal length, fewer rows than ranks,
# heads that end inside a shard, experts that do not divide.
ZOO = [
    ("whole", (12, 20)),
    ("whole", (20, 12)),
    ("whole", (7, 12)),
    ("whole", (3, 10)),
    ("whole", (1, 9)),
    ("rows:4", (16, 12)),
    ("cols:4", (12, 16)),
    ("T/rows:4", (12, 16)),
    ("T/cols:4", (16, 12)),
    ("rows:3", (21, 8)),
    ("rows:8+4+4", (16, 12)),
    ("rows:14+4", (18, 6)),  # 14 x 6 and 4 x 6: different step sizes
    ("rows:4%3", (24, 10)),
    ("rows:2*6+4", (20, 9)),
    ("stack", (5, 6, 8)),
    ("stack/rows:2", (3, 8, 6)),
    ("conv", (8, 3, 3, 3)),
    ("adamw", (11, 6)),
    ("adamw", (20,)),
    ("sgd", (3,)),
]
PLACEMENTS = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "copies": (Replicate(),),
    "hsdp": (Replicate(), Shard(0)),
    "two_dims": (Shard(0), Shard(1)),
    "columns_first": (Shard(1), Shard(0)),
    "twice": (Shard(0), Shard(0)),
}


class Twins:
    """The zoo's parameters whole and sharded, each with an optimizer of its own."""

    def __init__(self, name: str, layout: str, mesh: DeviceMesh | None = None, **options) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = options.pop("weights", torch.float32)
        weights = [torch.randn(s, generator=generator).to(dtype) * 0.1 for _, s in ZOO]
        world = dist.get_world_size()
        shape = (world,) if len(PLACEMENTS[layout]) == 1 else (2, world // 2)
        self.mesh = mesh or init_device_mesh("cpu", shape)
        self.layout = layout
        self.whole = [nn.Parameter(w.clone()) for w in weights]
        self.parts = [nn.Parameter(self.share(w)) for w in weights]
        cls = {"muon": Muon, "pion": Pion}[name]
        options = {"lr": 0.02, **options}
        self.alone = cls(self.groups(self.whole, name), **options)
        self.sharded = cls(self.groups(self.parts, name), **options)

    def share(self, tensor: Tensor) -> DTensor:
        # A vector can only be cut along its one dimension.
        placements = [
            Shard(0) if isinstance(p, Shard) and p.dim >= tensor.ndim else p
            for p in PLACEMENTS[self.layout]
        ]
        return distribute_tensor(tensor, self.mesh, placements)

    @staticmethod
    def groups(params: list, rule: str) -> list[dict]:
        groups: dict[str, dict] = {}
        for (kind, _), p in zip(ZOO, params, strict=True):
            if kind in ("adamw", "sgd"):
                own = {"rule": kind}
            else:
                own = {"rule": rule, "view": kind}

            groups.setdefault(
                kind,
                {
                    "name": kind,
                    "params": [],
                    **own,
                },
            )["params"].append(p)

        return list(groups.values())

    def give(self, k: int, gradient: Tensor | None) -> None:
        self.whole[k].grad = None if gradient is None else gradient.clone()
        self.parts[k].grad = None if gradient is None else self.share(gradient)

    def give_all(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for k, (_, shape) in enumerate(ZOO):
            gradient = torch.randn(shape, generator=generator) * 10.0 ** (k % 5 - 2)
            self.give(k, gradient.to(self.whole[k].dtype))

    def step(self) -> None:
        self.alone.step()
        self.sharded.step()

    def compare(self) -> None:
        for (kind, shape), whole, part in zip(ZOO, self.whole, self.parts, strict=True):
            found = part.full_tensor()
            message = f"{kind} {shape} {self.layout}"
            torch.testing.assert_close(
                found,
                whole,
                rtol=1e-5,
                atol=1e-6,
                msg=message,
            )


def trains_alike(name: str, layout: str, options: dict) -> None:
    mesh = None
    teams = options.pop("teams", False)
    if teams:  # two of two ranks, each on a mesh that is not the whole world
        world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("team", "copy", "shard"))
        mesh = world["copy", "shard"]

    twins = Twins(name, layout, mesh, **options)
    for step in range(3):
        twins.give_all(step)
        gradients = [p.grad.to_local().clone() for p in twins.parts]
        twins.step()
        kept = [p.grad.to_local() for p in twins.parts]

        assert all(torch.equal(a, b) for a, b in zip(kept, gradients, strict=True))

    twins.compare()
    for p in twins.parts:
        for key, value in twins.sharded.state[p].items():
            is_number = key in ("step", "start_norm")
            assert is_number or value.placements == p.placements


def skips_what_is_not_finite_anywhere() -> dict:
    logging.getLogger("mesotron").setLevel(logging.ERROR)
    twins = Twins("muon", "rows")
    twins.give_all(0)
    twins.step()
    twins.give_all(1)
    matrix = torch.ones(12, 20)
    vector = torch.ones(20)
    matrix[-1, -1] = torch.nan  # on the last rank alone
    vector[0] = torch.inf  # on the first rank alone
    twins.give(0, matrix)
    twins.give(18, vector)

    def watched() -> list[Tensor]:
        momentum = twins.sharded.state[twins.parts[0]]["momentum_buffer"]
        return [x.full_tensor() for x in (twins.parts[0], twins.parts[18], momentum)]

    before = watched()
    twins.step()
    assert all(torch.equal(a, b) for a, b in zip(before, watched(), strict=True))

    twins.compare()
    return twins.sharded.stats()


def steps_without_some_gradients() -> None:
    # None everywhere leaves a parameter alone; None on one rank counts as zeros there.
    rank = dist.get_rank()
    world = dist.get_world_size()

    twins = Twins("muon", "rows")
    for step in range(3):
        twins.give_all(step)
        for k in (1, 19):
            twins.give(k, None)

        for k in (0, 17):  # a matrix and an AdamW parameter
            rows = -(-ZOO[k][1][0] // world)
            twins.whole[k].grad[rows : 2 * rows] = 0  # what rank 1 holds

            if rank == 1:
                twins.parts[k].grad = None

        if rank == world - 1:
            twins.parts[4].grad = None  # an empty shard

        twins.step()

    twins.compare()
    for p in twins.parts:
        p.grad = None

    before = [p.to_local().clone() for p in twins.parts]
    twins.sharded.step()
    assert all(torch.equal(p.to_local(), old) for p, old in zip(twins.parts, before, strict=True))


def steps_without_reading_flags() -> tuple[dict, dict]:
    # As on a device that the host does not wait for: absent and broken matrices are masked.
    logging.getLogger("mesotron").setLevel(logging.ERROR)
    twins = Twins("muon", "rows")
    with patch.object(Agreement, "on_host", False):
        for step in range(3):
            twins.give_all(step)
            twins.give(1, None)

            if step == 2:
                twins.give(0, torch.full((12, 20), torch.nan))

            twins.step()

    twins.compare()
    return twins.sharded.stats(), twins.alone.stats()


def counts_filtered_blocks(layout: str) -> tuple[int, float]:
    twins = Twins("muon", layout)
    twins.give_all(0)

    with patch.object(module, "apply_filter", side_effect=apply_filter) as counted:
        twins.sharded.step()

    twins.alone.step()
    blocks = sum(v for key, v in twins.alone.stats().items() if key.endswith("/blocks"))

    return sum(len(call.args[0]) for call in counted.call_args_list), blocks


def reads_stats(layout: str, readers: list[int]) -> tuple[dict, dict] | None:
    twins = Twins("pion", layout, cutoff=0.3)
    for step in range(2):
        twins.give_all(step)
        twins.give(4, torch.zeros(1, 9))
        twins.step()

    if dist.get_rank() in readers:
        return twins.sharded.stats(), twins.alone.stats()

    return None


def rounds_copies_alike() -> list:
    torch.manual_seed(dist.get_rank())  # as in training, where each rank drops out for itself
    twins = Twins(
        "muon",
        "hsdp",
        weights=torch.bfloat16,
        dtype="float32",
        weight_decay=0.0,
    )
    for step in range(3):
        twins.give_all(step)
        twins.sharded.step()

    return [p.detach().to_local().float().numpy() for p in twins.parts]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(10, 14)
        self.down = nn.Linear(14, 10, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 10, 10) * 0.3)
        self.unused = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + torch.einsum("btd,edf->btf", x, self.experts)


def build_net(sharded: bool = True) -> tuple[nn.Module, Muon]:
    model = Net()
    if sharded:
        fully_shard(model)

    named = dict(model.named_parameters())
    experts = {"params": [named.pop("experts")], "view": "stack"}

    return model, Muon([{"params": list(named.values())}, experts], lr=0.02)


def train_net(model: nn.Module, optimizer: Muon, steps: range) -> dict[str, np.ndarray]:
    for step in steps:
        x = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in model.named_parameters()
    }


def state_of(model: nn.Module, optimizer: Muon) -> dict:
    states = state_dict.get_state_dict(model, optimizer)
    return dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True))


def trains_and_saves(folder: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    model, optimizer = build_net()
    train_net(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    alone = train_net(*build_net(sharded=False), range(4))

    return train_net(model, optimizer, range(2, 4)), alone


def loads_and_continues(folder: str) -> dict[str, np.ndarray]:
    model, optimizer = build_net()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()

    optimizer.param_groups[0]["lr"] = 0.5  # the checkpoint's must win
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    state_dict.set_state_dict(model, optimizer, **state)

    assert optimizer.param_groups[0]["lr"] == 0.02
    return train_net(model, optimizer, range(2, 4))


def train_both(models, optimizers, all_batches, share: int, num_shares: int, loss_of) -> None:
    """Train alone and sharded, each rank with its share of a batch; then compare."""
    for batch in all_batches:
        batches = batch, batch.chunk(num_shares)[share]
        for model, optimizer, rows in zip(models, optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()

    alone, sharded = models
    for (key, whole), part in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            part.full_tensor(),
            whole,
            rtol=1e-4,
            atol=1e-5,
            msg=key,
        )


def trains_qwen(name: str, options: dict) -> list[str]:
    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        return model(input_ids=rows, labels=rows).loss

    sizes = {
        "vocab_size": 32,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
    }

    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1}
    torch.manual_seed(0)
    batches = torch.randint(32, (3, 4, 8))
    alone = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))

    sharded = copy.deepcopy(alone)
    for part in (*sharded.model.layers, sharded):
        fully_shard(part)

    models = alone, sharded
    optimizers = [getattr(mesotron, name)(model, lr=1e-3, **options) for model in models]
    train_both(
        models,
        optimizers,
        batches,
        dist.get_rank(),
        dist.get_world_size(),
        loss_of,
    )

    return [group["name"] for group in optimizers[1].param_groups]


def trains_under_tensor_parallelism() -> list[str]:
    # FSDP over tensor parallelism: strided shards, a sequence-parallel norm whose gradient is a
    # pending sum, and a matrix on the outer mesh alone.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    batches = torch.randn(3, 32, 6)  # of two dimensions: torch 2.11 cannot flatten a sharded one
    layers = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 5, bias=False)
    alone = nn.Sequential(*layers)
    model = copy.deepcopy(alone)
    plan = {
        "0": parallel.SequenceParallel(sequence_dim=0),
        "1": parallel.ColwiseParallel(),
        "2": parallel.RowwiseParallel(),
    }
    parallel.parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    models = (alone, model)
    share = mesh.get_coordinate()[0]
    optimizers = [Muon(m.parameters(), lr=0.01) for m in models]

    train_both(
        models,
        optimizers,
        batches,
        share,
        2,
        lambda net, rows: net(rows).square().mean(),
    )
    return sorted({str(p) for part in model.parameters() for p in part.placements})


def builds_on_fsdp1(use_orig_params: bool) -> list[str]:
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )

    errors = []
    for build in (mesotron.muon, lambda model: Muon(model.parameters())):
        try:
            build(model)
        except ValueError as error:
            errors.append(str(error))

    return errors


def steps_a_lora_product(layout: str) -> None:
    """Sharded adapters move as whole ones do, bfloat16 rounding included."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 10), (14, 3))
    weights = [torch.randn(s, generator=generator).bfloat16() for s in shapes]
    whole = [nn.Parameter(w.clone()) for w in weights]
    parts = [nn.Parameter(distribute_tensor(w, mesh, PLACEMENTS[layout])) for w in weights]

    groups = [
        {
            "params": params,
            "rule": "muon",
            "pairs": [2.0],
        }
        for params in (whole, parts)
    ]

    alone, sharded = (Muon([group], lr=0.02) for group in groups)
    for _ in range(3):
        for p, q in zip(whole, parts, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            q.grad = distribute_tensor(p.grad, mesh, PLACEMENTS[layout])

        norms = [clip_gradients(each, 1.0).total.float() for each in (alone, sharded)]
        torch.testing.assert_close(*norms, rtol=0.02, atol=0)  # bfloat16
        alone.step()
        sharded.step()

    for p, q in zip(whole, parts, strict=True):
        assert isinstance(q.data, DTensor)
        assert torch.equal(q.full_tensor(), p)
        assert isinstance(sharded.state[q]["momentum_buffer"], DTensor)
