"""A student learns from a teacher: `objective: distill` from spec to validation."""

import json
import random
from pathlib import Path

import pytest
import torch

from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.train.trained import load_model

from .conftest import WORDS

BUDGET = {"steps": 60, "batch": 256}


@pytest.mark.slow
def test_distillation_closes_most_of_the_gap_to_the_teacher(make_spec) -> None:
    large = make_spec("large", budget=BUDGET, model={"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128})
    best = Session(large).train().validation["loss"]
    small = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32}
    models = {"teacher": str(run_folder(large))}
    curves = []
    for micro in (8, 2):
        spec = make_spec(
            f"student{micro}", objective="distill", model=small, models=models, distill={"next_token": 0.0},
            budget={**BUDGET, "micro_batch": micro},
        )  # fmt: skip
        outcome = Session(spec).train()
        records = list(Run(run_folder(spec)).metrics())
        curves.append([[record["loss"], record["nll"]] for record in records])
        begin, end = records[0]["nll"], outcome.validation["nll"]
        assert begin - end > 0.5 * (begin - best), "half of the gap from random weights to the teacher"
    for one, other in zip(*curves, strict=True):
        assert abs(one[0] - other[0]) < 2e-3


def write_chain(path: Path, documents: int, seed: int) -> Path:
    """Text of a first-order Markov chain over WORDS; every file has the same chain."""
    chain = random.Random(7)
    weights = {word: [chain.random() ** 4 for _ in WORDS] for word in WORDS}
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(documents):
            words = [draw.choice(WORDS)]
            while len(words) < 60:
                words += draw.choices(WORDS, weights[words[-1]])
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def held_out_loss(run: Path, texts: list[str]) -> float:
    """Nats a token of texts that no run has read, by the run's best checkpoint."""
    loaded, losses = load_model(run, "best", "cpu"), []
    for text in texts:
        ids = torch.tensor([loaded.prompt(text)[:33]])  # the context of the runs
        with torch.no_grad():
            logits = loaded.model.logits(loaded.model(ids[:, :-1]))
        losses.append(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none"))
    return float(torch.cat(losses).mean())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_distillation_closes_half_of_the_gap_that_little_data_leaves(make_spec, tmp_path) -> None:
    """A teacher of much text, students of little text of the same kind. On other text, the plain student's best
    checkpoint leaves a gap to the teacher; the distilled one, with the same text and steps, closes at least half."""
    many, few = write_chain(tmp_path / "many.jsonl", 1000, 0), write_chain(tmp_path / "few.jsonl", 40, 1)
    texts = [json.loads(line)["text"] for line in write_chain(tmp_path / "test.jsonl", 100, 2).read_text().splitlines()]
    budget = {"steps": 300, "batch": 512}
    large = make_spec(
        "large", budget=budget, data={"sources": {"chain": {"path": [str(many)]}}},
        model={"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128},
    )  # fmt: skip
    little = {
        "budget": budget, "data": {"sources": {"chain": {"path": [str(few)]}}, "validation": 0.25},
        "tokenizer": {"path": str(run_folder(large) / "tokenizer.json"), "vocab": "auto"},
        "evaluate": {"every": 20, "tokens": 2048},
    }  # fmt: skip
    plain = make_spec("plain", **little)
    distilled = make_spec("distilled", objective="distill", models={"teacher": str(run_folder(large))}, **little)
    losses = {}
    for spec in (large, plain, distilled):
        Session(spec).train()
        losses[spec.name] = held_out_loss(run_folder(spec), texts)
    gap, closed = losses["plain"] - losses["large"], losses["plain"] - losses["distilled"]
    assert gap > 0.1
    assert closed > 0.5 * gap, losses
