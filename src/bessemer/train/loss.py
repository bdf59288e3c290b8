"""Cross-entropy of a linear head without the logits in memory.

Logits are made for a chunk of rows at a time, and the gradients of that chunk at once: the (tokens x vocabulary) matrix
never exists, and on a CPU a chunk stays in cache (docs/decisions.md has the times against F.cross_entropy). Per-token
losses come out beside the sum, for the guard and for the share of each document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 4 << 20  # of float32 logits; on two cores the best of 1 to 128 MB at 8,192 words, all alike at 2,048
CHUNK_BYTES_GPU = 512 << 20


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_RW: Tensor,
        head_VW: Tensor,
        targets_R: Tensor,
        weights_R: Tensor,
        scale: float,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = hidden_RW.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_RW.dtype
        exact = torch.float64 if hidden_RW.dtype == torch.float64 else torch.float32
        h_RW, w_VW = hidden_RW.to(compute), head_VW.to(compute)
        rows, vocab = h_RW.shape[0], w_VW.shape[0]
        grad_h_RW = torch.empty_like(hidden_RW) if needs_grad else None
        grad_w_VW = torch.zeros_like(head_VW, dtype=exact) if needs_grad else None
        nll_R = torch.empty(rows, dtype=exact, device=h_RW.device)
        correct_R = torch.empty(rows, dtype=torch.bool, device=h_RW.device)
        limit = CHUNK_BYTES if kind == "cpu" else CHUNK_BYTES_GPU
        chunk = max(16, limit // (4 * vocab))
        with torch.autocast(kind, enabled=False):
            for start in range(0, rows, chunk):
                part = slice(start, start + chunk)
                target_C1 = targets_R[part, None]
                logits_CV = (h_RW[part] @ w_VW.t()).to(exact)
                top_C, index_C = logits_CV.max(dim=-1)
                correct_R[part] = index_C == targets_R[part]
                logits_CV.sub_(top_C[:, None])
                at_target_C = logits_CV.gather(1, target_C1)[:, 0]
                sums_C = logits_CV.exp_().sum(dim=-1)
                nll_R[part] = sums_C.log() - at_target_C
                if grad_h_RW is not None and grad_w_VW is not None:
                    weight_C = weights_R[part].to(exact) * scale
                    grad_CV = logits_CV.mul_((weight_C / sums_C)[:, None])
                    grad_CV.scatter_add_(1, target_C1, -weight_C[:, None])
                    grad_CV = grad_CV.to(compute)
                    grad_h_RW[part] = grad_CV @ w_VW
                    if compute == exact:
                        grad_w_VW.addmm_(grad_CV.t(), h_RW[part])
                    else:
                        grad_w_VW.add_(grad_CV.t() @ h_RW[part])
        ctx.save_for_backward(grad_h_RW, grad_w_VW)
        ctx.mark_non_differentiable(nll_R, correct_R)
        return (nll_R * weights_R).sum() * scale, nll_R, correct_R

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_h_RW, grad_w_VW = ctx.saved_tensors
        return grad_h_RW * grad_loss, grad_w_VW * grad_loss, None, None, None, None


def linear_cross_entropy(
    hidden_RW: Tensor, head_VW: Tensor, targets_R: Tensor, weights_R: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`scale` times the weighted sum of token losses; each token's loss; whether its most likely word was right."""
    # Inside `forward` torch no longer says whether gradients are wanted: an evaluation would pay for them.
    needs_grad = torch.is_grad_enabled() and (hidden_RW.requires_grad or head_VW.requires_grad)
    inputs = (hidden_RW, head_VW, targets_R, weights_R, scale, needs_grad)
    result: tuple[Tensor, Tensor, Tensor] = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return result
