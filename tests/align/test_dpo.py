"""`objective: dpo` end to end: pairs are learned, the numbers do not depend on accumulation, resumes are exact."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.session.conftest import spec_data, train_until

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.session.start import complete_spec
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.loss import LossOptions, linear_cross_entropy, token_losses

COLOURS = ["red", "green", "blue", "black"]
COLUMNS = {"prompt": "question", "chosen": "good", "rejected": "bad"}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model that answers with either colour, its runs folder, and pairs that prefer the colour of the question."""
    folder = tmp_path_factory.mktemp("base")
    draw = random.Random(0)
    pairs, answers = [], []
    for number in range(200):
        first, second = draw.sample(COLOURS, 2)
        pairs.append({"question": f"is {first} {number}", "good": f"yes {first}", "bad": f"no {second}"})
        answers.append({"prompt": pairs[-1]["question"], "completion": draw.choice([f"yes {first}", f"no {second}"])})
    path = write_rows(folder / "answers.jsonl", answers)
    data = {"sources": {"a": {"path": str(path)}}, "context": 64, "validation": 0}
    spec = spec_data("base", path, folder / "runs", objective="sft", data=data)
    spec |= {"tokenizer": {"kind": "char", "chat": "none"}, "budget": {"steps": 20, "batch": 1024}}
    spec = RunSpec.model_validate(spec)
    Session(spec).train()
    return run_folder(spec), folder / "runs", write_rows(folder / "pairs.jsonl", pairs)


def make_spec(base: tuple[Path, Path, Path], name: str, **parts: Any) -> RunSpec:
    run, runs, pairs = base
    checkpoint = next((run / "checkpoints").glob("step-*"))
    data = {"sources": {"pairs": {"path": str(pairs), "columns": COLUMNS}}, "context": 64, "validation": 0.2}
    data = {**data, **parts.pop("data", {})}
    budget = {"steps": 30, "batch": 16 * 64, **parts.pop("budget", {})}
    spec = spec_data(name, pairs, runs, objective="dpo", data=data, budget=budget, start_from=str(checkpoint))
    spec |= {"tokenizer": {"path": str(run / "tokenizer.json"), "chat": "none"}, "optimizer": {"lr": 2e-3}, **parts}
    return RunSpec.model_validate(spec)


def columns_of(spec: RunSpec, *names: str) -> np.ndarray:
    return np.array([[record[name] for name in names] for record in Run.existing(run_folder(spec)).metrics()])


def test_pairs_are_learned_and_accumulation_changes_nothing(base: tuple[Path, Path, Path]) -> None:
    curves = []
    for micro in (16, 2):
        spec = make_spec(base, f"micro-{micro}", budget={"micro_batch": micro})
        outcome = Session(spec).train()
        curves.append(columns_of(spec, "loss", "accuracy", "margin", "chosen_shift", "grad_norm"))
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3, atol=2e-4)
    assert curves[0][0, 0] == pytest.approx(np.log(2), abs=1e-6)  # the model is its reference
    assert curves[0][0, 2] == pytest.approx(0, abs=1e-6) and curves[0][-1, 0] < 0.35
    assert outcome.kind == "finished" and outcome.validation is not None and outcome.validation["accuracy"] > 0.9
    plan = json.loads((run_folder(spec) / "plan.json").read_text())
    assert any(item["key"] == "models.reference" for item in plan["decisions"])


@pytest.mark.parametrize(
    "section",
    [
        pytest.param({"loss": "simpo"}, id="simpo"),
        pytest.param({"loss": "orpo", "beta": 1.0}, id="orpo"),
        pytest.param({"loss": "ipo"}, id="ipo", marks=pytest.mark.slow),
        pytest.param({"loss": "sigmoid", "smoothing": 0.1, "sft": 0.5}, id="sft", marks=pytest.mark.slow),
        pytest.param({"loss": "robust", "smoothing": 0.1}, id="robust", marks=pytest.mark.slow),
        pytest.param({"loss": "sigmoid_norm"}, id="sigmoid_norm", marks=pytest.mark.slow),
        pytest.param({"loss": "hinge"}, id="hinge", marks=pytest.mark.slow),
        pytest.param({"loss": "apo_zero", "beta": 1.0}, id="apo_zero", marks=pytest.mark.slow),
    ],
)
def test_other_losses_learn_the_pairs(base: tuple[Path, Path, Path], section: dict[str, Any]) -> None:
    spec = make_spec(base, f"loss-{section['loss']}", dpo=section)
    assert (spec.dpo.loss in ("simpo", "orpo")) == ("reference" not in complete_spec(spec).models)
    outcome = Session(spec).train()
    assert outcome.validation is not None and outcome.validation["accuracy"] > 0.9
    if spec.dpo.sft_weight:
        nll = columns_of(spec, "chosen_nll")[:, 0]
        assert nll[-1] < nll[0]


