"""Gradient flow (does a layer's gradient vanish or explode?) and the gradient noise scale (how large a batch pays?).

The flow costs `steps` forward and backward passes and the memory of the gradients; all norms are read from the device
at once. The noise scale follows McCandlish et al. 2018: small batches of b tokens and the large batch of B tokens that
they form give unbiased estimates of the squared gradient and of the noise: E|g_b|^2 = |G|^2 + S / b, and the same with
B. Their quotient B_simple = S / |G|^2 is in tokens. It costs a pass over every batch and a copy of the gradients.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean

import torch
from torch import Tensor

from bessemer.diagnose.report import InspectedModel, InspectionReport, backward_step
from bessemer.observe.figure import LineChart
from bessemer.plan.batch_ramp import split_noise
from bessemer.run.finding import Finding

VANISHED = 1e-4  # of the median matrix's gradient rms: such a layer learns nothing
EXPLODED = 100.0  # times the weight's norm: after clipping, only this layer is trained
TREND = 100.0  # factor over the depth of the model
_DEPTH = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class GradientFlow:
    """One parameter over the steps. Norms are Euclidean; mean and largest are of single elements."""

    name: str
    elements: int
    grad_norm: float  # mean over steps
    grad_norm_max: float  # over steps
    weight_norm: float
    ratio: float  # gradient over weight norm
    mean: float  # of |g|
    largest: float  # |g|
    matrix: bool

    @property
    def rms(self) -> float:
        return self.grad_norm / math.sqrt(self.elements)


def measure_gradient_flow(subject: InspectedModel, steps: list[int]) -> list[GradientFlow]:
    """The flow of every parameter, in the model's order. Clears the gradients."""
    named = subject.trainable()
    measured: list[Tensor] = []
    for step in steps:
        backward_step(subject, step)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
        measured.append(torch.stack([_measure(grad) for grad in grads]).cpu())
    subject.model.zero_grad(set_to_none=True)
    weights = torch.stack([p.detach().float().norm() for _, p in named]).tolist()
    steps_NP3 = torch.stack(measured).double()
    mean_P3, largest_P3 = steps_NP3.mean(0).tolist(), steps_NP3.amax(0).tolist()
    return [
        GradientFlow(
            name, p.numel(), mean[0], largest[0], weight, mean[0] / weight if weight else math.inf, mean[1],
            largest[2], p.ndim > 1,
        )
        for (name, p), mean, largest, weight in zip(named, mean_P3, largest_P3, weights, strict=True)
    ]  # fmt: skip


def _measure(grad: Tensor) -> Tensor:
    grad = grad.float()
    return torch.stack((grad.norm(), grad.abs().mean(), grad.abs().amax()))


def check_gradients(flows: list[GradientFlow]) -> list[Finding]:
    """Parameters whose gradient is not finite, zero or far below the others, and a trend over the depth."""
    findings = []
    nonfinite = [flow.name for flow in flows if not math.isfinite(flow.grad_norm_max)]
    if nonfinite:
        fix = "`bessemer inspect nan` names the module."
        findings.append(
            Finding(f"non-finite gradients in {_names(nonfinite)}", {"parameters": nonfinite}, "", 1.0, fix)
        )
    matrices = [flow for flow in flows if flow.matrix and math.isfinite(flow.grad_norm)]
    usual = statistics.median(flow.rms for flow in matrices) if matrices else 0.0
    if vanished := [flow.name for flow in matrices if flow.rms <= VANISHED * usual]:
        cause = f"Their gradients are under {VANISHED:g} of the median matrix's, or zero: they do not learn."
        findings.append(Finding(f"vanishing gradients in {_names(vanished)}", {"parameters": vanished}, cause, 0.9))
    if large := [flow.name for flow in flows if EXPLODED < flow.ratio < math.inf]:
        cause = f"Their gradients are over {EXPLODED:g} times as long as their weights."
        findings.append(Finding(f"exploding gradients in {_names(large)}", {"parameters": large}, cause, 0.7))
    if (trend := depth_trend(matrices)) is not None and not 1 / TREND <= trend <= TREND:
        kind = "vanishing" if trend > 1 else "exploding"
        symptom = f"{kind} gradients: the last block's are {trend:.2g} times the first block's"
        fix = "Check initial scale, normalisation and residual paths."
        findings.append(Finding(symptom, {"last_over_first": trend}, "", 0.8, fix))
    return findings


def depth_trend(flows: list[GradientFlow]) -> float | None:
    """Gradient rms of the last block over that of the first, from a line through the logarithms."""
    points = [(int(m[1]), math.log(f.rms)) for f in flows if (m := _DEPTH.search(f.name)) and f.rms > 0]
    depths = [float(depth) for depth, _ in points]
    if len(set(depths)) < 2:
        return None
    slope = statistics.linear_regression(depths, [value for _, value in points]).slope
    return math.exp(slope * (max(depths) - min(depths)))


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def gradient_report(flows: list[GradientFlow], label: str) -> InspectionReport:
    findings = check_gradients(flows)
    order = [float(i) for i in range(len(flows))]
    series = {"gradient norm": [f.grad_norm for f in flows], "weight norm": [f.weight_norm for f in flows]}
    figure = LineChart("Gradient flow", order, series, "parameter, in the model's order", log_y=True)
    rows = [(f.name, f.grad_norm, f.grad_norm_max, f.weight_norm, f.ratio, f.mean, f.largest) for f in flows]
    columns = ("parameter", "grad norm", "largest", "weight norm", "ratio", "mean |g|", "max |g|")
    conclusions = [] if findings else ["No gradient vanishes or explodes."]
    return InspectionReport(
        f"Gradient flow, {label}",
        conclusions,
        {"parameters": [asdict(f) for f in flows]},
        columns,
        rows,
        [figure],
        findings,
    )


