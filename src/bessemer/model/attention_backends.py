"""Selects the attention backend that a model trains with: checks each candidate against the reference, then times it on
the device at the true size. Rows beyond 32K tokens, where one layer takes seconds, use the winner at 32K if its result
at their end is right too.

One rank chooses for all, and the plan records the choice: backends round differently, so a resumed run keeps its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.attention import (
    BACKENDS,
    AttentionCall,
    SelfAttention,
    attend,
    attend_reference,
    unsupported_reason,
)
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import alibi_bias, alibi_slopes
from bessemer.spec.shape import ModelShape

# Limits of `largest_error`. bfloat16 kernels stay below 0.015; a window of 1024 that is off by one position gives 0.2.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
CHUNK = 1024  # queries per call of the reference: all logits would take 4 GB per head at 32K tokens
DOCUMENTS = 8  # per packed row of the benchmark, on average
LONG = 32_768  # tokens per row; beyond this, the time of every backend is quadratic
END = 1024  # positions at the end of a long row, which attend to all of it and have the largest addresses
# Factor on the tolerance there: longer sums round more (bfloat16 on a CPU: 0.006 at 4K, 0.015 at 32K), while an address
# overflow gives garbage.
LOOSER = 3


@dataclass(frozen=True)
class BackendChoice:
    name: str
    reason: str
    times: dict[str, float] = field(default_factory=dict)  # seconds per layer, forward and backward
    errors: dict[str, float] = field(default_factory=dict)  # `largest_error` of output and gradients
    dropped: dict[str, str] = field(default_factory=dict)  # name -> reason


def candidates(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, packed: bool, context: int = 1024,
    prefix: bool = False, dropout: bool = False,
) -> list[str]:  # fmt: skip
    """Backends that support every layer, the reference last."""
    E, scattered = (
        shape.mla.value_dim if shape.mla else shape.head_dim,
        prefix or shape.blocks[0] > 0 or shape.global_tokens > 0,
    )
    calls = [
        AttentionCall(
            context, context, shape.key_dim, E, dtype, device.type, packed or scattered or 0 < window < context,
            scattered, shape.attention_cap is not None, bias=shape.positions in ("alibi", "relative"),
            learned=shape.positions == "relative", dropout=dropout,
        )
        for window in windows(shape)
    ]  # fmt: skip
    supported = [name for name in BACKENDS if all(unsupported_reason(name, call) is None for call in calls)]
    if not any(call.masked or call.capped or call.bias for call in calls) and "flex" in supported:
        supported.remove("flex")  # compiles for seconds, and is slower than plain kernels on unmasked rows
    return supported


def windows(shape: ModelShape) -> Counter[int]:
    """How many attention layers have each window."""
    return Counter(shape.window(layer) for layer in range(shape.layers) if shape.mixer(layer) == "attention")


def choose(
    shape: ModelShape, context: int, rows: int, dtype: torch.dtype, device: torch.device, packed: bool,
    budget_s: float = 1.0, prefix: bool = False, dropout: bool = False,
) -> BackendChoice:  # fmt: skip
    """The fastest backend that agrees with the reference. `budget_s` is for timing; flex also compiles for about ten
    seconds per window, as it would in training. Dropout excludes backends; it is not part of the timed call."""
    names = candidates(shape, device, dtype, packed, context, prefix, dropout)
    layers = windows(shape)
    if device.type != "cuda" or names == ["math"] or not layers:
        return BackendChoice(
            names[0], f"not measured: {names[0]} is the only choice for this model on a {device.type} device"
        )

    def make_trial(window: int, length: int) -> BackendTiming:
        return BackendTiming(shape, window, length, rows, dtype, device, packed, prefix)

    trials = {window: make_trial(window, min(context, LONG)) for window in layers}
    choice = compare_backends(names[:-1], trials, layers, budget_s)
    if context > LONG:
        end = END if shape.causal and not shape.blocks[0] else context
        choice = verify_long_rows(choice, [partial(make_trial, window, context) for window in layers], end)
    torch.cuda.empty_cache()
    return choice


def compare_backends(
    names: list[str], trials: dict[int, BackendTiming], layers: Counter[int], budget_s: float
) -> BackendChoice:
    """Check and time each backend; drop one that fails or is inaccurate, with the reason."""
    choice = BackendChoice("math", "")
    share_s, limit = budget_s / len(names) / len(trials), max(TOLERANCE[x.upstream.dtype] for x in trials.values())
    for name in names:
        try:
            worst = choice.errors[name] = torch.tensor([trial.error(name) for trial in trials.values()]).max().item()
            if not worst <= limit:  # NaN fails too
                raise ArithmeticError(f"error {worst:.1e} exceeds {limit:.0e}")
            spent = sum(count * trials[window].seconds(name, share_s) for window, count in layers.items())
            choice.times[name] = spent / layers.total()
        except Exception as error:  # from a kernel, a compiler or memory; reported in the choice
            choice.dropped[name] = _first_line(error)
    return _rank(choice)


def verify_long_rows(choice: BackendChoice, trials: Sequence[Callable[[], BackendTiming]], end: int) -> BackendChoice:
    """The fastest backend that is also right at the `end` of rows of full length. If those do not fit into memory, they
    stay unchecked; training would not fit either."""
    while choice.times:
        try:
            for make in trials:
                trial = make()
                worst, limit = trial.error(choice.name, end), LOOSER * TOLERANCE[trial.upstream.dtype]
                if not worst <= limit:  # NaN fails too
                    raise ArithmeticError(f"error {worst:.1e} at the end of {trial.upstream.shape[1]:,} tokens")
            return choice
        except torch.OutOfMemoryError:
            return replace(choice, reason=f"{choice.reason}; not checked at full length (out of memory)")
        except Exception as error:  # as in compare_backends
            choice.times.pop(choice.name)
            choice.dropped[choice.name] = _first_line(error)
            choice = _rank(choice)
    return choice


def _rank(choice: BackendChoice) -> BackendChoice:
    # Within 5 % flex wins: it is the only fast backend that is deterministic.
    ranked = sorted(choice.times, key=lambda name: choice.times[name] * (0.95 if name == "flex" else 1))
    timings = [f"{name} {choice.times[name] * 1e3:.2f} ms" for name in ranked]
    timings += [f"{name} dropped: {reason}" for name, reason in choice.dropped.items()]
    reason = f"one layer, forward and backward: {', '.join(timings)}"
    return replace(choice, name=(ranked or ["math"])[0], reason=reason)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class BackendTiming:
    """One layer's attention at its true size, on random tensors. Does not touch torch's global generators."""

    def __init__(
        self, shape: ModelShape, window: int, context: int, rows: int, dtype: torch.dtype, device: torch.device,
        packed: bool, prefix: bool = False,
    ) -> None:  # fmt: skip
        random = torch.Generator(device).manual_seed(0)
        N, K, E = shape.heads, shape.kv_heads, shape.head_dim
        if shape.mla:
            K, E = N, shape.mla.value_dim
        sizes = ((N, shape.key_dim), (K, shape.key_dim), (K, E), (N, E))
        tensors = [torch.randn(rows, context, *size, generator=random, device=device, dtype=dtype) for size in sizes]
        self.inputs, self.upstream = [x.requires_grad_() for x in tensors[:3]], tensors[3]
        self.cap, self.window = shape.attention_cap, window
        self.scale = shape.attention_scale if shape.attention_scale is not None else shape.key_dim**-0.5
        biased, learned = shape.positions in ("alibi", "relative"), shape.positions == "relative"
        bias_1NTS = alibi_bias(alibi_slopes(N).to(device), context, context) if biased else None
        self.bias = None if bias_1NTS is None else bias_1NTS.requires_grad_(learned)
        starts_BT = torch.rand(rows, context, generator=random, device=device) < DOCUMENTS / context
        prefix_BT = torch.arange(context, device=device).expand(rows, -1) < context // 8 if prefix else None
        documents_BT = starts_BT.cumsum(1).int() if packed else None
        self.attention_mask = AttentionMask(documents_BT, prefix_BT)
        self.attention_mask.configure(shape)

    def run(self, name: str) -> list[Tensor]:
        """The output, and the gradients of q, k and v."""
        q, k, v = self.inputs
        out = attend(q, k, v, self.attention_mask, self.window, self.scale, self.cap, self.bias, backend=name)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.upstream)]

    def seconds(self, name: str, budget_s: float) -> float:
        """The median time of a few runs."""
        from torch.utils.benchmark import Timer  # a third of a second to import

        timer = Timer("run(name)", globals={"run": self.run, "name": name})
        return timer.blocked_autorange(min_run_time=budget_s).median

    def error(self, name: str, end: int = 0) -> float:
        """Largest error against the reference, at the last key-value head of the last row (heads and rows are
        independent). Over all positions, or over the last `end`, whose keys no other query sees if attention is causal.
        """
        q, k, v = self.inputs
        groups = q.shape[2] // k.shape[2]
        exact = torch.promote_types(q.dtype, torch.float32)

        def last_heads(x: Tensor, heads: int) -> Tensor:
            return x.detach()[-1:, :, -heads:].transpose(1, 2).to(exact)

        results = [last_heads(x, n) for x, n in zip(self.run(name), (groups, groups, 1, 1), strict=True)]
        leaves = [last_heads(x, n).requires_grad_() for x, n in ((q, groups), (k, 1), (v, 1))]
        upstream, positions_T = last_heads(self.upstream, groups), torch.arange(q.shape[1], device=q.device)
        outs, compared = [], slice(-end if end else None, None)
        for chunk in positions_T[compared].split(max(1, min(CHUNK, CHUNK * LONG // len(positions_T)))):
            mask_QT = self.attention_mask.can_attend(self.window)(len(q) - 1, 0, chunk[:, None], positions_T)
            bias = None if self.bias is None else self.bias.detach()[:, -groups:, chunk]
            out = attend_reference(leaves[0][:, :, chunk], leaves[1], leaves[2], mask_QT, self.scale, self.cap, bias)
            out.backward(upstream[:, :, chunk])
            outs.append(out.detach())
        expected = [torch.cat(outs, dim=2), *(x.grad[:, :, compared] for x in leaves if x.grad is not None)]
        errors = [largest_error(x[:, :, compared], y) for x, y in zip(results, expected, strict=True)]
        return torch.stack(errors).max().item()


def largest_error(result_BNTD: Tensor, expected_BNTD: Tensor) -> Tensor:
    """The largest relative error of a position, so that a single position that attends to too much shows; NaN if any
    is. Relative to its own norm or its neighbourhood's: gradients cancel in places, and are smaller late in a document.
    """
    norms_BNT = expected_BNTD.norm(dim=-1)
    squares_B1T = norms_BNT.square().mean(dim=1, keepdim=True)
    local_B1T = F.avg_pool1d(squares_B1T, 17, stride=1, padding=8, count_include_pad=False).sqrt()
    scale_BNT = torch.maximum(norms_BNT, local_B1T).clamp(min=0.1 * squares_B1T.mean().sqrt().item())
    return ((result_BNTD - expected_BNTD).norm(dim=-1) / scale_BNT).max()


def set_backend(model: nn.Module, name: str) -> None:
    """Set the backend of every attention layer; `attention.select_backend` may still fall back per call."""
    if name not in (*BACKENDS, "auto"):
        raise UserError(f"attention backend {name!r} is unknown; write auto, {', '.join(BACKENDS)}")
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.backend = name  # type: ignore[assignment]
