"""Every optimizer over several processes: divided weights are stepped as whole ones are, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bessemer.checkpoint.store import silence_single_process_warning
from bessemer.errors import UserError
from bessemer.optim.choose import make_optimizer
from bessemer.optim.guarded import clip_divisor, weight_average
from bessemer.parallel.shard import local
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import decide_layout
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.optimizer import SETTINGS, MemorySpec, MuonSpec, OptimizerSpec
from bessemer.spec.schema import ParallelSpec, RunSpec
from bessemer.spec.shape import ModelShape

Ranks = Callable[..., list[Any]]
STEPS = 5
# Their update of a shard is the shard of their update, bit for bit.
ELEMENTWISE = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "radam", "adamax", "lion", "schedule_free",
               "sophia")  # fmt: skip
WHOLE = sorted(set(SETTINGS) - set(ELEMENTWISE))  # need norms, means or whole matrices
VETOED = 2
MEMORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16 moments": ("adamw", {"moments": "bf16"}),
    "8bit moments": ("adamw", {"moments": "8bit"}),
    "lion with bf16 moments": ("lion", {"moments": "bf16"}),
    "adam on the host": ("adam", {"offload_optimizer": True, "moments": "bf16"}),
}


class Net(nn.Module):
    """Matrices and vectors of 8 bits' blocks, one with fewer rows than there may be processes, one of odd size."""

    def __init__(self, even: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = {"large": (512, 256), "vector": (48,), "few": (1, 8), "blocks": (64, 128)}
        shapes |= {} if even else {"odd": (7, 5)}
        if dtype == torch.float64:  # small, of equal shapes, with fewer rows than processes, tall and wide
            shapes = {"a": (7, 5), "b": (7, 5), "c": (7, 5), "few": (1, 8), "tall": (12, 4), "vector": (6,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)))

    def forward(self) -> torch.Tensor:
        return sum(((p - 1) ** 2).sum() for p in self.parameters())  # type: ignore[return-value]


