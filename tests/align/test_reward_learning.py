"""The recipe of a reward model learns what its pairs were drawn from, knows how sure it is, and is less sure of texts
unlike them."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
from tests.session.conftest import measured_once  # noqa: F401

from bessemer.align.reward_model import RewardModel
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_document

ROOT = Path(__file__).parents[2]
BEST = 0.776  # accuracy of the probabilities that the preferences were drawn with


def recipe_data() -> Any:
    spec = importlib.util.spec_from_file_location("make_data", ROOT / "recipes" / "make_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_learns_calibrated_preferences(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = recipe_data()
    Path("recipes/data").mkdir(parents=True)
    module.write(Path("recipes/data/compared_reviews.jsonl"), module.compared_reviews(1, 4000))
    settings = ["parallel.device=cpu", f"seed={seed}"]
    spec = load_document(ROOT / "recipes" / "reward.yaml", settings).spec
    outcome = Session(spec).train()
    validation = outcome.validation
    assert validation is not None and validation["accuracy"] > BEST - 0.06 and validation["ece"] < 0.12
    model, draw = RewardModel.load(run_folder(spec), device="cpu"), random.Random(seed)
    points = [k % 5 for k in range(300)]
    scores = model.score_with_std(["How was it?"] * 300, [module.judged(draw, k) for k in points])
    means = [sum(score for (score, _), k in zip(scores, points, strict=True) if k == point) / 60 for point in range(5)]
    assert means == sorted(means) and means[4] - means[0] > 2.0  # a point for each praised aspect: 4 in truth
    tested = [reward > other for (reward, _), a in zip(scores, points, strict=True) if a >= 3
              for (other, _), b in zip(scores, points, strict=True) if b <= 1]  # fmt: skip
    letters = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=40)) for _ in range(300)]
    elsewhere = model.score_with_std(["How was it?"] * 300, letters)
    known, unknown = (sum(std for _, std in some) / 300 for some in (scores, elsewhere))
    assert sum(tested) > 0.97 * len(tested) and unknown > 1.25 * known
