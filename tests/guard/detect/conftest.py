"""Synthetic runs: clean ones of many families, as records like the loop writes them, and a way to replay them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bessemer.guard.alarm import Alarm
from bessemer.guard.detectors import Detectors
from bessemer.spec.guard import GuardSpec

GIB = 2**30
LIMIT = 80 * GIB


@dataclass
class Trace:
    """Columns of a run, one value a step; a test changes them to make a fault."""

    loss: np.ndarray
    norm: np.ndarray
    lr: np.ndarray
    step_s: np.ndarray
    wait_s: np.ndarray
    memory: np.ndarray
    reopen: tuple[int, ...] = ()
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def records(self) -> Iterator[dict[str, Any]]:
        columns = (self.loss, self.norm, self.lr, self.step_s, self.wait_s, self.memory)
        more = {name: column.tolist() for name, column in self.extra.items()}
        for step, (loss, norm, lr, took, wait, memory) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            yield {
                "step": step, "loss": loss, "grad_norm": norm, "lr": lr, "veto": None, "step_s": took,
                "tokens_per_s": 4096 / took, "data_wait_s": wait, "memory_bytes": memory,
                **{name: column[step] for name, column in more.items()},
            }  # fmt: skip


def cosine(t: np.ndarray, peak: float = 3e-4, warmup: int = 200) -> np.ndarray:
    share = np.clip((t - warmup) / (len(t) - warmup), 0, 1)
    return peak * np.minimum(1, (t + 1) / warmup) * (0.1 + 0.45 * (1 + np.cos(np.pi * share)))


def make(rng: np.random.Generator, loss: np.ndarray, norm: np.ndarray, **more: Any) -> Trace:
    """The rest of a run: steps of 0.4 s with pauses, data there in time, memory that settles and has a rising peak."""
    n = len(loss)
    t = np.arange(n)
    step_s = 0.4 * np.exp(0.05 * rng.standard_normal(n)) * np.where(rng.random(n) < 0.002, 5, 1)
    memory = 40 * GIB * (1 - 0.3 * np.exp(-t / 20)) + np.maximum.accumulate(GIB * rng.standard_normal(n))
    fields = {"lr": cosine(t), "step_s": step_s, "wait_s": 0.01 * step_s, "memory": memory} | more
    return Trace(np.maximum(loss, 1e-4), np.maximum(norm, 1e-6), **fields)


def falling(n: int) -> np.ndarray:
    t = np.arange(n)
    return 2.2 + 5.5 * np.exp(-t / 150) + 1.8 * (1 + t / 50) ** -0.4


def norms(rng: np.random.Generator, n: int, noise: float = 0.2) -> np.ndarray:
    return (0.4 + 5 * np.exp(-np.arange(n) / 40)) * np.exp(noise * rng.standard_normal(n))


def fast_fall(rng, n):
    return make(rng, falling(n) * (1 + 0.02 * rng.standard_normal(n)), norms(rng, n))


def large_batch(rng, n):
    """Noise of 0.3 %: whatever small thing happens is significant."""
    wander = 0.004 * np.cumsum(rng.standard_normal(n)) / np.sqrt(2000)
    return make(rng, falling(n) * (1 + 0.003 * rng.standard_normal(n)) + wander, norms(rng, n, 0.05))


def plateau_then_fall(rng, n):
    """Nothing for a while, then a sudden fall with gradients four times as large."""
    t, start = np.arange(n), min(1500, n // 3)
    loss = np.where(
        t < start, 7.2, 7.2 - 3.5 * (1 - np.exp(-(t - start) / 60)) - 0.2 * np.log1p(np.maximum(0, t - start) / 500)
    )
    norm = 0.4 * (1 + 3 * np.exp(-(((t - start - 40) / 40) ** 2))) * np.exp(0.15 * rng.standard_normal(n))
    return make(rng, loss + 0.02 * rng.standard_normal(n), norm)


def cosine_decay(rng, n):
    """The loss falls faster as the learning rate decays, and the gradient norm rises slowly."""
    t = np.arange(n)
    loss = falling(n) - 0.25 * (t / n) ** 2
    return make(rng, loss * (1 + 0.015 * rng.standard_normal(n)), norms(rng, n) * (1 + 1.5 * t / n))


def heavy_tails(rng, n):
    """Small batches: Student's t with 4 degrees of freedom in the loss and in the log of the gradient norm."""
    loss = falling(n) + 0.15 * rng.standard_t(4, n)
    return make(rng, loss, (0.4 + 5 * np.exp(-np.arange(n) / 40)) * np.exp(0.25 * rng.standard_t(4, n)))


