"""Losses near zero: a trained classifier's clean steps are never vetoed, a burst of wrong labels is.

`classification_steps.json` holds loss and gradient norm of the last 350 steps of a real run (reviews, 1 % of the labels
wrong, 16 rows a step): a wrong row has 100 times the usual loss and 200 times the usual norm.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bessemer.guard.detectors import Detectors
from bessemer.guard.judge import ACCEPT, LOSS_OUTLIER, Judge, JudgedNumber
from bessemer.spec.guard import DetectSpec, GuardSpec

REAL = json.loads((Path(__file__).parent / "classification_steps.json").read_text())
JUDGED = JudgedNumber(row=10.0, level=math.log(2), least_norm=30.0, examine=False)  # as of `Classify` with two labels
STEPS = 4000


def steps_of(share: float, seed: int) -> np.ndarray:
    """(STEPS, 2) drawn from the real steps. Most have `share` of their loss, as later in training; those with a
    hard row have all of it."""
    pairs = np.array(REAL["steps"])[np.random.default_rng(seed).integers(0, len(REAL["steps"]), STEPS)]
    easy = pairs[:, 0] < 0.05
    pairs[easy] *= share
    return pairs


def judge_all(judge: Judge, pairs: np.ndarray) -> list[int]:
    values = torch.tensor(pairs, dtype=torch.float32)
    return [int(judge.judge(loss, norm).scalars["code"]) for loss, norm in values.unbind()]


@pytest.mark.parametrize(
    ("share", "seed", "steps"),
    [
        (0.01, 3, 1000),
        *(
            pytest.param(*case, STEPS, marks=pytest.mark.slow)
            for case in [(1.0, 0), (1.0, 1), (0.1, 2), (0.01, 3), (1e-4, 4)]
        ),
    ],
)
def test_20000_clean_steps_without_a_veto_or_an_alarm(share: float, seed: int, steps: int) -> None:
    pairs = steps_of(share, seed)[:steps]
    judge = Judge(GuardSpec(), torch.device("cpu"), REAL["rows"], JUDGED)
    assert judge_all(judge, pairs) == [ACCEPT] * steps
    detectors = Detectors(GuardSpec(detect=DetectSpec(loss_unit=JUDGED.level)), None, steps)
    alarms = []
    for step, (loss, norm) in enumerate(pairs.tolist()):
        record = {"step": step, "loss": loss, "grad_norm": max(norm, JUDGED.least_norm), "lr": 1e-3, "lr_planned": 1e-3,
                  "veto": None, "tokens_per_s": 1e4, "step_s": 0.1, "data_wait_s": 0.0, "memory_bytes": 1}  # fmt: skip
        alarms += detectors.step(record)
    assert [alarm.kind for alarm in alarms if alarm.severity != "note"] == []


@pytest.mark.slow
def test_a_judge_of_pre_training_would_veto_them() -> None:
    """What the test above guards against."""
    vetoes = judge_all(Judge(GuardSpec(), torch.device("cpu"), REAL["rows"]), steps_of(0.01, 3))
    assert sum(code != ACCEPT for code in vetoes) >= 5


@pytest.mark.parametrize(
    ("share", "rows"),
    [(1.0, 8), (0.01, 16), *(pytest.param(*case, marks=pytest.mark.slow)
                             for case in [(0.01, 8), (1.0, 16), (1.0, 256), (0.01, 256)])],
)  # fmt: skip
def test_a_burst_of_wrong_labels_is_vetoed(rows: int, share: float) -> None:
    """All labels of a step are wrong, at 7 nats each; with 16 rows or more, also half of them."""
    judge = Judge(GuardSpec(), torch.device("cpu"), rows, JUDGED)
    assert set(judge_all(judge, steps_of(share, 5)[:500])) == {ACCEPT}
    for wrong in (7.0, 3.5) if rows >= 16 else (7.0,):
        assert judge_all(judge, np.array([[wrong, 20.0]])) == [LOSS_OUTLIER]


@pytest.mark.parametrize(("bad", "value"), [("low", 1.0), ("both", 1.0), ("both", 3.0)])
def test_a_number_may_be_bad_when_low(bad: str, value: float) -> None:
    judge = Judge(GuardSpec(), torch.device("cpu"), 64, JudgedNumber("entropy", bad=bad))  # type: ignore[arg-type]
    noise = 2.0 + 0.01 * np.random.default_rng(0).standard_normal(200)
    pairs = np.stack((noise, np.ones(200)), axis=1)
    assert set(judge_all(judge, pairs)) == {ACCEPT}
    assert judge_all(judge, np.array([[value, 1.0]])) == [LOSS_OUTLIER]
    center = judge.judge(torch.tensor(2.0), torch.tensor(1.0)).scalars["loss_center"]
    assert float(center) == pytest.approx(2.0, abs=0.01)
