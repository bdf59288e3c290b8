"""`objective: kto`: TRL's values and gradients, the same at any accumulation, learned from labels and from pairs."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.align.test_dpo import COLUMNS, columns_of, write_rows
from tests.align.test_dpo import base as base  # the fixture
from tests.align.test_dpo import make_spec as make_pairs_spec
from tests.session.conftest import spec_data, train_until
from tests.session.trl_reference import native_gradients, write_folder

from bessemer.align.answers import REFERENCE
from bessemer.align.kto import Kto, kto_losses
from bessemer.data.read import Document, divide_source, list_files, read_part
from bessemer.data.read.answers import UnusableAnswer, answer_fields, answer_messages, divide_answers
from bessemer.data.stream.batches import OTHER_TARGETS, OTHER_WEIGHTS, Batch
from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.registry import read_shape
from bessemer.model.transformer import Decoder, build_model
from bessemer.parallel.world import World
from bessemer.session.session import Session
from bessemer.session.start import complete_spec
from bessemer.spec.data import SourceSpec
from bessemer.spec.load import load_spec
from bessemer.spec.preference import KtoSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.engine import step_means

LABELLED = {"prompt": "question", "completion": "answer", "label": "thumb"}


def write_answers(pairs: Path, path: Path) -> Path:
    rows = []
    for line in pairs.read_text().splitlines():
        row = json.loads(line)
        rows += [{"question": row["question"], "answer": row["good"], "thumb": "up"}]
        rows += [{"question": row["question"], "answer": row["bad"], "thumb": "down"}]
    random.Random(1).shuffle(rows)
    return write_rows(path, rows)


def make_spec(base: tuple[Path, Path, Path], name: str, path: Path, columns: dict[str, str], **parts: Any) -> RunSpec:
    run, runs, _ = base
    checkpoint = next((run / "checkpoints").glob("step-*"))
    data = {"sources": {"answers": {"path": str(path), "columns": columns}}, "context": 64, "validation": 0.2}
    budget = {"steps": 30, "batch": 32 * 64, **parts.pop("budget", {})}
    spec = spec_data(name, path, runs, objective="kto", data=data, budget=budget, start_from=str(checkpoint))
    spec |= {"tokenizer": {"path": str(run / "tokenizer.json"), "chat": "none"}, "optimizer": {"lr": 2e-3}, **parts}
    return RunSpec.model_validate(spec)


def test_formulas_of_the_paper() -> None:
    torch.manual_seed(0)
    ratios, good = torch.randn(32, dtype=torch.float64, requires_grad=True), (torch.rand(32) > 0.4).double()
    spec = KtoSpec(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    made = kto_losses(ratios, good, 0.4, spec)
    expected = torch.where(
        good > 0, 1.2 * (1 - 1 / (1 + torch.exp(-0.3 * (ratios - 0.4)))),
        0.7 * (1 - 1 / (1 + torch.exp(-0.3 * (0.4 - ratios)))),
    )  # fmt: skip
    apo = kto_losses(ratios, good, 0.4, spec.model_copy(update={"loss": "apo_zero_unpaired"}))
    zero = torch.where(good > 0, 1.2 * (1 - torch.sigmoid(0.3 * ratios)), 0.7 * torch.sigmoid(0.3 * ratios))
    for ours, theirs in ((made, expected), (apo, zero)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(loss.sum(), ratios, retain_graph=True)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_answers_are_learned_and_accumulation_changes_nothing(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path, curves = write_answers(base[2], tmp_path / "answers.jsonl"), []
    for micro, steps in ((8, 6), (2, 6), (32, 30)):
        budget, schedule = {"micro_batch": micro, "steps": steps}, {"kind": "constant", "warmup": 1}
        spec = make_spec(base, f"kto-{micro}", path, LABELLED, budget=budget, schedule=schedule)
        outcome = Session(spec).train()
        curves.append(columns_of(spec, "loss", "kl", "chosen_reward", "rejected_reward", "grad_norm"))
    for curve in curves[:2]:
        np.testing.assert_allclose(curves[2][:6], curve, rtol=1e-3, atol=2e-4)
    assert curves[0][0, 0] == pytest.approx(0.5, abs=1e-6) and curves[0][0, 1] == pytest.approx(0, abs=1e-6)
    assert (curves[0][1:, 1] != 0).all()  # the reference point is estimated
    assert outcome.validation is not None and outcome.validation["accuracy"] > 0.9


def test_pairs_become_two_rows_and_a_resume_is_exact(base: tuple[Path, Path, Path]) -> None:
    curves = []
    for name in ("through", "stopped"):
        spec = make_spec(base, f"kto-pairs-{name}", base[2], COLUMNS, budget={"steps": 6})
        if name == "stopped":
            train_until(spec, 3)
        Session(spec).train()
        curves.append(columns_of(spec, "loss", "kl"))
    np.testing.assert_array_equal(*curves)
    assert curves[0][-1, 0] < 0.5


FEEDBACK = [
    {
        "prompt": f"is steel number {i} hard",
        "completion": " yes it is" + " very" * (i % 4) + " hard",
        "label": i % 3 > 0,
    }
    for i in range(6)
]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_values_and_gradients_are_those_of_trl(tmp_path: Path, loss: str) -> None:
    """A batch of TRL's trainer, with a reference of other weights. Its rows in one step of ours: the same reference
    point, loss and gradients."""
    trl = pytest.importorskip("trl", reason="TRL 1.13 is not installed")
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    texts = [row["prompt"] + row["completion"] for row in FEEDBACK]
    folder = write_folder(tmp_path / "model", texts)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    other.save_pretrained(tmp_path / "other")
    config = trl.KTOConfig(
        output_dir=str(tmp_path / "out"), loss_type=loss, beta=0.3, desirable_weight=1.2, undesirable_weight=0.8,
        per_device_train_batch_size=len(FEEDBACK), bf16=False, use_cpu=True, report_to="none",
        gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dataset = datasets.Dataset.from_list(FEEDBACK)
    trainer = trl.KTOTrainer(model, other, args=config, train_dataset=dataset, processing_class=tokenizer)
    rows = [trainer.train_dataset[i] for i in range(len(FEEDBACK))]
    theirs = trainer.compute_loss(model, trainer.data_collator(rows))
    theirs.backward()
    expected = native_gradients(
        folder, model, {name: parameter.grad for name, parameter in model.named_parameters()}, tmp_path / "gradients"
    )

    spec = KtoSpec(loss=loss, beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    objective = Kto(spec, tokenizer.eos_token_id, ())
    own, objective.models[REFERENCE] = (native(path) for path in (folder, tmp_path / "other"))
    feed = objective.feed(batch_of(rows, tokenizer.eos_token_id), torch.device("cpu"))
    if spec.needs_mismatched:
        feed.totals = step_means(objective, own, [feed], World())
        assert feed.totals["kl"] != 0
    terms = objective.loss(own, feed, feed.count)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(theirs.item(), abs=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def native(folder: Path) -> Decoder:
    family, shape = read_shape(json.loads((folder / "config.json").read_text()))
    model = build_model(shape, "cpu", 0)
    load_weights(model, HfFolder(folder), family)
    return model


def batch_of(rows: list[dict[str, Any]], eos: int) -> Batch:
    """TRL's rows as a step of the stream: each with the answer of the one before it."""
    texts = [row["prompt_ids"] + row["completion_ids"] for row in rows]
    shape = (len(rows), max(map(len, texts)))
    targets, weights, tokens = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    for number, (row, ids) in enumerate(zip(rows, texts, strict=True)):
        targets[number, : len(ids)] = ids
        tokens[number, : len(ids)] = [eos, *ids[:-1]]
        weights[number, len(row["prompt_ids"]) : len(ids)] = 1
    fields = {"chosen": np.array([[[int(row["label"])]] for row in rows], np.int32)}
    fields |= {OTHER_TARGETS: np.roll(targets, 1, 0), OTHER_WEIGHTS: np.roll(weights, 1, 0)}
    places = np.arange(len(rows))
    return Batch(tokens, targets, weights, np.zeros(shape, np.int32), places, 0 * places, places, fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"sources": {"a": {"path": "x.jsonl", "columns": {"prompt": "p", "completion": "c"}}}}},
         r"kto learns from answers with a label, or from pairs: name their columns, such as columns: \{prompt: quest"),
        ({"objective": "sft"}, "objective: sft would learn the rejected answers too"),
        ({"objective": "sft", "kto": {"beta": 0.2}}, "has no effect with objective: sft: write objective: kto"),
        ({"parallel": {"cp": 2}}, "summed over complete rows: write cp: 1"),
        ({"data": {"sources": {"a": {"path": "x.jsonl", "columns": LABELLED}}, "packing": "best_fit"}},
         "kto has one answer in a row: remove packing"),
        ({"kto": {"loss": "bco"}}, "kto.loss: expected kto or apo_zero_unpaired"),
    ],
)  # fmt: skip
def test_mistakes_have_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    sources = {"answers": {"path": "answers.jsonl", "columns": LABELLED}}
    spec = {"model": "1M", "objective": "kto", "data": {"sources": sources}, "budget": {"steps": 1}, **change}
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec))
    with pytest.raises(UserError, match=message):
        load_spec(path)


