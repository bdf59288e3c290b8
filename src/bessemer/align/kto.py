"""The objective of single answers with a thumb up or down: KTO (Ethayarajh et al. 2024) and unpaired APO-zero, with the
values and gradients of TRL 1.13. A row of the batch holds one answer.

KTO compares an answer's log-ratio to the reference with a reference point: how much more probable the model finds
answers that belong to other prompts. TRL estimates it in each device's micro-batch. Here it is the mean over the step:
each prompt with the answer of the step's row before it, the first with that of the last; a pass without gradients over
all micro-batches comes first. So the loss is the same at any accumulation and number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bessemer.align.answers import DOCUMENT, LEARNED, REFERENCE, AnswerObjective, sum_answers
from bessemer.data.read.answers import CHOSEN
from bessemer.data.stream.batches import OTHER_TARGETS, OTHER_WEIGHTS, Batch
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder
from bessemer.spec.preference import KtoSpec
from bessemer.train.objective import ElementLosses, Metric, ModelInputs, Objective
from bessemer.train.objectives import ObjectiveBatch, pieces

GOOD = "good"  # field: (B, 1) 1 for a desirable answer
POINT = "kl"  # the reference point before it is clamped


class Kto(AnswerObjective):
    """Metrics: the rewards (beta times the log-ratio) of desirable and undesirable answers, the reference point `kl`,
    and accuracy, the share of answers on the right side of it."""

    metrics = ("accuracy", "chosen_reward", "rejected_reward", "chosen_shift", POINT)
    needs_models = (REFERENCE,)

    def __init__(
        self, spec: KtoSpec, eos_id: int = 0, begins: tuple[int, ...] | None = None, dropout_seed: int | None = None
    ) -> None:
        super().__init__(eos_id, begins, dropout_seed)
        self.spec, self.mismatched = spec, _Mismatched(self)
        if spec.needs_mismatched:
            self.step_means = (POINT,)

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        if CHOSEN not in batch.fields:
            raise UserError("objective: kto needs labels: name their column, such as columns: {label: thumbs_up}")
        weights = np.zeros_like(batch.weights)
        weights[:, 0] = batch.weights.any(axis=1)
        good = (batch.fields[CHOSEN][:, :1, 0] > 0).astype(np.float32)
        return self.rows(batch, weights, {GOOD: good})

    def rows(self, batch: Batch, weights: np.ndarray, fields: dict[str, np.ndarray]) -> ObjectiveBatch:
        """A batch with one answer in each row."""
        begun = self.begin(batch)
        fields = {LEARNED: batch.weights, DOCUMENT: np.zeros_like(batch.tokens), **fields}
        return ObjectiveBatch(
            begun.tokens, begun.targets, weights, begun.documents, np.zeros_like(batch.tokens), in_place=True,
            read=~pieces(batch).padding, fields=fields,
        )  # fmt: skip

    def feed(self, batch: Batch, device: torch.device) -> ModelInputs:
        feed = super().feed(batch, device)
        if self.step_means and OTHER_TARGETS in batch.fields:
            feed.second = self.mismatched.feed(batch, device)
        return feed

    @torch.no_grad()
    def means(self, model: Decoder, inputs: ModelInputs) -> dict[str, Metric]:
        """The sum over mismatched rows of their log-ratios, and the number of these."""
        second = inputs.second
        if second is None:
            raise UserError("objective: kto needs rows of files: use loss: apo_zero_unpaired with other datasets")
        hidden_BTW = model(second.tokens_BT, second.attention_mask)
        logps_B = sum_answers(-self.token_losses(model, hidden_BTW, second), second, 1)[:, 0]
        ratios_B = logps_B - self.reference_logps(second, 1)[:, 0]
        counted_B = (second.fields[LEARNED] > 0).any(1).to(ratios_B.dtype)
        return {POINT: ((ratios_B * counted_B).sum(), counted_B.sum())}

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        spec, good_B, counted_B = self.spec, inputs.fields[GOOD][:, 0], inputs.weights_BT[:, 0]
        nll_BT = self.token_losses(model, hidden_BTW, inputs)
        ratios_B = sum_answers(-nll_BT, inputs, 1)[:, 0] - self.reference_logps(inputs, 1)[:, 0]
        point = self._point(model, inputs)
        losses_B = kto_losses(ratios_B, good_B, max(0.0, point), spec)
        losses_BT = torch.zeros_like(nll_BT)
        losses_BT[:, 0] = losses_B.to(nll_BT.dtype)
        with torch.no_grad():
            rewards_B, sides = spec.beta * ratios_B, (good_B * counted_B, (1 - good_B) * counted_B)
            right_B = torch.where(good_B > 0, ratios_B > max(0.0, point), ratios_B < max(0.0, point)).to(good_B.dtype)
            metrics = {
                "accuracy": ((right_B * counted_B).sum(), counted_B.sum()),
                "chosen_reward": ((rewards_B * sides[0]).sum(), sides[0].sum()),
                "rejected_reward": ((rewards_B * sides[1]).sum(), sides[1].sum()),
                "chosen_shift": ((ratios_B * sides[0]).sum(), sides[0].sum()),
                POINT: (point * counted_B.sum(), counted_B.sum()),
            }
        return ElementLosses(losses_BT, metrics)

    def _point(self, model: Decoder, inputs: ModelInputs) -> float:
        """The step's; that of the micro-batch where it is computed alone."""
        if not self.step_means:
            return 0.0
        if POINT in inputs.totals:
            return inputs.totals[POINT]
        total, count = self.means(model, inputs)[POINT]
        return float(total / count.clamp_min(1))


def kto_losses(ratios_B: Tensor, good_B: Tensor, point: float, spec: KtoSpec) -> Tensor:
    """One loss per answer from its log-ratio to the reference (Eq. 7); `good_B` is 1 for desirable ones."""
    point = point if spec.needs_mismatched else 0.0
    weights_B = good_B * spec.desirable_weight + (1 - good_B) * spec.undesirable_weight
    signs_B = 2 * good_B - 1
    return weights_B * (1 - torch.sigmoid(spec.beta * signs_B * (ratios_B - point)))


class _Mismatched(Objective):
    """The inputs of each prompt with another row's answer."""

    def __init__(self, kto: Kto) -> None:
        super().__init__()
        self.kto = kto

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        other = batch.fields[OTHER_TARGETS], batch.fields[OTHER_WEIGHTS]
        targets, weights = (np.zeros_like(array) for array in other)
        for row in range(len(targets)):
            trained, theirs = np.flatnonzero(batch.weights[row]), np.flatnonzero(other[1][row])
            if not trained.size or not theirs.size:
                continue
            prompt, begin = int(trained[0]), int(theirs[0])
            size = min(int(theirs[-1]) + 1 - begin, targets.shape[1] - prompt)  # cut at the context, as TRL does
            targets[row, :prompt] = batch.targets[row, :prompt]
            for made, values in zip((targets, weights), other, strict=True):
                made[row, prompt : prompt + size] = values[row, begin : begin + size]
        tokens = np.zeros_like(targets)
        tokens[:, 1:], tokens[:, 0] = targets[:, :-1], batch.tokens[:, 0]
        return self.kto.rows(replace(batch, tokens=tokens, targets=targets, weights=weights), weights, {})