def small_batch(rng, n):
    return make(rng, falling(n) * (1 + 0.08 * rng.standard_normal(n)), norms(rng, n, 0.35))


def warm_up(rng, n):
    """A fresh model under a long warm-up: the loss falls as the rate rises, gradients shrink tenfold."""
    t = np.arange(n)
    fall = 6.5 * (1 - np.exp(-t * np.minimum(1, t / 600) / 250)) + 0.3 * np.log1p(t / 500)
    norm = (0.5 + 6 * np.exp(-t / 80)) * np.exp(0.25 * rng.standard_normal(n))
    return make(rng, 10.8 - fall + 0.05 * rng.standard_normal(n), norm, lr=cosine(t, warmup=min(2000, n // 4)))


def high_rate(rng, n):
    """At the edge of a too high learning rate: slow wandering of 3 % on top of the noise of batches."""
    wander, steps = np.empty(n), rng.standard_normal(n)
    last = 0.0
    for i in range(n):
        last = 0.97 * last + steps[i] * np.sqrt(1 - 0.97**2)
        wander[i] = last
    norm = norms(rng, n, 0.3) * np.exp(0.2 * wander)
    return make(rng, falling(n) * (1 + 0.02 * wander + 0.03 * rng.standard_normal(n)), norm)


def code_rows(rng, n):
    """Code: the odd row of base64 or of generated tables lifts a step's loss by a tenth to a half."""
    rare = np.where(rng.random(n) < 0.01, rng.exponential(0.12, n) + 0.1, 0.0)
    loss = 0.55 * falling(n) * (1 + 0.04 * rng.standard_normal(n) + np.minimum(rare, 0.8))
    return make(rng, loss, norms(rng, n, 0.3) * (1 + 3 * rare))


def batch_change(rng, n):
    """A fourth of the way the batch grows fourfold: less noise, smaller gradients, longer steps, more memory."""
    t, at = np.arange(n), n // 4
    later = t >= at
    loss = falling(n) * (1 + np.where(later, 0.02, 0.04) * rng.standard_normal(n))
    trace = make(rng, loss, norms(rng, n) * np.where(later, 0.5, 1.0), reopen=(at,))
    trace.memory += later * 8 * GIB
    return trace


def epochs(rng, n):
    """Fine-tuning in four epochs: the loss falls at their borders, and gradients shrink as data is learnt by heart."""
    t = np.arange(n)
    level = np.array([1.4, 0.9, 0.5, 0.25])[np.minimum(3, 4 * t // n)] + 0.6 * np.exp(-t / 60)
    norm = 0.6 * level * np.exp(0.4 * rng.standard_normal(n))
    lr = 2e-5 * np.minimum(1, (t + 1) / 100) * (1 - t / n)
    return make(rng, level * np.exp(0.2 * rng.standard_normal(n)), norm, lr=lr)


FAMILIES = [
    fast_fall, large_batch, plateau_then_fall, cosine_decay, heavy_tails, small_batch, warm_up, high_rate, code_rows,
    batch_change, epochs,
]  # fmt: skip


def replay(trace: Trace, spec: GuardSpec | None = None, watch: Detectors | None = None) -> list[Alarm]:
    """Every alarm of a run."""
    watch = watch or Detectors(spec or GuardSpec(), LIMIT, len(trace.loss))
    found: list[Alarm] = []
    for record in trace.records():
        if record["step"] in trace.reopen:
            watch.reopen("the batch size changes")
        found += watch.step(record, (1.7e9 + 0.4 * record["step"], 0.4 * record["step"]))
    return found


@pytest.fixture
def families() -> list[Callable[[np.random.Generator, int], Trace]]:
    return FAMILIES


@pytest.fixture
def play() -> Callable[..., list[Alarm]]:
    return replay
