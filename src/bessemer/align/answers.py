"""What the objectives of answers share: log-probabilities of each document's answer under the run's model and the
reference, and documents that begin as the model reads prompts (see `train/sft.py`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.data.stream.batches import Batch
from bessemer.data.stream.groups import REFERENCE_LOGP
from bessemer.errors import UserError
from bessemer.train.objective import ModelInputs, Objective
from bessemer.train.objectives import ObjectiveBatch, pieces
from bessemer.train.sft import begin_documents

LEARNED, DOCUMENT = "learned", "document"  # fields: (R, T) weights of answers, and the number of the document
REFERENCE = "reference"


class AnswerObjective(Objective):
    """`eos_id` comes before a document in the rows; a model that reads `begins` first gets that instead, as in `Sft`.
    With `stored`, the reference's log-probabilities are in the batch and no reference model is needed."""

    def __init__(
        self, eos_id: int = 0, begins: tuple[int, ...] | None = None, dropout_seed: int | None = None,
        stored: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dropout_seed=dropout_seed)
        self.eos_id, self.stored = eos_id, stored
        self.begins = None if begins is None or begins[-1:] == (eos_id,) else begins

    def begin(self, batch: Batch) -> Batch:
        return batch if self.begins is None else begin_documents(batch, self.eos_id, self.begins)

    def unmasked(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Weights of all tokens, prompts too; not of the column before a document that begins by itself."""
        return self.begin(replace(batch, weights=(~pieces(batch).padding).astype(np.float32))).weights

    def columns_read(self, made: Batch | ObjectiveBatch) -> npt.NDArray[np.bool_] | None:
        """Prompts and padding have no loss."""
        if LEARNED not in made.fields:
            return None
        trained: npt.NDArray[np.bool_] = made.fields[LEARNED] > 0
        return trained

    def reference_logps(self, inputs: ModelInputs, count: int) -> Tensor:
        """(B, count) log-probabilities of the documents' answers under the reference."""
        if self.stored:
            if REFERENCE_LOGP not in inputs.fields:
                raise UserError("dpo.reference: nothing is stored for these rows: write live")
            stored_BD = inputs.fields[REFERENCE_LOGP][..., 0].nan_to_num()
            return F.pad(stored_BD, (0, max(0, count - stored_BD.shape[1])))[:, :count].float()
        with torch.no_grad():
            hidden_BTW = self.other_hidden(REFERENCE, inputs)
            nll_BT = self.token_losses(self.models[REFERENCE], hidden_BTW, inputs)
        return sum_answers(-nll_BT, inputs, count)


def sum_answers(values_BT: Tensor, inputs: ModelInputs, count: int) -> Tensor:
    """(B, count) sums over the trained tokens of each document."""
    sums_BD = values_BT.new_zeros(len(values_BT), count)
    return sums_BD.scatter_add(1, inputs.fields[DOCUMENT], values_BT * inputs.fields[LEARNED])


def has_answer(batch: Batch, count: int) -> npt.NDArray[np.bool_]:
    """(R, count) whether each document has a trained token."""
    trained = batch.weights > 0
    return np.stack([(trained & (batch.documents == number)).any(axis=1) for number in range(count)], axis=1)
