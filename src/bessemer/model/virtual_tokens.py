"""Prompt tuning and prefix tuning: trained virtual tokens before every document of a frozen model.

A prompt (Lester et al. 2021) has an embedding for each virtual token. In training it is one more document of each row,
which all its documents may attend to; what the model makes of it does not depend on them. A prefix (Li and Liang 2021)
has keys and values for each layer instead, which attention reads beside those of the row. Generation turns a prompt
into such keys and values once. Real tokens are at the positions after the virtual ones, so that both compute what PEFT
does. Legend: n virtual tokens, B rows, T columns, W width, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bessemer.dtensor import copy_shard, is_dtensor
from bessemer.errors import UserError
from bessemer.model.attention import LayerCache
from bessemer.model.attention_mask import AttentionMask
from bessemer.spec.shape import ModelShape

if TYPE_CHECKING:
    from bessemer.model.transformer import Decoder

PROMPT, PREFIX = "prompt", "prefix"
VIRTUAL_KINDS = (PROMPT, PREFIX)
VIRTUAL = "virtual"  # the last name of their tensors
PEFT_TYPES = {PROMPT: "PROMPT_TUNING", PREFIX: "PREFIX_TUNING"}
PEFT_TENSOR = "prompt_embeddings"


class VirtualTokens(nn.Module):
    """Embeddings (n, W) of a prompt, or the keys and values (2, n, K, D) of a layer's prefix."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.virtual = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
        self.active = True

    @property
    def count(self) -> int:
        return self.virtual.shape[-2 if self.virtual.ndim == 2 else 1] if self.active else 0


def check_shape(shape: ModelShape, kind: str) -> None:
    """Refuses models whose layers or positions have no place for virtual tokens."""
    reasons = {
        "a wrapped model": bool(shape.wrapped), "an encoder": bool(shape.decoder_layers) or not shape.causal,
        "Mamba layers": "mamba" in shape.mixers, "latent attention": shape.mla is not None,
        f"{shape.positions} positions": shape.positions not in ("rope", "learned", "none"),
        "attention in blocks": bool(shape.blocks[0] or shape.global_tokens),
        "scaled embeddings": kind == PROMPT and (shape.embedding_scale != 1.0 or shape.embedding_norm),
    }  # fmt: skip
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise UserError(f"adapter.kind: {kind}: {reason} cannot be combined with virtual tokens: write kind: lora")


def add_virtual(model: Decoder, kind: str, count: int) -> list[str]:
    """Adds virtual tokens without values to a model; returns the names of their modules."""
    shape = model.shape
    check_shape(shape, kind)
    if kind == PROMPT:
        model.prompt = VirtualTokens((count, shape.width), model.embedding.weight)
        return [PROMPT]
    for block in model.blocks:
        size = (2, count, shape.kv_heads, shape.head_dim)
        attention: Any = block.attention
        attention.prefix = VirtualTokens(size, attention.key.weight)
    return [f"blocks.{i}.attention.prefix" for i in range(len(model.blocks))]


def virtual_modules(model: nn.Module) -> Iterator[tuple[str, VirtualTokens]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, VirtualTokens))


@torch.no_grad()
def init_virtual(model: Decoder, seed: int) -> None:
    """The values of a new run, from tokens that are drawn from the vocabulary: their embeddings, or the keys and values
    that the frozen model computes for them. Collective if the weights are sharded."""
    from bessemer.model.transformer import generator_for

    modules = dict(virtual_modules(model))
    count = next(iter(modules.values())).count
    drawn_n = torch.randint(model.shape.vocab, (count,), generator=generator_for(VIRTUAL, seed, torch.device("cpu")))
    weight = model.embedding.weight
    if PROMPT in modules:
        full: Tensor = weight.full_tensor() if is_dtensor(weight) else weight
        copy_shard(modules[PROMPT].virtual, full[drawn_n.to(full.device)])
        return
    for module in modules.values():
        module.active = False
    caches: list[Any] = model.new_caches()
    model(drawn_n[None].to(weight.device), caches=caches)
    for module, cache in zip(modules.values(), caches, strict=True):
        keys_nKD, values_nKD = cache.keys[0, :count], cache.values[0, :count]
        copy_shard(module.virtual, torch.stack((keys_nKD, values_nKD)).to(module.virtual.dtype))
        module.active = True


