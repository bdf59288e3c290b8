"""A checkpoint store in a temporary folder, a state with every kind of tensor a run saves, and manifests by step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bessemer.checkpoint.manifest import Manifest
from bessemer.checkpoint.store import CheckpointStore


@pytest.fixture
def checkpoint_store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def manifest_of() -> Callable[..., Manifest]:
    def make(step: int, validation_loss: float | None = None, **more: object) -> Manifest:
        return Manifest(
            step=step,
            attempt=0,
            stream_fingerprint="f1",
            stream={"seed": 3, "sources": {"naïve": "ab"}},
            spec_fingerprint="s1",
            segments=[{"from_step": 0, "position": 0}, {"from_step": 7, "position": 120}],
            batch_rows=[[0, 4]],
            progress={"tokens": step * 512, "elapsed_s": 0.1 + 0.2, "best_validation": None},
            threads=1,
            device="cpu",
            versions={"torch": torch.__version__},
            time=1234.5678901,
            validation_loss=validation_loss,
            **more,  # type: ignore[arg-type]
        )

    return make


@pytest.fixture
def state_of() -> Callable[[int], dict[str, Tensor]]:
    def make(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(17, 5, generator=generator)
        weights[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
        return {
            "model.weight": weights,
            "model.norm": torch.randn(5, generator=generator).bfloat16(),
            "optimizer.exp_avg": torch.randn(17, 5, generator=generator, dtype=torch.float64),
            "optimizer.step": torch.tensor(float(seed)),
            "guard.count": torch.tensor(2**53 + seed),  # no float64 holds every such number
            "transposed": torch.randn(4, 6, generator=generator).t(),
        }

    return make
