"""Distillation: the student's next-token distribution should be that of a frozen teacher (`models.teacher`).

Logits of both are made for a chunk of rows at a time and made again in the backward pass, so that memory holds those of
one chunk. With `distill.stored` the teacher's part was computed before the run and is read from disk. Legend: R rows
(tokens), C rows of a chunk, W width of the student, U of the teacher, V vocabulary, K tokens that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bessemer.data.stream.batches import Batch
from bessemer.data.stream.teacher import PLACES, TeacherStore
from bessemer.model.transformer import Decoder
from bessemer.spec.distill import DistillSpec
from bessemer.spec.model import LossSpec
from bessemer.train.loss import CHUNK_BYTES, CHUNK_BYTES_ELSE, CHUNK_BYTES_GPU
from bessemer.train.objective import LossTerms, ModelInputs, Objective, ValidationSums, loss_options

STORED_IDS, STORED_LOG_P = "teacher_ids", "teacher_log_p"  # fields of a stored teacher beside the targets
Logits = Callable[[Tensor], Tensor]  # of the last hidden states of some rows


class Distill(Objective):
    """`next_token` of the loss is cross-entropy, the rest the divergence. A stored teacher with another tokenizer has
    no prediction for some tokens, whose divergence is zero and does not count in the metric."""

    metrics, counts_tokens = ("nll", "divergence"), True

    def __init__(
        self, spec: DistillSpec, cross_documents: bool = False, dropout_seed: int | None = None,
        stored: TeacherStore | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cross_documents, dropout_seed)
        self.spec, self.counts_inputs, self.stored = spec, False, stored
        self.needs_models = ("teacher",) if stored is None else ()

    def feed(self, batch: Batch, device: torch.device) -> ModelInputs:
        feed = super().feed(batch, device)
        if self.stored is not None:
            places_BT = batch.fields[PLACES]
            if self.columns is not None:
                places_BT = places_BT[:, self.columns.part(places_BT.shape[1], torch.device("cpu")).numpy()]
            for name, array in zip((STORED_IDS, STORED_LOG_P), self.stored.read(places_BT), strict=True):
                feed.fields[name] = torch.from_numpy(array).to(device)
        return feed

    def compute_terms(self, model: Decoder, feed: ModelInputs, hidden_BTW: Tensor, count: float) -> LossTerms:
        tensors = [hidden_BTW, feed.targets_BT]
        if self.stored is not None:
            tensors += [feed.fields[STORED_IDS], feed.fields[STORED_LOG_P]]
            rows = partial(_stored_rows, self.spec, self.stored.header.vocab, self.row_logits(model))
            words = len(model.head_weight)
        else:
            tensors.append(self.other_hidden("teacher", feed))
            teacher = self.models["teacher"]
            rows = partial(_rows, self.spec, self.row_logits(model), self.row_logits(teacher))
            words = len(model.head_weight) + len(teacher.head_weight)
        chunks = zip(*(x.flatten(0, 1).split(chunk_rows(words, hidden_BTW.device)) for x in tensors), strict=True)
        parts = [checkpoint(rows, *chunk, use_reentrant=False) for chunk in chunks]
        nll_R, divergence_R, covered_R = (torch.cat(some) for some in zip(*parts, strict=True))
        weights_R, share = feed.weights_BT.flatten(), self.spec.next_token
        losses_R = share * nll_R + (1 - share) * divergence_R
        loss = (losses_R * weights_R).sum() * (1.0 / count)
        metrics = {
            "nll": ((nll_R.detach() * weights_R).sum(), weights_R.sum()),
            "divergence": ((divergence_R.detach() * weights_R).sum(), (covered_R * weights_R).sum()),
        }
        losses_BT = (losses_R.detach() * (weights_R > 0)).view_as(feed.targets_BT)
        return self.finish(model, feed, loss, losses_BT, count, metrics)

    def row_logits(self, model: Decoder) -> Logits:
        """Logits of rows of the model's hidden states, in at least float32, scaled and capped as the model has it. Call
        it after the model has run."""
        _, head_VW, bias_V, _ = self.head(model, model.head_weight)
        options = loss_options(model.shape, LossSpec())

        def logits(x_CW: Tensor) -> Tensor:
            logits_CV = F.linear(x_CW, head_VW.to(x_CW.dtype))
            logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
            logits_CV = logits_CV if bias_V is None else logits_CV + bias_V
            logits_CV = logits_CV * options.logit_scale
            cap = options.logit_cap
            return logits_CV if cap is None else cap * torch.tanh(logits_CV / cap)

        return logits

    def summarise(self, sums: ValidationSums) -> dict[str, Any]:
        numbers = super().summarise(sums)
        return {**numbers, "perplexity": math.exp(min(50.0, numbers["nll"]))}


def chunk_rows(words: int, device: torch.device) -> int:
    """Rows whose logits and probabilities of that many words, in float32, are in memory at a time."""
    limit = {"cpu": CHUNK_BYTES, "cuda": CHUNK_BYTES_GPU}.get(device.type, CHUNK_BYTES_ELSE)
    return max(1, limit // (8 * words))


def _rows(
    spec: DistillSpec, student: Logits, teacher: Logits, x_CW: Tensor, targets_C: Tensor, x_CU: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy and divergence of each row, and whether the teacher has a prediction: always."""
    logits_CV = student(x_CW)
    with torch.no_grad():
        teacher_CV = teacher(x_CU)
    vocab = min(logits_CV.shape[1], teacher_CV.shape[1])  # some models have spare rows
    nll_C = F.cross_entropy(logits_CV, targets_C, reduction="none")
    return nll_C, divergence(teacher_CV[:, :vocab], logits_CV[:, :vocab], spec), torch.ones_like(nll_C)


