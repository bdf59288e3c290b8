"""Further models of a run: a frozen teacher and a trained critic, through training, resumption, replay and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.replay import _load_state_before, job_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec
from bessemer.spec.model import OtherModelSpec
from bessemer.spec.schema import RunSpec
from bessemer.trial.measure import measure

OBJECTIVES = '''
import torch, torch.nn.functional as F
from bessemer.train.objective import ElementLosses, Objective

class Distil(Objective):
    """The student's next-token distribution should be the teacher's."""

    needs_models = ("teacher",)
    metrics = ("kl",)

    def element_losses(self, model, inputs, hidden_BTW):
        student_BTV = self.logits(model, hidden_BTW).log_softmax(-1)
        teacher_BTV = self.logits(self.models["teacher"], self.other_hidden("teacher", inputs)).log_softmax(-1)
        kl_BT = F.kl_div(student_BTV, teacher_BTV, log_target=True, reduction="none").sum(-1)
        return ElementLosses(kl_BT, {"kl": ((kl_BT.detach() * inputs.weights_BT).sum(), inputs.weights_BT.sum())})

class WithCritic(Objective):
    """Next tokens, and a critic that predicts each token's own loss."""

    needs_models = ("critic",)
    metrics = ("error",)

    def counts(self, batch):
        return {"values": batch.count}

    def element_losses(self, model, inputs, hidden_BTW):
        logits_BTV = self.logits(model, hidden_BTW)
        nll_BT = F.cross_entropy(logits_BTV.flatten(0, 1), inputs.targets_BT.flatten(), reduction="none")
        nll_BT = nll_BT.view_as(inputs.targets_BT)
        value_BT = self.logits(self.models["critic"], self.other_hidden("critic", inputs))[..., 0]
        error = ((value_BT - nll_BT.detach()).square() * inputs.weights_BT).sum()
        return ElementLosses(nll_BT, {"error": (error.detach(), inputs.weights_BT.sum())}, {"values": error})
