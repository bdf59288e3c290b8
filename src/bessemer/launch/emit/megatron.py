"""Megatron-LM: the arguments of `pretrain_gpt.py`, one a line with what it corresponds to, over our own token files.

Our stores are Megatron's `.bin/.idx`; it deals its sequences from them in an order of its own. Rates after the warm-up
are equal: the decay ends one iteration earlier there, since our last update has the lowest rate.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from bessemer.errors import UserError
from bessemer.launch.emit.resolve import EmittedFiles, KeyLedger, ResolvedRun, comments, first_weights

Argument = tuple[str, Any, str]  # flag, its value (None: it has none), what it corresponds to
HOLDS = {
    "vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied", "norm_eps", "norm", "max_positions",
    "positions", "rope", "moe", "mla",
}  # fmt: skip
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none", "relative": "relative"}
ADAM = ("adamw", "adam")


def write(run: ResolvedRun, ledger: KeyLedger) -> EmittedFiles:
    """megatron.sh, which ends by starting torchrun with all the arguments."""
    groups = {
        "The network": list(_network(run, ledger)),
        "Batches and length": list(_batches(run, ledger)),
        "Optimizer and rates": list(_optimizer(run, ledger)),
        "Precision and memory": list(_memory(run, ledger)),
        "Layout": list(_layout(run, ledger)),
        "Data": list(_data(run, ledger)),
        "Saves and evaluation": list(_saves(run, ledger)),
    }
    notes = ledger.notes()
    lines = [f"#!/bin/bash\n# {run.spec.name} for Megatron-LM: run in a checkout of it.\nset -e\narguments=(\n"]
    for title, group in groups.items():
        lines.append(f"  # {title}\n")
        for flag, value, why in group:
            given = "" if value is None else f" {value}" if flag == "--data-path" else f" {shlex.quote(str(value))}"
            lines.append(f"  {flag}{given}{f'  # {why}' if why else ''}\n")
    nodes = 'torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"'
    lines.append(f")\n{nodes} \\\n  --nproc-per-node {min(run.world, 8)} pretrain_gpt.py" + ' "${arguments[@]}"\n')
    start = f"{first_weights(run.folder)} && bash {run.folder}/megatron.sh"
    return EmittedFiles({"megatron.sh": "".join(lines) + comments(notes)}, start, notes)


def _network(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    shape, holds = run.shape, set(HOLDS)
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
        holds.discard("positions")
    yield "--max-position-embeddings", shape.max_positions or run.plan.context, ""
    if shape.positions == "rope":
        yield from _rope(run, ledger)
    yield "--normalization", "RMSNorm" if shape.norm == "rms" else "LayerNorm", "model.norm"
    yield "--norm-epsilon", shape.norm_eps, "model.norm_eps"
    if shape.gated and shape.activation == "silu":
        yield "--swiglu", None, "model.activation: silu, gated"
    elif not shape.gated and shape.activation == "relu2":
        yield "--squared-relu", None, "model.activation: relu2"
    if (shape.gated, shape.activation) in ((True, "silu"), (False, "relu2"), (False, "gelu")):
        holds |= {"gated", "activation"}
    if shape.qk_norm == "head":
        yield "--qk-layernorm", None, "model.qk_norm: head"
        holds.add("qk_norm")
    if not shape.ffn_bias and not shape.out_bias:
        yield "--disable-bias-linear", None, ""
        if shape.qkv_bias:
            yield "--add-qkv-bias", None, "model.qkv_bias"
            holds.add("qkv_bias")
    elif shape.ffn_bias and shape.out_bias and shape.qkv_bias:
        holds |= {"qkv_bias", "out_bias", "ffn_bias"}
    if not shape.tied:
        yield "--untie-embeddings-and-output-weights", None, "model.tied: false"
    yield "--make-vocab-size-divisible-by", 1, f"{shape.vocab} words, as they are"
    yield from _experts(run, ledger)
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
    ledger.covers("dropout.attention", "dropout.residual")
    yield "--init-method-std", 0.02, "model.init: gpt"
    yield "--seed", run.spec.seed or 1, "Megatron's seeds begin at 1"
    ledger.shape(shape, holds)
    how = (
        "first weights are Megatron's own, of the same spread; Megatron-Bridge turns model/ into a checkpoint to --load"
    )
    ledger.differs("seed", f"{run.spec.seed}: {how}")
    for key in ("model.init", "start_from", "model.hf"):
        if key in ledger.written:
            ledger.differs(key, how)


def _rope(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    rope = run.shape.rope
    yield "--rotary-base", int(rope.theta), "model.rope.theta"
    yield "--rotary-percent", rope.share, "model.rope.share"
    if rope.interleaved:
        yield "--rotary-interleaved", None, "model.rope.interleaved"
    if rope.scaling == "llama3":
        yield "--use-rope-scaling", None, "model.rope.scaling: llama3"
        yield "--rope-scaling-factor", rope.factor, "model.rope.factor"
    elif rope.scaling != "none":
        ledger.differs("model.rope", f"{rope.scaling} x{rope.factor:g} has no argument: positions are not stretched")


def _experts(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
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
    ledger.covers("parallel.ep")
    yield "--expert-model-parallel-size", run.degree("ep"), "parallel.ep"


def _batches(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    batches = run.batches()
    yield "--seq-length", run.plan.context, "data.context"
    yield "--micro-batch-size", batches.micro, "budget.micro_batch"
    yield "--global-batch-size", batches.rows, f"budget.batch: {batches.rows} sequences"
    yield "--train-iters", run.plan.total_steps, "the budget in steps"
    ledger.covers("data.context", *(f"budget.{key}" for key in ("micro_batch", "batch", "tokens", "steps", "epochs")))
    if stop := run.spec.budget.stop.time:
        yield "--exit-duration-in-mins", max(1, int(stop / 60)), "budget.stop.time"
        ledger.covers("budget.stop.time")


def _optimizer(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    asked, plan, settings = run.spec.optimizer, run.plan, run.spec.optimizer.settings()
    ledger.covers("schedule", "optimizer.lr", "optimizer.clip", "optimizer.weight_decay")
    yield "--optimizer", "sgd" if asked.name == "sgd" else "adam", "adam is AdamW there"
    if asked.name in (*ADAM, "sgd"):
        own = ["momentum"] if asked.name == "sgd" else ["betas", "eps"]
        ledger.covers("optimizer.name", *(f"optimizer.{key}" for key in own))
    else:
        ledger.differs("optimizer.name", f"{asked.name} is not there: AdamW stands in")
    if asked.name == "sgd":
        yield "--sgd-momentum", settings["momentum"], "optimizer.momentum"
    else:
        betas = settings.get("betas", [0.9, 0.95])
        yield "--adam-beta1", betas[0], "optimizer.betas"
        yield "--adam-beta2", betas[1], ""
        yield "--adam-eps", settings.get("eps", 1e-8), "optimizer.eps"
    if asked.name == "adam" and settings["weight_decay"]:
        ledger.differs("optimizer.weight_decay", "decoupled from the gradient there")
    yield "--weight-decay", settings.get("weight_decay", 0.0), "optimizer.weight_decay"
    yield "--clip-grad", asked.clip, "optimizer.clip"
    yield "--lr", plan.peak_lr, "optimizer.lr"
    yield "--lr-decay-style", run.spec.schedule.kind, "schedule.kind"
    yield "--min-lr", run.spec.schedule.floor * plan.peak_lr, "schedule.floor"
    yield "--lr-warmup-iters", plan.warmup_steps, "schedule.warmup"
    yield "--lr-warmup-init", plan.peak_lr / max(1, plan.warmup_steps), "so that the first update is not lost"
    yield "--lr-decay-iters", max(plan.warmup_steps + 1, plan.total_steps - 1), ""
    ledger.differs("schedule.warmup", f"{plan.warmup_steps} steps: Megatron's reaches the peak one iteration later")


def _memory(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    precision, kept = run.plan.precision, run.plan.activations
    ledger.covers("precision", "loss_scale", "memory.activations", "memory.offload_optimizer")
    if precision in ("bf16", "fp16"):
        yield f"--{precision}", None, "precision"
    elif precision.startswith("fp8"):
        yield "--bf16", None, ""
        yield "--fp8-format", "hybrid", f"precision: {precision}"
        yield "--fp8-recipe", "tensorwise" if precision == "fp8" else "delayed", ""
        ledger.differs("precision", f"{precision}: Transformer Engine's recipe")
    elif precision == "tf32":
        ledger.differs("precision", "tf32: fp32")
    if precision == "fp16" and run.spec.loss_scale != "dynamic":
        yield "--loss-scale", run.spec.loss_scale, "loss_scale"
    if kept == "selective":
        yield "--recompute-granularity", "selective", "memory.activations"
    elif kept != "none":
        yield "--recompute-granularity", "full", f"memory.activations: {kept}"
        yield "--recompute-method", "uniform", ""
        yield "--recompute-num-layers", 1, ""
        if kept != "full":
            ledger.differs("memory.activations", f"{kept}: all layers are computed again")
    if run.spec.memory.offload_optimizer:
        yield "--optimizer-cpu-offload", None, "memory.offload_optimizer"


def _layout(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    ledger.covers(*(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "device")))
    yield "--tensor-model-parallel-size", run.degree("tp"), "parallel.tp"
    yield "--pipeline-model-parallel-size", run.degree("pp"), "parallel.pp"
    yield "--context-parallel-size", run.degree("cp"), "parallel.cp"
    if run.degree("tp") > 1:
        yield "--sequence-parallel", None, "norms and residuals are split along the sequence"
    if run.degree("dp_shard") > 1:
        yield "--use-distributed-optimizer", None, "parallel.dp_shard: optimizer state is sharded over all replicas"
        yield "--overlap-grad-reduce", None, ""
        yield "--overlap-param-gather", None, ""
        ledger.differs("parallel.dp_shard", "only optimizer state is sharded (ZeRO 1); --use-megatron-fsdp shards all")
    if run.device != "cuda":
        ledger.differs("parallel.device", "Megatron-LM trains on GPUs only")


def _data(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
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
    ledger.covers("data.sources.*.weight", "data.sources.*.path", "data.mix", "data.clean", "data.sources.*.clean")
    ledger.covers("data.validation", "data.bad_rows", "data.part", *(f"data.sources.*.{key}" for key in FIELDS))
    yield "--split", "100,0,0", "held-out documents are not in these files"
    yield "--tokenizer-type", "HuggingFaceTokenizer", ""
    yield "--tokenizer-model", run.folder.absolute() / "model", "with the tokenizer and the first weights"
    ledger.covers("tokenizer")
    if not spec.cross_documents:
        yield "--reset-position-ids", None, "data.cross_documents: false"
        yield "--reset-attention-mask", None, ""
    ledger.covers("data.cross_documents")
    ledger.differs("data.sources", "sequences are the same files', in Megatron's own order")


FIELDS = ("format", "text_field", "id_field", "url_field", "messages_field", "include", "exclude", "storage", "domain")


def _saves(run: ResolvedRun, ledger: KeyLedger) -> Iterator[Argument]:
    ledger.covers("checkpoint.every", "checkpoint.asynchronous")
    yield "--save", run.folder.absolute() / "checkpoints", ""
    yield "--load", run.folder.absolute() / "checkpoints", "goes on where it stopped"
    yield "--save-interval", run.save_steps(), "checkpoint.every"
    yield "--ckpt-format", "torch_dist", ""
    if run.spec.checkpoint.asynchronous is True:
        yield "--async-save", None, "checkpoint.asynchronous"
    yield "--eval-iters", 0, "nothing held out in these files"
    yield "--log-interval", 1, ""
