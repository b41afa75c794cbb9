"""A Lightning module whose `configure_optimizers` returns Muon with SGD for the rest.

Run: python examples/lightning_module.py
"""

import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mesotron


class Regression(lightning.LightningModule):
    """A small network and one optimizer with one schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 4)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.net(x)), y)
        self.losses.append(loss.item())

        return loss

    def configure_optimizers(self):
        # No second moment anywhere: one number of state per weight.
        optimizer = mesotron.muon_sgd(self, lr=0.05, aux_lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    data = TensorDataset(x, (x @ torch.randn(8, 4)).sin())
    module = Regression()

    trainer = lightning.Trainer(
        max_epochs=12,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    trainer.fit(module, DataLoader(data, batch_size=64))
    state = sum(t.numel() for s in trainer.optimizers[0].state.values() for t in s.values())
    weights = sum(p.numel() for p in module.parameters())
    print(f"loss from {module.losses[0]:.3f} to {module.losses[-1]:.3f}")
    print(f"state per weight: {state / weights:.2f} numbers")


if __name__ == "__main__":
    main()