def test_labels_in_the_usual_words_and_columns_of_trl(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    for good, bad in ((True, False), (1, 0), ("👍", "👎"), ("thumbs_up", "thumbs_down"), (1.0, -1)):
        columns = {"label": "thumb", "prompt": "p", "completion": "c"}
        record = {"p": "q", "c": "a", "thumb": good}
        assert [answer_fields({**record, "thumb": label}, columns, "best")["label"] for label in (good, bad)] == [
            True, False,
        ]  # fmt: skip
    with pytest.raises(UnusableAnswer, match="'thumb' is 'maybe', not a label; write true or false"):
        answer_fields({"thumb": "maybe"}, columns, "best")
    path = write_rows(tmp_path / "trl.jsonl", [{"prompt": "q", "completion": "a", "label": True}])
    spec = make_spec(base, "trl", path, LABELLED)
    sources = {"answers": spec.data.sources["answers"].model_copy(update={"columns": None})}
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": sources})})
    assert complete_spec(spec).data.sources["answers"].columns == {
        "prompt": "prompt", "completion": "completion", "label": "label",
    }  # fmt: skip


TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "is ore hard"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and coke"},
    {"role": "assistant", "content": "who knows"},
    {"role": "user", "content": "try"},
    {"role": "assistant", "content": "no"},
]


