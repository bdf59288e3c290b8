"""A run in fp16 and one in fp8, from the spec to the checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from bessemer.errors import UserError
from bessemer.plan.decide import decide_precision
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.run.directory import Run
from bessemer.session import start
from bessemer.session.session import run_folder, train
from bessemer.spec.shape import ModelShape
from bessemer.train import lowp as fp8
from bessemer.train.lowp import OVERFLOW
from bessemer.train.trained import load_model


def metrics(spec):
    return list(Run.existing(run_folder(spec)).metrics())


@pytest.mark.slow
def test_fp16_learns_as_fp32_and_a_resumed_run_keeps_its_scale(make_spec):
    full, half = make_spec("full"), make_spec("half", precision="fp16")
    for spec in (full, half):
        assert train(spec).kind == "finished"
    found = metrics(half)
    assert found[-1]["loss"] == pytest.approx(metrics(full)[-1]["loss"], rel=0.02)
    assert all(record["loss_scale"] > 0 for record in found)
    # The same in two parts: the second goes on with the scale of the first.
    parts = make_spec("parts", precision="fp16", budget={"steps": 20})
    train(parts)
    train(make_spec("parts", precision="fp16"))
    again = metrics(parts)
    assert [record["loss_scale"] for record in again] == [record["loss_scale"] for record in found]


def test_overflows_are_skipped_and_told_in_the_record_alone(make_spec):
    spec = make_spec("high", precision="fp16", loss_scale=2.0**30, budget={"steps": 4})
    train(spec)
    run = Run.existing(run_folder(spec))
    assert [record["veto"] for record in run.metrics()] == [OVERFLOW] * 4
    assert {record["loss_scale"] for record in run.metrics()} == {2.0**30}
    assert not list(run.events("veto")) and not list(run.events("rollback"))


def test_a_run_can_change_to_fp16_and_back(make_spec):
    train(make_spec("change", precision="bf16", budget={"steps": 4}))
    assert train(make_spec("change", precision="fp16", budget={"steps": 8})).kind == "finished"
    assert train(make_spec("change", precision="fp32", budget={"steps": 12})).kind == "finished"


def test_fp8_needs_a_gpu(make_spec):
    with pytest.raises(UserError, match=r"precision: fp8 needs a GPU"):
        train(make_spec("fp8", precision="fp8"))


@pytest.mark.slow
def test_fp8_trains_plans_its_layers_and_saves_plain_weights(make_spec, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8.convert_to_fp8, "__defaults__", (1, 16, True))  # emulated, in layers as small as these
    same = {"model": {"layers": 3}, "optimizer": {"lr": 0.003}}
    spec, full = make_spec("fp8", precision="fp8", **same), make_spec("fp32", **same)
    for one in (spec, full):
        assert train(one).kind == "finished"
    assert metrics(spec)[-1]["loss"] == pytest.approx(metrics(full)[-1]["loss"], rel=0.02)
    assert metrics(spec)[0]["loss"] != metrics(full)[0]["loss"]
    plan = json.loads((run_folder(spec) / "plan.json").read_text())
    assert "precision.layers" in json.dumps(plan)
    loaded = load_model(run_folder(spec), device="cpu")
    model, _ = loaded.model, loaded.tokenizer
    assert all(type(m) is torch.nn.Linear for m in model.modules() if isinstance(m, torch.nn.Linear))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["classify", "own"])
def test_other_objectives_in_fp8_follow_fp32(objective, make_spec, monkeypatch, tmp_path):
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8.convert_to_fp8, "__defaults__", (1, 16, True))  # emulated
    parts = {"model": {"layers": 3}, "optimizer": {"lr": 0.003}}
    if objective == "own":
        docs = Path(__file__).parents[2] / "docs" / "classify.md"
        (tmp_path / "own.py").write_text(docs.read_text().split("```python\n")[1].split("```")[0])
        parts["objective"] = f"{tmp_path / 'own.py'}:Confident"
    else:
        rows = [{"text": f"{'good' if i % 2 else 'bad'} work {i}", "label": ("no", "yes")[i % 2]} for i in range(400)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        source = {"path": [str(tmp_path / "rows.jsonl")], "columns": {"label": "label"}}
        parts |= {"objective": "classify", "classify": {"labels": ["no", "yes"]}}
        parts["data"] = {"sources": {"rows": source}, "context": 32, "validation": 0.1}
    low, full = make_spec("low", precision="fp8", **parts), make_spec("full", **parts)
    for spec in (low, full):
        assert train(spec).kind == "finished"
    first, last = ([metrics(spec)[at]["loss"] for spec in (low, full)] for at in (0, -1))
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], rel=0.02)
    assert last[1] < first[1] and abs(last[0] - last[1]) < 0.2 * (first[1] - last[1])


def test_one_noisy_comparison_does_not_choose_bf16(make_spec, monkeypatch) -> None:
    """Other work slowed the fp32 steps of two comparisons; in the third both are equally fast."""
    rates = iter([100.0, 180.0, 200.0, 210.0, 120.0, 190.0])
    monkeypatch.setattr(start, "training_rate", lambda *_, **__: next(rates))
    machine = Machine("cpu", "cpu", 1 << 30, 1, matmul={"fp32": 1e9, "bf16": 2e9})
    spec = make_spec(precision="auto")
    shape = ModelShape(300, 32, 1, 2, 1, 16, 64)
    measured = start.measure_precision(spec, machine, shape, 32, torch.device("cpu"))
    assert measured.training == {"fp32": 200.0, "bf16": 210.0}
    assert decide_precision(spec, measured, Plan(), None) == "fp32"