def steps(
    name: str, shards: int, memory: dict[str, Any], replicas: int = 1, even: bool = True,
    dtype: torch.dtype = torch.float32, count: int = STEPS,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Weights, moments and averages after some steps, one of them vetoed, as whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net(even, dtype)
    if shards > 1:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
        fully_shard(net, mesh=mesh if replicas > 1 else mesh["dp_shard"])
    precise = MuonSpec(precision="fp64") if dtype == torch.float64 else MuonSpec()
    spec = OptimizerSpec(name=name, muon=precise, ema=None if name == "schedule_free" else 0.9)
    optimizer = make_optimizer(net.named_parameters(), spec, memory=MemorySpec(**memory), seed=3)
    average = weight_average(net.named_parameters(), spec, optimizer)
    assert average
    for step in range(count):
        for k, parameter in enumerate(net.parameters()):
            draw = torch.Generator().manual_seed(100 * step + k)
            whole = torch.randn(parameter.shape, generator=draw, dtype=dtype)
            if step == VETOED:
                whole[0] = float("nan")
            parameter.grad = whole if shards == 1 else _like(parameter, whole)
        reject = torch.tensor(float(step == VETOED))
        if optimizer.curvature_due(step):
            optimizer.follow_curvature(8.0, reject)
        optimizer.step(0.05, reject, clip_divisor(torch.tensor(3.0), 1.0))
        average.update(reject)
    found = {f"model.{key}": p.detach() for key, p in net.named_parameters()}
    found |= {f"optimizer.{key}": tensor for key, tensor in optimizer.state().items()}
    found |= {f"ema.{key}": tensor for key, tensor in average.state().items()}
    return {key: _whole(tensor) for key, tensor in found.items()}


def _like(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _whole(tensor: Any) -> np.ndarray:
    """Its bytes; tensors do not outlive the process that made them."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.contiguous().view(-1).view(torch.uint8).numpy().copy()


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for key, content in wanted.items():
        if ".odd" in key:  # torch's kernels round the elements that do not fill a vector by another instruction
            assert np.allclose(found[key].view(np.float32), content.view(np.float32), rtol=1e-6, atol=1e-7), key
        else:
            assert np.array_equal(found[key], content), key


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("adamw", "sgd", "lion", "adamax") else pytest.mark.slow)
        for name in ELEMENTWISE
    ],
)
def test_a_divided_step_is_the_step_bit_for_bit(ranks: Ranks, name: str) -> None:
    wanted = steps(name, 1, {}, even=False)
    for found in ranks(2, steps, name, 2, {}, 1, False):
        same(found, wanted)


@pytest.mark.parametrize(
    "kind",
    [
        "8bit moments", "lion with bf16 moments",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bf16 moments", "adam on the host")),
    ],
)  # fmt: skip
def test_moments_in_few_bits_round_alike_however_they_are_divided(ranks: Ranks, kind: str) -> None:
    """Elements are rounded by their place in the whole, not by that in a part."""
    name, memory = MEMORIES[kind]
    wanted = steps(name, 1, memory)
    for found in (*ranks(2, steps, name, 2, memory), *ranks(4, steps, name, 2, memory, 2)):
        same(found, wanted)


def test_blocks_that_dividing_would_cut_are_refused_by_name(ranks: Ranks) -> None:
    def refused() -> str:
        with pytest.raises(UserError) as error:
            steps("adamw", 3, {"moments": "8bit"})
        return str(error.value)

    for words in ranks(3, refused):
        assert words.startswith("memory.moments: 8bit") and "large" in words and "\n" not in words


def test_divided_moments_are_saved_and_loaded_as_parts_of_a_whole(ranks: Ranks, tmp_path: Path) -> None:
    def save() -> None:
        from torch.distributed.fsdp import fully_shard

        net = Net()
        fully_shard(net)
        optimizer = make_optimizer(net.named_parameters(), OptimizerSpec(), memory=MemorySpec(moments="8bit"))
        for key, tensor in optimizer.state().items():
            local(tensor).fill_(len(key) % 200)
        dcp.save(optimizer.state(), checkpoint_id=tmp_path)

    ranks(2, save)
    alone = make_optimizer(Net().named_parameters(), OptimizerSpec(), memory=MemorySpec(moments="8bit")).state()
    silence_single_process_warning()
    dcp.load(alone, checkpoint_id=tmp_path, no_dist=True)
    assert all(bool((tensor == len(key) % 200).all()) for key, tensor in alone.items())


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_what_needs_whole_tensors_is_stepped_as_one_process_does(
    ranks: Ranks, name: str, size: int, replicas: int
) -> None:
    """In float64 to 1e-8, with rows that the processes do not divide evenly and one vetoed step among twelve."""
    double = (True, torch.float64, 12)
    wanted = steps(name, 1, {}, 1, *double)
    for found in ranks(size, steps, name, size // replicas, {}, replicas, *double):
        assert found.keys() == wanted.keys()
        for key, content in wanted.items():
            if key == "ema.updates":
                assert np.array_equal(found[key], content)
                continue
            single = key.endswith(".step") or key.startswith("ema.")
            kind, within = (np.float32, 1e-6) if single else (np.float64, 1e-8)
            assert np.allclose(found[key].view(kind), content.view(kind), rtol=within, atol=within), key


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_four_processes_agree_with_one_in_float32(ranks: Ranks, name: str) -> None:
    """To 1e-6 of the largest weight; Muon and SOAP, which amplify rounding, to 1e-4."""
    wanted = steps(name, 1, {}, 1, True, torch.float32, 12)
    within = 1e-4 if name in ("muon", "soap") else 1e-6
    for found in ranks(4, steps, name, 4, {}, 1, True, torch.float32, 12):
        for key, content in wanted.items():
            if key.startswith("model."):
                one, several = content.view(np.float32), found[key].view(np.float32)
                assert np.abs(several - one).max() <= within * np.abs(one).max(), key


def test_state_that_is_sharded_fits_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """SOAP: moments are shards, eigenbases are held by all. Saved by two processes, loaded by one."""

    def save() -> None:
        from torch.distributed.fsdp import fully_shard

        net = Net(dtype=torch.float64)
        fully_shard(net)
        optimizer = make_optimizer(net.named_parameters(), OptimizerSpec(name="soap"))
        for key, tensor in optimizer.state().items():
            local(tensor).fill_(len(key))
        dcp.save(optimizer.state(), checkpoint_id=tmp_path)

    ranks(2, save)
    alone = make_optimizer(Net(dtype=torch.float64).named_parameters(), OptimizerSpec(name="soap")).state()
    silence_single_process_warning()
    dcp.load(alone, checkpoint_id=tmp_path, no_dist=True)
    assert all(bool((tensor == len(key)).all()) for key, tensor in alone.items())


RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "muon": ("dp_shard", {"name": "muon", "muon": {"precision": "fp64"}}, {}, 1e-4),
    "adafactor": ("dp_shard", {"name": "adafactor"}, {}, 1e-4),
    "schedule-free": ("dp_shard", {"name": "schedule_free"}, {}, 1e-4),
    "kahan": ("dp_replicate", {}, {"precision": "bf16", "memory": {"weights": "kahan"}}, 0.02),  # sums in bf16
    "stochastic": ("dp_replicate", {}, {"precision": "bf16", "memory": {"weights": "stochastic"}}, 0.02),
    "averages": ("dp_shard", {"ema": 0.9}, {}, 1e-5),
    "averages of replicas": ("dp_replicate", {"ema": 0.9}, {}, 1e-5),
    "8bit": ("dp_shard", {}, {"memory": {"moments": "8bit"}}, 1e-3),
    "lion, divided": ("dp_shard", {"name": "lion", "lr": 3e-4}, {}, 1e-4),
    "muon, tensor-parallel": ("tp", {"name": "muon", "muon": {"precision": "fp64"}}, {}, 1e-4),
    "lamb, tensor-parallel": ("tp", {"name": "lamb"}, {}, 1e-4),
    "adafactor, tensor-parallel": ("tp", {"name": "adafactor"}, {}, 1e-4),
    "sm3, tensor-parallel": ("tp", {"name": "sm3"}, {}, 1e-4),
    "soap, tensor-parallel": ("tp", {"name": "soap", "lr": 1e-3}, {}, 1e-3),
    "sophia, divided": ("dp_shard", {"name": "sophia", "lr": 1e-3, "interval": 3}, {}, 1e-3),
    "sophia of replicas": ("dp_replicate", {"name": "sophia", "lr": 1e-3, "interval": 3}, {}, 1e-3),
    "on the host": ("dp_shard", {}, {"memory": {"offload_optimizer": True}}, 1e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_whole_run_has_the_losses_of_one_process(ranks: Ranks, tiny_spec: Callable[..., RunSpec], kind: str) -> None:
    degree, optimizer, more, within = RUNS[kind]
    more = {**more, "optimizer": {"lr": 0.003, **optimizer}, "evaluate": {"every": "4 steps"}}
    curves = []
    for size in (1, 2):
        parallel = {"device": "cpu", "threads": 1, **({degree: size} if size > 1 else {})}
        spec = tiny_spec(f"of-{size}", budget={"steps": 8, "batch": 256, "micro_batch": 2}, parallel=parallel, **more)
        assert set(ranks(size, lambda spec=spec: train(spec).kind)) == {"finished"}
        run = Run.existing(run_folder(spec))
        curves.append([record["loss"] for record in (*run.metrics(), *run.validations())])
    assert curves[1] == pytest.approx(curves[0], rel=within) and len(curves[0]) >= 10


REFUSED = {
    "memory.weights": {"precision": "bf16", "memory": {"weights": "kahan"}},
    "memory.update": {"memory": {"update": "in_backward"}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_in_one_line(name: str) -> None:
    spec = RunSpec.model_validate({"name": "x", "model": "1M", "data": {"sources": {"a": "x"}}, **REFUSED[name]})
    spec = spec.model_copy(update={"parallel": ParallelSpec(dp_shard=2)})
    shape = ModelShape(vocab=64, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
    with pytest.raises(UserError) as error:
        decide_layout(spec, shape, 32, Machine("cpu", "m", 1 << 30, 1), 2, Plan())
    assert name in str(error.value) and "\n" not in str(error.value)
