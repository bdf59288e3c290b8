"""The arithmetic of a decoder's shape: parameters, FLOPs and cache, counted without torch.

The planner counts from here and the model is built from here, so that the two cannot disagree (a test compares the
count with the built module). Presets name shapes from 1M to 70B; the vocabulary comes from the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool = True
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """One block: attention, feed-forward and its norms."""
        attention = self.width * (2 * self.attention_width + 2 * self.kv_heads * self.head_dim)
        norms = 2 * self.width + (2 * self.head_dim if self.qk_norm else 0)
        return attention + 3 * self.width * self.ffn + norms

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.width

    @property
    def multiplied_parameters(self) -> int:
        """Parameters in a matrix product for every token: an untied input embedding is only looked up."""
        return self.parameters - (0 if self.tied else self.vocab * self.width)

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs per token, forward and backward: 6 N + 12 L d T, attention in full (the PaLM convention)."""
        return 6 * self.multiplied_parameters + 12 * self.layers * self.attention_width * context

    def cache_bytes(self, tokens: int, bytes_per_value: int = 2) -> int:
        """Key-value cache of one sequence."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * bytes_per_value


def _decoder(width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: object) -> ModelShape:
    return ModelShape(0, width, layers, heads, kv_heads, width // heads, ffn, **more)  # type: ignore[arg-type]


# Names are the size with the vocabulary the shape is usually given (2K at 1M ... 128K at 70B).
PRESETS: dict[str, ModelShape] = {
    "1M": _decoder(128, 4, 4, 2, 352),
    "3M": _decoder(192, 6, 6, 2, 512),
    "10M": _decoder(320, 6, 5, 5, 864),
    "30M": _decoder(512, 8, 8, 4, 1408),
    "60M": _decoder(640, 10, 10, 5, 1728),
    "125M": _decoder(768, 12, 12, 12, 2048),
    "350M": _decoder(1024, 24, 16, 16, 2816),
    "760M": _decoder(1536, 24, 16, 16, 4096),
    "1B": _decoder(2048, 16, 32, 8, 8192, rope_theta=500_000.0),
    "3B": _decoder(3072, 28, 24, 8, 8192, rope_theta=500_000.0),
    "7B": _decoder(4096, 32, 32, 32, 11008, tied=False),
    "8B": _decoder(4096, 32, 32, 8, 14336, tied=False, rope_theta=500_000.0),
    "13B": _decoder(5120, 40, 40, 40, 13824, tied=False),
    "34B": _decoder(8192, 48, 64, 8, 22016, tied=False, rope_theta=1_000_000.0),
    "70B": _decoder(8192, 80, 64, 8, 28672, tied=False, rope_theta=500_000.0),
}
ALIASES = {
    "llama-7b": "7B",
    "llama-13b": "13B",
    "llama-3-8b": "8B",
    "llama-3-70b": "70B",
    "llama-3.2-1b": "1B",
    "llama-3.2-3b": "3B",
    "gpt2-small": "125M",
}


def preset(name: str) -> ModelShape | None:
    """The shape of that name (case does not matter), vocabulary 0, or None."""
    by_lower = {key.lower(): key for key in PRESETS}
    key = by_lower.get(name.lower()) or ALIASES.get(name.lower())
    return PRESETS[key] if key else None


def with_vocab(shape: ModelShape, vocab: int) -> ModelShape:
    return replace(shape, vocab=vocab)
