"""The decoder against a slow reference in float64, its masks, its size and its first weights."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.model.attention import AttentionInputs
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder, build_model, init_weights
from bessemer.spec.shape import PRESETS, ModelShape, Rope, with_vocab


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 4))
    return ModelShape(
        vocab=draw(st.integers(1, 300)),
        width=draw(st.integers(1, 48)),
        layers=draw(st.integers(1, 4)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 12)),
        ffn=draw(st.integers(1, 80)),
        tied=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head"])),
    )


def meta(shape):
    with torch.device("meta"):
        return Decoder(shape)


def ids(seed, *size, vocab=37):
    return torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(seed))


@given(shape=shapes())
def test_the_model_has_the_parameters_that_the_planner_counts(shape):
    model = meta(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    layer = (shape.parameters - replace(shape, layers=0).parameters) // shape.layers
    assert sum(parameter.numel() for parameter in model.blocks[0].parameters()) == layer
    assert list(model.buffers()) == []


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_have_the_parameters_that_the_planner_counts(name):
    shape = with_vocab(replace(PRESETS[name], layers=1), 1000)
    assert sum(parameter.numel() for parameter in meta(shape).parameters()) == shape.parameters


def test_a_model_on_meta_allocates_nothing():
    """70B parameters are 280 GB: it could not be built if any of it were allocated."""
    model = meta(with_vocab(PRESETS["70B"], 128_256))
    assert {tensor.device.type for tensor in itertools.chain(model.parameters(), model.buffers())} == {"meta"}
    assert model.head_weight.shape == (128_256, 8192)


CASES = [
    {},
    {"tied": False},
    {"qk_norm": "head"},
    {"kv_heads": 4},
    {"kv_heads": 1, "head_dim": 10, "norm_eps": 1e-2},
    {"tied": False, "qk_norm": "head", "kv_heads": 1, "rope": Rope(theta=500_000.0)},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_hidden_states_and_gradients_equal_the_reference(
    fields, packed, shape_of, build_random, reference_hidden, weights_of
):
    shape = shape_of(**fields)
    model = build_random(shape)
    tokens, documents = ids(1, 2, 9), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 8 + [1]])
    weights = weights_of(model)
    rows = [
        reference_hidden(weights, shape, row, numbers.tolist() if packed else None)
        for row, numbers in zip(tokens, documents, strict=True)
    ]
    expected = torch.stack(rows)
    hidden = model(tokens, AttentionMask(documents) if packed else None)
    torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-10)
    head = weights["embedding.weight" if shape.tied else "head.weight"]
    torch.testing.assert_close(model.logits(hidden), expected @ head.T, rtol=1e-10, atol=1e-10)

    pull = torch.randn(2, 9, shape.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (model.logits(hidden) * pull).sum().backward()
    gradients = torch.autograd.grad((expected @ head.T * pull).sum(), list(weights.values()))
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@given(
    seed=st.integers(0, 1000),
    length=st.integers(2, 12),
    at=st.integers(0, 11),
    qk_norm=st.sampled_from(["none", "head"]),
)
@settings(max_examples=25)
def test_a_later_token_never_changes_an_earlier_state(seed, length, at, qk_norm):
    shape = ModelShape(37, 24, 2, 4, 2, 6, 40, qk_norm=qk_norm)
    model, at = build_model(shape, "cpu", seed).double(), at % length
    tokens = ids(seed, 1, length)
    changed = tokens.clone()
    changed[0, at] = (changed[0, at] + 1) % 37
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :at], after[:, :at], rtol=0, atol=1e-12)
    assert all(not torch.allclose(before[:, t], after[:, t], rtol=0, atol=1e-12) for t in range(at, length))


def test_no_gradient_flows_from_a_state_to_a_later_token(shape_of, build_random):
    model = build_random(shape_of())
    x = model.embedding(ids(3, 1, 8)).detach().requires_grad_()
    place = AttentionInputs(AttentionMask(), model.rotary.get(8, x.device, x.dtype))
    y = x
    for block in model.blocks:
        y = block(y, place)
    (gradient,) = torch.autograd.grad(y[0, 4].sum(), x)
    assert not gradient[0, 5:].any()
    assert gradient[0, :5].abs().amax(dim=-1).min() > 0


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 100))
@settings(max_examples=25)
def test_packed_documents_have_the_states_of_each_alone(lengths, seed):
    """Rotary positions are relative, so a document may begin anywhere in its row."""
    model = build_model(ModelShape(37, 24, 2, 4, 2, 6, 40, rope=Rope(theta=100.0)), "cpu", seed).double()
    tokens = ids(seed, 1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(tokens, AttentionMask(documents))
        alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-11)


@given(lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=3))
def test_the_document_mask_is_causal_and_inside_documents(lengths):
    rows = [list(itertools.chain.from_iterable([k] * n for k, n in enumerate(row)))[:6] for row in lengths]
    rows = [row + [99] * (6 - len(row)) for row in rows]
    mask = AttentionMask(torch.tensor(rows, dtype=torch.int32)).mask(0, 6, 6, torch.device("cpu"))
    assert mask.shape == (len(rows), 1, 6, 6) and mask.dtype == torch.bool
    for b, row in enumerate(rows):
        for t, s in itertools.product(range(6), range(6)):
            assert mask[b, 0, t, s] == (s <= t and row[s] == row[t])


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # says that torch takes a slower path
def test_bf16_autocast_stays_close(shape_of):
    """Also with normalised queries and keys, where autocast hands the attention fp32 and bf16 at once."""
    for qk_norm in ("none", "head"):
        model = build_model(shape_of(qk_norm=qk_norm), "cpu", 0)
        tokens = ids(5, 2, 16)
        exact = model(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(tokens)
        assert rounded.dtype == torch.float32
        error = (rounded - exact).norm() / exact.norm()
        assert 0 < error < 0.02
        rounded.square().sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_first_weights_depend_on_seed_and_name_alone(shape_of):
    one, again, other = (values(build_model(shape_of(), "cpu", seed)) for seed in (3, 3, 4))
    deeper = values(build_model(shape_of(layers=5, vocab=37), "cpu", 3))
    for name, value in one.items():
        assert torch.equal(value, again[name])
        if value.ndim > 1:
            assert not torch.equal(value, other[name])
            if not name.endswith(("attention.out.weight", "ffn.down.weight")):  # scaled by depth
                assert torch.equal(value, deeper[name])
    matrices = [(name, value.flatten()[:100]) for name, value in one.items() if value.ndim > 1]
    for (a, first), (b, second) in itertools.combinations(matrices, 2):
        assert not torch.equal(first, second), f"{a} and {b} drew the same numbers"


def test_first_weights_do_not_depend_on_what_was_drawn_before(shape_of):
    torch.manual_seed(1)
    one = values(build_model(shape_of(), "cpu", 3))
    torch.manual_seed(2)
    torch.randn(100)
    again = build_model(shape_of(), "cpu", 8)
    state = torch.get_rng_state()
    init_weights(again, 3)
    assert all(torch.equal(value, one[name]) for name, value in values(again).items())
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


def test_first_weights_have_the_promised_spread():
    shape = ModelShape(500, 128, 8, 4, 2, 32, 352, tied=False, qk_norm="head")
    for name, value in values(build_model(shape, "cpu", 0)).items():
        if value.ndim == 1:
            assert bool((value == 1).all())
            continue
        scaled = name.endswith(("attention.out.weight", "ffn.down.weight"))
        std = 0.02 / math.sqrt(2 * shape.layers) if scaled else 0.02
        sigmas = 5 / math.sqrt(2 * value.numel())
        assert float(value.std()) == pytest.approx(std, rel=sigmas), name
        assert abs(float(value.mean())) < 5 * std / math.sqrt(value.numel())


def test_a_fresh_model_guesses_evenly():
    """The loss of the first step is log(vocabulary), within a few percent."""
    shape = ModelShape(500, 64, 4, 4, 2, 16, 176)
    model = build_model(shape, "cpu", 0)
    tokens = ids(6, 4, 32, vocab=500)
    logits = model.logits(model(tokens))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(500), rel=0.03)
