"""The encoder-decoder apart from transformers: a reference in plain loops, what sees what, first weights, denoising."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bessemer.data.stream.batches import Batch
from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.encoder_decoder import CrossBlock, EncoderDecoder, cross_mask
from bessemer.model.layers import relative_bucket
from bessemer.model.transformer import init_weights
from bessemer.spec.shape import ModelShape, cache_bytes, parameter_counts
from bessemer.train.objectives import Denoise

SHAPE = ModelShape(
    vocab=31, width=12, layers=1, heads=2, kv_heads=2, head_dim=5, ffn=16, attention_scale=1.0, positions="relative",
    relative_buckets=8, relative_distance=9, activation="relu", gated=False, decoder_layers=2, logit_scale=12**-0.5,
)  # fmt: skip


@pytest.fixture
def model():
    model = EncoderDecoder(SHAPE).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / math.sqrt(parameter.shape[1]))
    return model


def tokens(rows, length, seed=1):
    return torch.randint(0, 31, (rows, length), generator=torch.Generator().manual_seed(seed))


def reference(model, read, written):
    """Hidden states of one pair of texts, head by head and query by query."""
    weights = dict(model.named_parameters())

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + SHAPE.norm_eps) * weights[f"{name}.weight"]

    def look(x, keys_of, name, bias=None, causal=False):
        q, k, v = (
            source @ weights[f"{name}.{part}.weight"].T
            for source, part in ((x, "query"), (keys_of, "key"), (keys_of, "value"))
        )
        heads = []
        for head in range(2):
            at = slice(5 * head, 5 * head + 5)
            rows = []
            for t in range(len(x)):
                seen = range(t + 1) if causal else range(len(keys_of))
                logits = torch.stack([q[t, at] @ k[s, at] + (0 if bias is None else bias[head, t, s]) for s in seen])
                rows.append(torch.softmax(logits, dim=0) @ v[list(seen), at])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1) @ weights[f"{name}.out.weight"].T

    def biases(length, name, both_ways):
        apart = torch.arange(length)[None] - torch.arange(length)[:, None]
        return weights[name][relative_bucket(apart, both_ways, 8, 9)].permute(2, 0, 1)

    def inner(x, name):
        up = norm(x, f"{name}.ffn_norm") @ weights[f"{name}.ffn.up.weight"].T
        return x + up.clamp(min=0) @ weights[f"{name}.ffn.down.weight"].T

    x, y = weights["embedding.weight"][read], weights["embedding.weight"][written]
    h = norm(x, "blocks.0.attention_norm")
    x = inner(x + look(h, h, "blocks.0.attention", biases(len(x), "encoder_relative.weight", True)), "blocks.0")
    x = norm(x, "encoder_norm")
    for name in ("blocks.1", "blocks.2"):
        h = norm(y, f"{name}.attention_norm")
        y = y + look(h, h, f"{name}.attention", biases(len(y), "relative.weight", False), causal=True)
        y = inner(y + look(norm(y, f"{name}.cross_norm"), x, f"{name}.cross"), name)
    return norm(y, "norm")


def test_is_the_reference_in_value_and_gradient(model):
    read, written = tokens(1, 13), tokens(1, 7, seed=2)
    found, expected = model(written, encoder_tokens_BS=read)[0], reference(model, read[0], written[0])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((x * weight).sum(), list(model.parameters())) for x in (found, expected))
    for (name, _), one, other in zip(model.named_parameters(), mine, theirs, strict=True):
        assert other.any(), name
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_nothing_comes_from_padding_or_from_ahead(model):
    read, written = tokens(1, 9), tokens(1, 6, seed=2)
    documents = torch.tensor([[0] * 6 + [-1] * 3])
    before = model(written, encoder_tokens_BS=read, encoder_documents_BS=documents)
    torch.testing.assert_close(before, model(written, encoder_tokens_BS=read[:, :6]))
    read[:, 6:], written[:, 4:] = 0, 0
    after = model(written, encoder_tokens_BS=read, encoder_documents_BS=documents)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@torch.no_grad()
def test_the_text_is_read_once(model, monkeypatch):
    """Step by step with caches is all at once, and afterwards neither the encoder nor the cross keys work again."""
    read, written = tokens(2, 9), tokens(2, 6, seed=2)
    documents = torch.tensor([[0] * 9, [0] * 4 + [-1] * 5])
    whole = model(written, encoder_tokens_BS=read, encoder_documents_BS=documents)
    caches = model.new_caches(read, documents)
    for module in (model.blocks[0], model.encoder_norm, *(block.cross.key for block in model.blocks[1:])):
        monkeypatch.setattr(module, "forward", None)
    for steps in ((0, 3), (3, 4), (4, 6)):
        found = model(written[:, slice(*steps)], caches=caches)
        torch.testing.assert_close(found, whole[:, slice(*steps)], rtol=1e-12, atol=1e-12)


def test_generation_needs_a_text(model):
    with pytest.raises(UserError, match="needs a text to encode"):
        model.new_caches()


def test_masks_follow_documents():
    encoder, decoder = torch.tensor([[3, 3, 5, -1]]), torch.tensor([[3, 5, 5]])
    assert cross_mask(None, None) is None
    assert cross_mask(encoder, None).tolist() == [[[[True, True, True, False]]]]
    assert cross_mask(encoder, decoder).long().tolist() == [[[[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]]]


def test_a_row_of_padding_has_finite_gradients(model):
    """Rows that only fill up a batch: all of the encoder is padding, whatever the decoder's number."""
    hidden = model(
        tokens(1, 4), AttentionMask(torch.tensor([[0, 0, -1, -1]])), encoder_tokens_BS=tokens(1, 6),
        encoder_documents_BS=torch.full((1, 6), -1),
    )  # fmt: skip
    hidden.sum().backward()
    assert hidden.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


