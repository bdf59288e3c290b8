"""The metrics of a run that another framework wrote, under one set of names.

Readers of all formats return a ForeignRun; the live page imports it and diagnose judges it. Names of metrics that every
framework has are the ones in NAMES; anything else keeps the name that its framework gave it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {
    "loss": "training loss, nats a token",
    "validation_loss": "held-out loss",
    "accuracy": "training or held-out accuracy, 0 to 1",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_s": "tokens per second of all devices",
    "step_s": "seconds of a step",
    "mfu": "model FLOPs utilisation, 0 to 1",
    "memory_bytes": "peak memory of a device",
    "loss_scale": "scale of fp16 training",
    "skipped_steps": "steps without an update, counted since the start",
    "epoch": "passes over the data",
    "data_wait_s": "seconds that a step waited for data",
    "reward": "mean reward of sampled answers",
    "kl": "divergence from the reference model",
    "entropy": "entropy of sampled tokens",
    "answer_length": "mean tokens of sampled answers",
    "reward_std": "spread of rewards within a group",
    "flat_groups": "share of groups whose rewards are all equal",
    "cut_answers": "share of sampled answers that reach the limit of length",
    "chosen_reward": "implicit reward of chosen answers (DPO)",
    "rejected_reward": "implicit reward of rejected answers (DPO)",
    "reward_margin": "chosen_reward minus rejected_reward",
    "chosen_logp": "log-probability of chosen answers",
    "rejected_logp": "log-probability of rejected answers",
    "importance_ratio": "probability under the trainer over that under the generator",
}


@dataclass(frozen=True)
class Series:
    """One metric over steps, ascending; values may be NaN or infinite. `lines` are lines of the file, -1 if unknown.
    `mean_of` is the number of steps that each value is a mean of."""

    name: str
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    lines: npt.NDArray[np.int64]
    mean_of: int = 1

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class ForeignRun:
    """A run that was read. `settings` are the hyper-parameters that the files tell; `notes` say what was left out or
    guessed, such as steps."""

    format: str  # identifier of the format, such as "hf_trainer"
    name: str
    paths: list[Path]
    series: dict[str, Series]
    settings: dict[str, Any] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)  # first steps of later starts
    total_steps: int | None = None  # planned
    notes: list[str] = field(default_factory=list)
