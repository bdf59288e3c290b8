"""Best-of-N: the estimator against all subsets, and the rows."""

import itertools
import math
import random

import pytest

from bessemer.align.best_of import Candidate, best_of_curve, best_rows, kl_bound, pair_rows


def test_the_curve_is_the_mean_over_all_subsets() -> None:
    draw = random.Random(0)
    groups = [[Candidate("x", draw.random(), held_out=draw.random()) for _ in range(6)] for _ in range(3)]
    curve = best_of_curve(groups)
    assert [point.n for point in curve] == [1, 2, 4, 6]
    for point in curve:
        best = [
            [max(subset, key=lambda c: c.reward) for subset in itertools.combinations(group, point.n)]
            for group in groups
        ]
        for name in ("reward", "held_out"):
            means = [sum(getattr(c, name) for c in some) / len(some) for some in best]
            assert getattr(point, name) == pytest.approx(sum(means) / 3, abs=1e-12)
            error = math.sqrt(sum((mean - sum(means) / 3) ** 2 for mean in means) / 2 / 3)
            assert getattr(point, f"{name}_error") == pytest.approx(error, abs=1e-12)
    assert (kl_bound(1), kl_bound(4)) == (0.0, pytest.approx(math.log(4) - 0.75))


def test_rows_have_finished_answers_only() -> None:
    candidates = [
        Candidate("good", 1.0),
        Candidate("cut off", 5.0, finished=False),
        Candidate(" ", 4.0),
        Candidate("bad", 0.0),
    ]
    (row,) = best_rows("q", candidates)
    assert (row["completion"], row["reward"]) == ("good", 1.0)
    (pair,) = pair_rows([{"role": "user", "content": "q"}], candidates)
    assert pair["chosen"] == [{"role": "assistant", "content": "good"}] and pair["rejected_reward"] == 0.0
    assert not list(pair_rows("q", [Candidate("a", 1.0), Candidate("b", 1.0)])) and not list(best_rows("q", []))