def test_counts_and_first_weights():
    """The counts are the module's, every parameter is filled, by T5's rule: what has no scaling must begin scaled."""
    shape = replace(SHAPE, width=64, head_dim=32, ffn=256, layers=3, decoder_layers=5, tied=False, gated=True)
    with torch.device("meta"):
        model = EncoderDecoder(shape)
    assert sum(p.numel() for p in model.parameters()) == sum(parameter_counts(shape).values()) == shape.parameters
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    init_weights(model, 3)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    last = model.blocks[-1]
    assert isinstance(last, CrossBlock)
    assert float(last.cross.out.weight.detach().std()) == pytest.approx(shape.attention_width**-0.5, rel=0.1)
    assert float(last.cross.query.weight.detach().std()) == pytest.approx((64 * 32) ** -0.5, rel=0.1)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(1.0, rel=0.1)


def test_cache_is_the_decoders(model):
    """Its own past, and as much again of the text that was read."""
    assert cache_bytes(SHAPE, 100) == 2 * 2 * (2 * 100 * 2 * 5) * 2


@pytest.mark.parametrize(("name", "value"), [("positions", "rope"), ("norm_place", "post"), ("attention_cap", 30.0)])
def test_what_it_is_not_made_for_is_refused(name, value):
    with pytest.raises(UserError, match=name):
        EncoderDecoder(replace(SHAPE, **{name: value}))


@torch.no_grad()
def test_learns_what_denoising_gives(model):
    """The batch of the T5 objective: each document is denoised as if it were alone."""
    rows, documents = tokens(2, 24, seed=5) % 20 + 1, torch.tensor([[0] * 10 + [1] * 14, [2] * 24])
    batch = Batch(
        tokens=rows.numpy(), targets=rows.roll(-1, 1).numpy(), weights=np.ones((2, 24), np.float32),
        documents=documents.int().numpy(), positions=np.array([7, 8]), sources=np.zeros(2, np.int64),
        sequences=np.array([7, 8]),
    )  # fmt: skip
    found = Denoise(1, 30, tuple(range(21, 30)), 24, encoder=True).rewrite(batch)
    feed = {
        name: torch.from_numpy(getattr(found, name))
        for name in ("tokens", "documents", "encoder_tokens", "encoder_documents")
    }
    hidden = model(
        feed["tokens"], AttentionMask(feed["documents"]), encoder_tokens_BS=feed["encoder_tokens"],
        encoder_documents_BS=feed["encoder_documents"],
    )  # fmt: skip
    for row, number in ((0, 0), (0, 1), (1, 2)):
        mine = (feed["documents"][row] == number) & torch.from_numpy(found.origin[row] >= 0)
        alone = model(
            feed["tokens"][row, mine][None],
            encoder_tokens_BS=feed["encoder_tokens"][row, feed["encoder_documents"][row] == number][None],
        )
        torch.testing.assert_close(hidden[row, mine], alone[0], rtol=1e-10, atol=1e-10)
