"""A guarded optimizer is torch's own when it steps and nothing at all when it is vetoed: all of them, on every path."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bessemer.optim.choose import Lion, make_optimizer
from bessemer.optim.guarded import clip_divisor, weight_average
from bessemer.optim.muon import Muon
from bessemer.optim.rule_optimizer import RuleOptimizer
from bessemer.optim.rules import RULES
from bessemer.spec.optimizer import FUSED, SETTINGS, OptimizerSpec

LIMIT = 1.0
SHAPES = {"matrix": (7, 5), "cube": (2, 3, 4), "vector": (11,), "scalar": (), "embedding.weight": (13, 5)}
ACCEPT, REJECT = torch.tensor(0.0), torch.tensor(1.0)
DECAY = 0.1
NAMES = list(SETTINGS)
VARIANTS = [
    *({"name": name, "weight_decay": DECAY} for name in NAMES),
    {"name": "sgd", "momentum": 0.0},
    {"name": "sgd", "nesterov": True, "weight_decay": DECAY},
    {"name": "rmsprop", "momentum": 0.9},
]
# Every optimizer on every veto path that it has.
CASES = [
    {**variant, "veto": veto}
    for variant in VARIANTS
    for veto in ("fused", "host", "select")
    if (veto != "fused" or variant["name"] in FUSED) and (variant["name"], veto) != ("soap", "select")
]


def label(case):
    extras = [key for key in case if key in ("momentum", "nesterov")]
    return "-".join([case["name"], case["veto"], *extras])


def parameters(seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).to(device))
        for name, shape in SHAPES.items()
    }


def gradients(step, dtype=torch.float32, size=None):
    """Every third step's gradient is small enough not to be clipped."""
    size = size or (0.02 if step % 3 == 0 else 3.0)
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: size * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def give(named, values):
    for name, parameter in named.items():
        parameter.grad = values[name].clone().to(parameter.device)


def make(named, case):
    if case.get("veto", "fused") == "fused" and case.get("name") == "adagrad" and next(iter(named.values())).is_cuda:
        pytest.skip("torch has no fused Adagrad for CUDA: the probe falls back, with a reason")
    optimizer = make_optimizer(named.items(), OptimizerSpec(**case))
    # A path that its probe refuses would be tested as a host read otherwise.
    exists = case.get("veto") != "fused" or case["name"] in FUSED
    assert (optimizer.fallback_reason is None) == exists, optimizer.fallback_reason
    return optimizer


def advance(optimizer, named, step, lr=1e-2):
    give(named, gradients(step, next(iter(named.values())).dtype))
    accept = ACCEPT.to(next(iter(named.values())).device)
    optimizer.step(lr, accept, clip_divisor(optimizer.grad_norm(), LIMIT))


def bits(named, optimizer):
    state = {**{f"w.{k}": p.detach() for k, p in named.items()}, **optimizer.state()}
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def as_good_as_same(a, b, case):
    """CUDA's fused kernels divide by the scale in the same breath as they add weight decay: the last bit may differ."""
    if case["veto"] != "fused" or not next(iter(a.values())).is_cuda:
        return same(a, b)
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-6, atol=1e-7) for name in a)


CAPTURABLE = ("adamw", "adam", "rmsprop", "nadam", "radam", "adamax", "muon")  # muon: the AdamW beside it


class Bare:
    """torch's optimizers without a veto, written out by hand; they make their own state in their first step."""

    def __init__(self, named, case):
        self.named = named
        self.optimizers = [*self._made(case)]

    def _made(self, case):
        spec = OptimizerSpec(**case)
        own = spec.settings()
        how = {"fused": True} if case["veto"] == "fused" else {}
        on_gpu = next(iter(self.named.values())).is_cuda
        if case["veto"] == "select" and on_gpu and case["name"] in CAPTURABLE:
            how = {"capturable": True}
        adam = {"betas": tuple(own.get("betas", ())), "eps": own.get("eps")} | how
        everything = list(self.named)
        match case["name"]:
            case "adamw":
                yield torch.optim.AdamW(self.groups(own, everything), **adam)
            case "adam":
                yield torch.optim.Adam(self.groups(own, everything), **adam)
            case "sgd":
                yield torch.optim.SGD(
                    self.groups(own, everything), momentum=own["momentum"], nesterov=own["nesterov"], **how
                )
            case "adagrad":
                yield torch.optim.Adagrad(self.groups(own, everything), eps=1e-10, **how)
            case "rmsprop":
                yield torch.optim.RMSprop(self.groups(own, everything), momentum=own["momentum"], **how)
            case "nadam":
                yield torch.optim.NAdam(self.groups(own, everything), decoupled_weight_decay=True, **adam)
            case "radam":
                yield torch.optim.RAdam(self.groups(own, everything), decoupled_weight_decay=True, **adam)
            case "adamax":
                yield torch.optim.Adamax(self.groups(own, everything), **adam)
            case "lion":
                yield Lion(self.groups(own, everything), lr=0.0, betas=(0.9, 0.99))
            case "muon":
                yield Muon(self.groups(own, ["matrix"]), 0.95, True)
                yield torch.optim.AdamW(self.groups(own, [n for n in everything if n != "matrix"]), **adam)
            case name:  # compared with their papers in test_rules.py
                settings = {key: value for key, value in own.items() if key != "weight_decay"}
                yield RuleOptimizer(self.groups(own, everything), RULES[name], settings)

    def groups(self, own, names):
        chosen = [self.named[name] for name in names]
        groups = [
            {"params": [p for p in chosen if p.ndim >= 2], "weight_decay": own["weight_decay"]},
            {"params": [p for p in chosen if p.ndim < 2], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def advance(self, step, lr=1e-2):
        give(self.named, gradients(step))
        divisor = clip_divisor(torch.nn.utils.get_total_norm([p.grad for p in self.named.values()]), LIMIT)
        for parameter in self.named.values():
            parameter.grad /= divisor
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def state(self):
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.named.items()
            for optimizer in self.optimizers
            for key, tensor in optimizer.state.get(parameter, {}).items()
            if tensor is not None and key != "x"  # the average belongs to ScheduleFreeAverage
        }


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
)
every_case = pytest.mark.parametrize("case", CASES, ids=label)
one_of_each_path = pytest.mark.parametrize(
    "case", [{"name": "adamw", "veto": veto} for veto in ("fused", "host", "select")], ids=label
)
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "huge": 3e38, "ordinary": 1.0}
PATHS = {"fused": "fused", "host": "host read", "select": "copy and select"}


