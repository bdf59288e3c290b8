"""Which optimizer and which veto path a spec leads to, and that the probe finds what does not hold."""

import re

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from bessemer.model.transformer import build_model
from bessemer.optim import choose
from bessemer.optim.choose import VETO_PATHS, make_optimizer, veto_fault
from bessemer.optim.guarded import clip_divisor
from bessemer.optim.rules import RULES
from bessemer.spec.optimizer import FUSED, SETTINGS, OptimizerSpec
from bessemer.spec.shape import ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(64, 32, 2, 4, 2, 8, 64)


def made(**spec):
    return make_optimizer([("matrix", nn.Parameter(torch.ones(3, 5)))], OptimizerSpec(**spec))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_auto_is_fused_where_there_is_a_kernel_and_else_the_host_reads(name):
    optimizer = made(name=name)
    assert optimizer.path == ("fused" if name in FUSED else "host read")
    assert optimizer.fallback_reason is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["host read", "copy and select"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_probe_trusts_host_and_select_for_every_optimizer(name, path, dtype):
    if (name, path) == ("soap", "copy and select"):  # an eigendecomposition of NaN raises
        assert veto_fault(OptimizerSpec(name=name), path, CPU, dtype)
        return
    assert veto_fault(OptimizerSpec(name=name), path, CPU, dtype) is None


@pytest.mark.parametrize("name", FUSED)
def test_the_probe_trusts_the_fused_kernels_here(name):
    assert veto_fault(OptimizerSpec(name=name), "fused", CPU) is None


def test_fused_that_does_not_exist_falls_back_and_says_so():
    optimizer = made(name="rmsprop", veto="fused")
    assert optimizer.path == "host read" and not optimizer.fused
    assert "rmsprop, fused: torch has no such kernel" in optimizer.fallback_reason


def test_settings_do_not_fool_the_probe():
    """Nothing moves with such an epsilon; that is the user's wish and no fault of the kernel."""
    assert made(eps=1.0, betas=[0.0, 0.0], weight_decay=0.0).path == "fused"


class IgnoresTheVerdict(torch.optim.AdamW):
    def step(self, *arguments):
        del self.found_inf
        self.grad_scale = None
        return super().step(*arguments)


class CountsAVetoedStep(torch.optim.AdamW):
    def step(self, *arguments):
        super().step(*arguments)
        for state in self.state.values():
            state["step"] += self.found_inf


class NeverMoves(torch.optim.AdamW):
    def step(self, *_):
        return None


class MovesTheFirstBlockOnly(torch.optim.AdamW):
    def step(self, *arguments):
        weight = next(iter(self.state))
        tail = weight.detach().view(-1)[32:].clone()
        super().step(*arguments)
        weight.detach().view(-1)[32:] = tail


class Missing(torch.optim.AdamW):
    def __init__(self, *_, fused=False, **__):
        raise RuntimeError("no fused kernel here")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (IgnoresTheVerdict, "a rejected step changed"),
        (CountsAVetoedStep, "a rejected step changed"),
        (NeverMoves, "an accepted step did not change"),
        (MovesTheFirstBlockOnly, "an accepted step did not change"),
        (Missing, "no fused kernel here"),
    ],
)
def test_the_probe_finds_a_kernel_that_does_not_hold(monkeypatch, kind, why):
    healthy = choose.KINDS["adamw"]
    monkeypatch.setitem(choose.KINDS, "adamw", choose.OptimizerKind(kind, healthy.state))
    assert why in veto_fault(OptimizerSpec(), "fused", CPU)


def test_a_path_that_does_not_hold_is_left_for_the_host_and_an_unsafe_host_stops_the_run(monkeypatch):
    genuine = choose.veto_fault

    def refuse(*paths):
        return lambda spec, path, *rest: "broken" if path in paths else genuine(spec, path, *rest)

    for veto, path in (("auto", "fused"), ("select", "copy and select")):
        monkeypatch.setattr(choose, "veto_fault", refuse(path))
        optimizer = made(veto=veto)
        assert optimizer.path == "host read"
        assert optimizer.fallback_reason.startswith(f"adamw, {path}: broken; the verdict is read on the host")
    monkeypatch.setattr(choose, "veto_fault", refuse(*VETO_PATHS.values()))
    with pytest.raises(RuntimeError, match=r"cannot reject steps of adamw on cpu: broken"):
        made()


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    model = build_model(SHAPE, "cpu", 0)
    optimizer = make_optimizer(model.named_parameters(), OptimizerSpec(name="muon"))
    with_muon = {key.removesuffix(".momentum_buffer") for key in optimizer.state() if "momentum_buffer" in key}
    with_adamw = {key.removesuffix(".exp_avg") for key in optimizer.state() if key.endswith("exp_avg")}
    assert with_muon and all(re.fullmatch(r"blocks\.\d\.(attention|ffn)\.\w+\.weight", name) for name in with_muon)
    assert {name.split(".")[-2] for name in with_adamw} >= {"embedding", "norm", "attention_norm"}
    assert with_muon | with_adamw == {name for name, _ in model.named_parameters()}
    assert not with_muon & with_adamw


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_optimizer_brings_a_real_model_down(name):
    """A tiny model learns one batch by heart; a veto in the middle does not hinder it."""
    model = build_model(SHAPE, "cpu", 0)
    optimizer = make_optimizer(model.named_parameters(), OptimizerSpec(name=name))
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    rates = {"sgd": 0.3, "adagrad": 0.02, "lion": 1e-3, "adafactor": 0.05, "lars": 2.0, "lamb": 0.02, "sm3": 0.1}
    lr = rates.get(name, 5e-3)
    losses = []
    for step in range(25):
        logits = model.logits(model(tokens[:, :-1]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        if step == 10:
            model.norm.weight.grad.fill_(float("nan"))
        norm = optimizer.grad_norm()
        optimizer.step(lr, (~norm.isfinite()).float(), clip_divisor(norm, 1.0))
    assert losses[11] == losses[10], "a vetoed step changes nothing"
    assert losses[-1] < losses[0] - 0.5


def test_what_is_written_wins_and_the_rest_suits_the_optimizer():
    assert OptimizerSpec().settings() == {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    lion = OptimizerSpec(name="lion", betas=[0.95, 0.98])
    assert lion.settings() == {"betas": [0.95, 0.98], "weight_decay": 0.5}
    assert OptimizerSpec(name="sgd", weight_decay=0.0, momentum=0.0).settings()["momentum"] == 0.0
    assert set(SETTINGS) == {*choose.KINDS, *RULES, "muon"}


def test_fields_that_an_optimizer_does_not_have_are_named():
    assert OptimizerSpec(name="sgd", betas=[0.9, 0.9], eps=1e-8, momentum=0.5).unused() == ["betas", "eps"]
    assert OptimizerSpec(name="adamw", alpha=0.9, nesterov=False).unused() == ["nesterov", "alpha"]
    for name, own in SETTINGS.items():
        assert OptimizerSpec(name=name, **own).unused() == []


@pytest.mark.parametrize(
    "wrong",
    [{"name": "adamv"}, {"betas": [0.9]}, {"momentum": 1.0}, {"ema": 1.0}, {"ema": 0.0}, {"veto": "maybe"}],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        OptimizerSpec(**wrong)
