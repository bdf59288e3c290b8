"""Losses as pure functions: cross-entropy of a linear head without the logits in memory and its variants, the loss of
classification heads, and CTC.

Logits are made for a chunk of rows at a time together with the gradients of that chunk: the (tokens x vocabulary)
matrix never exists, and on a CPU a chunk stays in cache (docs/decisions.md has the times against F.cross_entropy).
Per-token losses are returned too, for the guard and for the share of each document.

Tensor names end in their shape: R rows (tokens), C rows of a chunk, W width, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import UserError

CHUNK_BYTES = 4 << 20  # of float32 logits; on two cores the best of 1 to 128 MB for 8,192 ids, all alike for 2,048
CHUNK_BYTES_GPU = 2 << 30
CHUNK_BYTES_ELSE = 256 << 20  # not measured; large enough to hide launches
WORDS_MULTIPLE = 64
IN_PLACE = 64 << 20  # bytes
IGNORED = -100  # label without a class, as in transformers and torch


@dataclass(frozen=True)
class LossOptions:
    """Scale and cap of the logits, and the loss of each token:
    `(1 - p_target) ** focal * smoothed cross-entropy + z * logsumexp ** 2`."""

    logit_scale: float = 1.0
    logit_cap: float | None = None  # cap * tanh(logits / cap), as in Gemma 2
    smoothing: float = 0.0  # share of the target spread over the vocabulary
    focal: float = 0.0  # gamma of Lin et al. 2017
    z: float = 0.0  # PaLM's z-loss; 1e-4 there

    def __post_init__(self) -> None:
        for name, fits, wanted in (
            ("logit_scale", self.logit_scale > 0, "above 0"),
            ("logit_cap", self.logit_cap is None or self.logit_cap > 0, "above 0, or absent"),
            ("smoothing", 0 <= self.smoothing <= 1, "from 0 to 1"),
            ("focal", self.focal >= 0, "0 or more"),
            ("z", self.z >= 0, "0 or more"),
        ):
            value = getattr(self, name)
            if not fits or (value is not None and not math.isfinite(value)):
                raise UserError(f"loss: {name} is {value}; write a number {wanted}")

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is the plain cross-entropy."""
        return self.smoothing == self.focal == self.z == 0


PLAIN = LossOptions()


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary under tensor parallelism: its first id, of `total` in the group."""

    group: Any
    start: int
    total: int


@dataclass
class _Rows:
    """The loss of each row, and the gradient to its logits in three numbers: `softmax_C * p`, minus `target_C` at the
    target, minus `every_C` at every id."""

    loss_C: Tensor
    softmax_C: Tensor
    target_C: Tensor
    every_C: Tensor | None


def _shape_rows(nll_C: Tensor, norm_C: Tensor, even_C: Tensor, words: int, options: LossOptions) -> _Rows:
    """From each row's cross-entropy, its logsumexp, and its cross-entropy against a uniform target."""
    smoothing, gamma = options.smoothing, options.focal
    entropy_C = nll_C + smoothing * (even_C - nll_C)
    focus_C, steep_C = torch.ones_like(nll_C), torch.zeros_like(nll_C)
    if gamma:
        # 1 - p may be zero, whose power of gamma - 1 is infinite for gamma below 1; nll is no more exact than eps.
        miss_C = (-torch.expm1(-nll_C)).clamp_min(torch.finfo(nll_C.dtype).eps)
        focus_C = miss_C**gamma
        steep_C = gamma * miss_C ** (gamma - 1) * torch.exp(-nll_C) * entropy_C
    return _Rows(
        loss_C=focus_C * entropy_C + options.z * norm_C.square(),
        softmax_C=focus_C + steep_C + 2 * options.z * norm_C,
        target_C=(1 - smoothing) * focus_C + steep_C,
        every_C=focus_C * (smoothing / words) if smoothing else None,
    )


