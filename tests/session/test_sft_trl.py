"""Supervised fine-tuning computes what TRL's SFTTrainer computes: tokens, labels, loss and the gradient of every
weight, of the same rows and weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bessemer.data.stream.batches import Batch
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job

from .conftest import Faults, spec_data
from .trl_reference import (
    IGNORED,
    TOOLS,
    UNMARKED,
    Labelled,
    ReferenceStep,
    learned_part,
    reference_step,
    write_adapter,
    write_folder,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONTEXT = 144
METALS = ["iron", "copper", "zinc", "lead", "tin", "nickel", "cobalt", "silver"]


def talk(metal: str, turns: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {metal} used for, part {turn}?"})
        messages.append({"role": "assistant", "content": f"For {metal} things{', and more' * turn}. ✓"})
    return messages


ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": talk(metal, 1 + i % 2)} for i, metal in enumerate(METALS)],
    "text": [{"text": f"{metal.capitalize()} melts. " * (1 + i % 4)} for i, metal in enumerate(METALS)],
    "completion": [
        {"prompt": f"What is {metal}?", "completion": f" A metal{', heavy' * (i % 5)}."}
        for i, metal in enumerate(METALS)
    ],
    "chat_completion": [
        {"prompt": talk(metal, 2)[:-1], "completion": talk(metal, 2)[-1:]} for metal in METALS
    ],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds ore.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"metal": "zinc"}}}
ROWS["tools"] = [
    {
        "messages": [
            {"role": "user", "content": f"Where is {metal}?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "in the hills"},
            {"role": "assistant", "content": f"{metal} is in the hills."},
        ],
        "tools": [TOOL],
    }
    for metal in METALS
]
TEXTS = [json.dumps(row, ensure_ascii=False) for rows in ROWS.values() for row in rows]


@pytest.fixture(scope="module", autouse=True)
def trl() -> Any:
    """Not imported at the top: that takes seconds, also where these tests are left out."""
    return pytest.importorskip("trl", reason="pip install -c constraints.txt 'bessemer[bench]'")


@dataclass
class OwnStep:
    documents: list[Labelled] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0


class Recording(Faults):
    """Keeps the documents and gradients of the first step."""

    def __init__(self) -> None:
        self.own = OwnStep()

    def after_backward(self, job: Job, step: int) -> None:
        if step == 0:
            objective = job.engine.objective
            batch = objective.inputs(job.data.stream.batch(step))
            assert isinstance(batch, Batch)
            self.own.documents = documents_of(batch)
            for name, parameter in job.engine.model.named_parameters():
                if parameter.requires_grad:
                    assert parameter.grad is not None, name
                    self.own.gradients[name] = parameter.grad.clone()


def documents_of(batch: Batch) -> list[Labelled]:
    """The documents that a batch learns from, as the model reads them."""
    documents = []
    for row in range(len(batch.tokens)):
        for number in np.unique(batch.documents[row]):
            (at,) = np.nonzero(batch.documents[row] == number)
            learned = np.nonzero(batch.weights[row, at])[0]
            if learned.size:
                at = at[: learned[-1] + 1]
                targets = np.where(batch.weights[row, at] > 0, batch.targets[row, at], IGNORED)
                ids = [*batch.tokens[row, at].tolist(), int(batch.targets[row, at[-1]])]
                documents.append(learned_part(ids, [IGNORED, *targets.tolist()]))
    return documents


def own_step(folder: Path, rows: list[dict[str, Any]], work: Path, height: int, **parts: Any) -> OwnStep:
    """One step over `height` rows of a run, which are all that there are."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {"tokenizer": {}, "optimizer": {"lr": 1e-5}, "guard": {"enabled": False}} | parts
    parts["data"] = {"context": CONTEXT, "validation": 0, **parts.get("data", {})}
    parts["data"]["sources"] = {"rows": {"path": [str(path)]}}
    parts["budget"] = {"steps": 1, "batch": height * CONTEXT, "micro_batch": height, **parts.get("budget", {})}
    base = spec_data("own", path, work / "runs") | {"model": {"hf": str(folder)}, "objective": "sft"}
    spec, recording = RunSpec.model_validate(base | parts), Recording()
    assert Session(spec, faults=recording).train().kind == "finished"
    (record,) = Run(run_folder(spec)).metrics()
    recording.own.loss, recording.own.grad_norm = record["loss"], record["grad_norm"]
    return recording.own


def assert_same_documents(own: list[Labelled], reference: list[Labelled]) -> None:
    count = [Counter((tuple(ids), tuple(labels)) for ids, labels in each) for each in (own, reference)]
    assert count[0] == count[1]


def differences(own: OwnStep, reference: ReferenceStep) -> tuple[float, float]:
    """Of the loss, and the largest of a gradient."""
    assert own.gradients.keys() == reference.gradients.keys()
    gradients = [(own.gradients[name] - reference.gradients[name]).abs().max() for name in own.gradients]
    return abs(own.loss - reference.loss), float(torch.stack(gradients).max())


