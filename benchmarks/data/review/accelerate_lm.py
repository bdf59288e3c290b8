# short run: --steps 6
"""Language-model training with Accelerate: accumulation context, clipping, gathered metrics, unwrapped saving."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup

MODEL = os.environ.get("MODEL", "gpt2")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--mixed_precision", default="no")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=args.mixed_precision)
    set_seed(42)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    tokens = torch.randint(0, model.config.vocab_size, (64, 17))
    train_loader = DataLoader(tokens[:48], batch_size=4, shuffle=True, drop_last=True)
    eval_loader = DataLoader(tokens[48:], batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, args.steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    completed = 0
    while completed < args.steps:
        model.train()
        for input_ids in train_loader:
            with accelerator.accumulate(model):
                outputs = model(input_ids=input_ids, labels=input_ids)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
            if completed >= args.steps:
                break
        model.eval()
        losses = []
        for input_ids in eval_loader:
            with torch.no_grad():
                outputs = model(input_ids=input_ids, labels=input_ids)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(input_ids.size(0))))
        accelerator.print(f"step {completed}: eval loss {torch.cat(losses).mean():.4f}")

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained("out", is_main_process=accelerator.is_main_process, save_function=accelerator.save)


if __name__ == "__main__":
    main()
