"""The training objective: turns a batch into the model's inputs, and the output into loss sums with their counts.

Sums, never means: the loop divides once by the step's global count, so the loss is the same number at any accumulation.
The balance loss of experts is the one exception. `Objective` is the interface and the code that all objectives share:
subclass it with `inputs` and `element_losses`, and add the class to the table of `session/objectives.py`. `Pretrain` is
token prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bessemer.data.stream.batches import Batch
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.guard.judge import JudgedNumber
from bessemer.model.attention_mask import AttentionMask, compute_cu_seqlens
from bessemer.model.moe import routing_terms
from bessemer.model.transformer import Decoder
from bessemer.parallel.context import UlyssesAttention
from bessemer.parallel.shard import local
from bessemer.spec.model import LossSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.loss import LossOptions, VocabShard, linear_cross_entropy, token_losses
from bessemer.train.objectives import Mix, ObjectiveBatch, Rewriting, count_read, make_rewriting

Metric = tuple[Tensor, Tensor]  # a sum and its count, both without gradients


@dataclass
class LossTerms:
    """Losses of one micro-batch. `loss` is minimised; `nll` is reported and judged as the loss (in pre-training, the
    plain cross-entropy). Both are divided by the step's count; only `loss` has gradients. `nll_BT` is in the batch's
    columns. `rows_2B` holds each row's sums of weighted losses and of weights over this rank's columns. `table` is
    summed over a validation."""

    loss: Tensor
    nll: Tensor
    nll_BT: Tensor
    rows_2B: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    table: Tensor | None = None


@dataclass
class ElementLosses:
    """The result of `Objective.element_losses`: a loss for every column, weighted by the weights of the inputs.
    `terms` are further sums to minimise, each divided by the step's total of the count with the same name."""

    losses_BT: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)
    table: Tensor | None = None


