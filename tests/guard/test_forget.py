"""Forgetting, judged from validation records alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.guard.forgetting import check_forgetting, forgetting_states, since_start
from bessemer.spec.guard import ForgetSpec

MIXTURE = {"general": 0.02, "domain": 0.98}


def records(*general: float, domain: float = 3.0, every: int = 10):
    return [
        {"step": every * i, "per_source": {"general": loss, "domain": domain - 0.1 * i}}
        for i, loss in enumerate(general)
    ]


def watch(**more):
    return ForgetSpec(sources=["general"], **more)


def test_a_loss_beyond_the_limit_for_long_enough_raises_the_alarm_with_both_losses():
    spec = watch(limit=0.05, patience=2)
    past = records(2.0, 2.09, 2.11, 2.2)
    assert check_forgetting(spec, past[:3], MIXTURE) is None
    found = check_forgetting(spec, past, MIXTURE)
    assert found is not None
    finding = found.finding
    assert (found.kind, found.step, found.severity) == ("forgetting", 30, "stop")
    assert finding.evidence["remembered"] == 10
    assert "held-out loss 2 -> 2.2 (+10.0%), beyond the limit of 5% since step 20; domain 3 -> 2.7" in finding.symptom
    assert finding.evidence["losses"] == {"general": (2.0, 2.2), "domain": (3.0, pytest.approx(2.7))}
    assert finding.evidence["mixture"] == MIXTURE and finding.evidence["since"] == 20
    assert "2% of what is read is general, too little" in finding.cause
    assert "general 5% of the mixture" in finding.fix and "optimizer.lr" in finding.fix


def test_a_loss_that_comes_back_in_between_starts_the_count_anew():
    assert check_forgetting(watch(), records(2.0, 2.2, 2.0, 2.2), MIXTURE) is None
    assert check_forgetting(watch(patience=1), records(2.0, 2.2, 2.0, 2.2), MIXTURE) is not None


def test_exactly_at_the_limit_is_within_it():
    assert forgetting_states(watch(limit=0.5, patience=1), records(2.0, 3.0))[0].in_a_row == 0


def test_a_note_is_said_once_and_again_only_after_it_was_over():
    spec = watch(action="note", patience=2)
    losses = [2.0, 2.3, 2.3, 2.3, 2.0, 2.3, 2.3, 2.3]
    said = [check_forgetting(spec, records(*losses[: n + 1]), MIXTURE) is not None for n in range(len(losses))]
    assert said == [False, False, True, False, False, False, True, False]
    stop = watch(action="stop", patience=2)  # a resumed run that goes on forgetting is stopped again
    assert [check_forgetting(stop, records(*losses[: n + 1]), MIXTURE) is not None for n in (2, 3)] == [True, True]


def test_the_worst_of_several_sources_is_named_and_the_earliest_good_state_asked_for():
    spec = ForgetSpec(sources=["general", "code"], patience=2)
    past = records(2.0, 2.0, 2.2, 2.2)
    for record, loss in zip(past, (1.0, 1.2, 1.3, 1.4), strict=True):
        record["per_source"]["code"] = loss
    found = check_forgetting(spec, past, {"domain": 1.0})
    assert found is not None
    assert (found.finding.evidence["source"], found.finding.evidence["remembered"]) == ("code", 0)


def test_a_loss_that_is_not_a_number_counts_as_forgotten():
    found = check_forgetting(watch(), records(2.0, math.nan, math.nan), MIXTURE)
    assert found is not None
    journal = records(2.0, 2.0, 2.0)
    for record in journal[1:]:
        record["per_source"]["general"] = "nan"  # as JSON lines hold it
    assert check_forgetting(watch(), journal, MIXTURE) is not None


def test_the_reference_is_the_evaluation_before_the_first_step_of_the_last_start():
    again = [*records(9.0), *records(2.0, 2.3, 2.3)]
    assert since_start(again)[0]["per_source"]["general"] == 2.0
    assert check_forgetting(watch(), since_start(again), MIXTURE) is not None
    assert since_start(records(2.0, 2.0)[1:]) == []
    assert forgetting_states(watch(), []) == []


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12), st.floats(0, 1), st.integers(1, 4))
def test_the_count_is_what_one_would_count_by_hand(losses, limit, patience):
    spec = watch(limit=limit, patience=patience)
    beyond = [loss > (1 + limit) * losses[0] for loss in losses]
    row = next((n for n, bad in enumerate(reversed(beyond)) if not bad), len(losses))
    (standing,) = forgetting_states(spec, records(*losses))
    assert standing.in_a_row == row
    assert standing.remembered == 10 * (len(losses) - 1 - row)
    assert (check_forgetting(spec, records(*losses), MIXTURE) is not None) == (row >= patience)
