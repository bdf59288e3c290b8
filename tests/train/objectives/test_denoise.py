"""Span denoising as T5 has it: published lengths, uniform spans, and documents restored from what is read."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.stream.order import chain
from bessemer.errors import UserError
from bessemer.spec.model import count_spans
from bessemer.train.objectives import Denoise, noise_mask

EOS, FIRST, START = 1, 1000, 0
SENTINELS = tuple(range(999, 899, -1))


def restore(inputs: list[int], targets: list[int]) -> list[int]:
    """The text, from input and target alone. Both end with EOS."""
    assert inputs[-1] == targets[-1] == EOS
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == list(SENTINELS[: len(spans)]) and all(spans.values())
    assert [token for token in inputs if token in SENTINELS] == list(spans)
    return [part for token in inputs[:-1] for part in spans.get(token, [token])]


def runs(flags: np.ndarray) -> list[int]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    return (edges[1::2] - edges[::2]).tolist()


def test_lengths_are_those_of_t5(packed):
    """T5 reads 568 tokens for inputs of 512 and targets of 114, both with their end."""
    assert count_spans(568, 0.15, 3.0) == (85, 28)
    made = Denoise(1, EOS, SENTINELS, 569, encoder=True).rewrite(packed([[569]] * 3, 569))
    assert ((made.encoder_documents == 0).sum(axis=1) == 512).all()
    assert ((made.weights > 0).sum(axis=1) == 114).all()
    assert made.tokens.shape[1] == 128 and made.encoder_tokens.shape[1] == 512
    # The encoder has no padding that the decoder's could look at: it looks at the document, and there is no NaN.
    assert (made.documents == 0).all()
    assert (made.tokens[:, 0] == START).all() and (made.tokens[:, 1:114] == made.targets[:, :113]).all()


@pytest.mark.parametrize(("rate", "span"), [(0.15, 3.0), (0.5, 32.0), (0.5, 3.0), (0.15, 8.0), (0.7, 1.0)])
def test_density_and_span_lengths(rate, span):
    masks = [noise_mask(200, rate, span, chain(9, k, np.arange(200))) for k in range(300)]
    noise, spans = count_spans(200, rate, span)
    for mask in masks:
        assert mask.size == 200 and mask.sum() == noise and len(runs(mask)) == spans
        assert not mask[0] and mask[-1]
    assert noise == round(200 * rate) and spans == min(round(noise / span), 200 - noise)
    assert np.any(masks, axis=0)[1:].all() and not np.all(masks, axis=0)[2:-1].any()  # spans lie everywhere


def test_every_way_to_cut_is_as_likely():
    """9 tokens, 4 of them in 2 spans: 4 ways to cut the 5 that are kept, and 3 to cut the 4."""
    expected = {(k, n, 5 - k, 4 - n) for k in range(1, 5) for n in range(1, 4)}
    counts: Counter = Counter()
    for k in range(2400):
        mask = noise_mask(9, 4 / 9, 2.0, chain(4, k, np.arange(9)))
        counts[tuple(len(part) for part in np.split(mask, np.flatnonzero(np.diff(mask)) + 1))] += 1
    assert set(counts) == expected
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 33  # 11 degrees of freedom, p = 0.0005


settings_of = st.tuples(st.floats(0.02, 0.9), st.floats(1.0, 12.0))


@given(data=st.data(), chosen=settings_of)
def test_an_encoder_and_a_decoder_restore_every_document(batches, data, chosen):
    batch = data.draw(batches)
    made = Denoise(7, EOS, SENTINELS, 60, *chosen, encoder=True).rewrite(batch)
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row, -1]) + 1):
            was = batch.targets[row][(batch.documents[row] == number) & (batch.targets[row] > 0)].tolist()
            inputs = made.encoder_tokens[row][made.encoder_documents[row] == number].tolist()
            mine = (made.documents[row] == number) & (made.origin[row] >= 0)
            if len(was) < 3:
                assert not inputs and not mine.any()
                continue
            targets, tokens = made.targets[row][mine].tolist(), made.tokens[row][mine].tolist()
            assert restore(inputs, targets) == was[:-1] and tokens == [START, *targets[:-1]]


@given(data=st.data(), chosen=settings_of)
def test_a_decoder_alone_restores_all_that_fits(batches, data, chosen):
    batch = data.draw(batches)
    made = Denoise(7, EOS, SENTINELS, 60, *chosen).rewrite(batch)
    assert made.tokens.shape == batch.tokens.shape
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row, -1]) + 1):
            was = batch.targets[row][(batch.documents[row] == number) & (batch.targets[row] > 0)].tolist()
            mine = (made.documents[row] == number) & (made.targets[row] > 0)
            text, learnt = made.targets[row][mine].tolist(), (made.origin[row] >= 0)[mine]
            if len(was) < 6:
                assert not text
                continue
            inputs = text[: int(np.argmax(learnt))]
            restored = restore(inputs, text[len(inputs) :])
            assert learnt[len(inputs) :].all() and made.prefix[row][mine].tolist() == [
                k <= len(inputs) for k in range(len(text))
            ]
            assert restored == was[: len(restored)] and len(text) <= len(was)
            one_more = len(restored) + 1
            assert one_more + 2 * count_spans(one_more, *chosen)[1] + 2 > len(was)  # nothing was dropped without need
            first = batch.tokens[row][batch.documents[row] == number][0]
            assert made.tokens[row][mine].tolist() == [first, *text[:-1]]


def test_what_is_dropped_at_the_defaults(packed):
    made = Denoise(1, EOS, SENTINELS, 1024).rewrite(packed([[1024]], 1024))
    kept = (made.targets >= FIRST).sum()
    assert 0.90 < kept / 1024 < 0.92
    assert (made.targets > 0).sum() >= 1022


def test_too_few_sentinels_are_told():
    with pytest.raises(UserError, match="4096 tokens has up to 205 spans, and there are 100 sentinels"):
        Denoise(1, EOS, SENTINELS, 4096)
