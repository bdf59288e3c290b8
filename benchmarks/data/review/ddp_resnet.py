# short run: --epochs 2 --samples 64
"""Data-parallel training under torchrun: sampler, synchronized batch norm, averaged metrics, one rank saves."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip


def setup():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def validate(model, loader, device):
    model.eval()
    stats = torch.zeros(2, device=device)
    with torch.inference_mode():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            stats[0] += (model(x).argmax(dim=-1) == y).sum()
            stats[1] += y.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--samples", type=int, default=50_000)
    args = parser.parse_args()
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1234)
    train_set = TensorDataset(torch.randn(args.samples, 3, 16, 16), torch.randint(0, 10, (args.samples,)))
    val_set = TensorDataset(torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,)))
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=16, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=val_sampler)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_model()) if torch.cuda.is_available() else build_model()
    model = model.to(device)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10, 20], gamma=0.1)

    start_epoch = 0
    if os.path.exists("resume.pt"):
        checkpoint = torch.load("resume.pt", map_location=device, weights_only=True)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"] + 1

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        total_loss = torch.zeros((), device=device)
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total_loss += loss.detach()
        scheduler.step()
        dist.all_reduce(total_loss)
        total_loss /= world_size * len(train_loader)
        accuracy = validate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} loss {total_loss.item():.4f} accuracy {accuracy:.4f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, "checkpoint.pt.tmp")
            os.replace("checkpoint.pt.tmp", "checkpoint.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
