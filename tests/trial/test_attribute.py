"""Documents and their shares: they add up, groups find the heavy ones, and removal is exact."""

import numpy as np
import pytest

from bessemer.data.store.shard import Origin
from bessemer.trial.attribute import (
    MOST_PASSES,
    DocumentPart,
    describe_accused,
    describe_repetition,
    document_parts,
    find_heavy_gradients,
    find_loss_outliers,
    find_repetition,
    gradient_shares,
    reweight,
)
from bessemer.trial.measure import measure


@pytest.fixture
def step(stage):
    job, scene, _ = stage(0, last=34)
    measured = measure(job.engine, scene.batches)
    return job, scene.batches, measured, document_parts(job.data.stream, scene.batches, measured.nll)


def test_parts_are_the_step_s_documents_and_their_losses_its_loss(step):
    job, _batches, measured, parts = step
    origins = {share.row: share.tokens for share in job.data.stream.origins(34)}
    assert {part.origin.row: part.tokens for part in parts} == origins
    assert sum(part.loss for part in parts) / 256 == pytest.approx(measured.loss, rel=1e-5)
    for part in parts:
        assert len(part.ids) == part.tokens and set(part.ids) <= set(range(64))


def test_with_and_without_make_the_whole(step):
    job, batches, _measured, parts = step
    chosen, others = parts[::3], [part for k, part in enumerate(parts) if k % 3]
    tokens = sum(part.tokens for part in chosen)
    only, rest = reweight(batches, chosen, only=True), reweight(batches, chosen, only=False)
    assert sum(b.count for b in only) == tokens and sum(b.count for b in rest) == 256 - tokens
    expected = sum(part.loss for part in others) / (256 - tokens)
    assert measure(job.engine, rest).loss == pytest.approx(expected, rel=1e-5)
    assert reweight(batches, parts, only=False) == []


def test_shares_of_the_gradient_add_up_to_one(step):
    job, batches, _, parts = step
    shares = gradient_shares(job.engine, batches, [[part] for part in parts], lambda: True)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert all(parameter.grad is None for parameter in job.engine.model.parameters())


def test_halving_finds_the_heavy_document_with_the_share_it_has_alone(step):
    job, batches, _, parts = step
    heavy = max(parts, key=lambda part: part.tokens)
    for k, row, number in heavy.locations:  # 20 times the weight: nothing else matters
        batches[k].weights[row][batches[k].documents[row] == number] = 20.0
    alone = gradient_shares(job.engine, batches, [[heavy]], lambda: True)[id(heavy)]
    calls = []
    found = gradient_shares(job.engine, batches, [parts], lambda: not calls.append(1))
    assert found[id(heavy)] == pytest.approx(alone, rel=1e-3) and alone > 0.8
    assert len(calls) < MOST_PASSES and find_heavy_gradients(parts, found, 10.0, 256) == [heavy]


def test_without_room_nothing_is_claimed(step):
    job, batches, _, parts = step
    assert gradient_shares(job.engine, batches, [parts], lambda: False) == {}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([7] * 40, (1, 1.0)), ([1, 2, 3] * 20, (3, 1.0)), (list(range(50)), (0, 0.0)), ([5], (0, 0.0))],
)
def test_repetition_is_the_shortest_period(ids, expected):
    assert find_repetition(ids) == expected


def test_a_pattern_is_told_in_words():
    assert describe_repetition([4, 5, 6] * 85) == "one 3-token pattern repeated 85 times"
    assert describe_repetition(np.random.default_rng(0).integers(0, 60, 200).tolist()) == ""


def part(row, tokens, mean):
    return DocumentPart("a", Origin("a.jsonl", row, str(row), row, 0, 1), [], [1] * tokens, tokens, tokens * mean)


def test_who_stands_out_is_measured_by_normal_documents():
    rng = np.random.default_rng(1)
    normal = [part(k, 50, float(rng.normal(2.0, 0.1))) for k in range(40)]
    usual, odd, short = part(90, 50, 2.2), part(91, 50, 4.0), part(92, 3, 9.0)
    assert find_loss_outliers([usual, odd, short], normal) == [odd]
    assert find_loss_outliers([usual, part(93, 50, 0.3)], normal) == []
    assert [p.origin.row for p in find_loss_outliers([usual, part(93, 50, 0.3)], normal, low=True)] == [93]
    broken = part(94, 50, 2.0)
    broken.nonfinite = 1
    assert find_loss_outliers([usual, odd, broken], normal) == [broken]


def test_excerpts_are_short_and_few():
    parts = [part(k, 300, 3.0) for k in range(40)]
    said = describe_accused(parts, parts[:39], 40 * 900.0, {id(parts[0]): 0.5}, decode=None)
    assert said[0].grad_share == 0.5 and said[1].grad_share is None
    assert said[0].loss_share == pytest.approx(1 / 40)
    assert said[0].excerpt.startswith("[one 1-token pattern repeated 300 times] tokens 1 1 1")
    assert len(said[0].excerpt) == 400 and said[39].excerpt == ""
    assert [one.convicted for one in said] == [True] * 39 + [False]
