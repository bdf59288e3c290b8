"""Emits Megatron-LM runs: the arguments of `pretrain_gpt.py`, each with the spec key it comes from.

Bessemer's token stores are Megatron's `.bin/.idx` files; Megatron draws sequences from them in its own order. Learning
rates after the warm-up are equal: the decay ends one iteration earlier there, because Bessemer's last update has the
lowest rate.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.launch.emit import EmittedFiles, KeyCoverage, RunToEmit, comment_lines, weights_command

Argument = tuple[str, Any, str]  # flag, its value (None for a switch), the spec key it comes from
SUPPORTED = {
    "vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied", "norm_eps", "norm", "max_positions",
    "positions", "rope", "moe", "mla",
}  # fmt: skip
SOURCE_KEYS = (
    "format",
    "text_field",
    "id_field",
    "url_field",
    "messages_field",
    "include",
    "exclude",
    "storage",
    "domain",
)
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none", "relative": "relative"}


def emit_megatron(run: RunToEmit, keys: KeyCoverage) -> EmittedFiles:
    """megatron.sh, which starts torchrun with all the arguments."""
    groups = {
        "The network": list(_network(run, keys)),
        "Batches and length": list(_batches(run, keys)),
        "Optimizer and rates": list(_optimizer(run, keys)),
        "Precision and memory": list(_memory(run, keys)),
        "Layout": list(_layout(run, keys)),
        "Data": list(_data(run, keys)),
        "Saves and evaluation": list(_saves(run, keys)),
    }
    notes = keys.notes()
    lines = [f"#!/bin/bash\n# {run.spec.name} for Megatron-LM: run in a checkout of it.\nset -e\narguments=(\n"]
    for title, group in groups.items():
        lines.append(f"  # {title}\n")
        for flag, value, key in group:
            text = "" if value is None else f" {value}" if flag == "--data-path" else f" {shlex.quote(str(value))}"
            lines.append(f"  {flag}{text}{f'  # {key}' if key else ''}\n")
    nodes = 'torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"'
    lines.append(f")\n{nodes} \\\n  --nproc-per-node {min(run.world, 8)} pretrain_gpt.py" + ' "${arguments[@]}"\n')
    start = f"{weights_command(run.folder)} && bash {run.folder}/megatron.sh"
    return EmittedFiles({"megatron.sh": "".join(lines) + comment_lines(notes)}, start, notes)


def _network(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    shape, supported = run.shape, set(SUPPORTED)
    yield "--num-layers", shape.layers, "model.layers"
    yield "--hidden-size", shape.width, "model.width"
    yield "--ffn-hidden-size", shape.ffn, "model.ffn"
    yield "--num-attention-heads", shape.heads, "model.heads"
    yield "--kv-channels", shape.head_dim, "model.head_dim"
    if shape.kv_heads != shape.heads:
        yield "--group-query-attention", None, ""
        yield "--num-query-groups", shape.kv_heads, "model.kv_heads"
    yield "--position-embedding-type", POSITIONS.get(shape.positions, "rope"), "model.positions"
    if shape.positions not in POSITIONS:
        supported.discard("positions")
    yield "--max-position-embeddings", shape.max_positions or run.plan.context, ""
    if shape.positions == "rope":
        yield from _rope(run, keys)
    yield "--normalization", "RMSNorm" if shape.norm == "rms" else "LayerNorm", "model.norm"
    yield "--norm-epsilon", shape.norm_eps, "model.norm_eps"
    if shape.gated and shape.activation == "silu":
        yield "--swiglu", None, "model.activation: silu, gated"
    elif not shape.gated and shape.activation == "relu2":
        yield "--squared-relu", None, "model.activation: relu2"
    if (shape.gated, shape.activation) in ((True, "silu"), (False, "relu2"), (False, "gelu")):
        supported |= {"gated", "activation"}
    if shape.qk_norm == "head":
        yield "--qk-layernorm", None, "model.qk_norm: head"
        supported.add("qk_norm")
    if not shape.ffn_bias and not shape.out_bias:
        yield "--disable-bias-linear", None, ""
        if shape.qkv_bias:
            yield "--add-qkv-bias", None, "model.qkv_bias"
            supported.add("qkv_bias")
    elif shape.ffn_bias and shape.out_bias and shape.qkv_bias:
        supported |= {"qkv_bias", "out_bias", "ffn_bias"}
    if not shape.tied:
        yield "--untie-embeddings-and-output-weights", None, "model.tied: false"
    yield "--make-vocab-size-divisible-by", 1, f"{shape.vocab} tokens, not padded"
    yield from _experts(run, keys)
    if (mla := shape.mla) is not None:
        yield "--multi-latent-attention", None, "model.mla"
        yield "--kv-lora-rank", mla.kv_rank, ""
        yield "--qk-head-dim", mla.nope_dim, ""
        yield "--qk-pos-emb-head-dim", mla.rope_dim, ""
        yield "--v-head-dim", mla.value_dim, ""
        if mla.q_rank:
            yield "--q-lora-rank", mla.q_rank, ""
    yield "--attention-dropout", run.spec.dropout.attention, "dropout.attention"
    yield "--hidden-dropout", run.spec.dropout.residual, "dropout.residual"
    keys.cover("dropout.attention", "dropout.residual")
    yield "--init-method-std", 0.02, "model.init: gpt"
    yield "--seed", run.spec.seed or 1, "Megatron's seeds begin at 1"
    keys.cover_shape(shape, supported)
    difference = "Megatron draws its own initial weights; Megatron-Bridge turns model/ into a checkpoint to --load"
    keys.note("seed", f"{run.spec.seed}: {difference}")
    for key in ("model.init", "start_from", "model.hf"):
        if key in keys.changed:
            keys.note(key, difference)


def _rope(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    rope = run.shape.rope
    yield "--rotary-base", int(rope.theta), "model.rope.theta"
    yield "--rotary-percent", rope.share, "model.rope.share"
    if rope.interleaved:
        yield "--rotary-interleaved", None, "model.rope.interleaved"
    if rope.scaling == "llama3":
        yield "--use-rope-scaling", None, "model.rope.scaling: llama3"
        yield "--rope-scaling-factor", rope.factor, "model.rope.factor"
    elif rope.scaling != "none":
        keys.note("model.rope", f"{rope.scaling} x{rope.factor:g} has no argument: positions are not scaled")


def _experts(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    moe = run.shape.moe
    if moe is None:
        return
    yield "--num-experts", moe.experts, "model.moe.experts"
    yield "--moe-router-topk", moe.top_k, "model.moe.top_k"
    yield "--moe-ffn-hidden-size", moe.ffn, "model.moe.ffn"
    yield "--moe-router-score-function", moe.score, "model.moe.score"
    yield "--moe-aux-loss-coeff", moe.balance, "model.moe.balance"
    yield "--moe-z-loss-coeff", moe.router_z, "model.moe.router_z"
    if moe.shared:
        yield "--moe-shared-expert-intermediate-size", moe.shared * moe.ffn, "model.moe.shared"
    if moe.scale != 1.0:
        yield "--moe-router-topk-scaling-factor", moe.scale, "model.moe.scale"
    if not moe.normalise:
        yield "--moe-router-pre-softmax", None, "model.moe.normalise: false"
    if moe.choice_bias:
        yield "--moe-router-enable-expert-bias", None, "model.moe.choice_bias"
        yield "--moe-router-bias-update-rate", moe.bias_rate, "model.moe.bias_rate"
    if moe.groups > 1:
        yield "--moe-router-num-groups", moe.groups, "model.moe.groups"
        yield "--moe-router-group-topk", moe.top_groups, "model.moe.top_groups"
    if moe.capacity is not None:
        yield "--moe-expert-capacity-factor", moe.capacity, "model.moe.capacity"
    if moe.dense_layers:
        pattern = [int(layer not in moe.dense_layers) for layer in range(run.shape.layers)]
        yield "--moe-layer-freq", str(pattern).replace(" ", ""), "model.moe.dense_layers"
    keys.cover("parallel.ep")
    yield "--expert-model-parallel-size", run.degree("ep"), "parallel.ep"


def _batches(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    batches = run.batch_sizes()
    yield "--seq-length", run.plan.context, "data.context"
    yield "--micro-batch-size", batches.micro, "budget.micro_batch"
    yield "--global-batch-size", batches.rows, f"budget.batch: {batches.rows} sequences"
    yield "--train-iters", run.plan.total_steps, "the budget in steps"
    keys.cover("data.context", *(f"budget.{key}" for key in ("micro_batch", "batch", "tokens", "steps", "epochs")))
    if stop := run.spec.budget.stop.time:
        yield "--exit-duration-in-mins", max(1, int(stop / 60)), "budget.stop.time"
        keys.cover("budget.stop.time")


def _optimizer(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    optimizer, plan, settings = run.spec.optimizer, run.plan, run.spec.optimizer.settings()
    keys.cover_schedule(run.spec.schedule)
    keys.cover("optimizer.lr", "optimizer.clip", "optimizer.weight_decay")
    yield "--optimizer", "sgd" if optimizer.name == "sgd" else "adam", "adam is AdamW there"
    if optimizer.name in ("adamw", "adam", "sgd"):
        names = ["momentum"] if optimizer.name == "sgd" else ["betas", "eps"]
        keys.cover("optimizer.name", *(f"optimizer.{key}" for key in names))
    else:
        keys.note("optimizer.name", f"{optimizer.name} is not in Megatron: AdamW replaces it")
    if optimizer.name == "sgd":
        yield "--sgd-momentum", settings["momentum"], "optimizer.momentum"
    else:
        betas = settings.get("betas", [0.9, 0.95])
        yield "--adam-beta1", betas[0], "optimizer.betas"
        yield "--adam-beta2", betas[1], ""
        yield "--adam-eps", settings.get("eps", 1e-8), "optimizer.eps"
    if optimizer.name == "adam" and settings["weight_decay"]:
        keys.note("optimizer.weight_decay", "Megatron decouples it from the gradient")
    yield "--weight-decay", settings.get("weight_decay", 0.0), "optimizer.weight_decay"
    yield "--clip-grad", optimizer.clip, "optimizer.clip"
    yield "--lr", plan.peak_lr, "optimizer.lr"
    yield "--lr-decay-style", run.spec.schedule.portable_kind, "schedule.kind"
    yield "--min-lr", run.spec.schedule.floor * plan.peak_lr, "schedule.floor"
    yield "--lr-warmup-iters", plan.warmup_steps, "schedule.warmup"
    yield "--lr-warmup-init", plan.peak_lr / max(1, plan.warmup_steps), "so that the first update does something"
    yield "--lr-decay-iters", max(plan.warmup_steps + 1, plan.total_steps - 1), ""
    keys.note("schedule.warmup", f"{plan.warmup_steps} steps: Megatron reaches the peak one iteration later")


def _memory(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    precision, activations = run.plan.precision, run.plan.activations
    keys.cover("precision", "loss_scale", "memory.activations", "memory.offload_optimizer")
    if precision in ("bf16", "fp16"):
        yield f"--{precision}", None, "precision"
    elif precision.startswith("fp8"):
        yield "--bf16", None, ""
        yield "--fp8-format", "hybrid", f"precision: {precision}"
        yield "--fp8-recipe", "tensorwise" if precision == "fp8" else "delayed", ""
        keys.note("precision", f"{precision}: Transformer Engine's recipe")
    elif precision == "tf32":
        keys.note("precision", "tf32: fp32")
    if precision == "fp16" and run.spec.loss_scale != "dynamic":
        yield "--loss-scale", run.spec.loss_scale, "loss_scale"
    if activations == "selective":
        yield "--recompute-granularity", "selective", "memory.activations"
    elif activations != "none":
        yield "--recompute-granularity", "full", f"memory.activations: {activations}"
        yield "--recompute-method", "uniform", ""
        yield "--recompute-num-layers", 1, ""
        if activations != "full":
            keys.note("memory.activations", f"{activations}: all layers are recomputed")
    if run.spec.memory.offload_optimizer:
        yield "--optimizer-cpu-offload", None, "memory.offload_optimizer"


def _layout(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    keys.cover(*(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "device")))
    yield "--tensor-model-parallel-size", run.degree("tp"), "parallel.tp"
    yield "--pipeline-model-parallel-size", run.degree("pp"), "parallel.pp"
    yield "--context-parallel-size", run.degree("cp"), "parallel.cp"
    if run.degree("tp") > 1:
        yield "--sequence-parallel", None, "norms and residuals are sharded along the sequence"
    if run.degree("dp_shard") > 1:
        yield "--use-distributed-optimizer", None, "parallel.dp_shard: optimizer state is sharded over all replicas"
        yield "--overlap-grad-reduce", None, ""
        yield "--overlap-param-gather", None, ""
        keys.note("parallel.dp_shard", "only optimizer state is sharded (ZeRO 1); --use-megatron-fsdp shards all")
    if run.device != "cuda":
        keys.note("parallel.device", "Megatron-LM trains on GPUs only")


def _data(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    spec = run.spec.data
    mixture = run.plan.mixtures[0][1]
    parts = []
    for name, share in mixture.shares.items():
        stores = run.stores.get(name, [])
        sizes = [store.with_suffix(store.suffix + ".bin").stat().st_size for store in stores]
        for store, size in zip(stores, sizes, strict=True):
            parts += [f"{share * size / sum(sizes):.6g}", shlex.quote(str(store))]
    if not parts:
        raise UserError("data.store: Megatron-LM reads local token files: remove data.store to prepare them here")
    yield "--data-path", " ".join(parts), "share and token files of each source, curated and tokenized"
    keys.cover("data.sources.*.weight", "data.sources.*.path", "data.mix", "data.clean", "data.sources.*.clean")
    keys.cover("data.validation", "data.bad_rows", "data.part", *(f"data.sources.*.{key}" for key in SOURCE_KEYS))
    yield "--split", "100,0,0", "these files have no held-out documents"
    yield "--tokenizer-type", "HuggingFaceTokenizer", ""
    yield "--tokenizer-model", run.folder.absolute() / "model", "holds the tokenizer and the initial weights"
    keys.cover("tokenizer")
    if not spec.cross_documents:
        yield "--reset-position-ids", None, "data.cross_documents: false"
        yield "--reset-attention-mask", None, ""
    keys.cover("data.cross_documents")
    keys.note("data.sources", "the same token files, in Megatron's own order")


def _saves(run: RunToEmit, keys: KeyCoverage) -> Iterator[Argument]:
    keys.cover("checkpoint.every", "checkpoint.asynchronous")
    yield "--save", run.folder.absolute() / "checkpoints", ""
    yield "--load", run.folder.absolute() / "checkpoints", "resumes where it stopped"
    yield "--save-interval", run.save_steps(), "checkpoint.every"
    yield "--ckpt-format", "torch_dist", ""
    if run.spec.checkpoint.asynchronous is True:
        yield "--async-save", None, "checkpoint.asynchronous"
    yield "--eval-iters", 0, "no held-out documents in these files"
    yield "--log-interval", 1, ""
