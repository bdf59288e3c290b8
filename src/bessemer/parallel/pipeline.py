"""Pipeline parallel: the layers of a model cut into stages that processes hold in turn, and torch's schedules by which
micro-batches flow through them. A stage is the same decoder with the layers of others taken out, so that every weight
keeps its name, whatever the cut: checkpoints know nothing of stages.
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
from bessemer.spec.parallel import PipelineSpec

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
BEHIND = ("norm", "transform", "head")  # parts of a decoder that stand behind its blocks; the others stand before them


class RemoteLayer(nn.Module):
    """A layer that another process holds."""


class _Besides(torch.autograd.Function):
    """The hidden states unchanged; in the backward pass `extra`, a loss of a layer's own, is minimised too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.kind = extra
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones_like(ctx.kind)


class Stage(nn.Module):
    """Some consecutive layers, with what stands before the first of all and behind the last. It runs micro-batch number
    `rows[0] // micro_rows`, whose masks every process makes for itself."""

    def __init__(self, model: Decoder, layers: range, pipeline: Pipeline) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == len(model.blocks)
        self.blocks = nn.ModuleList(model.blocks[i] for i in layers)
        for name, module in model.named_children():
            tied = name == "embedding" and self.last and model.shape.tied
            if name != "blocks" and (self.last if name in BEHIND else self.first or tied):
                self.add_module(name, module)
        self._model, self._pipeline = (model,), (pipeline,)  # in tuples, out of the sight of torch

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """From tokens, or from what the stage before made, to hidden states."""
        model, pipeline = self._model[0], self._pipeline[0]
        with pipeline.computing():
            feed = pipeline.feed_of(rows)
            sight, length = feed.sight, feed.tokens_BT.shape[1]
            sight.causal, sight.blocks = model.shape.causal, model.shape.blocks
            if self.first:
                x = model.embed(x, sight)
            place = model.place(x, sight, length=length)
            for block in self.blocks:
                x = block(x, place, None)
            if model.shape.moe is not None and self.training:
                routing, _ = routing_terms(self)
                x = x if routing is None else _Besides.apply(x, routing * pipeline.weight(feed))
            if self.last:
                x = model.norm(x) if model.shape.norm_place != "post" else x
                x = model.transform(x) if model.shape.head_transform else x
                x = local(x)  # its gradient comes back whole
        return x


