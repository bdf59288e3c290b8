"""Runs whose frozen base is in NF4: what they load, save, resume and export, and the choice of `adapter: auto`."""

import importlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bessemer.checkpoint.base import FolderWeights
from bessemer.checkpoint.manifest import read_manifest
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.quantized import is_quantized, rounded_to_nf4
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.checks import check_spec
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job
from bessemer.train.trained import load_model

from .conftest import Faults, spec_data, train_until
from .test_adapters import MODEL, columns, last, rhymes, train  # noqa: F401  fixtures
from .test_frozen import Hold

pytest.importorskip("transformers")
Make = Callable[..., RunSpec]
QLORA = {"kind": "qlora", "rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A base model trained on the corpus; its export is RUN/export/hf."""
    runs = tmp_path_factory.mktemp("base")
    spec = RunSpec.model_validate(spec_data("base", corpus, runs, model=MODEL, budget={"steps": 30, "batch": 256}))
    assert Session(spec).train().kind == "finished"
    to_hf(open_native(run_folder(spec)), run_folder(spec) / "export" / "hf")
    return run_folder(spec)


@pytest.fixture
def make(trained: Path, rhymes: Path, tmp_path: Path) -> Make:  # noqa: F811
    runs = tmp_path / "runs"
    runs.mkdir()

    def spec(name: str = "run", adapter: Any = None, **parts: Any) -> RunSpec:
        parts = {"checkpoint": {"every": 6, "keep_last": 9}, "budget": {"steps": 12, "batch": 128}} | parts
        own = {"model": {"hf": str(trained / "export" / "hf")}, "tokenizer": {}, "optimizer": {"lr": 0.02}}
        own |= {key: parts.pop(key) for key in own.keys() & parts}
        data = spec_data(name, rhymes, runs, adapter=QLORA if adapter is None else adapter, **parts)
        return RunSpec.model_validate(data | own)

    return spec


def test_the_base_is_held_in_four_bits_and_is_the_folder_rounded(make: Make, trained: Path) -> None:
    hold, spec = Hold(), make()
    assert train(spec, hold) == "finished"
    model = hold.job.engine.model
    held = {name: p for name, p in model.named_parameters() if is_quantized(p)}
    assert len(held) == 14 and not any("embedding" in name or "norm" in name for name in held)
    folder = FolderWeights(trained / "export" / "hf", body=False)
    assert all(torch.equal(p.dense(), rounded_to_nf4(folder[name])) for name, p in held.items())  # type: ignore
    base = read_manifest(last(spec)).base
    assert {name for name, entry in base["tensors"].items() if entry.get("quantization") == "nf4"} == set(held)
    assert all(".lora_" in name for name in SavedTensors(last(spec))._entries if not name.startswith("guard."))
    plan = Plan.from_json((run_folder(spec) / "plan.json").read_text())
    assert plan.value("adapter.base") == "nf4" and "14 frozen matrices" in plan.decisions["adapter.base"].reason
    assert columns(spec)[-1][1] < columns(spec)[0][1]


@pytest.mark.parametrize("kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "pissa"))])
def test_a_stopped_run_resumes_with_the_same_losses(make: Make, kind: str) -> None:
    adapter = {**QLORA, "kind": kind, "base": "nf4", "dropout": 0.1}
    whole, broken = (make(name, adapter, guard={"copies": "off"}) for name in ("whole", "broken"))
    assert train(whole) == "finished"
    assert train_until(broken, 7).kind == "interrupted" and train(broken) == "finished"
    assert columns(broken) == columns(whole) and len(columns(whole)) == 12


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_losses(make: Make, tmp_path: Path) -> None:
    whole, broken = (make(name, budget={"steps": 60, "batch": 128}) for name in ("whole", "broken"))
    train(whole)
    path = tmp_path / "broken.yaml"
    path.write_text(dump_spec(broken))
    process = subprocess.Popen([sys.executable, "-m", "bessemer", "train", str(path), "--plain"], stdout=-3, stderr=-3)
    saved = run_folder(broken) / "checkpoints" / "step-00000012.a1" / "manifest.json"
    while process.poll() is None and not saved.exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before the kill"
    assert train(broken) == "finished" and columns(broken) == columns(whole) and len(columns(whole)) == 60


def test_what_is_loaded_and_exported_is_the_function_that_was_trained(make: Make, tmp_path: Path) -> None:
    spec, hold = make(), Hold()
    train(spec, hold)
    tokens = torch.arange(40)[None] % 300
    with torch.no_grad():
        model = hold.job.engine.model.eval()
        expected = model.logits(model(tokens))
        loaded = load_model(run_folder(spec), device="cpu")
        assert not any(map(is_quantized, loaded.model.parameters()))
        assert (loaded.model.logits(loaded.model(tokens)) - expected).abs().max() < 1e-4 * expected.abs().max()
        result = CliRunner().invoke(app, ["export", str(run_folder(spec)), "--to", "hf", "--out", str(tmp_path / "hf")])
        assert result.exit_code == 0 and "14 matrices with the nf4 values" in result.output, result.output
        again = load_model(tmp_path / "hf", device="cpu").model
        assert (again.logits(again(tokens)) - expected).abs().max() < 1e-4 * expected.abs().max()
        peft = ["export", str(run_folder(spec)), "--to", "peft", "--out", str(tmp_path / "peft")]
        result = CliRunner().invoke(app, peft)
        assert result.exit_code == 0 and "load it in 4 bits" in result.output, result.output
        # Merged into the original base it is another function, near the trained one.
        other = load_model(tmp_path / "peft", device="cpu").model
        gap = (other.logits(other(tokens)) - expected).abs().max() / expected.abs().max()
        assert 1e-3 < gap < 0.5


def test_a_base_that_is_a_checkpoint(make: Make, trained: Path) -> None:
    start = str(CheckpointStore(trained / "checkpoints").committed()[-1][0])
    settings = {"model": MODEL, "tokenizer": {"path": str(trained / "tokenizer.json")}, "start_from": start}
    folder, checkpoint = make("folder"), make("checkpoint", **settings)
    assert train(folder) == "finished"
    assert train_until(checkpoint, 7).kind == "interrupted" and train(checkpoint) == "finished"
    assert columns(checkpoint) == columns(folder)  # the same weights, before and after the resume


def test_another_base_is_refused(make: Make, trained: Path, tmp_path: Path) -> None:
    spec = make()
    assert train_until(spec, 5).kind == "interrupted"
    full = make(adapter={**QLORA, "kind": "lora"})
    with pytest.raises(UserError, match=r"adapter.base: step-\d+.a\d was trained with its base nf4, not in full"):
        train(full)
    moved = tmp_path / "hf"
    shutil.copytree(trained / "export" / "hf", moved)
    other = make("other", model={"hf": str(moved)})
    assert train_until(other, 5).kind == "interrupted"
    file = moved / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: tensor + (1e-3 if name.endswith("q_proj.weight") else 0) for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"which has changed in blocks.0.attention.query.weight"):
        train(other)


def test_damaged_codes_are_noticed_and_a_veto_leaves_them(make: Make) -> None:
    class Damage(Faults):
        before, after = set[int](), 0

        def after_backward(self, job: Job, step: int) -> None:
            if step == 8:
                job.engine.optimizer.parameters[3].grad.mul_(float("nan"))  # type: ignore[union-attr]

        def before_step(self, job: Job, step: int) -> None:
            if not self.after:
                self.before.add(int(job.frozen_digest()))
            if step == 11 and not self.after:
                weight = job.engine.model.blocks[0].attention.query.weight  # type: ignore[union-attr]
                weight.codes[5] ^= 1  # type: ignore[union-attr]
                self.after = int(job.frozen_digest())

    damage, spec = Damage(), make()
    assert train(spec, damage) == "finished"
    assert [r["step"] for r in Run(run_folder(spec)).metrics() if r["veto"]] == [8]
    assert len(damage.before) == 1 and damage.after not in damage.before


def write(spec: RunSpec, path: Path, adapter: Any) -> Path:
    data = spec.model_copy(update={"adapter": None})
    path.write_text(dump_spec(data) + f"\nadapter: {json.dumps(adapter)}\n")
    return path


@pytest.mark.parametrize(
    ("memory", "kind"),
    [(1e6, "qlora"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, "full"), (4.2e6, "lora")))],
)
def test_auto_decides_in_plan_and_in_train(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: float | None, kind: str
) -> None:
    if memory is not None:
        for module in ("bessemer.session.session", "bessemer.train.speed"):
            original = importlib.import_module(module).measure_machine
            small = partial(_with_memory, original, int(memory))
            monkeypatch.setattr(f"{module}.measure_machine", small)
    path = write(make(kind), tmp_path / "auto.yaml", {"kind": "auto", "rank": 4})
    runner = CliRunner()
    result = runner.invoke(app, ["plan", str(path), "--json"])
    assert result.exit_code == 0, result.output
    planned = {d["key"]: d for d in json.loads(result.output)["decisions"]}
    assert planned["adapter.kind"]["value"] == kind, planned["adapter.kind"]
    result = runner.invoke(app, ["train", str(path), "--plain"])
    assert result.exit_code == 0, result.output
    run = tmp_path / "runs" / kind
    plan = Plan.from_json((run / "plan.json").read_text())
    decision = plan.decisions["adapter.kind"]
    assert decision.value == kind and "by estimate" in decision.reason and "et al." in decision.source
    adapter = load_spec(run / "spec.yaml").adapter
    held = {"full": None, "lora": ("lora", "full"), "qlora": ("lora", "nf4")}[kind]
    assert (adapter and (adapter.kind, adapter.base)) == held
    monkeypatch.undo()  # a resumed run keeps its choice
    again = runner.invoke(app, ["train", str(path), "--plain", "--set", "budget.steps=14"])
    assert again.exit_code == 0 and len(list(Run(run).metrics())) == 14, again.output


