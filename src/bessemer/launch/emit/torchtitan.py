"""Emits torchtitan 0.2.2 runs: a job config in TOML, and a module that registers the model sizes and batches.

torchtitan's Qwen3 network (query-key norms optional) equals Bessemer's decoder tensor by tensor: with the initial
weights it computes the same logits (tests/launch/emit/test_torchtitan.py). Learning rates are equal at every step.
"""

from __future__ import annotations

import json
from typing import Any

from bessemer.launch.emit import EmittedFiles, KeyCoverage, RunToEmit, comment_lines, read_script, weights_command
from bessemer.launch.emit.accelerate_deepspeed import BATCH_KEYS, SCHEDULE_KEYS
from bessemer.spec.shape import Rope

SUPPORTED = {"vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied", "norm_eps", "max_positions"}


def emit_torchtitan(run: RunToEmit, keys: KeyCoverage) -> EmittedFiles:
    """titan.toml, the model sizes, and bessemer_titan.py, which must be importable."""
    model_args = _model_args(run, keys)
    sections = _config(run, keys)
    notes = keys.notes()
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items()) + "\n"
        for name, section in sections.items()
    )
    files = {
        "titan.toml": text + comment_lines(notes).lstrip("\n"),
        "titan.json": json.dumps(model_args, indent=1),
        "bessemer_titan.py": read_script("bessemer_titan.py"),
        **run.constant_batch_file(),
    }
    start = f"torchrun --nproc-per-node {min(run.world, 8)} -m torchtitan.train --job.config_file"
    start = f"PYTHONPATH={run.folder}:$PYTHONPATH {start} {run.folder}/titan.toml"
    return EmittedFiles(files, f"{weights_command(run.folder)} && {start}", notes)


