"""Which attention backend a model trains with: measured on the device at its true size, each checked first. Rows of
more than 32K tokens, where one layer takes seconds, are left to the winner at 32K, if it is right at their end too.

One rank chooses for all, and the plan records it: backends round differently, so a resumed run keeps its own.
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
from bessemer.model.attention import BACKENDS, AttentionCall, SelfAttention, attend, reference, unfit
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.positions import alibi_bias, alibi_slopes
from bessemer.spec.shape import ModelShape

# Of `largest_error`. Kernels in bfloat16 stay below 0.015; a window of 1024 that is off by one position makes 0.2.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
CHUNK = 1024  # queries of the reference at a time: logits of all would be 4 GB a head at 32K tokens
DOCUMENTS = 8  # of a packed row in the measurement, on average
LONG = 32_768  # tokens of a row: beyond, time goes by their square with every backend
END = 1024  # positions at the end of a long row, which see all of it and have the largest addresses
LOOSER = 3  # there: sums of more terms round more (a CPU's bfloat16 0.006 at 4K, 0.015 at 32K), and addresses that
# overflow give garbage, not digits


@dataclass(frozen=True)
class BackendChoice:
    name: str
    reason: str
    times: dict[str, float] = field(default_factory=dict)  # seconds of a layer, forward and backward
    errors: dict[str, float] = field(default_factory=dict)  # the largest of output and gradients, see `largest_error`
    dropped: dict[str, str] = field(default_factory=dict)  # and why


def candidates(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, packed: bool, context: int = 1024,
    prefix: bool = False, dropout: bool = False,
) -> list[str]:  # fmt: skip
    """Backends that can serve every layer, the reference last."""
    E, scattered = shape.mla.value_dim if shape.mla else shape.head_dim, prefix or shape.blocks[0] > 0
    calls = [
        AttentionCall(
            context, context, shape.key_dim, E, dtype, device.type, packed or scattered or 0 < window < context,
            scattered, shape.attention_cap is not None, bias=shape.positions in ("alibi", "relative"),
            learned=shape.positions == "relative", dropout=dropout,
        )
        for window in windows(shape)
    ]  # fmt: skip
    fit = [name for name in BACKENDS if all(unfit(name, call) is None for call in calls)]
    if not any(call.masked or call.capped or call.bias for call in calls) and "flex" in fit:
        fit.remove("flex")  # it compiles for seconds, and kernels made for plain rows are faster
    return fit


def windows(shape: ModelShape) -> Counter[int]:
    """How many attention layers have each window."""
    return Counter(shape.window(layer) for layer in range(shape.layers) if shape.mixer(layer) == "attention")


def choose(
    shape: ModelShape, context: int, rows: int, dtype: torch.dtype, device: torch.device, packed: bool,
    budget_s: float = 1.0, prefix: bool = False, dropout: bool = False,
) -> BackendChoice:  # fmt: skip
    """The fastest backend that agrees with the reference. `budget_s` is for timing; flex compiles for some ten seconds
    more for each window, as training with it would. Dropout shuts some out; it is not in what is timed."""
    names = candidates(shape, device, dtype, packed, context, prefix, dropout)
    layers = windows(shape)
    if device.type != "cuda" or names == ["math"] or not layers:
        return BackendChoice(
            names[0], f"not measured: {names[0]} is the only one for this model on a {device.type} device"
        )

    def trial(window: int, length: int) -> BackendTiming:
        return BackendTiming(shape, window, length, rows, dtype, device, packed, prefix)

    choice = contest(names[:-1], {window: trial(window, min(context, LONG)) for window in layers}, layers, budget_s)
    if context > LONG:
        end = END if shape.causal and not shape.blocks[0] else context
        choice = proven(choice, [partial(trial, window, context) for window in layers], end)
    torch.cuda.empty_cache()
    return choice


def contest(names: list[str], trials: dict[int, BackendTiming], layers: Counter[int], budget_s: float) -> BackendChoice:
    """Check and time each; a backend that fails or is off is dropped with the reason."""
    choice = BackendChoice("math", "")
    share_s, limit = budget_s / len(names) / len(trials), max(TOLERANCE[x.upstream.dtype] for x in trials.values())
    for name in names:
        try:
            worst = choice.errors[name] = torch.tensor([trial.error(name) for trial in trials.values()]).max().item()
            if not worst <= limit:  # nor NaN
                raise ArithmeticError(f"off by {worst:.1e}, more than {limit:.0e}")
            spent = sum(count * trials[window].seconds(name, share_s) for window, count in layers.items())
            choice.times[name] = spent / layers.total()
        except Exception as fault:  # of a kernel, a compiler or memory; the reason is kept, and told
            choice.dropped[name] = _first_line(fault)
    return _concluded(choice)


def proven(choice: BackendChoice, trials: Sequence[Callable[[], BackendTiming]], end: int) -> BackendChoice:
    """The fastest that is right at the `end` of rows of full length as well. Where those have no room, nothing is
    known, and training would not have it either."""
    while choice.times:
        try:
            for make in trials:
                trial = make()
                worst, limit = trial.error(choice.name, end), LOOSER * TOLERANCE[trial.upstream.dtype]
                if not worst <= limit:  # nor NaN
                    raise ArithmeticError(f"off by {worst:.1e} at the end of {trial.upstream.shape[1]:,} tokens")
            return choice
        except torch.OutOfMemoryError:
            return replace(choice, reason=f"{choice.reason}; no room to check it at full length")
        except Exception as fault:  # as in a contest
            choice.times.pop(choice.name)
            choice.dropped[choice.name] = _first_line(fault)
            choice = _concluded(choice)
    return choice


def _concluded(choice: BackendChoice) -> BackendChoice:
    # Within 5 % flex wins: alone among the fast ones it gives the same bits each time.
    ranked = sorted(choice.times, key=lambda name: choice.times[name] * (0.95 if name == "flex" else 1))
    told = [f"{name} {choice.times[name] * 1e3:.2f} ms" for name in ranked]
    told += [f"{name} dropped: {why}" for name, why in choice.dropped.items()]
    return replace(choice, name=(ranked or ["math"])[0], reason="a layer forward and backward: " + ", ".join(told))


def _first_line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


class BackendTiming:
    """One layer's attention at its true size, on random tensors; draws nothing from torch's own generators."""

    def __init__(
        self, shape: ModelShape, window: int, context: int, rows: int, dtype: torch.dtype, device: torch.device,
        packed: bool, prefix: bool = False,
    ) -> None:  # fmt: skip
        random = torch.Generator(device).manual_seed(0)
        N, K, E = shape.heads, shape.kv_heads, shape.head_dim
        if shape.mla:
            K, E = N, shape.mla.value_dim
        sizes = ((N, shape.key_dim), (K, shape.key_dim), (K, E), (N, E))
        made = [torch.randn(rows, context, *size, generator=random, device=device, dtype=dtype) for size in sizes]
        self.inputs, self.upstream = [x.requires_grad_() for x in made[:3]], made[3]
        self.cap, self.window = shape.attention_cap, window
        self.scale = shape.attention_scale if shape.attention_scale is not None else shape.key_dim**-0.5
        biased, learned = shape.positions in ("alibi", "relative"), shape.positions == "relative"
        bias_1NTS = alibi_bias(alibi_slopes(N).to(device), context, context) if biased else None
        self.bias = None if bias_1NTS is None else bias_1NTS.requires_grad_(learned)
        begins_BT = torch.rand(rows, context, generator=random, device=device) < DOCUMENTS / context
        prefix_BT = torch.arange(context, device=device).expand(rows, -1) < context // 8 if prefix else None
        self.sight = AttentionMask(begins_BT.cumsum(1).int() if packed else None, prefix_BT, shape.causal, shape.blocks)

    def run(self, name: str) -> list[Tensor]:
        """The output, and the gradients of q, k and v."""
        q, k, v = self.inputs
        out = attend(q, k, v, self.sight, self.window, self.scale, self.cap, self.bias, backend=name)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.upstream)]

    def seconds(self, name: str, budget_s: float) -> float:
        """The median of a few runs."""
        from torch.utils.benchmark import Timer  # a third of a second to import

        timer = Timer("run(name)", globals={"run": self.run, "name": name})
        return timer.blocked_autorange(min_run_time=budget_s).median

    def error(self, name: str, end: int = 0) -> float:
        """Against the reference, at the last key-value head of the last row: heads and rows do not meet. Of all
        positions, or of the last `end`, whose keys no other queries see if attention is causal."""
        q, k, v = self.inputs
        groups = q.shape[2] // k.shape[2]
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32

        def cut(x: Tensor, heads: int) -> Tensor:
            return x.detach()[-1:, :, -heads:].transpose(1, 2).to(exact)

        found = [cut(x, n) for x, n in zip(self.run(name), (groups, groups, 1, 1), strict=True)]
        leaves = [cut(x, n).requires_grad_() for x, n in ((q, groups), (k, 1), (v, 1))]
        upstream, places_T = cut(self.upstream, groups), torch.arange(q.shape[1], device=q.device)
        outs, compared = [], slice(-end if end else None, None)
        for chunk in places_T[compared].split(max(1, min(CHUNK, CHUNK * LONG // len(places_T)))):
            mask_QT = self.sight.sees(self.window)(len(q) - 1, 0, chunk[:, None], places_T)
            bias = None if self.bias is None else self.bias.detach()[:, -groups:, chunk]
            out = reference(leaves[0][:, :, chunk], leaves[1], leaves[2], mask_QT, self.scale, self.cap, bias)
            out.backward(upstream[:, :, chunk])
            outs.append(out.detach())
        true = [torch.cat(outs, dim=2), *(x.grad[:, :, compared] for x in leaves if x.grad is not None)]
        found = [x[:, :, compared] for x in found]
        return torch.stack([largest_error(x, y) for x, y in zip(found, true, strict=True)]).max().item()


def largest_error(found_BNTD: Tensor, true_BNTD: Tensor) -> Tensor:
    """The largest error of a position, so that one that sees too much shows; NaN if one is. Against its own norm or its
    neighbourhood's: gradients cancel here and there, and positions late in a document have smaller ones than early."""
    norms_BNT = true_BNTD.norm(dim=-1)
    squares_B1T = norms_BNT.square().mean(dim=1, keepdim=True)
    near_B1T = F.avg_pool1d(squares_B1T, 17, stride=1, padding=8, count_include_pad=False).sqrt()
    scale_BNT = torch.maximum(norms_BNT, near_B1T).clamp(min=0.1 * squares_B1T.mean().sqrt().item())
    return ((found_BNTD - true_BNTD).norm(dim=-1) / scale_BNT).max()


def set_backend(model: nn.Module, name: str) -> None:
    """Let every attention layer use it, as far as `attend.serving` allows."""
    if name not in (*BACKENDS, "auto"):
        raise UserError(f"attention backend {name!r}: choose auto, {', '.join(BACKENDS)}")
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.backend = name  # type: ignore[assignment]
