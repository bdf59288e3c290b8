"""`dpo.reference: stored`: the numbers of a live reference, computed once, and none in memory during training."""

from pathlib import Path

import numpy as np
import pytest
from tests.align.test_dpo import base as base  # the fixture
from tests.align.test_dpo import columns_of, make_spec
from tests.session.conftest import train_until

from bessemer.session import models, reference
from bessemer.session.replay import job_of
from bessemer.session.session import Session, run_folder
from bessemer.session.start import complete_spec

NAMES = ("loss", "accuracy", "margin", "chosen_shift", "grad_norm")
Base = tuple[Path, Path, Path]


def test_stored_numbers_are_those_of_a_live_reference(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, computed = [], []
    inner = reference.reference_logps
    monkeypatch.setattr(reference, "reference_logps", lambda *a: computed.append(a[2].store.documents) or inner(*a))
    for name, kind in (("first", "auto"), ("again", "stored"), ("live", "live")):
        spec = make_spec(base, f"reference-{name}", dpo={"reference": kind}, budget={"steps": 6})
        assert complete_spec(spec).dpo.reference == ("live" if kind == "live" else "stored")
        outcome = Session(spec).train()
        assert outcome.validation is not None
        curves.append(np.append(columns_of(spec, *NAMES).ravel(), outcome.validation["loss"]))
    np.testing.assert_allclose(curves[0], curves[2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(curves[0], curves[1])
    assert len(computed) == 2 and sum(computed) == 400  # both sides once, for the first run


def test_no_reference_is_in_memory_and_the_resume_is_exact(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(base, "stored-through", budget={"steps": 6})
    Session(spec).train()
    stopped = make_spec(base, "stored-stopped", budget={"steps": 6})
    train_until(stopped, 3)

    def refuse(*_: object) -> None:
        raise AssertionError("a reference is loaded")

    monkeypatch.setattr(models, "load_frozen", refuse)
    monkeypatch.setattr(reference, "load_frozen", refuse)
    Session(stopped).train()
    np.testing.assert_array_equal(columns_of(spec, *NAMES), columns_of(stopped, *NAMES))
    job, _ = job_of(run_folder(spec))  # a replay reads the same numbers
    assert not job.engine.objective.models
    batch = job.data.stream.batch(2)
    assert batch.fields["reference_logp"].shape[1:] == (2, 1) and (batch.fields["reference_logp"][..., 0] < 0).all()


def test_a_damaged_file_is_computed_again_and_other_weights_have_their_own(base: Base) -> None:
    spec = make_spec(base, "stored-damaged", budget={"steps": 2})
    Session(spec).train()
    file = next((base[1] / ".data").rglob("pairs.train.reference-*.npy"))
    good = np.load(file)
    file.write_bytes(file.read_bytes()[:-4])
    Session(make_spec(base, "stored-mended", budget={"steps": 2})).train()
    np.testing.assert_allclose(np.load(file), good, rtol=1e-5)
    again = next((run_folder(spec) / "checkpoints").glob("step-*"))
    other = make_spec(base, "stored-other", budget={"steps": 2}, models={"reference": {"path": str(again)}})
    Session(other).train()
    assert columns_of(other, "loss")[0, 0] != pytest.approx(np.log(2), abs=1e-6)
    assert len(list((base[1] / ".data").rglob("pairs.train.reference-*.npy"))) > 1


def test_an_adapter_compares_with_its_own_base(base: Base) -> None:
    lora = make_spec(base, "lora", adapter={"kind": "lora", "rank": 2})
    assert complete_spec(lora).dpo.reference == "live"
    asked = complete_spec(make_spec(base, "lora", adapter={"kind": "lora", "rank": 2}, dpo={"reference": "stored"}))
    assert asked.models["reference"].path != "base"
