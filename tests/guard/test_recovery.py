"""Whether a run came back to its trend: told once, from accepted steps alone, and told too if it did not."""

import pytest

from bessemer.guard.ladder import SPAN, RecoveryCheck


def watch(losses, since=100, center=3.0, scale=0.1, patience=50):
    """What is told of these losses from step `since` on; a loss of None is a vetoed step of loss 9."""
    told = []
    watched = RecoveryCheck(since, center, scale, patience, lambda *found: told.append(found))
    for step, loss in enumerate(losses, start=since):
        record = {"step": step, "loss": 9.0 if loss is None else loss, "veto": "outlier" if loss is None else None}
        if watched.step(record):
            return told, step
        assert told == []
    return told, None


def test_a_run_on_its_trend_is_told_of_after_the_first_span():
    assert watch([3.0] * 60) == ([(100, 3.0)], 100 + SPAN - 1)


@pytest.mark.parametrize(("level", "back"), [(3.29, True), (3.31, False), (1.0, True)])
def test_near_is_within_three_scales_above_the_former_centre(level, back):
    told, _ = watch([level] * 60)
    assert told == ([(100, level)] if back else [(None, None)])


def test_a_loss_that_comes_down_slowly_is_told_from_where_it_was_back():
    told, step = watch([5.0 - 0.1 * i for i in range(60)])
    ((rejoined, median),) = told
    assert median <= 3.3 < 5.0 - 0.1 * (rejoined - 100)  # half of the span is still above
    assert step == rejoined + SPAN - 1


def test_vetoed_steps_say_nothing_about_the_trend():
    told, _ = watch([None, 3.0] * 30)
    assert told == [(101, 3.0)]


def test_one_good_step_among_bad_ones_is_no_recovery():
    assert watch(([9.0] * 5 + [3.0]) * 20)[0] == [(None, None)]


def test_patience_has_an_end_even_if_all_steps_are_vetoed():
    assert watch([None] * 60) == ([(None, None)], 150)


def test_what_is_not_finite_is_not_back():
    assert watch([float("nan")] * 60)[0] == [(None, None)]


def test_steps_before_the_repair_are_not_counted():
    told = []
    watched = RecoveryCheck(100, 3.0, 0.1, 50, lambda *found: told.append(found))
    assert not any(watched.step({"step": step, "loss": 3.0, "veto": None}) for step in range(50, 100))
    assert told == [] and len(watched.recent) == 0
