"""What stays on the checkpoint store, for any history of saves."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bessemer.checkpoint.store import CheckpointEntry, best_checkpoint, keep
from bessemer.spec.schema import CheckpointSpec

NOW = 1000.0
losses = st.one_of(st.none(), st.floats(0.5, 9), st.just(math.nan))
entries = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 2), st.floats(0, NOW), st.integers(1, 50), losses, st.booleans()),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[:2],
).map(lambda rows: [CheckpointEntry(f"step-{row[0]:08d}.a{row[1]}", *row) for row in rows])
rules = st.builds(
    CheckpointSpec,
    keep_last=st.integers(1, 4),
    keep_best=st.booleans(),
    keep_every=st.one_of(st.none(), st.integers(1, 30)),
    keep_age=st.one_of(st.none(), st.floats(1, NOW).map(lambda s: f"{s:.3f}s")),
    keep_bytes=st.one_of(st.none(), st.integers(1, 300)),
)


def past_of(some, newest):
    return sorted(
        (e for e in some if (e.step, e.attempt) <= (newest.step, newest.attempt)), key=lambda e: (e.step, e.attempt)
    )


@given(some=entries, spec=rules, confirming=st.booleans(), data=st.data())
def test_never_deleted_the_newest_the_newest_confirmed_the_best_and_the_tagged(some, spec, confirming, data):
    newest = data.draw(st.sampled_from(some))
    tagged = {entry.name for entry in data.draw(st.lists(st.sampled_from(some), max_size=3))}
    kept = keep(some, spec, newest.name, NOW, tagged | {"step-99999999.a1"}, confirming)
    past = past_of(some, newest)
    assert newest.name in kept and tagged <= kept <= {entry.name for entry in some}
    confirmed = [entry for entry in past if entry.confirmed]
    assert not confirmed or confirmed[-1].name in kept
    since = past[past.index(confirmed[-1]) + 1 :] if confirmed else past
    assert not (confirming and since) or since[0].name in kept, "the next to be confirmed"
    scored = [entry for entry in past if entry.validation_loss is not None and entry.validation_loss > 0]
    if spec.keep_best and scored:
        assert min(scored, key=lambda entry: entry.validation_loss).name in kept
    assert kept - {entry.name for entry in past} <= tagged, "later ones are abandoned"


@given(some=entries, spec=rules, data=st.data())
def test_every_rule_keeps_what_it_says_and_nothing_else_is_kept(some, spec, data):
    newest = data.draw(st.sampled_from(some))
    spec = spec.model_copy(update={"keep_bytes": None, "keep_best": False})
    some = [CheckpointEntry(e.name, e.step, e.attempt, e.time, e.bytes) for e in some]  # none confirmed, none scored
    kept = keep(some, spec, newest.name, NOW)
    past = past_of(some, newest)
    expected = {entry.name for entry in past[-spec.keep_last :]}
    if spec.keep_age:
        expected |= {entry.name for entry in past if entry.time >= NOW - spec.keep_age}
    if spec.keep_every:
        for multiple in range(spec.keep_every, 61, spec.keep_every):
            stretch = [entry for entry in past if multiple <= entry.step < multiple + spec.keep_every]
            if stretch:
                first = min(entry.step for entry in stretch)
                expected.add(max((e for e in stretch if e.step == first), key=lambda e: e.attempt).name)
    assert kept == expected


@given(some=entries, spec=rules, data=st.data(), room=st.integers(1, 400))
def test_the_room_is_kept_by_letting_the_oldest_go(some, spec, data, room):
    newest = data.draw(st.sampled_from(some))
    without = keep(some, spec.model_copy(update={"keep_bytes": None}), newest.name, NOW)
    within = keep(some, spec.model_copy(update={"keep_bytes": room}), newest.name, NOW)
    must = keep(some, spec.model_copy(update={"keep_bytes": 1}), newest.name, NOW)
    size = {entry.name: entry.bytes for entry in some}
    assert must <= within <= without
    assert within == must or sum(size[name] for name in within) <= room
    order = [entry.name for entry in past_of(some, newest) if entry.name in without - must]
    gone = [name for name in order if name not in within]
    assert gone == order[: len(gone)], "the oldest first"
    if gone:  # no more than needed
        assert sum(size[name] for name in within) + size[gone[-1]] > room


def test_what_a_listing_does_not_show_yet_decides_nothing():
    some = [CheckpointEntry(f"step-0000000{k}.a1", k, 1, 0.0, 1) for k in range(5)]
    assert keep(some, CheckpointSpec(keep_last=1), "step-00000009.a1", NOW) == {entry.name for entry in some}


def test_under_archive_model_only_full_checkpoints_are_not_kept_for_every_so_many_steps():
    some = [CheckpointEntry(f"step-0000000{k}.a1", k, 1, 0.0, 1) for k in range(9)]
    spec = CheckpointSpec(keep_last=1, keep_every=2, archive_model_only=True)
    assert keep(some, spec, "step-00000008.a1", NOW) == {"step-00000008.a1"}


def test_the_best_is_by_score_then_by_loss_then_the_earliest():
    def entry(step, loss, score=None):
        return CheckpointEntry(str(step), step, 1, 0.0, 1, loss, validation_score=score)

    scores = [(1, 0.5, -0.8), (2, 0.6, -0.9), (3, 0.4, -0.9), (4, 0.4, -0.9), (5, 0.1, math.nan)]
    accurate = [entry(*score) for score in scores]
    assert best_checkpoint(accurate).step == 3
    assert best_checkpoint([entry(1, 0.5), entry(2, 0.3), entry(3, 0.3)]).step == 2
    assert best_checkpoint([entry(1, None), entry(2, math.nan)]) is None