def _model_args(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    """Arguments of torchtitan's Qwen3 network."""
    shape, supported = run.shape, set(SUPPORTED)
    if shape.qk_norm in ("none", "head"):
        supported.add("qk_norm")
    if shape.rope == Rope(theta=shape.rope.theta):
        supported.add("rope")
    keys.cover_shape(shape, supported)
    if run.spec.model.init == "mup":
        keys.note("model.init", "mup: the initial weights are Bessemer's, learning rates are not scaled by width")
    separate, flex = not run.spec.data.cross_documents, run.device == "cuda"
    if separate and flex:
        difference = "FlexAttention separates documents, but the token that ends one still attends to it"
        keys.note("data.cross_documents", f"false: {difference}")
    elif separate:
        keys.note("data.cross_documents", "false: attention crosses documents, because FlexAttention needs a GPU")
    mask = {"attn_type": "flex", "attn_mask_type": "block_causal"} if separate and flex else {}
    return {
        "dim": shape.width, "n_layers": shape.layers, "n_heads": shape.heads, "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "hidden_dim": shape.ffn, "vocab_size": shape.vocab, "norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta, "qk_norm": shape.qk_norm == "head", "enable_weight_tying": shape.tied,
        "max_seq_len": shape.max_positions or run.plan.context, "eos_id": run.tokenizer.eos_id, **mask,
    }  # fmt: skip


def _config(run: RunToEmit, keys: KeyCoverage) -> dict[str, dict[str, Any]]:
    plan, spec, batches = run.plan, run.spec, run.batch_sizes()
    keys.cover(
        *BATCH_KEYS, *SCHEDULE_KEYS, "compile", "checkpoint.every", "checkpoint.keep_last", "checkpoint.asynchronous"
    )
    keys.cover_schedule(spec.schedule)
    if len(plan.batch_rows) > 1:
        keys.note("budget.batch_changes", "global_batch_size is one number: the batch keeps its first size")
    folder = run.folder.absolute()
    half = plan.precision not in ("fp32", "tf32")
    return {
        "job": {"dump_folder": str(folder / "outputs"), "description": spec.name},
        "experimental": {"custom_import": "bessemer_titan"},
        "model": {
            "name": "bessemer", "flavor": "run", "hf_assets_path": str(folder / "model"), **_converters(run, keys),
        },
        "optimizer": _optimizer(run, keys),
        "lr_scheduler": _schedule(run),
        "training": {
            "local_batch_size": batches.micro, "global_batch_size": batches.rows, "seq_len": plan.context,
            "max_norm": spec.optimizer.clip, "steps": plan.total_steps,
            "mixed_precision_param": "bfloat16" if half else "float32",
        } | _offload(run, keys),
        "parallelism": _parallelism(run, keys),
        "activation_checkpoint": _recompute(run, keys),
        "compile": {"enable": plan.compiled},
        "checkpoint": {
            "enable": True, "interval": run.save_steps(), "keep_latest_k": max(2, spec.checkpoint.keep_last),
            "initial_load_path": str(folder / "model"), "initial_load_in_hf": True,
            "async_mode": "async" if spec.checkpoint.asynchronous is True else "disabled",
        },
        "metrics": {"log_freq": 1},
        "debug": {"seed": spec.seed},
    }  # fmt: skip


def _schedule(run: RunToEmit) -> dict[str, Any]:
    warmup, schedule = run.plan.warmup_steps, run.spec.schedule
    kind = schedule.portable_kind
    if kind == "constant":
        return {"warmup_steps": warmup, "decay_ratio": 0.0}
    # One step less: Bessemer's last update has the lowest rate, torchtitan's would come after it.
    total = max(warmup + 1, run.plan.total_steps - 1)
    return {"warmup_steps": warmup, "total_steps": total, "decay_type": kind, "min_lr_factor": schedule.floor}


def _optimizer(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    keys.cover("memory.update")
    optimizer, settings = run.spec.optimizer, run.spec.optimizer.settings()
    if optimizer.name not in ("adamw", "adam"):
        keys.note("optimizer.name", f"{optimizer.name} is not in torchtitan: AdamW with its usual settings replaces it")
        settings = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    else:
        keys.cover("optimizer.name", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay")
    if settings["weight_decay"]:
        keys.note("optimizer.weight_decay", f"{settings['weight_decay']:g}: weights of norms are decayed as well")
    return {
        "name": "Adam" if optimizer.name == "adam" else "AdamW", "lr": run.plan.peak_lr, "beta1": settings["betas"][0],
        "beta2": settings["betas"][1], "eps": settings["eps"], "weight_decay": settings["weight_decay"],
        "early_step_in_backward": run.spec.memory.update == "in_backward",
    }  # fmt: skip


def _offload(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    if not run.spec.memory.offload_optimizer:
        return {}
    keys.note("memory.offload_optimizer", "weights and gradients are offloaded along with the moments")
    return {"enable_cpu_offload": True}


def _converters(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    keys.cover("precision")
    precision = run.plan.precision
    if precision in ("fp16", "tf32"):
        keys.note("precision", f"{precision}: {'bf16' if precision == 'fp16' else 'fp32'}")
    if precision.startswith("fp8"):
        keys.note("precision", f"{precision}: torchao's float8, in all layers that fit; set quantize.linear.float8")
        return {"converters": ["quantize.linear.float8"]}
    return {}


def _recompute(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    activations = run.plan.activations
    keys.cover("memory.activations")
    if isinstance(activations, float):
        keys.note("memory.activations", f"{activations:g}: a budget of torch.compile's partitioner")
        return {"mode": "memory_budget", "memory_budget": activations}
    if activations == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": activations}


def _parallelism(run: RunToEmit, keys: KeyCoverage) -> dict[str, Any]:
    keys.cover(*(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "device")))
    return {
        "data_parallel_replicate_degree": run.replicas, "data_parallel_shard_degree": run.degree("dp_shard"),
        "tensor_parallel_degree": run.degree("tp"), "context_parallel_degree": run.degree("cp"),
        "pipeline_parallel_degree": run.degree("pp"), "expert_parallel_degree": run.degree("ep"),
    }  # fmt: skip


def _toml(value: Any) -> str:
    """JSON and TOML agree on the values that are written here, except for floats."""
    return repr(value) if isinstance(value, float) else json.dumps(value)