def test_rewards_of_turns_are_labels_of_answers(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Each rated turn is the row that a prompt, a completion and a label would be."""

    def documents(path: Path, columns: dict[str, str]) -> list[tuple[Any, int]]:
        source = SourceSpec(path=[str(path)], columns=columns)
        parts = divide_source("turns", list_files(source), source)
        rows = [row for part in parts for row in read_part(part, source)]
        assert all(isinstance(row, Document) for row in rows), rows
        made = divide_answers(iter(rows))  # type: ignore[arg-type]
        return [(document.messages, int(document.fields["chosen"][0])) for document in made]

    columns = {"turns": "talk", "rewards": "scores"}
    rated = write_rows(tmp_path / "rated.jsonl", [{"talk": TALK, "scores": [0.7, None, -1]}])
    plain = [
        {"question": TALK[:2], "answer": [TALK[2]], "thumb": "up"},
        {"question": TALK[:6], "answer": [TALK[6]], "thumb": "down"},
    ]
    assert documents(rated, columns) == documents(write_rows(tmp_path / "plain.jsonl", plain), LABELLED)

    for scores, message in (
        ([1, 2], "no list of 3 rewards"),
        ([1, "x", 2], "'x' and not a finite"),
        ([None] * 3, "no reward"),
    ):
        with pytest.raises(UnusableAnswer, match=message):
            answer_messages({"talk": TALK, "scores": scores}, columns, lambda value, _: list(value))
    with pytest.raises(ValueError, match="turns and rewards need each other"):
        SourceSpec(path=["x.jsonl"], columns={"turns": "talk"})

    rows = [
        {"talk": [*TALK[:-1], {"role": "assistant", "content": f"no {i}"}], "scores": [1, 0, (-1) ** i]}
        for i in range(40)
    ]
    spec = make_spec(base, "kto-turns", write_rows(tmp_path / "rows.jsonl", rows), columns, budget={"steps": 2})
    assert Session(spec).train().kind == "finished"
    assert np.isfinite(columns_of(spec, "loss")).all()


def test_a_step_of_one_answer_is_refused(base: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path = write_answers(base[2], tmp_path / "answers.jsonl")
    with pytest.raises(UserError, match="kto compares a prompt with the answers of others: write two rows a step"):
        Session(make_spec(base, "alone", path, LABELLED, budget={"batch": 64})).train()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_known_rule_is_learned(base: tuple[Path, Path, Path], tmp_path: Path, objective: str, seed: int) -> None:
    """The rule: name the colour of the question. The start model names either colour; after the run, held-out answers
    are on the right side in more than 90 % of the cases."""
    parts: dict[str, Any] = {"seed": seed, "budget": {"steps": 40}, "evaluate": {"every": 40, "tokens": 64 * 64}}
    if objective == "dpo":
        spec = make_pairs_spec(base, f"rule-dpo-{seed}", **parts)
    else:
        path = write_answers(base[2], tmp_path / "answers.jsonl")
        spec = make_spec(base, f"rule-kto-{seed}", path, LABELLED, **parts)
    outcome = Session(spec).train()
    assert columns_of(spec, "accuracy")[0, 0] < 0.7
    assert outcome.validation is not None and outcome.validation["accuracy"] > 0.9
