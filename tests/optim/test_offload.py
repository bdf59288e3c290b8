"""Optimizer state on the host: the same numbers bit for bit, wherever it lies, by pieces and in turn."""

import itertools

import pytest
import torch
from torch import nn

from bessemer.errors import UserError
from bessemer.optim import low_memory as lean
from bessemer.optim.choose import make_optimizer
from bessemer.optim.low_memory import SLOTS, HostOffload, host_zeros, to_low_precision
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec

SHAPES = {"large": (96, 256), "matrix": (64, 80), "small": (3, 5)}
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
)
FAST = (("fp32", "fp32"), ("stochastic", "8bit"), ("kahan", "bf16"))
KINDS = list(itertools.product(("fp32", "stochastic", "kahan"), ("fp32", "bf16", "8bit")))


def run(device, weights, moments, offload, count=5):
    generator = torch.Generator().manual_seed(0)
    named = nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
    if weights != "fp32":
        to_low_precision(named)
    named.to(device)
    # Even without offload our own step is taken, for which an update in backward that is never armed stands.
    memory = MemorySpec(weights=weights, moments=moments, offload_optimizer=offload, update="in_backward")
    optimizer = make_optimizer(named.items(), OptimizerSpec(), memory=memory)
    for step in range(count):
        for parameter in named.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(device, parameter.dtype)
        reject = torch.tensor(float(step == 2), device=device)
        optimizer.step(1e-2, reject, torch.tensor(2.0, device=device))
    return named, optimizer


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("weights", "moments"), [pytest.param(*kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS]
)
def test_the_host_changes_no_bit(weights, moments, device, monkeypatch):
    monkeypatch.setattr(lean, "PIECE_SIZE", 2048)  # many pieces in three slots
    monkeypatch.setattr(lean, "MIN_OFFLOAD_SIZE", 100)
    here, there = (run(device, weights, moments, offload) for offload in (False, True))
    for name in SHAPES:
        assert torch.equal(here[0][name], there[0][name])
    for name, tensor in there[1].state().items():
        assert torch.equal(here[1].state()[name].to(tensor.device), tensor), name
        away = not name.endswith(".step") and not name.startswith("small.")
        assert tensor.device.type == ("cpu" if away else device)
        if away and device == "cuda":
            assert tensor.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_state_that_is_read_at_once_is_complete(monkeypatch):
    """Large enough for copies that are still under way when Python is long past them."""
    monkeypatch.setitem(SHAPES, "large", (16384, 1024))
    here, there = (run("cuda", "kahan", "fp32", offload, count=3)[1].state() for offload in (False, True))
    assert torch.equal(here["large.exp_avg"].cpu(), there["large.exp_avg"])


def test_slots_are_used_in_turn_and_pieces_come_back():
    shuttle = HostOffload(torch.device("cpu"), {"a": 400, "b": 128})
    host = [{"a": torch.full((100,), float(i)), "b": torch.zeros(8, 16, dtype=torch.uint8)} for i in range(7)]
    seen = []
    for tensors in host:
        with shuttle.on_device(tensors) as live:
            assert live["b"].shape == (8, 16)
            seen.append(live["a"].data_ptr())
            live["a"] += 1
            live["b"].fill_(7)
    assert seen[:SLOTS] == seen[SLOTS : 2 * SLOTS] and len(set(seen)) == SLOTS
    for i, tensors in enumerate(host):
        assert torch.equal(tensors["a"], torch.full((100,), i + 1.0))
        assert (tensors["b"] == 7).all()


class Cudart:
    """The two calls by which CUDA locks host memory, on a machine that has no CUDA."""

    def __init__(self, answer):
        self.answer, self.locked = answer, {}

    def cudaHostRegister(self, address, size, _):
        self.locked[address] = size
        return self.answer

    def cudaHostUnregister(self, address):
        del self.locked[address]


def test_host_memory_is_zero_exact_locked_and_given_back(monkeypatch):
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    tensor = host_zeros((1000, 3), torch.bfloat16, torch.device("cuda"))
    assert tensor.shape == (1000, 3) and tensor.dtype == torch.bfloat16 and not tensor.any()
    assert cudart.locked == {tensor.data_ptr(): 6000} and tensor.data_ptr() % 4096 == 0
    tensor += 1
    assert tensor.sum() == 3000
    del tensor
    assert cudart.locked == {}


def test_a_host_that_refuses_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    with pytest.raises(UserError, match=r"memory.offload_optimizer: cannot pin another 1 MiB"):
        host_zeros((1 << 20,), torch.uint8, torch.device("cuda"))
