# short run: 2
"""DDP with gradient accumulation, no_sync, a warm-up schedule per update and complete checkpoints."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM_STEPS = 4
MAX_NORM = 1.0


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1))
        self.out = nn.Linear(64, 8)

    def forward(self, features):
        return self.out(self.body(features))


def is_main():
    return dist.get_rank() == 0


def save_checkpoint(path, ddp_model, optim, sched, epoch):
    state = {
        "model": ddp_model.module.state_dict(),
        "optim": optim.state_dict(),
        "sched": sched.state_dict(),
        "epoch": epoch,
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_checkpoint(path, ddp_model, optim, sched):
    state = torch.load(path, map_location="cpu", weights_only=True)
    ddp_model.module.load_state_dict(state["model"])
    optim.load_state_dict(state["optim"])
    sched.load_state_dict(state["sched"])
    return state["epoch"] + 1


def mean_over_ranks(value):
    value = value.clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value / dist.get_world_size()


def train_epoch(epoch, ddp_model, loader, optim, sched, device):
    ddp_model.train()
    running = torch.zeros((), device=device)
    for step, (features, labels) in enumerate(loader):
        features, labels = features.to(device), labels.to(device)
        is_last = (step + 1) % ACCUM_STEPS == 0 or (step + 1) == len(loader)
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            loss = nn.functional.cross_entropy(ddp_model(features), labels) / ACCUM_STEPS
            loss.backward()
        running += loss.detach()
        if is_last:
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), MAX_NORM)
            optim.step()
            optim.zero_grad()
            sched.step()
    average = mean_over_ranks(running / len(loader) * ACCUM_STEPS)
    if is_main():
        print(f"epoch {epoch} loss {average.item():.4f}")


def main(epochs):
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    dataset = TensorDataset(torch.randn(256, 32), torch.randint(0, 8, (256,)))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=0, pin_memory=torch.cuda.is_available())

    model = Mlp().to(device)
    ddp_model = DistributedDataParallel(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
    optim = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    sched = LambdaLR(optim, lambda update: min(1.0, (update + 1) / 20))
    start = load_checkpoint("last.pt", ddp_model, optim, sched) if os.path.exists("last.pt") else 0
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        train_epoch(epoch, ddp_model, loader, optim, sched, device)
        if is_main():
            save_checkpoint("last.pt", ddp_model, optim, sched, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
