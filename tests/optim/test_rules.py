"""Bessemer's own optimizers against their references for 100 steps in float64: torch, the paper written out, or the
code of its authors written out."""

import math

import pytest
import torch
from torch import nn

from bessemer.optim.choose import make_optimizer
from bessemer.optim.muon import COEFFICIENTS, newton_schulz
from bessemer.spec.optimizer import MuonSpec, OptimizerSpec

SHAPES = {"wide": (5, 7), "tall": (8, 3), "vector": (6,), "twin": (5, 7)}
STEPS = 100
TOKENS = 64.0  # in the mean whose gradient is that of sampled labels


def weights(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradient(step, name):
    draw = torch.Generator().manual_seed(1000 * step + len(name) + ord(name[0]))
    return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64) * (1 + 0.1 * math.sin(step))


def sampled_gradient(step, name):
    """Of labels drawn from the model's own logits."""
    return gradient(5000 + step, name) / 10


def rate(step):
    return 0.02 * (1 + math.cos(step / 40))


def ours(**spec):
    """Weights after each step of our optimizer."""
    named = {name: nn.Parameter(tensor) for name, tensor in weights().items()}
    optimizer = make_optimizer(named.items(), OptimizerSpec(**spec))
    assert optimizer.fallback_reason is None
    for step in range(STEPS):
        if optimizer.curvature_due(step):
            for name, parameter in named.items():
                parameter.grad = sampled_gradient(step, name) * 4
            # One that is rejected leaves nothing behind.
            optimizer.follow_curvature(9.0, torch.ones(()), torch.tensor(2.0))
            optimizer.follow_curvature(TOKENS, torch.zeros(()), torch.tensor(4.0))
        for name, parameter in named.items():
            parameter.grad = gradient(step, name) * 2
        optimizer.step(rate(step), torch.zeros(()), torch.tensor(2.0))
        yield {name: parameter.detach().clone() for name, parameter in named.items()}, optimizer


def same(theirs, **spec):
    for (found, _), wanted in zip(ours(**spec), theirs, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-10)


def of_torch(kind, decay=0.0, **settings):
    named = {name: nn.Parameter(tensor) for name, tensor in weights().items()}
    groups = [{"params": [p], "weight_decay": decay if p.ndim > 1 else 0.0, "lr": 0.0} for p in named.values()]
    optimizer = kind(groups, **settings)
    for step in range(STEPS):
        for (name, parameter), group in zip(named.items(), optimizer.param_groups, strict=True):
            parameter.grad, group["lr"] = gradient(step, name), rate(step)
        optimizer.step()
        yield {name: parameter.detach().clone() for name, parameter in named.items()}


def by_hand(update, **fresh):
    """`update(w, g, state, t, lr)` changes the state and returns the new weight."""
    w, state = weights(), {name: {} for name in SHAPES}
    for step in range(STEPS):
        w = {name: update(w[name], gradient(step, name), state[name], step + 1, rate(step)) for name in SHAPES}
        yield w


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_equals_torch(decay):
    same(of_torch(torch.optim.Adafactor, decay), name="adafactor", weight_decay=decay)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_torch(nesterov):
    theirs = of_torch(torch.optim.SGD, 0.1, momentum=0.9, nesterov=nesterov)
    same(theirs, name="sgd", weight_decay=0.1, nesterov=nesterov)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_and_adamw_equal_the_papers(decoupled):
    def update(w, g, state, t, lr):
        decay = 0.1 if w.ndim > 1 else 0.0
        g = g if decoupled else g + decay * w
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        state["v"] = 0.95 * state.get("v", 0) + 0.05 * g**2
        r = state["m"] / (1 - 0.9**t) / ((state["v"] / (1 - 0.95**t)) ** 0.5 + 1e-8)
        return w - lr * (r + (decay * w if decoupled else 0))

    same(by_hand(update), name="adamw" if decoupled else "adam", weight_decay=0.1)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_equals_the_paper(decay):
    def update(w, g, state, t, lr):
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
        r = state["m"] / (1 - 0.9**t) / ((state["v"] / (1 - 0.999**t)) ** 0.5 + 1e-6)
        r = r + (decay if w.ndim > 1 else 0) * w
        return w - lr * w.norm() / r.norm() * r

    same(by_hand(update), name="lamb", weight_decay=decay)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_equals_the_paper(decay):
    def update(w, g, state, t, lr):
        wd, trust = (decay, 1e-3 * w.norm() / (g.norm() + decay * w.norm())) if w.ndim > 1 else (0, 1)
        state["m"] = 0.9 * state.get("m", 0) + trust * (g + wd * w)
        return w - lr * state["m"]

    same(by_hand(update), name="lars", weight_decay=decay)


