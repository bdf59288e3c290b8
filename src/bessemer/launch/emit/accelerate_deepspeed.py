"""Emits accelerate and DeepSpeed runs: both train the exported transformers model on Bessemer's batches in its order.

accelerate: a config for `accelerate launch`, and a script whose losses equal Bessemer's: on two gloo processes to 5e-5
of a single-process run over 20 steps (tests/launch/emit/test_accelerate.py).

DeepSpeed: ds_config.json with every number filled in, and a script over `deepspeed.initialize`. Bucket sizes follow
the width as transformers' `auto` does: reduce width^2, prefetch 0.9 width^2, persistence 10 width. The schedule is
DeepSpeed's nearest: its warm-up lags two updates and begins with a rate of zero; from the second update after the
warm-up on, cosine and constant rates are equal (tests/launch/emit/test_deepspeed.py).
"""

from __future__ import annotations

import json
from typing import Any

from bessemer.export.hf import choose_family
from bessemer.launch.emit import EmittedFiles, KeyCoverage, RunToEmit, comment_lines, read_script, weights_command

# Optimizers of torch, by their names in the spec.
TORCH_OPTIMIZERS = {
    "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "nadam": "NAdam",
    "radam": "RAdam", "adamax": "Adamax",
}  # fmt: skip
DECOUPLED_OPTIONS = ("nadam", "radam")  # torch decouples their weight decay only on request
# Keys that Bessemer's own batches, in its own order, express.
BATCH_KEYS = ("data", "tokenizer", "seed", "budget.tokens", "budget.steps", "budget.epochs", "budget.batch",
            "budget.micro_batch", "start_from")  # fmt: skip
SCHEDULE_KEYS = ("optimizer.lr", "optimizer.clip")


def emit_accelerate(run: RunToEmit, keys: KeyCoverage) -> EmittedFiles:
    """accelerate.yaml, train.py, and train.json with the numbers that train.py reads."""
    cover_model(run, keys)
    keys.cover(*BATCH_KEYS, *SCHEDULE_KEYS, "schedule", "budget.batch_changes", "parallel.device", "compile")
    keys.cover("parallel.dp_replicate", "parallel.dp_shard", "checkpoint.every", "checkpoint.keep_last")
    settings = {
        "optimizer": torch_optimizer(run, keys),
        "clip": run.spec.optimizer.clip,
        "gradient_checkpointing": recomputes_layers(run, keys),
        "save_steps": run.save_steps(),
        "keep_last": run.spec.checkpoint.keep_last,
        "cpu": run.device == "cpu",
    }
    config = _accelerate_config(run, keys)
    notes = keys.notes()
    files = {
        "accelerate.yaml": "".join(config) + comment_lines(notes),
        "train.json": json.dumps(settings, indent=1),
        "train.py": read_script("train_accelerate.py"),
    }
    start = f"accelerate launch --config_file {run.folder}/accelerate.yaml {run.folder}/train.py"
    return EmittedFiles(files, f"{weights_command(run.folder)} && {start}", notes)


def cover_model(run: RunToEmit, keys: KeyCoverage) -> None:
    """Cover the model, which is exported completely or refused; losses and capacities of experts are not expressed."""
    choose_family(run.shape, None)
    keys.cover("model")
    if run.spec.model.init == "mup":
        keys.note("model.init", "mup: the initial weights are Bessemer's, learning rates are not scaled by width")
    if run.shape.moe is not None:
        keys.note("model.moe", "experts: training ignores balance, router_z, bias_rate and capacity")


