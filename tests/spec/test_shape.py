"""Counting without torch: published models to the last parameter, FLOPs and cache by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.spec.model import ModelSpec, RopeSpec, model_shape
from bessemer.spec.shape import ALIASES, PRESETS, ModelShape, cache_bytes, preset, with_vocab


@pytest.mark.parametrize(
    ("name", "vocab", "parameters"),
    [
        ("llama-7b", 32_000, 6_738_415_616),
        ("llama-13b", 32_000, 13_015_864_320),
        ("llama-3-8b", 128_256, 8_030_261_248),
        ("llama-3-70b", 128_256, 70_553_706_496),
        ("llama-3.2-1b", 128_256, 1_235_814_400),
        ("llama-3.2-3b", 128_256, 3_212_749_824),
    ],
)
def test_published_models(name: str, vocab: int, parameters: int) -> None:
    shape = preset(name)
    assert shape is not None
    assert with_vocab(shape, vocab).parameters == parameters


def test_a_small_shape_by_hand() -> None:
    """Vocabulary 10, width 8, 2 layers, 2 query heads and 1 key-value head of 4, feed-forward 12."""
    shape = ModelShape(vocab=10, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=12)
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # q, k, v, o
    layer = attention + 3 * 8 * 12 + 2 * 8
    assert layer == 496
    assert shape.parameters == 80 + 2 * 496 + 8 == 1080
    assert shape.flops_per_token(5) == 6 * (1080 - 5 * 8) + 12 * 2 * 8 * 5  # five norms are no products
    assert cache_bytes(shape, 100) == 2 * 2 * 4 * 100 * 2  # keys and values, layers, 1 head of 4, tokens, bf16
    assert cache_bytes(shape, 100, bytes_per_value=4) == 2 * cache_bytes(shape, 100)


def test_an_untied_embedding_is_stored_but_not_multiplied() -> None:
    tied = ModelShape(10, 8, 2, 2, 1, 4, 12)
    untied = ModelShape(10, 8, 2, 2, 1, 4, 12, tied=False)
    assert untied.parameters == tied.parameters + 80
    assert untied.flops_per_token(5) == tied.flops_per_token(5)


def test_qk_norm_adds_two_vectors_a_layer() -> None:
    assert ModelShape(10, 8, 2, 2, 1, 4, 12, qk_norm="head").parameters == 1080 + 2 * 2 * 4


def test_heads_wider_than_the_model() -> None:
    """head_dim need not be width / heads (Qwen3-0.6B: 1024 wide, 16 heads of 128)."""
    shape = ModelShape(151_936, 1024, 28, 16, 8, 128, 3072, qk_norm="head")
    assert shape.parameters == 596_049_920


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_about_the_size_of_its_name(name: str) -> None:
    shape = PRESETS[name]
    size = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    vocab = 2**11 if size < 2e6 else 2**12 if size < 5e6 else 2**13 if size < 5e7 else 32_000
    vocab = 128_256 if size > 5e8 and shape.rope.theta == 500_000 else vocab
    assert with_vocab(shape, vocab).parameters == pytest.approx(size, rel=0.25)
    assert shape.width == shape.heads * shape.head_dim
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_dim % 2 == 0


def test_names_are_found_in_any_case() -> None:
    assert preset("7b") is preset("7B") is preset("Llama-7B")
    assert preset("11B") is None
    assert all(preset(alias) is PRESETS[name] for alias, name in ALIASES.items())


def test_sizes_rise() -> None:
    sizes = [with_vocab(shape, 32_000).parameters for shape in PRESETS.values()]
    assert sizes == sorted(sizes)


def test_the_spec_lays_its_fields_over_the_preset() -> None:
    shape = model_shape(ModelSpec(preset="10M", layers=3, tied=False, rope=RopeSpec(theta=5e5)), vocab=999)
    named = PRESETS["10M"]
    assert (shape.vocab, shape.layers, shape.tied, shape.rope.theta) == (999, 3, False, 5e5)
    assert (shape.width, shape.heads, shape.kv_heads, shape.ffn) == (named.width, 5, 5, named.ffn)


def test_another_width_takes_its_own_feed_forward_and_head_size() -> None:
    shape = model_shape(ModelSpec(preset="10M", width=640), vocab=1)
    assert (shape.head_dim, shape.ffn) == (128, 1728)  # 8/3 of 640 is 1706.7, up to a multiple of 32
    assert model_shape(ModelSpec(preset="8B", heads=64), vocab=1).kv_heads == 64


def test_without_a_preset() -> None:
    shape = model_shape(ModelSpec(width=96, layers=2, heads=3), vocab=7)
    assert shape == ModelShape(7, 96, 2, 3, 3, 32, 256)
    assert not model_shape(ModelSpec(width=2048, layers=2, heads=16), vocab=7).tied


@given(
    vocab=st.integers(1, 1000),
    width=st.integers(1, 64),
    layers=st.integers(1, 8),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    head_dim=st.integers(1, 32),
    ffn=st.integers(1, 256),
    tied=st.booleans(),
    qk_norm=st.sampled_from(["none", "head"]),
)
def test_the_count_is_the_sum_over_the_matrices(
    vocab: int, width: int, layers: int, kv_heads: int, group: int, head_dim: int, ffn: int, tied: bool, qk_norm: str
) -> None:
    heads = kv_heads * group
    shape = ModelShape(vocab, width, layers, heads, kv_heads, head_dim, ffn, tied, qk_norm=qk_norm)
    sizes = [(vocab, width)] * (1 if tied else 2) + [(width, 1)]
    for _ in range(layers):
        sizes += [(width, heads * head_dim), (heads * head_dim, width)]
        sizes += [(width, kv_heads * head_dim)] * 2 + [(width, ffn)] * 3 + [(width, 1)] * 2
        sizes += [(head_dim, 1)] * (2 if qk_norm == "head" else 0)
    assert shape.parameters == sum(rows * columns for rows, columns in sizes)
