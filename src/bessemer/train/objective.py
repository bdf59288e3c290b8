"""What is minimised. An objective turns a batch into the model's inputs, and the output into sums with their counts.

Sums, never means: the loop divides once by the step's global count, so the loss is the same number at any accumulation.
The balance loss of experts is the named exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bessemer.data.stream.batches import Batch
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.model.attention_mask import AttentionMask, compute_cu_seqlens
from bessemer.model.moe import routing_terms
from bessemer.model.transformer import Decoder
from bessemer.parallel.context import UlyssesAttention
from bessemer.parallel.shard import local
from bessemer.spec.model import LossSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.loss import LossOptions, VocabShard, linear_cross_entropy
from bessemer.train.objectives import Mix, Objective, make_objective


@dataclass
class LossTerms:
    """Of one micro-batch. `loss` is what is minimised and `nll` the plain cross-entropy, which is reported and judged;
    both are already divided by the step's count. Only `loss` has gradients. `nll_BT` is in the batch's own columns.
    `rows_2B` holds each row's sum of weighted losses, and of weights, over this process's columns."""

    loss: Tensor
    nll: Tensor
    correct: Tensor
    nll_BT: Tensor
    rows_2B: Tensor


@dataclass
class ModelInputs:
    """A micro-batch on the device. `count` is the sum of its weights."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    attention_mask: AttentionMask
    count: float
    origin_BT: Tensor | None = None  # the batch's column that a target came from, where it was rewritten
    more: dict[str, Tensor] = field(default_factory=dict)  # an encoder's tokens and documents
    seed: int | None = None  # of dropout

    def without_weight(self) -> ModelInputs:
        """The same for nothing: what fills up a pipeline."""
        return replace(self, weights_BT=torch.zeros_like(self.weights_BT), count=0.0)


