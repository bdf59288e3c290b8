"""Attention of some queries to a block of keys, with the log-sum-exp by which blocks are merged, and its gradients from
the log-sum-exp of all blocks. One kernel for each kind of device, and plain torch where none serves.

`aten`'s own operators, since `scaled_dot_product_attention` keeps the log-sum-exp to itself.
Legend: B rows, N query heads, K key-value heads, t queries, s keys of the block, D head size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
ALIGNED = 32  # rows of the efficient kernel's log-sum-exp; its bias wants 8, which divides it


def exact(dtype: torch.dtype) -> torch.dtype:
    """In which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel(q_BNtD: Tensor, v_BKsE: Tensor, masked: bool) -> str:
    """Which one serves: cpu, flash, efficient or plain. The last makes logits of B * N * t * s numbers."""
    D, E, dtype, device = q_BNtD.shape[-1], v_BKsE.shape[-1], v_BKsE.dtype, v_BKsE.device.type
    if device == "cpu":
        return "cpu" if D == E else "plain"
    half = dtype in (torch.bfloat16, torch.float16)
    if device != "cuda" or not (half or dtype == torch.float32):
        return "plain"
    if half and not masked and D == E and D % 8 == 0 and D <= 256:
        return "flash"
    step = 8 if half else 4
    return "efficient" if D % step == 0 and E % step == 0 else "plain"


def attend_block(
    q_BNtD: Tensor, k_BKsD: Tensor, v_BKsE: Tensor, mask_B1ts: Tensor | None, causal: bool, scale: float,
    chosen: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(B, N, t, E) and the log-sum-exp (B, N, t): 0 and -inf of queries that see nothing here."""
    name = kernel(q_BNtD, v_BKsE, mask_B1ts is not None) if chosen == "auto" else chosen
    k, v = _repeated(q_BNtD, k_BKsD), _repeated(q_BNtD, v_BKsE)
    bias = None if mask_B1ts is None else _bias(mask_B1ts, q_BNtD)
    if name == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNtD, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif name == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q_BNtD, k, v, 0.0, causal, scale=scale)
    elif name == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BNtD, k, v, bias, True, 0.0, causal, scale=scale)
        lse = lse[:, :, : q_BNtD.shape[2]]
    else:
        logits = _logits(q_BNtD, k, bias, causal, scale)
        lse = logits.logsumexp(dim=-1)
        out = _product(torch.exp(logits - lse[..., None]), v)
    if mask_B1ts is not None:  # kernels disagree on rows without a key
        seen_B1t = mask_B1ts.any(dim=-1)
        out, lse = out.where(seen_B1t[..., None], 0), lse.where(seen_B1t, float("-inf"))
    return out, lse


def block_gradients(
    grad_BNtE: Tensor, q_BNtD: Tensor, k_BKsD: Tensor, v_BKsE: Tensor, out_BNtE: Tensor, lse_BNt: Tensor,
    mask_B1ts: Tensor | None, causal: bool, scale: float, chosen: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of q, k and v, through this block. `out` and `lse` are those of all blocks together: shares of keys are
    exp(logit - lse), whichever block they are in."""
    name = kernel(q_BNtD, v_BKsE, mask_B1ts is not None) if chosen == "auto" else chosen
    k, v = _repeated(q_BNtD, k_BKsD), _repeated(q_BNtD, v_BKsE)
    bias = None if mask_B1ts is None else _bias(mask_B1ts, q_BNtD)
    lse = lse_BNt.contiguous()
    if name == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BNtE, q_BNtD, k, v, out_BNtE, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif name == "flash":
        unused = torch.zeros((), dtype=torch.int64, device=q_BNtD.device)  # of dropout
        found = aten._scaled_dot_product_flash_attention_backward(
            grad_BNtE, q_BNtD, k, v, out_BNtE, lse, None, None, q_BNtD.shape[2], k.shape[2], 0.0, causal, unused,
            unused, scale=scale,
        )  # fmt: skip
    elif name == "efficient":
        unused = torch.zeros((), dtype=torch.int64, device=q_BNtD.device)
        lse = F.pad(lse, (0, -lse.shape[-1] % ALIGNED), value=float("inf"))
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad_BNtE, q_BNtD, k, v, bias, out_BNtE, lse, unused, unused, 0.0, (True, True, True, False), causal,
            scale=scale,
        )  # fmt: skip
    else:
        kind = exact(q_BNtD.dtype)
        shares = torch.exp(_logits(q_BNtD, k, bias, causal, scale) - lse[..., None])
        grad = grad_BNtE.to(kind)
        within = (grad * out_BNtE.to(kind)).sum(dim=-1, keepdim=True)
        inner = shares * (_product(grad, v.transpose(-1, -2)) - within) * scale
        found = _product(inner, k), _product(inner.transpose(-1, -2), q_BNtD), _product(shares.transpose(-1, -2), grad)
    dq, dk, dv = found[:3]
    return dq, _summed(dk, k_BKsD), _summed(dv, v_BKsE)


def _repeated(q_BNtD: Tensor, x_BKsD: Tensor) -> Tensor:
    """Key-value heads once for each of their query heads."""
    groups = q_BNtD.shape[1] // x_BKsD.shape[1]
    return x_BKsD if groups == 1 else x_BKsD.repeat_interleave(groups, dim=1)


def _summed(grad_BNsD: Tensor, like_BKsD: Tensor) -> Tensor:
    """The other way, in exact sums."""
    grad = grad_BNsD.to(exact(like_BKsD.dtype))
    return grad.unflatten(1, (like_BKsD.shape[1], -1)).sum(dim=2)


def _bias(mask_B1ts: Tensor, q_BNtD: Tensor) -> Tensor:
    """0 or -inf for all heads. On a GPU its rows lie at multiples of 32 numbers, as the kernel wants them."""
    (B, N), (t, s) = q_BNtD.shape[:2], mask_B1ts.shape[-2:]
    wide = s if q_BNtD.device.type == "cpu" else -(-s // ALIGNED) * ALIGNED
    bias = q_BNtD.new_zeros(len(mask_B1ts), 1, t, wide)[..., :s].masked_fill_(~mask_B1ts, float("-inf"))
    return bias.expand(B, N, t, s)


def _logits(q_BNtD: Tensor, k_BNsD: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    logits = _product(q_BNtD, k_BNsD.transpose(-1, -2)) * scale
    if causal:
        t, s = logits.shape[-2:]
        logits = logits.masked_fill(~torch.ones(t, s, dtype=torch.bool, device=logits.device).tril(), float("-inf"))
    return logits if bias is None else logits + bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    kind = exact(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(kind) @ b.to(kind)
