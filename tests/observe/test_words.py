"""Events and numbers as lines: every kind of event, numbers that are none, and curves of any length."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.observe.format import (
    event_line,
    perplexity,
    resume_hint,
    short_path,
    sparkline,
    step_line,
    validation_line,
)
from bessemer.run.journal import json_ready

STATISTICS = {"streak": 1, "loss_z": 31.4, "loss_center": 2.5, "grad_z": 12.2, "grad_center": 0.8}
DOCUMENT = {"file": "data/bad.txt", "row": 3, "document": "x", "tokens": 200, "mean_loss": 9.5, "share": 0.871}


def veto(**details: Any) -> dict[str, Any]:
    event = {"kind": "veto", "step": 1234, "reason": "loss outlier", "loss": 9.1234, "grad_norm": 55.5}
    return event | {"statistics": STATISTICS, "documents": [DOCUMENT]} | details


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            veto(),
            "veto  step 1,234  loss 9.12 is 31 sigma above 2.50. Weights untouched. "
            "The batch contains data/bad.txt (row 3, 200 tokens, 87% of the loss, 9.50 a token)",
        ),
        (
            veto(reason="gradient-norm outlier", documents=[]),
            "veto  step 1,234  gradient norm 55.5 against 0.8 (12 sigma of its log). Weights untouched.",
        ),
        (
            veto(
                reason="non-finite loss or gradient",
                loss=math.nan,
                grad_norm=math.inf,
                documents=[DOCUMENT | {"share": None, "mean_loss": math.nan}],
            ),
            "veto  step 1,234  non-finite loss or gradient (loss nan, gradient norm inf). Weights untouched. "
            "The batch contains data/bad.txt (row 3, 200 tokens)",
        ),
        (
            {"kind": "saved", "checkpoint": "step-00000100.a1", "seconds": 1.234, "stall_s": 0.5},
            "saved step-00000100.a1 in 1.23 s, training paused for 0.50 s",
        ),
        ({"kind": "started", "step": 0, "resumed_from": None}, None),
        ({"kind": "started", "step": 0}, None),
        (
            {"kind": "started", "step": 1200, "resumed_from": "step-00001200.a1"},
            "resumed from step-00001200.a1 at step 1,200",
        ),
        (
            {"kind": "spec_changed", "changes": {"optimizer.lr": [1e-3, 1e-4], "budget.tokens": ["auto", 5]}},
            "spec  changed: optimizer.lr 0.001 -> 0.0001; budget.tokens auto -> 5",
        ),
        (
            {"kind": "metrics_cut", "steps": 1500, "from_step": 4000, "reason": "x"},
            "cut   metrics of 1,500 steps from 4,000 on: they will be trained again",
        ),
        ({"kind": "lock_taken", "reason": "process 5 on here died"}, "lock taken  process 5 on here died"),
        ({"kind": "swept", "checkpoints": ["a"], "reason": "1 removed"}, "swept  1 removed"),
        (
            {"kind": "checkpoint_passed_over", "checkpoint": "step-1.a1", "reason": "bad hash"},
            "checkpoint passed over  step-1.a1  bad hash",
        ),
        ({"kind": "digits_may_differ", "reason": "threads 1 -> 2"}, "digits may differ  threads 1 -> 2"),
        (
            {"kind": "guard_reopened", "step": 77, "reason": "the data changes"},
            "guard reopened  step 77  the data changes",
        ),
        ({"kind": "save_failed", "step": 5, "reason": "disk full"}, "save failed  step 5  disk full"),
        ({"kind": "refused", "reason": "another stream"}, "refused  another stream"),
        ({"kind": "something_new"}, "something new"),
    ],
)
def test_every_kind_of_event_has_its_words(event: dict[str, Any], line: str | None) -> None:
    assert event_line(event) == line
    assert event_line(json.loads(json.dumps(json_ready(event)))) == line  # as it is read back from the run


RECORD: dict[str, Any] = {
    "step": 41,
    "loss": 3.2,
    "accuracy": 0.213,
    "grad_norm": 1.25,
    "lr": 3e-4,
    "memory_bytes": 2_500_000_000,
}
SMOOTH = {"loss": 2.0, "loss_steps": 32, "rate": 12_345.6, "mfu": 0.314, "left_s": 3725.0}


def test_a_line_of_progress() -> None:
    line = step_line(RECORD, 1000, SMOOTH, None)
    assert line == (
        "step 42/1,000  loss 2.000 (mean of 32)  ppl 7.389  acc 21.3%  lr 3.00e-04  grad 1.25  12,346 tok/s  31% of "
        "peak  2.5 GB  eta 1h 02m"
    )
    assert "  val 2.500  lr" in step_line(RECORD, 1000, SMOOTH, {"loss": 2.5})


def test_progress_without_a_number_is_still_a_line() -> None:
    line = step_line(RECORD | {"grad_norm": math.inf}, 1000, SMOOTH | {"loss": math.nan}, {"loss": math.nan})
    assert "loss nan (mean of 32)  ppl nan" in line and "grad inf" in line and "val nan" in line


def test_a_line_of_validation() -> None:
    record = {"step": 1000, "loss": 2.0, "bits_per_byte": 1.23456, "accuracy": 0.5}
    assert (
        validation_line(record)
        == "val   step 1,000  loss 2.0000  perplexity 7.389  1.235 bits per byte  accuracy 50.0%"
    )


def test_sources_stand_side_by_side_where_forgetting_is_watched() -> None:
    losses = {"general": 2.31, "domain": 1.88}
    record = {"step": 10, "loss": 2.0, "bits_per_byte": 1.2, "accuracy": 0.5, "per_source": losses}
    assert "general" not in validation_line(record)
    line = validation_line(record | {"rise": {"general": 0.012}})
    assert "loss 2.0000  general 2.31 (+1.2%)  domain 1.88  perplexity" in line


@pytest.mark.parametrize(
    ("loss", "text"),
    [(0.0, "1"), (10.0, "2.203e+04"), (29.9, "9.67e+12"), (30.0, "over 1e13"), (1e9, "over 1e13"), (math.nan, "nan")],
)
def test_perplexity(loss: float, text: str) -> None:
    assert perplexity(loss) == text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([math.nan, math.inf], ""),
        ([5.0], "▁"),
        ([3.0, 3.0], "▁▁"),
        ([0.0, 7.0], "▁█"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
        ([7, math.nan, 0], "█▁"),
        ([0.0, 0.0, 7.0, 7.0], "▁▁██"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_long_curve_is_averaged_into_its_width() -> None:
    assert sparkline([0.0] * 500 + [7.0] * 500, width=4) == "▁▁██"
    assert sparkline([1.0, 2.0], width=0) == ""


@given(st.lists(st.floats(), max_size=100), st.integers(1, 30))
def test_any_curve_can_be_drawn(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, sum(map(math.isfinite, values)))


def test_a_path_is_shown_from_here_when_that_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "data" / "x.txt")) == os.path.join("data", "x.txt")
    assert short_path("/x") == "/x"


def test_how_to_go_on() -> None:
    assert resume_hint(Path("runs/a"), "my.yaml") == "continue with: bessemer train my.yaml"
    assert resume_hint(Path("runs/a"), None) == "continue with: bessemer train runs/a/spec.yaml"
