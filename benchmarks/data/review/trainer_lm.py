# short run: --max_steps 4
"""Continued pre-training with the Hugging Face Trainer."""

import argparse
import os

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int, default=500)
args = parser.parse_args()

name = os.environ.get("MODEL", "gpt2")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
if tokenizer.pad_token is None:
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    model.resize_token_embeddings(len(tokenizer))

texts = Dataset.from_dict({"text": [f"document {i} about metal and fire" for i in range(64)]})


def tokenize(rows):
    return tokenizer([text + tokenizer.eos_token for text in rows["text"]], truncation=True, max_length=32)


splits = texts.map(tokenize, batched=True, remove_columns=["text"]).train_test_split(test_size=0.25, seed=0)
training_args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=args.max_steps,
    learning_rate=2e-5,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    greater_is_better=False,
    logging_steps=1,
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=splits["train"],
    eval_dataset=splits["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("out/final")
