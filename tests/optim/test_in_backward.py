"""Updates in the backward pass: the same as after it where nothing is clipped, and only when they are asked for."""

import pytest
import torch
from torch import nn

from bessemer.errors import UserError
from bessemer.model.transformer import build_model
from bessemer.optim.choose import make_optimizer
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec
from bessemer.spec.shape import ModelShape

ACCEPT, REJECT, ONE = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0)
TOKENS = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
)


def made(update="in_backward", device="cpu", **memory):
    model = build_model(ModelShape(64, 32, 2, 4, 2, 8, 64, tied=True), device, 0)
    memory = MemorySpec(update=update, **memory)
    return model, make_optimizer(model.named_parameters(), OptimizerSpec(), memory=memory)


def loss_of(model, tokens=TOKENS):
    tokens = tokens.to(model.norm.weight.device)
    logits = model.logits(model(tokens[:, :-1]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def armed_step(model, optimizer, lr=5e-3, reject=ACCEPT):
    optimizer.prepare_backward(lr)
    loss = loss_of(model)
    loss.backward()
    norm = optimizer.grad_norm()
    device = norm.device
    optimizer.step(lr, reject.to(device), ONE.to(device))
    return loss.item(), norm.item()


def everything(model, optimizer):
    named = {n: p.detach() for n, p in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in {**named, **optimizer.state()}.items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("memory", [{"moments": "8bit"}, {"moments": "bf16", "offload_optimizer": True}], ids=str)
def test_is_the_update_after_backward_and_leaves_no_gradient(memory, device):
    model, optimizer = made(device=device, **memory)
    other, after = made("after", device=device, **memory)
    assert after.rejects_before_update and not optimizer.rejects_before_update
    for _ in range(4):
        loss, norm = armed_step(model, optimizer)
        loss_of(other).backward()
        assert norm == pytest.approx(after.grad_norm().item(), rel=1e-5)
        after.step(5e-3, ACCEPT.to(device), ONE.to(device))
        assert all(p.grad is None for p in model.parameters())
    assert same(everything(model, optimizer), everything(other, after)) or device == "cuda"
    assert loss < 4.2


def test_a_bad_gradient_does_not_touch_its_own_parameter():
    model, optimizer = made()
    armed_step(model, optimizer)
    before = everything(model, optimizer)
    model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    _, norm = armed_step(model, optimizer)
    after = everything(model, optimizer)
    assert norm != norm, "the norm tells of it"
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("norm.weight"), name


def test_a_verdict_comes_too_late():
    model, optimizer = made()
    before = everything(model, optimizer)
    armed_step(model, optimizer, reject=REJECT)
    assert not same(before, everything(model, optimizer))


def test_gradients_that_others_compute_update_nothing_and_step_as_usual():
    model, optimizer = made()
    armed_step(model, optimizer)
    before = everything(model, optimizer)
    loss_of(model).backward()
    assert same(before, everything(model, optimizer)) and model.norm.weight.grad is not None
    assert optimizer.grad_norm() > 0
    optimizer.step(1e-3, REJECT, ONE)
    assert same(before, everything(model, optimizer)) and model.norm.weight.grad is None
    loss_of(model).backward()
    optimizer.step(1e-3, ACCEPT, ONE)
    assert not same(before, everything(model, optimizer))


def test_one_micro_batch_only():
    model, optimizer = made()
    optimizer.prepare_backward(1e-3)
    loss_of(model).backward()
    with pytest.raises(UserError, match=r"memory.update: in_backward cannot accumulate gradients: set budget.micro"):
        loss_of(model).backward()


def test_a_discarded_step_is_over():
    model, optimizer = made()
    optimizer.prepare_backward(1e-3)
    optimizer.discard()
    before = everything(model, optimizer)
    loss_of(model).backward()
    assert same(before, everything(model, optimizer))
