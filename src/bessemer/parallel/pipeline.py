"""Pipeline parallelism: the layers are split into stages over ranks, and torch's schedules run micro-batches through
them. A stage is the same decoder without the layers of other ranks, so every weight keeps its name: checkpoints do not
depend on the split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from bessemer.model.moe import routing_terms
from bessemer.model.transformer import Decoder, compute_dtype
from bessemer.parallel.shard import local
from bessemer.parallel.world import World
from bessemer.spec.schema import PipelineSpec

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
AFTER_BLOCKS = ("norm", "transform", "head")  # modules after a decoder's blocks; all others come before them


class RemoteLayer(nn.Module):
    """A layer on another rank."""


class _AddAuxLoss(torch.autograd.Function):
    """Passes hidden states through; the backward pass also minimises `extra`, an auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.extra = extra
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones_like(ctx.extra)


class Stage(nn.Module):
    """Consecutive layers, with the modules before the first layer or after the last. Runs micro-batch number `rows[0]
    // micro_rows`, whose masks each rank builds itself."""

    def __init__(self, model: Decoder, layers: range, pipeline: Pipeline) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == len(model.blocks)
        self.blocks = nn.ModuleList(model.blocks[i] for i in layers)
        for name, module in model.named_children():
            tied = name == "embedding" and self.last and model.shape.tied
            if name != "blocks" and (self.last if name in AFTER_BLOCKS else self.first or tied):
                self.add_module(name, module)
        self._model, self._pipeline = (model,), (pipeline,)  # in tuples, so that torch does not register them

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """From tokens, or from the previous stage's output, to hidden states."""
        model, pipeline = self._model[0], self._pipeline[0]
        with pipeline.compute_context():
            feed = pipeline.feed_of(rows)
            attention_mask, length = feed.attention_mask, feed.tokens_BT.shape[1]
            attention_mask.configure(model.shape)
            if self.first:
                x = model.embed(x, attention_mask)
            inputs = model.attention_inputs(x, attention_mask, length=length)
            for block in self.blocks:
                x = block(x, inputs, None)
            if model.shape.moe is not None and self.training:
                routing, _ = routing_terms(self)
                x = x if routing is None else _AddAuxLoss.apply(x, routing * pipeline.weight(feed))
            if self.last:
                x = model.norm(x) if model.shape.norm_place != "post" else x
                x = x if model.transform is None else model.transform(x)
                x = local(x)  # its gradient comes back unsharded
            if torch.is_grad_enabled() and not x.requires_grad:  # all of it is frozen, and so is all before it
                x = x.detach().requires_grad_()  # takes the gradient that the schedule sends back
        return x


class TimedStage(PipelineStage):
    """Measures the time of its own work; the rest of a step is waiting: the pipeline bubble."""

    busy: list[float | tuple[Any, Any]]  # seconds, or CUDA events (start, end)

    def _timed(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cuda":
            start_s = time.perf_counter()
            result = work(*args, **kwargs)
            self.busy.append(time.perf_counter() - start_s)
            return result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work(*args, **kwargs)
        end.record()
        self.busy.append((start, end))
        return result

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().backward_weight_one_chunk, *args, **kwargs)