def torch_optimizer(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    """The class in torch.optim with its settings; AdamW and a note where torch has no such optimizer."""
    optimizer = run.spec.optimizer
    if optimizer.name not in TORCH_OPTIMIZERS:
        keys.note("optimizer.name", f"{optimizer.name} is not in torch: adamw with its usual settings replaces it")
        keys.note("optimizer.lr", f"{run.plan.peak_lr:g} was chosen for {optimizer.name}")
        return {"class": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    keys.cover("optimizer.name", *(f"optimizer.{key}" for key in optimizer.settings()))
    more = {"decoupled_weight_decay": True} if optimizer.name in DECOUPLED_OPTIONS else {}
    return {"class": TORCH_OPTIMIZERS[optimizer.name], **optimizer.settings(), **more}


def recomputes_layers(run: RunToEmit, keys: KeyCoverage) -> bool:
    """Whether whole layers are recomputed, the only kind of activation checkpointing that transformers has."""
    mode = run.plan.activations
    keys.cover("memory.activations")
    if mode not in ("none", "full"):
        keys.note("memory.activations", f"{mode}: whole layers are recomputed")
    return mode != "none"


def mixed_precision(run: RunToEmit, keys: KeyCoverage) -> str:
    """no, bf16 or fp16."""
    precision = run.plan.precision
    keys.cover("precision")
    if precision == "tf32":
        keys.note("precision", "tf32: fp32 without torch.backends.cuda.matmul.allow_tf32")
    if precision.startswith("fp8"):
        keys.note("precision", f"{precision}: bf16, unless you set up the framework's own fp8")
    return {"fp32": "no", "tf32": "no", "fp16": "fp16"}.get(precision, "bf16")


def _accelerate_config(run: RunToEmit, keys: KeyCoverage) -> list[str]:
    """The lines of accelerate.yaml."""
    cpu, sharded = run.device == "cpu", run.degree("dp_shard") > 1
    if sharded and cpu:
        keys.note("parallel.dp_shard", "accelerate shards on GPUs only: on a CPU the replicas are complete")
    kind = "NO" if run.ranks == 1 else "FSDP" if sharded and not cpu else "MULTI_GPU"
    entries: list[tuple[str, Any, str]] = [
        ("compute_environment", "LOCAL_MACHINE", ""),
        ("distributed_type", kind, "with use_cpu: gloo processes started by torchrun" if cpu else ""),
        ("use_cpu", cpu, f"parallel.device: {run.device}"),
        ("num_processes", run.ranks, "dp_replicate x dp_shard"),
        ("num_machines", 1, "for several, also set machine_rank and main_process_ip on each"),
        ("machine_rank", 0, ""),
        ("mixed_precision", f"'{mixed_precision(run, keys)}'", f"precision: {run.plan.precision}"),
        ("dynamo_backend", "INDUCTOR" if run.plan.compiled else "'NO'", "compile"),
    ]
    lines = [_yaml_line(*entry) for entry in entries]
    if kind != "FSDP":
        return lines
    lines.append("fsdp_config:\n")
    parts: list[tuple[str, Any, str]] = [
        ("fsdp_version", 2, "fully_shard"),
        ("fsdp_reshard_after_forward", True, "full shard"),
        ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "by the model's own layers"),
        ("fsdp_state_dict_type", "SHARDED_STATE_DICT", ""),
        ("fsdp_cpu_ram_efficient_loading", True, "only rank 0 reads the weights"),
        ("fsdp_offload_params", run.spec.memory.offload_optimizer, "memory.offload_optimizer"),
    ]
    lines += ["  " + _yaml_line(*part) for part in parts]
    if run.spec.memory.offload_optimizer:
        keys.note("memory.offload_optimizer", "weights are offloaded along with the moments")
    if run.replicas > 1:
        lines.append("parallelism_config:\n")
        for name, size in (("dp_replicate", run.replicas), ("dp_shard", run.degree("dp_shard"))):
            lines.append(f"  parallelism_config_{name}_size: {size}\n")
    return lines


def _yaml_line(key: str, value: Any, comment: str) -> str:
    value = str(value).lower() if isinstance(value, bool) else value
    return f"{key}: {value}{f'  # {comment}' if comment else ''}\n"


DEEPSPEED_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion"}  # others have torch's names


def emit_deepspeed(run: RunToEmit, keys: KeyCoverage) -> EmittedFiles:
    """ds_config.json, train.py, and train.json with the numbers that train.py reads."""
    cover_model(run, keys)
    keys.cover(*BATCH_KEYS, *SCHEDULE_KEYS, "parallel.device", "parallel.dp_replicate", "parallel.dp_shard")
    keys.cover("checkpoint.every")
    keys.cover_schedule(run.spec.schedule)
    if len(run.plan.batch_rows) > 1:
        keys.note("budget.batch_changes", "train_batch_size is one number: the batch keeps its first size")
    settings = {
        "save_steps": run.save_steps(),
        "gradient_checkpointing": recomputes_layers(run, keys),
        "weight_decay": run.spec.optimizer.settings().get("weight_decay", 0.0),
    }
    config = ds_config(run, keys)
    files = {
        "ds_config.json": json.dumps(config, indent=2) + "\n",
        "train.json": json.dumps(settings, indent=1),
        "train.py": read_script("train_deepspeed.py"),
        **run.constant_batch_file(),
    }
    start = f"deepspeed --num_gpus {run.ranks} {run.folder}/train.py"
    if run.device == "cpu":
        start = f"DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node {run.ranks} {run.folder}/train.py"
    return EmittedFiles(files, f"{weights_command(run.folder)} && {start}", keys.notes())


def ds_config(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    """The content of ds_config.json. train_batch_size = micro x accumulation x ranks."""
    batches, precision = run.batch_sizes(), run.plan.precision
    keys.cover("precision")
    if precision not in ("fp32", "bf16", "fp16"):
        keys.note("precision", f"{precision}: {'fp32' if precision == 'tf32' else 'bf16'}")
    half = precision.startswith(("bf16", "fp8"))
    if half:
        keys.note("memory.weights", "forward and backward run in bf16 from DeepSpeed's own fp32 copy")
    config: dict[str, Any] = {
        "train_batch_size": batches.rows,
        "train_micro_batch_size_per_gpu": batches.micro,
        "gradient_accumulation_steps": batches.accumulate,
        "gradient_clipping": run.spec.optimizer.clip,
        "optimizer": _deepspeed_optimizer(run, keys),
        "scheduler": _scheduler(run, keys),
        "zero_optimization": _zero(run, keys),
        "bf16": {"enabled": half},
        "fp16": {"enabled": precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    if precision == "fp16":
        keys.cover("loss_scale")
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
        keys.cover("memory.offload_activations")
    return config


def _deepspeed_optimizer(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    optimizer = run.spec.optimizer
    settings = dict(optimizer.settings())
    name = DEEPSPEED_OPTIMIZERS.get(optimizer.name) or TORCH_OPTIMIZERS.get(optimizer.name)
    if name is None:
        keys.note("optimizer.name", f"{optimizer.name} is not in DeepSpeed: adamw with its usual settings replaces it")
        name, settings = "AdamW", {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    else:
        keys.cover("optimizer.name", *(f"optimizer.{key}" for key in settings))
    return {"type": name, "params": {"lr": run.plan.peak_lr, **settings}}


def _scheduler(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    plan, schedule = run.plan, run.spec.schedule
    # One less: DeepSpeed counts updates from one, and our last update has the lowest rate.
    total, warmup = max(2, plan.total_steps - 1), max(2, plan.warmup_steps)
    keys.note("schedule.warmup", f"{plan.warmup_steps} steps: DeepSpeed starts at rate 0 and lags two updates")
    if schedule.portable_kind == "cosine":
        ratios = {"warmup_min_ratio": 0.0, "cos_min_ratio": schedule.floor}
        params: dict[str, Any] = {"total_num_steps": total, "warmup_num_steps": warmup, **ratios}
        return {"type": "WarmupCosineLR", "params": {**params, "warmup_type": "linear"}}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": plan.peak_lr, "warmup_num_steps": warmup, "warmup_type": "linear"}
    if schedule.portable_kind == "constant":
        return {"type": "WarmupLR", "params": rates}
    if schedule.floor:
        keys.note("schedule.floor", f"{schedule.floor:g}: WarmupDecayLR falls to zero")
    return {"type": "WarmupDecayLR", "params": {"total_num_steps": total, **rates}}


def _zero(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    """ZeRO stage and buckets: those of parallel.deepspeed, or for torch's engine stage 3 for sharded replicas and
    stage 1 for several plain ones."""
    parallel, width = run.spec.parallel, run.shape.width
    engine = parallel.deepspeed if parallel.engine == "deepspeed" else None
    if engine:
        keys.cover("parallel.deepspeed")
        stage, offload = int(engine.zero), str(engine.offload)
    else:
        stage = 3 if run.degree("dp_shard") > 1 else 1 if run.ranks > 1 else 0
        offload = "cpu" if run.spec.memory.offload_optimizer else "none"
    if offload != "none":
        stage = max(1, stage)  # only ZeRO offloads
    keys.cover("parallel.engine", "memory.offload_optimizer")
    if run.replicas > 1 and run.degree("dp_shard") > 1:
        keys.note("parallel.dp_replicate", "ZeRO 3 shards over all ranks; zero_hpz_partition_size keeps gathers local")
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
    if offload != "none":
        target: dict[str, Any] = {"device": offload, "pin_memory": run.device == "cuda"}
        if engine and offload == "nvme":
            target["nvme_path"] = engine.folder
        zero["offload_optimizer"] = target
        if stage == 3 and engine:
            zero["offload_param"] = dict(target)
    return zero
