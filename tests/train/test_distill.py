"""Divergences against torch and by hand in float64, with gradients; chunks give the whole; a student learns."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import build_model
from bessemer.spec.distill import DistillSpec
from bessemer.spec.shape import ModelShape
from bessemer.train import distill
from bessemer.train.distill import Distill, divergence
from bessemer.train.objective import ModelInputs


def logits(seed: int, rows: int = 6, vocab: int = 11) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_divergences_are_those_of_torch(kind: str, temperature: float) -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    ours = divergence(teacher, student, DistillSpec(loss=kind, temperature=temperature))
    p, q = (x / temperature for x in (teacher, student))
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)

    def kl(a, b):  # of a from b
        return F.kl_div(b, a, log_target=True, reduction="none").sum(-1)

    mixed = ((log_p.exp() + log_q.exp()) / 2).log()
    expected = {
        "forward": lambda: kl(log_p, log_q),
        "reverse": lambda: kl(log_q, log_p),
        "js": lambda: (kl(log_p, mixed) + kl(log_q, mixed)) / 2,
    }[kind]() * temperature**2
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_generalised_divergence_is_that_of_trl(beta: float) -> None:
    """On-policy distillation of TRL: a sum over the tokens of answers, divided by their number."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    teacher, student = logits(4).view(2, 3, 11), logits(5).view(2, 3, 11).requires_grad_()
    labels = torch.tensor([[-100, 3, 4], [5, 6, -100]])
    rows = divergence(teacher.flatten(0, 1), student.flatten(0, 1), DistillSpec(loss="js", beta=beta))
    ours = (rows * (labels.flatten() != -100)).sum() / 4
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    for kind, end in (("forward", 0.0), ("reverse", 1.0)):
        if beta == end:
            torch.testing.assert_close(rows, divergence(*(x.flatten(0, 1) for x in (teacher, student)), DistillSpec(
                loss=kind)))  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_top_k_never_exceeds_the_whole_and_reaches_it(kind: str) -> None:
    teacher, student = logits(2), logits(3)
    whole = divergence(teacher, student, DistillSpec(loss=kind))
    values = [divergence(teacher, student, DistillSpec(loss=kind, top_k=k)) for k in (1, 3, 10, 11)]
    for smaller, larger in itertools.pairwise(values):  # data processing: merging tokens loses divergence
        assert (smaller <= larger + 1e-12).all()
    torch.testing.assert_close(values[2], whole)  # ten tokens and the eleventh alone
    torch.testing.assert_close(values[3], whole)
    same = divergence(teacher, teacher, DistillSpec(loss=kind, top_k=3))
    assert same.abs().max() < 1e-12


def test_chunks_give_the_loss_and_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(50, 16, 1, 2, 2, 8, 32)
    student = build_model(shape, "cpu", 0).double()
    teacher = build_model(ModelShape(53, 24, 1, 2, 2, 12, 32, logit_cap=5.0), "cpu", 1).double().requires_grad_(False)
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    weights = (torch.arange(9) > 2).double().expand(2, 9)
    objective = Distill(DistillSpec(next_token=0.3, temperature=1.5))
    objective.models = {"teacher": teacher}
    results = []
    for limit in (1 << 30, 8 * 103 * 4):
        monkeypatch.setattr(distill, "CHUNK_BYTES", limit)
        feed = ModelInputs(tokens, tokens.roll(-1, 1), weights, AttentionMask(), float(weights.sum()))
        terms = objective.loss(student, feed, feed.count)
        student.zero_grad()
        terms.loss.backward()
        results.append([terms.loss.detach(), terms.nll_BT, *(p.grad.clone() for p in student.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)
    hidden = student(tokens), teacher(tokens)
    s, t = student.logits(hidden[0]), teacher.logits(hidden[1])[..., :50]
    nll = F.cross_entropy(s.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="none").view(2, 9)
    expected = 0.3 * nll + 0.7 * divergence(t.flatten(0, 1), s.flatten(0, 1), objective.spec).view(2, 9)
    torch.testing.assert_close(results[0][0], (expected * weights).sum() / weights.sum())
    assert float(terms.metrics["nll"][0]) == pytest.approx(float((nll.detach() * weights).sum()))
    assert all(parameter.grad is None for parameter in teacher.parameters())
