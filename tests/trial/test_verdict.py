"""The rules of the verdict, one line each."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.trial.case import Evidence, decide

BAD, GOOD, NO = 5.0, 0.1, None
SCENE = {"observed": BAD, "repeat": BAD}
HEALTHY = SCENE | {"before": GOOD, "after": GOOD}
DAMAGED = SCENE | {"before": BAD, "after": BAD}
SAME = DAMAGED | {"replay": BAD, "corrupt": 0.0}

TABLE = [
    # Nothing to explain, nothing measured.
    ({"observed": 0.2, "repeat": 0.2, "before": GOOD}, "undetermined"),
    ({"observed": BAD}, "undetermined"),
    # Not reproducible.
    ({"observed": BAD, "repeat": GOOD, "gap": 1e3, "before": GOOD}, "hardware"),
    ({"observed": math.inf, "repeat": GOOD, "gap": math.inf}, "hardware"),
    (HEALTHY | {"gap": 1e3, "without": GOOD, "earlier": BAD}, "data"),  # other digits, and as abnormal
    # Precision.
    (DAMAGED | {"fp32": GOOD}, "numerics"),
    (HEALTHY | {"fp32": GOOD, "without": GOOD}, "numerics"),
    (HEALTHY | {"fp32": BAD, "without": GOOD, "earlier": BAD}, "data"),
    # Data.
    (HEALTHY | {"without": GOOD, "earlier": BAD}, "data"),
    (HEALTHY | {"without": GOOD, "earlier": GOOD}, "data x state"),
    (HEALTHY | {"without": GOOD}, "data"),
    (HEALTHY | {"without": BAD, "earlier": BAD}, "data"),
    (HEALTHY | {"without": BAD, "earlier": GOOD}, "data x state"),
    (HEALTHY | {"without": BAD}, "undetermined"),
    (HEALTHY, "undetermined"),
    (HEALTHY | {"after": BAD, "earlier": BAD}, "data"),
    (SCENE | {"without": GOOD}, "data"),
    (SCENE, "undetermined"),
    # Weights.
    (DAMAGED | {"replay": GOOD, "corrupt": 1e6}, "hardware"),
    (DAMAGED | {"replay": GOOD, "corrupt": math.inf}, "hardware"),
    (HEALTHY | {"without": GOOD, "earlier": GOOD, "replay": GOOD, "corrupt": 1e3}, "hardware"),
    (SAME | {"corrupt": 5.0}, "undetermined"),  # within the spread
    (DAMAGED, "undetermined"),
    (SAME, "undetermined"),
    # What avoids the damage.
    (SAME | {"planned_lr": GOOD, "lr_jump": 50.0}, "learning rate"),
    (SAME | {"planned_lr": BAD, "vetoed": GOOD, "convicted": True}, "data"),
    (SAME | {"vetoed": GOOD}, "data x state"),
    (SAME | {"vetoed": BAD, "lower_lr": GOOD}, "learning rate"),
    (SAME | {"planned_lr": BAD, "vetoed": BAD, "lower_lr": BAD}, "undetermined"),
    (DAMAGED | {"lr_jump": 50.0}, "learning rate"),
]


@pytest.mark.parametrize(("evidence", "expected"), TABLE)
def test_the_rules(evidence, expected):
    verdict, confidence, reason = decide(Evidence(**evidence))
    assert verdict == expected and reason
    quiet = evidence["observed"] < 0.3
    assert 0.5 <= confidence <= 1 if verdict != "undetermined" or quiet else confidence == 0


def test_numbers_near_the_line_convince_less():
    def sure(**more):
        return decide(Evidence(**(HEALTHY | {"without": GOOD, "earlier": BAD} | more)))[1]

    assert sure() > 0.9 > sure(without=0.9) > sure(without=0.9, left_out=True) > 0.5
    assert sure(earlier=1.1) < 0.7
    corrupt = [decide(Evidence(**(DAMAGED | {"replay": GOOD, "corrupt": c})))[1] for c in (11, 30, 1e6)]
    assert corrupt == sorted(corrupt) and corrupt[0] < 0.65 < 0.95 < corrupt[-1]


def test_the_state_is_healthy_unless_other_batches_suffer():
    assert Evidence(**HEALTHY).state_healthy and not Evidence(**DAMAGED).state_healthy
    assert Evidence(**(DAMAGED | {"fp32": GOOD})).state_healthy  # the weights are good, the arithmetic is not
    assert not Evidence(**(SCENE | {"after": BAD})).state_healthy
    assert Evidence(**(HEALTHY | {"after": BAD})).state_healthy  # what is new is abnormal, what was is not


VALUES = st.none() | st.floats(0, 1e9) | st.just(math.inf)


EXPERIMENTS = (
    "repeat", "before", "after", "fp32", "without", "earlier", "replay", "corrupt", "planned_lr", "lower_lr", "vetoed",
)  # fmt: skip


@given(st.fixed_dictionaries(dict.fromkeys(EXPERIMENTS, VALUES)), st.floats(0, 1e9), st.floats(0.2, 1), st.booleans())
def test_any_evidence_gets_a_verdict_and_documents_are_cleared_by_a_cleared_batch(values, observed, limit, left_out):
    e = Evidence(observed=observed, limit=limit, left_out=left_out, **values)
    verdict, confidence, reason = decide(e)
    assert 0 <= confidence <= 1 and reason
    if verdict == "data" and not e.damaged and e.earlier is None:
        assert e.normal(e.without)
