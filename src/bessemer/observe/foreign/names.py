"""Which metric of a framework is which of NAMES, and in which unit the framework writes it.

Keys are compared in lower case, with `_` for spaces and dashes, without the prefix `train/`. Of several keys that fit
one name the first of its list is taken; the others keep their own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ALIASES: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss", "train_loss", "lm_loss", "training_loss", "loss/train", "train_loss_step", "loss_step",
        "loss_metrics/global_avg_loss", "reduced_train_loss", "loss_train", "ce_loss", "loss/train/total",
        "train_loss/train/total", "samples/train_loss", "train_samples_train_loss", "learning/loss", "gpt_loss", "ce",
        "lm_loss_training", "lm_loss_training/lm_loss", "loss_mean", "train_loss_epoch", "cross_entropy",
    ),
    "validation_loss": (
        "validation_loss", "eval_loss", "val_loss", "valid_loss", "eval/loss", "val/loss", "validation/loss",
        "valid/loss", "loss/val", "loss/valid", "loss/validation", "loss/eval", "dev_loss", "val", "held_out_loss",
        "validation_lm_loss", "validation_lm_loss_value", "validation_metrics/loss",
        "lm_loss_validation", "lm_loss_validation/lm_loss", "val_loss_epoch",
        "validation_metrics/global_avg_loss", "loss_val",
    ),
    "accuracy": (
        "accuracy", "acc", "eval_accuracy", "val_accuracy", "val_acc", "eval/accuracy", "validation/accuracy",
        "train_accuracy", "train_acc", "rewards/accuracies", "rewards/accuracy", "mean_token_accuracy",
        "eval_mean_token_accuracy",
    ),
    "lr": (
        "lr", "learning_rate", "actor/lr", "actor_lr", "optim/lr", "optim/learning_rate_group0",
        "learning_rate/group_0",
        "samples/lr", "train_samples_lr", "learning/current_learning_rate", "training/lr", "learning_rate_decay",
    ),
    "grad_norm": (
        "grad_norm", "gnorm", "gradient_norm", "norm", "actor/grad_norm", "optim/total_grad_norm", "actor_grad_norm",
        "learning/grad_norm", "training/grad_norm", "grad_norm/total", "l2_norm/grad/global", "gradnorm",
    ),
    "tokens_per_s": (
        "tokens_per_s", "tokens_per_second", "tokens_per_sec", "tok/sec", "tok_per_sec", "tokens/s", "tokens/sec",
        "throughput/tokens_per_sec", "throughput_tokens_per_s", "tok/s",
    ),
    "step_s": (
        "step_s", "step_time", "step_time_s", "elapsed_time_per_iteration", "elapsed_time_per_iteration_(ms)",
        "elapsed_time_per_iteration_(s)",
        "iteration_time", "iter_time", "iter_time_(s)", "time_metrics/end_to_end(s)", "timing_s/step", "dt",
        "time_per_step", "iter_dt_ms", "train_step_timing_in_s",
        "seconds", "perf/step_time_seconds", "step_time_ms", "dt_ms",
    ),
    "mfu": ("mfu", "mfu(%)", "bf16_mfu", "perf/mfu/actor", "throughput/mfu", "throughput/device/mfu", "perf/mfu"),
    "memory_bytes": (
        "memory_bytes", "memory", "memory/max_reserved(gib)", "maxmemallocated", "memory/max_active(gib)",
        "peak_memory_bytes", "max_memory_allocated_bytes", "max_memory_allocated_gb", "perf/max_memory_allocated_gb",
        "memory/max_active_(gib)", "max_memory_reserved_gb", "memory(gib)", "peak_memory_gb",
    ),
    "loss_scale": (
        "loss_scale", "cur_scale", "loss_scaler", "samples/loss_scale", "train_samples_loss_scale", "grad_scale",
    ),
    "skipped_steps": ("skipped_steps", "skipped", "number_of_skipped_iterations"),
    "epoch": ("epoch", "trainer/epoch"),
    "data_wait_s": (
        "data_wait_s", "data_time", "time_metrics/data_loading(s)", "data_loading_time", "data_load_time",
        "throughput/data_loading_s",
    ),
    "reward": (
        "reward", "critic/rewards/mean", "critic/score/mean", "reward/mean", "rewards/mean", "objective/rlhf_reward",
        "reward_mean", "env/reward_mean", "mean_reward",
    ),
    "kl": ("kl", "objective/kl", "actor/kl_loss", "actor/reward_kl_penalty", "kl_loss", "critic/kl", "mean_kl"),
    "entropy": (
        "entropy", "actor/entropy", "actor/entropy_loss", "policy/entropy_avg", "objective/entropy", "entropy_loss",
    ),
    "answer_length": (
        "completions/mean_length", "completion_length", "response_length/mean", "response_length", "answer_length",
    ),
    "reward_std": ("reward_std", "rewards/std", "critic/rewards/std", "reward/std"),
    "flat_groups": ("frac_reward_zero_std", "flat_groups"),
    "cut_answers": ("completions/clipped_ratio", "response_length/clip_ratio", "truncated", "cut_answers"),
    "chosen_reward": ("rewards/chosen", "chosen_reward", "chosen_rewards"),
    "rejected_reward": ("rewards/rejected", "rejected_reward", "reject_reward", "rejected_rewards"),
    "reward_margin": ("rewards/margins", "reward_margin", "rewards/margin"),
    "chosen_logp": ("logps/chosen", "chosen_logp", "chosen_logps"),
    "rejected_logp": ("logps/rejected", "rejected_logp", "rejected_logps"),
    "importance_ratio": (
        "sampling/importance_sampling_ratio/mean", "rollout_corr/rollout_is_mean", "importance_ratio",
        "mismatch/rollout_is_mean",
    ),
}  # fmt: skip
# The only keys of these shapes: Lightning names learning rates by the optimizer, Trainer losses by the dataset.
PATTERNS = {
    "lr": re.compile(r"^lr_[a-z]+(/pg1)?$"),
    "validation_loss": re.compile(r"^(eval|val|valid|validation)[_/].*loss$"),
}
STEP_KEYS = (
    "step", "global_step", "trainer/global_step", "train/global_step", "current_steps", "iteration", "iter",
    "global_steps", "steps", "update", "batch", "training_step", "train_step", "opt_step", "training/global_step",
    "_step",
)  # fmt: skip
SUMMARY_KEY = "train_runtime"  # of Trainer's last record, whose train_loss is the mean of the whole run


def normal_key(key: str) -> str:
    """The key as the tables have it."""
    key = key.strip().strip("'\"").lower().replace(" ", "_").replace("-", "_")
    for prefix in ("train/", "training/"):
        key = key.removeprefix(prefix)
    return key


def standard_names(keys: Iterable[str]) -> dict[str, str]:
    """For each of NAMES that a run has, the key that holds it."""
    by_normal: dict[str, str] = {}
    for key in keys:
        if key == normal_key(key) or normal_key(key) not in by_normal:
            by_normal[normal_key(key)] = key
    names: dict[str, str] = {}
    for name, aliases in ALIASES.items():
        match = next((by_normal[alias] for alias in (name, *aliases) if alias in by_normal), None)
        if match is None and name in PATTERNS:
            fitting = [key for normal, key in by_normal.items() if PATTERNS[name].match(normal)]
            match = fitting[0] if len(fitting) == 1 else None
        if match is not None and match not in names.values():
            names[name] = match
    return names


def step_column(columns: Iterable[str]) -> str | None:
    """The column that counts steps, if there is one."""
    by_normal = {column.strip().lower(): column for column in columns}
    return next((by_normal[key] for key in STEP_KEYS if key in by_normal), None)


def unit_factor(name: str, key: str) -> float:
    """What a value is multiplied with to be in the unit of NAMES, as far as the key tells."""
    key = key.lower()
    if name == "step_s" and re.search(r"\(ms\)|_ms$|\bms\b", key):
        return 1e-3
    if name == "memory_bytes" and re.search(r"gib|gb", key):
        return float(1 << 30)
    if name == "memory_bytes" and re.search(r"mib|mb", key):
        return float(1 << 20)
    return 0.01 if name == "mfu" and "%" in key else 1.0