def test_a_users_loss_and_the_resume(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef squared(pairs, spec):\n    return (1 - spec.beta_value * pairs.difference) ** 2\n"
        "def scalar(pairs, spec):\n    return pairs.difference.sum()\n"
    )
    section = {"loss": f"{tmp_path / 'mine.py'}:squared", "beta": 0.3}
    spec = make_spec(base, "mine", dpo=section, budget={"steps": 8})
    Session(spec).train()
    stopped = make_spec(base, "stopped", dpo=section, budget={"steps": 8})
    train_until(stopped, 3)
    Session(stopped).train()
    np.testing.assert_array_equal(columns_of(spec, "loss"), columns_of(stopped, "loss"))
    bad = make_spec(base, "bad", dpo={"loss": f"{tmp_path / 'mine.py'}:scalar"})
    with pytest.raises(UserError, match="return a loss for each pair"):
        Session(bad).train()


def test_adapters_compare_with_the_model_without_them(base: tuple[Path, Path, Path]) -> None:
    spec = make_spec(base, "lora", adapter={"kind": "lora", "rank": 4}, optimizer={"lr": 1e-2})
    assert complete_spec(spec).models["reference"].path == "base"
    outcome = Session(spec).train()
    assert columns_of(spec, "loss")[0, 0] == pytest.approx(np.log(2), abs=1e-6)
    assert outcome.validation is not None and outcome.validation["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dpo": {"loss": "dpo"}}, r"no loss 'dpo'; write sigmoid"),
        ({"dpo": {"loss": "ipo", "smoothing": 0.1}}, "ipo has no smoothing"),
        ({"dpo": {"loss": "exo_pair"}}, "exo_pair needs smoothing"),
        ({"objective": "pretrain", "dpo": {"loss": "ipo"}}, "has no effect with objective: pretrain"),
        ({"objective": {"dpo": {"loss": "ipo"}}, "dpo": {"loss": "ipo"}}, "settings here and below dpo: write all"),
        ({"data": {"sources": {"a": {"path": "x.jsonl", "messages_field": "m"}}}}, "dpo compares two answers"),
        ({"models": {"reference": {"path": "runs/base", "train": True}}}, "the reference is a frozen language model"),
        ({"dpo": {"reference": "stored"}, "data": {"sources": {"a": "x.jsonl"}, "noise": {"replace": 0.1}}},
         "noise changes the answers at every step: write live"),
        ({"dpo": {"share_prefix": True}, "data": {"sources": {"a": "x.jsonl"}, "noise": {"replace": 0.1}}},
         "noise would differ between prompts"),
        ({"parallel": {"cp": 2}}, "summed over complete rows: write cp: 1"),
    ],
)  # fmt: skip
def test_mistakes_have_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    sources = {"pairs": {"path": "pairs.jsonl", "columns": COLUMNS}}
    spec = {"model": "1M", "objective": "dpo", "data": {"sources": sources}, "budget": {"steps": 1}, **change}
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec))
    with pytest.raises(UserError, match=message):
        load_spec(path)


def test_the_short_form_and_a_model_without_a_start(tmp_path: Path, base: tuple[Path, Path, Path]) -> None:
    sources = {"pairs": {"path": str(base[2]), "columns": COLUMNS}}
    spec = {"model": "1M", "objective": {"dpo": {"loss": "ipo"}}, "data": {"sources": sources}, "budget": {"steps": 1}}
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec))
    loaded = load_spec(path)
    assert (loaded.objective, loaded.dpo.loss, loaded.dpo.beta_value) == ("dpo", "ipo", 0.1)
    with pytest.raises(UserError, match="compares with the model that training starts from"):
        complete_spec(loaded)