class Pipeline:
    """This rank's stages and their schedule. `feeds` of a step are whatever the caller's `compute_loss` understands."""

    def __init__(self, model: Decoder, world: World, spec: PipelineSpec, layers: Sequence[range]) -> None:
        """Split `model` in inputs: modules of other ranks are dropped from it."""
        self.world, self.spec, self.model = world, spec, model
        self.compute_context: Callable[[], AbstractContextManager[Any]] = lambda: torch.enable_grad()
        self.weight: Callable[[Any], Tensor | float] = lambda feed: 1.0  # of auxiliary losses
        self.divided_rows = False  # sequence-sharded activations between stages
        self._busy: list[float | tuple[Any, Any]] = []
        self.busy_s = 0.0  # of the last finished step
        self.layers = list(layers)
        size, rank = world.layout.pp, world.pp_rank
        self.numbers = [i for i in range(len(layers)) if i % size == rank]
        self.stages = [Stage(model, layers[i], self) for i in self.numbers]
        local_layers = {layer for i in self.numbers for layer in layers[i]}
        for i in range(len(model.blocks)):
            if i not in local_layers:
                model.blocks[i] = RemoteLayer()
        local_modules = {name for stage in self.stages for name, _ in stage.named_children()}
        for name, _ in list(model.named_children()):
            if name != "blocks" and name not in local_modules:
                delattr(model, name)
        self._feeds: list[Any] = []
        self._compute_loss: Callable[[Any, Tensor], Any] | None = None
        self._terms: dict[int, Any] = {}
        self._built: dict[tuple[int, ...], Any] = {}
        self.embedding_group = self._make_embedding_group(len(layers)) if model.shape.tied else None

    def _make_embedding_group(self, stages: int) -> Any:
        """The two ranks that share the tied embedding: the first stage's and the last one's."""
        layout = self.world.layout
        ranks = torch.arange(self.world.size).view(layout.pp, -1)
        pairs = ranks[[0, (stages - 1) % layout.pp]].t().tolist()
        assert pairs[0][0] != pairs[0][1]
        group, _ = dist.new_subgroups_by_enumeration(pairs)
        return group

    @property
    def is_first(self) -> bool:
        return 0 in self.numbers

    @property
    def is_last(self) -> bool:
        return len(self.layers) - 1 in self.numbers

    def feed_of(self, rows: Tensor) -> Any:
        return self._feeds[int(rows[0]) // self._micro_rows]

    def _schedule(self, count: int, tokens_BT: Tensor, training: bool) -> Any:
        """The schedule for this number and size of micro-batches, built once."""
        key = (count, *tokens_BT.shape, training)
        if key in self._built:
            return self._built[key]
        B, T = tokens_BT.shape
        W, tp = self.model.shape.width, self.world.layout.tp
        with self.compute_context():
            autocast_dtype = compute_dtype(torch.empty(0, device=tokens_BT.device))
        dtype = autocast_dtype if tokens_BT.device.type == "cuda" else torch.float32
        columns = T // tp if self.divided_rows else T
        between = torch.empty(B, columns, W, device="meta", dtype=dtype, requires_grad=training)
        output = torch.empty(B, T, W, device="meta", dtype=dtype, requires_grad=training)
        stages = []
        for number, stage in zip(self.numbers, self.stages, strict=True):
            timed = TimedStage(
                stage, number, len(self.layers), self.world.device,
                input_args=tokens_BT.to("meta") if stage.first else between,
                output_args=output if stage.last else between, group=self.world.group("pp"),
            )  # fmt: skip
            timed.busy = self._busy
            stages.append(timed)
        make = SCHEDULES[self.spec.schedule]
        interleaved = issubclass(make, (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble))
        argument: Any = stages if interleaved else stages[0]
        self._built[key] = schedule = make(argument, count, loss_fn=self._loss, scale_grads=False)
        return schedule

    def _loss(self, hidden_BTW: Tensor, rows: Tensor) -> Tensor:
        assert self._compute_loss is not None
        with self.compute_context():
            terms = self._compute_loss(self.feed_of(rows), hidden_BTW)
        self._terms[int(rows[0]) // self._micro_rows] = terms
        loss: Tensor = terms.loss
        return loss

    def _note_busy(self) -> None:
        """Sum the last step's work if all of it is finished: on a GPU it is known a step later, without waiting."""
        if all(isinstance(span, float) or span[1].query() for span in self._busy):
            self.busy_s = sum(s if isinstance(s, float) else s[0].elapsed_time(s[1]) / 1e3 for s in self._busy)
        self._busy.clear()

    def padded_count(self, count: int) -> int:
        """Interleaved schedules need full rounds of micro-batches, and every schedule at least one per stage."""
        size = self.world.layout.pp
        return -(-count // size) * size if len(self.numbers) > 1 else max(count, size)

    def run(self, feeds: Sequence[Any], compute_loss: Callable[[Any, Tensor], Any], training: bool) -> list[Any]:
        """Forward, and in training backward, of all micro-batches. Returns the terms of each on the last stage, nothing
        elsewhere. If the schedule needs more micro-batches, the last one is repeated with weight 0."""
        self._note_busy()
        self._feeds, self._compute_loss, self._terms = list(feeds), compute_loss, {}
        missing = self.padded_count(len(feeds)) - len(feeds)
        self._feeds += [feeds[-1].without_weight() for _ in range(missing)]
        self._micro_rows = len(feeds[0].tokens_BT)
        rows = torch.arange(len(self._feeds) * self._micro_rows)
        schedule = self._schedule(len(self._feeds), feeds[0].tokens_BT, training)
        tokens = (torch.cat([feed.tokens_BT for feed in self._feeds]),) if self.is_first else ()
        target = rows if self.is_last else None
        run = schedule.step if training else schedule.eval
        run(*tokens, target=target, losses=[] if self.is_last else None, rows=rows, return_outputs=False)
        if training and self.embedding_group is not None and (self.is_first or self.is_last):
            weight = self.model.embedding.weight
            if weight.requires_grad:
                assert weight.grad is not None
                dist.all_reduce(local(weight.grad), group=self.embedding_group)
        if self.world.device.type != "cuda":
            self._note_busy()
        terms = [self._terms[i] for i in range(len(feeds))] if self.is_last else []
        self._feeds, self._terms = [], {}
        return terms
