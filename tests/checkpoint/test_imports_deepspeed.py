"""DeepSpeed folders: written by hand in its layout with torch alone, and by DeepSpeed itself where it is installed."""

import enum
import importlib.util
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.checkpoint.import_weights import import_weights
from bessemer.errors import UserError

RANKS = 2
SHAPES = [{"embedding.weight": (11, 3), "blocks.0.weight": (5, 3)}, {"norm.weight": (3,)}]


def trained() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator) for group in SHAPES for n, s in group.items()}


def partitions(stage: int) -> list[list[Tensor]]:
    """For each rank, its part of each group's fp32 vector."""
    parts: list[list[Tensor]] = [[] for _ in range(RANKS)]
    for group in SHAPES:
        if stage == 3:  # every parameter is padded and cut
            pieces = []
            for name in group:
                flat = trained()[name].flatten()
                padded = torch.nn.functional.pad(flat, (0, -len(flat) % RANKS))
                pieces.append(padded.chunk(RANKS))
            vectors = [torch.cat([piece[rank] for piece in pieces]) for rank in range(RANKS)]
        else:  # the group is one vector, padded and cut
            flat = torch.cat([trained()[name].flatten() for name in group])
            vectors = list(torch.nn.functional.pad(flat, (0, -len(flat) % (2 * RANKS))).chunk(RANKS))
        for rank in range(RANKS):
            parts[rank].append(vectors[rank].clone())
    return parts


def class_of_deepspeed(monkeypatch: pytest.MonkeyPatch, module: str, name: str, **kind: Any) -> Any:
    """A class that pickles under a name of DeepSpeed's, as its files hold them."""
    made = enum.IntEnum(name, kind, module=module) if kind else type(name, (), {"__module__": module})
    parts = module.split(".")
    for k in range(1, len(parts) + 1):
        path = ".".join(parts[:k])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    monkeypatch.setattr(sys.modules[module], name, made, raising=False)
    return made


def write_folder(root: Path, stage: int, monkeypatch: pytest.MonkeyPatch, extra: Any = None) -> Path:
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step3\n")
    with monkeypatch.context() as patch:
        scaler = class_of_deepspeed(patch, "deepspeed.runtime.fp16.loss_scaler", "LossScaler")()
        address = class_of_deepspeed(patch, "deepspeed.utils.tensor_fragment", "fragment_address")()
        stages = class_of_deepspeed(
            patch, "deepspeed.runtime.zero.config", "ZeroStageEnum", states=1, gradients=2, weights=3
        )
        scaler.cur_scale, address.numel = 1.0, 33
        about = {
            "module": {
                **{n: t.bfloat16() if stage < 3 else torch.zeros(0) for n, t in trained().items()},
                "table": torch.arange(3),
            },
            "buffer_names": ["table"],
            "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in SHAPES],
            "shared_params": {"head.weight": "embedding.weight"},
            "frozen_param_shapes": {"frozen": torch.Size([5])} if stage == 3 else None,
            "ds_version": "0.0.0",
        }
        for rank in range(RANKS):
            half = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]][rank])
            if stage == 3 or rank == 0:
                name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
                torch.save({**about, "frozen_param_fragments": {"frozen": half}}, folder / f"{name}_model_states.pt")
            state = {
                "zero_stage": stages(stage),
                "loss_scaler": scaler,
                "partition_count": RANKS if stage == 3 else [RANKS] * 2,
                ("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"): partitions(stage)[rank],
                "param_slice_mappings": [{"embedding.weight": address}],
                "extra": extra,
            }
            torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_put_together_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    folder, before = write_folder(tmp_path, stage, monkeypatch), set(sys.modules)
    found = import_weights(folder)
    expected = {**trained(), "head.weight": trained()["embedding.weight"], "table": torch.arange(3)}
    if stage == 3:
        expected["frozen"] = torch.arange(5.0)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert not any(name.startswith("deepspeed") for name in set(sys.modules) - before)


def test_stage_0_keeps_its_weights_in_the_model_file(tmp_path: Path) -> None:
    torch.save({"module": trained(), "ds_version": "0"}, tmp_path / "mp_rank_00_model_states.pt")
    found = import_weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in trained().items())


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_asks_for_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "a", 2, monkeypatch, extra=Trap(tmp_path / "ran"))
    with pytest.raises(UserError, match=r"rank_0_.*needs posix.mkdir, which could run code.*--trust"):
        import_weights(root)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: (f / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(), "1 of 2 optimizer files"),
    (lambda f: torch.save({}, f / "zero_pp_rank_0_mp_rank_00_optim_states.pt"), "has no optimizer_state_dict"),
    (lambda f: torch.save({}, f / "mp_rank_01_model_states.pt"), "tensor- or expert-parallel"),
    (lambda f: (f.parent / "latest").write_text("../../elsewhere"), "points outside its folder"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    root = write_folder(tmp_path, 2, monkeypatch)
    spoil(root / "global_step3")
    with pytest.raises(UserError, match=message):
        import_weights(root)


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_that_are_too_short_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    root = write_folder(tmp_path, stage, monkeypatch)
    for path in root.glob("*/*_model_states.pt"):
        about = torch.load(path)
        about["param_shapes"][0]["embedding.weight"] = torch.Size([40, 30])
        torch.save(about, path)
    with pytest.raises(UserError, match="do not match the model file"):
        import_weights(root)


REAL = '''
import os, sys, torch, deepspeed
stage, out = int(sys.argv[1]), sys.argv[2]
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 7), torch.nn.Linear(7, 5, bias=False)])
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, x):
        h = self.embedding(x)
        return self.blocks[1](self.blocks[0](h)).pow(2).mean() + self.head(h).pow(2).mean()
net = Net()
groups = [{"params": [p for p in net.parameters() if (p.ndim > 1) == wide]} for wide in (True, False)]
engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config={
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}})
rank = torch.distributed.get_rank()
for i in range(2):
    engine.backward(engine(torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(2 * i + rank))))
    engine.step()
engine.save_checkpoint(out)
torch.distributed.barrier()
if rank == 0:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    torch.save(get_fp32_state_dict_from_zero_checkpoint(out), os.path.join(out, "expected.tensors"))
'''  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_real_checkpoints_equal_deepspeeds_own_conversion(tmp_path: Path, stage: int) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(REAL)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*command, str(script), str(stage), str(out)], env=environment, check=True, capture_output=True, timeout=300
    )
    found, expected = import_weights(out), torch.load(out / "expected.tensors")
    assert set(found) == set(expected) and math.prod(expected["embedding.weight"].shape) == 66
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
