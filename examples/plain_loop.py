"""A plain PyTorch loop: Pion, a schedule, the watch on what the filter passes, save and resume.

Run: python examples/plain_loop.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import mesotron


class Net(nn.Module):
    """A residual block between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.body(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

        if step % 20 == 0:
            pion = {k: v for k, v in optimizer.stats().items() if k.startswith("pion")}
            passed = next(v for k, v in pion.items() if k.endswith("passed_rank"))
            dead = next(v for k, v in pion.items() if k.endswith("dead_blocks"))
            print(f"step {step:3d}  loss {loss:.3f}  passed rank {passed:4.1f}  dead {dead:.0%}")


def build() -> tuple:
    torch.manual_seed(0)
    model = Net()
    optimizer = mesotron.pion(model, lr=0.02, cutoff=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    return model, optimizer, scheduler


def main() -> None:
    model, optimizer, scheduler = build()
    print(mesotron.route(model, matrix="pion").to_text())
    train(model, optimizer, scheduler, range(60))

    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
        }

        path = Path(folder) / "checkpoint.pt"
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
        saved = torch.load(path, weights_only=True)

    again = dict(zip(("model", "optimizer", "scheduler"), build(), strict=True))
    for name, part in again.items():
        part.load_state_dict(saved[name])

    train(*parts.values(), range(60, 101))
    print("and again, from the checkpoint")
    train(*again.values(), range(60, 101))
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), again["model"].parameters()))
    print(f"resumed run equals the one left alone: {same}")


if __name__ == "__main__":
    main()
