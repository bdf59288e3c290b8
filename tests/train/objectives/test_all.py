"""What every objective promises: it replays in any company, leaks nothing, and keeps documents apart."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.stream.batches import Batch
from bessemer.model.attention_mask import AttentionMask
from bessemer.spec.model import ObjectiveSpec
from bessemer.train.objectives import Causal, Denoise, Infill, Masked, Mix, ObjectiveBatch, Prefix
from bessemer.train.rank_report import by_document, rank_documents

EOS, FIRST, MASK, VOCAB = 1, 1000, 7, 2000
MARKS, SENTINELS = (11, 12, 13), tuple(range(100, 160))


def objectives(seed: int = 3, context: int = 60) -> dict[str, object]:
    found = {
        "causal": Causal(),
        "prefix": Prefix(seed),
        "masked": Masked(seed, VOCAB, MASK, (EOS,), mask=1.0, random=0.0),
        "infill": Infill(seed, EOS, MARKS, rate=0.8),
        "denoise": Denoise(seed, EOS, SENTINELS, context),
        "encoder-decoder": Denoise(seed, EOS, SENTINELS, context, encoder=True),
    }
    kinds = ("causal", "prefix", "masked", "infill", "denoise")
    specs = tuple(ObjectiveSpec(kind=kind) for kind in kinds)
    found["mix"] = Mix(seed, specs, tuple(found[kind] for kind in kinds), ("a",))
    return found


NAMES = list(objectives())


def in_batch_columns(made, losses, batch):
    """The batch with weights where targets came from, and their losses in these columns."""
    learnt, (rows, columns) = made.weights > 0, batch.tokens.shape
    cells = (np.arange(rows)[:, None] * columns + made.origin)[learnt]
    summed = np.bincount(cells, np.asarray(losses, np.float64)[learnt], rows * columns)
    weights = (np.bincount(cells, minlength=rows * columns) > 0).astype(np.float32)
    return replace(batch, weights=weights.reshape(rows, columns)), summed.reshape(rows, columns)


def take(batch: Batch, rows: list[int]) -> Batch:
    return batch.select(rows)


def row_of(made: ObjectiveBatch, row: int) -> dict[str, list]:
    """All that a row holds, without the padding that another row of the batch may force on it."""
    width = int(np.flatnonzero(made.origin[row] >= 0).max(initial=-1)) + 1
    names = ("tokens", "targets", "weights", "documents", "origin", "prefix")
    found = {n: getattr(made, n)[row, :width].tolist() for n in names if getattr(made, n) is not None}
    if made.encoder_tokens is not None:
        inside = made.encoder_documents[row] >= 0
        found |= {n: getattr(made, n)[row][inside].tolist() for n in ("encoder_tokens", "encoder_documents")}
    if made.causal and made.prefix is None:
        found["prefix"] = [False] * width
    if not made.causal:  # in company of causal rows the same is said by a prefix
        found["prefix"] = [True] * width
    return found


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), seed=st.integers(0, 2**70))
def test_a_row_is_rewritten_alike_in_any_company(name, batches, data, seed):
    batch, objective = data.draw(batches), objectives(seed)[name]
    before = {key: array.copy() for key, array in vars(batch).items()}
    whole = objective.rewrite(batch)
    assert all(np.array_equal(before[key], array) for key, array in vars(batch).items())  # left as it was
    rows = data.draw(st.permutations(range(len(batch.tokens))))
    moved = objective.rewrite(take(batch, rows))
    for place, row in enumerate(rows):
        expected = row_of(whole, row)
        assert row_of(moved, place) == expected
        assert row_of(objective.rewrite(take(batch, [row])), 0) == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name != "causal"])
def test_another_position_or_seed_draws_anew(name, packed):
    """So the next epoch, which has other positions, learns other parts of the same row."""
    made = [
        objectives(seed)[name].rewrite(packed([[60]] * 8, 60, positions=range(first, first + 8)))
        for seed, first in ((3, 8), (3, 16), (4, 8), (3, 8))
    ]
    first, other_position, other_seed, again = ([row_of(each, row) for row in range(8)] for each in made)
    assert first == again and first != other_position and first != other_seed


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_targets_are_true_and_inputs_do_not_show_them(name, batches, data):
    """Every learnt target is a token of the document (or a mark), weighs what it weighed there, and no column that its
    own column can see holds it."""
    batch = data.draw(batches)
    made = objectives()[name].rewrite(batch)
    documents = torch.from_numpy(made.documents)
    prefix = None if made.prefix is None else torch.from_numpy(made.prefix)
    T = made.tokens.shape[1]
    seen = AttentionMask(documents, prefix, causal=made.causal).mask(0, T, T, torch.device("cpu"))[:, 0].numpy()
    assert ((made.origin >= 0) | (made.weights == 0)).all()
    for row, column in zip(*np.nonzero(made.origin >= 0), strict=True):
        origin, target = made.origin[row, column], made.targets[row, column]
        text = batch.targets[row, origin]
        mine = np.flatnonzero((batch.documents[row] == batch.documents[row, origin]) & (batch.targets[row] > 0))
        ends = target == EOS and origin == mine[-1]  # of a document that the row cuts
        assert target == text or target in (*MARKS, *SENTINELS) or ends
        assert made.weights[row, column] == batch.weights[row, origin]
        assert made.documents[row, column] == batch.documents[row, origin]
        if target >= FIRST:
            assert target not in made.tokens[row][seen[row, column]]
            if made.encoder_tokens is not None:
                assert target not in made.encoder_tokens[row]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_documents_do_not_mix(name, batches, data):
    """Nothing that a column sees comes from another document, and a document in other company is rewritten alike."""
    batch, objective = data.draw(batches), objectives()[name]
    made = objective.rewrite(batch)
    for tokens, numbers in ((made.tokens, made.documents), (made.encoder_tokens, made.encoder_documents)):
        if tokens is not None:
            rows, columns = np.nonzero(tokens >= FIRST)
            home = batch.documents[rows, tokens[rows, columns] - FIRST]
            assert (numbers[rows, columns] == home).all()
    row, number = 0, data.draw(st.integers(0, int(batch.documents[0, -1])))
    others = (batch.documents[row] != number) & (batch.targets[row] >= FIRST)
    changed = dataclasses.replace(batch, targets=batch.targets.copy(), weights=batch.weights.copy())
    changed.targets[row, others] += 500
    changed.weights[row, others] = 0
    again = objective.rewrite(changed)
    same = made.documents[row] == number
    for name_of in ("targets", "origin", "documents"):
        assert np.array_equal(getattr(again, name_of)[row][same], getattr(made, name_of)[row][same])
    assert again.count <= made.count


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_losses_come_home_to_their_documents(name, batches, data):
    batch = data.draw(batches)
    made = objectives()[name].rewrite(batch)
    losses = np.where(made.weights > 0, 1.0 + made.documents, np.nan)  # what is not learnt must not come home
    home, found = in_batch_columns(made, losses, batch)
    for row in range(len(batch.tokens)):
        for number in np.unique(batch.documents[row]):
            mine = (made.documents[row] == number) & (made.weights[row] > 0)
            here = batch.documents[row] == number
            assert found[row][here].sum() == pytest.approx(mine.sum() * (1 + number))
            assert (home.weights[row][here] > 0).any() == mine.any()
    assert (found[home.weights == 0] == 0).all() and (batch.weights[home.weights > 0] > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_document_with_bad_losses_is_blamed_by_name(name, store_of, stream_of):
    stream = stream_of(store_of("a", [30, 13, 10, 22, 30] * 12), 60, 4)
    objective = objectives()[name]
    batch = stream.batch(0)
    made = objective.rewrite(batch)
    row, number, origin = next(
        (r, n, o) for r, n, o in stream.locate(batch) if made.weights[r][made.documents[r] == n].any()
    )
    losses = np.ones(made.tokens.shape)
    losses[row, made.documents[row] == number] = 50.0
    home, found = in_batch_columns(made, losses, batch)
    worst = rank_documents([by_document(stream, [home], [torch.from_numpy(found)])])[0]
    assert (worst["row"], worst["file"]) == (origin.row, origin.file)
    losses[row, np.flatnonzero((made.documents[row] == number) & (made.weights[row] > 0))[0]] = np.nan
    home, found = in_batch_columns(made, losses, batch)
    assert rank_documents([by_document(stream, [home], [torch.from_numpy(found)])])[0]["nonfinite"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_only_fill_up_weigh_nothing(name, packed):
    batch = packed([[60], []], 60, positions=[4, -1])
    batch.sources[1] = batch.sequences[1] = -1
    made = objectives()[name].rewrite(batch)
    assert made.weights[0].any() and not made.weights[1].any()
    T = made.tokens.shape[1]
    if made.encoder_documents is not None:  # a column without anything to look at would give NaN
        looks = made.documents[:, :, None] == made.encoder_documents[:, None, :]
        assert looks.any(axis=2).all() and looks.shape[1] == T


def test_golden_values(packed):
    """Past runs replay only while these hold."""
    batch = packed([[16, 8]], 24, positions=[2**40 + 7])
    made = {name: objective.rewrite(batch) for name, objective in objectives(2024, 24).items()}
    noisy = Masked(2024, VOCAB, MASK, (EOS,), rate=0.9, mask=0.1, random=0.9).rewrite(batch)
    found = {name: made[name].origin[0][made[name].origin[0] >= 0].tolist() for name in GOLDEN}
    assert found == GOLDEN
    assert noisy.tokens[0, :6].tolist() == [334, 226, 1700, 1841, 665, 276]


GOLDEN = {
    "prefix": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23],
    "masked": [9, 16, 19],
    "infill": [12, 14, 5, 6, 7, 8, 9, 10, 11, 13, 0, 1, 2, 3, 4, 15, 16, 17, 18, 19, 20, 21, 22, 23],
    "denoise": [10, 10, 11, 15, 19, 19, 23],
    "encoder-decoder": [13, 13, 14, 15, 22, 22, 23],
    "mix": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23],
}
