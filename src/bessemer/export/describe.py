"""Describes a model from its shape: parameters, FLOPs, memory and a diagram. Used by `bessemer model show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, activation_bytes
from bessemer.spec import shape as count
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ALIASES, PRESETS, ModelShape, preset, with_vocab

NAMES = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu": "ReLU", "relu2": "squared ReLU"}
GATED = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU (tanh)", "relu": "ReGLU", "relu2": "gated squared ReLU"}
USUAL_VOCAB = ((192, 2_048), (320, 8_192), (1_535, 32_000), (1 << 30, 128_256))  # by width, if there is no tokenizer

USUAL_CONTEXT = 2048


def find_shape(target: str, vocab: int | None = None) -> ModelShape:
    """The shape of a preset, a run, a Hugging Face folder (config.json suffices) or a spec file."""
    path = Path(target)
    if (path / "model.json").exists():
        return ModelShape.from_dict(json.loads((path / "model.json").read_text())["shape"])
    if path.name == "config.json" or (path / "config.json").exists():
        return _shape_of_hf_folder(path)
    shape = preset(target)
    if shape is None and not path.exists():
        raise UserError(f"{target}: neither a file or folder nor a preset ({', '.join([*PRESETS, *ALIASES])})")
    shape = shape or _shape_of_spec(path)
    usual = next(size for width, size in USUAL_VOCAB if shape.width <= width)
    return with_vocab(shape, vocab or shape.vocab or usual)


def find_context(target: str) -> int:
    """The context of a spec or of a run's spec; a usual one for other targets, or if it is still to be planned."""
    from bessemer.spec.load import load_spec

    path = Path(target)
    if (path / "model.json").exists():
        path = path / "spec.yaml"
    if path.name == "config.json" or not path.is_file() or preset(target):
        return USUAL_CONTEXT
    context = load_spec(path).data.context
    return context if isinstance(context, int) else USUAL_CONTEXT


def _shape_of_hf_folder(path: Path) -> ModelShape:
    from bessemer.model.families.folder import HfFolder
    from bessemer.model.families.registry import read_shape

    return read_shape(HfFolder(path.parent if path.is_file() else path).config)[1]


def _shape_of_spec(path: Path) -> ModelShape:
    """The vocabulary is 0 if the tokenizer is still to be planned."""
    from bessemer.data.tokenizer.tokenizer import Tokenizer
    from bessemer.spec.load import load_spec
    from bessemer.spec.model import model_shape

    spec = load_spec(path)
    hf_shape, tokenizer = _shape_of_hf_folder(Path(spec.model.hf)) if spec.model.hf else None, spec.tokenizer
    vocab = tokenizer.vocab if isinstance(tokenizer.vocab, int) else hf_shape.vocab if hf_shape else 0
    if tokenizer.path:
        vocab = Tokenizer.load(tokenizer.path, tokenizer.eos, tokenizer.special, tokenizer.pattern).vocab_size
    return model_shape(spec.model, vocab, hf_shape)


def describe(shape: ModelShape, batch: int, context: int) -> dict[str, Any]:
    """Parameters by part, FLOPs and bytes. Memory is for training in float32 with AdamW on one device."""
    total = shape.parameters
    memory = {"weights": 4 * total, "gradients": 4 * total, "AdamW moments": 8 * total}
    memory["activations"] = activation_bytes(shape, Passes(context, batch, "fp32", "none", compiled=True))
    return {
        "parts": count.parameter_counts(shape), "total": total, "active": count.active_parameters(shape),
        "context": context, "batch": batch,
        "flops_per_token": shape.flops_per_token(context), "cache_bytes": count.cache_bytes(shape, context),
        "memory_bytes": memory,
    }  # fmt: skip


def table(summary: dict[str, Any]) -> list[str]:
    total, context, memory = summary["total"], summary["context"], summary["memory_bytes"]
    return [
        f"parameters      {human_count(total):>9}  ({total:,})",
        *(f"  {name:<14}{human_count(n):>9}  {n / total:>5.1%}" for name, n in summary["parts"].items()),
        f"active          {human_count(summary['active']):>9}  per token",
        f"training        {summary['flops_per_token'] / 1e9:>9,.3g}  GFLOPs per token at context {context:,}",
        f"cache           {human_bytes(summary['cache_bytes']):>9}  for a sequence of {context:,} in bf16",
        f"memory          {human_bytes(sum(memory.values())):>9}  to train {summary['batch']} x {context:,} in fp32",
        *(f"  {name:<14}{human_bytes(size):>9}" for name, size in memory.items()),
    ]