def _with_memory(measure: Callable[..., Any], size: int, *arguments: Any) -> Any:
    return replace(measure(*arguments), memory_bytes=size)


@pytest.mark.parametrize("base", ["full", pytest.param("nf4", marks=pytest.mark.slow)])
def test_factors_resume_and_are_exported(make: Make, tmp_path: Path, base: str) -> None:
    adapter, hold = {"kind": "ia3", "base": base}, Hold()
    whole, broken = (make(name, adapter, guard={"copies": "off"}) for name in ("whole", "broken"))
    assert train(whole, hold) == "finished"
    assert train_until(broken, 7).kind == "interrupted" and train(broken) == "finished"
    assert columns(broken) == columns(whole) and columns(whole)[-1][1] < columns(whole)[0][1]
    saved = SavedTensors(last(whole), "model.")
    assert {name.rpartition(".")[2] for name in saved._entries} == {"ia3_in", "ia3_out"}
    tokens = torch.arange(40)[None] % 300
    with torch.no_grad():
        model = hold.job.engine.model.eval()
        expected = model.logits(model(tokens))
        folders = [run_folder(whole)]
        for form in ("hf", "peft")[: 2 if base == "full" else 1]:
            out = ["--to", form, "--out", str(tmp_path / form)]
            result = CliRunner().invoke(app, ["export", str(run_folder(whole)), *out])
            assert result.exit_code == 0, result.output
            folders.append(tmp_path / form)
        for folder in folders:
            loaded = load_model(folder, device="cpu").model
            assert (loaded.logits(loaded(tokens)) - expected).abs().max() < 1e-4 * expected.abs().max(), folder
    if base == "full":
        began = Hold()
        assert train(make("further", {"path": str(tmp_path / "peft")}), began) == "finished"
        assert began.job.spec.adapter is not None and columns(began.job.spec)[0][1] < columns(whole)[0][1]


def test_mistakes_are_refused_by_name(make: Make) -> None:
    for parallel, message in (
        ({"cp": 2}, "weights in NF4 are divided by dp_shard only"), ({"shard": {"alone": True}}, "write false"),
    ):  # fmt: skip
        problems = [text for _, text in check_spec(make(parallel=parallel))]
        assert any(message in text for text in problems), (message, problems)
    assert not check_spec(make()) and not check_spec(make(adapter="auto"))
