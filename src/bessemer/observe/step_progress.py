"""How far one step is: micro-batches given to the device, their rate, and what is left of the run at that rate."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.spec.quantity import human_time


@dataclass
class StepProgress:
    """A step that is being computed. Times are those of the host, which a GPU may be a little behind of."""

    step: int
    total: int  # micro-batches
    tokens: int  # of the whole step
    began_s: float
    done: int = 0
    first_s: float = 0.0  # when the first micro-batch was done: it may have compiled something
    last_s: float = 0.0

    def advance(self, done: int, now_s: float) -> None:
        self.first_s = self.first_s or now_s
        self.done, self.last_s = done, now_s

    @property
    def share(self) -> float:
        return self.done / max(1, self.total)

    @property
    def micro_batch_s(self) -> float | None:
        """Seconds of a micro-batch, the first one left out; None before the second."""
        return max(1e-9, self.last_s - self.first_s) / (self.done - 1) if self.done > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = self.micro_batch_s
        return None if seconds is None else self.tokens / self.total / seconds

    def left_s(self, total_steps: int) -> float | None:
        """Seconds to the end of a run of so many steps of this size."""
        seconds = self.micro_batch_s
        return None if seconds is None else seconds * (self.total * max(1, total_steps - self.step) - self.done)

    def line(self, total_steps: int) -> str:
        """`step 1/6,104  micro-batch 3/16  812 tok/s  eta 17h 10m`."""
        parts = [f"step {self.step + 1:,}/{total_steps:,}", f"micro-batch {self.done}/{self.total}"]
        rate, left = self.tokens_per_s, self.left_s(total_steps)
        if rate is not None and left is not None:
            parts += [f"{rate:,.0f} tok/s", f"eta {human_time(left)}"]
        return "  ".join(parts)
