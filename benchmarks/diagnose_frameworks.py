"""The tiny runs by Hugging Face's Trainer and by Lightning, which write trainer_state.json and metrics.csv themselves.

Faults are those of `diagnose_runs` that a model, a batch, a rate or an optimizer can carry.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
from diagnose_runs import (
    CONTEXT,
    FAULTS,
    VALIDATION_ROWS,
    Plan,
    TinyModel,
    healthy_plan,
    loss_of,
    make_optimizer,
    rate_at,
    rows_of,
    settings_of,
    text_ids,
)  # fmt: skip
from torch import Tensor, nn

KINDS = (
    "rate x50", "rate / 300", "corrupt batches", "damaged weights", "division by zero", "masked labels",
    "labels not shifted", "wrong embeddings", "frozen", "small data", "schedule too short", "schedule too long",
    "rate jump",
)  # fmt: skip


class PlannedModule(nn.Module):
    """The model with its loss: the plan's hooks act on training steps only."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.model, self.step = plan, TinyModel(plan.width, plan.layers), 0

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        if not self.training:
            return {"loss": loss_of(self.plan, self.model, rows, self.step, validation=True)}
        if self.plan.on_model:
            self.plan.on_model(self.step, self.model)
        rows = self.plan.on_batch(self.step, rows) if self.plan.on_batch else rows
        loss = loss_of(self.plan, self.model, rows, self.step)
        self.step += 1
        return {"loss": loss}


def plan_of(kind: str | None, seed: int) -> tuple[Plan, tuple[str, ...]]:
    draw = random.Random(f"{kind} {seed} framework")
    plan = healthy_plan(draw)
    plan.accumulation, plan.steps = 1, 160
    right: tuple[str, ...] = ()
    if kind is not None:
        right, change = FAULTS[kind]
        change(plan, draw)
    plan.steps = min(plan.steps, 200)
    return plan, right


def rows_for(plan: Plan) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Training rows in a random order, and held-out rows."""
    draw, ids = random.Random(plan.seed), text_ids()
    starts = list(range(0, plan.characters - CONTEXT - 1, CONTEXT))
    chosen: list[int] = []
    while len(chosen) < plan.steps * plan.rows:
        draw.shuffle(starts)
        chosen += starts
    validation = [len(ids) - 60_000 + draw.randrange(59_000) for _ in range(VALIDATION_ROWS)]
    training = rows_of(ids, chosen[: plan.steps * plan.rows])
    return [{"rows": row} for row in training], [{"rows": row} for row in rows_of(ids, validation)]


def optimizer_of(plan: Plan, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    trained = copy.deepcopy(module) if plan.frozen else module
    optimizer = make_optimizer(trained)
    factor = plan.rate_factor or (lambda step: 1.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(plan, step) * factor(step))


def run_trainer(kind: str | None, seed: int, folder: Path) -> tuple[Path, tuple[str, ...]]:
    from transformers import PrinterCallback, Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    plan, right = plan_of(kind, seed)
    torch.manual_seed(plan.seed)
    training, held_out = rows_for(plan)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=plan.rows, per_device_eval_batch_size=VALIDATION_ROWS,
        max_steps=plan.steps, logging_steps=1, eval_strategy="steps", eval_steps=plan.evaluate_every,
        save_strategy="no", max_grad_norm=plan.clip, report_to=[], use_cpu=True, disable_tqdm=True,
        prediction_loss_only=True, label_names=["rows"], remove_unused_columns=False, seed=plan.seed,
    )  # fmt: skip
    module = PlannedModule(plan)
    trainer = Trainer(
        module, arguments, train_dataset=training, eval_dataset=held_out, optimizers=optimizer_of(plan, module)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    (folder / "config.json").write_text(json.dumps(settings_of(plan)))
    return folder / "trainer_state.json", right


def run_lightning(kind: str | None, seed: int, folder: Path) -> tuple[Path, tuple[str, ...]]:
    import logging
    import warnings

    import lightning
    from lightning.pytorch.loggers import CSVLogger

    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plan, right = plan_of(kind, seed)
    torch.manual_seed(plan.seed)
    training, held_out = rows_for(plan)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = PlannedModule(plan)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.module(batch["rows"])["loss"]
            self.log("train_loss", loss)
            self.log("lr", self.optimizers().param_groups[0]["lr"])
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.log("grad_norm", nn.utils.get_total_norm(grads))

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.log("val_loss", self.module(batch["rows"])["loss"])

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_of(plan, self.module)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=plan.steps, val_check_interval=plan.evaluate_every, log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""), enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, gradient_clip_val=plan.clip, num_sanity_val_steps=0,
    )  # fmt: skip
    loaders = torch.utils.data.DataLoader(training, plan.rows), torch.utils.data.DataLoader(held_out, VALIDATION_ROWS)
    trainer.fit(Module(), *loaders)
    return folder / "metrics.csv", right


FRAMEWORKS = {"transformers": run_trainer, "lightning": run_lightning}
FILES = {"transformers": "trainer_state.json", "lightning": "metrics.csv"}