def load_virtual(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Adds the virtual tokens of these tensors, by native names, to a model without."""
    kind = PROMPT if f"{PROMPT}.{VIRTUAL}" in tensors else PREFIX
    count = next(iter(tensors.values())).shape[0 if kind == PROMPT else 1]
    add_virtual(model, kind, count)
    modules = dict(virtual_modules(model))
    with torch.no_grad():
        for name, tensor in tensors.items():
            modules[name.removesuffix(f".{VIRTUAL}")].virtual.copy_(tensor)


def prepend_prompt(
    prompt: VirtualTokens, x_BTW: Tensor, attention_mask: AttentionMask, model: Decoder
) -> tuple[Tensor, AttentionMask]:
    """Rows with the prompt before their first column, and their mask: a row is one document, of which the prompt is the
    beginning and its documents are branches."""
    mask, B, n = attention_mask, len(x_BTW), prompt.count
    if mask.prefix_BT is not None or mask.branches_BT is not None:
        raise UserError("adapter.kind: prompt: these rows have prefixes or branches already: write kind: prefix")
    prompt_nW = prompt.virtual
    if model.shape.positions == "learned":
        prompt_nW = prompt_nW + model.position(torch.arange(n, device=x_BTW.device))
    x_BSW = torch.cat((prompt_nW.to(x_BTW.dtype).expand(B, n, -1), x_BTW), dim=1)
    wider = AttentionMask(causal=mask.causal, backend=mask.backend)
    wider.configure(model.shape)
    if mask.documents_BT is not None:
        documents_BT = mask.documents_BT - mask.documents_BT.min() + 1
        wider.branches_BT = nn.functional.pad(documents_BT, (n, 0))
        wider.documents_BT = torch.zeros_like(wider.branches_BT)
    if mask.router_mask_BT is not None:
        wider.router_mask_BT = nn.functional.pad(mask.router_mask_BT, (n, 0))
    return x_BSW, wider


@torch.no_grad()
def cache_prompt(model: nn.Module) -> None:
    """For a generator: the keys and values of the prompt, in each layer, with the present weights."""
    prompt: VirtualTokens | None = getattr(model, PROMPT, None)
    if prompt is None or not prompt.count:
        return
    decoder: Any = model
    caches = [LayerCache() for _ in decoder.blocks]
    mask = AttentionMask()
    mask.configure(decoder.shape)
    x_1nW = prompt.virtual[None]
    if decoder.shape.positions == "learned":
        x_1nW = x_1nW + decoder.position(torch.arange(prompt.count, device=x_1nW.device))
    inputs = decoder.attention_inputs(x_1nW, mask)
    for block, cache in zip(decoder.blocks, caches, strict=True):
        x_1nW = block(x_1nW, inputs, cache)
        assert cache.keys is not None and cache.values is not None
        block.attention.prompt_keys = torch.stack((cache.keys[0, : cache.length], cache.values[0, : cache.length]))


def to_peft(tensors: Mapping[str, Tensor], shape: ModelShape, base: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and adapter_model.safetensors of virtual tokens."""
    kind = PROMPT if f"{PROMPT}.{VIRTUAL}" in tensors else PREFIX
    if kind == PROMPT:
        weight = tensors[f"{PROMPT}.{VIRTUAL}"]
    else:  # (n, layers x 2 x K x D)
        layers = [tensors[f"blocks.{i}.attention.prefix.{VIRTUAL}"] for i in range(shape.layers)]
        weight = torch.stack(layers).permute(2, 0, 1, 3, 4).flatten(1)
    grouped = kind == PREFIX
    config: dict[str, Any] = {
        "peft_type": PEFT_TYPES[kind], "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "inference_mode": True, "num_virtual_tokens": len(weight), "num_transformer_submodules": 1,
        "token_dim": shape.kv_heads * shape.head_dim if grouped else shape.width, "num_layers": shape.layers,
        "num_attention_heads": shape.kv_heads if grouped else shape.heads,
    }  # fmt: skip
    config |= {"prefix_projection": False, "encoder_hidden_size": shape.width} if grouped else {}
    return config, {PEFT_TENSOR: weight.contiguous()}


def from_peft(config: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """The tensors of a PEFT folder by native names."""
    weight, layers = tensors[PEFT_TENSOR], shape.layers
    if config["peft_type"] == PEFT_TYPES[PROMPT]:
        sizes, native = (shape.width,), {f"{PROMPT}.{VIRTUAL}": weight}
    else:
        size = layers * 2 * shape.kv_heads * shape.head_dim
        sizes, native = (size,), {}
        if weight.shape[1:] == (size,):
            parts = weight.view(len(weight), layers, 2, shape.kv_heads, shape.head_dim).permute(1, 2, 0, 3, 4)
            native = {f"blocks.{i}.attention.prefix.{VIRTUAL}": part.contiguous() for i, part in enumerate(parts)}
    if weight.shape[1:] != sizes:
        raise UserError(
            f"adapter.path: {PEFT_TENSOR} has shape {tuple(weight.shape)}, and this model needs (tokens, {sizes[0]}): "
            "the adapter is for another model"
        )
    return native
