# short run: --epochs 2 --rows 24
"""Fine-tunes a Hugging Face causal language model with a loop of its own."""

import argparse
import os

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

MODEL = os.environ.get("MODEL", "gpt2")


def collate(tokenizer):
    def fn(texts):
        batch = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        batch["labels"] = labels
        return batch

    return fn


def evaluate(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = model(**batch)
        total += outputs.loss.item()
        count += 1
    model.train()
    return total / max(count, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL).to(device)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False

    texts = [f"sample number {i} says hello" + " again" * (i % 5) + tokenizer.eos_token for i in range(args.rows)]
    split = int(0.8 * len(texts))
    train_loader = DataLoader(texts[:split], batch_size=4, shuffle=True, collate_fn=collate(tokenizer))
    val_loader = DataLoader(texts[split:], batch_size=4, collate_fn=collate(tokenizer))

    optimizer = AdamW(model.parameters(), lr=5e-5)
    num_training_steps = args.epochs * -(-len(train_loader) // args.accumulation)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_training_steps // 10, num_training_steps)

    model.train()
    for epoch in range(args.epochs):
        for step, batch in enumerate(tqdm(train_loader)):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss / args.accumulation
            loss.backward()
            if (step + 1) % args.accumulation == 0 or step + 1 == len(train_loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: validation loss {evaluate(model, val_loader, device):.4f}")

    model.eval()
    prompt = tokenizer("sample number", return_tensors="pt").to(device)
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8, pad_token_id=tokenizer.eos_token_id)[0]))
    model.save_pretrained("out")


if __name__ == "__main__":
    main()
