"""A native model in GGUF's terms: the architecture that llama.cpp runs it as, its metadata, and each of its tensors.

One table for all families, since native names and layouts are the same for all. What llama.cpp computes differently
(windows that it ignores, scalings that it does not know) is refused here by name; the gate proves the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.export.gate import network
from bessemer.model.layers import attention_factor, frequencies
from bessemer.spec.shape import ModelShape, Rope

Convert = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp lays a family out."""

    name: str
    interleaved: bool = False  # rotates neighbours, so rows of queries and keys are permuted
    fused: bool = False  # queries, keys and values in one matrix
    gate_up: bool = False  # gate and up in one matrix
    untied: bool = False  # the head is always stored
    windows: str = "none"  # "none", or the period of its pattern: all but every nth layer have the window
    scalings: tuple[str, ...] = ("none", "linear", "yarn")
    activations: tuple[str, ...] = ("silu",)


_GELU = ("gelu", "gelu_tanh")  # llama.cpp computes both by the tanh formula
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, scalings=("none", "linear", "yarn", "llama3")),
    "mistral": Architecture("llama", interleaved=True, scalings=("none", "linear", "yarn", "llama3")),
    "mixtral": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "olmo2": Architecture("olmo2", untied=True),
    "phi3": Architecture("phi3", fused=True, gate_up=True, scalings=("none", "longrope")),
    "gemma2": Architecture("gemma2", windows="2", scalings=("none",), activations=("gelu_tanh",)),
    "gemma3_text": Architecture("gemma3", windows="6", scalings=("none", "linear"), activations=("gelu_tanh",)),
    "gpt_neox": Architecture("gptneox", fused=True, untied=True, activations=_GELU),
    "gpt2": Architecture("gpt2", fused=True, activations=("gelu_tanh",)),
    "falcon": Architecture("falcon", fused=True, activations=_GELU),
    "bloom": Architecture("bloom", fused=True, activations=_GELU),
}


def architecture(family: str, shape: ModelShape) -> Architecture:
    """Raises UserError, naming the setting, for a model that llama.cpp would not compute as it was trained."""
    if shape.labels:
        raise UserError("GGUF holds no head of classes for this model: use --to hf or --to onnx")
    if shape.decoder_layers or not shape.causal:
        kind = "encoder-decoders" if shape.decoder_layers else "models that attend to both sides"
        raise UserError(f"--to gguf writes models that predict the next token, not {kind}: use --to hf")
    if family not in ARCHITECTURES:
        raise UserError(f"--to gguf writes {', '.join(ARCHITECTURES)}, not {family}: use --to hf")
    arch, rope = ARCHITECTURES[family], shape.rope
    windows = [shape.window(layer) for layer in range(shape.layers)]
    pattern = int(arch.windows) if arch.windows != "none" else 0
    wanted = [max(windows) * bool((i + 1) % pattern) for i in range(shape.layers)] if pattern else []
    reach = shape.max_positions
    problems = {
        f"activation {shape.activation}": shape.activation not in arch.activations,
        f"rope scaling {rope.scaling}": shape.positions == "rope" and rope.scaling not in arch.scalings,
        "rope.mscale": bool(rope.mscale or rope.mscale_all_dim),
        f"attention_scale {shape.attention_scale}": shape.attention_scale is not None,
        f"windows {shape.windows}": windows != wanted if pattern else any(0 < w < (reach or 1 << 62) for w in windows),
        "biases": arch.name in ("falcon", "olmo2", "phi3", "gemma2", "gemma3") and (shape.qkv_bias or shape.out_bias),
        "no biases": arch.name in ("gptneox", "gpt2", "bloom") and not shape.qkv_bias,
        "ALiBi": arch.name == "falcon" and shape.positions == "alibi",
        "no soft-caps": arch.name == "gemma2" and (shape.attention_cap, shape.logit_cap) == (None, None),
    }
    if shape.moe is not None:
        moe = shape.moe
        problems |= {
            "layers without experts": bool(moe.dense_layers),
            "weights of experts that do not sum to one": not moe.normalise or moe.score != "softmax",
        }
    for problem, occurs in problems.items():
        if occurs:
            raise UserError(f"llama.cpp's {arch.name} does not compute {problem} as this model does: use --to hf")
    return arch


def metadata(writer: Any, shape: ModelShape, arch: Architecture, context: int) -> None:
    """The keys of the architecture, on a gguf.GGUFWriter."""
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_feed_forward_length(shape.moe.ffn if shape.moe else shape.ffn)
    writer.add_vocab_size(shape.vocab)
    (writer.add_layer_norm_rms_eps if shape.norm == "rms" else writer.add_layer_norm_eps)(shape.norm_eps)
    if shape.moe is not None:
        writer.add_expert_count(shape.moe.experts)
        writer.add_expert_used_count(shape.moe.top_k)
        writer.add_expert_feed_forward_length(shape.moe.ffn)
    if shape.positions == "rope":
        _rope_metadata(writer, shape.rope, int(shape.head_dim * shape.rope.share))
    if arch.name == "gptneox":
        writer.add_parallel_residual(shape.parallel == "two_norms")
    if arch.name == "bloom":
        writer.add_max_alibi_bias(8.0)
    if arch.windows != "none" and max(shape.windows):
        writer.add_sliding_window(max(shape.windows))
    elif arch.name == "phi3":
        writer.add_sliding_window(0)
    if shape.local_theta is not None:
        writer.add_rope_freq_base_swa(shape.local_theta)
    if shape.attention_cap is not None:
        writer.add_attn_logit_softcapping(shape.attention_cap)
    if shape.logit_cap is not None:
        writer.add_final_logit_softcapping(shape.logit_cap)


