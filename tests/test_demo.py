"""The demonstration: its parts quickly, and all of it in a short form."""

from pathlib import Path

import numpy as np
import pytest

from bessemer.data.stream.order import MixturePhase, StreamOrder
from bessemer.demo import choose_seed, compare_losses, run_demo, write_poison
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.spec.mixture import quantise


@pytest.mark.parametrize("positions", [400, 1992, 12_916])
def test_the_poisoned_sequence_comes_up_once_after_the_middle(positions: int) -> None:
    seed, weight = choose_seed(positions)
    order = StreamOrder(
        [MixturePhase(0, quantise({"library": 1.0, "poisoned": weight}))], {"library": 9000, "poisoned": 15}, seed
    )
    sources, _, _ = order.resolve(np.arange(positions))
    at = np.flatnonzero(sources == order.names.index("poisoned"))
    assert len(at) == 1
    assert 0.5 < at[0] / positions < 0.7


def test_the_poison_is_the_same_each_time(tmp_path: Path) -> None:
    assert write_poison(tmp_path / "a").read_bytes() == write_poison(tmp_path / "b").read_bytes()


def test_losses_trained_twice_are_compared_from_the_resumed_step_on() -> None:
    before = {8: 1.0, 9: 2.0, 10: 3.0}
    assert "9-10 are identical" in compare_losses(before, {8: 9.0, 9: 2.0, 10: 3.0}, resumed_at=9)
    assert "9-10 are within 5.0e-01" in compare_losses(before, {8: 9.0, 9: 2.0, 10: 3.5}, resumed_at=9)
    assert "right after a save" in compare_losses(before, {8: 9.0, 9: 2.0, 10: 3.5}, resumed_at=11)


def test_a_folder_that_is_not_the_demo_s_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="not made by the demo"):
        list(run_demo(str(tmp_path), 0.2, live=False))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo_in_short(tmp_path: Path) -> None:
    lines = list(run_demo(str(tmp_path / "runs"), 0.5, live=False))
    text = "\n".join(lines)
    for word in ("corpus", "plan", "poison", "kill", "veto", "resume", "done", "next"):
        assert any(line.startswith(word) for line in lines), word
    assert "zz_noise.py" in next(line for line in lines if line.startswith("veto"))
    assert "identical, digit for digit" in text
    first, *_, last = Run(tmp_path / "runs" / "demo").validations()
    assert first["loss"] - last["loss"] > 1.5
    assert text.count(">>>") == 3
