# short run: --epochs 1
"""Binary segmentation with augmentation in loader workers, bf16 autocast and a one-cycle schedule."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    epochs: int = 20
    batch_size: int = 8
    lr: float = 3e-3
    seed: int = 17


class Shapes(Dataset):
    def __init__(self, count, augment):
        base = np.random.default_rng(count)
        self.images = base.normal(size=(count, 1, 16, 16)).astype(np.float32)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment and np.random.random() < 0.5:
            image = image[:, :, ::-1].copy()
        mask = (image > 0).astype(np.float32)
        return torch.from_numpy(image), torch.from_numpy(mask)


def seed_worker(worker_id):
    np.random.seed((torch.initial_seed() + worker_id) % 2**32)


class UNetLite(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.drop = nn.Dropout2d(0.1)
        self.up = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x):
        return self.up(self.drop(self.down(x)))


def dice(logits, mask):
    probs = torch.sigmoid(logits)
    return (2 * (probs * mask).sum() + 1) / (probs.sum() + mask.sum() + 1)


@torch.inference_mode()
def validation_dice(unet, loader, device):
    unet.eval()
    scores = [dice(unet(image.to(device)), mask.to(device)).item() for image, mask in loader]
    return sum(scores) / len(scores)


def fit(config):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.seed)
    train_dl = DataLoader(Shapes(64, True), config.batch_size, shuffle=True, num_workers=2, worker_init_fn=seed_worker)
    valid_dl = DataLoader(Shapes(16, False), config.batch_size)
    unet = UNetLite()
    unet.to(device)
    opt = torch.optim.AdamW(unet.parameters(), lr=config.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, config.lr, epochs=config.epochs, steps_per_epoch=len(train_dl))
    best_dice = 0.0
    for epoch in range(config.epochs):
        unet.train()
        for image, mask in train_dl:
            image = image.to(device)
            mask = mask.to(device)
            with torch.autocast(device_type=device, dtype=torch.bfloat16):
                logits = unet(image)
                loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
            loss.backward()
            nn.utils.clip_grad_norm_(unet.parameters(), max_norm=1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            sched.step()
        score = validation_dice(unet, valid_dl, device)
        print(f"epoch {epoch}: dice {score:.3f} lr {sched.get_last_lr()[0]:.2e}")
        if score > best_dice:
            best_dice = score
            torch.save(unet.state_dict(), "unet.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    fit(Config(epochs=parser.parse_args().epochs))
