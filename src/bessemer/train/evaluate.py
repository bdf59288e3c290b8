"""Validation inside a run: the loss on the same held-out sequences every time, per source and overall."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import ConcatRows, Rows, Transform
from bessemer.model.transformer import Decoder
from bessemer.parallel.shard import free_gathered_weights
from bessemer.parallel.world import World
from bessemer.spec.mixture import quantise
from bessemer.train.compile import compute_in
from bessemer.train.engine import PipelineRunner, step_means
from bessemer.train.objective import ModelInputs, Objective, ValidationSums


@dataclass(frozen=True)
class Validation:
    """The loss, overall and by source, and the objective's own numbers: of pre-training, nats per token, bits per byte
    of text, and the share of next tokens predicted right."""

    loss: float
    metrics: dict[str, Any]
    tokens: int
    per_source: dict[str, float]


@dataclass(frozen=True)
class HeldOutSet:
    """Rows to validate on, their tokens, and the bytes of text per token, where end-of-document tokens count."""

    rows: Rows
    tokens: int
    bytes_per_token: float
    mismatched: bool = False  # rows come with the targets of others (`mismatch` of the stream)
    transforms: tuple[Transform, ...] = ()

    @staticmethod
    def of_store(store: TokenStore, context: int) -> HeldOutSet:
        return HeldOutSet(ConcatRows(store, context), store.tokens, store.text_bytes / max(1, store.tokens))


class Evaluator:
    """Evaluates on fixed sequences: a shuffled part of each held-out source, in proportion to its size."""

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
        sets = {
            name: part if isinstance(part, HeldOutSet) else HeldOutSet.of_store(part, context)
            for name, part in held_out.items()
        }
        self.held_out = {name: part for name, part in sets.items() if part.rows.count}
        self.precision, self.device = precision, device
        self.parts: dict[str, tuple[BatchStream, int]] = {}
        available = sum(part.tokens for part in self.held_out.values())
        for name, part in self.held_out.items():
            sequences = part.rows.count
            order = StreamOrder([MixturePhase(0, quantise({name: 1.0}))], {name: sequences}, seed=0)
            # The rows do not depend on the micro-batch: the last pass has missing rows instead.
            count = max(1, int(min(sequences, tokens / context * part.tokens / available)))
            rows = min(micro_rows, count)
            stream = BatchStream(
                {name: part.rows}, order, context, StepPositions([BatchPhase(0, rows)]), transforms=part.transforms,
                mismatch=count if part.mismatched else None, length=count,
            )  # fmt: skip
            self.parts[name] = (stream, -(-count // rows))

    def begin(self, step: int) -> None:
        """Called before each evaluation, after `step` steps."""

    @property
    def available(self) -> bool:
        return bool(self.parts)

    @torch.no_grad()
    def evaluate(
        self, model: Decoder, objective: Objective, pipeline: PipelineRunner | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Validation:  # fmt: skip
        """Run one forward pass over the chosen tokens; nothing changes. `on_batch` gets the passes done and their total
        before each; an exception from it ends the evaluation."""
        model.eval()
        try:
            return self._evaluate(model, objective, pipeline, on_batch or (lambda done, total: None))
        finally:
            model.train()
            free_gathered_weights(model)  # these weights may be averages, which are swapped out next

    def _evaluate(
        self,
        model: Decoder,
        objective: Objective,
        pipeline: PipelineRunner | None,
        on_batch: Callable[[int, int], None],
    ) -> Validation:
        world, per_pass = self.world, self.world.layout.pp  # a pipeline takes several batches at once
        losses: dict[str, tuple[float, int]] = {}
        metrics, table = dict.fromkeys(objective.metrics, (0.0, 0.0)), None
        stride, done = world.layout.dp * per_pass, 0
        passes = sum(-(-steps // stride) for _, steps in self.parts.values())
        for name, (stream, steps) in self.parts.items():
            loss, count, sums_M2 = 0.0, 0, [[0.0, 0.0] for _ in metrics]
            objective_here = objective.on(name)
            constants = self._constants(model, objective_here, stream, steps)
            for start in range(0, steps, stride):
                on_batch(done, passes)
                done += 1
                # Every rank runs as many passes, since layers may be gathered in them; some count for nothing.
                first = start + world.dp_rank * per_pass
                inputs = [
                    objective_here.feed(stream.batch(min(step, steps - 1)), self.device)
                    for step in range(first, first + per_pass)
                ]
                for part in inputs:
                    part.totals |= constants
                if pipeline:
                    results = pipeline.run(inputs, 1.0, objective=objective_here)
                else:
                    with compute_in(self.precision, self.device):
                        results = [objective_here.loss(model, inputs[0], 1.0)]
                if not world.reports_losses:
                    continue
                for _, part, terms in zip(range(first, steps), inputs, results, strict=False):
                    loss += float(terms.nll)
                    count += int(part.count) if world.cp_rank == 0 else 0
                    for sums_2, metric in zip(sums_M2, terms.metrics.values(), strict=True):
                        sums_2[:] = (total + float(value) for total, value in zip(sums_2, metric, strict=True))
                    if terms.table is not None:
                        table = terms.table.double() if table is None else table + terms.table
            loss, total, *flat = world.sums((loss, count, *(value for sums_2 in sums_M2 for value in sums_2)))
            losses[name] = (loss, int(total))
            for metric_name, more in zip(metrics, zip(flat[::2], flat[1::2], strict=True), strict=True):
                metrics[metric_name] = (metrics[metric_name][0] + more[0], metrics[metric_name][1] + more[1])
        return self._summarise(objective, losses, metrics, table)

    def _constants(self, model: Decoder, objective: Objective, stream: BatchStream, steps: int) -> dict[str, float]:
        """The objective's `step_means` over a source's rows. Passes that only fill up a stride have no weights."""
        if not objective.step_means:
            return {}

        def feed(step: int) -> ModelInputs:
            batch = stream.batch(min(step, steps - 1))
            batch = batch if step < steps else replace(batch, weights=np.zeros_like(batch.weights))
            return objective.feed(batch, self.device)

        with compute_in(self.precision, self.device):
            own = (feed(start + self.world.dp_rank) for start in range(0, steps, self.world.layout.dp))
            return step_means(objective, model, own, self.world)

    def _summarise(
        self, objective: Objective, losses: dict[str, tuple[float, int]], metrics: dict[str, tuple[float, float]],
        table: Tensor | None,
    ) -> Validation:  # fmt: skip
        sizes = self.world.gather(None if table is None else tuple(table.shape))
        if shape := next((size for size in sizes if size), None):  # some ranks may have validated nothing
            flat = [0.0] * math.prod(shape) if table is None else table.flatten().tolist()
            table = torch.tensor(self.world.sums(flat), dtype=torch.float64).view(shape)
        total = sum(count for _, count in losses.values())
        nats_per_byte = sum(loss / self.held_out[name].bytes_per_token for name, (loss, _) in losses.items())
        loss = sum(loss for loss, _ in losses.values())
        sums = ValidationSums(loss, total, nats_per_byte, metrics, table)
        return Validation(
            loss=loss / total,
            metrics=objective.summarise(sums),
            tokens=total,
            per_source={name: loss / count for name, (loss, count) in losses.items() if count},
        )
