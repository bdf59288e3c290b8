"""`recipe: compatible`: defaults for what the spec leaves open."""

from itertools import product

import pytest

from bessemer.errors import UserError
from bessemer.plan.decide import decide_lr
from bessemer.plan.decision import Plan
from bessemer.plan.recipe.pretraining import muon_rate
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import preset

DATA = {"sources": {"text": "text/"}}


def spec(**sections):
    return RunSpec.model_validate({"model": "125M", "data": DATA, "recipe": "compatible"} | sections)


def test_fills_what_is_left_open():
    filled = spec()
    assert (filled.model.preset, filled.model.qk_norm, filled.model.init, filled.model.tied) == (
        "125M", "head", "zero", False,
    )  # fmt: skip
    assert (filled.optimizer.name, filled.optimizer.muon.cautious) == ("muon", True)
    assert (filled.schedule.kind, filled.schedule.floor) == ("linear", 0.0)


def test_what_is_written_stands():
    filled = spec(
        model={"preset": "125M", "tied": True},
        optimizer={"name": "adamw", "lr": 1e-3},
        schedule={"kind": "exponential"},
    )
    assert filled.model.tied and filled.model.qk_norm == "head"
    assert (filled.optimizer.name, filled.optimizer.lr) == ("adamw", 1e-3)
    assert (filled.schedule.kind, filled.schedule.floor) == ("exponential", 0.1)
    assert not spec(optimizer={"muon": {"cautious": False}}).optimizer.muon.cautious


def test_a_spec_with_its_own_expansion_stays():
    """As a run folder holds it."""
    filled = spec()
    assert RunSpec.model_validate(filled.model_dump(mode="json", exclude_unset=True)) == filled


@pytest.mark.parametrize("more", ["model.hf: some/folder", "objective: sft", "start_from: runs/a", "model.init: mup"])
def test_refuses_what_it_is_not_for(more, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"recipe: compatible\nmodel: 125M\ndata: {{sources: {{text: {tmp_path}}}}}\n")
    with pytest.raises(UserError, match="compatible is for"):
        load_spec(path, [more.replace(": ", "=")])


def test_muon_s_rate_falls_with_the_size():
    assert muon_rate(125e6, "rms").value == 4e-3 and muon_rate(125e6, "rms").basis == "empirical at this scale"
    assert muon_rate(1e9, "rms").value == pytest.approx(6.8e-4, rel=0.01)
    assert muon_rate(1e6, "rms").value == 8e-3 and muon_rate(1e6, "rms").basis == "open question"
    assert muon_rate(1.2e9, "spectral").value == pytest.approx(0.004, rel=0.02)
    shape, plan = preset("125M"), Plan()
    assert decide_lr(spec(), shape, 10**9, 2**19, plan) == muon_rate(shape.parameters, "rms").value
    assert "power -0.85" in plan.decisions["optimizer.lr"].reason


@pytest.mark.slow
def test_learns_faster(tmp_path):
    """The loss of the same small model after the same tokens."""
    from bessemer.run.directory import Run
    from bessemer.session.session import Session, run_folder

    who, does, what = "a cat,my dog,one bird,no fish", "sees,hears,likes", "tree,river,moon,stone,wind"
    triples = product(*(part.split(",") for part in (who, does, what)))
    words = [f"{a} {b} the {c} ." for a, b, c in triples]
    text = tmp_path / "text"
    text.mkdir()
    for i in range(200):
        lines = (words[(i * 7 + j * (1 + i % 5)) % len(words)] for j in range(40))
        (text / f"{i}.txt").write_text("\n".join(lines))
    losses = {}
    for recipe in ("standard", "compatible"):
        made = RunSpec.model_validate({
            "name": recipe, "runs": str(tmp_path), "recipe": recipe,
            "model": {"width": 64, "layers": 2, "heads": 2},
            "tokenizer": {"vocab": 300}, "data": {"sources": {"text": {"path": str(text)}}, "context": 64},
            "budget": {"steps": 60, "batch": 1024}, "parallel": {"device": "cpu"},
        })  # fmt: skip
        Session(made).train()
        losses[recipe] = list(Run.existing(run_folder(made)).validations())[-1]["loss"]
    assert losses["compatible"] < losses["standard"] - 0.2, losses
