"""Gradient flow: how large the gradient of every parameter is beside its weight, and whether it fades or explodes.

Costs `steps` forward and backward passes and the memory of the gradients; norms are taken one tensor at a time, and all
are read from the device at once.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bessemer.diagnose.report import Report
from bessemer.diagnose.subject import Subject, backward
from bessemer.observe.plot import Lines
from bessemer.run.finding import Finding

FADED = 1e-4  # of the median matrix's gradient rms: such a layer learns nothing beside the others
EXPLODED = 100.0  # times the weight's own norm: clipped or not, nothing but this layer is then trained
TREND = 100.0  # factor over the depth of the model
_DEPTH = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Flow:
    """Of one parameter, over the examined steps. Norms are Euclidean; mean and largest are of single elements."""

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


def flow(subject: Subject, steps: list[int]) -> list[Flow]:
    """In the model's order. Gradients are gone afterwards."""
    named = subject.named()
    seen: list[Tensor] = []
    for step in steps:
        backward(subject, step)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in named]
        seen.append(torch.stack([_measure(grad) for grad in grads]).cpu())
    subject.model.zero_grad(set_to_none=True)
    weights = torch.stack([p.detach().float().norm() for _, p in named]).tolist()
    steps_NP3 = torch.stack(seen).double()
    mean_P3, largest_P3 = steps_NP3.mean(0).tolist(), steps_NP3.amax(0).tolist()
    return [
        Flow(
            name, p.numel(), mean[0], largest[0], weight, mean[0] / weight if weight else math.inf, mean[1],
            largest[2], p.ndim > 1,
        )
        for (name, p), mean, largest, weight in zip(named, mean_P3, largest_P3, weights, strict=True)
    ]  # fmt: skip


def _measure(grad: Tensor) -> Tensor:
    grad = grad.float()
    return torch.stack((grad.norm(), grad.abs().mean(), grad.abs().amax()))


def judge(flows: list[Flow]) -> list[Finding]:
    """Parameters whose gradient is not finite, zero or faded beside the others, and a trend over the depth."""
    found = []
    sick = [flow.name for flow in flows if not math.isfinite(flow.grad_norm_max)]
    if sick:
        fix = "`bessemer inspect nan` names the module."
        found.append(Finding(f"non-finite gradients in {_names(sick)}", {"parameters": sick}, "", 1.0, fix))
    matrices = [flow for flow in flows if flow.matrix and math.isfinite(flow.grad_norm)]
    usual = statistics.median(flow.rms for flow in matrices) if matrices else 0.0
    if faded := [flow.name for flow in matrices if flow.rms <= FADED * usual]:
        cause = f"Their gradients are under {FADED:g} of the median matrix's, or zero: they do not learn."
        found.append(Finding(f"vanishing gradients in {_names(faded)}", {"parameters": faded}, cause, 0.9))
    if large := [flow.name for flow in flows if EXPLODED < flow.ratio < math.inf]:
        cause = f"Their gradients are over {EXPLODED:g} times as long as their weights."
        found.append(Finding(f"exploding gradients in {_names(large)}", {"parameters": large}, cause, 0.7))
    if (trend := depth_trend(matrices)) is not None and not 1 / TREND <= trend <= TREND:
        kind = "vanishing" if trend > 1 else "exploding"
        symptom = f"{kind} gradients: the last block's are {trend:.2g} times the first block's"
        fix = "Check initial scale, normalisation and residual paths."
        found.append(Finding(symptom, {"last_over_first": trend}, "", 0.8, fix))
    return found


def depth_trend(flows: list[Flow]) -> float | None:
    """Gradient rms of the last block over that of the first, from a straight line through the logarithms."""
    points = [(int(m[1]), math.log(f.rms)) for f in flows if (m := _DEPTH.search(f.name)) and f.rms > 0]
    depths = [float(depth) for depth, _ in points]
    if len(set(depths)) < 2:
        return None
    slope = statistics.linear_regression(depths, [value for _, value in points]).slope
    return math.exp(slope * (max(depths) - min(depths)))


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def report(flows: list[Flow], where: str) -> Report:
    findings = judge(flows)
    order = [float(i) for i in range(len(flows))]
    series = {"gradient norm": [f.grad_norm for f in flows], "weight norm": [f.weight_norm for f in flows]}
    figure = Lines("Gradient flow", order, series, "parameter, in the model's order", log_y=True)
    rows = [(f.name, f.grad_norm, f.grad_norm_max, f.weight_norm, f.ratio, f.mean, f.largest) for f in flows]
    columns = ("parameter", "grad norm", "largest", "weight norm", "ratio", "mean |g|", "max |g|")
    said = [] if findings else ["No gradient vanishes or explodes."]
    return Report(
        f"Gradient flow, {where}", said, {"parameters": [asdict(f) for f in flows]}, columns, rows, [figure], findings
    )
