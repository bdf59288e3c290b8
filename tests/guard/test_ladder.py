"""The ladder: which rung for which trouble, never past its bounds, and never without a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.guard.ladder import Ladder, LadderFacts
from bessemer.spec.guard import GuardSpec, LadderSpec

VERDICTS = (None, "data", "data x state", "numerics", "hardware", "learning rate", "undetermined")


def ladder_of(window=128, max_vetoes=5, **limits):
    return Ladder(GuardSpec(window=window, max_vetoes=max_vetoes, ladder=LadderSpec(**limits)))


def facts(step=1000, streak=1, finite=True, severity="veto", **known):
    return LadderFacts(step, streak, finite, severity, **known)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("healthy", [True, None])
@pytest.mark.parametrize("streak", [1, 4])
def test_a_veto_is_enough_while_the_weights_are_healthy(finite, healthy, streak):
    ladder = ladder_of()
    rung = ladder.decide(facts(streak=streak, finite=finite, state_healthy=healthy))
    assert (rung.kind, rung.depth, rung.skip, rung.gentle) == ("go on", 0, False, False)
    assert ladder.rollbacks == []


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"state_healthy": False}, "other batches"),
        ({"severity": "rollback"}, "trend"),
        ({"streak": 5, "finite": False}, "5 steps in a row were not finite"),
    ],
)
def test_what_leads_back(known, words):
    ladder = ladder_of()
    rung = ladder.decide(facts(**known))
    assert (rung.kind, rung.depth, rung.gentle) == ("rollback", 1, False)
    assert words in rung.reason and ladder.rollbacks == [1000]


def test_many_outliers_in_a_row_without_a_fault_are_a_lasting_change():
    rung = ladder_of().decide(facts(streak=5, state_healthy=True))
    assert rung.kind == "reopen" and "5 vetoes in a row" in rung.reason


def test_many_outliers_in_a_row_of_convicted_documents_lead_back_and_are_left_out():
    """A poisoned shard: what was read is read again, without the convicted documents."""
    rung = ladder_of().decide(facts(streak=5, state_healthy=True, verdict="data", convicted=2))
    assert (rung.kind, rung.depth, rung.skip) == ("rollback", 1, False) and "bad data" in rung.reason


@pytest.mark.parametrize(
    ("verdict", "convicted", "skip"),
    [
        ("data", 3, False),  # the guilty documents are left out, the rest is read again
        ("data", 0, True),
        ("hardware", 0, False),
        ("numerics", 0, False),
        ("learning rate", 0, False),
        ("data x state", 2, True),
        ("undetermined", 0, True),
        (None, 0, True),
    ],
)
def test_the_window_is_skipped_unless_its_data_is_known_to_be_blameless(verdict, convicted, skip):
    rung = ladder_of().decide(facts(state_healthy=False, verdict=verdict, convicted=convicted))
    assert rung.kind == "rollback" and rung.skip == skip


def test_the_same_trouble_climbs_and_the_run_stops_at_the_end():
    ladder = ladder_of(rollbacks=3, relapse=500)
    rungs = [ladder.decide(facts(step, state_healthy=False, verdict="hardware")) for step in (1000, 980, 1480, 1200)]
    assert [(r.kind, r.depth, r.gentle, r.skip) for r in rungs] == [
        ("rollback", 1, False, False),
        ("rollback", 2, True, True),  # the first explanation was not enough
        ("rollback", 3, True, True),
        ("stop", 0, False, False),
    ]
    assert "after 3 rollbacks within 500 steps" in rungs[-1].reason


def test_after_a_quiet_stretch_the_ladder_begins_at_its_foot():
    ladder = ladder_of(relapse=500)
    assert ladder.decide(facts(1000, state_healthy=False)).depth == 1
    assert ladder.decide(facts(1501, state_healthy=False)).depth == 1
    assert ladder.decide(facts(2001, state_healthy=False)).depth == 2


def test_no_rollbacks_allowed_means_stop():
    assert ladder_of(rollbacks=0).decide(facts(state_healthy=False)).kind == "stop"


def test_an_alarm_that_cannot_be_repaired_stops_at_once():
    rung = ladder_of().decide(facts(severity="stop", state_healthy=True))
    assert rung.kind == "stop" and rung.reason


def test_a_run_that_is_mostly_bad_data_stops():
    ladder, kinds = ladder_of(window=16), []
    for step in range(20):
        kinds.append(ladder.decide(facts(step, state_healthy=True, verdict="data", convicted=1)).kind)
    assert kinds == ["go on"] * 8 + ["stop"] * 12
    assert "16 steps were bad data" in ladder.decide(facts(20, verdict="data", convicted=1)).reason


def test_bad_data_now_and_then_does_not():
    ladder = ladder_of(window=16)
    for step in range(0, 400, 2):
        assert ladder.decide(facts(step, state_healthy=True, verdict="data", convicted=1)).kind == "go on"
    assert len(ladder.justified) == 8


troubles = st.builds(
    LadderFacts,
    step=st.integers(0, 5000),
    streak=st.integers(0, 9),
    finite=st.booleans(),
    severity=st.sampled_from(["veto", "rollback", "stop"]),
    state_healthy=st.sampled_from([None, True, False]),
    verdict=st.sampled_from(VERDICTS),
    convicted=st.integers(0, 3),
)


@given(st.lists(troubles, max_size=40), st.integers(0, 4), st.integers(0, 40))
def test_rollbacks_of_one_stretch_are_bounded_and_a_saved_ladder_decides_the_same(found, limit, cut):
    found = sorted(found, key=lambda trouble: trouble.step)
    ladder = ladder_of(rollbacks=limit)
    resumed = ladder_of(rollbacks=limit)
    back = []
    for i, trouble in enumerate(found):
        rung = ladder.decide(trouble)
        assert rung.reason
        assert (rung.depth > 0) == (rung.kind == "rollback")
        if i < cut:
            resumed.load(ladder.state())
        else:
            assert resumed.decide(trouble) == rung
        if rung.kind == "rollback":
            back.append(trouble.step)
            assert len([step for step in back if trouble.step - step <= 500]) <= limit


def test_a_saved_ladder_does_not_share_its_lists():
    ladder = ladder_of()
    ladder.decide(facts(state_healthy=False))
    other = ladder_of()
    other.load(ladder.state())
    other.decide(facts(1001, state_healthy=False))
    assert ladder.rollbacks == [1000] and other.rollbacks == [1000, 1001]
