"""The speed that a run's estimated duration follows from: a short row is measured with the rows beside it."""

from types import SimpleNamespace

import pytest

from bessemer.train import speed


@pytest.mark.parametrize(
    ("row_s", "expected_s"), [(0.2, 0.21), (0.001, (0.01 + 8 * 0.001) / 8)], ids=["a long row", "a short row"]
)
def test_overhead_is_shared_by_the_rows_of_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch, row_s: float, expected_s: float
) -> None:
    """Each pass has an overhead of 10 ms."""
    batch = speed.random_batch(10, 8, 4)
    monkeypatch.setattr(speed, "_pass_seconds", lambda engine, part: 0.01 + row_s * len(part.tokens))
    engine = SimpleNamespace(plan=SimpleNamespace(micro_rows=8))
    stream = SimpleNamespace(micro_batches=lambda step, rows: [batch])
    assert speed._row_seconds(engine, stream, 0, 16) == pytest.approx(expected_s)  # type: ignore[arg-type]
