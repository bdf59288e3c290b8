"""A decoder in plain float64 tensors, written from the formulas: the reference that every model test compares with."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape, Rope


@pytest.fixture
def shape_of() -> Callable[..., ModelShape]:
    """A tiny shape; any field may be given."""

    def make(**fields: object) -> ModelShape:
        defaults = {
            "vocab": 37,
            "width": 24,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 6,
            "ffn": 40,
            "rope": Rope(theta=100.0),
        }
        return ModelShape(**(defaults | fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def build_random() -> Callable[..., Decoder]:
    """A model whose norms are not ones and whose weights are large enough for every part to matter."""

    def make(shape: ModelShape, seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
        model = build_model(shape, "cpu", seed).to(dtype)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if parameter.ndim == 1:
                    parameter.copy_(1 + 0.3 * noise)
                else:
                    parameter.copy_(noise / math.sqrt(parameter.shape[1]))
        return model

    return make


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def turn(x_TD: Tensor, theta: float) -> Tensor:
    """Rotary positions as complex numbers: components j and j + D/2 are one number, turned by t theta^(-2j/D)."""
    half = x_TD.shape[-1] // 2
    number = torch.complex(x_TD[:, :half], x_TD[:, half:])
    speed = torch.tensor([theta ** (-2 * j / (2 * half)) for j in range(half)], dtype=torch.float64)
    angle = torch.arange(len(x_TD), dtype=torch.float64)[:, None] * speed
    number = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((number.real, number.imag), dim=-1)


def attend(weights: dict[str, Tensor], shape: ModelShape, x_TW: Tensor, documents: list[int]) -> Tensor:
    """One head, one query after the other."""
    D, group = shape.head_dim, shape.heads // shape.kv_heads
    length = len(x_TW)
    outputs = []
    for head in range(shape.heads):
        rows, shared = slice(head * D, (head + 1) * D), slice(head // group * D, (head // group + 1) * D)
        query = x_TW @ weights["query.weight"][rows].T
        key = x_TW @ weights["key.weight"][shared].T
        value = x_TW @ weights["value.weight"][shared].T
        if shape.qk_norm != "none":
            query = norm(query, weights["query_norm.weight"], shape.norm_eps)
            key = norm(key, weights["key_norm.weight"], shape.norm_eps)
        query, key = turn(query, shape.rope.theta), turn(key, shape.rope.theta)
        mixed = []
        for t in range(length):
            seen = [s for s in range(t + 1) if documents[s] == documents[t]]
            shares = torch.softmax(key[seen] @ query[t] / math.sqrt(D), dim=0)
            mixed.append(shares @ value[seen])
        outputs.append(torch.stack(mixed))
    return torch.cat(outputs, dim=-1) @ weights["out.weight"].T


@pytest.fixture
def reference_hidden() -> Callable[..., Tensor]:
    """Hidden states (T, W) of one row, from a dictionary of parameters by name; differentiable."""

    def forward(
        weights: dict[str, Tensor], shape: ModelShape, tokens: Tensor, documents: list[int] | None = None
    ) -> Tensor:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}

        x_TW = weights["embedding.weight"][tokens]
        numbers = documents if documents is not None else [0] * len(tokens)
        for layer in range(shape.layers):
            block = part(f"blocks.{layer}.")
            inner = norm(x_TW, block["attention_norm.weight"], shape.norm_eps)
            x_TW = x_TW + attend(part(f"blocks.{layer}.attention."), shape, inner, numbers)
            inner = norm(x_TW, block["ffn_norm.weight"], shape.norm_eps)
            gate = inner @ block["ffn.gate.weight"].T
            gated = gate / (1 + torch.exp(-gate)) * (inner @ block["ffn.up.weight"].T)
            x_TW = x_TW + gated @ block["ffn.down.weight"].T
        return norm(x_TW, weights["norm.weight"], shape.norm_eps)

    return forward


@pytest.fixture
def weights_of() -> Callable[[Decoder], dict[str, Tensor]]:
    """The model's parameters by name, as fresh leaves."""
    return lambda model: {
        name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()
    }
