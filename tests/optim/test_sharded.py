"""Sharded steps against one process: FSDP2, HSDP and tensor parallelism on 2 and 4 gloo ranks, and
one NCCL rank where there is a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mesotron.optim import Muon
from mesotron.optim.sharding import exchange
from mesotron.optim.sharding import step as sharded
from mesotron.optim.sharding.exchange import Piece, ShardedMatrix, make_plan
from mesotron.optim.stats import StepStats
from mesotron.spectral import muon
from support.ranks import Ranks

# One set of processes for the whole file, also under xdist's loadgroup.
pytestmark = pytest.mark.xdist_group("sharded")


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    ("ranks", "name", "layout", "options"),
    [
        ("two", "muon", "rows", {}),
        ("two", "muon", "columns", {}),
        ("four", "muon", "rows", {"lr": torch.tensor(0.02), "scale": "spectral"}),
        ("four", "muon", "columns", {"filter": "polar_express", "nesterov": False}),
        ("four", "muon", "copies", {"batched": False, "weight_decay": 0.0}),
        ("four", "pion", "rows", {"promote": 2}),
        ("four", "pion", "hsdp", {"cutoff": "noise"}),
        ("four", "muon", "hsdp", {"momentum_dtype": "float64", "dtype": "float64"}),
        ("four", "muon", "hsdp", {"teams": True}),
        ("two", "muon", "columns", {"leash": 0.002}),
        ("four", "pion", "hsdp", {"leash": 0.002, "promote": 4}),
        ("four", "muon", "two_dims", {}),
        ("four", "muon", "columns_first", {}),
        ("four", "muon", "twice", {"filter": "low_rank", "rank": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_ranks_train_as_one_process(ranks, name, layout, options, request):
    request.getfixturevalue(ranks)("trains_alike", name, layout, options)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_lora_products_move_as_whole_ones(two, layout):
    two("steps_a_lora_product", layout)


def test_a_nan_on_one_rank_skips_the_matrix_on_all(four):
    first, *others = four("skips_what_is_not_finite_anywhere")
    assert (first["whole/skipped"], first["adamw/skipped"], first["skipped"]) == (1, 1, 2)
    assert all(stats == first for stats in others)


def test_ranks_that_disagree_on_gradients_do_not_hang(four):
    four("steps_without_some_gradients")


def test_flags_that_stay_on_the_device_mask_the_step(two):
    (sharded, alone), second = two("steps_without_reading_flags")
    assert second[0] == sharded
    assert sharded["skipped"] == sharded["whole/skipped"] == 1

    for key in ("whole/concentration", "whole/passed_rank", "whole/dead_blocks"):
        assert sharded[key] == pytest.approx(alone[key], rel=1e-4), key


@pytest.mark.parametrize("layout", ["rows", "copies", "two_dims"])
def test_no_block_is_filtered_twice(four, layout):
    counts = four("counts_filtered_blocks", layout)
    assert sum(filtered for filtered, _ in counts) == counts[0][1]
    assert min(filtered for filtered, _ in counts) > 0


@pytest.mark.parametrize("layout", ["rows", "hsdp"])
def test_statistics_are_those_of_one_process(four, layout):
    ranks = four("reads_stats", layout, [0, 1, 2, 3])
    sharded, alone = ranks[0]
    assert all(stats == sharded for stats, _ in ranks)
    assert sharded.keys() == alone.keys()

    for key, value in alone.items():
        group, _, statistic = key.rpartition("/")
        if statistic == "cosine":
            # Sampled differently; windows of one parameter are taken together.

            if group in ("whole", "rows:4", "stack", "conv"):
                close = 1e-5
            else:
                close = 0.2

            assert sharded[key] == pytest.approx(value, abs=close), key
        else:
            assert sharded[key] == pytest.approx(value, rel=1e-4), key


def test_one_rank_may_read_statistics_alone(two):
    answers = two("reads_stats", "rows", [0])
    assert answers[1] is None
    assert answers[0][0]["whole/blocks"] == 5


def test_copies_of_bfloat16_weights_stay_equal(four):
    # Mesh [[0, 1], [2, 3]]: ranks 0 and 2 hold the same shards.
    ranks = four("rounds_copies_alike")
    for left, right in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    assert not np.array_equal(ranks[0][0], ranks[1][0])


def test_a_checkpoint_continues_on_as_many_and_on_fewer_ranks(four, two, tmp_path):
    straight, alone = four("trains_and_saves", str(tmp_path))[0]
    for ranks in (four, two):
        weights = ranks("loads_and_continues", str(tmp_path))[0]
        torch.testing.assert_close(weights, straight, rtol=1e-5, atol=1e-6)

    torch.testing.assert_close(straight, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("muon", {"per_head": True}), ("pion", {"promote": 3}), ("muon_sgd", {})],
    ids=["muon", "pion", "muon_sgd"],
)
def test_a_transformers_model_under_fsdp2_trains_as_alone(two, name, options):
    names = two("trains_qwen", name, options)[0]
    assert any("rows:3" in name for name in names) == ("per_head" in options)


def test_fsdp_over_tensor_parallelism(four):
    placements = four("trains_under_tensor_parallelism")[0]
    assert "_S(0, 2)" in placements  # the strided one was really met


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_fsdp1_shards_are_rejected(two, use_orig_params):
    for errors in two("builds_on_fsdp1", use_orig_params):
        assert ["FSDP2" in error for error in errors] == [True, True]


# One layer of Qwen2.5-0.5B.
LAYER = [
    ("rows:14", (896, 896)),
    ("rows:2", (128, 896)),
    ("rows:2", (128, 896)),
    ("cols:14", (896, 896)),
    ("whole", (4864, 896)),
    ("whole", (4864, 896)),
    ("whole", (896, 4864)),
]


@pytest.mark.parametrize("num_ranks", [2, 7, 8, 16])
def test_work_is_balanced(num_ranks):
    # No rank has a tenth more than its share, or one matrix more where matrices are few.
    members = tuple(ShardedMatrix(shape, (Shard(0),), view, muon()) for view, shape in LAYER * 24)
    places = tuple((rank,) for rank in range(num_ranks))
    plan = make_plan(members, (num_ranks,), places, 0)

    load = [0] * num_ranks
    for piece, owner in zip(plan.pieces, plan.owners, strict=True):
        load[owner] += piece.flops

    fair = sum(load) / num_ranks
    largest = max(piece.flops for piece in plan.pieces)
    assert max(load) <= max(1.1 * fair, fair + largest)
    assert min(load) >= fair - largest


def test_experts_and_heads_stay_where_they_are():
    members = (
        ShardedMatrix((8, 16, 32), (Shard(0),), "stack", muon()),
        ShardedMatrix((64, 32), (Shard(0),), "rows:8", muon()),
    )
    for me in range(4):
        plan = make_plan(members, (4,), tuple((r,) for r in range(4)), me)
        assert not any(plan.out[rank] for rank in range(4) if rank != me)
        assert sum(parcel.numel for parcel in plan.out[me]) == (8 * 16 * 32 + 64 * 32) // 4


@pytest.fixture
def gpu_mesh(tmp_path):
    # With a current device and device_id, neither the mesh nor NCCL has to guess (and warn).
    torch.cuda.set_device(0)
    uri = (tmp_path / "rendezvous").as_uri()
    device = torch.device("cuda", 0)

    dist.init_process_group(
        "nccl",
        init_method=uri,
        rank=0,
        world_size=1,
        device_id=device,
    )

    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_step_on_a_gpu_equals_the_unsharded_one_and_never_waits(gpu_mesh):
    torch.manual_seed(0)
    shapes = [(64, 96), (96, 64), (48, 48), (32,)]
    weights = [torch.randn(shape, device="cuda") * 0.1 for shape in shapes]
    whole = [nn.Parameter(w.clone()) for w in weights]
    parts = [nn.Parameter(distribute_tensor(w, gpu_mesh, [Shard(0)])) for w in weights]
    options = {"lr": 0.01, "dtype": "float32", "fused": False}
    alone = Muon(whole, **options)

    sharded = Muon(parts, **options)
    for step in range(4):
        for p, q in zip(whole, parts, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = distribute_tensor(p.grad, gpu_mesh, [Shard(0)])

        if step == 2:
            whole[0].grad[0, 0] = torch.nan
            parts[0].grad.to_local()[0, 0] = torch.nan

        alone.step()
        torch.cuda.synchronize()

        # The first step may wait: it makes state, plans and library handles.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        sharded.step()
        torch.cuda.set_sync_debug_mode("default")

        assert sharded.stats()["skipped"] == (step == 2)

    for p, q in zip(whole, parts, strict=True):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-4, atol=1e-5)


def test_pieces_are_spread_over_the_ranks_and_stay_where_they_are():
    def owners(flops, held, ranks=2):
        pieces = []
        for number, cost in enumerate(flops):
            pieces.append(Piece(member=number, box=((0, 4), (0, 4)), view="whole", flops=cost))

        nowhere = ((0, 2), (0, 4))
        boxes = [
            [((0, 4), (0, 4)) if r == home else nowhere for r in range(ranks)] for home in held
        ]
        return exchange._assign_owners(pieces, boxes, ranks)

    assert owners([1, 1, 1, 1], [None] * 4) == (0, 1, 0, 1)
    assert owners([1, 1, 1, 1], [1, 0, 1, 0]) == (1, 0, 1, 0)  # none has to move
    assert owners([5, 1, 1, 1], [None] * 4) == (0, 1, 1, 1)  # the largest first
    assert set(owners([1] * 6, [0] * 6)) == {0, 1}  # one rank would wait for the other
    assert sorted(owners([1] * 6, [None] * 6, ranks=3)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("groups", [["a", "b"], []])
def test_statistics_are_shared_inside_the_step(monkeypatch, groups):
    """Two ranks that hold the same: every sum is twice its own."""
    monkeypatch.setattr(dist, "all_reduce", lambda table, group: table.mul_(2))
    alignments = [torch.tensor([[3.0, 4.0, 4.0], [1.0, 0.0, 4.0]])] if groups else []
    stats = StepStats()
    team = SimpleNamespace(group=None)
    totals = torch.tensor([[1.0, 2.0]])
    sharded._share_statistics(totals, ["muon"], alignments, groups, team, stats)

    ((names, shared),) = stats.shared
    assert (names, shared.tolist()) == (["muon"], [[2.0, 4.0]])
    assert [(names, cosine.tolist()) for names, cosine in stats.cosines] == (
        [(["a", "b"], [0.75, 0.0])] if groups else []
    )
