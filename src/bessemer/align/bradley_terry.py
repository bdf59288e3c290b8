"""The objective of reward models: Bradley-Terry on preference pairs, with TRL's margins and centring.

A row of the batch holds one pair, the chosen answer's document and then the rejected one's. The model reads a
document's own tokens, as a classifier does, and scores its last one. Several heads on one trunk are an ensemble
(bootstrapped, Osband et al. 2016): their mean is the reward, their standard deviation the uncertainty. Legend: R rows,
T columns, K heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.align.calibration import calibration_table, summarise_calibration
from bessemer.data.read.answers import MARGIN
from bessemer.data.stream.batches import Batch
from bessemer.data.stream.groups import GROUP
from bessemer.data.stream.order import chain
from bessemer.data.tokenizer.tokenizer import Tokenizer, hf_prompt_format, pad_token_id
from bessemer.guard.judge import JudgedNumber
from bessemer.model.transformer import Decoder
from bessemer.spec.reward_model import RewardModelSpec
from bessemer.train.classify import LEAST_NORM, WRONG_ROW
from bessemer.train.objective import ElementLosses, ModelInputs, Objective, ValidationSums
from bessemer.train.objectives import PADDING, ObjectiveBatch, pieces

LAST, BOOTSTRAP = "last", "bootstrap"
_HEADS = 0x72657761726473  # separates the draws of the heads from other uses of the seed
_POISSON = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(12)])  # of mean 1


@dataclass(frozen=True)
class ScoredTokens:
    """What a reward model reads of a text: `first` is the token that the tokenizer puts before each text, and `end`
    tells whether the end-of-document token is read, if the text's layout writes one. As in transformers and TRL, that
    depends on padding: the score is that of the last token that is no padding."""

    first: int | None = None
    end: bool = False

    @staticmethod
    def of_folder(folder: Path | None, tokenizer: Tokenizer) -> ScoredTokens:
        """For a model that starts from the folder; None for models of Bessemer, which are exported with the end token
        as padding."""
        if folder is None:
            return ScoredTokens()
        prefix = hf_prompt_format(folder, tokenizer).prefix
        return ScoredTokens(
            prefix[-1] if prefix else None, pad_token_id(folder, tokenizer) != tokenizer.eos_id
        )  # fmt: skip

    def of_text(self, ids: list[int], eos_id: int) -> list[int]:
        """The ids to read of a rendered text. A text that is begun by `first` has no column for the end in training."""
        begun = self.first is not None and ids[:1] != [self.first]
        if ids[-1:] == [eos_id] and (begun or not self.end):
            ids = ids[:-1]
        return [self.first, *ids] if begun and self.first is not None else ids


class BradleyTerry(Objective):
    """`clip` is the limit of the gradient norm, `seed` that of the bootstrap. Metrics are means over pairs, of the mean
    of the heads: accuracy, margin (chosen minus rejected), mean_reward, and ensemble_std over the heads."""

    def __init__(
        self, spec: RewardModelSpec, scored: ScoredTokens, clip: float, seed: int = 0, dropout_seed: int | None = None
    ) -> None:
        super().__init__(dropout_seed=dropout_seed)
        self.spec, self.scored, self.seed = spec, scored, seed
        self.metrics = ("accuracy", "margin", "mean_reward", *(("ensemble_std",) if spec.heads > 1 else ()))
        self.judged = JudgedNumber(row=WRONG_ROW, level=math.log(2), least_norm=LEAST_NORM * clip, examine=False)

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        runs, rows = pieces(batch), len(batch.tokens)
        at, closing = (runs.row, runs.begin), (runs.row, runs.end - 1)
        begun = np.zeros(runs.row.size, np.bool_)
        if self.scored.first is not None:
            begun = runs.real & (batch.targets[at] != self.scored.first)
        tokens = np.where(begun[runs.number], batch.tokens, batch.targets)
        if self.scored.first is not None:
            tokens[runs.row[begun], runs.begin[begun]] = self.scored.first
        # The store's end-of-document token is of the text only where the layout wrote it: only then it has a weight.
        read_all = begun | (self.scored.end & (batch.weights[closing] > 0))
        documents = np.where(runs.padding, PADDING, batch.documents)
        skipped = runs.real & ~read_all
        documents[runs.row[skipped], runs.end[skipped] - 1] = PADDING
        read = documents != PADDING
        number = batch.documents[at]
        answers = runs.real & (number < 2)
        last, counted = np.zeros((rows, 2), np.int64), np.zeros((rows, 2), np.bool_)
        last[runs.row[answers], number[answers]] = (runs.end - 1 - skipped)[answers]
        for side in range(2):
            counted[:, side] = ((batch.weights > 0) & (batch.documents == side)).any(axis=1)
        weights = np.zeros_like(batch.weights)
        weights[:, 0] = counted.all(axis=1)  # one loss for each pair; none where an answer is banned
        fields: dict[str, npt.NDArray[Any]] = {LAST: last}
        if self.spec.heads > 1 and self.spec.bootstrap:
            fields[BOOTSTRAP] = self._bootstrap(batch)
        return ObjectiveBatch(
            tokens, batch.targets, weights, np.maximum.accumulate(documents.clip(0), axis=1).astype(np.int32),
            np.zeros_like(batch.tokens), in_place=True, read=read, fields=fields,
        )  # fmt: skip

    def _bootstrap(self, batch: Batch) -> npt.NDArray[np.float32]:
        """(R, K) how often each head has each pair in its sample of all pairs: the same in every epoch."""
        groups = batch.fields[GROUP][:, 0, 0] if GROUP in batch.fields else batch.sequences
        draws = chain(self.seed % 2**64, _HEADS, groups[:, None].astype(np.uint64), np.arange(self.spec.heads))
        share = (draws >> np.uint64(11)).astype(np.float64) / 2.0**53
        return np.searchsorted(_POISSON, share, side="right").astype(np.float32)

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        scores_BTK, counted_B = self.logits(model, hidden_BTW), inputs.weights_BT[:, 0]
        rows_B1 = torch.arange(len(scores_BTK), device=scores_BTK.device)[:, None]
        chosen_BK, rejected_BK = scores_BTK[rows_B1, inputs.fields[LAST]].unbind(1)
        losses_BK = pair_losses(chosen_BK, rejected_BK, self.spec, self._margin(inputs))
        if BOOTSTRAP in inputs.fields and model.training:
            losses_BK = losses_BK * inputs.fields[BOOTSTRAP].to(losses_BK.dtype)
        losses_BT = torch.zeros_like(scores_BTK[..., 0])
        losses_BT[:, 0] = losses_BK.mean(1).where(counted_B > 0, 0.0)
        return ElementLosses(losses_BT, *self._metrics(chosen_BK.detach(), rejected_BK.detach(), counted_B, model))

    @staticmethod
    def _margin(inputs: ModelInputs) -> Tensor | None:
        margin_BD1 = inputs.fields.get(MARGIN)
        return None if margin_BD1 is None else margin_BD1[:, 0].nan_to_num(nan=0.0)

    def _metrics(
        self, chosen_BK: Tensor, rejected_BK: Tensor, counted_B: Tensor, model: Decoder
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], Tensor | None]:
        chosen_B, rejected_B, count = chosen_BK.mean(1), rejected_BK.mean(1), counted_B.sum()
        values = {
            "accuracy": (chosen_B > rejected_B).to(counted_B.dtype), "margin": chosen_B - rejected_B,
            "mean_reward": (chosen_B + rejected_B) / 2,
        }  # fmt: skip
        if self.spec.heads > 1:
            values["ensemble_std"] = (chosen_BK.std(1) + rejected_BK.std(1)) / 2
        metrics = {name: ((value_B * counted_B).sum(), count) for name, value_B in values.items()}
        table = None if model.training else calibration_table((chosen_B - rejected_B)[counted_B > 0])
        return metrics, {}, table

    def summarise(self, sums: ValidationSums) -> dict[str, Any]:
        """The metrics, and the calibration of the probability that the chosen answer is the better one."""
        numbers = super().summarise(sums)
        return numbers if sums.table is None else numbers | summarise_calibration(sums.table)


def pair_losses(chosen: Tensor, rejected: Tensor, spec: RewardModelSpec, margin: Tensor | None = None) -> Tensor:
    """The negative log-likelihood of each preference (Bradley and Terry 1952), with the margin of Llama 2, conservative
    smoothing and the centring of Eisenstein et al. 2023. Element by element."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin.to(chosen.dtype)
    losses = -F.logsigmoid(difference)
    if spec.smoothing:
        losses = (1 - spec.smoothing) * losses - spec.smoothing * F.logsigmoid(-difference)
    return losses + spec.centring * (chosen + rejected) ** 2 if spec.centring else losses
