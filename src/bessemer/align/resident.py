"""The generator of a run that samples its own answers.

On a CPU, and where ranks divide a matrix, a generator is made for each round and reads the run's weights in place. On a
GPU one generator is kept: compiled passes and captured graphs hold addresses, so it has its own copy of the weights in
the compute dtype, which each round overwrites in place. It is discarded if it does not fit in memory next to a training
step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from bessemer.model.generate import Generator
from bessemer.model.transformer import Decoder
from bessemer.parallel.generate import gathered, own_copy
from bessemer.parallel.world import World
from bessemer.plan.decide import HALF

SHARE = 0.9  # of a GPU's memory that a training step and the kept generator may take together


@dataclass
class RoundGenerator:
    """Provides a generator with the present weights for each round."""

    context: int
    slots: int  # of a kept generator
    keeps: bool = True  # where it is possible
    compiled: bool = False
    sync_s: float = 0.0  # the last round's: to copy the weights, and the first time to build the generator
    kept: Generator | None = None
    copied: list[nn.Parameter] = field(default_factory=list)  # its weights

    @contextmanager
    def provide(self, model: Decoder, world: World, precision: str, answers: int) -> Iterator[Generator]:
        began_s = time.perf_counter()
        if not self.keeps or world.device.type != "cuda" or world.layout.tp > 1:
            with plain_model(model, world, precision) as local:
                self.sync_s = time.perf_counter() - began_s
                yield Generator(local, max(1, min(self.slots, answers)), self.context)
            return
        with gathered(model, world) as local:
            if self.kept is None:
                self._build(local, precision)
            else:
                self._copy(local)
                self.kept.weights_changed()
        torch.cuda.synchronize(world.device)
        self.sync_s = time.perf_counter() - began_s
        assert self.kept is not None
        try:
            yield self.kept
        except BaseException:
            self.kept = None  # requests are left in its slots
            raise

    def _build(self, local: Decoder, precision: str) -> None:
        own = own_copy(local, torch.bfloat16 if precision in HALF else None)
        self.copied = list(own.parameters())
        self.kept = Generator(own, self.slots, self.context, compiled=self.compiled)
        self.kept.reserve()  # graphs are captured again when a cache grows

    def _copy(self, local: Decoder) -> None:
        with torch.no_grad():
            for target, source in zip(self.copied, local.parameters(), strict=True):
                target.data.copy_(source.data)

    def make_room(self, peak_bytes: int, device: torch.device) -> None:
        """Gives up keeping the generator if a step with this peak, in which the generator counts, is too large."""
        if self.kept is not None and peak_bytes > SHARE * torch.cuda.mem_get_info(device)[1]:
            self.give_up()

    def give_up(self) -> None:
        """Discards the generator: from now on one is made for each round."""
        self.keeps, self.kept, self.copied = False, None, []
        torch.cuda.empty_cache()


@contextmanager
def plain_model(model: Decoder, world: World, precision: str) -> Iterator[Decoder]:
    """The model for a generator, in the precision that training computes in. On a GPU, fp32 weights are copied."""
    with gathered(model, world) as local:
        if world.device.type == "cuda" and precision in HALF:
            local.to(torch.bfloat16)
        yield local
