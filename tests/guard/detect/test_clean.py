"""How often a clean run raises an alarm: eleven families of runs, all detectors, fixed seeds."""

import numpy as np
import pytest


def alarms_of(families, play, seeds, steps):
    return [
        f"{family.__name__} {seed}: step {alarm.step} {alarm.kind}: {alarm.finding.symptom}"
        for family in families
        for seed in seeds
        for alarm in play(family(np.random.default_rng([seed, 7]), steps))
    ]


def test_clean_runs_raise_no_alarm(families, play):
    """44,000 steps."""
    assert alarms_of(families, play, [0], 4000) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_most_one_alarm_in_100_000_clean_steps(families, play):
    """880,000 steps. The spread of the count is a Poisson's, so the fixed seeds are those of no search."""
    found = alarms_of(families, play, range(4), 20_000)
    assert len(found) <= 8, found