@dataclass(frozen=True)
class NoiseScale:
    """The scale in tokens, with a confidence interval; `high` is infinite if the gradient is lost in the noise."""

    tokens: float
    low: float
    high: float
    confidence: float
    gradient_square: float  # |G|^2
    noise_trace: float  # tr(Sigma) of one token
    small: float  # mean tokens in a small batch
    large: float
    samples: list[tuple[float, float]]  # (|G|^2, S) of each large batch


def estimate_noise(small: list[tuple[float, float]], large: tuple[float, float]) -> tuple[float, float]:
    """Unbiased (|G|^2, S) from (tokens, squared gradient) of small batches and of the large one that they form."""
    squares, inverse = fmean(square for _, square in small), fmean(1 / tokens for tokens, _ in small)
    return split_noise(1 / inverse, squares, *large)


def fieller_interval(samples: list[tuple[float, float]], confidence: float = 0.95) -> tuple[float, float]:
    """Fieller's interval of the quotient of two means. It is unbounded above if the denominator is not significantly
    positive; a bootstrap would print some number there."""
    n = len(samples)
    gradient, noise = fmean(g for g, _ in samples), fmean(s for _, s in samples)
    if n < 2:
        return 0.0, math.inf
    gg = sum((g - gradient) ** 2 for g, _ in samples) / (n - 1) / n
    ss = sum((s - noise) ** 2 for _, s in samples) / (n - 1) / n
    gs = sum((g - gradient) * (s - noise) for g, s in samples) / (n - 1) / n
    t = student_quantile(confidence, n - 1)
    # Quotients r with (noise - r gradient)^2 <= t^2 (ss - 2 r gs + r^2 gg): between the roots of a parabola.
    a, b, c = gradient**2 - t * t * gg, gradient * noise - t * t * gs, noise**2 - t * t * ss
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0 and gradient > 0:
        return max(0.0, (b - root) / a), (b + root) / a
    return max(0.0, (b - root) / a) if a < 0 and root else 0.0, math.inf


def student_quantile(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, by the Cornish-Fisher series (within 1 % from 4 degrees of freedom)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = [z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return sum(term / freedom**k for k, term in enumerate(terms))


def measure_noise_scale(
    subject: InspectedModel, steps: list[int], fewest: int = 4, confidence: float = 0.95
) -> NoiseScale:
    """The scale of these steps, which are joined until a large batch has at least `fewest` micro-batches."""
    named = subject.trainable()
    total = [torch.zeros_like(p, dtype=torch.float32) for _, p in named]
    small: list[tuple[float, Tensor]] = []
    samples, sizes, large = [], [], []
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
        norm = torch.nn.utils.get_total_norm(total) / tokens
        norms = torch.stack([small_norm for _, small_norm in small]).tolist()
        pairs = [(count, small_norm**2) for (count, _), small_norm in zip(small, norms, strict=True)]
        samples.append(estimate_noise(pairs, (tokens, float(norm) ** 2)))
        sizes.append(tokens / len(small))
        large.append(tokens)
        small = []
        torch._foreach_zero_(total)
    subject.model.zero_grad(set_to_none=True)
    if not samples:
        raise ValueError(f"{len(steps)} steps have fewer than {fewest} micro-batches: examine more")
    gradient, noise = fmean(g for g, _ in samples), fmean(s for _, s in samples)
    low, high = fieller_interval(samples, confidence)
    scale = noise / gradient if gradient > 0 else math.inf
    return NoiseScale(scale, low, high, confidence, gradient, noise, fmean(sizes), fmean(large), samples)


def noise_report(scale: NoiseScale, batch: float, label: str) -> InspectionReport:
    """`batch` is the run's, in tokens."""
    span = f"{scale.low:,.0f} to " + (f"{scale.high:,.0f}" if math.isfinite(scale.high) else "unbounded")
    conclusions = [f"Noise scale {scale.tokens:,.0f} tokens ({scale.confidence:.0%} interval {span})."]
    if math.isfinite(scale.tokens) and scale.tokens > 0:
        steps, data = 1 + scale.tokens / batch, 1 + batch / scale.tokens
        conclusions.append(
            f"A batch of {batch:,.0f} tokens needs {steps:.2g} times the fewest possible steps, and {data:.2g} times "
            "the least possible data (at the noise scale both are 2)."
        )
    if scale.low > batch:
        conclusions.append("The batch is below the interval: doubling it would nearly halve the steps.")
    elif scale.high < batch:
        conclusions.append(
            "The batch is above the interval: a smaller one would learn nearly as much a step, from less data."
        )
    else:
        conclusions.append("The batch lies within the interval: it fits. More --batches narrow the interval.")
    conclusions.append(
        "B_simple ignores curvature and Adam's scaling, and grows as the loss falls: read it as an order."
    )
    order = [float(i) for i in range(len(scale.samples))]
    series = {"|G|^2": [g for g, _ in scale.samples], "S / batch": [s / batch for _, s in scale.samples]}
    figure = LineChart("Estimates of each large batch", order, series, "large batch")
    return InspectionReport(
        f"Gradient noise scale, {label}", conclusions, {**asdict(scale), "batch": batch}, figures=[figure]
    )