@dataclass
class ModelInputs:
    """A micro-batch on the device. `count` is the sum of its weights, `counts` hold those of further terms; the engine
    fills in `totals`, the step's counts over all ranks and micro-batches."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    attention_mask: AttentionMask
    count: float
    origin_BT: Tensor | None = None  # the batch column of each target, if the objective moved it
    more: dict[str, Tensor] = field(default_factory=dict)  # encoder tokens and documents
    seed: int | None = None  # for dropout
    fields: dict[str, Tensor] = field(default_factory=dict)  # (B, T) per token or (B, D, ...) per document
    counts: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    read: int = 0  # columns that are not padding
    row_seeds: tuple[int, ...] = ()  # for noise: one for each row, wherever it is trained
    second: ModelInputs | None = None  # rows of a further pass, such as KTO's mismatched ones
    read_P: Tensor | None = None  # flat columns whose losses the objective reads; None: all

    def without_weight(self) -> ModelInputs:
        """The same with weight zero: fills up a pipeline."""
        return replace(self, weights_BT=torch.zeros_like(self.weights_BT), count=0.0)


@dataclass
class ValidationSums:
    """Sums of a validation: of the loss, its count, and the metrics."""

    loss: float
    count: float
    nats_per_byte: float  # summed, with each source's bytes per token
    metrics: dict[str, tuple[float, float]]
    table: Tensor | None


class Objective:
    """Defines what is minimised, reported, judged and validated.

    `metrics` names the numbers of every step besides the loss; each is a sum with its count, so it is the same at any
    accumulation and number of ranks. A subclass defines `element_losses`, and `inputs` if it changes the batch.
    Override `compute_terms` for losses that never materialise all logits.
    """

    metrics: tuple[str, ...] = ()
    judged = JudgedNumber()
    counts_inputs = True  # the counts are known from the inputs alone, not from the stream
    counts_tokens = False  # the loss's count is the number of tokens that a step trains on
    step_means: tuple[str, ...] = ()  # constants of a step that `means` computes before its losses
    needs_models: tuple[str, ...] = ()  # names that the spec must have under `models`

    def __init__(self, cross_documents: bool = False, dropout_seed: int | None = None) -> None:
        self.cross_documents, self.dropout_seed = cross_documents, dropout_seed
        self.columns: UlyssesAttention | None = None  # with context parallelism
        self.tensors: DeviceMesh | None = None  # with tensor parallelism
        self.models: dict[str, Decoder] = {}  # further models of the run by name, frozen or trained

    @classmethod
    def from_run(cls, spec: RunSpec, stream: Any, tokenizer: Tokenizer, shape: ModelShape, context: int) -> Objective:
        """The objective of a run whose spec names the class."""
        return cls()

    def check_models(self) -> None:
        """Refuses a run without a model that the objective needs."""
        if missing := [name for name in self.needs_models if name not in self.models]:
            raise UserError(
                f"models: objective {type(self).__name__} needs models.{missing[0]}: write for example "
                f"models: {{{missing[0]}: runs/base}}"
            )

    def other_hidden(self, name: str, inputs: ModelInputs) -> Tensor:
        """The last hidden states of a further model for the same tokens; without gradients if it is frozen. Call it
        after the run's own model, as `element_losses` does; `self.logits(self.models[name], ...)` applies its head."""
        model = self.models[name]
        mask = replace(inputs.attention_mask, _masks={}, _tiles={}, _starts=None, virtual=0)  # its windows may differ
        trained = any(parameter.requires_grad for parameter in model.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            hidden_BTW: Tensor = model(inputs.tokens_BT, mask, **inputs.more)
        return hidden_BTW

    def inputs(self, batch: Batch) -> Batch | ObjectiveBatch:
        """The model's inputs, targets and weights. The loss is divided by the sum of the weights."""
        return batch

    def columns_read(self, made: Batch | ObjectiveBatch) -> np.ndarray | None:
        """(R, T) the columns whose token losses `element_losses` reads; None: all. The head skips the others."""
        return None

    def counts(self, batch: Batch) -> dict[str, float]:
        """The counts of further terms of the loss."""
        return {}

    def means(self, model: Decoder, inputs: ModelInputs) -> dict[str, Metric]:
        """The sum and count, over a micro-batch, of each of `step_means`. Their means over the step are in the
        `totals` of its inputs. Not a sum over the step, so a named exception: KTO's reference point."""
        return {}

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        """Losses from the model's last hidden states; `self.logits` multiplies them with the head."""
        raise UserError(f"objective: {type(self).__name__} defines no element_losses: add the method to the class")

    def summarise(self, sums: ValidationSums) -> dict[str, Any]:
        """The numbers of a validation besides the loss, by name."""
        return {name: total / count if count else math.nan for name, (total, count) in sums.metrics.items()}

    def on(self, source: str) -> Objective:
        """The same for batches of a stream with only this source, which numbers its sources from 0."""
        return self

    def feed(self, batch: Batch, device: torch.device) -> ModelInputs:
        """Copy a batch to the device; pinned and asynchronous for CUDA."""

        def move(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        seed = None
        if self.dropout_seed is not None:
            seed = xxhash.xxh3_64_intdigest(batch.positions.tobytes(), seed=self.dropout_seed) >> 1
        made = self.inputs(batch)
        separate = not self.cross_documents and not made.single_document
        borders = compute_cu_seqlens(torch.from_numpy(made.documents)) if separate and device.type == "cuda" else None
        mask = AttentionMask(move(made.documents) if separate else None, cu_seqlens=borders)
        read = made.weights > 0 if isinstance(made, Batch) or made.read is None else made.read
        if not read.all():
            mask.router_mask_BT = move(read)
        feed = ModelInputs(move(made.tokens), move(made.targets), move(made.weights), mask, made.count, seed=seed)
        feed.read, feed.counts = count_read(made, feed.count), self.counts(batch)
        feed.fields = {name: move(array) for name, array in (batch.fields | made.fields).items()}
        wanted = self.columns_read(made) if self.columns is None else None
        if wanted is not None and not wanted.all():
            feed.read_P = move(np.flatnonzero(wanted) if wanted.any() else np.zeros(1, np.int64))
        if not isinstance(made, Batch):
            feed.origin_BT = None if made.in_place else move(made.origin)
            prefix = np.ones(made.tokens.shape, np.bool_) if made.prefix is None and not made.causal else made.prefix
            mask.prefix_BT = move(prefix) if prefix is not None else None
            mask.branches_BT = None if made.branches is None else move(made.branches)
            if made.encoder_tokens is not None and made.encoder_documents is not None:
                mask.documents_BT = move(made.documents)
                feed.more = {
                    "encoder_tokens_BS": move(made.encoder_tokens),
                    "encoder_documents_BS": move(made.encoder_documents),
                }
        return self._part(feed) if self.columns else feed

    def _part(self, feed: ModelInputs) -> ModelInputs:
        """This rank's columns. Attention exchanges columns, so the documents stay complete."""
        assert self.columns is not None
        part, mask = self.columns.part(feed.tokens_BT.shape[1], feed.tokens_BT.device), feed.attention_mask
        mask.exchange = self.columns
        if mask.router_mask_BT is not None:
            mask.router_mask_BT = mask.router_mask_BT[:, part]
        tokens_Bt, targets_Bt, weights_Bt = (x[:, part] for x in (feed.tokens_BT, feed.targets_BT, feed.weights_BT))
        return replace(feed, tokens_BT=tokens_Bt, targets_BT=targets_Bt, weights_BT=weights_Bt)

    def loss(self, model: Decoder, feed: ModelInputs, count: float) -> LossTerms:
        if feed.seed is not None and model.training:
            torch.manual_seed(feed.seed)
        return self.compute_terms(model, feed, model(feed.tokens_BT, feed.attention_mask, **feed.more), count)

    def head(self, model: Decoder, hidden_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor | None, VocabShard | None]:
        """Hidden states, the head's weight and bias as plain tensors, and this rank's shard of the vocabulary if
        tensor-parallel ranks divide the head."""
        weight_VW, words = model.head_weight, None
        bias_V: Tensor | None = model.head_bias
        if self.tensors is not None:
            from bessemer.parallel.tensor import replicate_hidden, shards_head

            divided = shards_head(model.shape, self.tensors.size())
            hidden_BTW = replicate_hidden(hidden_BTW, self.tensors, divided)
            weight_VW, bias_V = local(weight_VW), None if bias_V is None else local(bias_V)
            if divided:
                start = self.tensors.get_local_rank() * len(weight_VW)
                words = VocabShard(self.tensors.get_group(), start, model.shape.vocab)
        return hidden_BTW, weight_VW, bias_V, words

    def logits(self, model: Decoder, hidden_BTW: Tensor) -> Tensor:
        """All logits, in at least float32. Only for small heads: tensor-parallel ranks gather theirs."""
        hidden_BTW, weight_VW, bias_V, words = self.head(model, hidden_BTW)
        logits_BTV = F.linear(hidden_BTW, weight_VW.to(hidden_BTW.dtype), None)
        exact_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        exact_BTV = exact_BTV if bias_V is None else exact_BTV + bias_V
        if words is None:
            return exact_BTV
        from bessemer.parallel.tensor import gather_logits

        return gather_logits(exact_BTV, words.group)

    def token_losses(
        self, model: Decoder, hidden_BTW: Tensor, inputs: ModelInputs, options: LossOptions | None = None
    ) -> Tensor:
        """The cross-entropy of each target, differentiable, without the logits in memory; 0 in columns that are not
        read."""
        hidden_BTW, head_VW, bias_V, words = self.head(model, hidden_BTW)
        options = options or loss_options(model.shape, LossSpec())
        hidden_RW, targets_R, read_P = hidden_BTW.flatten(0, 1), inputs.targets_BT.flatten(), inputs.read_P
        if read_P is None:
            return token_losses(hidden_RW, head_VW, targets_R, options, bias_V, words).view_as(inputs.targets_BT)
        losses_P = token_losses(hidden_RW.index_select(0, read_P), head_VW, targets_R[read_P], options, bias_V, words)
        losses_R = losses_P.new_zeros(len(targets_R)).index_copy(0, read_P, losses_P)
        return losses_R.view_as(inputs.targets_BT)

    def compute_terms(self, model: Decoder, feed: ModelInputs, hidden_BTW: Tensor, count: float) -> LossTerms:
        """The loss of a micro-batch from the model's last hidden states."""
        elements = self.element_losses(model, feed, hidden_BTW)
        loss = (elements.losses_BT * feed.weights_BT).sum() * (1.0 / count)
        for name, term in elements.terms.items():
            loss = loss + term * (1.0 / (feed.totals.get(name) or 1.0))
        nll_BT = elements.losses_BT.detach() * (feed.weights_BT > 0)
        return self.finish(model, feed, loss, nll_BT, count, elements.metrics, elements.table)

    def finish(
        self, model: Decoder, feed: ModelInputs, loss: Tensor, nll_BT: Tensor, count: float,
        metrics: Mapping[str, Metric], table: Tensor | None = None,
    ) -> LossTerms:  # fmt: skip
        """The terms of the minimised loss and each column's reported loss. Adds the balance loss of experts."""
        weighted_R = (nll_BT * feed.weights_BT).flatten()
        nll = weighted_R.sum() * (1.0 / count)
        rows_2B = torch.stack((weighted_R.view_as(feed.weights_BT).sum(1), feed.weights_BT.sum(1)))
        if model.shape.moe is not None:
            routing, _ = routing_terms(model)
            if routing is not None:  # a mean, not a sum: weighted by the micro-batch's share of the step
                loss = loss + routing * ((feed.weights_BT > 0).sum() / count)
        if feed.origin_BT is not None:
            counted_BT = nll_BT * (feed.weights_BT > 0)
            nll_BT = torch.zeros_like(nll_BT).scatter_add(1, feed.origin_BT.clamp(min=0), counted_BT)
        return LossTerms(loss, nll, nll_BT, rows_2B, {name: metrics[name] for name in self.metrics}, table)


class Pretrain(Objective):
    """Token prediction: next tokens, or the targets that `rewriting` produces. Attention stays inside documents unless
    `cross_documents`. With a `dropout_seed` a micro-batch draws the same dropout masks whenever it runs."""

    metrics, counts_tokens = ("accuracy",), True

    def __init__(
        self,
        cross_documents: bool,
        loss: LossSpec | None = None,
        rewriting: Rewriting | None = None,
        dropout_seed: int | None = None,
    ) -> None:
        super().__init__(cross_documents, dropout_seed)
        self.settings, self.rewriting = loss or LossSpec(), rewriting
        self.counts_inputs = rewriting is not None

    def inputs(self, batch: Batch) -> Batch | ObjectiveBatch:
        return self.rewriting.rewrite(batch) if self.rewriting else batch

    def on(self, source: str) -> Pretrain:
        if not isinstance(self.rewriting, Mix):
            return self
        alone = Pretrain(self.cross_documents, self.settings, replace(self.rewriting, names=(source,)))
        alone.columns, alone.tensors = self.columns, self.tensors
        return alone

    def compute_terms(self, model: Decoder, feed: ModelInputs, hidden_BTW: Tensor, count: float) -> LossTerms:
        hidden_BTW, head_VW, bias_V, words = self.head(model, hidden_BTW)
        weights_R = feed.weights_BT.flatten()
        loss, nll_R, correct_R = linear_cross_entropy(
            hidden_BTW.flatten(0, 1), head_VW, feed.targets_BT.flatten(), weights_R, 1.0 / count,
            loss_options(model.shape, self.settings), bias_V, words,
        )  # fmt: skip
        accuracy = ((correct_R * (weights_R > 0)).sum(), weights_R.sum())
        return self.finish(model, feed, loss, nll_R.view_as(feed.targets_BT), count, {"accuracy": accuracy})

    @torch.no_grad()
    def sample_targets(self, model: Decoder, feed: ModelInputs, row_seeds: Sequence[int]) -> ModelInputs:
        """The inputs with targets drawn from the model's own logits. A row's draws depend on its seed alone, not on
        the micro-batch or the rank that holds it. Costs a forward pass and one row's logits at a time."""
        if feed.seed is not None and model.training:
            torch.manual_seed(feed.seed)
        hidden_BTW = model(feed.tokens_BT, feed.attention_mask, **feed.more)
        options = loss_options(model.shape, self.settings)
        draw, drawn = torch.Generator(hidden_BTW.device), list[Tensor]()
        for hidden_1TW, seed in zip(hidden_BTW.split(1), row_seeds, strict=True):
            logits_TV = self.logits(model, hidden_1TW)[0] * options.logit_scale
            if options.logit_cap is not None:
                logits_TV = options.logit_cap * torch.tanh(logits_TV / options.logit_cap)
            shares_TV = torch.softmax(logits_TV, -1).nan_to_num(0.0).clamp(min=torch.finfo(logits_TV.dtype).tiny)
            drawn.append(torch.multinomial(shares_TV, 1, generator=draw.manual_seed(seed))[:, 0])
        return replace(feed, targets_BT=torch.stack(drawn).to(feed.targets_BT.dtype))

    def summarise(self, sums: ValidationSums) -> dict[str, Any]:
        """Bits per byte of text, the share of correctly predicted tokens, and the perplexity."""
        correct, _ = sums.metrics["accuracy"]
        return {
            "bits_per_byte": sums.nats_per_byte / sums.count / math.log(2),
            "accuracy": correct / sums.count,
            "perplexity": math.exp(min(50.0, sums.loss / sums.count)),
        }


def make_pretrain(
    spec: RunSpec, names: Sequence[str], tokenizer: Tokenizer, shape: ModelShape, context: int
) -> Pretrain:
    """The objective of a spec: its tasks, loss and dropout. `names` are the stream's sources."""
    plain = [task.kind for task in spec.tasks] == ["causal"] and not spec.tasks[0].sources and shape.causal
    rewriting = None
    if not plain or shape.decoder_layers:
        rewriting = make_rewriting(spec.tasks, names, spec.seed, tokenizer, shape, context)
    drops = any((spec.dropout.embedding, spec.dropout.attention, spec.dropout.residual))
    return Pretrain(spec.data.cross_documents, spec.loss, rewriting, spec.seed if drops else None)


def loss_options(shape: ModelShape, spec: LossSpec) -> LossOptions:
    """Logit scale and cap from the model, loss terms from the spec."""
    return LossOptions(shape.logit_scale, shape.logit_cap, spec.smoothing, spec.focal, spec.z)