def test_columns_of_trl_are_recognised(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "yes", "rejected": "no"}] * 4
    for sides in (("prompt", "chosen", "rejected"), ("chosen", "rejected")):
        path = write_rows(tmp_path / "trl.jsonl", [{side: row[side] for side in sides} for row in rows])
        spec = make_spec(base, "trl", data={"sources": {"a": {"path": [str(path)]}}})
        assert complete_spec(spec).data.sources["a"].columns == {side: side for side in sides}
    other = write_rows(tmp_path / "other.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=r"data.sources.a: dpo compares two answers: name their columns"):
        complete_spec(make_spec(base, "other", data={"sources": {"a": {"path": [str(other)]}}}))


def test_losses_of_tokens_are_those_of_the_logits() -> None:
    """Values and gradients in float64, with a cap, a scale and a bias; and those of the summed loss."""
    torch.manual_seed(0)
    hidden, head, bias = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((70, 16), (90, 16), (90,))
    )
    targets, weights = torch.randint(90, (70,)), torch.randn(70, dtype=torch.float64)
    for options in (LossOptions(), LossOptions(logit_scale=0.5, logit_cap=3.0)):
        logits = (hidden @ head.t() + bias) * options.logit_scale
        logits = logits if options.logit_cap is None else options.logit_cap * torch.tanh(logits / options.logit_cap)
        expected = F.cross_entropy(logits, targets, reduction="none")
        ours = token_losses(hidden, head, targets, options, bias)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad((loss * weights).sum(), (hidden, head, bias)) for loss in (ours, expected)]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
        summed = linear_cross_entropy(hidden, head, targets, weights, 1.0, options, bias)[0]
        for mine, other in zip(grads[0], torch.autograd.grad(summed, (hidden, head, bias)), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    frozen = token_losses(hidden, head.detach(), targets, None, None)
    (only,) = torch.autograd.grad(frozen.sum(), (hidden,))
    assert only.shape == hidden.shape


def row(number: int, good: str, bad: str) -> dict[str, str]:
    return {"question": f"is it {number}", "good": good, "bad": bad}


HEALTHY = [row(i, f"yes it is {i} " + "so " * (i % 4), f"no it is not {i} " + "so " * (3 - i % 4)) for i in range(80)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (HEALTHY, None),
        ([*HEALTHY, row(99, "same", "same")],
         r"pairs.jsonl:81: 1 of 81 pairs have two identical .*\[identical_answers\]"),
        ([*HEALTHY, {**HEALTHY[3], "good": HEALTHY[3]["bad"], "bad": HEALTHY[3]["good"]}],
         r"pairs.jsonl:81: 1 of 81 pairs contradict .*\[contradictory_pairs\]"),
        ([*HEALTHY, *HEALTHY[:4]], r"pairs.jsonl:81: 4 of 84 pairs repeat another one \(5%\).*\[duplicate_pairs\]"),
        ([row(i, "a long answer " * 2, "no") for i in range(60)],
         r"the chosen answer is the longer one in 100% of 60 pairs, by 26 tokens .*\[length_bias\]"),
    ],
    ids=["healthy", "identical_answers", "contradictory_pairs", "duplicate_pairs", "length_bias"],
)  # fmt: skip
def test_mistakes_in_pairs_are_named_before_the_first_step(
    base: tuple[Path, Path, Path], tmp_path: Path, rows: list[Any], message: str | None
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    data = {"sources": {"pairs": {"path": str(path), "columns": COLUMNS}}, "context": 128, "validation": 0}
    tokenizer = {"kind": "char", "chat": "none"}
    spec = make_spec(base, tmp_path.name, data=data, budget={"steps": 1}, dpo={"loss": "simpo"}, tokenizer=tokenizer)
    spec = spec.model_copy(update={"start_from": None})
    Session(spec).train()
    notes = [event["reason"] for event in Run.existing(run_folder(spec)).events() if event["kind"] == "data_note"]
    warnings = [note for note in notes if note.startswith("warning: data.sources.pairs: ")]
    assert len(warnings) == (message is not None), notes
    assert message is None or re.search(message, warnings[0]), warnings


def test_pairs_of_identical_answers_alone_are_refused(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", [row(i, "same", "same") for i in range(8)])
    data = {"sources": {"pairs": {"path": str(path), "columns": COLUMNS}}, "context": 64, "validation": 0}
    with pytest.raises(UserError, match=r"8 of 8 pairs have two identical answers.*silence: \[identical_answers\]"):
        Session(make_spec(base, "refused", data=data)).train()
