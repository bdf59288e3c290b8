"""A run as the rules see it: curves by name, and settings by their usual meaning, whatever a framework calls them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bessemer.diagnose.rules.curve import Curve
from bessemer.observe.foreign.series import ForeignRun

# Meaning -> names that frameworks give it, the last part of a dotted key in lower case with underscores.
SETTINGS = {
    "vocabulary": ("vocab_size", "padded_vocab_size", "vocabulary", "n_vocab", "vocab"),
    "accumulation": ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
    "batch": ("global_batch_size", "train_batch_size", "batch_size", "per_device_train_batch_size",
              "train_micro_batch_size_per_gpu", "local_batch_size", "device_batch_size"),
    "context": ("block_size", "seq_length", "seq_len", "max_seq_len", "context", "context_length", "max_length"),
    "lr": ("learning_rate", "lr", "max_lr"),
    "warmup": ("warmup_steps", "warmup_iters", "lr_warmup_iters", "warmup_num_steps", "num_warmup_steps"),
    "schedule": ("lr_scheduler_type", "lr_decay_style", "lr_schedule", "decay_type"),
    "clip": ("max_grad_norm", "clip_grad", "gradient_clipping", "gradient_clip_val", "grad_clip", "max_norm", "clip"),
    "devices": ("world_size", "num_gpus", "n_gpus", "num_devices", "ngpus", "n_devices"),
    "accelerator": ("device", "accelerator", "device_type", "gpu_name"),
    "workers": ("dataloader_num_workers", "num_workers"),
    "optimizer": ("optim", "optimizer", "optimizer_name", "optimizer_type"),
    "beta": ("beta", "dpo_beta"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "experts"),
    "answer_limit": ("max_completion_length", "max_response_length", "max_new_tokens", "max_tokens"),
    "samples": ("num_generations", "n_samples_per_prompt", "samples", "rollout_n"),
}  # fmt: skip
CASES = {"fp16": ("fp16", "float16", "half", "16-mixed", "16"), "bf16": ("bf16", "bfloat16", "bf16-mixed", "bf16-true")}
PRECISION = ("precision", "dtype", "torch_dtype", "mixed_precision", "mixed_precision_param", "compute_dtype")


@dataclass
class RunView:
    run: ForeignRun
    _curves: dict[str, Curve | None] = field(default_factory=dict)

    def curve(self, name: str, least: int = 1) -> Curve | None:
        """The finite points of a metric, if there are at least `least`."""
        if name not in self._curves:
            series = self.run.series.get(name)
            self._curves[name] = None if series is None else Curve.of(series)
        curve = self._curves[name]
        return curve if curve is not None and len(curve) >= least else None

    def curves_like(self, pattern: str) -> list[Curve]:
        """Metrics whose name contains a regular expression, for those that have no shared name."""
        matches = [name for name in self.run.series if re.search(pattern, name, re.I)]
        return [curve for name in sorted(matches) if (curve := self.curve(name, 4)) is not None]

    @cached_property
    def flat_settings(self) -> dict[str, Any]:
        """Settings by the last part of their key; of equal parts the least nested wins."""
        flat: dict[str, Any] = {}

        def walk(settings: dict[str, Any], depth: int) -> None:
            for key, value in settings.items():
                if isinstance(value, dict):
                    continue
                name = re.split(r"[./]", str(key))[-1].lstrip("-").lower().replace("-", "_")
                flat.setdefault(name, value)
            for value in settings.values():
                if isinstance(value, dict) and depth < 6:
                    walk(value, depth + 1)

        walk(self.run.settings, 0)
        return flat

    def setting(self, meaning: str) -> Any:
        return next(
            (self.flat_settings[name] for name in SETTINGS[meaning] if self.flat_settings.get(name) is not None), None
        )

    def number(self, meaning: str) -> float | None:
        """A setting as a finite number, also where a file quotes it."""
        try:
            value = float(self.setting(meaning))
        except (TypeError, ValueError):
            return None
        return value if math.isfinite(value) else None

    @cached_property
    def precision(self) -> str:
        """fp16, bf16, fp32 or "" where the settings do not tell."""
        for name in PRECISION:
            value = str(self.flat_settings.get(name, "")).lower().removeprefix("torch.")
            for case, spellings in CASES.items():
                if value in spellings:
                    return case
            if value in ("fp32", "float32", "32", "32-true", "no"):
                return "fp32"
        for case in CASES:
            value = self.flat_settings.get(case)
            if value is True or str(value).lower() in ("true", "1"):
                return case
        return "fp16" if "loss_scale" in self.run.series and self.curve("loss_scale", 2) is not None else ""

    @cached_property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.run.series.values() if len(series)), default=0)

    @cached_property
    def preference(self) -> bool:
        """Whether pairs of answers are trained on: the loss starts at ln 2, not at ln V."""
        return any(name in self.run.series for name in ("reward_margin", "chosen_reward", "chosen_logp"))

    @cached_property
    def reinforcement(self) -> bool:
        """Whether answers are sampled and rewarded: the loss is then no measure of progress."""
        return "reward" in self.run.series

    @cached_property
    def language_loss(self) -> Curve | None:
        """The loss where it is a cross-entropy that should fall."""
        return None if self.preference or self.reinforcement else self.curve("loss", 8)

    @cached_property
    def restarts(self) -> list[int]:
        return sorted(self.run.restarts)

    def near_restart(self, step: int) -> int | None:
        """A restart within a few logged points before a step."""
        loss = self.curve("loss")
        reach = 3 * loss.interval() if loss is not None else 3
        return next(
            (start for start in self.restarts if 0 <= step - start <= reach or 0 < start - step <= reach // 3), None
        )
