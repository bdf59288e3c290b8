"""Hugging Face accelerate: a config for `accelerate launch`, and a training script whose losses equal ours.

The script trains the exported transformers model on our batches in our order (`feed.py`); on two gloo processes its
losses were those of a single-process run to 5e-5 over 20 steps (tests/launch/emit/test_accelerate.py).
"""

from __future__ import annotations

import json
from typing import Any

from bessemer.export.hf import choose_family
from bessemer.launch.emit.resolve import EmittedFiles, KeyLedger, ResolvedRun, comments, first_weights, script

# Optimizers that torch has, by the names of the spec.
TORCH = {
    "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "nadam": "NAdam",
    "radam": "RAdam", "adamax": "Adamax",
}  # fmt: skip
DECOUPLED = ("nadam", "radam")
# What our own batches, in our own order, carry along.
OUR_DATA = ("data", "tokenizer", "seed", "budget.tokens", "budget.steps", "budget.epochs", "budget.batch",
            "budget.micro_batch", "start_from")  # fmt: skip
SCHEDULE = ("schedule", "optimizer.lr", "optimizer.clip")


def write(run: ResolvedRun, ledger: KeyLedger) -> EmittedFiles:
    """accelerate.yaml, train.py and the numbers that train.py reads."""
    cover_transformers(run, ledger)
    ledger.covers(*OUR_DATA, *SCHEDULE, "budget.batch_changes", "parallel.device", "compile")
    ledger.covers("parallel.dp_replicate", "parallel.dp_shard", "checkpoint.every", "checkpoint.keep_last")
    settings = {
        "optimizer": torch_optimizer(run, ledger),
        "clip": run.spec.optimizer.clip,
        "gradient_checkpointing": recomputed(run, ledger),
        "save_steps": run.save_steps(),
        "keep_last": run.spec.checkpoint.keep_last,
        "cpu": run.device == "cpu",
    }
    config = _config(run, ledger)
    notes = ledger.notes()
    files = {
        "accelerate.yaml": "".join(config) + comments(notes),
        "train.json": json.dumps(settings, indent=1),
        "train.py": script("train_accelerate.py"),
    }
    start = f"accelerate launch --config_file {run.folder}/accelerate.yaml {run.folder}/train.py"
    return EmittedFiles(files, f"{first_weights(run.folder)} && {start}", notes)


def cover_transformers(run: ResolvedRun, ledger: KeyLedger) -> None:
    """The model is exported whole, or refused; what is only training of its experts stays behind."""
    choose_family(run.shape, None)
    ledger.covers("model")
    if run.spec.model.init == "mup":
        ledger.differs("model.init", "mup: the first weights are ours, learning rates are not scaled by width")
    if run.shape.moe is not None:
        ledger.differs("model.moe", "experts: balance, router_z, bias_rate and capacity are not trained with")


def torch_optimizer(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    """The class in torch.optim with its settings; AdamW, and a note, where torch has none that is like ours."""
    asked = run.spec.optimizer
    if asked.name not in TORCH:
        ledger.differs("optimizer.name", f"{asked.name} is not torch's: adamw with its usual settings stands in")
        ledger.differs("optimizer.lr", f"{run.plan.peak_lr:g} was meant for {asked.name}")
        return {"class": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    ledger.covers("optimizer.name", *(f"optimizer.{key}" for key in asked.settings()))
    more = {"decoupled_weight_decay": True} if asked.name in DECOUPLED else {}
    return {"class": TORCH[asked.name], **asked.settings(), **more}


def recomputed(run: ResolvedRun, ledger: KeyLedger) -> bool:
    """Whether whole layers are computed again, which is all that transformers can."""
    kept = run.plan.activations
    ledger.covers("memory.activations")
    if kept not in ("none", "full"):
        ledger.differs("memory.activations", f"{kept}: whole layers are computed again")
    return kept != "none"


def mixed_precision(run: ResolvedRun, ledger: KeyLedger) -> str:
    """no, bf16 or fp16."""
    precision = run.plan.precision
    ledger.covers("precision")
    if precision == "tf32":
        ledger.differs("precision", "tf32: fp32 without torch.backends.cuda.matmul.allow_tf32")
    if precision.startswith("fp8"):
        ledger.differs("precision", f"{precision}: bf16, until the framework's own fp8 is set up")
    return {"fp32": "no", "tf32": "no", "fp16": "fp16"}.get(precision, "bf16")


def _config(run: ResolvedRun, ledger: KeyLedger) -> list[str]:
    """The lines of accelerate.yaml."""
    cpu, sharded = run.device == "cpu", run.degree("dp_shard") > 1
    if sharded and cpu:
        ledger.differs("parallel.dp_shard", "accelerate shards on GPUs only: replicas on a CPU")
    kind = "NO" if run.ranks == 1 else "FSDP" if sharded and not cpu else "MULTI_GPU"
    said: list[tuple[str, Any, str]] = [
        ("compute_environment", "LOCAL_MACHINE", ""),
        ("distributed_type", kind, "with use_cpu: gloo processes, which torchrun starts" if cpu else ""),
        ("use_cpu", cpu, f"parallel.device: {run.device}"),
        ("num_processes", run.ranks, "dp_replicate x dp_shard"),
        ("num_machines", 1, "raise it, and set machine_rank and main_process_ip on each"),
        ("machine_rank", 0, ""),
        ("mixed_precision", f"'{mixed_precision(run, ledger)}'", f"precision: {run.plan.precision}"),
        ("dynamo_backend", "INDUCTOR" if run.plan.compiled else "'NO'", "compile"),
    ]
    lines = [_line(*entry) for entry in said]
    if kind != "FSDP":
        return lines
    lines.append("fsdp_config:\n")
    parts: list[tuple[str, Any, str]] = [
        ("fsdp_version", 2, "fully_shard"),
        ("fsdp_reshard_after_forward", True, "full shard"),
        ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "by the model's own layers"),
        ("fsdp_state_dict_type", "SHARDED_STATE_DICT", ""),
        ("fsdp_cpu_ram_efficient_loading", True, "only the first rank reads the weights"),
        ("fsdp_offload_params", run.spec.memory.offload_optimizer, "memory.offload_optimizer"),
    ]
    lines += ["  " + _line(*part) for part in parts]
    if run.spec.memory.offload_optimizer:
        ledger.differs("memory.offload_optimizer", "weights go to the host along with the moments")
    if run.replicas > 1:
        lines.append("parallelism_config:\n")
        for name, size in (("dp_replicate", run.replicas), ("dp_shard", run.degree("dp_shard"))):
            lines.append(f"  parallelism_config_{name}_size: {size}\n")
    return lines


def _line(key: str, value: Any, why: str) -> str:
    value = str(value).lower() if isinstance(value, bool) else value
    return f"{key}: {value}{f'  # {why}' if why else ''}\n"