class Timed(PipelineStage):
    """Counts the time of its own work, so that the rest of a step is known for waiting: the bubble."""

    busy: list[float | tuple[Any, Any]]  # seconds, or events around them

    def _timed(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cuda":
            began = time.perf_counter()
            result = work(*args, **kwargs)
            self.busy.append(time.perf_counter() - began)
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
    """This process's stages and their schedule. `feeds` of a step are whatever the caller's `judge` understands."""

    def __init__(self, model: Decoder, world: World, asked: PipelineSpec, layers: Sequence[range]) -> None:
        """Cut `model` in place: what other processes hold is dropped from it."""
        self.world, self.asked, self.model = world, asked, model
        self.computing: Callable[[], AbstractContextManager[Any]] = lambda: torch.enable_grad()
        self.weight: Callable[[Any], Tensor | float] = lambda feed: 1.0  # of a layer's own loss
        self.divided_rows = False  # between stages, with tensor parallel
        self._busy: list[float | tuple[Any, Any]] = []
        self.busy_s = 0.0  # of the last step that is known
        self.layers = list(layers)
        size, mine = world.layout.pp, world.pp_rank
        self.numbers = [i for i in range(len(layers)) if i % size == mine]
        self.stages = [Stage(model, layers[i], self) for i in self.numbers]
        held = {layer for i in self.numbers for layer in layers[i]}
        for i in range(len(model.blocks)):
            if i not in held:
                model.blocks[i] = RemoteLayer()
        has = {name for stage in self.stages for name, _ in stage.named_children()}
        for name, _ in list(model.named_children()):
            if name != "blocks" and name not in has:
                delattr(model, name)
        self._feeds: list[Any] = []
        self._judge: Callable[[Any, Tensor], Any] | None = None
        self._terms: dict[int, Any] = {}
        self._built: dict[tuple[int, ...], Any] = {}
        self.pair = self._pair(len(layers)) if model.shape.tied else None

    def _pair(self, stages: int) -> Any:
        """The two processes that have a part of the embedding in common, which is the head too."""
        layout = self.world.layout
        ranks = torch.arange(self.world.size).view(layout.pp, -1)
        ends = ranks[[0, (stages - 1) % layout.pp]].t().tolist()
        assert ends[0][0] != ends[0][1]
        group, _ = dist.new_subgroups_by_enumeration(ends)
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
        """For so many micro-batches of a size; made once."""
        key = (count, *tokens_BT.shape, training)
        if key in self._built:
            return self._built[key]
        B, T = tokens_BT.shape
        W, tp = self.model.shape.width, self.world.layout.tp
        with self.computing():
            kind = compute_dtype(torch.empty(0, device=tokens_BT.device))
        inner = kind if tokens_BT.device.type == "cuda" else torch.float32
        between = torch.empty(
            B, T // tp if self.divided_rows else T, W, device="meta", dtype=inner, requires_grad=training
        )
        whole = torch.empty(B, T, W, device="meta", dtype=inner, requires_grad=training)
        stages = []
        for number, stage in zip(self.numbers, self.stages, strict=True):
            timed = Timed(
                stage, number, len(self.layers), self.world.device,
                input_args=tokens_BT.to("meta") if stage.first else between,
                output_args=whole if stage.last else between, group=self.world.group("pp"),
            )  # fmt: skip
            timed.busy = self._busy
            stages.append(timed)
        make = SCHEDULES[self.asked.schedule]
        given: Any = stages if issubclass(make, (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)) else stages[0]
        self._built[key] = made = make(given, count, loss_fn=self._loss, scale_grads=False)
        return made

    def _loss(self, hidden_BTW: Tensor, rows: Tensor) -> Tensor:
        assert self._judge is not None
        with self.computing():
            terms = self._judge(self.feed_of(rows), hidden_BTW)
        self._terms[int(rows[0]) // self._micro_rows] = terms
        loss: Tensor = terms.loss
        return loss

    def _note_busy(self) -> None:
        """Add up the last step's work if all of it is done: a GPU's is seen a step later, and never waited for."""
        if all(isinstance(spell, float) or spell[1].query() for spell in self._busy):
            self.busy_s = sum(s if isinstance(s, float) else s[0].elapsed_time(s[1]) / 1e3 for s in self._busy)
        self._busy.clear()

    def padded(self, count: int) -> int:
        """Schedules of several stages want full rounds of micro-batches, and every one at least one for each stage."""
        size = self.world.layout.pp
        return -(-count // size) * size if len(self.numbers) > 1 else max(count, size)

    def run(self, feeds: Sequence[Any], judge: Callable[[Any, Tensor], Any], training: bool) -> list[Any]:
        """Forward, and in training backward, of all micro-batches; the terms of each on the last stage, elsewhere
        nothing. Where the schedule wants more micro-batches the last one is run again without weight."""
        self._note_busy()
        self._feeds, self._judge, self._terms = list(feeds), judge, {}
        missing = self.padded(len(feeds)) - len(feeds)
        self._feeds += [feeds[-1].without_weight() for _ in range(missing)]
        self._micro_rows = len(feeds[0].tokens_BT)
        rows = torch.arange(len(self._feeds) * self._micro_rows)
        schedule = self._schedule(len(self._feeds), feeds[0].tokens_BT, training)
        tokens = (torch.cat([feed.tokens_BT for feed in self._feeds]),) if self.is_first else ()
        target = rows if self.is_last else None
        run = schedule.step if training else schedule.eval
        run(*tokens, target=target, losses=[] if self.is_last else None, rows=rows, return_outputs=False)
        if training and self.pair is not None and (self.is_first or self.is_last):
            gradient = self.model.embedding.weight.grad
            assert gradient is not None
            dist.all_reduce(local(gradient), group=self.pair)
        if self.world.device.type != "cuda":
            self._note_busy()
        found = [self._terms[i] for i in range(len(feeds))] if self.is_last else []
        self._feeds, self._terms = [], {}
        return found
