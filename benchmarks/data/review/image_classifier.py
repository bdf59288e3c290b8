# short run: --epochs 2 --samples 64
"""Trains a small CNN on images, with validation, a schedule per epoch and the best weights kept."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(1 if i == 0 else 8, 8, 3, padding=1) for i in range(2)])
        self.head = nn.Linear(8 * 14 * 14, classes)

    def forward(self, x):
        for block in self.blocks:
            x = F.relu(block(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = F.dropout(x, 0.25, training=self.training)
        return self.head(x)


def train_epoch(model, loader, criterion, optimizer, device):
    model.train()
    running_loss = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        logits = model(images)
        loss = criterion(logits, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * images.size(0)
    return running_loss / len(loader.dataset)


def evaluate(model, loader, criterion, device):
    model.eval()
    loss_sum, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            loss_sum += criterion(logits, labels).item() * images.size(0)
            correct += (logits.argmax(1) == labels).sum().item()
    return loss_sum / len(loader.dataset), correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(args.samples, 1, 28, 28), torch.randint(0, 10, (args.samples,)))
    train_set, val_set = random_split(data, [0.8, 0.2])
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=64)

    model = Net().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)

    best_loss, best_state = float("inf"), None
    for epoch in range(args.epochs):
        train_loss = train_epoch(model, train_loader, criterion, optimizer, device)
        val_loss, accuracy = evaluate(model, val_loader, criterion, device)
        scheduler.step()
        print(f"epoch {epoch}: train {train_loss:.4f} val {val_loss:.4f} accuracy {accuracy:.3f}")
        if val_loss < best_loss:
            best_loss = val_loss
            best_state = copy.deepcopy(model.state_dict())
    torch.save(best_state, "best.pt")


if __name__ == "__main__":
    main()
