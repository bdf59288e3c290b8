"""Validation against a direct computation on the same tokens, and bits per byte by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bessemer.data.stream.rows import sequence_count
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import build_model
from bessemer.train.evaluate import Evaluator
from bessemer.train.objective import Pretrain

CPU = torch.device("cpu")
CONTEXT = 8


def evaluator_of(stores, tokens=10**9, micro_rows=4, precision="fp32"):
    return Evaluator(stores, CONTEXT, tokens, micro_rows, precision, CPU)


def direct(model, store):
    """(sum of losses, right guesses, tokens) over every sequence of a store, from its tokens alone."""
    loss, right, count = 0.0, 0, 0
    for i in range(sequence_count(store.tokens, CONTEXT)):
        window = torch.from_numpy(store.slice(i * CONTEXT, i * CONTEXT + CONTEXT + 1).astype(np.int64))
        # A column belongs to the document of its target.
        documents = store.document_of(i * CONTEXT + 1 + np.arange(CONTEXT))
        with torch.no_grad():
            logits = model.logits(model(window[None, :-1], AttentionMask(torch.from_numpy(documents)[None])))[0]
        loss += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        right += int((logits.argmax(dim=-1) == window[1:]).sum())
        count += CONTEXT
    return loss, right, count


def test_everything_evaluated_equals_a_direct_computation(shape, store_of):
    """256 and 64 sequences, all of them: nothing is left out and nothing counts twice."""
    stores = {
        "a": store_of("a", [5, 13, 1, 8, 30, 2, 2, 3] * 32 + [1], text_bytes=4, seed=1),
        "b": store_of("b", [64] * 8 + [5], text_bytes=2, seed=2),
    }
    assert [sequence_count(store.tokens, CONTEXT) for store in stores.values()] == [256, 64]
    model = build_model(shape, "cpu", 5).double()
    found = evaluator_of(stores).evaluate(model, Pretrain(False))
    parts = {name: direct(model, store) for name, store in stores.items()}
    loss, right, count = (sum(column) for column in zip(*parts.values(), strict=True))
    assert found.tokens == count == 320 * CONTEXT
    assert found.loss == pytest.approx(loss / count, rel=1e-9)
    assert found.metrics["accuracy"] == right / count
    assert found.per_source == pytest.approx({name: part[0] / part[2] for name, part in parts.items()}, rel=1e-9)
    # Every token of a is 4 bytes of text, every token of b 2.
    assert found.metrics["bits_per_byte"] == pytest.approx(
        (parts["a"][0] / 4 + parts["b"][0] / 2) / count / math.log(2), rel=1e-9
    )


def test_bits_per_byte_by_hand(shape, store_of):
    """A model that gives every one of 29 tokens the same chance: log2(29) bits a token, 3 bytes a token."""
    store = store_of("a", [9] * 40, text_bytes=3)
    model = build_model(shape, "cpu", 0)
    with torch.no_grad():
        model.embedding.weight.zero_()
    found = evaluator_of({"a": store}).evaluate(model, Pretrain(False))
    assert found.loss == pytest.approx(math.log(29), rel=1e-6)
    assert found.metrics["bits_per_byte"] == pytest.approx(math.log2(29) / 3, rel=1e-6)
    # With all logits equal the first token, 0, is the guess: it is the target wherever a document ends.
    chosen = evaluator_of({"a": store})
    stream, steps = chosen.parts["a"]
    ends = sum(int((stream.batch(step).targets == 0).sum()) for step in range(steps))
    assert found.metrics["accuracy"] == ends / found.tokens > 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    tokens=st.integers(1, 3000),
    micro_rows=st.integers(1, 20),
)
def test_no_sequence_is_used_twice(store_of, sizes, tokens, micro_rows):
    stores = {f"s{k}": store_of(f"s{k}", [size]) for k, size in enumerate(sizes)}
    evaluator = evaluator_of(stores, tokens, micro_rows)
    assert evaluator.available == any(sequence_count(size, CONTEXT) for size in sizes)
    assert set(evaluator.parts) == {name for name, store in stores.items() if sequence_count(store.tokens, CONTEXT)}
    total, alone = 0, evaluator_of(stores, tokens, 1)
    for name, (stream, steps) in evaluator.parts.items():
        starts = np.concatenate([stream.batch(step).sequences * CONTEXT for step in range(steps)])
        starts = starts[starts >= 0]  # without the missing rows of the last pass
        assert len(set(starts.tolist())) == starts.size > 0
        assert starts.max() + CONTEXT < stores[name].tokens
        total += starts.size * CONTEXT
        # The same rows whatever the micro-batch.
        one, steps_alone = alone.parts[name]
        assert starts.tolist() == [one.batch(step).sequences[0] * CONTEXT for step in range(steps_alone)]
    # Within the budget, but for one row of each source that would otherwise be left out.
    assert total <= tokens + len(evaluator.parts) * CONTEXT


def test_the_loss_does_not_depend_on_the_micro_batch(shape, store_of):
    stores = {"a": store_of("a", [11] * 60), "b": store_of("b", [5] * 17)}
    model = build_model(shape, "cpu", 1).double()
    results = [evaluator_of(stores, 400, rows).evaluate(model, Pretrain(False)) for rows in (1, 3, 4, 7, 64)]
    for result in results[1:]:
        assert result.tokens == results[0].tokens and result.loss == pytest.approx(results[0].loss, rel=1e-12)


def test_the_same_sequences_every_time(shape, store_of):
    store = store_of("a", [11] * 60)
    model = build_model(shape, "cpu", 1)
    one = evaluator_of({"a": store}, tokens=200).evaluate(model, Pretrain(False))
    evaluator = evaluator_of({"a": store}, tokens=200)
    assert evaluator.evaluate(model, Pretrain(False)) == one == evaluator.evaluate(model, Pretrain(False))
    assert 0 < one.tokens <= 200


def test_a_budget_is_shared_by_size(store_of):
    stores = {"big": store_of("big", [3 * 1024]), "small": store_of("small", [1024])}
    evaluator = evaluator_of(stores, tokens=1024, micro_rows=4)
    rows = {name: steps * 4 for name, (_, steps) in evaluator.parts.items()}
    assert rows == {"big": 96, "small": 32}


def test_it_changes_nothing(shape, store_of):
    model = build_model(shape, "cpu", 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    evaluator_of({"a": store_of("a", [11] * 30)}).evaluate(model, Pretrain(False))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_is_close(shape, store_of):
    stores, model = {"a": store_of("a", [11] * 60)}, build_model(shape, "cpu", 1)
    exact = evaluator_of(stores).evaluate(model, Pretrain(False)).loss
    rounded = evaluator_of(stores, precision="bf16").evaluate(model, Pretrain(False)).loss
    assert rounded != exact and rounded == pytest.approx(exact, rel=5e-3)


def test_too_little_text_for_one_sequence_is_said(store_of):
    assert not evaluator_of({"a": store_of("a", [CONTEXT])}).available
    assert evaluator_of({"a": store_of("b", [CONTEXT + 1])}).available
    assert not evaluator_of({}).available
