"""The gradient noise scale of McCandlish et al. 2018: how large a batch still pays.

Small batches of b tokens and the large one of B that they make up give unbiased estimates of the true gradient's square
and of the noise: E|g_b|^2 = |G|^2 + S / b, and the same with B. Their quotient B_simple = S / |G|^2 is in tokens.
Costs a forward and backward pass over every batch, and one more copy of the gradients.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean

import torch
from torch import Tensor

from bessemer.diagnose.report import Report
from bessemer.diagnose.subject import Subject
from bessemer.observe.plot import Lines


@dataclass(frozen=True)
class NoiseScale:
    """In tokens, with a confidence interval; `high` is infinite where the gradient cannot be told from noise."""

    tokens: float
    low: float
    high: float
    confidence: float
    gradient_square: float  # |G|^2
    noise_trace: float  # tr(Sigma) of one token
    small: float  # mean tokens in a small batch
    large: float
    samples: list[tuple[float, float]]  # (|G|^2, S) of each large batch


def estimate(small: list[tuple[float, float]], large: tuple[float, float]) -> tuple[float, float]:
    """Unbiased (|G|^2, S) from (tokens, gradient square) of small batches and of the large one that they make up."""
    squares, inverse = fmean(square for _, square in small), fmean(1 / tokens for tokens, _ in small)
    noise = (squares - large[1]) / (inverse - 1 / large[0])
    return large[1] - noise / large[0], noise


def interval(samples: list[tuple[float, float]], confidence: float = 0.95) -> tuple[float, float]:
    """Fieller's interval of the quotient of two means. It is unbounded above, honestly, where the denominator is not
    certainly positive; a bootstrap would print some number there."""
    n = len(samples)
    gradient, noise = fmean(g for g, _ in samples), fmean(s for _, s in samples)
    if n < 2:
        return 0.0, math.inf
    gg = sum((g - gradient) ** 2 for g, _ in samples) / (n - 1) / n
    ss = sum((s - noise) ** 2 for _, s in samples) / (n - 1) / n
    gs = sum((g - gradient) * (s - noise) for g, s in samples) / (n - 1) / n
    t = student(confidence, n - 1)
    # Quotients r with (noise - r gradient)^2 <= t^2 (ss - 2 r gs + r^2 gg): between the roots of a parabola.
    a, b, c = gradient**2 - t * t * gg, gradient * noise - t * t * gs, noise**2 - t * t * ss
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0 and gradient > 0:
        return max(0.0, (b - root) / a), (b + root) / a
    return max(0.0, (b - root) / a) if a < 0 and root else 0.0, math.inf


def student(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, by the Cornish-Fisher series (within 1 % from 4 degrees of freedom)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = [z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return sum(term / freedom**k for k, term in enumerate(terms))


def noise_scale(subject: Subject, steps: list[int], fewest: int = 4, confidence: float = 0.95) -> NoiseScale:
    """From the micro-batches of some steps. Steps are joined until a large batch has at least `fewest` small ones."""
    named = subject.named()
    total = [torch.zeros_like(p, dtype=torch.float32) for _, p in named]
    small: list[tuple[float, Tensor]] = []
    found, sizes, large = [], [], []
    for step in steps:
        for part in subject.parts(step, None):
            if not part.tokens:
                continue  # a row of padding
            subject.model.zero_grad(set_to_none=True)
            part.loss.backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for _, p in named if p.grad is not None]
            small.append((part.tokens, torch.nn.utils.get_total_norm(grads).float() / part.share))
            for sums, (_, p) in zip(total, named, strict=True):
                if p.grad is not None:
                    sums.add_(p.grad, alpha=part.tokens / part.share)  # the mean gradient, by its tokens
        if len(small) < fewest:
            continue
        tokens = sum(count for count, _ in small)
        whole = torch.nn.utils.get_total_norm(total) / tokens
        norms = torch.stack([norm for _, norm in small]).tolist()
        pairs = [(count, norm**2) for (count, _), norm in zip(small, norms, strict=True)]
        found.append(estimate(pairs, (tokens, float(whole) ** 2)))
        sizes.append(tokens / len(small))
        large.append(tokens)
        small = []
        torch._foreach_zero_(total)
    subject.model.zero_grad(set_to_none=True)
    if not found:
        raise ValueError(f"{len(steps)} steps have fewer than {fewest} micro-batches: examine more")
    gradient, noise = fmean(g for g, _ in found), fmean(s for _, s in found)
    low, high = interval(found, confidence)
    scale = noise / gradient if gradient > 0 else math.inf
    return NoiseScale(scale, low, high, confidence, gradient, noise, fmean(sizes), fmean(large), found)


def report(found: NoiseScale, batch: float, where: str) -> Report:
    """`batch` is the run's, in tokens."""
    span = f"{found.low:,.0f} to " + (f"{found.high:,.0f}" if math.isfinite(found.high) else "unbounded")
    said = [f"Noise scale {found.tokens:,.0f} tokens ({found.confidence:.0%} interval {span})."]
    if math.isfinite(found.tokens) and found.tokens > 0:
        steps, data = 1 + found.tokens / batch, 1 + batch / found.tokens
        said.append(
            f"A batch of {batch:,.0f} tokens needs {steps:.2g} times the fewest possible steps, and {data:.2g} times "
            "the least possible data (at the noise scale both are 2)."
        )
    if found.low > batch:
        said.append("The batch is below the interval: doubling it would nearly halve the steps.")
    elif found.high < batch:
        said.append("The batch is above the interval: a smaller one would learn nearly as much a step, from less data.")
    else:
        said.append("The batch lies within the interval: it fits. More --batches narrow the interval.")
    said.append("B_simple ignores curvature and Adam's scaling, and grows as the loss falls: read it as an order.")
    order = [float(i) for i in range(len(found.samples))]
    series = {"|G|^2": [g for g, _ in found.samples], "S / batch": [s / batch for _, s in found.samples]}
    figure = Lines("Estimates of each large batch", order, series, "large batch")
    return Report(f"Gradient noise scale, {where}", said, {**asdict(found), "batch": batch}, figures=[figure])
