"""torchtitan 0.2.2: a job config in TOML, and a module that registers our network's sizes and our batches with it.

Its Qwen3 network, without query-key norms where there are none, is our decoder tensor by tensor: given the first
weights it puts out our logits (tests/launch/emit/test_torchtitan.py). Rates are ours at every step.
"""

from __future__ import annotations

import json
from typing import Any

from bessemer.launch.emit.accelerate import OUR_DATA, SCHEDULE
from bessemer.launch.emit.resolve import EmittedFiles, KeyLedger, ResolvedRun, comments, first_weights, script
from bessemer.spec.shape import Rope

HOLDS = {"vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied", "norm_eps", "max_positions"}


def write(run: ResolvedRun, ledger: KeyLedger) -> EmittedFiles:
    """titan.toml, the sizes, and bessemer_titan.py, which has to be importable."""
    flavour = _flavour(run, ledger)
    sections = _config(run, ledger)
    notes = ledger.notes()
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items()) + "\n"
        for name, section in sections.items()
    )
    files = {
        "titan.toml": text + comments(notes).lstrip("\n"),
        "titan.json": json.dumps(flavour, indent=1),
        "bessemer_titan.py": script("bessemer_titan.py"),
        **run.one_batch_size(),
    }
    start = f"torchrun --nproc-per-node {min(run.world, 8)} -m torchtitan.train --job.config_file"
    start = f"PYTHONPATH={run.folder}:$PYTHONPATH {start} {run.folder}/titan.toml"
    return EmittedFiles(files, f"{first_weights(run.folder)} && {start}", notes)


