# short run: --num_train_epochs 1
"""LoRA fine-tuning with Accelerate and PEFT on prompts with answers."""

import argparse
import math
import os

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default=os.environ.get("MODEL", "gpt2"))
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    return parser.parse_args()


def encode(tokenizer, rows):
    examples = []
    for question, answer in rows:
        prompt = tokenizer(question)["input_ids"]
        reply = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        examples.append({"input_ids": prompt + reply, "labels": [-100] * len(prompt) + reply})
    return examples


def pad_batch(pad_id):
    def collate(examples):
        width = max(len(example["input_ids"]) for example in examples)
        batch = {"input_ids": [], "labels": [], "attention_mask": []}
        for example in examples:
            gap = width - len(example["input_ids"])
            batch["input_ids"].append(example["input_ids"] + [pad_id] * gap)
            batch["labels"].append(example["labels"] + [-100] * gap)
            batch["attention_mask"].append([1] * len(example["input_ids"]) + [0] * gap)
        return {name: torch.tensor(rows) for name, rows in batch.items()}

    return collate


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM"))

    rows = [(f"question {i}", f"answer {i % 7}") for i in range(32)]
    examples = encode(tokenizer, rows)
    collate = pad_batch(tokenizer.eos_token_id)
    train_dataloader = DataLoader(examples[:24], shuffle=True, collate_fn=collate, batch_size=4)
    eval_dataloader = DataLoader(examples[24:], collate_fn=collate, batch_size=4)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * updates_per_epoch
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=max_train_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(batch["input_ids"].shape[0])))
        eval_loss = torch.mean(torch.cat(losses))
        accelerator.print(f"epoch {epoch} train {total_loss.item() / len(train_dataloader):.3f} eval {eval_loss:.3f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "adapter.pt")


if __name__ == "__main__":
    main()
