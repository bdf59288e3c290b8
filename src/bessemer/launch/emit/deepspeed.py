"""DeepSpeed: ds_config.json with every number filled in, and a script over `deepspeed.initialize` on our batches.

Sizes of buckets follow the width, as transformers' `auto` has them: reduce width^2, prefetch 0.9 width^2, persistence
10 width. The schedule is DeepSpeed's nearest: its warm-up is two updates behind ours and begins with a rate of zero;
from the second update after it on, cosine and constant rates are equal (tests/launch/emit/test_deepspeed.py).
"""

from __future__ import annotations

import json
from typing import Any

from bessemer.launch.emit.accelerate import OUR_DATA, SCHEDULE, TORCH, cover_transformers, recomputed
from bessemer.launch.emit.resolve import EmittedFiles, KeyLedger, ResolvedRun, first_weights, script

NAMES = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion"}  # DeepSpeed's own; others go by torch's names


def write(run: ResolvedRun, ledger: KeyLedger) -> EmittedFiles:
    cover_transformers(run, ledger)
    ledger.covers(*OUR_DATA, *SCHEDULE, "parallel.device", "parallel.dp_replicate", "parallel.dp_shard")
    ledger.covers("checkpoint.every")
    if len(run.plan.batch_rows) > 1:
        ledger.differs("budget.batch_changes", "train_batch_size is one number: the batch keeps its first size")
    settings = {
        "save_steps": run.save_steps(),
        "gradient_checkpointing": recomputed(run, ledger),
        "weight_decay": run.spec.optimizer.settings().get("weight_decay", 0.0),
    }
    config = ds_config(run, ledger)
    files = {
        "ds_config.json": json.dumps(config, indent=2) + "\n",
        "train.json": json.dumps(settings, indent=1),
        "train.py": script("train_deepspeed.py"),
        **run.one_batch_size(),
    }
    start = f"deepspeed --num_gpus {run.ranks} {run.folder}/train.py"
    if run.device == "cpu":
        start = f"DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node {run.ranks} {run.folder}/train.py"
    return EmittedFiles(files, f"{first_weights(run.folder)} && {start}", ledger.notes())


def ds_config(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    """The configuration as DeepSpeed reads it. train_batch_size = micro x accumulation x ranks."""
    batches, precision = run.batches(), run.plan.precision
    ledger.covers("precision")
    if precision not in ("fp32", "bf16", "fp16"):
        ledger.differs("precision", f"{precision}: {'fp32' if precision == 'tf32' else 'bf16'}")
    half = precision.startswith(("bf16", "fp8"))
    if half:
        ledger.differs("memory.weights", "passes are in bf16 from DeepSpeed's own fp32 copy")
    config: dict[str, Any] = {
        "train_batch_size": batches.rows,
        "train_micro_batch_size_per_gpu": batches.micro,
        "gradient_accumulation_steps": batches.accumulate,
        "gradient_clipping": run.spec.optimizer.clip,
        "optimizer": _optimizer(run, ledger),
        "scheduler": _scheduler(run, ledger),
        "zero_optimization": _zero(run, ledger),
        "bf16": {"enabled": half},
        "fp16": {"enabled": precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    if precision == "fp16":
        ledger.covers("loss_scale")
        scale = run.spec.loss_scale
        dynamic = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1}
        config["fp16"] |= dynamic if scale == "dynamic" else {"loss_scale": scale}
    if run.plan.activations != "none":
        config["activation_checkpointing"] = {
            "partition_activations": run.degree("tp") > 1,
            "cpu_checkpointing": run.spec.memory.offload_activations,
            "contiguous_memory_optimization": False,
            "number_checkpoints": run.shape.layers,
        }
        ledger.covers("memory.offload_activations")
    return config


def _optimizer(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    asked = run.spec.optimizer
    settings = dict(asked.settings())
    name = NAMES.get(asked.name) or TORCH.get(asked.name)
    if name is None:
        ledger.differs("optimizer.name", f"{asked.name} is not there: adamw with its usual settings stands in")
        name, settings = "AdamW", {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    else:
        ledger.covers("optimizer.name", *(f"optimizer.{key}" for key in settings))
    return {"type": name, "params": {"lr": run.plan.peak_lr, **settings}}


def _scheduler(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    plan, asked = run.plan, run.spec.schedule
    # One less: DeepSpeed counts updates from one, and our last update has the lowest rate.
    total, warmup = max(2, plan.total_steps - 1), max(2, plan.warmup_steps)
    ledger.differs("schedule.warmup", f"{plan.warmup_steps} steps: DeepSpeed's first rate is 0 and it lags two updates")
    if asked.kind == "cosine":
        ratios = {"warmup_min_ratio": 0.0, "cos_min_ratio": asked.floor}
        params: dict[str, Any] = {"total_num_steps": total, "warmup_num_steps": warmup, **ratios}
        return {"type": "WarmupCosineLR", "params": {**params, "warmup_type": "linear"}}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": plan.peak_lr, "warmup_num_steps": warmup, "warmup_type": "linear"}
    if asked.kind == "constant":
        return {"type": "WarmupLR", "params": rates}
    if asked.floor:
        ledger.differs("schedule.floor", f"{asked.floor:g}: WarmupDecayLR falls to zero")
    return {"type": "WarmupDecayLR", "params": {"total_num_steps": total, **rates}}


def _zero(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    """The stage and its buckets: what is asked of the engine. Where it is torch's, divided replicas are stage 3; plain
    ones share out the optimizer's state, stage 1."""
    parallel, width = run.spec.parallel, run.shape.width
    asked = parallel.deepspeed if parallel.engine == "deepspeed" else None
    if asked:
        ledger.covers("parallel.deepspeed")
        stage, where = int(asked.zero), str(asked.offload)
    else:
        stage = 3 if run.degree("dp_shard") > 1 else 1 if run.ranks > 1 else 0
        where = "cpu" if run.spec.memory.offload_optimizer else "none"
    if where != "none":
        stage = max(1, stage)  # offloading is ZeRO's
    ledger.covers("parallel.engine", "memory.offload_optimizer")
    if run.replicas > 1 and run.degree("dp_shard") > 1:
        ledger.differs("parallel.dp_replicate", "ZeRO 3 shards over all ranks; zero_hpz_partition_size keeps it local")
    bucket = width * width
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * bucket),
            "stage3_param_persistence_threshold": 10 * width,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1_000_000_000,
        }
        if run.replicas > 1:
            zero["zero_hpz_partition_size"] = run.degree("dp_shard")
    if where != "none":
        place: dict[str, Any] = {"device": where, "pin_memory": run.device == "cuda"}
        if asked and where == "nvme":
            place["nvme_path"] = asked.folder
        zero["offload_optimizer"] = place
        if stage == 3 and asked:
            zero["offload_param"] = dict(place)
    return zero