def test_sm3_equals_the_paper():
    def update(w, g, state, t, lr):
        nu = torch.empty_like(w)
        sums = state.setdefault("sums", [torch.zeros(n, dtype=w.dtype) for n in w.shape])
        for index in torch.cartesian_prod(*(torch.arange(n) for n in w.shape)).view(-1, w.ndim).tolist():
            nu[tuple(index)] = min(acc[i] for acc, i in zip(sums, index, strict=True)) + g[tuple(index)] ** 2
        state["sums"] = [torch.stack([nu.select(axis, i).max() for i in range(n)]) for axis, n in enumerate(w.shape)]
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * g / nu.sqrt()
        return w - lr * state["m"]

    same(by_hand(update), name="sm3")


def test_schedule_free_equals_the_paper():
    """z moves, x averages it with weights lr^2, gradients are taken at y = 0.1 z + 0.9 x."""
    averages = []

    def update(y, g, state, t, lr):
        x, z = state.get("x", y), state.get("z", y)
        state["v"] = 0.99 * state.get("v", 0) + 0.01 * g**2
        state["top"] = max(lr, state.get("top", 0.0))
        state["sum"] = state.get("sum", 0.0) + state["top"] ** 2
        direction = g / ((state["v"] / (1 - 0.99**t)) ** 0.5 + 1e-8) + (0.1 if y.ndim > 1 else 0) * y
        state["z"] = z - lr * direction
        c = state["top"] ** 2 / state["sum"]
        state["x"] = (1 - c) * x + c * state["z"]
        averages.append(state["x"])
        return 0.1 * state["z"] + 0.9 * state["x"]

    same(by_hand(update), name="schedule_free")
    *_, (_, optimizer) = ours(name="schedule_free")
    found = [optimizer.optimizers[0].state[parameter]["x"] for parameter in optimizer.shards]
    for tensor, wanted in zip(found, averages[-len(SHAPES) :], strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-10)


def test_sophia_equals_the_paper():
    """Algorithm 3 of arXiv:2305.14342 with the estimate of algorithm 2; some elements reach the limit."""
    limited = []

    def theirs():
        w, state = weights(), {name: {"m": 0.0, "h": 0.0} for name in SHAPES}
        for step in range(STEPS):
            for name, s in state.items():
                s["m"] = 0.96 * s["m"] + 0.04 * gradient(step, name)
                if step % 10 == 0:
                    s["h"] = 0.99 * s["h"] + 0.01 * TOKENS * sampled_gradient(step, name) ** 2
                ratio = s["m"] / torch.clamp(0.5 * s["h"], min=1e-12)
                limited.append((ratio.abs() > 1).double().mean())
                w[name] = w[name] - rate(step) * (0.2 if w[name].ndim > 1 else 0.0) * w[name]
                w[name] = w[name] - rate(step) * ratio.clamp(-1, 1)
            yield dict(w)

    same(theirs(), name="sophia", gamma=0.5)
    assert 0.05 < torch.stack(limited).mean() < 0.95


def test_soap_equals_its_authors_code():
    """github.com/nikhilvyas/SOAP, without its rounding to fp32, in the order of its operations."""

    def project(x, bases, back=False):
        for axis, q in enumerate(bases):
            x = torch.tensordot(x, q, dims=[[0], [1 if back else 0]]) if axis < 2 else x
        return x

    def update(w, g, state, t, lr):
        matrix = w.ndim == 2
        if not state:
            state |= {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "Q": [], "n": 0}
            # Bit for bit: eigenvectors of a covariance that lacks rank are not unique.
            state["GG"] = [torch.lerp(0 * a, a, 1 - 0.95) for a in (g @ g.T, g.T @ g)] if matrix else []
            state["Q"] = [torch.linalg.eigh(gg + 1e-30 * torch.eye(len(gg)))[1].flip(1) for gg in state["GG"]]
            return w
        state["n"] += 1
        n, projected = state["n"], project(g, state["Q"])
        state["m"] = 0.95 * state["m"] + 0.05 * projected
        state["v"] = 0.95 * state["v"] + 0.05 * projected**2
        size = lr * (1 - 0.95**n) ** 0.5 / (1 - 0.95**n)
        w = w - size * project(state["m"] / (state["v"].sqrt() + 1e-8), state["Q"], back=True)
        w = w - lr * (0.01 if matrix else 0.0) * w
        state["m"] = project(state["m"], state["Q"], back=True)
        if matrix:
            state["GG"] = [torch.lerp(a, b, 1 - 0.95) for a, b in zip(state["GG"], (g @ g.T, g.T @ g), strict=True)]
        if n % 10 == 0:
            for axis, (gg, q) in enumerate(zip(state["GG"], state["Q"], strict=True)):
                order = torch.argsort(torch.diag(q.T @ gg @ q), descending=True)
                state["v"] = state["v"].index_select(axis, order)
                state["Q"][axis] = torch.linalg.qr(gg @ q[:, order])[0]
        state["m"] = project(state["m"], state["Q"])
        return w

    same(by_hand(update), name="soap")