def _shape_logits(logits_CV: Tensor, bias_V: Tensor | None, options: LossOptions, needs_slope: bool) -> Tensor | None:
    """Add the bias, scale and cap in place. Returns the derivative of the cap if gradients are needed."""
    if bias_V is not None:
        logits_CV.add_(bias_V)
    if options.logit_scale != 1:
        logits_CV.mul_(options.logit_scale)
    if options.logit_cap is None:
        return None
    logits_CV.div_(options.logit_cap).tanh_()
    slope_CV = 1 - logits_CV.square() if needs_slope else None
    logits_CV.mul_(options.logit_cap)
    return slope_CV


def _logit_gradient(
    exp_CV: Tensor, sums_C: Tensor, target_C1: Tensor, weight_C: Tensor, rows: _Rows | None, slope_CV: Tensor | None,
    here_C: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient to the head's output, written over `exp_CV`, which is the softmax times `sums_C`."""
    softmax_C = weight_C if rows is None else weight_C * rows.softmax_C
    target_C = weight_C if rows is None else weight_C * rows.target_C
    target_C = target_C if here_C is None else target_C * here_C
    grad_CV = exp_CV.mul_((softmax_C / sums_C)[:, None])
    grad_CV.scatter_add_(1, target_C1, -target_C[:, None])
    if rows is not None and rows.every_C is not None:
        grad_CV.sub_((weight_C * rows.every_C)[:, None])
    return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


@dataclass
class _Head:
    """A linear head, its inputs, and which gradients are needed."""

    hidden_RW: Tensor
    weight_VW: Tensor
    bias_V: Tensor | None
    targets_R: Tensor
    weights_R: Tensor
    scale: float
    options: LossOptions
    wants: tuple[bool, bool, bool]
    words: VocabShard | None = None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
HeadResult = tuple[Tensor, Tensor, Tensor, Gradients]  # cross-entropy, loss and correctness of rows


def _in_chunks(head: _Head, compute: torch.dtype) -> HeadResult:
    """In plain torch: on every device, with every option, and with a sharded vocabulary."""
    hidden_RW, options, wants, words = head.hidden_RW, head.options, head.wants, head.words
    kind = hidden_RW.device.type
    exact = torch.float64 if hidden_RW.dtype == torch.float64 else torch.float32
    h_RW, w_VW = hidden_RW.to(compute), head.weight_VW.to(compute)
    b_V = None if head.bias_V is None else head.bias_V.to(exact)
    rows, vocab = h_RW.shape[0], w_VW.shape[0]
    total = words.total if words else vocab
    grad_h_RW = torch.empty_like(hidden_RW) if wants[0] else None
    grad_w_VW = torch.zeros_like(head.weight_VW, dtype=exact) if wants[1] else None
    grad_b_V = torch.zeros_like(head.bias_V, dtype=exact) if head.bias_V is not None and wants[2] else None
    nll_R = torch.empty(rows, dtype=exact, device=h_RW.device)
    loss_R = nll_R if options.is_cross_entropy else torch.empty_like(nll_R)
    correct_R = torch.empty(rows, dtype=torch.bool, device=h_RW.device)
    limit = {"cpu": CHUNK_BYTES, "cuda": CHUNK_BYTES_GPU}.get(kind, CHUNK_BYTES_ELSE)
    chunk = max(16, limit // (4 * vocab))
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        target_C1 = head.targets_R[part, None]
        logits_CV = (h_RW[part] @ w_VW.t()).to(exact)
        slope_CV = _shape_logits(logits_CV, b_V, options, any(wants))
        top_C, index_C = logits_CV.max(dim=-1)
        if words:
            top_C, index_C = _best_of_all(top_C, index_C, words)
        correct_R[part] = index_C == target_C1[:, 0]
        here_C: Tensor | None = None
        if words:
            target_C1 = target_C1 - words.start
            here_C = ((target_C1 >= 0) & (target_C1 < vocab))[:, 0]
            target_C1 = target_C1.clamp(0, vocab - 1)
        logits_CV.sub_(top_C[:, None])
        at_target_C = logits_CV.gather(1, target_C1)[:, 0]
        mean_C = logits_CV.sum(dim=-1) / total if options.smoothing else at_target_C
        sums_C = logits_CV.exp_().sum(dim=-1)
        if words and here_C is not None:
            sums_3C = torch.stack((sums_C, at_target_C.where(here_C, 0.0), mean_C))
            dist.all_reduce(sums_3C, group=words.group)
            sums_C, at_target_C, mean_C = sums_3C.unbind(0)
        log_C = sums_C.log()
        nll_R[part] = log_C - at_target_C
        shaped = None
        if not options.is_cross_entropy:
            shaped = _shape_rows(nll_R[part], top_C + log_C, log_C - mean_C, total, options)
            loss_R[part] = shaped.loss_C
        if not any(wants):
            continue
        weight_C = head.weights_R[part].to(exact) * (head.scale * options.logit_scale)
        grad_CV = _logit_gradient(logits_CV, sums_C, target_C1, weight_C, shaped, slope_CV, here_C)
        if grad_b_V is not None:
            grad_b_V.add_(grad_CV.sum(dim=0))
        grad_CV = grad_CV.to(compute)
        if grad_h_RW is not None:
            grad_h_RW[part] = grad_CV @ w_VW
        if grad_w_VW is not None and compute == exact:
            grad_w_VW.addmm_(grad_CV.t(), h_RW[part])
        elif grad_w_VW is not None:
            grad_w_VW.add_(grad_CV.t() @ h_RW[part])
    return nll_R, loss_R, correct_R, (grad_h_RW, grad_w_VW, grad_b_V)


def _best_of_all(top_C: Tensor, index_C: Tensor, words: VocabShard) -> tuple[Tensor, Tensor]:
    """The largest logit over the sharded vocabulary and the first id that has it."""
    best_C = top_C.clone()
    dist.all_reduce(best_C, dist.ReduceOp.MAX, group=words.group)
    first_C = (index_C + words.start).where(top_C == best_C, words.total)
    dist.all_reduce(first_C, dist.ReduceOp.MIN, group=words.group)
    return best_C, first_C


def _by_kernel(head: _Head, compute: torch.dtype) -> HeadResult:
    """On a GPU in half precision: one kernel for loss and gradient, and the weight gradient summed over chunks in
    float32 inside the matmuls. With a single chunk, the matmul gives bf16 weights their bf16 gradient directly, without
    4 bytes per weight in between."""
    from bessemer.train.kernels import cross_entropy_rows_

    options, (wants_h, wants_w, _) = head.options, head.wants
    h_RW, vocab = head.hidden_RW.to(compute), len(head.weight_VW)
    w_PW = _padded_words(head.weight_VW, compute)
    rows, padded = len(h_RW), len(w_PW)
    most = max(128, CHUNK_BYTES_GPU // (2 * padded) // 128 * 128)
    chunk = -(-rows // -(-rows // most) // 128) * 128  # equal chunks: a short last one would leave the device idle
    buffer_CP = h_RW.new_empty(chunk, padded)
    grad_h_RW = torch.empty_like(h_RW) if wants_h else None
    alone = rows <= chunk and head.weight_VW.dtype == compute == torch.bfloat16
    grad_w_PW = torch.empty_like(w_PW, dtype=compute if alone else torch.float32) if wants_w else None
    results = []
    for start in range(0, rows, chunk):
        h_CW = h_RW[start : start + chunk]
        logits_CP = buffer_CP[: len(h_CW)]
        torch.mm(h_CW, w_PW.t(), out=logits_CP)
        part = slice(start, start + len(h_CW))
        results.append(
            cross_entropy_rows_(
                logits_CP, vocab, head.targets_R[part], head.weights_R[part], head.scale, wants_h or wants_w,
                options.logit_scale, options.logit_cap, options.z,
            )
        )  # fmt: skip
        if grad_h_RW is not None:
            torch.mm(logits_CP, w_PW, out=grad_h_RW[part])
        if grad_w_PW is not None and alone:
            torch.mm(logits_CP.t(), h_CW, out=grad_w_PW)
        elif grad_w_PW is not None and start == 0:
            torch.mm(logits_CP.t(), h_CW, out_dtype=torch.float32, out=grad_w_PW)
        elif grad_w_PW is not None:
            torch.addmm(grad_w_PW, logits_CP.t(), h_CW, out_dtype=torch.float32, out=grad_w_PW)
    nll_R, loss_R, correct_R = (torch.cat(parts) for parts in zip(*results, strict=True))
    grad_w_VW = None if grad_w_PW is None else grad_w_PW[:vocab]
    return nll_R, loss_R, correct_R, (grad_h_RW, grad_w_VW, None)


def _kernel_serves(head: _Head, compute: torch.dtype) -> bool:
    """Smoothing, focal loss and a head bias are rare and use plain torch."""
    options = head.options
    if head.words or head.hidden_RW.device.type != "cuda" or compute not in (torch.bfloat16, torch.float16):
        return False
    return head.bias_V is None and not options.smoothing and not options.focal and has_triton()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_RW: Tensor,
        head_VW: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        weights_R: Tensor,
        scale: float,
        options: LossOptions,
        wants: tuple[bool, bool, bool],
        words: VocabShard | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = hidden_RW.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_RW.dtype
        # In fp16 a gradient divided by the step's tokens would underflow before the loss scale applies.
        ctx.later = scale if compute == torch.float16 else 1.0
        head = _Head(hidden_RW, head_VW, bias_V, targets_R, weights_R, scale / ctx.later, options, wants, words)
        nll_R, loss_R, correct_R, gradients = _run_head(head, compute)
        ctx.save_for_backward(*gradients)
        ctx.spent = False
        ctx.mark_non_differentiable(nll_R, correct_R)
        return (loss_R * weights_R).sum() * scale, nll_R, correct_R

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A large vocabulary's gradient (a gigabyte) is scaled in place, so a second backward pass is not possible.
        large = any(saved is not None and saved.nbytes >= IN_PLACE for saved in ctx.saved_tensors)
        assert not (large and ctx.spent), "the gradients of a large head are given away once"
        ctx.spent = True
        factor = grad_loss * ctx.later
        grads = (
            None if saved is None else saved.mul_(factor) if saved.nbytes >= IN_PLACE else saved * factor
            for saved in ctx.saved_tensors
        )
        return *grads, None, None, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    """Makes the logits twice: for the losses, and for the gradients once the weight of each token is known. Where they
    fit in one chunk on a GPU, the first gradients are kept in their place instead."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_RW: Tensor, head_VW: Tensor, bias_V: Tensor | None, targets_R: Tensor, options: LossOptions,
        words: VocabShard | None, learns: bool,
    ) -> Tensor:  # fmt: skip
        kind = hidden_RW.device.type
        ctx.compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_RW.dtype
        ctx.options, ctx.words = options, words
        ctx.save_for_backward(hidden_RW, head_VW, bias_V, targets_R)
        ones_R = torch.ones(targets_R.shape, device=hidden_RW.device)
        head = _Head(hidden_RW, head_VW, bias_V, targets_R, ones_R, 1.0, options, (False, False, False), words)
        ctx.kept = None
        if learns and ctx.compute == torch.bfloat16 and _kernel_serves(head, ctx.compute) and _fits_one_chunk(head):
            with torch.autocast(kind, enabled=False):
                nll_R, ctx.kept = logit_gradients(head, ctx.compute)
            return nll_R
        return _run_head(head, ctx.compute)[0]

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_RW, head_VW, bias_V, targets_R = ctx.saved_tensors
        wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        if ctx.kept is not None:
            kept_RP, ctx.kept = ctx.kept, None  # a gigabyte or two: free for the rest of the backward pass
            with torch.autocast(hidden_RW.device.type, enabled=False):
                stored = kept_gradients(kept_RP, hidden_RW, head_VW, grad_R, wants, ctx.compute)
            return *stored, None, None, None, None
        largest = grad_R.abs().max().clamp_min(1e-30)  # scaled to 1, so that fp16 does not underflow
        head = _Head(hidden_RW, head_VW, bias_V, targets_R, grad_R / largest, 1.0, ctx.options, wants, ctx.words)
        grads = _run_head(head, ctx.compute)[3]
        return *(None if grad is None else grad.mul_(largest) for grad in grads), None, None, None, None


def _fits_one_chunk(head: _Head) -> bool:
    padded = len(head.weight_VW) + -len(head.weight_VW) % WORDS_MULTIPLE
    return len(head.hidden_RW) * padded * 2 <= CHUNK_BYTES_GPU


def logit_gradients(head: _Head, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each row and, over its logits, its gradient to them: for `kept_gradients`."""
    from bessemer.train.kernels import cross_entropy_rows_

    options, vocab = head.options, len(head.weight_VW)
    logits_RP = head.hidden_RW.to(compute) @ _padded_words(head.weight_VW, compute).t()
    nll_R, _, _ = cross_entropy_rows_(
        logits_RP, vocab, head.targets_R, head.weights_R, 1.0, True, options.logit_scale, options.logit_cap
    )
    return nll_R, logits_RP


def kept_gradients(
    kept_RP: Tensor, hidden_RW: Tensor, weight_VW: Tensor, grad_R: Tensor, wants: tuple[bool, bool, bool],
    compute: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, None]:  # fmt: skip
    """Gradients to hidden states and weights from those of each row's loss to its logits: a row's weight multiplies
    what is small, its hidden state. The kernel serves no head with a bias."""
    grad_h_RW, grad_w_VW = None, None
    if wants[0]:
        grad_h_RW = (kept_RP @ _padded_words(weight_VW, compute)).mul_(grad_R[:, None]).to(hidden_RW.dtype)
    if wants[1]:
        h_RW = (hidden_RW * grad_R[:, None]).to(compute)
        if weight_VW.dtype == compute or kept_RP.device.type != "cuda":
            grad_w_PW = kept_RP.t() @ h_RW
        else:
            grad_w_PW = torch.mm(kept_RP.t(), h_RW, out_dtype=torch.float32)
        grad_w_VW = grad_w_PW[: len(weight_VW)].to(weight_VW.dtype)
    return grad_h_RW, grad_w_VW, None


def _padded_words(weight_VW: Tensor, compute: torch.dtype) -> Tensor:
    """Matmuls over an odd vocabulary are slow: a copy is padded with zero rows, whose logits and gradients are zero."""
    w_PW, missing = weight_VW.to(compute), -len(weight_VW) % WORDS_MULTIPLE
    return F.pad(w_PW, (0, 0, 0, missing)) if missing else w_PW  # torch copies even for no padding


def _run_head(head: _Head, compute: torch.dtype) -> HeadResult:
    with torch.autocast(head.hidden_RW.device.type, enabled=False):
        return (_by_kernel if _kernel_serves(head, compute) else _in_chunks)(head, compute)


def token_losses(
    hidden_RW: Tensor, head_VW: Tensor, targets_R: Tensor, options: LossOptions | None = None,
    bias_V: Tensor | None = None, words: VocabShard | None = None,
) -> Tensor:  # fmt: skip
    """The cross-entropy of each token, differentiable, without the logits in memory: for losses that are no sums over
    tokens. Of the options only the scale and cap of the logits apply. Costs one more product with the head in the
    backward pass than `linear_cross_entropy`."""
    options = LossOptions((options or PLAIN).logit_scale, (options or PLAIN).logit_cap)
    learns = torch.is_grad_enabled() and (hidden_RW.requires_grad or head_VW.requires_grad)
    inputs = (hidden_RW, head_VW, bias_V, targets_R, options, words, learns)
    result: Tensor = _TokenLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def linear_cross_entropy(
    hidden_RW: Tensor,
    head_VW: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    scale: float,
    options: LossOptions | None = None,
    bias_V: Tensor | None = None,
    words: VocabShard | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`scale` times the weighted sum of losses; each token's plain cross-entropy, whatever the options; whether its
    most likely id is the target. Targets of weight zero must be valid ids too. Frozen tensors cost nothing. With
    `words` the head is a shard of the vocabulary, and the gradient of `hidden_RW` is partial."""
    # Inside `forward` torch does not tell whether gradients are enabled: an evaluation would pay for them.
    learns = torch.is_grad_enabled()
    wants = tuple(learns and t is not None and t.requires_grad for t in (hidden_RW, head_VW, bias_V))
    inputs = (hidden_RW, head_VW, bias_V, targets_R, weights_R, scale, options or PLAIN, wants, words)
    result: tuple[Tensor, Tensor, Tensor] = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


def classification_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """For sequences (B, classes) or tokens (B, T, classes): the weighted sum of cross-entropies, the sum of weights,
    and the number of correct predictions. Labels of -100 and weights of zero do not count."""
    classes = logits.shape[-1]
    exact_RV = logits.reshape(-1, classes).to(torch.promote_types(logits.dtype, torch.float32))
    labels_R = labels.reshape(-1)
    weights_R = torch.ones_like(exact_RV[:, 0]) if weights is None else weights.reshape(-1).to(exact_RV.dtype)
    weights_R = weights_R * (labels_R != IGNORED)
    nll_R = F.cross_entropy(exact_RV, labels_R, ignore_index=IGNORED, reduction="none")
    correct = ((exact_RV.argmax(dim=-1) == labels_R) & (weights_R > 0)).sum()
    return (nll_R * weights_R).sum(), weights_R.sum(), correct


def ctc_loss(
    hidden_BTW: Tensor,
    head_VW: Tensor,
    targets_BS: Tensor,
    input_lengths_B: Tensor,
    target_lengths_B: Tensor,
    blank: int = 0,
    bias_V: Tensor | None = None,
    skip_infeasible: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Connectionist temporal classification (Graves et al. 2006) over F.ctc_loss: nats summed over the batch, the
    number of labels, and a mask of infeasible rows, whose labels do not fit their steps.

    Refuses labels outside the vocabulary by name (torch would read beyond its memory), and infeasible rows (torch gives
    infinity); with `skip_infeasible` these do not count and get no gradient. The (B, T, V) logits are materialised: CTC
    vocabularies are small. Pass lengths on the CPU: F.ctc_loss copies them there."""
    lengths_B = target_lengths_B.to(targets_BS.device)
    used_BS = torch.arange(targets_BS.shape[1], device=targets_BS.device) < lengths_B[:, None]
    wrong_BS = used_BS & ((targets_BS < 0) | (targets_BS >= head_VW.shape[0]) | (targets_BS == blank))
    if wrong_BS.any():
        row, place = wrong_BS.nonzero()[0].tolist()
        problem = f"row {row}, label {place} is {int(targets_BS[row, place])}"
        raise UserError(f"ctc: {problem}; write labels from 0 to {head_VW.shape[0] - 1} other than the blank, {blank}")
    # Equal neighbours need a blank between them.
    needed_B = lengths_B + ((targets_BS[:, 1:] == targets_BS[:, :-1]) & used_BS[:, 1:]).sum(dim=1)
    infeasible_B = needed_B > input_lengths_B.to(needed_B.device)
    if infeasible_B.any() and not skip_infeasible:
        row = int(infeasible_B.nonzero()[0])
        problem = f"row {row} has {int(input_lengths_B[row])} steps and its labels need {int(needed_B[row])}"
        raise UserError(f"ctc: {problem} ({int(infeasible_B.sum())} such rows); drop them or shorten their labels")
    logits_TBV = F.linear(hidden_BTW, head_VW, bias_V).transpose(0, 1)
    log_TBV = logits_TBV.to(torch.promote_types(logits_TBV.dtype, torch.float32)).log_softmax(dim=-1)
    # Infeasible targets are replaced by empty ones: the gradient of an infinite loss is NaN even times zero, and
    # torch's zero_infinity would also hide infinities of the model, which the guard must see.
    fitting_B = lengths_B.masked_fill(infeasible_B, 0)
    loss_B = F.ctc_loss(log_TBV, targets_BS, input_lengths_B, fitting_B.to(target_lengths_B.device), blank, "none")
    return loss_B.masked_fill(infeasible_B.to(loss_B.device), 0.0).sum(), fitting_B.sum(), infeasible_B
