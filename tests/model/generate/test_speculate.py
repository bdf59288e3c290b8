"""Speculation keeps the model's distribution: joint counts of three tokens, whatever the draft."""

from dataclasses import replace

import pytest
import torch

from bessemer.model.generate import Generator, ModelDrafter, NgramDrafter, Request, Sampling
from bessemer.model.generate.sampling import SamplingBatch, filter_logits
from bessemer.model.generate.speculate import Draft, verify

V = 5


def tables(seed):
    """Logits of the next token after no, one and two tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*([V] * depth), V, generator=generator, dtype=torch.float64) for depth in range(3)]


def logits_after(table, tokens):
    return table[len(tokens)][tuple(tokens)]


def three_tokens(model, draft, sampling, guesses):
    """As the generator does it: guess, verify, go on until three tokens are there."""
    settings, tokens = SamplingBatch.of([sampling], torch.device("cpu")), []
    while len(tokens) < 3:
        guessed, shares = [], []
        for _ in range(min(guesses, 2 - len(tokens))):
            logits = logits_after(draft, tokens + guessed)
            shares.append(filter_logits(logits, sampling).double().softmax(-1))
            position = torch.tensor([len(tokens) + len(guessed)])
            guessed.append(int(settings.draw(logits[None], position)))
        rows = torch.stack([logits_after(model, tokens + guessed[:i]) for i in range(len(guessed) + 1)])
        tokens += verify(Draft(guessed, torch.stack(shares) if guessed else None), rows, sampling, len(tokens))
    return tokens[:3]


@pytest.mark.slow
@pytest.mark.timeout(900)  # 20,000 times three tokens
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"temperature": 0.6, "top_p": 0.9}], ids=str)
def test_the_joint_distribution_is_the_models(fields):
    model, draft = tables(1), tables(2)
    base = Sampling(**({"temperature": 1.0} | fields))
    joint = torch.ones(V, V, V, dtype=torch.float64)
    for depth in range(3):
        shares = torch.stack([filter_logits(row, base).double().softmax(-1) for row in model[depth].reshape(-1, V)])
        joint = joint * shares.view(*model[depth].shape, *([1] * (2 - depth)))
    assert float(joint.sum()) == pytest.approx(1)
    counts = torch.zeros(V, V, V, dtype=torch.float64)
    for seed in range(20_000):
        sampling = Sampling(base.temperature, base.top_k, base.top_p, seed)
        counts[tuple(three_tokens(model, draft, sampling, guesses=2))] += 1
    assert chi_square_p(counts, joint) > 1e-3


def chi_square_p(counts, shares):
    """How likely counts this far from their shares are; impossible ones must be 0."""
    inside = shares > 1e-12
    assert counts[~inside].sum() == 0
    expected = shares[inside] * counts.sum()
    statistic = float(((counts[inside] - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((int(inside.sum()) - 1) / 2.0), torch.tensor(statistic / 2)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_the_generator_with_a_draft_samples_from_the_model(kind, shape_of, build_random):
    """Two tokens after a prompt, 4,000 times, against the product of the model's own distributions."""
    model, other = (build_random(shape_of(vocab=6, layers=1), seed=seed).eval() for seed in (1, 2))
    drafter = ModelDrafter(other, model, length=2) if kind == "model" else NgramDrafter(length=2)
    prompt, sampling = [1, 2, 1, 2, 1], Sampling(1.0)
    shares = torch.zeros(6, 6, dtype=torch.float64)
    with torch.no_grad():
        for first in range(6):
            logits_TV = model.logits(model(torch.tensor([[*prompt, first]])))[0]
            shares[first] = logits_TV[-2].softmax(-1)[first] * logits_TV[-1].softmax(-1)
    assert float(shares.sum()) == pytest.approx(1)
    generator, counts = Generator(model, slots=50, max_length=16, drafter=drafter), torch.zeros_like(shares)
    requests = [Request(prompt, 3, replace(sampling, seed=seed)) for seed in range(4000)]
    for (completion,) in generator.run(requests):
        counts[tuple(completion.tokens[:2])] += 1
    assert chi_square_p(counts, shares) > 1e-3
