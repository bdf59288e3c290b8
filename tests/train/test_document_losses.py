"""Which documents made a step's loss, from losses whose place is known."""

import numpy as np
import pytest
import torch

from bessemer.parallel.context import RingAttention, UlyssesAttention
from bessemer.train.rank_report import by_document, rank_documents

CONTEXT, ROWS = 8, 4


@pytest.fixture
def stream(store_of, stream_of):
    return stream_of(store_of("a", [5, 13, 3, 8, 30, 2, 2, 11] * 6), CONTEXT, ROWS)


def losses_by(stream, batches, value):
    """Per-token losses, `value` of the row of the token's document in its file; padding holds garbage."""
    result = []
    for batch in batches:
        nll = np.full(batch.targets.shape, 1e9)
        for row, number, origin in stream.locate(batch):
            nll[row][batch.documents[row] == number] = value(origin.row)
        result.append(torch.tensor(nll, dtype=torch.float32))
    return result


@pytest.mark.parametrize("micro_rows", [4, 3, 1])
def test_shares_add_up_and_the_worst_comes_first(stream, micro_rows):
    batches = stream.micro_batches(2, micro_rows)
    found = rank_documents([by_document(stream, batches, losses_by(stream, batches, lambda row: 1.0 + row))], 99)
    origins = {share.row: share.tokens for share in stream.origins(2)}
    assert {entry["row"]: entry["tokens"] for entry in found} == origins
    total = sum(tokens * (1.0 + row) for row, tokens in origins.items())
    for entry in found:
        assert entry["file"] == "a.jsonl" and entry["mean_loss"] == pytest.approx(1.0 + entry["row"], abs=1e-4)
        assert entry["share"] == pytest.approx(origins[entry["row"]] * (1.0 + entry["row"]) / total, abs=1e-4)
        assert "nonfinite" not in entry
    assert [entry["share"] for entry in found] == sorted((entry["share"] for entry in found), reverse=True)
    assert sum(entry["share"] for entry in found) == pytest.approx(1, abs=1e-3)


def test_only_the_most_blamed_are_named(stream):
    batches = stream.micro_batches(1, ROWS)
    losses = losses_by(stream, batches, lambda row: 1.0 + row)
    everything = rank_documents([by_document(stream, batches, losses)], 99)
    assert len(everything) > 2
    assert rank_documents([by_document(stream, batches, losses)], 2) == everything[:2]


def test_losses_that_are_not_numbers_come_first(stream):
    batches = stream.micro_batches(2, ROWS)
    target = min(share.row for share in stream.origins(2))
    losses = losses_by(stream, batches, lambda row: float("nan") if row == target else 1.0 + row)
    found = rank_documents([by_document(stream, batches, losses)], 99)
    assert found[0]["row"] == target and found[0]["nonfinite"] == found[0]["tokens"]
    assert found[0]["share"] == 0
    assert sum(entry["share"] for entry in found[1:]) == pytest.approx(1, abs=1e-3)


def test_nothing_finite_has_no_shares(stream):
    batches = stream.micro_batches(0, ROWS)
    losses = losses_by(stream, batches, lambda row: float("inf"))
    found = rank_documents([by_document(stream, batches, losses)])
    assert found and all(entry["share"] is None for entry in found)


def test_tokens_of_weight_zero_are_not_blamed(stream):
    batches = stream.micro_batches(2, ROWS)
    banned = max(stream.origins(2), key=lambda share: share.tokens)
    quiet = stream.replace(banned=[("a", banned.document)])
    batches = quiet.micro_batches(2, ROWS)
    found = rank_documents([by_document(quiet, batches, losses_by(quiet, batches, lambda row: 5.0))], 99)
    assert [entry["tokens"] for entry in found if entry["row"] == banned.row] == [0]
    assert sum(entry["tokens"] for entry in found) == quiet.step_count(2) < ROWS * CONTEXT


@pytest.mark.parametrize("kind", [UlyssesAttention, RingAttention])
def test_processes_that_share_rows_find_together_what_one_finds(stream, kind):
    batches = stream.micro_batches(1, ROWS)
    torch.manual_seed(0)
    losses = [torch.rand(batch.targets.shape) for batch in batches]
    parts = [kind(None, rank, 2).part(CONTEXT).numpy() for rank in range(2)]
    found = [by_document(stream, batches, [nll[:, part] for nll in losses], part) for part in parts]
    assert rank_documents(found, most=99) == rank_documents([by_document(stream, batches, losses)], 99)
