# short run: 1
"""Manual optimization in Lightning, with accumulation, and a second module that trains automatically under DDP."""

import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class ManualAutoEncoder(pl.LightningModule):
    def __init__(self, accumulate=2):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
        self.decoder = nn.Linear(8, 16)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        optimizer = self.optimizers()
        loss = F.mse_loss(self.decoder(self.encoder(x)), x) / self.accumulate
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulate == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x = batch[0]
        noise = torch.randn(x.size(0), 16, device=self.device)
        loss = F.mse_loss(self.net(x + 0.1 * noise), x.mean(dim=1, keepdim=True))
        self.seen.append(loss.detach())
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        self.log("val_loss", F.mse_loss(self.net(x), x.mean(dim=1, keepdim=True)), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(module, epochs, strategy="auto"):
    loader = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        devices=1, strategy=strategy,
    )  # fmt: skip
    trainer.fit(module, loader, loader if hasattr(module, "net") else None)


if __name__ == "__main__":
    max_epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    fit(ManualAutoEncoder(), max_epochs)
    fit(Regressor(), max_epochs)