def _flavour(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    """Arguments of torchtitan's Qwen3 network."""
    shape, holds = run.shape, set(HOLDS)
    if shape.qk_norm in ("none", "head"):
        holds.add("qk_norm")
    if shape.rope == Rope(theta=shape.rope.theta):
        holds.add("rope")
    ledger.shape(shape, holds)
    if run.spec.model.init == "mup":
        ledger.differs("model.init", "mup: the first weights are ours, learning rates are not scaled by width")
    apart, flex = not run.spec.data.cross_documents, run.device == "cuda"
    if apart and flex:
        how = "documents are kept apart by FlexAttention, but the token that ends one still sees it"
        ledger.differs("data.cross_documents", f"false: {how}")
    elif apart:
        ledger.differs("data.cross_documents", "false: attention crosses documents, since FlexAttention needs a GPU")
    mask = {"attn_type": "flex", "attn_mask_type": "block_causal"} if apart and flex else {}
    return {
        "dim": shape.width, "n_layers": shape.layers, "n_heads": shape.heads, "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "hidden_dim": shape.ffn, "vocab_size": shape.vocab, "norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta, "qk_norm": shape.qk_norm == "head", "enable_weight_tying": shape.tied,
        "max_seq_len": shape.max_positions or run.plan.context, "eos_id": run.tokenizer.eos_id, **mask,
    }  # fmt: skip


def _config(run: ResolvedRun, ledger: KeyLedger) -> dict[str, dict[str, Any]]:
    plan, spec, batches = run.plan, run.spec, run.batches()
    ledger.covers(
        *OUR_DATA, *SCHEDULE, "compile", "checkpoint.every", "checkpoint.keep_last", "checkpoint.asynchronous"
    )
    if len(plan.batch_rows) > 1:
        ledger.differs("budget.batch_changes", "global_batch_size is one number: the batch keeps its first size")
    folder = run.folder.absolute()
    half = plan.precision not in ("fp32", "tf32")
    return {
        "job": {"dump_folder": str(folder / "outputs"), "description": spec.name},
        "experimental": {"custom_import": "bessemer_titan"},
        "model": {
            "name": "bessemer", "flavor": "run", "hf_assets_path": str(folder / "model"), **_converters(run, ledger),
        },
        "optimizer": _optimizer(run, ledger),
        "lr_scheduler": _schedule(run),
        "training": {
            "local_batch_size": batches.micro, "global_batch_size": batches.rows, "seq_len": plan.context,
            "max_norm": spec.optimizer.clip, "steps": plan.total_steps,
            "mixed_precision_param": "bfloat16" if half else "float32",
        } | _offload(run, ledger),
        "parallelism": _parallelism(run, ledger),
        "activation_checkpoint": _recompute(run, ledger),
        "compile": {"enable": plan.compiled},
        "checkpoint": {
            "enable": True, "interval": run.save_steps(), "keep_latest_k": max(2, spec.checkpoint.keep_last),
            "initial_load_path": str(folder / "model"), "initial_load_in_hf": True,
            "async_mode": "async" if spec.checkpoint.asynchronous is True else "disabled",
        },
        "metrics": {"log_freq": 1},
        "debug": {"seed": spec.seed},
    }  # fmt: skip


def _schedule(run: ResolvedRun) -> dict[str, Any]:
    warmup, asked = run.plan.warmup_steps, run.spec.schedule
    if asked.kind == "constant":
        return {"warmup_steps": warmup, "decay_ratio": 0.0}
    # One step less: our last update has the lowest rate, theirs would come after it.
    total = max(warmup + 1, run.plan.total_steps - 1)
    return {"warmup_steps": warmup, "total_steps": total, "decay_type": asked.kind, "min_lr_factor": asked.floor}


def _optimizer(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    asked, settings = run.spec.optimizer, run.spec.optimizer.settings()
    if asked.name not in ("adamw", "adam"):
        ledger.differs("optimizer.name", f"{asked.name} is not there: AdamW with its usual settings stands in")
        settings = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    else:
        ledger.covers("optimizer.name", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay")
    if settings["weight_decay"]:
        ledger.differs("optimizer.weight_decay", f"{settings['weight_decay']:g}: norms are decayed as well")
    return {
        "name": "Adam" if asked.name == "adam" else "AdamW", "lr": run.plan.peak_lr, "beta1": settings["betas"][0],
        "beta2": settings["betas"][1], "eps": settings["eps"], "weight_decay": settings["weight_decay"],
        "early_step_in_backward": _early(run, ledger),
    }  # fmt: skip


def _early(run: ResolvedRun, ledger: KeyLedger) -> bool:
    ledger.covers("memory.update")
    return run.spec.memory.update == "in_backward"


def _offload(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    if not run.spec.memory.offload_optimizer:
        return {}
    ledger.differs("memory.offload_optimizer", "weights and gradients go to the host along with the moments")
    return {"enable_cpu_offload": True}


def _converters(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    ledger.covers("precision")
    precision = run.plan.precision
    if precision in ("fp16", "tf32"):
        ledger.differs("precision", f"{precision}: {'bf16' if precision == 'fp16' else 'fp32'}")
    if precision.startswith("fp8"):
        ledger.differs(
            "precision", f"{precision}: torchao's float8, in all layers that fit; set quantize.linear.float8"
        )
        return {"converters": ["quantize.linear.float8"]}
    return {}


def _recompute(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    kept = run.plan.activations
    ledger.covers("memory.activations")
    if isinstance(kept, float):
        ledger.differs("memory.activations", f"{kept:g}: a budget of torch.compile's partitioner")
        return {"mode": "memory_budget", "memory_budget": kept}
    if kept == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": kept}


def _parallelism(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    ledger.covers(*(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "device")))
    return {
        "data_parallel_replicate_degree": run.replicas, "data_parallel_shard_degree": run.degree("dp_shard"),
        "tensor_parallel_degree": run.degree("tp"), "context_parallel_degree": run.degree("cp"),
        "pipeline_parallel_degree": run.degree("pp"), "expert_parallel_degree": run.degree("ep"),
    }  # fmt: skip


def _toml(value: Any) -> str:
    """JSON's words are TOML's, for what is written here."""
    return repr(value) if isinstance(value, float) else json.dumps(value)