def _rope_metadata(writer: Any, rope: Rope, size: int) -> None:
    import gguf

    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope.theta)
    if rope.scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.scaling))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.scaling in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope.original)
    if rope.scaling == "longrope":
        writer.add_rope_scaling_attn_factors(attention_factor(rope))
    if rope.scaling == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, the native ones that it is made from, and whether it always stays in float32."""

    name: str
    sources: tuple[str, ...]
    convert: Convert
    exact: bool = False  # norms, biases, routers, rotary factors


_NAMES = {
    "embedding": "TOKEN_EMBD", "position": "POS_EMBD", "embedding_norm": "TOKEN_EMBD_NORM", "norm": "OUTPUT_NORM",
    "head": "OUTPUT", "attention_norm": "ATTN_NORM", "attention_out_norm": "ATTN_POST_NORM", "ffn_norm": "FFN_NORM",
    "ffn_out_norm": "FFN_POST_NORM", "attention.query": "ATTN_Q", "attention.key": "ATTN_K",
    "attention.value": "ATTN_V", "attention.out": "ATTN_OUT", "attention.query_norm": "ATTN_Q_NORM",
    "attention.key_norm": "ATTN_K_NORM", "ffn.gate": "FFN_GATE", "ffn.up": "FFN_UP", "ffn.down": "FFN_DOWN",
    "ffn.router": "FFN_GATE_INP", "ffn.gate.experts": "FFN_GATE_EXP", "ffn.up.experts": "FFN_UP_EXP",
    "ffn.down.experts": "FFN_DOWN_EXP",
}  # fmt: skip
_NATIVE = re.compile(r"(?:blocks\.(\d+)\.)?(.+?)\.(weight|bias)")
_MERGED = ("attention.query", "attention.key", "attention.value")


def tensors(shape: ModelShape, arch: Architecture) -> Iterator[GgufTensor]:
    """Every tensor of the file, in the order of the native ones."""
    names = dict(_NAMES)
    if arch.name == "falcon" and shape.parallel == "two_norms":
        names |= {"attention_norm": "ATTN_NORM_2", "ffn_norm": "ATTN_NORM"}
    if shape.positions == "rope":
        yield from _rotary_factors(shape)
    for native in network(shape).state_dict():
        stacked = shape.moe is not None and native.endswith(("ffn.gate", "ffn.up", "ffn.down"))
        match = _NATIVE.fullmatch(f"{native}.experts.weight" if stacked else native)
        layer, module, part = match.groups() if match else (None, native, "")
        if module not in names or not part:
            raise UserError(f"llama.cpp's {arch.name} has no place for {native}: use --to hf")
        sources, convert = _merge(native, module, shape, arch)
        if not sources:
            continue
        kind = "ATTN_QKV" if len(sources) == 3 else "FFN_UP" if len(sources) == 2 else names[module]
        exact = "norm" in module or part == "bias" or module in ("ffn.router", "position")
        yield GgufTensor(f"{_gguf_name(kind, arch, layer, native)}.{part}", sources, convert, exact)
    if shape.tied and arch.untied:
        yield GgufTensor("output.weight", ("embedding.weight",), lambda parts: parts[0])


def _gguf_name(kind: str, arch: Architecture, layer: str | None, native: str) -> str:
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    tensor = gguf.MODEL_TENSOR[kind]
    held = gguf.MODEL_TENSORS[numbers[arch.name]]
    if kind == "FFN_NORM" and tensor not in held:  # Gemma's has another label and the same name
        tensor = gguf.MODEL_TENSOR.FFN_PRE_NORM
    if tensor not in held:
        raise UserError(f"llama.cpp's {arch.name} has no place for {native}: use --to hf")
    name: str = gguf.TENSOR_NAMES[tensor]
    return name.format(bid=layer)


def _merge(native: str, module: str, shape: ModelShape, arch: Architecture) -> tuple[tuple[str, ...], Convert]:
    """The native tensors that the file holds as one, none if they are part of an earlier one, and how."""
    if arch.fused and module in _MERGED:
        if module != _MERGED[0]:
            return (), torch.cat
        return tuple(native.replace(_MERGED[0], name) for name in _MERGED), torch.cat
    if arch.gate_up and module in ("ffn.gate", "ffn.up"):
        return ((native, native.replace("ffn.gate", "ffn.up")) if module == "ffn.gate" else ()), torch.cat
    if arch.interleaved and shape.positions == "rope" and module in _MERGED[:2]:
        heads = shape.heads if module == _MERGED[0] else shape.kv_heads
        return (native,), lambda parts: interleave(parts[0], heads)
    if shape.norm_offset and native.endswith("norm.weight"):
        return (native,), lambda parts: parts[0].float() + shape.norm_offset
    return (native,), lambda parts: parts[0]


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys that are rotated as pairs (i, H + i), reordered so that the pairs are neighbours."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _rotary_factors(shape: ModelShape) -> Iterator[GgufTensor]:
    """Divisors of the frequencies."""
    rope, size = shape.rope, int(shape.head_dim * shape.rope.share)
    if rope.scaling == "llama3":
        plain = frequencies(size, Rope(theta=rope.theta), 0)
        divisors = plain / frequencies(size, rope, 0)
        yield GgufTensor("rope_freqs.weight", (), lambda _: divisors, exact=True)
    if rope.scaling == "longrope":
        for name, values in (("long", rope.long), ("short", rope.short)):
            yield GgufTensor(f"rope_factors_{name}.weight", (), partial(_as_tensor, values), exact=True)


def _as_tensor(values: Sequence[float], _: object) -> Tensor:
    return torch.tensor(values)