class Pretrain:
    """Prediction of tokens: the next ones, or what `rewriting` makes of a row. Attention stays inside documents unless
    `cross_documents`. With a `dropout_seed` a micro-batch draws the same zeros whenever it is run."""

    def __init__(
        self,
        cross_documents: bool,
        loss: LossSpec | None = None,
        rewriting: Objective | None = None,
        dropout_seed: int | None = None,
    ) -> None:
        self.cross_documents, self.settings = cross_documents, loss or LossSpec()
        self.rewriting, self.dropout_seed = rewriting, dropout_seed
        self.columns: UlyssesAttention | None = None  # where processes share rows
        self.tensors: DeviceMesh | None = None  # where they share every tensor

    def on(self, source: str) -> Pretrain:
        """The same for batches of one source alone, whose stream numbers its sources anew."""
        if not isinstance(self.rewriting, Mix):
            return self
        alone = Pretrain(self.cross_documents, self.settings, replace(self.rewriting, names=(source,)))
        alone.columns, alone.tensors = self.columns, self.tensors
        return alone

    def feed(self, batch: Batch, device: torch.device) -> ModelInputs:
        """Copy a batch to the device; pinned and asynchronous for CUDA."""

        def move(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        seed = None
        if self.dropout_seed is not None:
            seed = xxhash.xxh3_64_intdigest(batch.positions.tobytes(), seed=self.dropout_seed) >> 1
        made = self.rewriting.rewrite(batch) if self.rewriting else batch
        apart = not self.cross_documents and not made.single_document
        borders = compute_cu_seqlens(torch.from_numpy(made.documents)) if apart and device.type == "cuda" else None
        sight = AttentionMask(move(made.documents) if apart else None, cu_seqlens=borders)
        if not made.weights.all():
            sight.router_mask_BT = move(made.weights) > 0
        feed = ModelInputs(move(made.tokens), move(made.targets), move(made.weights), sight, made.count, seed=seed)
        if not isinstance(made, Batch):
            feed.origin_BT = move(made.origin)
            prefix = np.ones(made.tokens.shape, np.bool_) if made.prefix is None and not made.causal else made.prefix
            sight.prefix_BT = move(prefix) if prefix is not None else None
            if made.encoder_tokens is not None and made.encoder_documents is not None:
                sight.documents_BT = move(made.documents)
                feed.more = {
                    "encoder_tokens_BS": move(made.encoder_tokens),
                    "encoder_documents_BS": move(made.encoder_documents),
                }
        return self._part(feed) if self.columns else feed

    def _part(self, feed: ModelInputs) -> ModelInputs:
        """This process's columns. Attention sees whole rows, and their documents stay whole."""
        assert self.columns is not None
        part, sight = self.columns.part(feed.tokens_BT.shape[1], feed.tokens_BT.device), feed.attention_mask
        sight.exchange = self.columns
        if sight.router_mask_BT is not None:
            sight.router_mask_BT = sight.router_mask_BT[:, part]
        tokens_Bt, targets_Bt, weights_Bt = (x[:, part] for x in (feed.tokens_BT, feed.targets_BT, feed.weights_BT))
        return replace(feed, tokens_BT=tokens_Bt, targets_BT=targets_Bt, weights_BT=weights_Bt)

    def loss(self, model: Decoder, feed: ModelInputs, count: float) -> LossTerms:
        if feed.seed is not None and model.training:
            torch.manual_seed(feed.seed)
        return self.compute_terms(model, feed, model(feed.tokens_BT, feed.attention_mask, **feed.more), count)

    def compute_terms(self, model: Decoder, feed: ModelInputs, hidden_BTW: Tensor, count: float) -> LossTerms:
        """The loss of a micro-batch from the model's last hidden states."""
        head_VW, words = model.head_weight, None
        bias_V: Tensor | None = model.head_bias
        if self.tensors is not None:
            from bessemer.parallel.tensor import replicate_hidden, shards_vocab

            divided = shards_vocab(model.shape, self.tensors.size())
            hidden_BTW = replicate_hidden(hidden_BTW, self.tensors, divided)
            head_VW, bias_V = local(head_VW), None if bias_V is None else local(bias_V)
            if divided:
                start = self.tensors.get_local_rank() * len(head_VW)
                words = VocabShard(self.tensors.get_group(), start, model.shape.vocab)
        weights_R = feed.weights_BT.flatten()
        loss, nll_R, correct_R = linear_cross_entropy(
            hidden_BTW.flatten(0, 1), head_VW, feed.targets_BT.flatten(), weights_R, 1.0 / count,
            loss_options(model.shape, self.settings), bias_V, words,
        )  # fmt: skip
        weighted_R = nll_R * weights_R
        nll = weighted_R.sum() * (1.0 / count)
        rows_2B = torch.stack((weighted_R.view_as(feed.weights_BT).sum(1), feed.weights_BT.sum(1)))
        counted_R = weights_R > 0
        if model.shape.moe is not None:
            routing, _ = routing_terms(model)
            if routing is not None:  # a mean, not a sum: each micro-batch weighs by its share of the step
                loss = loss + routing * (counted_R.sum() / count)
        nll_BT = nll_R.view_as(feed.targets_BT)
        if feed.origin_BT is not None:
            learnt_BT = nll_BT * (feed.weights_BT > 0)
            nll_BT = torch.zeros_like(nll_BT).scatter_add(1, feed.origin_BT.clamp(min=0), learnt_BT)
        return LossTerms(loss, nll, (correct_R * counted_R).sum(), nll_BT, rows_2B)


def make_pretrain(
    spec: RunSpec, names: Sequence[str], tokenizer: Tokenizer, shape: ModelShape, context: int
) -> Pretrain:
    """The spec's tasks, loss and dropout; `names` are the stream's sources."""
    plain = [task.kind for task in spec.tasks] == ["causal"] and not spec.tasks[0].sources and shape.causal
    rewriting = None
    if not plain or shape.decoder_layers:
        rewriting = make_objective(spec.tasks, names, spec.seed, tokenizer, shape, context)
    drops = any((spec.dropout.embedding, spec.dropout.attention, spec.dropout.residual))
    return Pretrain(spec.data.cross_documents, spec.loss, rewriting, spec.seed if drops else None)


def loss_options(shape: ModelShape, spec: LossSpec) -> LossOptions:
    """How the head's logits are made, which the model says, and what is minimised, which the spec says."""
    return LossOptions(shape.logit_scale, shape.logit_cap, spec.smoothing, spec.focal, spec.z)