def muon_by_hand(coefficients, shrink, scale, nesterov, decay, cautious, others):
    def update(w, g, state, t, lr):
        state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
        u = 0.05 * g + 0.95 * state["m"] if nesterov else state["m"]
        x = u / u.norm() / shrink
        x = x.T if x.shape[0] > x.shape[1] else x
        for a, b, c in coefficients:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if u.shape[0] > u.shape[1] else x
        mask = (x * w > 0).double() if cautious else 1.0
        return w - lr * decay * mask * w - lr * scale(*w.shape) * x

    state = {name: {} for name in SHAPES}
    current = weights()
    for step, other in enumerate(others):
        for name in SHAPES:
            hidden = len(SHAPES[name]) == 2
            fresh = update(current[name], gradient(step, name), state[name], step + 1, rate(step)) if hidden else None
            current[name] = fresh if hidden else other[name]
        yield dict(current)


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize(("scale", "nesterov", "cautious"), [("rms", True, False), ("spectral", False, True)])
def test_muon_equals_the_paper(kind, scale, nesterov, cautious):
    """AdamW updates the vector. Matrices of one shape are iterated together."""
    scales = {"rms": lambda m, n: 0.2 * max(m, n) ** 0.5, "spectral": lambda m, n: max(1, m / n) ** 0.5}
    others = of_torch(torch.optim.AdamW, 0.1, betas=(0.9, 0.95))
    theirs = muon_by_hand(*COEFFICIENTS[kind], scales[scale], nesterov, 0.1, cautious, others)
    muon = MuonSpec(orthogonalize=kind, precision="fp64", scale=scale, cautious=cautious)
    same(theirs, name="muon", muon=muon, nesterov=nesterov, weight_decay=0.1)


def test_muon_in_bf16_equals_torch_s():
    """torch's has no other precision; products of 5 numbers round alike."""
    others = list(of_torch(torch.optim.AdamW, 0.1, betas=(0.9, 0.95)))
    named = {name: nn.Parameter(tensor) for name, tensor in weights().items() if tensor.ndim == 2}
    theirs = torch.optim.Muon(named.values(), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step, (found, _) in enumerate(ours(name="muon", muon=MuonSpec(precision="bf16"))):
        for name, parameter in named.items():
            parameter.grad = gradient(step, name)
        theirs.param_groups[0]["lr"] = rate(step)
        theirs.step()
        torch.testing.assert_close(found["vector"], others[step]["vector"], rtol=1e-10, atol=1e-10)
        for name, parameter in named.items():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("kind", "low", "high"), [("keller", 0.68, 1.14), ("polar_express", 0.85, 1.15)])
def test_singular_values_end_near_one(kind, low, high):
    draw = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(24, 24, generator=draw, dtype=torch.float64))
    matrix = u @ torch.diag(torch.logspace(0, -2, 24, dtype=torch.float64)) @ v
    values = torch.linalg.svdvals(newton_schulz(matrix[None], kind)[0])
    assert low < values.min() and values.max() < high


def test_exact_coefficients_give_the_orthogonal_factor():
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 9, generator=draw, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(newton_schulz(matrix[None], "exact")[0], u @ v, rtol=1e-9, atol=1e-9)
    fp32 = newton_schulz(matrix[None], "exact", torch.float32)[0].double()
    assert 1e-9 < (fp32 - u @ v).norm() / (u @ v).norm() < 1e-5
