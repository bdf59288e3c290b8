"""The sizes that are compared, how their FLOPs are counted, and what one measurement says."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from typing import Any

PEAK_FLOPS = 989e12  # an H200's dense bf16; fp8 is given against the same, so that the numbers compare
PACKAGES = ("torch", "triton", "transformers", "accelerate", "torchtitan", "torchao", "liger_kernel", "liger-kernel")


@dataclass(frozen=True)
class Model:
    """A Llama-like decoder with the context and the rows it is measured with."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    context: int
    rows: int

    @property
    def multiplied(self) -> int:
        """Parameters that are multiplied: an untied input embedding is only looked up."""
        keys = self.kv_heads * self.width // self.heads
        return self.layers * self.width * (2 * self.width + 2 * keys + 3 * self.ffn) + self.width * self.vocab

    @property
    def parameters(self) -> int:
        return self.multiplied + (0 if self.tied else self.width * self.vocab) + (2 * self.layers + 1) * self.width

    @property
    def flops_per_token(self) -> int:
        """6 N + 12 L d T: attention in full, as PaLM and torchtitan count it."""
        return 6 * self.multiplied + 12 * self.layers * self.width * self.context


MODELS = {
    "tiny": Model(64, 2, 4, 2, 256, 512, False, 64, 2),  # to try a script without a GPU
    "124m": Model(768, 12, 12, 12, 2048, 50_304, True, 1024, 64),
    "1b": Model(2048, 16, 32, 8, 8192, 128_256, False, 4096, 8),
    "3b": Model(3072, 28, 24, 8, 8192, 128_256, False, 4096, 4),
    "8b": Model(4096, 32, 32, 8, 14_336, 128_256, False, 4096, 1),
    "70b": Model(8192, 80, 64, 8, 28_672, 128_256, False, 4096, 1),
}


@dataclass(frozen=True)
class Case:
    """One system on one model. `settings` are KEY=VALUE, for the system itself."""

    system: str
    name: str
    model: Model
    precision: str
    warmup: int
    steps: int
    settings: tuple[str, ...]
    folder: str

    @staticmethod
    def of(given: Any) -> Case:
        sizes = {key: value for key in ("context", "rows", "layers") if (value := getattr(given, key)) is not None}
        model = replace(MODELS[given.model], **sizes)
        precision = dict(setting.split("=", 1) for setting in given.set).get("precision", given.precision)
        return Case(
            given.system, given.model, model, precision, given.warmup, given.steps, tuple(given.set), given.folder
        )

    def result(self, step_s: float, peak_bytes: int, first_step_s: float, **more: Any) -> dict[str, Any]:
        """What a measurement says, the same for every system."""
        model, rate = self.model, self.model.rows * self.model.context / step_s
        names = {found.metadata["Name"]: found.version for found in distributions()}
        return {
            "system": self.system, "model": self.name, "precision": self.precision, "settings": list(self.settings),
            "tokens_per_s": round(rate), "mfu": round(rate * model.flops_per_token / PEAK_FLOPS, 4),
            "peak_gib": round(peak_bytes / 2**30, 2), "first_step_s": round(first_step_s, 1),
            "step_ms": round(1000 * step_s, 2), "parameters": model.parameters, "shape": asdict(model),
            "warmup": self.warmup, "steps": self.steps,
            "versions": {name: names[name] for name in PACKAGES if name in names}, **more,
        }  # fmt: skip


@dataclass
class Clock:
    """Counts steps; waits for the GPU after the first, after the warm-up and at the end, never between."""

    case: Case
    started_s: float  # when the command was given
    marks: dict[int, float] = field(default_factory=dict)
    done: int = 0
    peak_bytes: int = 0

    def step(self) -> None:
        import torch

        self.done += 1
        there = torch.cuda.is_available()
        if there:  # at every step, since torchtitan resets the peak when it logs
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        if self.done in (1, self.case.warmup, self.case.warmup + self.case.steps):
            if there:
                torch.cuda.synchronize()
            self.marks[self.done] = time.time()

    def result(self) -> dict[str, Any]:
        warmup, steps = self.case.warmup, self.case.steps
        step_s = (self.marks[warmup + steps] - self.marks[warmup]) / steps
        return self.case.result(step_s, self.peak_bytes, self.marks[1] - self.started_s)