def veto(optimizer, named, bad, where="all"):
    """A rejected step with a bad value in the gradients of one parameter, or of all."""
    values = gradients(99)
    for name in values:
        if where in (name, "all"):
            values[name].view(-1)[-1] = BAD[bad]
    give(named, values)
    reject = REJECT.to(next(iter(named.values())).device)
    optimizer.step(1e-2, reject, clip_divisor(optimizer.grad_norm(), LIMIT))


@pytest.mark.parametrize("device", ["cpu", GPU])
@every_case
def test_accepted_steps_are_the_bare_optimizers_bit_for_bit(case, device):
    ours, theirs = parameters(device=device), parameters(device=device)
    optimizer, bare = make(ours, case), Bare(theirs, case)
    assert (optimizer.path, optimizer.fallback_reason) == (PATHS[case["veto"]], None)
    assert optimizer.fused == (case["veto"] == "fused")
    state = optimizer.state()
    for step in range(12):
        lr = 1e-2 * (step + 1) / 12
        advance(optimizer, ours, step, lr)
        bare.advance(step, lr)
    assert as_good_as_same(bits(ours, optimizer), bits(theirs, bare), case)
    assert state.keys() == optimizer.state().keys(), "all of the state is there before the first step"
    assert all(a is b for a, b in zip(state.values(), optimizer.state().values(), strict=True)), "state() is live"
    layout = {name: (t.dtype, t.device, t.shape) for name, t in bare.state().items()}
    assert {name: (t.dtype, t.device, t.shape) for name, t in state.items()} == layout


@pytest.mark.parametrize("device", ["cpu", GPU])
@every_case
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["accept", "accept", *BAD]), min_size=1, max_size=8))
def test_a_run_with_vetoes_is_the_bare_run_of_the_accepted_steps(case, device, steps):
    """Also where the very first step is rejected: an optimizer that makes its state lazily has nothing to keep then."""
    ours, theirs = parameters(device=device), parameters(device=device)
    optimizer, bare = make(ours, case), Bare(theirs, case)
    fresh = bits(ours, optimizer)
    for step, kind in enumerate(steps):
        if kind == "accept":
            advance(optimizer, ours, step)
            bare.advance(step)
        else:
            before = bits(ours, optimizer)
            veto(optimizer, ours, kind)
            assert same(bits(ours, optimizer), before)
        assert all(p.grad is None for p in ours.values())
    assert as_good_as_same(bits(ours, optimizer), bits(theirs, bare) if "accept" in steps else fresh, case)
    counts = [tensor for name, tensor in optimizer.state().items() if name.endswith(".step")]
    assert all(float(count) == steps.count("accept") for count in counts)


@every_case
def test_a_veto_leaves_every_bit_untouched_wherever_the_bad_value_sits(case):
    named = parameters()
    optimizer = make(named, case)
    for step in range(3):
        advance(optimizer, named, step)
    before = bits(named, optimizer)
    for bad in BAD:
        for where in ("matrix", "scalar", "all"):
            veto(optimizer, named, bad, where)
            assert same(bits(named, optimizer), before)


@every_case
def test_state_round_trip_goes_on_with_the_same_bits(case):
    named = parameters()
    optimizer = make(named, case)
    for step in range(5):
        advance(optimizer, named, step)
    saved = bits(named, optimizer)
    again = parameters(seed=9)
    resumed = make(again, case)
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(saved[f"w.{name}"])
    for name, tensor in resumed.state().items():
        tensor.copy_(saved[name])
    spec = OptimizerSpec(**case)
    if (average := weight_average(list(again.items()), spec, resumed)) is not None:  # Schedule-Free's, saved apart
        of_saved = weight_average(list(named.items()), spec, optimizer).state()
        for name, tensor in average.state().items():
            tensor.copy_(of_saved[name])
    for step in range(5, 10):
        advance(optimizer, named, step)
        advance(resumed, again, step)
    assert same(bits(named, optimizer), bits(again, resumed))


