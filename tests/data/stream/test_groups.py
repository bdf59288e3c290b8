"""Groups: documents that belong together are in one row, with their fields, on any number of ranks."""

import numpy as np
import pytest

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter, merge
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.groups import GroupRows
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.errors import UserError
from bessemer.spec.mixture import quantise

LENGTH = 24
SIZES = [2, 1, 3, 2, 4, 2, 1, 3, 2, 2]  # documents of each group


@pytest.fixture
def store(tmp_path):
    """Two shards. Each document has a group, a reward and a value for every token; the first token is masked."""
    draw, number, documents = np.random.default_rng(0), 0, []
    for part in (0, 1):
        with StoreWriter(tmp_path / f"part{part}", 50, "t") as writer:
            for group in range(5 * part, 5 * part + 5):
                for _ in range(SIZES[group]):
                    tokens = np.append(draw.integers(1, 50, draw.integers(1, 5)), 0)
                    values = draw.normal(size=tokens.size).astype(np.float32)
                    mask = np.arange(tokens.size) > 0
                    fields = {"group": np.array([group], np.int32), "reward": np.array([number, -number], np.float32)}
                    writer.add(
                        tokens, "a.jsonl", number, number, 5, mask=mask, fields=fields, token_fields={"value": values}
                    )
                    documents.append((group, tokens, values))
                    number += 1
    return TokenStore([str(tmp_path / "part0"), str(tmp_path / "part1")]), documents, tmp_path


def stream_of(rows, batch=4):
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": rows.count}, seed=1)
    return BatchStream({"a": rows}, order, LENGTH, StepPositions([BatchPhase(0, batch)]))


def test_a_row_is_a_group_with_its_fields(store):
    tokens, documents, _ = store
    rows = GroupRows(tokens, LENGTH)
    assert rows.count == len(SIZES)
    batch = stream_of(rows, 10).batch(0)
    for row, sequence in enumerate(batch.sequences.tolist()):
        members = [(n, d) for n, d in enumerate(documents) if d[0] == sequence]
        text = np.concatenate([d[1] for _, d in members])
        assert batch.targets[row, : text.size].tolist() == text.tolist() and not batch.targets[row, text.size :].any()
        counted = np.concatenate([np.arange(d[1].size) > 0 for _, d in members])
        assert batch.weights[row].tolist() == [*counted.astype(float).tolist(), *[0.0] * (LENGTH - text.size)]
        assert [sorted(set(batch.documents[row, : text.size].tolist()))] == [list(range(len(members)))]
        rewards = batch.fields["reward"][row]
        assert (
            rewards[: len(members), 0].tolist() == [n for n, _ in members] and np.isnan(rewards[len(members) :]).all()
        )
        assert (batch.fields["group"][row, : len(members), 0] == sequence).all()
        values = np.concatenate([d[2] for _, d in members])
        assert np.array_equal(batch.fields["value"][row, : text.size], values)
        assert np.isnan(batch.fields["value"][row, text.size :]).all()


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (1, 1), (2, 2), (4, 1), (3, 2)])
def test_no_group_is_divided(store, world, micro):
    """The same groups in a step, each in one micro-batch of one rank."""
    tokens, _, _ = store
    stream = stream_of(GroupRows(tokens, LENGTH))
    for step in range(5):
        parts = [part for rank in range(world) for part in stream.micro_batches(step, micro, rank, world)]
        seen = [int(group) for part in parts for group in part.fields["group"][:, 0, 0] if group != -100]
        assert sorted(seen) == sorted(stream.batch(step).sequences.tolist())
        assert sum(part.count for part in parts) == stream.step_count(step) == stream.batch(step).count
        per_group = {int(g): int((part.fields["group"][r, :, 0] == g).sum())
                     for part in parts for r, g in enumerate(part.fields["group"][:, 0, 0]) if g != -100}  # fmt: skip
        assert per_group == {group: SIZES[group] for group in seen}


def test_merged_stores_keep_their_fields_and_fingerprint(store):
    tokens, _, folder = store
    assert merge([str(folder / "part0"), str(folder / "part1")], [str(folder / "all")]) == 1
    joined = TokenStore(folder / "all")
    assert joined.fingerprint == tokens.fingerprint and joined.fields == tokens.fields
    every = np.arange(tokens.documents)
    for name in ("group", "reward"):
        assert np.array_equal(joined.document_field(name, every), tokens.document_field(name, every))
    with StoreWriter(folder / "other", 50, "t") as writer:
        writer.add([1, 0], "a", 0, 0, 5, fields={"group": np.array([1], np.int32)})
    with StoreWriter(folder / "plain", 50, "t") as writer:
        writer.add([1, 0], "a", 0, 0, 5)
    assert TokenStore(folder / "other").fingerprint != TokenStore(folder / "plain").fingerprint
    (folder / "other.field-group").write_bytes(b"\x02\0\0\0")
    with pytest.raises(UserError, match=r"other\.field-group"):
        TokenStore(folder / "other").document_field("group", np.array([0]))


def test_a_group_that_does_not_fit_is_refused_by_its_place(store):
    with pytest.raises(UserError, match=r"a.jsonl:\d+: the \d+ tokens of its group exceed data.context 6"):
        GroupRows(store[0], 6)
