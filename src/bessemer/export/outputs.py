"""The gate of exports that other programs run: their logits and greedy tokens against the native model's.

The native model gives the reference in float32: logits of rows of real tokens, and of a greedy continuation that the
other program reads one token at a time, so that its cache is compared too. Legend: R rows, T time, S steps, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.export.gate import Mismatch
from bessemer.model.generate import Sampling, generate
from bessemer.model.transformer import Decoder

GREEDY_TOKENS = 50


@dataclass(frozen=True)
class ReferenceOutputs:
    """What the native model computes."""

    rows_RT: Tensor
    logits_RTV: Tensor
    prompt: list[int]
    steps: list[int]  # its greedy continuation
    steps_SV: Tensor  # the logits that chose them, and those after the last


@torch.no_grad()
def reference(model: Decoder, rows_RT: Tensor, count: int = GREEDY_TOKENS) -> ReferenceOutputs:
    """Models that write no text have no steps."""
    shape = model.shape
    logits_RTV = torch.cat([model.logits(model(row[None])) for row in rows_RT]).float()
    if not shape.causal or shape.labels:
        return ReferenceOutputs(rows_RT, logits_RTV, [], [], logits_RTV[0, :0])
    limit = (shape.max_positions or rows_RT.shape[1] + count) - 1
    prompt = rows_RT[0, : max(1, min(16, rows_RT.shape[1] // 2, limit // 2))].tolist()
    count = min(count, limit - len(prompt))
    steps = list(generate(model, prompt, count, (), Sampling(0.0))) if count > 0 else []
    steps_SV = model.logits(model(torch.tensor([prompt + steps])))[0, len(prompt) - 1 :].float()
    return ReferenceOutputs(rows_RT, logits_RTV, prompt, steps, steps_SV)


@dataclass(frozen=True)
class OutputComparison:
    """How the other program's results differ. `gap` is the largest difference of a logit at any position, as a share of
    the largest logit; both are taken around each position's mean, which no probability depends on. A greedy token is
    clear if the first two logits are further apart than twice the tolerance; quantized models have none."""

    consumer: str
    gap: float
    tolerance: float | None
    tokens: int
    clear_tokens: int
    equal_tokens: int
    perplexity: float
    their_perplexity: float
    divergence: float  # mean KL divergence in nats

    @property
    def change(self) -> float:
        return self.their_perplexity / self.perplexity - 1

    def __str__(self) -> str:
        limit = "" if self.tolerance is None else f" (tolerance {self.tolerance:g})"
        clear = "" if self.tolerance is None else f", all {self.clear_tokens} of clear margin"
        return (
            f"opened by {self.consumer}: logits differ by {self.gap:.1e}{limit}; {self.equal_tokens} of {self.tokens} "
            f"greedy tokens equal{clear}; perplexity {self.perplexity:.4g} and {self.their_perplexity:.4g} "
            f"({self.change:+.2%}), KL divergence {self.divergence:.1e}"
        )

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"perplexity_change": self.change}


def compare(
    ours: ReferenceOutputs, logits_RTV: Any, steps_SV: Any, consumer: str, tolerance: float | None,
    limit: float | None = None, share: float = 1.0,
) -> OutputComparison:  # fmt: skip
    """Raises Mismatch for logits beyond the tolerance, another greedy token where ours has a clear margin, or a
    perplexity that rises by more than `limit`. NaN is beyond everything. `share` of the positions must agree: with
    experts, a near tie of the router may resolve differently."""
    theirs_RTV, theirs_SV = (torch.from_numpy(np.asarray(x)).float() for x in (logits_RTV, steps_SV))
    places = ours.logits_RTV.flatten(0, 1), theirs_RTV.flatten(0, 1)
    pairs = [places, (ours.steps_SV, theirs_SV)][: 1 + bool(len(ours.steps_SV))]
    scale = max(float(_centred(a).abs().max()) for a, _ in pairs) or 1.0
    gaps = [(_centred(a) - _centred(b)).abs().amax(-1) / scale for a, b in pairs]
    gap = float(torch.cat(gaps).quantile(share)) if all(bool(x.isfinite().all()) for x in gaps) else math.nan
    count = len(ours.steps)
    best = ours.steps_SV[:count].sort(dim=-1, descending=True).values
    margins = (best[:, 0] - best[:, min(1, best.shape[-1] - 1)]) / scale
    equal = ours.steps_SV[:count].argmax(-1) == theirs_SV[:count].argmax(-1)
    clear = margins > 2 * tolerance if tolerance is not None else torch.zeros_like(equal)
    perplexity, other = (_perplexity(x, ours) for x in (ours.logits_RTV, theirs_RTV))
    log_p, log_q = (x.log_softmax(-1) for x in places)
    divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    result = OutputComparison(
        consumer, gap, tolerance, count, int(clear.sum()), int(equal.sum()), perplexity, other, divergence
    )
    if tolerance is not None and not gap <= tolerance:
        flat = torch.cat(gaps).nan_to_num(math.inf)
        raise Mismatch(f"the exported model is not the same: position {int(flat.argmax())} differs most; {result}")
    if not bool(equal[clear].all()):
        raise Mismatch(f"the exported model chooses another token where the margin is clear; {result}")
    if limit is not None and not result.change <= limit:
        raise Mismatch(f"perplexity rises by {result.change:.2%}, the limit is {limit:.2%}; {result}")
    return result


def compare_ids(texts: Sequence[str], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> None:
    """Raises Mismatch, naming the first text whose ids differ."""
    for text, a, b in zip(texts, ours, theirs, strict=True):
        if list(a) != list(b):
            raise Mismatch(f"the exported tokenizer is not the same: {text!r} gives {list(b)}, not {list(a)}")


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _perplexity(logits_RTV: Tensor, ours: ReferenceOutputs) -> float:
    """The perplexity of the next tokens; of our own guesses if there are none (a classifier's)."""
    targets = ours.rows_RT[:, 1:] if ours.prompt else ours.logits_RTV.argmax(-1)[:, :-1]
    return math.exp(min(50.0, float(F.cross_entropy(logits_RTV[:, :-1].flatten(0, 1), targets.flatten()))))
