"""Classification: which columns are predicted, losses against torch, packing, accumulation, and the validation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.packing import open_best_fit
from bessemer.data.stream.rows import PadRows, Trim
from bessemer.model.transformer import build_model
from bessemer.spec.classify import ClassifySpec, as_classifier
from bessemer.spec.mixture import quantise
from bessemer.train.classify import Classify
from bessemer.train.objective import ValidationSums

CPU, CONTEXT, ROWS = torch.device("cpu"), 12, 6
LABELS = ["a", "b", "c"]
SPECS = {
    "single": ClassifySpec(labels=LABELS),
    "multi": ClassifySpec(problem="multi", labels=LABELS),
    "regression": ClassifySpec(problem="regression"),
    "token": ClassifySpec(kind="token", labels=LABELS),
}


@pytest.fixture
def store(tmp_path):
    """Documents with a label of every kind; token 0 is the end of a document."""

    def make(spec: ClassifySpec) -> tuple[TokenStore, list[np.ndarray], list[np.ndarray]]:
        draw, documents, labels = np.random.default_rng(0), [], []
        with StoreWriter(tmp_path / "rows", 29, "tokenizer") as writer:
            for row, length in enumerate([4, 9, 2, 7, 11, 3, 5, 8] * 6):
                tokens = np.append(draw.integers(1, 29, length - 1), 0)
                if spec.kind == "token":
                    label = np.append(draw.integers(-1, 3, length - 1), -1).astype(np.int32)
                    label[label < 0] = -100
                    writer.add(tokens, "rows.jsonl", row, row, length, token_fields={"label": label})
                else:
                    kinds = {
                        "single": draw.integers(0, 3, 1).astype(np.int32),
                        "multi": draw.integers(0, 2, 3).astype(np.float32),
                        "regression": draw.normal(size=1).astype(np.float32),
                    }
                    label = kinds[spec.problem]
                    writer.add(tokens, "rows.jsonl", row, row, length, fields={"label": label})
                documents.append(tokens)
                labels.append(label)
        return TokenStore(tmp_path / "rows"), documents, labels

    return make


def stream_of(rows, transforms=()):
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": rows.count}, seed=1)
    return BatchStream({"a": rows}, order, CONTEXT, StepPositions([BatchPhase(0, ROWS)]), transforms=transforms)


def expected_loss(model, spec, documents, labels, numbers):
    """The sum of losses over documents, each run alone, and how many there are."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number in numbers:
        text, label = torch.from_numpy(documents[number][:-1])[None], torch.from_numpy(labels[number])
        logits = model.logits(model(text))[0]
        if spec.kind == "token":
            total = total + F.cross_entropy(logits, label[:-1].long(), ignore_index=-100, reduction="sum")
            count += int((label != -100).sum())
            continue
        at = logits[0 if not model.shape.causal else -1]
        if spec.problem == "single":
            total = total + F.cross_entropy(at, label[0].long())
        elif spec.problem == "multi":
            total = total + F.binary_cross_entropy_with_logits(at, label.double())
        else:
            total = total + (at[0] - label[0].double()).square()
        count += 1
    return total, count


