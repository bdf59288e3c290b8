# short run: --epochs 1 --batches 6
"""Distils a teacher into a student, with meters, fp16 loss scaling and validation by function."""

import argparse

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def mlp(width):
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))


def distillation_loss(student_logits, teacher_logits, temperature=2.0):
    target = F.softmax(teacher_logits / temperature, dim=-1)
    return F.kl_div(F.log_softmax(student_logits / temperature, dim=-1), target, reduction="batchmean") * temperature**2


def train_one_epoch(student, teacher, loader, optimizer, scaler, device, args):
    student.train()
    meter = AverageMeter()
    for inputs, labels in loader:
        inputs = inputs.to(device)
        labels = labels.to(device)
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        with autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            logits = student(inputs)
            loss = 0.5 * F.cross_entropy(logits, labels) + 0.5 * distillation_loss(logits, teacher_logits)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        if args.clip > 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(student.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        meter.update(loss.item(), inputs.size(0))
    return meter.avg


def validate(student, val_loader, device):
    student.eval()
    accuracy = AverageMeter()
    with torch.inference_mode():
        for inputs, labels in val_loader:
            logits = student(inputs.to(device))
            accuracy.update((logits.argmax(-1).cpu() == labels).float().mean().item(), labels.numel())
    return accuracy.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = mlp(64).to(device).eval()
    teacher.requires_grad_(False)
    student = mlp(16).to(device)
    data = TensorDataset(torch.randn(args.batches * 16, 20), torch.randint(0, 4, (args.batches * 16,)))
    loader, val_loader = DataLoader(data, 16, shuffle=True), DataLoader(data, 64)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    scaler = GradScaler(device.type, enabled=device.type == "cuda")
    best_acc = 0
    for epoch in range(args.epochs):
        loss = train_one_epoch(student, teacher, loader, optimizer, scaler, device, args)
        accuracy = validate(student, val_loader, device)
        scheduler.step()
        print(f"{epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
        if accuracy > best_acc:
            best_acc = accuracy
            torch.save({"state_dict": student.state_dict(), "accuracy": accuracy}, "student.pt")


if __name__ == "__main__":
    main()
