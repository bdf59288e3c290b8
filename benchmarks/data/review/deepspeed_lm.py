# short run: --steps 4
"""Causal language-model training with a DeepSpeed engine."""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "torch_adam": True}},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    deepspeed.init_distributed()

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(os.environ.get("MODEL", "gpt2")))
    tokens = torch.randint(0, model.config.vocab_size, (64, 16))
    sampler = DistributedSampler(tokens)
    loader = DataLoader(tokens, batch_size=4, sampler=sampler)
    engine, optimizer, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=DS_CONFIG
    )

    step, epoch = 0, 0
    engine.train()
    while step < args.steps:
        sampler.set_epoch(epoch)
        for input_ids in loader:
            input_ids = input_ids.to(engine.device)
            loss = engine(input_ids=input_ids, labels=input_ids).loss
            engine.backward(loss)
            engine.step()
            step += 1
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step >= args.steps:
                break
        epoch += 1
    engine.save_checkpoint("checkpoints", tag=f"step{step}")


if __name__ == "__main__":
    main()
