"""Validation inside a run: the loss on the same held-out sequences every time, per source and in all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import ConcatRows, Rows
from bessemer.model.transformer import Decoder
from bessemer.parallel.shard import drop_gathered
from bessemer.parallel.world import World
from bessemer.spec.mixture import quantise
from bessemer.train.compile import compute_in
from bessemer.train.engine import PipelineRunner
from bessemer.train.objective import Pretrain


@dataclass(frozen=True)
class Validation:
    """Nats per token, bits per byte of text, and the share of next tokens guessed right."""

    loss: float
    bits_per_byte: float
    accuracy: float
    tokens: int
    per_source: dict[str, float]


@dataclass(frozen=True)
class HeldOutSet:
    """Rows to validate on, of how many tokens, and how many bytes of text a token stands for, ends of documents
    counted among the tokens."""

    rows: Rows
    tokens: int
    bytes_per_token: float

    @staticmethod
    def of_store(store: TokenStore, context: int) -> HeldOutSet:
        return HeldOutSet(ConcatRows(store, context), store.tokens, store.text_bytes / max(1, store.tokens))


class Evaluator:
    """Holds the chosen sequences: a fixed shuffled part of each held-out source, in proportion to its size."""

    def __init__(
        self,
        held_out: Mapping[str, HeldOutSet | TokenStore],
        context: int,
        tokens: int,
        micro_rows: int,
        precision: str,
        device: torch.device,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        found = {
            name: held if isinstance(held, HeldOutSet) else HeldOutSet.of_store(held, context)
            for name, held in held_out.items()
        }
        self.held_out = {name: held for name, held in found.items() if held.rows.count}
        self.precision, self.device = precision, device
        self.parts: dict[str, tuple[BatchStream, int]] = {}
        available = sum(held.tokens for held in self.held_out.values())
        for name, held in self.held_out.items():
            sequences = held.rows.count
            rows = min(micro_rows, sequences)
            order = StreamOrder([MixturePhase(0, quantise({name: 1.0}))], {name: sequences}, seed=0)
            stream = BatchStream({name: held.rows}, order, context, StepPositions([BatchPhase(0, rows)]))
            wanted = min(sequences, tokens / context * held.tokens / available)
            self.parts[name] = (stream, max(1, int(wanted // rows)))

    @property
    def available(self) -> bool:
        return bool(self.parts)

    @torch.no_grad()
    def evaluate(
        self, model: Decoder, objective: Pretrain, pipeline: PipelineRunner | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Validation:  # fmt: skip
        """Costs one forward pass over the chosen tokens; changes nothing. `on_batch` is given the passes done and their
        number, before each; what it raises ends the evaluation."""
        model.eval()
        try:
            return self._evaluate(model, objective, pipeline, on_batch or (lambda done, total: None))
        finally:
            model.train()
            drop_gathered(model)  # these weights may be averages, which are put back

    def _evaluate(
        self, model: Decoder, objective: Pretrain, pipeline: PipelineRunner | None, on_batch: Callable[[int, int], None]
    ) -> Validation:
        world, together = self.world, self.world.layout.pp
        sums: dict[str, tuple[float, float, int]] = {}
        stride, done = world.layout.dp * together, 0
        passes = sum(-(-steps // stride) for _, steps in self.parts.values())
        for name, (stream, steps) in self.parts.items():
            loss, correct, count = 0.0, 0.0, 0
            mine = objective.on(name)
            for start in range(0, steps, stride):
                on_batch(done, passes)
                done += 1
                # Passes are counted alike everywhere, since layers may be gathered: some are for nothing.
                first = start + world.dp_rank * together
                feeds = [
                    mine.feed(stream.batch(min(step, steps - 1)), self.device)
                    for step in range(first, first + together)
                ]
                if pipeline:
                    found = pipeline.run(feeds, 1.0, objective=mine)
                else:
                    with compute_in(self.precision, self.device):
                        found = [mine.loss(model, feeds[0], 1.0)]
                if not world.speaks:
                    continue
                for _, feed, terms in zip(range(first, steps), feeds, found, strict=False):
                    loss += float(terms.nll)
                    correct += float(terms.correct)
                    count += int(feed.count) if world.cp_rank == 0 else 0
            loss, correct, tokens = world.sums((loss, correct, count))
            sums[name] = (loss, correct, int(tokens))
        total = sum(count for _, _, count in sums.values())
        bits = sum(loss / self.held_out[name].bytes_per_token for name, (loss, _, _) in sums.items())
        return Validation(
            loss=sum(loss for loss, _, _ in sums.values()) / total,
            bits_per_byte=bits / total / math.log(2),
            accuracy=sum(correct for _, correct, _ in sums.values()) / total,
            tokens=total,
            per_source={name: loss / count for name, (loss, _, count) in sums.items()},
        )
