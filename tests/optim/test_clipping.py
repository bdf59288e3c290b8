"""Clipping, centralization and noise against their papers, written out with Python numbers."""

import math

import pytest
import torch
from torch import nn

from bessemer.optim.clipping import GradientClipper, normal_noise
from bessemer.spec.optimizer import OptimizerSpec

SHAPES = ((4, 3), (5,), (2, 6))
ACCEPT, REJECT = torch.zeros(()), torch.ones(())


def made(**spec):
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    return parameters, GradientClipper(OptimizerSpec(**spec), parameters, {}, seed=4)


def give(parameters, size, seed=1):
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = size * torch.randn(parameter.shape, generator=draw)
    return [p.grad.clone() for p in parameters]


def norm_of(grads):
    return torch.cat([g.flatten() for g in grads]).norm()


def clipped(parameters, clipper, limit, reject=ACCEPT, scale=1.0, step=0):
    """The gradients that an optimizer would use."""
    norm = norm_of([p.grad for p in parameters]) / scale
    divisor, share = clipper.clip(norm, limit, torch.tensor(scale), reject, step)
    return [p.grad / divisor for p in parameters], float(share)


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("kind", ["norm", "value", "parameter"])
def test_equals_torch(kind, scale):
    parameters, clipper = made(clipping=kind)
    grads = give(parameters, 2.0 * scale)
    theirs = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, grad in zip(theirs, grads, strict=True):
        parameter.grad = grad / scale
    if kind == "value":
        nn.utils.clip_grad_value_(theirs, 1.5)
    for group in [theirs] if kind == "norm" else [[p] for p in theirs] if kind == "parameter" else []:
        nn.utils.clip_grad_norm_(group, 1.5)
    ours, share = clipped(parameters, clipper, 1.5, scale=scale)
    for found, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=2e-6, atol=1e-7)
    elements = [(g / scale).abs() > 1.5 for g in grads]
    shares = {"norm": 1.0, "parameter": 1.0, "value": float(torch.cat([e.flatten() for e in elements]).float().mean())}
    assert share == pytest.approx(shares[kind])


def test_agc_bounds_the_rows_of_a_gradient():
    parameters, clipper = made(clipping="agc")
    grads = give(parameters, 0.05)
    ours, share = clipped(parameters, clipper, 1.0)
    for found, grad, weight in zip(ours, grads, parameters, strict=True):
        rows = zip(*(x.reshape(len(x) if x.ndim > 1 else 1, -1) for x in (found, grad, weight.detach())), strict=True)
        for row, before, of_weight in rows:
            most = 0.01 * max(1e-3, float(of_weight.norm()))
            factor = min(1.0, most / float(before.norm()))
            torch.testing.assert_close(row, before * factor, rtol=1e-5, atol=1e-8)
    assert 0 < share <= 1


def norms(steps):
    return [1 + 0.1 * math.sin(5 * step) + (20.0 if step in (40, 41, 90) else 0.0) for step in range(steps)]


def test_zclip_is_its_paper_and_a_rejected_step_teaches_nothing():
    parameters, clipper = made(clipping="zclip")
    seen, mean, variance = [], 0.0, 0.0
    for step, size in enumerate(norms(120)):
        grads = give(parameters, 1.0, step)
        factor = size / float(norm_of(grads))
        for p in parameters:
            p.grad *= factor
        rejected = step in (41, 60)
        ours, _ = clipped(parameters, clipper, 30.0, REJECT if rejected else ACCEPT)
        limit = size
        if len(seen) >= 25:
            z = (size - mean) / math.sqrt(variance)
            limit = mean + 2.5 / (z / 2.5) * math.sqrt(variance) if z > 2.5 else size
        assert float(norm_of(ours)) == pytest.approx(min(size, limit), rel=1e-4), step
        if rejected:
            continue
        seen.append(min(size, limit))
        if len(seen) <= 25:
            mean = sum(seen) / len(seen)
            variance = sum((x - mean) ** 2 for x in seen) / len(seen)
        else:
            mean = 0.97 * mean + 0.03 * seen[-1]
            variance = 0.97 * variance + 0.03 * (seen[-1] - mean) ** 2
    assert float(clipper.mean) == pytest.approx(mean, rel=1e-4)


def test_adagc_is_its_paper_and_goes_on_after_a_resume():
    parameters, clipper = made(clipping="adagc")
    limits = [math.inf] * len(SHAPES)
    for step, size in enumerate(norms(140)):
        grads = give(parameters, size / 3, step)
        if step == 120:
            parameters, resumed = made(clipping="adagc")
            for name, tensor in resumed.state().items():
                tensor.copy_(clipper.state()[name])
            clipper = resumed
            grads = give(parameters, size / 3, step)
        ours, _ = clipped(parameters, clipper, 1.0)
        whole = float(norm_of(grads))
        for k, (found, grad) in enumerate(zip(ours, grads, strict=True)):
            length = float(grad.norm())
            used = length * min(1.0, 1 / whole) if step < 100 else min(length, 1.05 * limits[k])
            assert float(found.norm()) == pytest.approx(used, rel=1e-4), step
            limits[k] = min(limits[k], used) if step < 100 else 0.98 * limits[k] + 0.02 * used
    torch.testing.assert_close(clipper.limits_P, torch.tensor(limits), rtol=1e-4, atol=1e-6)


def test_centralized_gradients_have_rows_without_a_mean():
    parameters, clipper = made(centralize=True)
    grads = give(parameters, 1.0)
    clipped(parameters, clipper, 1e9)
    for parameter, grad in zip(parameters, grads, strict=True):
        expected = grad - grad.mean(1, keepdim=True) if grad.ndim > 1 else grad
        torch.testing.assert_close(parameter.grad, expected)


def test_noise_is_normal_falls_and_does_not_depend_on_the_sharding():
    like = torch.zeros(200, 100)
    noise = normal_noise(like, 3, 7, 2, 0)
    assert abs(float(noise.mean())) < 0.02 and float(noise.std()) == pytest.approx(1.0, abs=0.02)
    assert float((noise.abs() > 1.96).float().mean()) == pytest.approx(0.05, abs=0.01)
    assert torch.equal(normal_noise(like[50:], 3, 7, 2, 50 * 100), noise[50:])
    assert not torch.equal(normal_noise(like, 3, 8, 2, 0), noise)
    sizes = []
    for step in (0, 99):
        parameters, clipper = made(noise=0.5)
        grads = give(parameters, 1.0)
        clipped(parameters, clipper, 1e9, step=step)
        sizes.append(float(norm_of([p.grad - g for p, g in zip(parameters, grads, strict=True)])))
    assert sizes[1] / sizes[0] == pytest.approx(100**-0.55, rel=0.6)