def documents_of(stream, batch):
    return [origin.document for _, _, origin in stream.locate(batch)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("packing", ["pad", pytest.param("trimmed", marks=pytest.mark.slow), "best_fit"])
def test_the_loss_is_that_of_each_document_alone(shape, store, tmp_path, kind, causal, packing):
    from dataclasses import replace

    spec = SPECS[kind]
    tokens, documents, labels = store(spec)
    rows = open_best_fit(tokens, CONTEXT, tmp_path / "pack") if packing == "best_fit" else PadRows(tokens, CONTEXT)
    stream = stream_of(rows, [Trim()] if packing == "trimmed" else [])
    model = build_model(as_classifier(replace(shape, causal=causal), spec), "cpu", 2, "kaiming").double()
    objective = Classify(spec, causal, 1.0)
    for step in (0, 3):
        batch = stream.batch(step)
        total, count = expected_loss(model, spec, documents, labels, documents_of(stream, batch))
        whole = objective.feed(batch, CPU)
        assert whole.count == count
        terms = objective.loss(model, whole, count)
        torch.testing.assert_close(terms.loss, total / count, rtol=1e-8, atol=1e-10)
        parts = [objective.feed(part, CPU) for part in stream.micro_batches(step, 2)]
        split = sum(objective.loss(model, part, count).loss for part in parts)
        torch.testing.assert_close(split, terms.loss, rtol=1e-8, atol=1e-10)
        found = torch.autograd.grad(terms.loss, list(model.parameters()), allow_unused=True)
        for a, b in zip(found, torch.autograd.grad(total / count, list(model.parameters())), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
        in_documents = terms.nll_BT.sum() / count  # what attribution sees
        torch.testing.assert_close(in_documents.double(), (total / count).detach(), rtol=1e-6, atol=1e-8)


def test_a_banned_document_counts_for_nothing(store):
    spec = SPECS["single"]
    tokens, _, _ = store(spec)
    stream = stream_of(PadRows(tokens, CONTEXT))
    batch = stream.batch(0)
    first = documents_of(stream, batch)[0]
    without = stream.replace(banned={("a", first): 0}).batch(0)
    assert Classify(spec, True, 1.0).inputs(without).count == Classify(spec, True, 1.0).inputs(batch).count - 1


def test_f1_and_confusion_by_hand():
    table = torch.tensor([[3.0, 1, 0], [2, 4, 0], [0, 0, 0]])  # true labels in rows; no c anywhere
    numbers = Classify(SPECS["single"], True, 1.0).summarise(ValidationSums(1.0, 10, 0.0, {"accuracy": (7, 10)}, table))
    f1 = {"a": 2 * 3 / (2 * 3 + 2 + 1), "b": 2 * 4 / (2 * 4 + 1 + 2), "c": 0.0}
    assert numbers["accuracy"] == 0.7 and numbers["confusion"] == [[3, 1, 0], [2, 4, 0], [0, 0, 0]]
    assert numbers["f1_per_label"] == pytest.approx(f1)
    assert numbers["f1"] == pytest.approx((f1["a"] + f1["b"]) / 2)  # of the labels that occur


def test_numbers_of_several_labels_and_of_a_regression():
    hits, false, missed = [3.0, 0, 1], [1.0, 0, 1], [0.0, 2, 1]
    sums = ValidationSums(1.0, 4, 0.0, {"accuracy": (1, 4)}, torch.tensor([hits, false, missed]))
    numbers = Classify(SPECS["multi"], True, 1.0).summarise(sums)
    assert numbers["f1_micro"] == pytest.approx(2 * 4 / (2 * 4 + 2 + 3))
    assert numbers["f1_per_label"] == pytest.approx({"a": 6 / 7, "b": 0.0, "c": 0.5})
    labels, guesses = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 3.0])
    errors = (labels - guesses) ** 2
    table = torch.tensor([3.0, labels.sum(), (labels**2).sum(), errors.sum()], dtype=torch.float64)
    numbers = Classify(SPECS["regression"], True, 1.0).summarise(ValidationSums(1, 3, 0, {"mae": (1.5, 3)}, table))
    r2 = 1 - errors.sum() / ((labels - labels.mean()) ** 2).sum()
    assert numbers == pytest.approx({"mse": errors.mean(), "mae": 0.5, "r2": r2})


def test_the_guard_knows_the_scale_of_the_loss():
    judged = Classify(SPECS["single"], True, 2.0).judged
    assert (judged.level, judged.least_norm, judged.examine) == (math.log(3), 60.0, False)
    assert Classify(SPECS["regression"], True, 1.0, spread=4.0).judged.row == 36.0
