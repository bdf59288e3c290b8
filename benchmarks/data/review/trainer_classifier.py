# short run:
"""Sentiment classification with a Trainer subclass that weights the classes."""

import os

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

checkpoint = os.environ.get("MODEL", "distilbert-base-uncased")


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        criterion = torch.nn.CrossEntropyLoss(weight=self.class_weights.to(outputs.logits.device))
        loss = criterion(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction):
    predicted = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((predicted == prediction.label_ids).mean())}


def main():
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    model.config.pad_token_id = tokenizer.pad_token_id

    rows = Dataset.from_dict({"text": ["good film", "bad film text"] * 16, "label": [1, 0] * 16})
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True), batched=True)
    parts = rows.train_test_split(test_size=0.25, seed=1)
    dataset = DatasetDict({"train": parts["train"], "validation": parts["test"]})

    training_args = TrainingArguments(
        output_dir="results",
        learning_rate=2e-5,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        greater_is_better=True,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        report_to=[],
    )
    trainer = WeightedTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        class_weights=torch.tensor([1.0, 1.5]),
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
