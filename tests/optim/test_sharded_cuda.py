"""The sharded step on a GPU: one NCCL rank, so that it runs wherever there is a GPU at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mesotron.optim import Muon

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(64, 96), (96, 64), (48, 48), (32,)]


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group(
        "nccl", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1
    )
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def test_the_step_is_that_of_whole_parameters_and_never_waits(mesh):
    torch.manual_seed(0)
    weights = [torch.randn(shape, device="cuda") * 0.1 for shape in SHAPES]
    whole = [nn.Parameter(w.clone()) for w in weights]
    parts = [nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in weights]
    options = {"lr": 0.01, "dtype": "float32", "fused": False}
    alone, sharded = Muon(whole, **options), Muon(parts, **options)
    for step in range(4):
        for p, q in zip(whole, parts, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
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
