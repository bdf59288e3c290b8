"""Distillation: the student's next-token distribution should be that of a frozen teacher (`models.teacher`).

Logits of both are made for a chunk of rows at a time and made again in the backward pass, so that memory holds those of
one chunk. Legend: R rows (tokens), C rows of a chunk, W width of the student, U of the teacher, V vocabulary, K tokens
that are compared.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bessemer.model.transformer import Decoder
from bessemer.spec.distill import DistillSpec
from bessemer.spec.model import LossSpec
from bessemer.train.loss import CHUNK_BYTES, CHUNK_BYTES_ELSE, CHUNK_BYTES_GPU, LossOptions
from bessemer.train.objective import LossTerms, ModelInputs, Objective, ValidationSums, loss_options


class Distill(Objective):
    """`next_token` of the loss is cross-entropy, the rest the divergence."""

    metrics, counts_tokens, needs_models = ("nll", "divergence"), True, ("teacher",)

    def __init__(self, spec: DistillSpec, cross_documents: bool = False, dropout_seed: int | None = None) -> None:
        super().__init__(cross_documents, dropout_seed)
        self.spec, self.counts_inputs = spec, False

    def compute_terms(self, model: Decoder, feed: ModelInputs, hidden_BTW: Tensor, count: float) -> LossTerms:
        teacher = self.models["teacher"]
        teacher_BTU = self.other_hidden("teacher", feed)
        rows = partial(_rows, self.spec, student=_options(model), teacher=_options(teacher))
        _, head_VW, bias_V, _ = self.head(model, hidden_BTW)
        _, head_VU, teacher_bias_V, _ = self.head(teacher, teacher_BTU)
        hidden_RW, hidden_RU, targets_R = hidden_BTW.flatten(0, 1), teacher_BTU.flatten(0, 1), feed.targets_BT.flatten()
        limit = {"cpu": CHUNK_BYTES, "cuda": CHUNK_BYTES_GPU}.get(hidden_RW.device.type, CHUNK_BYTES_ELSE)
        size = max(1, limit // (8 * (len(head_VW) + len(head_VU))))  # logits and probabilities of both, in float32
        pairs = [
            checkpoint(rows, x_CW, x_CU, targets_C, head_VW, head_VU, bias_V, teacher_bias_V, use_reentrant=False)
            for x_CW, x_CU, targets_C in zip(
                hidden_RW.split(size), hidden_RU.split(size), targets_R.split(size), strict=True
            )
        ]
        nll_R, divergence_R = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        weights_R, share = feed.weights_BT.flatten(), self.spec.next_token
        losses_R = share * nll_R + (1 - share) * divergence_R
        loss, total = (losses_R * weights_R).sum() * (1.0 / count), weights_R.sum()
        sums = {"nll": nll_R.detach() * weights_R, "divergence": divergence_R.detach() * weights_R}
        metrics = {name: (values_R.sum(), total) for name, values_R in sums.items()}
        losses_BT = (losses_R.detach() * (weights_R > 0)).view_as(feed.targets_BT)
        return self.finish(model, feed, loss, losses_BT, count, metrics)

    def summarise(self, sums: ValidationSums) -> dict[str, Any]:
        numbers = super().summarise(sums)
        return {**numbers, "perplexity": math.exp(min(50.0, numbers["nll"]))}


def _options(model: Decoder) -> LossOptions:
    return loss_options(model.shape, LossSpec())


def _rows(
    spec: DistillSpec, x_CW: Tensor, x_CU: Tensor, targets_C: Tensor, head_VW: Tensor, head_VU: Tensor,
    bias_V: Tensor | None, teacher_bias_V: Tensor | None, student: LossOptions, teacher: LossOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy and divergence of each row."""
    logits_CV = _logits(x_CW, head_VW, bias_V, student)
    with torch.no_grad():
        teacher_CV = _logits(x_CU, head_VU, teacher_bias_V, teacher)
    vocab = min(logits_CV.shape[1], teacher_CV.shape[1])  # some models have spare rows
    nll_C = F.cross_entropy(logits_CV, targets_C, reduction="none")
    return nll_C, divergence(teacher_CV[:, :vocab], logits_CV[:, :vocab], spec)


def _logits(x_CW: Tensor, head_VW: Tensor, bias_V: Tensor | None, options: LossOptions) -> Tensor:
    """In at least float32, scaled and capped as the model has it."""
    logits_CV = F.linear(x_CW, head_VW.to(x_CW.dtype))
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    logits_CV = logits_CV if bias_V is None else logits_CV + bias_V
    logits_CV = logits_CV * options.logit_scale
    cap = options.logit_cap
    return logits_CV if cap is None else cap * torch.tanh(logits_CV / cap)


def divergence(teacher_CV: Tensor, student_CV: Tensor, spec: DistillSpec) -> Tensor:
    """Between the distributions of each row, times the square of the temperature (Hinton et al. 2015), which keeps the
    gradients' size. With `top_k`, of the distributions over the teacher's top tokens and the rest as one token."""
    log_p_CK, log_q_CK = ((x_CV / spec.temperature).log_softmax(-1) for x_CV in (teacher_CV, student_CV))
    if spec.top_k is not None and spec.top_k < log_p_CK.shape[-1]:
        top_CK = log_p_CK.topk(spec.top_k, dim=-1).indices
        log_p_CK, log_q_CK = _with_rest(log_p_CK, top_CK), _with_rest(log_q_CK, top_CK)
    if spec.loss == "forward":
        value_C = _kl(log_p_CK, log_q_CK)
    elif spec.loss == "reverse":
        value_C = _kl(log_q_CK, log_p_CK)
    else:
        log_m_CK = torch.logaddexp(log_p_CK, log_q_CK) - math.log(2)
        value_C = 0.5 * (_kl(log_p_CK, log_m_CK) + _kl(log_q_CK, log_m_CK))
    return value_C * spec.temperature**2


def _kl(log_p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    return (log_p_CK.exp() * (log_p_CK - log_q_CK)).sum(-1)


def _with_rest(log_CV: Tensor, top_CK: Tensor) -> Tensor:
    """The log-probabilities of some tokens, and of all others together."""
    rest_CV = log_CV.scatter(-1, top_CK, -torch.inf)
    return torch.cat((log_CV.gather(-1, top_CK), rest_CV.logsumexp(-1, keepdim=True)), -1)