def diagram(shape: ModelShape) -> list[str]:
    """The network from tokens to logits, with equal layers grouped."""
    norm = _norm(shape)
    extras = [f" -> + {shape.positions} positions"] * (shape.positions in ("learned", "sinusoidal"))
    extras += [f" -> x {shape.embedding_scale:g}"] * (shape.embedding_scale != 1)
    extras += [f" -> {norm}"] * shape.embedding_norm
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in range(shape.layers):
        kinds.setdefault(tuple(_block(shape, layer)), []).append(layer)
    lines = ["tokens", f"  embedding  {shape.vocab:,} x {shape.width:,}{''.join(extras)}"]
    for block, layers in kinds.items():
        first, last = layers[0], layers[-1]
        numbers = f"{first} to {last}" if last - first == len(layers) - 1 > 0 else ", ".join(map(str, layers))
        lines += [f"  +-- layer {numbers}: {len(layers)} times", *(f"  |  {line}" for line in block), "  +--"]
    if shape.decoder_layers:
        lines += [
            f"  +-- decoder: {shape.decoder_layers} such layers, causal, with cross-attention to the encoder",
            "  +--",
        ]
    lines += [f"  {norm}"] * (shape.norm_place != "post")
    cap = f", capped at {shape.logit_cap:g}" if shape.logit_cap else ""
    tied = "tied to the embedding" if shape.tied else "its own weights"
    return [*lines, f"  head       {shape.width:,} x {shape.vocab:,}, {tied}{cap}", "logits"]


def _norm(shape: ModelShape) -> str:
    return "RMSNorm" if shape.norm == "rms" else "LayerNorm"


def _block(shape: ModelShape, layer: int) -> list[str]:
    """The branches that are added to the residual stream x, one per line."""
    norm, place = _norm(shape), shape.norm_place
    before = f"{norm} -> " if place in ("pre", "sandwich") else ""
    after = f" -> {norm} -> + x" if place in ("sandwich", "branch") else " -> + x"
    after += f" -> {norm}" if place == "post" else ""
    branches = [f"x -> {before}{_mixer(shape, layer)}{after}"]
    if shape.ffn or shape.has_experts(layer):
        again = "the same norm -> " if shape.parallel == "one_norm" else before
        branches.append(f"x -> {again}{_feed_forward(shape, layer)}{after}")
    return branches if shape.parallel == "none" else ["both from the same x:", *branches]


def _mixer(shape: ModelShape, layer: int) -> str:
    if shape.mixer(layer) == "mamba":
        assert shape.mamba is not None
        return f"Mamba-2 ({shape.mamba.heads} heads of {shape.mamba.head_dim}, state {shape.mamba.state})"
    words, rope, window = [f"{shape.heads} heads of {shape.key_dim}"], shape.layer_rope(layer), shape.window(layer)
    if shape.mla is not None:
        words.append(f"keys and values through {shape.mla.kv_rank}")
    elif shape.kv_heads != shape.heads:
        words.append(f"{shape.kv_heads} for keys and values")
    words.append(f"RoPE {rope.theta:g}" if shape.positions == "rope" else f"{shape.positions} positions")
    words += [f"{rope.scaling} x {rope.factor:g}"] * (rope.scaling != "none")
    words.append("causal" if shape.causal else "bidirectional")
    words += [f"window {window:,}"] * (window > 0)
    words += [f"{shape.global_tokens} global positions"] * (shape.global_tokens > 0)
    words += [f"blocks of {shape.blocks[0]}, {shape.blocks[1]} before"] * (shape.blocks[0] > 0)
    words += [f"q and k normed by {shape.qk_norm}"] * (shape.qk_norm != "none")
    words += [f"capped at {shape.attention_cap:g}"] if shape.attention_cap else []
    return f"attention ({', '.join(words)})"


def _feed_forward(shape: ModelShape, layer: int) -> str:
    name, moe = (GATED if shape.gated else NAMES)[shape.activation], shape.moe
    if moe is None or not shape.has_experts(layer):
        return f"{name} {shape.ffn:,}"
    shared = f" + {moe.shared} shared" if moe.shared else ""
    return f"{moe.experts} experts of {name} {moe.ffn:,}, {moe.top_k} per token{shared}"
