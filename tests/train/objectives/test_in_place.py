"""Prefix-LM, masked LM and infill against their papers: shares, order, and what is restored from what is read."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.train.objectives import Causal, Infill, Masked, Prefix

EOS, FIRST, MASK, VOCAB = 1, 1000, 7, 2000
PRE, MID, SUF = MARKS = (11, 12, 13)


def share(flags: np.ndarray, expected: float, sigmas: float = 5.0):
    """The share of True, checked against what was asked for."""
    assert flags.mean() == pytest.approx(expected, abs=sigmas * np.sqrt(expected * (1 - expected) / flags.size) + 1e-12)
    return flags.mean()


def test_masked_has_the_shares_of_bert_as_transformers_has_them(packed):
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[EOS]": EOS, "[MASK]": MASK} | {f"w{k}": k for k in range(2, VOCAB) if k != MASK}
    inner = Tokenizer(models.WordLevel(words, "w2"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]", eos_token="[EOS]", pad_token="[PAD]")
    batch = packed([[100, 156]] * 400, 256)
    collate = DataCollatorForLanguageModeling(theirs, mlm=True, mlm_probability=0.15, seed=1)
    reference = collate([{"input_ids": row} for row in batch.targets.tolist()])
    chosen, inputs = reference["labels"].numpy() != -100, reference["input_ids"].numpy()
    made = Masked(1, VOCAB, MASK, (0, EOS)).rewrite(batch)
    ours = made.weights > 0
    assert (made.targets == batch.targets).all() and (made.tokens[~ours] == batch.targets[~ours]).all()
    text = batch.targets != EOS
    for flags, tokens in ((ours, made.tokens), (chosen, inputs)):
        assert not flags[~text].any()
        share(flags[text], 0.15)
        share(tokens[flags] == MASK, 0.8)
        share((tokens[flags] != MASK) & (tokens[flags] != batch.targets[flags]), 0.1 * (1 - 1 / VOCAB))
        share(tokens[flags] == batch.targets[flags], 0.1 + 0.1 / VOCAB)
    for column in (0, 50, 254):
        share(ours[:, column], 0.15)
    random = made.tokens[ours & (made.tokens != MASK) & (made.tokens != batch.targets)]
    assert random.min() >= 2 and random.min() < 30 and random.max() > VOCAB - 30 and not (random == MASK).any()


@given(data=st.data())
def test_every_row_with_text_has_a_target_and_padding_is_out_of_sight(batches, data):
    batch = data.draw(batches)
    made = Masked(5, VOCAB, MASK, (EOS,), rate=0.01).rewrite(batch)
    assert ((made.origin >= 0).any(axis=1) == (batch.targets >= FIRST).any(axis=1)).all()
    padding = (batch.targets == 0) & (batch.tokens == 0)
    assert (made.documents[padding] == -1).all() and (made.documents[~padding] == batch.documents[~padding]).all()
    assert not made.causal


def test_padding_of_a_row_is_padding_and_zeros_of_a_text_are_not(packed):
    batch = packed([[20]], 24)
    batch.targets[0, 10:14] = batch.tokens[0, 11:15] = 0  # an ordinary token of that id
    made = Masked(5, VOCAB, MASK, (EOS,), rate=0.99).rewrite(batch)
    assert made.documents[0].tolist() == [0] * 20 + [-1] * 4
    assert made.weights[0, 10:14].sum() > 0
    full = packed([[20]], 20, ended=False)
    full.targets[0, 14:] = full.tokens[0, 15:] = 0  # at the end of the row too
    made = Masked(5, VOCAB, MASK, (EOS,), rate=0.99).rewrite(full)
    assert (made.documents == 0).all() and made.weights[0, 15:].sum() > 0


def test_prefixes_are_uniform_and_only_what_is_behind_them_is_learnt(packed):
    made = Prefix(1).rewrite(packed([[9, 1, 2]] * 4000, 12))
    lengths = made.prefix[:, :9].sum(axis=1)
    counts = Counter(lengths.tolist())
    assert sorted(counts) == list(range(2, 10))  # 1 to 8 of 9 tokens, and the input before them
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 26  # chi-square, 7 degrees of freedom, p = 0.0005
    places = np.arange(9)
    assert (made.prefix[:, :9] == (places < lengths[:, None])).all()
    assert ((made.weights[:, :9] > 0) == (places >= lengths[:, None] - 1)).all()
    assert made.prefix[:, 9].all() and (made.weights[:, 9] == 1).all()  # a document of one token: all is to predict
    assert made.prefix[:, 10:].all() and (made.weights[:, 10:] == [0, 1]).all()


def test_causal_is_the_batch(packed):
    batch = packed([[5, 7]], 12)
    made = Causal().rewrite(batch)
    assert made.tokens is batch.tokens and made.count == batch.count == 12 and not made.single_document
    assert Causal().rewrite(packed([[12]], 12)).single_document


def read(text: list[int]) -> tuple[list[int], str]:
    """What the marks say the document was, as one who only reads them would put it together."""
    if PRE not in text:
        return text, "plain"
    assert text[0] == PRE and Counter(text)[PRE] == Counter(text)[MID] == Counter(text)[SUF] == 1
    suf, mid = text.index(SUF), text.index(MID)
    first, suffix, last = text[1:suf], text[suf + 1 : mid], text[mid + 1 :]
    return first + last + suffix, "psm" if first else "spm"


@given(data=st.data(), seed=st.integers(0, 2**64))
def test_infill_restores_every_document_but_for_its_last_three_tokens(batches, data, seed):
    batch = data.draw(batches)
    made = Infill(seed, EOS, MARKS, rate=0.7).rewrite(batch)
    assert made.weights.sum(axis=1).tolist() == batch.weights.sum(axis=1).tolist()
    for row in range(len(batch.tokens)):
        assert sorted(made.origin[row].tolist()) == list(range(batch.tokens.shape[1]))
        assert made.tokens[row, 0] == batch.tokens[row, 0]
        for number in range(int(batch.documents[row, -1]) + 1):
            here = np.flatnonzero((batch.documents[row] == number) & (batch.targets[row] > 0))
            was, now = batch.targets[row, here].tolist(), made.targets[row, here].tolist()
            assert made.tokens[row, here[1:]].tolist() == now[:-1]
            end = [EOS] if was[-1] == EOS else []
            body, got = was[: len(was) - len(end)], now[: len(now) - len(end)]
            assert now[len(got) :] == end
            restored, kind = read(got)
            assert restored == (body if kind == "plain" else body[:-3])
            assert kind == "plain" or len(body) >= 6


def test_infill_has_its_shares_and_cuts_everywhere(packed):
    batch = packed([[13, 5]] * 6000, 18)
    targets = Infill(2, EOS, MARKS, rate=0.6, suffix_first=0.3).rewrite(batch).targets[:, :12]
    changed = targets[:, 0] == PRE
    assert not (Infill(2, EOS, MARKS, rate=1.0).rewrite(batch).targets[:, 13:] == PRE).any()  # too short
    share(changed, 0.6)
    suffix_first = targets[changed, 1] == SUF
    empty = 19 / 100  # of the 10 x 10 pairs of cuts, those with the first at 0 have no prefix: PSM looks like SPM
    share(suffix_first, 0.3 + 0.7 * empty)
    middles = 12 - 1 - np.argmax(targets[changed] == MID, axis=1)
    psm = Counter(middles[~suffix_first].tolist())
    assert set(psm) == set(range(9)) and psm[0] > psm[4] > psm[8]
    everything = Infill(2, EOS, MARKS, rate=1.0, suffix_first=0.0).rewrite(batch).targets[:, :12]
    sizes = Counter((11 - np.argmax(everything == MID, axis=1)).tolist())
    for size in range(10):  # two uniform cuts of 9 tokens: (10 - size) * 2 of 100 pairs, 10 for none
        expected = 6000 * (10 if size == 0 else 2 * (10 - size)) / 100
        assert sizes[size] == pytest.approx(expected, abs=5 * np.sqrt(expected))


def test_infill_moves_weights_with_their_tokens(packed):
    batch = packed([[40]], 40)
    batch.weights[0, :15] = 0
    made = Infill(2, EOS, MARKS, rate=1.0).rewrite(batch)
    text = made.targets[0]
    assert (text == PRE).any()
    assert ((made.weights[0] > 0) == (made.origin[0] >= 15)).all()
    assert (made.weights[0][(text >= FIRST) & (text < FIRST + 15)] == 0).all()


def test_arrays_are_ready_for_torch(packed):
    batch = packed([[12], [5, 3]], 12)
    for objective in (Prefix(1), Masked(1, VOCAB, MASK, (EOS,)), Infill(1, EOS, MARKS)):
        made = objective.rewrite(batch)
        kinds = {"tokens": torch.int64, "targets": torch.int64, "weights": torch.float32, "documents": torch.int32}
        assert {name: torch.from_numpy(getattr(made, name)).dtype for name in kinds} == kinds
