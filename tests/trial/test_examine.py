"""Whole documents beside others of their source: what is convicted, and what only looks odd."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bessemer.trial.attribute import document_parts
from bessemer.trial.examine import compare_document, examine_parts, examine_step, unigram_losses
from bessemer.trial.measure import global_batches, token_losses

from .conftest import SCENE_AT, VOCAB, chain_text

SIZE = 320  # tokens of the documents that are changed: ten rows


def read(rng, loss, tokens=200, vocab=50):
    """Tokens of a Zipf-like corpus with losses around a mean."""
    return rng.zipf(1.5, tokens) % vocab, rng.normal(loss, 0.5, tokens).clip(0)


def others(rng, count=48):
    return [read(rng, loss) for loss in rng.normal(2.0, 0.2, count)]


def test_a_guess_counts_the_tokens_of_the_source_and_of_the_document_so_far():
    frequency = np.array([0.5, 0.25, 0.25])
    tokens = np.array([0, 1, 0, 0])
    wanted = [256 * 0.5 / 256, 256 * 0.25 / 257, (256 * 0.5 + 1) / 258, (256 * 0.5 + 2) / 259]
    assert unigram_losses(tokens, frequency) == pytest.approx(-np.log(wanted))
    assert unigram_losses(np.ones(4000, np.int64), frequency).mean() < 0.2, "one token over and over is soon known"


def test_a_document_is_far_only_if_its_loss_is_and_the_model_does_worse_than_a_guess():
    rng = np.random.default_rng(0)
    usual = others(rng)
    assert not compare_document(read(rng, 2.6), usual, 50).is_far
    worse = compare_document(read(rng, 3.4), usual, 50)
    assert worse.sigmas > 4 and worse.loss > worse.guess + 0.5 and worse.is_far
    rare = rng.integers(30, 50, 200), read(rng, 3.2)[1]  # tokens that are seldom seen: a guess has more than 3.2
    found = compare_document(rare, usual, 50)
    assert found.sigmas > 4 and found.loss < found.guess and not found.is_far
    assert compare_document((rare[0], rare[1] + 2), usual, 50).is_far


def test_a_page_with_an_odd_passage_is_not_far():
    """However bad the passage: the model does well on the rest of the page."""
    rng = np.random.default_rng(2)
    usual = [read(rng, loss, tokens=1024) for loss in rng.normal(2.0, 0.2, 48)]
    tokens, losses = read(rng, 5.0, tokens=1024)
    assert compare_document((tokens, losses), usual, 50).is_far
    losses[:200] = read(rng, 1.5)[1]
    mostly = compare_document((tokens, losses), usual, 50)
    assert mostly.sigmas > 4 and mostly.guess - mostly.loss < -1 and mostly.worse < 0.9 and not mostly.is_far


def test_too_little_to_compare_convicts_nobody():
    rng = np.random.default_rng(1)
    assert compare_document(read(rng, 9.0, tokens=40), others(rng), 50) is None
    assert compare_document(read(rng, 9.0), others(rng, 11), 50) is None


def long_documents(rows, make):
    """A change of a stream: every fifth document is long, and some of those are what `make` gives."""

    def change(row, tokens):
        if row % 5:
            return tokens
        rng = np.random.default_rng(row)
        return make(rng) if row in rows else chain_text(rng, SIZE)

    return change


def noise(rng):
    return np.append(rng.integers(1, VOCAB, SIZE - 1), 0)


def ruled(rng):
    """An honest page of which a third is ruled lines."""
    page = chain_text(rng, SIZE)
    for start in range(16, SIZE - 32, 48):
        page[start : start + 16] = 7
    return page


def one_odd_row(rng):
    page = chain_text(rng, SIZE)
    page[64:112] = rng.integers(1, VOCAB, 48)
    return page


def parts_at(job, rows):
    """The part of each document in any step that it is in."""
    found = {}
    for step in range(SCENE_AT):
        batches = global_batches(job.engine, job.data.stream, step)
        for part in document_parts(job.data.stream, batches, token_losses(job.engine, batches)):
            if part.origin.row in rows:
                found.setdefault(part.origin.row, part)
    return list(found.values())


def attempt_at(job, step):
    batches = global_batches(job.engine, job.data.stream, step)
    losses = [torch.tensor(nll) for nll in token_losses(job.engine, batches)]
    return SimpleNamespace(step=step, batches=batches, losses=SimpleNamespace(token_losses=losses))


@pytest.mark.parametrize(
    ("make", "far"), [(noise, True), (ruled, False), pytest.param(one_odd_row, False, marks=pytest.mark.slow)]
)
def test_noise_is_far_from_its_source_and_odd_rows_of_an_honest_page_are_not(stage, make, far):
    rows = set(range(100, 400, 20))
    job, _, _ = stage(0, long_documents(rows, make), data=make.__name__)
    parts = parts_at(job, rows)
    found = examine_parts(job.engine, job.data.stream, parts, SCENE_AT)
    assert len(parts) >= 3 and [deviation.is_far for deviation in found] == [far] * len(parts), found


def test_a_suspect_step_names_its_noise_by_forward_passes_that_leave_no_trace(stage):
    rows = set(range(100, 400, 20))
    job, scene, _ = stage(0, long_documents(rows, noise), data=noise.__name__)
    step = next(s for s in range(SCENE_AT) if any(o.row in rows and o.tokens > 24 for o in job.data.stream.origins(s)))
    guilty = {origin.row for origin in job.data.stream.origins(step) if origin.row in rows}
    gradients = {name: torch.randn_like(parameter) for name, parameter in job.engine.model.named_parameters()}
    for name, parameter in job.engine.model.named_parameters():
        parameter.grad = gradients[name]
    before = {name: tensor.clone() for name, tensor in job.state().items()}
    numbers = torch.get_rng_state()
    trial, seen = examine_step(job, attempt_at(job, step), scene.normal.loss)
    assert {one.row for one in trial.accused if one.convicted} == guilty
    assert trial.verdict == "data" and trial.state_healthy and len(seen) == len(trial.accused)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.state().items() if "guard" not in name)
    assert all(parameter.grad is gradients[name] for name, parameter in job.engine.model.named_parameters())
    assert torch.equal(numbers, torch.get_rng_state()) and job.engine.model.training
    clean, none = next(s for s in range(SCENE_AT) if not any(o.row in rows for o in job.data.stream.origins(s))), None
    assert examine_step(job, attempt_at(job, clean), scene.normal.loss)[0] is none