'''
STEPS, FLAT = {"steps": 30, "batch": 128}, {"kind": "constant", "warmup": "2 steps"}


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OBJECTIVES)
    return str(tmp_path / "own.py")


@pytest.fixture
def teacher(make_spec: Callable[..., RunSpec]) -> str:
    spec = make_spec("teacher", budget=STEPS)
    assert Session(spec).train().kind == "finished"
    return str(run_folder(spec))


def columns(spec: RunSpec, *names: str) -> list[list[float]]:
    return [[record[name] for name in names] for record in Run(run_folder(spec)).metrics()]


def models_of(teacher: str) -> dict[str, OtherModelSpec]:
    return {"teacher": OtherModelSpec(path=teacher)}


def replayed_loss(folder: Path, step: int) -> float:
    job, _ = job_of(folder)
    _load_state_before(job, step, list(job.recorder.run.metrics()))
    stream = job.data.stream
    return float(measure(job.engine, stream.micro_batches(step, job.plan.micro_rows), stream.step_count(step)).loss)


def test_a_frozen_teacher_is_learned_from_and_is_in_no_checkpoint(make_spec, own: str, teacher: str) -> None:
    tokenizer = {"path": f"{teacher}/tokenizer.json", "vocab": "auto"}
    spec = make_spec(
        "student", objective=f"{own}:Distil", models={"teacher": teacher}, budget=STEPS, seed=1, tokenizer=tokenizer
    )
    outcome = Session(spec).train()
    losses = columns(spec, "loss", "kl")
    assert outcome.kind == "finished" and losses[-1][0] < 0.5 * losses[0][0] and outcome.validation["kl"] < losses[0][0]
    folder = run_folder(spec)
    checkpoint = sorted((folder / "checkpoints").glob("step-*"))[-1]
    assert not [name for name in SavedTensors(checkpoint) if "teacher" in name]
    plan = {row["key"]: row for row in json.loads((folder / "plan.json").read_text())["decisions"]}
    assert "fingerprint" in plan["models.teacher"]["value"] and plan["memory.models.teacher"]["value"].endswith("B")
    assert replayed_loss(folder, 20) == pytest.approx(losses[20][0], rel=1e-6)

    # the same as the teacher: nothing to learn
    same = make_spec(
        "same", objective=f"{own}:Distil", models={"teacher": teacher}, budget={"steps": 1, "batch": 128},
        start_from=str(sorted((Path(teacher) / "checkpoints").glob("step-*"))[-1]),
    )  # fmt: skip
    Session(same).train()
    assert columns(same, "loss")[0][0] == pytest.approx(0.0, abs=1e-6)


def test_resumed_runs_are_the_same_and_another_teacher_is_refused(make_spec, own: str, teacher: str, tmp_path) -> None:
    parts = {"objective": f"{own}:Distil", "models": {"teacher": teacher}, "seed": 1, "schedule": FLAT}
    parts["tokenizer"] = {"path": f"{teacher}/tokenizer.json", "vocab": "auto"}
    through = make_spec("through", budget=STEPS, **parts)
    Session(through).train()
    halves = [make_spec("halves", budget={"steps": n, "batch": 128}, **parts) for n in (15, 30)]
    for spec in halves:
        Session(spec).train()
    assert columns(halves[1], "loss", "grad_norm") == columns(through, "loss", "grad_norm")
    other = make_spec("other", budget=STEPS, seed=5, tokenizer=parts["tokenizer"])
    Session(other).train()
    longer = make_spec(
        "halves", budget={"steps": 40, "batch": 128}, **{**parts, "models": {"teacher": str(run_folder(other))}}
    )
    with pytest.raises(UserError, match="not those that the run began with"):
        Session(longer).train()


def test_a_trained_critic_learns_is_saved_and_resumes_exactly(make_spec, own: str, teacher: str) -> None:
    models = {"critic": {"path": teacher, "train": True, "head": "score"}}
    parts = {"objective": f"{own}:WithCritic", "models": models, "seed": 1, "schedule": FLAT}
    parts["tokenizer"] = {"path": f"{teacher}/tokenizer.json", "vocab": "auto"}
    through = make_spec("through", budget=STEPS, **parts)
    Session(through).train()
    errors = columns(through, "error")
    assert errors[-1][0] < 0.2 * errors[0][0]
    for steps in (15, 30):
        halves = make_spec("halves", budget={"steps": steps, "batch": 128}, **parts)
        Session(halves).train()
    assert columns(halves, "loss", "error", "grad_norm") == columns(through, "loss", "error", "grad_norm")
    saved = SavedTensors(sorted((run_folder(through) / "checkpoints").glob("step-*"))[-1])
    before = SavedTensors(sorted((Path(teacher) / "checkpoints").glob("step-*"))[-1])
    names = [name for name in saved if name.startswith("model.companions.critic.")]
    assert {name.removeprefix("model.companions.critic.") for name in names} >= {"embedding.weight", "head.weight"}
    moved = saved["model.companions.critic.embedding.weight"] - before["model.embedding.weight"]
    assert 0 < moved.abs().max() < 0.5
    assert saved["model.companions.critic.head.weight"].shape[0] == 1
    assert replayed_loss(run_folder(through), 20) == pytest.approx(columns(through, "loss")[20][0], rel=1e-6)


def test_accumulation_gives_the_same_numbers(make_spec, own: str, teacher: str) -> None:
    models = {"critic": {"path": teacher, "train": True, "head": "score"}}
    curves = []
    for micro in (4, 1):
        spec = make_spec(
            f"m{micro}",
            objective=f"{own}:WithCritic",
            models=models,
            budget={"steps": 6, "batch": 128, "micro_batch": micro},
        )
        Session(spec).train()
        curves.append(torch.tensor(columns(spec, "loss", "error", "grad_norm")))
    torch.testing.assert_close(*curves, rtol=2e-4, atol=1e-5)


def test_refusals_name_the_key_and_the_fix(make_spec, own: str, teacher: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective Distil needs models.teacher: write for example"):
        Session(make_spec("none", objective=f"{own}:Distil", budget=STEPS)).train()
    with pytest.raises(UserError, match=r"models.teacher: .*nowhere"):
        Session(make_spec("gone", objective=f"{own}:Distil", models={"teacher": "nowhere"}, budget=STEPS)).train()
    larger = {"vocab": 320}
    with pytest.raises(UserError, match=r"models.teacher: its vocabulary of 300 tokens is smaller than the run's 320"):
        Session(
            make_spec("vocab", objective=f"{own}:Distil", models={"teacher": teacher}, budget=STEPS, tokenizer=larger)
        ).train()
    other = make_spec("other", budget=STEPS, tokenizer={"vocab": 300, "kind": "unigram"})
    with pytest.raises(UserError, match=r"models.teacher: its tokenizer is not the run's \(token \d+ is "):
        Session(other.model_copy(update={"objective": f"{own}:Distil", "models": models_of(teacher)})).train()
    path = tmp_path / "spec.yaml"
    for text, message in [
        ("objective: pretrain\nmodels: {a: x}\n", "objective: pretrain uses no other model: remove it"),
        ("objective: a:B\nmodels: {a: x}\nparallel: {pp: 2}\n", "pipeline stages have no place for another model"),
    ]:
        path.write_text(text + "model: 1M\nbudget: {steps: 1}\ndata: {sources: {a: x}}\n")
        with pytest.raises(UserError, match=message):
            load_spec(path)
