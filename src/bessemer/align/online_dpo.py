"""Online DPO (Guo et al. 2024): the pairs of each round are the policy's own answers, the best and the worst of a
prompt by the rewards, and the loss is one of `align/pair_losses.py`.

A round marks the chosen answer of a pair by the advantage 1 and the rejected one by -1. The two are beside each other
in a row of the batch; the loss of a step is the mean over its pairs. Log-probabilities are of the distribution that the
answers were sampled from, as in TRL.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.align.dpo import pair_metrics
from bessemer.align.pair_losses import PAIR_LOSSES, PairLogps
from bessemer.align.policy import PolicyGradient
from bessemer.align.policy_losses import k3
from bessemer.align.rollout_stream import LENGTHS, SAMPLES
from bessemer.data.curate.scores.user_function import load_function
from bessemer.data.stream.batches import Batch
from bessemer.model.transformer import Decoder
from bessemer.spec.preference import DpoSpec
from bessemer.spec.rl import ONLINE_DPO, REF, RlSpec
from bessemer.train.objective import ElementLosses, ModelInputs
from bessemer.train.objectives import ObjectiveBatch


class OnlineDpo(PolicyGradient):
    """Rounds, rewards and the reference are those of reinforcement learning; the loss and its beta those of `dpo`."""

    def __init__(self, rl: RlSpec, dpo: DpoSpec, clip_norm: float = 1.0, dropout_seed: int | None = None) -> None:
        super().__init__(ONLINE_DPO, rl, clip_norm, dropout_seed)
        self.dpo = dpo
        self.loss_of_pairs = PAIR_LOSSES.get(dpo.loss) or load_function(dpo.loss, "dpo.loss")
        self.metrics = ("accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_shift", "entropy", "kl")

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        weights = np.zeros_like(batch.weights)
        for row, column in zip(*_first_of_pairs(batch.weights > 0, batch.fields[SAMPLES]), strict=True):
            weights[row, column] = 1.0  # one loss for each pair
        read = (batch.tokens != 0) | (batch.targets != 0) | (batch.weights > 0)
        return ObjectiveBatch(
            batch.tokens, batch.targets, weights, batch.documents, batch.tokens, in_place=True, read=read
        )

    def columns_read(self, made: Batch | ObjectiveBatch) -> None:
        """All: the weights mark pairs, not the tokens that their losses sum."""

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        fields, weights_BT = inputs.fields, inputs.weights_BT
        samples_BT, mask_BT = fields[SAMPLES].long(), (fields[LENGTHS] > 0).float()
        logps_BT = self.logps(model, hidden_BTW, inputs).where(mask_BT > 0, 0.0)
        reference_BT = fields[REF].where(mask_BT > 0, 0.0)

        def sides(values_BT: Tensor) -> tuple[Tensor, Tensor]:
            """The sums over the chosen and the rejected answer of each pair, (B x P) with P the most that fit."""
            sums_BT = torch.zeros_like(values_BT).scatter_add(1, samples_BT, values_BT)
            sums_BT = sums_BT[:, : sums_BT.shape[1] // 2 * 2]
            return sums_BT[:, 0::2].flatten(), sums_BT[:, 1::2].flatten()

        tokens = sides(mask_BT)
        counted_P = ((tokens[0] > 0) & (tokens[1] > 0)).float()
        lengths = tokens[0].clamp_min(1), tokens[1].clamp_min(1)
        pairs = PairLogps(*sides(logps_BT), *lengths, *sides(reference_BT), self.dpo.divergence, self.dpo.alpha)
        losses_BP = self.loss_of_pairs(pairs, self.dpo).where(counted_P > 0, 0.0).view(len(weights_BT), -1)
        pair_BT = (samples_BT // 2).clamp_max(losses_BP.shape[1] - 1)
        losses_BT = losses_BP.gather(1, pair_BT) * (weights_BT > 0)
        metrics = pair_metrics(pairs, counted_P, self.dpo)
        with torch.no_grad():
            count = mask_BT.sum()
            metrics["entropy"] = (-logps_BT.sum(), count)
            metrics["kl"] = ((k3(logps_BT, reference_BT) * mask_BT).sum(), count)
        return ElementLosses(losses_BT, {name: metrics[name] for name in self.metrics})


def _first_of_pairs(answered: npt.NDArray[np.bool_], samples: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Row and column of the first token of the chosen answer (an even number) of each pair with both answers."""
    rows, columns = [], []
    for row in range(len(answered)):
        numbers, first = np.unique(np.where(answered[row], samples[row], -1), return_index=True)
        present = set(numbers.tolist())
        for number, column in zip(numbers.tolist(), first.tolist(), strict=True):
            if number >= 0 and number % 2 == 0 and number + 1 in present:
                rows.append(row)
                columns.append(column)
    return rows, columns
