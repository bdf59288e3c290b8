"""The noise scale of a run and the batch ramp that follows, against values by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from bessemer.errors import UserError
from bessemer.plan.batch_ramp import noise_windows, ramp, ramp_of_run, split_noise
from bessemer.plan.schedule import Schedule, tokens_after
from bessemer.run.directory import Run, RunWriter


def test_the_estimates_are_right_on_average() -> None:
    """Gradients of a token are normal around G with a known trace; 8 and 64 tokens."""
    rng, truth = np.random.default_rng(0), np.array([0.3, -0.2, 0.1])
    tokens = truth + rng.standard_normal((20_000, 64, 3)) * np.array([1.0, 2.0, 0.5])
    small, large = ((tokens[:, :n].mean(1) ** 2).sum(1) for n in (8, 64))
    pairs = [split_noise(8, float(s), 64, float(b)) for s, b in zip(small, large, strict=True)]
    signal, noise = np.mean(pairs, 0)
    assert signal == pytest.approx(0.14, rel=0.05) and noise == pytest.approx(5.25, rel=0.02)


def records(scales: list[float], batch: int = 1024, every: int = 2) -> list[dict[str, object]]:
    """A run whose noise scale is given for each measurement."""
    rows: list[dict[str, object]] = []
    for step in range(len(scales) * every):
        row: dict[str, object] = {"step": step, "loss": 3.0, "veto": None, "tokens": (step + 1) * batch}
        if step % every == 0:
            scale = scales[step // every]
            row |= {"noise": scale * 4.0, "gradient_square": 4.0, "step_tokens": float(batch)}
        rows.append(row)
    return rows


def test_windows_average_before_they_divide_and_leave_vetoed_steps_out() -> None:
    rows = records([100.0] * 17)
    rows[0] |= {"noise": 0.0, "gradient_square": 12.0}
    rows[2] |= {"noise": 1e9, "veto": "outlier"}
    [first, second] = noise_windows(rows, 2)
    assert (first.first, first.last, first.measured, second.measured) == (0, 16, 8, 8)
    assert first.scale == pytest.approx(7 * 400 / (12 + 7 * 4)) and second.scale == pytest.approx(100.0)
    assert noise_windows(records([1.0] * 7)) == []


def test_a_ramp_doubles_at_the_tokens_where_the_noise_scale_has_doubled() -> None:
    windows = noise_windows(records([300.0] * 8 + [600.0] * 8 + [1300.0] * 8 + [9000.0] * 8), 4)
    changes = ramp(windows, 256, 4096)
    assert [size for _, size in changes] == [512, 1024, 4096]
    phases = ((0, 256), *changes)
    for (step, _), window in zip(changes, windows[1:], strict=True):
        assert tokens_after(phases, step) == pytest.approx(window.tokens, abs=4096)
    assert ramp(windows, 256, 512)[-1][1] == 512 and ramp(windows[:1], 256, 4096) == []


def test_a_gradient_that_does_not_stand_out_has_an_endless_scale() -> None:
    rows = records([1.0] * 8)
    for row in rows:
        if "gradient_square" in row:
            row["gradient_square"] = -1.0
    [window] = noise_windows(rows)
    assert math.isinf(window.scale) and ramp([window], 256, 1024)[-1][1] == 1024


def test_a_run_says_its_ramp_or_what_to_write(tmp_path: Path) -> None:
    folder = tmp_path / "noisy"
    with RunWriter(folder) as run:
        for record in records([5000.0] * 32):
            run.step(record)
    spec = "model: 1M\ndata: {sources: {a: a.jsonl}, context: 64}\n"
    (folder / "spec.yaml").write_text(spec)
    found = ramp_of_run(Run(folder), None, 2048)
    assert found.batch == 256 and [size for _, size in found.changes] == [2048]
    text = "\n".join(found.lines())
    assert "batch: 256, batch_changes: [{from_step:" in text and "5,000" in text
    assert found.to_json()["batch_changes"][-1]["batch"] == 2048
    with RunWriter(tmp_path / "plain") as run:
        run.step({"step": 0, "loss": 1.0, "veto": None})
    with pytest.raises(UserError, match=r"observe\.noise_every"):
        ramp_of_run(Run(tmp_path / "plain"), None, None)


@pytest.mark.parametrize(("power", "factor"), [(0.5, 2.0), (1.0, 4.0)])
def test_the_rate_follows_the_batch_by_the_rule(power: float, factor: float) -> None:
    phases = ((0, 4), (10, 16))
    plain = Schedule(1e-3, 2, 20, "constant")
    scaled = Schedule(1e-3, 2, 20, "constant", batch_rule=phases, batch_power=power)
    assert [scaled.lr(s) for s in range(10)] == [plain.lr(s) for s in range(10)]
    assert scaled.lr(10) == pytest.approx(factor * plain.lr(10)) == scaled.lr(19)
