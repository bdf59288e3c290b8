"""Speculation keeps the model's distribution: joint counts of three tokens, whatever the draft."""

import pytest
import torch

from bessemer.model.generate import Sampling
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
    inside = joint > 1e-12
    assert counts[~inside].sum() == 0
    expected = joint[inside] * counts.sum()
    statistic = float(((counts[inside] - expected) ** 2 / expected).sum())
    p = float(torch.special.gammaincc(torch.tensor((int(inside.sum()) - 1) / 2.0), torch.tensor(statistic / 2)))
    assert p > 1e-3