@every_case
def test_an_accepted_step_changes_weights_moments_and_counts(case):
    named = parameters()
    optimizer = make(named, case)
    if case.get("name") == "soap":
        advance(optimizer, named, 0)  # the first step only sets its bases
    before = bits(named, optimizer)
    advance(optimizer, named, 1)
    after = bits(named, optimizer)
    same_bits = [name for name in before if torch.equal(before[name], after[name])]
    every_few_steps = ("_basis", ".curvature")  # of SOAP and Sophia
    assert [name for name in same_bits if not name.endswith(every_few_steps)] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "soap"])  # which has one path
def test_a_checkpoint_of_one_path_fits_the_others(name):
    states = [make(parameters(), {"name": name, "veto": veto}).state() for veto in PATHS]
    shapes = [{key: (tensor.shape, tensor.dtype) for key, tensor in state.items()} for state in states]
    assert shapes[0] == shapes[1] == shapes[2]


@one_of_each_path
def test_equals_adamw_of_the_paper_in_float64(case):
    named = parameters(dtype=torch.float64)
    weights = {name: p.detach().clone() for name, p in named.items()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    optimizer = make(named, case)
    for step in range(1, 11):
        grads = gradients(step, torch.float64)
        give(named, grads)
        optimizer.step(1e-2, ACCEPT, torch.ones(()))
        for name, g in grads.items():
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
            decay = 0.1 if weights[name].ndim >= 2 else 0.0
            weights[name] = weights[name] * (1 - 1e-2 * decay) - 1e-2 * mean / (square.sqrt() + 1e-8)
            torch.testing.assert_close(named[name].detach(), weights[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "nadam", "radam", "lion", "muon"])
def test_decoupled_decay_shrinks_matrices_and_no_vectors(name):
    named = parameters()
    before = {key: p.detach().clone() for key, p in named.items()}
    optimizer = make(named, {"name": name, "weight_decay": 0.2})
    give(named, {key: torch.zeros(shape) for key, shape in SHAPES.items()})
    optimizer.step(0.5, ACCEPT, torch.ones(()))
    for key, parameter in named.items():
        expected = before[key] * (1 - 0.5 * 0.2) if parameter.ndim >= 2 else before[key]
        torch.testing.assert_close(parameter.detach(), expected)


@every_case
def test_frozen_parameters_and_parameters_without_a_gradient_are_left_alone(case):
    named = parameters()
    named["cube"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = make(named, case)
    values = gradients(0)
    for name in ("matrix", "vector"):
        named[name].grad = values[name].clone()
    expected = torch.cat([values["matrix"].flatten(), values["vector"]]).norm()
    assert float(optimizer.grad_norm()) == pytest.approx(float(expected), rel=1e-6)
    optimizer.step(0.1, ACCEPT, torch.tensor(2.0))
    if case.get("name") == "soap":  # the first step only sets its bases
        for name in ("matrix", "vector"):
            named[name].grad = values[name].clone()
        optimizer.step(0.1, ACCEPT, torch.tensor(2.0))
    moved = {name for name, p in named.items() if not torch.equal(p.detach(), before[name])}
    assert moved == {"matrix", "vector"}
    assert not any(key.startswith("cube") for key in optimizer.state())


@pytest.mark.parametrize("size", [0.001, 0.2, 50.0])
def test_clipping_equals_torch(size):
    """Up to torch's 1e-6 beside the norm."""
    named, values = parameters(dtype=torch.float64), gradients(1, torch.float64, size)
    optimizer = make(named, {})
    give(named, values)
    divisor = clip_divisor(optimizer.grad_norm(), 0.7)
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.7)
    assert float(norm) == pytest.approx(sum(float(v.square().sum()) for v in values.values()) ** 0.5, rel=1e-12)
    for name, parameter in named.items():
        torch.testing.assert_close(values[name] / divisor, parameter.grad, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_the_norm_is_not_finite_as_soon_as_one_gradient_is(bad):
    named = parameters()
    optimizer = make(named, {})
    values = gradients(0)
    values["vector"][3] = bad
    values["matrix"][0, 0] = min(bad, 3e38)
    give(named, values)
    assert not torch.isfinite(optimizer.grad_norm())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["veto"] != "host" and case["name"] != "adafactor"
     and (case["name"], case["veto"]) != ("adagrad", "select")],
    ids=label,
)  # fmt: skip
def test_fused_and_select_never_wait_for_the_gpu(case):
    named = parameters(device="cuda")
    optimizer = make(named, case)
    advance(optimizer, named, 0)
    reject, divisor = REJECT.cuda(), torch.ones((), device="cuda")
    give(named, gradients(1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(1e-2, reject, divisor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
