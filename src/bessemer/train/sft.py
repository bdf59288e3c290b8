"""The objective of supervised fine-tuning: token prediction on the learnt tokens of conversations.

Documents begin as the model reads prompts. Bessemer's own models read the end of the previous document first, as in
pre-training. Models of Hugging Face begin texts with their BOS, and conversations with what the chat template writes
first, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from bessemer.data.read.chat_turns import MESSAGE_WEIGHT
from bessemer.data.stream.batches import Batch
from bessemer.model.transformer import Decoder
from bessemer.spec.model import LossSpec
from bessemer.train.objective import LossTerms, ModelInputs, Pretrain

NOISE = "neftune"  # field: the amplitude of each token's noise


class Sft(Pretrain):
    """Pre-training's loss on the tokens that the mask selects. `eos_id` comes before a document in the rows; a model
    that reads `begins` first (none, if empty) gets that instead, but nothing in the sources at the indices `templated`,
    whose template writes the first token. `neftune` is the noise's alpha, drawn from `seed` and the row's position, so
    that a step replays exactly at any accumulation. With `weighted` the messages of some sources have weights."""

    def __init__(
        self, cross_documents: bool, loss: LossSpec | None = None, dropout_seed: int | None = None,
        eos_id: int = 0, begins: tuple[int, ...] | None = None, neftune: float = 0.0, seed: int = 0,
        weighted: bool = False, templated: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cross_documents, loss, None, dropout_seed)
        self.eos_id, self.neftune, self.noise_seed = eos_id, neftune, seed
        self.templated = templated or {}
        begun = begins is not None and (begins[-1:] != (eos_id,) or bool(self.templated))
        self.begins = begins if begun else None
        self.weighted = weighted
        self.counts_inputs = weighted or self.begins is not None

    def on(self, source: str) -> Sft:
        alone = copy(self)
        alone.templated = {source: 0} if source in self.templated else {}
        return alone

    def inputs(self, batch: Batch) -> Batch:
        if self.weighted and MESSAGE_WEIGHT in batch.fields:
            factors = np.nan_to_num(batch.fields[MESSAGE_WEIGHT], nan=1.0)  # other sources and padding have none
            batch = replace(batch, weights=batch.weights * factors)
        if self.begins is None:
            return batch
        return begin_documents(batch, self.eos_id, self.begins, np.isin(batch.sources, list(self.templated.values())))

    def feed(self, batch: Batch, device: torch.device) -> ModelInputs:
        feed = super().feed(batch, device)
        if self.neftune:
            width_free = self.neftune / np.sqrt(document_lengths(batch))
            feed.fields[NOISE] = torch.from_numpy(width_free.astype(np.float32)).to(device)
            feed.row_seeds = tuple(
                xxhash.xxh3_64_intdigest(position.tobytes(), seed=self.noise_seed) >> 1 for position in batch.positions
            )
        return feed

    def loss(self, model: Decoder, feed: ModelInputs, count: float) -> LossTerms:
        if not (self.neftune and model.training):
            return super().loss(model, feed, count)

        def add_noise(module: Any, arguments: Any, embedded_BTW: Tensor) -> Tensor:
            return embedded_BTW + draw_noise(feed, embedded_BTW)

        handle = model.embedding.register_forward_hook(add_noise)
        try:
            return super().loss(model, feed, count)
        finally:
            handle.remove()


def begin_documents(
    batch: Batch, eos_id: int, begins: tuple[int, ...], without: npt.NDArray[np.bool_] | None = None
) -> Batch:
    """The batch with another beginning of each document: the token that the model reads first, or, if the document
    begins with that itself or there is none, as in the rows `without`, nothing: the column of `eos_id` becomes a
    document of its own without weight."""
    changes = np.ones(batch.documents.shape, np.bool_)
    changes[:, 1:] = batch.documents[:, 1:] != batch.documents[:, :-1]
    starts = changes & (batch.tokens == eos_id)
    first = begins[-1] if begins else None
    replaced = starts & (batch.targets != first) if first is not None else np.zeros_like(starts)
    if without is not None:
        replaced &= ~without[:, None]
    removed = starts & ~replaced
    tokens = np.where(replaced, first or 0, batch.tokens)
    borders = changes.copy()
    borders[:, 1:] |= removed[:, :-1]
    documents = np.cumsum(borders, axis=1, dtype=np.int64) - 1
    weights = np.where(removed, np.float32(0), batch.weights)
    return replace(batch, tokens=tokens, weights=weights, documents=documents.astype(batch.documents.dtype))


def document_lengths(batch: Batch) -> npt.NDArray[np.float64]:
    """(B, T): the number of tokens of each column's document in its row, without padding at the end of the row."""
    used = (batch.tokens != 0) | (batch.targets != 0)
    ends = used.shape[1] - np.argmax(used[:, ::-1], axis=1)
    lengths = np.ones(batch.documents.shape)
    for row, (documents, end) in enumerate(zip(batch.documents, ends, strict=True)):
        counts = np.bincount(documents[:end], minlength=int(documents.max()) + 1)
        lengths[row] = np.maximum(1, counts[documents])
    return lengths


def draw_noise(feed: ModelInputs, embedded_BTW: Tensor) -> Tensor:
    """Uniform noise of amplitude alpha / sqrt(length * width) (Jain et al. 2023, NEFTune)."""
    _, T, W = embedded_BTW.shape
    device = embedded_BTW.device
    rows = []
    for seed in feed.row_seeds:
        generator = torch.Generator(device).manual_seed(seed)
        rows.append(torch.rand((T, W), generator=generator, device=device))
    amplitude_BT1 = feed.fields[NOISE][..., None] * W**-0.5
    return ((torch.stack(rows) * 2 - 1) * amplitude_BT1).to(embedded_BTW.dtype)
