"""The objective of preference pairs: DPO and its relatives. A row of the batch holds pairs, of each the chosen answer's
document and then the rejected one's; the loss of a step is the mean over its pairs. With `share_prefix` a pair's prompt
is in the row once, and both answers continue it.

Metrics, each a mean over pairs: accuracy (the chosen answer's reward is higher; ties are half), margin and rewards
(TRL's: beta times the log-ratio to the reference, or times the mean log-probability without one), and chosen_shift, the
change of the chosen answer's log-probability. A falling chosen_shift is likelihood displacement (Razin et al. 2024).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.align.answers import DOCUMENT, LEARNED, REFERENCE, AnswerObjective, has_answer, sum_answers
from bessemer.align.pair_losses import PAIR_LOSSES, PairLogps, chosen_wins
from bessemer.data.curate.scores.user_function import load_function
from bessemer.data.stream.batches import Batch
from bessemer.data.stream.groups import SHARED
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder
from bessemer.spec.preference import DpoSpec
from bessemer.train.objective import ElementLosses, ModelInputs
from bessemer.train.objectives import ObjectiveBatch, pieces

IMITATED = "imitated"  # field: (B, T) weights of the tokens whose cross-entropy is added
PAIRS, PLACES = "pairs", "places"  # fields: (B, P) 1 for a pair with both answers, and its first column


class Dpo(AnswerObjective):
    """The losses of `align/pair_losses.py`, or a user's function of the same signature."""

    def __init__(
        self, spec: DpoSpec, eos_id: int = 0, begins: tuple[int, ...] | None = None, dropout_seed: int | None = None,
        stored: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(eos_id, begins, dropout_seed, stored)
        self.spec = spec
        self.loss_of_pairs = PAIR_LOSSES.get(spec.loss) or load_function(spec.loss, "dpo.loss")
        self.metrics = ("accuracy", "margin", "chosen_reward", "rejected_reward")
        if spec.needs_reference:
            self.metrics, self.needs_models = (*self.metrics, "chosen_shift"), () if stored else (REFERENCE,)
        if spec.sft_weight:
            self.metrics = (*self.metrics, "chosen_nll")

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        documents = batch.documents.astype(np.int64)
        count = documents.max(initial=0) // 2 + 1
        answered = has_answer(batch, 2 * count)
        pairs = (answered[:, 0::2] & answered[:, 1::2]).astype(np.float32)  # none where an answer is banned
        places = np.stack([(documents == 2 * pair).argmax(axis=1) for pair in range(count)], axis=1)
        weights = np.zeros_like(batch.weights)
        row, pair = np.nonzero(pairs)
        weights[row, places[row, pair]] = 1  # one loss for each pair
        chosen = documents % 2 == 0
        imitated = (self.unmasked(batch) if self.spec.loss == "orpo" else batch.weights) * chosen
        fields = {LEARNED: batch.weights, DOCUMENT: documents, IMITATED: imitated, PAIRS: pairs, PLACES: places}
        branches = None
        if SHARED in batch.fields:
            shared = batch.fields[SHARED] > 0
            joined = np.stack([(shared & (documents // 2 == pair)).any(axis=1) for pair in range(count)], axis=1)
            joined = np.take_along_axis(joined, documents // 2, axis=1)  # the others begin with different tokens
            branches = np.where(shared | ~joined, 0, 2 - chosen).astype(np.int32)
            batch = replace(batch, documents=(documents - (joined & ~chosen)).astype(np.int32))
        begun = self.begin(batch)
        return ObjectiveBatch(
            begun.tokens, begun.targets, weights, begun.documents, np.zeros_like(batch.tokens), in_place=True,
            branches=branches, read=~pieces(batch).padding, fields=fields,
        )  # fmt: skip

    def columns_read(self, made: Batch | ObjectiveBatch) -> npt.NDArray[np.bool_] | None:
        trained = super().columns_read(made)
        if trained is None or not self.spec.sft_weight:
            return trained
        imitated: npt.NDArray[np.bool_] = made.fields[IMITATED] > 0
        return trained | imitated

    def counts(self, batch: Batch) -> dict[str, float]:
        if not self.spec.sft_weight:
            return {}
        return {"imitated": float(self.inputs(batch).fields[IMITATED].sum(dtype=np.float64))}

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        nll_BT, counted_BP = self.token_losses(model, hidden_BTW, inputs), inputs.fields[PAIRS]
        count = 2 * counted_BP.shape[1]
        logps_BD = sum_answers(-nll_BT, inputs, count)
        tokens_BD = sum_answers(torch.ones_like(nll_BT), inputs, count).clamp_min(1)
        reference_BD = torch.zeros_like(logps_BD)
        if self.spec.needs_reference:
            reference_BD = self.reference_logps(inputs, count)
        sides = [
            values_BD[:, side::2].flatten() for values_BD in (logps_BD, tokens_BD, reference_BD) for side in (0, 1)
        ]
        pairs = PairLogps(*sides, divergence=self.spec.divergence, alpha=self.spec.alpha)  # type: ignore[misc, arg-type]
        counted_P = counted_BP.flatten()
        losses_P = self.loss_of_pairs(pairs, self.spec)
        if losses_P.shape != counted_P.shape:
            shape = tuple(losses_P.shape)
            raise UserError(f"dpo.loss: {self.spec.loss} gave a tensor of shape {shape}; return a loss for each pair")
        losses_BP = losses_P.where(counted_P > 0, 0.0).view_as(counted_BP)  # no lengths where there is no pair
        losses_BT = torch.zeros_like(nll_BT).scatter_add(1, inputs.fields[PLACES], losses_BP.to(nll_BT.dtype))
        terms, metrics = {}, pair_metrics(pairs, counted_P, self.spec)
        if self.spec.sft_weight:
            imitated_BT = inputs.fields[IMITATED]
            total = (nll_BT * imitated_BT).sum()
            terms["imitated"] = self.spec.sft_weight * total
            metrics["chosen_nll"] = (total.detach(), imitated_BT.sum())
        return ElementLosses(losses_BT, metrics, terms)


@torch.no_grad()
def pair_metrics(pairs: PairLogps, counted_P: Tensor, spec: DpoSpec) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts over the pairs that count."""
    beta = spec.beta_value
    if spec.needs_reference:
        rewards = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        size_P = beta * (pairs.chosen.abs() + pairs.rejected.abs())
    else:
        rewards = beta * pairs.chosen_mean, beta * pairs.rejected_mean
        size_P = rewards[0].abs() + rewards[1].abs()
    values = {
        "accuracy": chosen_wins(*rewards, size_P).to(counted_P.dtype), "margin": rewards[0] - rewards[1],
        "chosen_reward": rewards[0], "rejected_reward": rewards[1], "chosen_shift": pairs.chosen_ratio,
    }  # fmt: skip
    count = counted_P.sum()
    return {name: ((value_P * counted_P).sum(), count) for name, value_P in values.items()}
