"""What is minimised. An objective turns a batch into the model's inputs, and the output into sums with their counts.

Sums, never means: the loop divides once by the step's global count, so the loss is the same number at any accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bessemer.data.stream import Batch
from bessemer.model.attention import document_mask
from bessemer.model.transformer import Decoder
from bessemer.train.loss import linear_cross_entropy


@dataclass
class Terms:
    """Of one micro-batch. `loss` is already divided by the step's count; the rest is to watch, without gradients."""

    loss: Tensor
    correct: Tensor
    nll_BT: Tensor


@dataclass
class Feed:
    """A micro-batch on the device."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    mask_B1TT: Tensor | None


class CausalLM:
    """Next-token prediction. Attention stays inside documents unless `cross_documents`."""

    def __init__(self, cross_documents: bool) -> None:
        self.cross_documents = cross_documents

    def feed(self, batch: Batch, device: torch.device) -> Feed:
        """Copy a batch to the device; pinned and asynchronous for CUDA."""

        def move(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        mask = None
        if not self.cross_documents and not batch.single_document:
            mask = document_mask(move(batch.documents))
        return Feed(move(batch.tokens), move(batch.targets), move(batch.weights), mask)

    def loss(self, model: Decoder, feed: Feed, count: float) -> Terms:
        hidden_BTW = model(feed.tokens_BT, feed.mask_B1TT)
        loss, nll_R, correct_R = linear_cross_entropy(
            hidden_BTW.flatten(0, 1),
            model.head_weight,
            feed.targets_BT.flatten(),
            feed.weights_BT.flatten(),
            1.0 / count,
        )
        correct = (correct_R * (feed.weights_BT.flatten() > 0)).sum()
        return Terms(loss, correct, nll_R.view_as(feed.targets_BT))
