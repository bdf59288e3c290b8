"""Runs that train adapters: what they save, how they resume, and what is made of them."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bessemer.checkpoint.manifest import read_manifest
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.cli.main import app
from bessemer.diagnose.report import mean_step_loss
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.adapters import AdapterLinear, adapters_off
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session.inspect import from_run, from_spec, inspect_gradients, inspect_nan
from bessemer.session.replay import _load_state_before, job_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.checks import check_spec
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job
from bessemer.train.trained import load_model
from bessemer.trial.measure import measure

from .conftest import WORDS, Faults, spec_data, train_until
from .test_frozen import Hold
from .test_incident import Break

pytest.importorskip("transformers")
Make = Callable[..., RunSpec]
MODEL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}


@pytest.fixture(scope="module")
def rhymes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text of the same words: always in one order, which the base has not seen."""
    path = tmp_path_factory.mktemp("rhymes") / "rhymes.jsonl"
    lines = [json.dumps({"text": " ".join((WORDS[i:] + WORDS[:i]) * 4)}) for i in range(len(WORDS))] * 8
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A base model trained on the corpus; its export is RUN/export/hf."""
    runs = tmp_path_factory.mktemp("base")
    spec = RunSpec.model_validate(spec_data("base", corpus, runs, model=MODEL, budget={"steps": 60, "batch": 256}))
    assert Session(spec).train().kind == "finished"
    to_hf(open_native(run_folder(spec)), run_folder(spec) / "export" / "hf")
    return run_folder(spec)


@pytest.fixture
def make(trained: Path, rhymes: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    runs = tmp_path / "runs"
    runs.mkdir()

    def spec(name: str = "run", adapter: Any = "lora", **parts: Any) -> RunSpec:
        settings = {"rank": 4, "alpha": 8} if adapter in ("lora", "dora", "pissa", "rslora") else {}
        adapter = {"kind": adapter, **settings} if isinstance(adapter, str) else adapter
        parts = {"checkpoint": {"every": 10, "keep_last": 9}, "budget": {"steps": 30, "batch": 128}} | parts
        parts = {"optimizer": {"lr": 0.02}} | parts
        own = {key: parts.pop(key, {}) for key in ("model", "tokenizer", "optimizer")}
        own["model"] = own["model"] or {"hf": str(trained / "export" / "hf")}
        return RunSpec.model_validate(spec_data(name, rhymes, runs, adapter=adapter, **parts) | own)

    return spec


def train(spec: RunSpec, faults: Faults | None = None) -> str:
    return Session(spec, faults=faults).train().kind


def last(spec: RunSpec) -> Path:
    return CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][0]


def columns(spec: RunSpec) -> list[tuple[Any, ...]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in Run(run_folder(spec)).metrics()]


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_lora_learns_and_leaves_its_base_alone(make: Make, trained: Path) -> None:
    before, hold, spec = digests(trained), Hold(), make(optimizer={"lr": 0.05}, budget={"steps": 50, "batch": 128})
    assert train(spec, hold) == "finished"
    losses = [loss for _, loss, _ in columns(spec)]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert digests(trained) == before
    model = hold.job.engine.model
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(names) == 28 and all(name.endswith(("lora_a", "lora_b")) for name in names)
    base = load_model(trained / "export" / "hf", device="cpu").model
    tokens = torch.arange(24)[None]
    with adapters_off(model), torch.no_grad():
        assert torch.equal(model.eval()(tokens), base(tokens))


def test_a_checkpoint_holds_the_adapter_alone(make: Make) -> None:
    spec, hold = make(), Hold()
    train(spec, hold)
    saved = SavedTensors(last(spec))
    own = [name for name in saved._entries if not name.startswith("guard.")]
    assert all(".lora_" in name for name in own) and not any(name.endswith(".weight") for name in own)
    trained_bytes = sum(p.nbytes for p in hold.job.engine.model.parameters() if p.requires_grad)
    content = sum(t.nbytes for name, t in saved.items() if name in saved._entries)
    assert 3 * trained_bytes < content < 3.3 * trained_bytes  # the adapter and two moments, the guard's window
    base = read_manifest(last(spec)).base
    assert base["path"] == str(spec.model.hf) and len(base["fingerprint"]) == 32
    assert {name.removeprefix("model.") for name in hold.job.snapshot_state() if name.startswith("model.")} == {
        name for name in hold.job.engine.model.state_dict() if ".lora_" in name
    }
    flops, full = hold.job.recorder.flops_per_token, hold.job.engine.model.shape.flops_per_token(32)
    assert 0.6 * full < flops < 0.95 * full


@pytest.mark.parametrize("kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "pissa"))])
def test_a_stopped_run_resumes_with_the_same_losses(make: Make, kind: str) -> None:
    adapter = {"kind": kind, "rank": 4, "alpha": 8, "dropout": 0.1, "lr_ratio": 4, "modules_to_save": ["embedding"]}
    parts: dict[str, Any] = {"budget": {"steps": 16, "batch": 128, "micro_batch": 2}, "guard": {"copies": "off"}}
    whole, broken = make("whole", adapter, **parts), make("broken", adapter, **parts)
    assert train(whole) == "finished"
    assert train_until(broken, 8).kind == "interrupted" and train(broken) == "finished"
    assert columns(broken) == columns(whole) and len(columns(whole)) == 16


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_losses(make: Make, tmp_path: Path) -> None:
    whole, broken = (make(name, budget={"steps": 60, "batch": 128}) for name in ("whole", "broken"))
    train(whole)
    path = tmp_path / "broken.yaml"
    path.write_text(dump_spec(broken))
    process = subprocess.Popen([sys.executable, "-m", "bessemer", "train", str(path), "--plain"], stdout=-3, stderr=-3)
    saved = run_folder(broken) / "checkpoints" / "step-00000020.a1" / "manifest.json"
    while process.poll() is None and not saved.exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before the kill"
    assert train(broken) == "finished" and columns(broken) == columns(whole) and len(columns(whole)) == 60


def test_accumulation_does_not_change_the_losses(make: Make) -> None:
    specs = [make(f"by-{n}", budget={"steps": 6, "batch": 128, "micro_batch": n}) for n in (4, 1)]
    for spec in specs:
        train(spec)
    one, many = (columns(spec) for spec in specs)
    assert [v for row in one for v in row] == pytest.approx([v for row in many for v in row], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["kahan", "stochastic"])
def test_bf16_weights(make: Make, trained: Path, weights: str) -> None:
    parts: dict[str, Any] = {"memory": {"weights": weights}, "precision": "bf16", "budget": {"steps": 6, "batch": 128}}
    whole, broken, hold = make("whole", "dora", **parts), make("broken", "dora", **parts), Hold()
    assert train(whole, hold) == "finished"
    assert train_until(broken, 3).kind == "interrupted" and train(broken) == "finished"
    assert columns(broken) == columns(whole)
    model, tokens = hold.job.engine.model.eval(), torch.arange(24)[None]
    assert isinstance(layer := model.blocks[0].attention.query, AdapterLinear)  # type: ignore[union-attr]
    assert layer.lora_a.dtype == layer.weight.dtype == torch.bfloat16 and layer.magnitude is not None
    with torch.no_grad():
        expected, actual = model.float()(tokens), load_model(run_folder(whole), device="cpu").model.float()(tokens)
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()
    assert not [name for name in SavedTensors(last(whole))._entries if name.endswith(".weight")]


def test_a_veto_leaves_the_adapter_untouched(make: Make) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class SpoilAndLook(Faults):
        def after_backward(self, job: Job, step: int) -> None:
            if step == 20:
                job.engine.optimizer.parameters[3].grad.mul_(float("nan"))  # type: ignore[union-attr]

        def before_step(self, job: Job, step: int) -> None:
            if step in (20, 21):
                seen[step] = {n: t.clone() for n, t in job.engine.state().items() if ".lora_" in n}

    assert train(make(budget={"steps": 24, "batch": 128}), SpoilAndLook()) == "finished"
    assert len(seen[20]) > 80 and all(torch.equal(seen[21][name], tensor) for name, tensor in seen[20].items())


@pytest.mark.slow
def test_the_guard_rolls_an_adapter_back(make: Make) -> None:
    @torch.no_grad()
    def wipe(job: Job) -> None:
        layer = job.engine.model.blocks[1].attention.out  # type: ignore[union-attr]
        assert isinstance(layer, AdapterLinear)
        layer.lora_b.fill_(float("nan"))

    guard = {"warmup": 8, "window": 32, "copy_every": "16 steps", "ladder": {"careful": 4}}
    spec = make(budget={"steps": 48, "batch": 128}, guard=guard)
    assert train(spec, Break(wipe, step=44)) == "finished"
    (back,) = Run(run_folder(spec)).events("rollback")
    assert back["origin"].startswith("memory") and all(loss == loss for _, loss, _ in columns(spec))


def test_a_past_step_is_replayed(make: Make) -> None:
    spec = make(adapter={"kind": "lora", "dropout": 0.1})
    train(spec)
    job, _ = job_of(run_folder(spec))
    _load_state_before(job, 17, list(job.recorder.run.metrics()))
    stream = job.data.stream
    again = measure(job.engine, stream.micro_batches(17, job.plan.micro_rows), stream.step_count(17))
    assert float(again.loss) == columns(spec)[17][1]


def test_settings_that_are_auto_are_decided_and_kept(make: Make) -> None:
    spec = make(adapter="rslora", optimizer={}).model_copy(update={"adapter": make(adapter={"kind": "rslora"}).adapter})
    train_until(spec, 3)
    plan = Plan.from_json((run_folder(spec) / "plan.json").read_text())
    rank = plan.value("adapter.rank")
    assert (
        rank == 64
        and plan.value("adapter.alpha") == 16.0
        and "LoRA without regret" in plan.decisions["adapter.rank"].source
    )
    assert "ten times that for adapters" in plan.decisions["optimizer.lr"].reason
    assert "14 linear layers" in plan.decisions["adapter"].reason
    assert train(spec) == "finished"
    assert Plan.from_json((run_folder(spec) / "plan.json").read_text()).value("adapter.rank") == rank
    assert spec.adapter is not None
    other = spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"alpha": 3.0})})
    with pytest.raises(UserError, match=r"adapter.alpha: the adapter of step-\d+.a1 is scaled by 2, not 0.375"):
        train(other.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 32})}))


@pytest.mark.parametrize("kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "pissa"))])
def test_what_is_loaded_and_exported_is_the_model_in_memory(make: Make, tmp_path: Path, kind: str) -> None:
    adapter = {"kind": kind, "rank": 4, "alpha": 8, "modules_to_save": ["embedding"]}
    spec, hold = make(adapter=adapter), Hold()
    train(spec, hold)
    tokens = torch.arange(40)[None] % 300
    with torch.no_grad():
        model = hold.job.engine.model.eval()
        expected = model.logits(model(tokens))
        loaded = load_model(run_folder(spec), device="cpu")
        assert (loaded.model.logits(loaded.model(tokens)) - expected).abs().max() < 1e-4 * expected.abs().max()
        runner = CliRunner()
        for form in ("hf", "peft"):
            result = runner.invoke(app, ["export", str(run_folder(spec)), "--to", form, "--out", str(tmp_path / form)])
            assert result.exit_code == 0, result.output
            again = load_model(tmp_path / form, device="cpu").model
            assert (again.logits(again(tokens)) - expected).abs().max() < 1e-4 * expected.abs().max()
    size = sum(path.stat().st_size for path in (tmp_path / "peft").iterdir())
    assert size < 0.8 * sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    more = ["export", str(run_folder(spec)), "--to", "peft", "--out", str(tmp_path / "peft"), "--overwrite"]
    assert runner.invoke(app, more).exit_code == 0


def test_a_run_starts_from_an_adapter_in_pefts_format(make: Make, tmp_path: Path) -> None:
    first, hold = make("first", {"kind": "dora", "rank": 4, "alpha": 8, "targets": ["query", "value"]}), Hold()
    train(first, hold)
    result = CliRunner().invoke(app, ["export", str(run_folder(first)), "--to", "peft", "--out", str(tmp_path / "a")])
    assert result.exit_code == 0, result.output
    second, after, began = make("second", {"path": str(tmp_path / "a")}, budget={"steps": 3, "batch": 128}), Hold(), {}
    after.before_step = lambda job, step: began.setdefault(  # type: ignore[method-assign]
        step, {name: tensor.clone() for name, tensor in job.engine.model.state_dict().items()}
    )
    assert train(second, after) == "finished"
    final = hold.job.engine.model.state_dict()
    assert began[0].keys() == final.keys() and all(torch.equal(began[0][name], final[name]) for name in final)
    assert {n for n, m in after.job.engine.model.named_modules() if isinstance(m, AdapterLinear)} == {
        f"blocks.{i}.attention.{name}" for i in (0, 1) for name in ("query", "value")
    }
    assert columns(second)[0][1] < columns(first)[0][1]
    plan = Plan.from_json((run_folder(second) / "plan.json").read_text())
    assert plan.value("adapter.rank") == 4 and plan.value("adapter.alpha") == 8.0


def test_a_base_that_is_a_checkpoint(make: Make, trained: Path, tmp_path: Path) -> None:
    start = str(CheckpointStore(trained / "checkpoints").committed()[-1][0])
    tokenizer = {"path": str(trained / "tokenizer.json")}
    spec = make(model=MODEL, tokenizer=tokenizer, start_from=start, budget={"steps": 10, "batch": 128})
    assert train(spec) == "finished"
    base = read_manifest(last(spec)).base
    assert base["kind"] == "checkpoint" and base["path"] == start and len(base["tensors"]) == 20
    result = CliRunner().invoke(app, ["export", str(run_folder(spec)), "--to", "peft"])
    assert isinstance(result.exception, UserError) and "pass --base FOLDER" in str(result.exception)
    folder = ["--base", str(trained / "export" / "hf")]
    result = CliRunner().invoke(app, ["export", str(run_folder(spec)), "--to", "peft", *folder])
    assert result.exit_code == 0, result.output
    with pytest.raises(UserError, match=r"start_from: .* holds an adapter: merge it"):
        train(make("third", None, model=MODEL, tokenizer=tokenizer, start_from=str(last(spec))))


OBJECTIVE = '''
import torch
from bessemer.train.objective import ElementLosses, Objective

class Near(Objective):
    """Stays near the reference: the squared distance of the logits, and next tokens."""

    needs_models = ("reference",)
    metrics = ("distance",)

    def element_losses(self, model, inputs, hidden_BTW):
        logits_BTV = self.logits(model, hidden_BTW)
        reference_BTV = self.logits(self.models["reference"], self.other_hidden("reference", inputs))
        distance_BT = (logits_BTV - reference_BTV).square().mean(-1)
        nll_BT = -logits_BTV.log_softmax(-1).gather(-1, inputs.targets_BT[..., None])[..., 0]
        return ElementLosses(nll_BT + distance_BT, {"distance": (distance_BT.detach().sum(), inputs.weights_BT.sum())})
'''


def test_the_base_is_a_reference_without_a_copy(make: Make, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text(OBJECTIVE)
    own = {"objective": f"{tmp_path / 'near.py'}:Near", "budget": {"steps": 8, "batch": 128}}
    shared = make("shared", models={"reference": "base"}, **own)
    copied = make("copied", models={"reference": str(trained / "export" / "hf")}, **own)
    records = []
    for spec in (shared, copied):
        assert train(spec) == "finished"
        records.append([(r["loss"], r["distance"]) for r in Run(run_folder(spec)).metrics()])
    assert records[0] == records[1] and records[0][0][1] == 0.0 < records[0][-1][1]


def test_a_resume_with_another_base_is_refused(make: Make, trained: Path, tmp_path: Path) -> None:
    spec = make(budget={"steps": 10, "batch": 128})
    train(spec)
    other = tmp_path / "other"
    shutil.copytree(trained / "export" / "hf", other)
    longer = {"budget": {"steps": 12, "batch": 128}}
    with pytest.raises(UserError, match=r"model.hf: .*other: the frozen weights of this run are those of .*export/hf"):
        train(make(model={"hf": str(other)}, **longer))
    (tmp_path / "link").symlink_to(trained / "export" / "hf")
    assert train(make(model={"hf": str(tmp_path / "link")}, **longer)) == "finished"


def test_new_tokens_need_a_trained_embedding(make: Make) -> None:
    special = {"tokenizer": {"special": ["<|one|>"]}, "budget": {"steps": 4, "batch": 128}}
    with pytest.raises(UserError, match=r"1 tokens are new.* modules_to_save"):
        train(make(**special))
    assert train(make("saved", {"kind": "lora", "modules_to_save": ["embedding"]}, **special)) == "finished"


def test_mistakes_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    cases = {
        "needs trained weights": {"model": MODEL},
        "adapters are trained with dp_replicate": {"parallel": {"tp": 2, "pp": 2}},
        "write engine: torch": {"parallel": {"engine": "deepspeed"}},
        "converts the layers that are adapted": {"precision": "fp8"},
        "base is the run's model without its adapter": {"adapter": None, "models": {"r": "base"}, "objective": "a:B"},
    }
    for message, parts in cases.items():
        problems = [text for _, text in check_spec(make(**parts))]
        assert any(message in text for text in problems), (message, problems)
    assert not check_spec(make())
    for adapter, message in (
        ({"targets": []}, "no layer is adapted"), ({"path": "x", "targets": ["query"]}, "the folder of path names"),
        ({"path": "x", "kind": "pissa"}, "remove path"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(adapter=adapter)
    file = tmp_path / "short.yaml"
    file.write_text("model: {hf: x}\ndata: {sources: {a: b}}\nadapter: dora\n")
    spec = load_spec(file)
    assert spec.adapter is not None and (spec.adapter.kind, spec.adapter.rank) == ("dora", "auto")


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_an_adapter_run_is_inspected_with_the_losses_that_it_recorded(make: Make, base: str) -> None:
    spec = make(adapter={"kind": "lora", "rank": 4, "base": base}, budget={"steps": 12, "batch": 128})
    assert Session(spec).train().kind == "finished"
    recorded = {record["step"]: record["loss"] for record in Run(run_folder(spec)).metrics()}
    replayed = json.loads(inspect_nan(run_folder(spec), 11, None, "cpu").to_json())  # from the checkpoint of step 10
    assert replayed["loss"] == pytest.approx(recorded[11], rel=1e-5) and replayed["stage"] is None
    text = inspect_gradients(from_run(run_folder(spec), "last", "cpu"), 1).to_json()
    assert "query.lora_b" in text and "query.weight" not in text
    fresh = from_spec(spec)
    assert mean_step_loss(fresh.subject(), [0]) == pytest.approx(recorded[0], rel=1e-5)
