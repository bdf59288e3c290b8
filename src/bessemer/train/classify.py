"""Classification of texts (one label, several, or a number) and of tokens, from rows with a field `label`.

The model reads a document's own tokens, without the end-of-document token of the store, and its head has a row for each
label. The label of a text is predicted at one of its columns, so that packing, pipelines and context parallelism need
nothing of their own. Legend: R rows, T columns, D documents of a row, L labels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.batches import Batch
from bessemer.errors import UserError
from bessemer.guard.judge import JudgedNumber
from bessemer.model.transformer import Decoder
from bessemer.spec.classify import ClassifySpec
from bessemer.train.loss import IGNORED
from bessemer.train.objective import ElementLosses, Metric, ModelInputs, Objective, ValidationSums
from bessemer.train.objectives import PADDING, ObjectiveBatch, pieces

LABEL = "label"
WRONG_ROW = 10.0  # nats that a row costs which a trained classifier is sure of and gets wrong (p = 5e-5)
# Times the clipping limit below which gradient norms are alike: one wrong row among 16 had 20 times the limit and 200
# times the usual norm, which falls with the loss.
LEAST_NORM = 30.0
WRONG_NUMBER = 9.0  # variances that a number costs which is three standard deviations away
SQUARES = 4  # n, sum and sum of squares of the labels, and of squared errors, of a regression


class Classify(Objective):
    """`spread` is the variance of a regression's labels. `clip` is the limit of the gradient norm. Norms near
    it are not judged: those of a loss near zero vary by orders of magnitude from one hard row to the next."""

    def __init__(
        self, spec: ClassifySpec, causal: bool, clip: float, dropout_seed: int | None = None, spread: float = 1.0
    ) -> None:
        super().__init__(dropout_seed=dropout_seed)
        self.spec, self.causal, self.pool = spec, causal, spec.pool_for(causal)
        if spec.problem == "regression":
            self.metrics: tuple[str, ...] = ("mae",)
            self.judged = JudgedNumber(
                row=WRONG_NUMBER * spread, level=spread, least_norm=LEAST_NORM * clip, examine=False
            )
        else:
            self.metrics = ("accuracy",)
            chance = math.log(2 if spec.problem == "multi" else len(spec.labels))
            self.judged = JudgedNumber(row=WRONG_ROW, level=chance, least_norm=LEAST_NORM * clip, examine=False)

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        """Targets are labels, or for a text with several values the number of its document."""
        if LABEL not in batch.fields and (batch.positions >= 0).any():
            raise UserError("objective: classify: the rows have no field 'label'; give each item a label")
        runs, labels = pieces(batch), batch.fields.get(LABEL, np.zeros((len(batch.tokens), 1, 1)))
        documents, last = np.where(runs.padding, PADDING, batch.documents), runs.end - 1
        closing = runs.real & (runs.end - runs.begin > 1)  # the end-of-document token is not part of the text
        documents[runs.row[closing], last[closing]] = PADDING
        columns = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
        read = documents != PADDING
        if self.spec.kind == "token":
            targets = np.where(read, labels, IGNORED).astype(np.int64)
            counted = (targets != IGNORED) & (batch.weights > 0)
        else:
            at = runs.begin if self.pool == "first" else np.where(closing, last - 1, last)
            row, at, number = runs.row[runs.real], at[runs.real], batch.documents[runs.row, runs.begin][runs.real]
            single = self.spec.problem == "single"
            targets, counted = np.zeros(batch.tokens.shape, np.int64), np.zeros(batch.tokens.shape, np.bool_)
            targets[row, at] = labels[row, number, 0] if single else number
            counted[row, at] = (batch.weights[row, at] > 0) & (labels[row, number, 0] != IGNORED)
        made = ObjectiveBatch(
            batch.targets, np.where(counted, targets, 0), counted.astype(np.float32),
            np.maximum(documents, 0 if self.causal else PADDING).astype(np.int32), np.where(counted, columns, PADDING),
            causal=self.causal, read=read, in_place=True,
        )  # fmt: skip
        if self.causal:  # padding shares the number of the document before it, where causal attention never looks
            made.documents = np.maximum.accumulate(made.documents, axis=1)
        return made

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        logits_BTL, counted_BT = self.logits(model, hidden_BTW), inputs.weights_BT > 0
        count = inputs.weights_BT.sum()
        if self.spec.kind == "token" or self.spec.problem == "single":
            targets_BT, classes = inputs.targets_BT, logits_BTL.shape[-1]
            losses_BT = F.cross_entropy(logits_BTL.flatten(0, 1), targets_BT.flatten(), reduction="none")
            guess_BT = logits_BTL.argmax(-1)
            accuracy = (((guess_BT == targets_BT) & counted_BT).sum(), count)
            table = None if torch.is_grad_enabled() else _confusion(targets_BT, guess_BT, counted_BT, classes)
            return ElementLosses(losses_BT.view_as(targets_BT), {"accuracy": accuracy}, table=table)
        rows_B1 = torch.arange(len(logits_BTL), device=logits_BTL.device)[:, None]
        labels_BTL = inputs.fields[LABEL][rows_B1, inputs.targets_BT].to(logits_BTL).nan_to_num(nan=0.0)
        if self.spec.problem == "regression":
            error_BT = logits_BTL[..., 0] - labels_BTL[..., 0]
            label_N, squares_N = labels_BTL[..., 0][counted_BT], error_BT.detach().square()[counted_BT]
            mae: Metric = ((error_BT.detach().abs() * counted_BT).sum(), count)
            sums = (count, label_N.sum(), label_N.square().sum(), squares_N.sum())
            return ElementLosses(error_BT.square(), {"mae": mae}, table=torch.stack(sums))
        losses_BT = F.binary_cross_entropy_with_logits(logits_BTL, labels_BTL, reduction="none").mean(-1)
        guess_NL, labels_NL = logits_BTL[counted_BT] > 0, labels_BTL[counted_BT] > 0.5
        right = (guess_NL == labels_NL).all(-1).sum()
        parts = (guess_NL & labels_NL, guess_NL & ~labels_NL, ~guess_NL & labels_NL)
        return ElementLosses(
            losses_BT, {"accuracy": (right, count)}, table=torch.stack([part.sum(0) for part in parts])
        )

    def summarise(self, sums: ValidationSums) -> dict[str, Any]:
        """Accuracy, F1 of each label and their mean (macro), and the confusion table: a row for each true label. Of
        several labels, accuracy is the share of texts whose labels are all right."""
        numbers, table = super().summarise(sums), sums.table
        assert table is not None
        if self.spec.problem == "regression":
            count, total, squares, errors = table.tolist()
            variance = squares - total * total / count
            return {"mse": errors / count, **numbers, "r2": 1 - errors / variance if variance > 0 else math.nan}
        if self.spec.problem == "multi":
            hits_L, false_L, missed_L = table
        else:
            hits_L, false_L, missed_L = (
                table.diagonal(),
                table.sum(0) - table.diagonal(),
                table.sum(1) - table.diagonal(),
            )
        per_label = [_f1(*counts) for counts in torch.stack((hits_L, false_L, missed_L), 1).tolist()]
        seen = [score for score, hits, missed in zip(per_label, hits_L, missed_L, strict=True) if hits + missed > 0]
        numbers["f1"] = sum(seen) / len(seen) if seen else math.nan
        numbers["f1_per_label"] = dict(zip(self.spec.labels, per_label, strict=True))
        if self.spec.problem == "multi":
            micro = torch.stack((hits_L, false_L, missed_L)).sum(1).tolist()
            return numbers | {"f1_micro": _f1(*micro)}
        return numbers | {"confusion": [[int(cell) for cell in row] for row in table.tolist()]}


def _confusion(targets_BT: Tensor, guess_BT: Tensor, counted_BT: Tensor, classes: int) -> Tensor:
    """(L, L) how often each true label was given each label."""
    cells_N = (targets_BT * classes + guess_BT)[counted_BT]
    return cells_N.bincount(minlength=classes * classes).view(classes, classes)


def _f1(hits: float, false: float, missed: float) -> float:
    """F1; 0 for a label that is neither predicted nor there."""
    return 2 * hits / (2 * hits + false + missed) if hits + false + missed else 0.0


def label_variance(stores: list[TokenStore]) -> float:
    """The variance of all labels of a regression; 1 where they are all alike."""
    values = np.concatenate([store.document_field(LABEL, np.arange(store.documents))[:, 0] for store in stores])
    return float(values.var(dtype=np.float64)) or 1.0
