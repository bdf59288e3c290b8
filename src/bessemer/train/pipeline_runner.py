"""The passage of a step's micro-batches through the stages of a pipeline, from feeds to the terms of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bessemer.model.transformer import Decoder
from bessemer.train.compile import compute_in
from bessemer.train.objective import LossTerms, ModelInputs, Pretrain

if TYPE_CHECKING:
    from bessemer.parallel.pipeline import Pipeline


class PipelineRunner:
    """What the loop asks of a pipeline."""

    def __init__(self, pipeline: Pipeline, model: Decoder, objective: Pretrain, precision: str, sequence: bool) -> None:
        from bessemer.parallel.tensor import sequential

        self.pipeline, self.model, self.objective = pipeline, model, objective
        device, world = pipeline.world.device, pipeline.world

        def computing() -> AbstractContextManager[Any]:
            return compute_in(precision, device)

        pipeline.computing = computing
        pipeline.divided_rows = world.layout.tp > 1 and sequential(model.shape, sequence)

    @property
    def twice(self) -> Tensor | None:
        """A weight of this process that counts in another one: the last stage's copy of a tied embedding."""
        apart = self.model.shape.tied and self.pipeline.is_last and not self.pipeline.is_first
        return self.model.embedding.weight if apart else None

    def run(
        self, feeds: Sequence[ModelInputs], count: float, scale: Tensor | float | None = None,
        objective: Pretrain | None = None,
    ) -> list[LossTerms]:  # fmt: skip
        """Losses of all micro-batches where the last stage is, elsewhere nothing; gradients where they are wanted."""
        chosen = objective or self.objective

        def judge(feed: ModelInputs, hidden_BTW: Tensor) -> LossTerms:
            terms = chosen.judge(self.model, feed, hidden_BTW, count)
            return terms if scale is None else replace(terms, loss=terms.loss * scale)

        def weight(feed: ModelInputs) -> Tensor:
            share = (feed.weights_BT > 0).sum() / count
            return share if scale is None else share * scale

        self.pipeline.weight = weight
        return self.pipeline.run(feeds, judge, training=torch.is_grad_enabled())
