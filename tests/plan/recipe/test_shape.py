"""Shapes for a size and a context: counted by what models are built from, and able to be built."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.recipe.pretraining import design_shape, vocabulary
from bessemer.spec.checks import check_spec
from bessemer.spec.published import rope_base_needed, rope_reach
from bessemer.spec.schema import RunSpec


@settings(max_examples=60, deadline=None)
@given(st.floats(6.0, 12.2).map(lambda power: 10**power), st.sampled_from([512, 4096, 8192, 32_768, 131_072, 1 << 20]))
def test_within_two_percent_at_any_size(parameters: float, context: int) -> None:
    found = design_shape(parameters, context)
    shape = found.shape
    assert shape.parameters == pytest.approx(parameters, rel=0.02)
    assert shape.heads * shape.head_dim == shape.width and shape.heads % shape.kv_heads == 0
    assert 20 < shape.width / shape.layers < 260 and 1.5 < shape.ffn / shape.width < 6
    assert rope_reach(shape.rope.theta) * 2.1 >= context
    for answer in found.answers.values():
        assert answer.reason and answer.source
        assert answer.basis in ("established", "empirical at this scale", "open question")


def test_three_billion_with_128k_context() -> None:
    found = design_shape(3e9, 131_072)
    shape = found.shape
    assert (shape.width, shape.heads, shape.kv_heads, shape.head_dim) == (3072, 24, 8, 128)
    assert abs(shape.parameters / 3e9 - 1) < 0.02
    assert shape.rope.theta >= rope_base_needed(131_072)
    rope = found.answers["model.rope"].value
    assert isinstance(rope, dict) and rope["first_context"] == 8192
    assert "13.4 GB" not in found.answers["model.width"].reason  # the cache is the KV heads' matter
    assert "GB of cache for 131,072 tokens" in found.answers["model.kv_heads"].reason


def test_the_spec_takes_it() -> None:
    shape = design_shape(1e9, 4096, vocab=32_000).shape
    model = {"width": shape.width, "layers": shape.layers, "heads": shape.heads, "kv_heads": shape.kv_heads,
             "ffn": shape.ffn, "tied": shape.tied, "rope": {"theta": shape.rope.theta}}  # fmt: skip
    spec = RunSpec.model_validate({"model": model, "data": {"sources": {"a": "b"}}, "tokenizer": {"vocab": 32_000}})
    assert list(check_spec(spec)) == []


def test_large_models_divide_among_eight() -> None:
    for parameters in (7e9, 13e9, 70e9, 405e9):
        shape = design_shape(parameters).shape
        assert shape.heads % 8 == 0 and shape.kv_heads == 8 and shape.layers % 4 == 0 and shape.ffn % 512 == 0


def test_vocabulary_follows_its_law() -> None:
    assert vocabulary(70e9).value == pytest.approx(212_000, rel=0.02)
    assert vocabulary(70e9).value % 128 == 0
    assert vocabulary(1e5).value == 512


@pytest.mark.parametrize(
    ("wish", "said"),
    [((10.0, 4096), "1M to 2T"), ((3e9, 1), "context"), ((3e9, 1 << 30), "context"), ((2e6, 512, 500_000), "embedding"),
     ((3e9, 4096, -5), "vocabulary")],
)  # fmt: skip
def test_nonsense_is_one_line(wish: tuple[float, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        design_shape(*wish)
