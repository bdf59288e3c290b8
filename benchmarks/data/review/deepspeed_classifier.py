# short run: --epochs 1
"""A classifier with DeepSpeed: batches of the engine's size, evaluation, a checkpoint per epoch."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

ds_config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(24, 32), nn.Linear(32, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.fc2(self.dropout(torch.relu(self.fc1(x))))


def accuracy(model_engine, features, labels):
    model_engine.eval()
    with torch.no_grad():
        logits = model_engine(features.to(model_engine.device, torch.bfloat16))
    return (logits.argmax(-1).cpu() == labels).float().mean().item()


def main():
    deepspeed.init_distributed()
    dataset = TensorDataset(torch.randn(128, 24), torch.randint(0, 3, (128,)))
    model = Classifier()
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset, config=ds_config
    )
    for epoch in range(args.epochs):
        model_engine.train()
        for features, labels in trainloader:
            features = features.to(model_engine.device, torch.bfloat16)
            labels = labels.to(model_engine.device)
            outputs = model_engine(features)
            loss = F.cross_entropy(outputs.float(), labels)
            model_engine.backward(loss)
            model_engine.step()
        print(f"epoch {epoch} accuracy {accuracy(model_engine, *dataset.tensors):.3f}")
        model_engine.save_checkpoint("ds_checkpoints", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