def _stored_rows(
    spec: DistillSpec, vocab: int, student: Logits, x_CW: Tensor, targets_C: Tensor, ids_CK: Tensor, log_p_CK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the teacher's tokens from disk; NaN where it has no prediction."""
    logits_CV = student(x_CW)
    nll_C = F.cross_entropy(logits_CV, targets_C, reduction="none")
    covered_C = ~log_p_CK[:, 0].isnan()
    log_q_CK = with_rest((logits_CV[:, :vocab] / spec.temperature).log_softmax(-1), ids_CK)
    # Rows without a prediction compare the student with itself, so that no NaN reaches the gradient.
    log_p_CK = log_p_CK.where(covered_C[:, None], log_q_CK.detach())
    return nll_C, _compare(log_p_CK, log_q_CK, spec) * covered_C, covered_C.to(nll_C.dtype)


def divergence(teacher_CV: Tensor, student_CV: Tensor, spec: DistillSpec) -> Tensor:
    """Between the distributions of each row, times the square of the temperature (Hinton et al. 2015), which keeps the
    gradients' size. With `top_k`, of the distributions over the teacher's top tokens and the rest as one token."""
    log_p_CK, log_q_CK = ((x_CV / spec.temperature).log_softmax(-1) for x_CV in (teacher_CV, student_CV))
    if spec.top_k is not None and spec.top_k < log_p_CK.shape[-1]:
        top_CK = log_p_CK.topk(spec.top_k, dim=-1).indices
        log_p_CK, log_q_CK = with_rest(log_p_CK, top_CK), with_rest(log_q_CK, top_CK)
    return _compare(log_p_CK, log_q_CK, spec)


def _compare(log_p_CK: Tensor, log_q_CK: Tensor, spec: DistillSpec) -> Tensor:
    if spec.loss == "forward" or (spec.loss == "js" and spec.beta == 0):
        value_C = _kl(log_p_CK, log_q_CK)
    elif spec.loss == "reverse" or spec.beta == 1:
        value_C = _kl(log_q_CK, log_p_CK)
    else:
        value_C = _generalised_js(log_p_CK, log_q_CK, spec.beta)
    return value_C * spec.temperature**2


def _generalised_js(log_p_CK: Tensor, log_q_CK: Tensor, beta: float) -> Tensor:
    """beta KL(P | M) + (1 - beta) KL(Q | M) with M = beta P + (1 - beta) Q (Agarwal et al. 2024, equation 1)."""
    log_m_CK = torch.logaddexp(log_p_CK + math.log(beta), log_q_CK + math.log1p(-beta))
    return beta * _kl(log_p_CK, log_m_CK) + (1 - beta) * _kl(log_q_CK, log_m_CK)


def _kl(log_p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    return (log_p_CK.exp() * (log_p_CK - log_q_CK)).sum(-1)


def with_rest(log_CV: Tensor, top_CK: Tensor) -> Tensor:
    """The log-probabilities of some tokens, and of all others together."""
    rest_CV = log_CV.scatter(-1, top_CK, -torch.inf)
    return torch.cat((log_CV.gather(-1, top_CK), rest_CV.logsumexp(-1, keepdim=True)), -1)
