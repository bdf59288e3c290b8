"""Classification heads: which hidden state a text is judged by, alone and packed (parity: families/test_bert.py)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.model.attention_mask import AttentionMask
from bessemer.model.classifier import Classifier, pool_documents, without_head
from bessemer.model.transformer import Decoder, init_weights


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=3), data=st.data())
def test_pools_are_of_each_document_in_order(rows, data):
    """Rows of documents of these lengths, with padding behind, between and before them."""
    width = max(map(sum, rows)) + 3
    documents, expected, number = [], {"first": [], "last": [], "mean": []}, 0
    x = torch.randn(len(rows), width, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, lengths in enumerate(rows):
        cells, spare = [], width - sum(lengths)
        for length in lengths:
            gap = data.draw(st.integers(0, spare))
            spare -= gap
            cells += [-1] * gap
            states = x[row, len(cells) : len(cells) + length]
            for pool, state in (("first", states[0]), ("last", states[-1]), ("mean", states.mean(0))):
                expected[pool].append(state)
            cells += [number] * length
            number += 1
        documents.append(cells + [-1] * spare)
    for pool, states in expected.items():
        found = pool_documents(x, torch.tensor(documents), pool)
        assert found.shape == (number, 5)
        if states:
            torch.testing.assert_close(found, torch.stack(states))


@pytest.mark.parametrize("pool", ["first", "last", "mean"])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_packed_texts_are_texts_alone(shape_of, pool, causal):
    model = Classifier(Decoder(without_head(shape_of(causal=causal))), 3, pool=pool, hidden=True)
    init_weights(model, 1, "kaiming")
    model = model.double().eval()
    texts = [torch.arange(9), torch.arange(4, 6), torch.arange(20, 34)]
    row = torch.cat([*texts, torch.zeros(3, dtype=torch.int64)])[None]
    documents = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([9, 2, 14, 3]))[None]
    alone = torch.cat([model(text[None]) for text in texts])
    torch.testing.assert_close(model(row, AttentionMask(documents)), alone, rtol=1e-10, atol=1e-12)


def test_a_body_has_no_head_of_words(shape_of):
    shape = without_head(shape_of(tied=False, head_bias=True, head_transform=True))
    model = Classifier(Decoder(shape), 4, kind="token")
    outside = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert outside == {"body", "score"} and not any("head" in name for name, _ in model.named_parameters())
    assert model(torch.zeros(2, 6, dtype=torch.int64)).shape == (2, 6, 4)
    assert sum(p.numel() for p in model.body.parameters()) == shape.parameters


def test_every_parameter_learns(shape_of):
    model = Classifier(Decoder(without_head(shape_of())), 4, pool="mean", hidden=True)
    init_weights(model, 1)
    model(torch.arange(12).view(2, 6)).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
