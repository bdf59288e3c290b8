"""The objective of preference pairs: DPO and its relatives. A row of the batch holds one pair, the chosen answer's
document and then the rejected one's; the loss of a step is the mean over its pairs.

Metrics, each a mean over pairs: accuracy (the chosen answer's reward is higher), margin and rewards (TRL's: beta times
the log-ratio to the reference, or times the mean log-probability without one), and chosen_shift, the change of the
chosen answer's log-probability. A falling chosen_shift is likelihood displacement (Razin et al. 2024).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bessemer.align.pair_losses import PAIR_LOSSES, PairLogps
from bessemer.data.curate.scores.user_function import load_function
from bessemer.data.stream.batches import Batch
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder
from bessemer.spec.preference import DpoSpec
from bessemer.train.objective import ElementLosses, ModelInputs, Objective
from bessemer.train.objectives import ObjectiveBatch, pieces
from bessemer.train.sft import begin_documents

LEARNED, SIDE, IMITATED = "learned", "side", "imitated"  # fields beside the targets
CHOSEN, REJECTED = 0, 1  # numbers of a pair's documents in their row
REFERENCE = "reference"


class Dpo(Objective):
    """The losses of `align/pair_losses.py`, or a user's function of the same signature. `begins` as in `Sft`."""

    def __init__(
        self, spec: DpoSpec, eos_id: int = 0, begins: tuple[int, ...] | None = None, dropout_seed: int | None = None
    ) -> None:
        super().__init__(dropout_seed=dropout_seed)
        self.spec, self.eos_id = spec, eos_id
        self.begins = None if begins is None or begins[-1:] == (eos_id,) else begins
        self.loss_of_pairs = PAIR_LOSSES.get(spec.loss) or load_function(spec.loss, "dpo.loss")
        self.metrics = ("accuracy", "margin", "chosen_reward", "rejected_reward")
        if spec.needs_reference:
            self.metrics, self.needs_models = (*self.metrics, "chosen_shift"), (REFERENCE,)
        if spec.sft_weight:
            self.metrics = (*self.metrics, "chosen_nll")

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        fields = self._fields(batch)
        complete = [(fields[LEARNED] * (fields[SIDE] == side)).any(axis=1) for side in (CHOSEN, REJECTED)]
        weights = np.zeros_like(batch.weights)
        weights[:, 0] = complete[0] & complete[1]  # one loss for each pair; none where an answer is banned
        fields[IMITATED] *= weights[:, :1]
        begun = batch if self.begins is None else begin_documents(batch, self.eos_id, self.begins)
        return ObjectiveBatch(
            begun.tokens, begun.targets, weights, begun.documents, np.zeros_like(batch.tokens), in_place=True,
            read=~pieces(batch).padding, fields=fields,
        )  # fmt: skip

    def _fields(self, batch: Batch) -> dict[str, np.ndarray]:
        """Which targets are of an answer, of which one, and which the cross-entropy imitates."""
        learned = batch.weights
        imitated = learned
        if self.spec.loss == "orpo":  # the prompt too, but not the column before a document that begins by itself
            unmasked = replace(batch, weights=(~pieces(batch).padding).astype(np.float32))
            imitated = (
                unmasked if self.begins is None else begin_documents(unmasked, self.eos_id, self.begins)
            ).weights
        imitated = imitated * (batch.documents == CHOSEN)
        return {LEARNED: learned, SIDE: batch.documents.astype(np.int64), IMITATED: imitated}

    def counts(self, batch: Batch) -> dict[str, float]:
        if not self.spec.sft_weight:
            return {}
        return {"imitated": float(self.inputs(batch).fields[IMITATED].sum(dtype=np.float64))}

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        nll_BT, learned_BT, side_BT = self.nll(model, hidden_BTW, inputs), inputs.fields[LEARNED], inputs.fields[SIDE]
        masks = [learned_BT * (side_BT == side) for side in (CHOSEN, REJECTED)]
        chosen_B, rejected_B = (-(nll_BT * mask_BT).sum(1) for mask_BT in masks)
        reference_B2 = torch.zeros_like(torch.stack((chosen_B, rejected_B), 1))
        if self.spec.needs_reference:
            with torch.no_grad():
                hidden_BTU = self.other_hidden(REFERENCE, inputs)
                reference_BT = self.nll(self.models[REFERENCE], hidden_BTU, inputs)
            reference_B2 = torch.stack([-(reference_BT * mask_BT).sum(1) for mask_BT in masks], 1)
        pairs = PairLogps(
            chosen_B, rejected_B, masks[0].sum(1).clamp_min(1), masks[1].sum(1).clamp_min(1), *reference_B2.unbind(1)
        )
        losses_B, counted_B = self.loss_of_pairs(pairs, self.spec), inputs.weights_BT[:, 0]
        if losses_B.shape != counted_B.shape:
            shape = tuple(losses_B.shape)
            raise UserError(f"dpo.loss: {self.spec.loss} gave a tensor of shape {shape}; return a loss for each pair")
        losses_BT = torch.zeros_like(nll_BT)
        losses_BT[:, 0] = losses_B.where(counted_B > 0, 0.0)  # a row without a pair has no lengths
        terms, metrics = {}, self._metrics(pairs, counted_B)
        if self.spec.sft_weight:
            imitated_BT = inputs.fields[IMITATED]
            total = (nll_BT * imitated_BT).sum()
            terms["imitated"] = self.spec.sft_weight * total
            metrics["chosen_nll"] = (total.detach(), imitated_BT.sum())
        return ElementLosses(losses_BT, metrics, terms)

    def nll(self, model: Decoder, hidden_BTW: Tensor, inputs: ModelInputs) -> Tensor:
        return self.token_losses(model, hidden_BTW, inputs.targets_BT)

    @torch.no_grad()
    def _metrics(self, pairs: PairLogps, counted_B: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        beta = self.spec.beta_value
        if self.spec.needs_reference:
            rewards = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        else:
            rewards = beta * pairs.chosen_mean, beta * pairs.rejected_mean
        values = {
            "accuracy": (rewards[0] > rewards[1]).to(counted_B.dtype), "margin": rewards[0] - rewards[1],
            "chosen_reward": rewards[0], "rejected_reward": rewards[1], "chosen_shift": pairs.chosen_ratio,
        }  # fmt: skip
        count = counted_B.sum()
        return {name: ((value_B * counted_B).sum(), count) for name, value_B in values.items()}
