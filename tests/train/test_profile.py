"""The loop's ranges cost nothing unless somebody looks; on a GPU the trace has kernels under their parts."""

from pathlib import Path

import pytest
import torch

from bessemer.observe.profile import GUARD, HEAD, MATMUL, OPTIMIZER, read_trace, step_time
from bessemer.train.job import Interrupt
from bessemer.train.profile import DONE, WARMUP, StepProfiler


def run(profiler: StepProfiler, device: str, steps: int) -> None:
    """A loop with the same ranges around a layer, a loss and an optimizer."""
    interrupt = Interrupt()
    layer = torch.nn.Linear(256, 256, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for done in range(1, steps + 1):
        with profiler.span("data"):
            x, y = torch.randn(512, 256).to(device), torch.randint(256, (512,)).to(device)
        with profiler.span("forward"):
            loss = torch.nn.functional.cross_entropy(layer(x), y)
        with profiler.span("backward"):
            loss.backward()
        with profiler.span("judge"):
            torch.nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None])
            with profiler.span("optimizer"):
                optimizer.step()
        profiler.step(interrupt)
        assert (interrupt.signal == DONE) == (done == steps)


def check(trace: Path, on_device: bool) -> None:
    time = step_time(read_trace(trace))
    assert time.on_device == on_device
    for part in (MATMUL, HEAD, GUARD, OPTIMIZER):
        assert time.parts[part] > 0, part
    assert sum(time.parts.values()) == pytest.approx(time.wall, rel=1e-6)


def test_it_ends_the_loop_after_the_profiled_steps(tmp_path: Path) -> None:
    profiler = StepProfiler(torch.device("cpu"), 2, tmp_path / "trace.json.gz")
    run(profiler, "cpu", WARMUP + 2)
    assert profiler.plain_step_s > 0
    check(tmp_path / "trace.json.gz", on_device=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_kernels_are_told_apart_by_what_launched_them(tmp_path: Path) -> None:
    run(StepProfiler(torch.device("cuda"), 2, tmp_path / "trace.json.gz"), "cuda", WARMUP + 2)
    check(tmp_path / "trace.json.gz", on_device=True)
    run(StepProfiler(torch.device("cuda"), 2, None), "cuda", WARMUP + 2)  # for Nsight: ranges alone
