"""A file that was cut short, as by a full disk, is refused with its part, by every step; never read as less data."""

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.curate.step import GlobalStep, is_global, make_step
from bessemer.errors import UserError
from bessemer.spec.data import STEPS

TEXT = "A paragraph of some length, which stands in every document of this little corpus, word for word, again. " * 3


@pytest.fixture(params=[spec for name, spec in STEPS.items() if name.startswith("de")], ids=lambda spec: spec.step)
def step(request: pytest.FixtureRequest, tmp_path: Path) -> GlobalStep:
    settings = {}
    if request.param.step == "decontaminate":
        (tmp_path / "set.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
        settings = {"sets": {"set": str(tmp_path / "set.jsonl")}}
    made = make_step(request.param.model_validate(settings), 0)
    assert is_global(made)
    return made


@pytest.mark.parametrize("left", [0.0, 0.5, 0.95])
def test_a_truncated_file_is_refused(
    step: GlobalStep, documents: Any, collect: Any, tmp_path: Path, left: float
) -> None:
    docs = documents([f"{TEXT}{i}" for i in range(9)], url=[f"http://a.org/{i % 4}" for i in range(9)])
    collected = collect(step, docs, tmp_path / "collected", parts=3)
    whole = collected[1].path.read_bytes()
    collected[1].path.write_bytes(whole[: int(left * len(whole))])
    (tmp_path / "scratch").mkdir()
    with pytest.raises(UserError, match=r"1.npz: what was collected of part 1 of source 'web' cannot be read"):
        list(step.resolve(collected, tmp_path / "scratch", lambda f, tasks: [f(task) for task in tasks])[0])


def test_the_same_corpus_undamaged(step: GlobalStep, documents: Any, run_step: Any) -> None:
    docs = documents([f"{TEXT}{i}" for i in range(9)], url=[f"http://a.org/{i % 4}" for i in range(9)])
    ran = run_step(step, docs, parts=3)
    json.dumps(ran.summary)
    changed = [i for i, outcome in enumerate(ran.outcomes) if outcome is not None]
    expected = {"DedupUrl": [4, 5, 6, 7, 8], "DedupExact": [], "Decontaminate": list(range(9))}
    assert changed == expected.get(type(step).__name__, changed)