def check(own: OwnStep, reference: ReferenceStep, case: str) -> None:
    assert_same_documents(own.documents, reference.documents)
    loss, gradient = differences(own, reference)
    norm = abs(own.grad_norm - reference.grad_norm)
    print(f"{case}: loss differs by {loss:.1e}, gradients by {gradient:.1e}, their norm by {norm:.1e}")
    assert min(float(each.abs().max()) for each in reference.gradients.values()) > 1e-3
    assert loss < 1e-5 and gradient < 1e-5 and norm < 1e-5


@dataclass(frozen=True)
class Case:
    """The same training, asked of both."""

    rows: str
    own: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    folder: dict[str, Any] = field(default_factory=dict)


PACKED = {"packing": True, "packing_strategy": "bfd"}
PADDED = {"data": {"packing": "pad"}}
EVERYTHING = {"tokenizer": {"learn": "everything"}}
NONE = {"tokenizer": {"chat": "none"}}
ASSISTANT = {"assistant_only_loss": True}
CASES = {
    "padded": Case("messages", PADDED | EVERYTHING),
    "padded, tied": Case("messages", PADDED | EVERYTHING, folder={"tied": True}),
    "packed": Case("messages", EVERYTHING, PACKED),
    "text, padded": Case("text", PADDED),
    "text with BOS, packed": Case("text", {}, PACKED, {"bos": True}),
    "completion, padded": Case("completion", PADDED | NONE),
    "completion with BOS, packed": Case("completion", NONE, PACKED, {"bos": True}),
    "completion of a conversation, padded": Case("chat_completion", PADDED, {}, {"template": UNMARKED}),
    "completion of a conversation with BOS, packed": Case(
        "chat_completion", {}, PACKED, {"template": UNMARKED, "bos": True}
    ),
    "template with BOS that is EOS, packed": Case(
        "chat_completion", {}, PACKED, {"template": UNMARKED, "bos_token": "</s>"}
    ),
    "template without BOS, tokenizer with it, packed": Case("messages", {}, ASSISTANT | PACKED, {"bos": True}),
    "assistant, padded": Case("messages", PADDED, ASSISTANT),
    "assistant, packed": Case("messages", {}, ASSISTANT | PACKED),
    "assistant with tools, packed": Case("tools", {}, ASSISTANT | PACKED, {"template": TOOLS}),
    "assistant, metaspace": Case("messages", PADDED, ASSISTANT, {"metaspace": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_trl(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = write_folder(tmp_path / "model", TEXTS, **case.folder)
    reference = reference_step(folder, ROWS[case.rows], tmp_path / "trl", max_length=CONTEXT, **case.reference)
    check(own_step(folder, ROWS[case.rows], tmp_path / "own", reference.rows, **case.own), reference, name)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_a_step_of_an_adapter_is_that_of_trl_and_peft(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    folder, rows = write_folder(tmp_path / "model", TEXTS), ROWS["messages"]
    adapter = write_adapter(tmp_path / "adapter", folder, kind)
    reference = reference_step(folder, rows, tmp_path / "trl", 2, adapter, max_length=CONTEXT, assistant_only_loss=True)
    own = own_step(folder, rows, tmp_path / "own", 8, adapter={"path": str(adapter)}, **PADDED)
    assert len(own.gradients) == 14 * (3 if kind == "dora" else 2)
    check(own, reference, kind)


def test_where_documents_differ(tmp_path: Path) -> None:
    """TRL learns the white space that a template writes after a completion, which no model has to write."""
    folder = write_folder(tmp_path / "model", TEXTS, bos=True)
    reference = reference_step(folder, ROWS["chat_completion"], tmp_path / "trl", max_length=CONTEXT)
    own = own_step(folder, ROWS["chat_completion"], tmp_path / "own", 8, **PADDED)
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    line_break, end = tokenizer("\n", add_special_tokens=False).input_ids, tokenizer.vocab["<|im_end|>"]
    assert all(ids[-2:] == [end, *line_break] and labels[-2:] == ids[-2:] for ids, labels in reference.documents)
    expected = [(ids[:-1], labels[:-1]) for ids, labels in reference.documents]
    assert_same_documents(own.documents, expected)


def test_accumulation_changes_neither_loss_nor_gradients(tmp_path: Path) -> None:
    """The loss is divided by the tokens of the step, so that rows of few learned tokens weigh no more than others."""
    folder = write_folder(tmp_path / "model", TEXTS)
    steps = {}
    for passes in (1, 2, 4):
        budget = {"micro_batch": 8 // passes}
        steps[passes] = own_step(folder, ROWS["messages"], tmp_path / f"own-{passes}", 8, budget=budget, **PADDED)
        reference = reference_step(
            folder, ROWS["messages"], tmp_path / f"trl-{passes}", passes, max_length=CONTEXT, **ASSISTANT
        )
        check(steps[passes], reference, f"accumulation {passes}")
        assert abs(steps[passes].loss - steps[1].loss) < 1e-6 * steps[1].loss
        assert abs(steps[passes].grad_norm - steps[1].grad_norm) < 1e-6 * steps[1].grad_norm
        for name, gradient in steps[1].gradients.items():
            assert (steps[passes].gradients[name] - gradient).abs().max() < 1e-6, name
