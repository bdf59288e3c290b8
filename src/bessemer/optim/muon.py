"""Muon (Jordan et al. 2024): momentum, orthogonalized by a Newton-Schulz iteration, for the hidden matrices.

Matrices of one shape are iterated together, in a precision that the spec sets. Of sharded matrices each rank gathers
its share as whole ones (one all-to-all each way), since the iteration of a shard is another update. The momentum stays
sharded like the weight. A step is rejected by selection, without a host sync. Weights are fp32, or bf16 with the low 16
bits beside them; on a GPU two Triton kernels do what surrounds the iteration.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.dtensor import shard_of
from bessemer.optim.low_memory import join_weights, split_weights
from bessemer.optim.rule_optimizer import Sharded, exact_dtype, gather

Coefficients = tuple[tuple[float, float, float], ...]
# a, b, c of X <- a X + (b A + c A^2) X with A = X X', and by how much X is shrunk first.
COEFFICIENTS: dict[str, tuple[Coefficients, float]] = {
    "keller": (((3.4445, -4.7750, 2.0315),) * 5, 1.0),  # singular values end in 0.68 to 1.13
    "polar_express": (  # Amsel et al. 2025: 0.86 to 1.14 for inputs down to 3e-3
        (
            (8.156555, -22.483293, 15.878770), (4.042930, -2.808917, 0.500018), (3.891668, -2.772484, 0.506065),
            (3.285754, -2.368129, 0.464490), (2.346541, -1.709783, 0.423236),
        ),
        1.02,
    ),
    "exact": (((2.0, -1.5, 0.5),) * 12, 1.0),  # converges to the orthogonal factor, slowly
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
SMALLEST_NORM = 1e-7
LARGEST_STACK = 1 << 27  # numbers that are iterated together
TRITON = importlib.util.find_spec("triton") is not None


def newton_schulz(matrices_KMN: Tensor, kind: str = "keller", dtype: torch.dtype | None = None) -> Tensor:
    """The matrices with all singular values near 1, each on its own."""
    coefficients, shrink = COEFFICIENTS[kind]
    x = matrices_KMN.to(dtype or matrices_KMN.dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x / (norm.clamp(min=SMALLEST_NORM) * shrink).to(x.dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def update_scale(kind: str, rows: int, columns: int) -> float:
    """`rms` gives updates of AdamW's size, so that one learning rate fits both (Moonshot); `spectral` transfers over
    widths."""
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "rms" else math.sqrt(max(1.0, rows / columns))


class Muon(Optimizer):
    """Takes the verdict as `found_inf` and the divisor as `grad_scale`; without them it always steps."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], momentum: float, nesterov: bool, orthogonalize: str = "keller",
        precision: str = "auto", scale: str = "rms", cautious: bool = False, sharded: Sharded | None = None,
        split: bool = False,
    ) -> None:  # fmt: skip
        """`split` keeps the low 16 bits of bf16 weights."""
        super().__init__(groups, {"lr": 0.0, "momentum": momentum})
        self.nesterov, self.kind, self.precision, self.scale = nesterov, orthogonalize, precision, scale
        self.cautious, self.sharded = cautious, dict(sharded or {})
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum_buffer"] = torch.zeros_like(exact_dtype(parameter.detach()))
                if split and parameter.dtype == torch.bfloat16:
                    state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for stack in self._stacks([p for p in group["params"] if p.grad is not None]):
                updates = self._orthogonalize(stack, self._momenta(stack, group["momentum"]))
                for parameter, update in zip(stack, updates, strict=True):
                    self._apply(parameter, update, group)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return self.sharded.get(parameter, parameter).shape

    def _stacks(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters of one shape, as many as may be iterated together."""
        by_shape: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault((self._shape(parameter), parameter.dtype, parameter.device), []).append(parameter)
        for (shape, *_), same in by_shape.items():
            most = max(1, LARGEST_STACK // max(1, shape.numel()))
            yield from (same[start : start + most] for start in range(0, len(same), most))

    def _momenta(self, stack: list[nn.Parameter], beta: float) -> Tensor:
        """Update the momenta unless the step is rejected; the matrices to orthogonalize."""
        first, dtype = stack[0], self._dtype(stack[0])
        matrices = torch.empty((len(stack), *first.shape), dtype=dtype, device=first.device)
        for parameter, matrix in zip(stack, matrices, strict=True):
            assert parameter.grad is not None
            buffer = self.state[parameter]["momentum_buffer"]
            if self._in_triton(parameter):
                from bessemer.optim.kernels import momentum

                momentum(beta, self.nesterov, buffer, parameter.grad.contiguous(), matrix, *self._verdict(parameter))
                continue
            grad = parameter.grad.to(buffer.dtype)
            grad = grad if self.grad_scale is None else grad / self.grad_scale.to(buffer.dtype)
            new = torch.lerp(buffer, grad, 1 - beta)
            self._select(buffer, new)
            matrix.copy_(torch.lerp(grad, new, beta) if self.nesterov else new)
        return matrices

    def _in_triton(self, parameter: nn.Parameter) -> bool:
        state = self.state[parameter]
        return TRITON and parameter.is_cuda and (parameter.dtype == torch.float32 or "remainder" in state)

    def _verdict(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Verdict and divisor."""
        none, one = torch.zeros((), device=parameter.device), torch.ones((), device=parameter.device)
        return none if self.found_inf is None else self.found_inf, one if self.grad_scale is None else self.grad_scale

    def _orthogonalize(self, stack: list[nn.Parameter], matrices: Tensor) -> list[Tensor]:
        like = self.sharded.get(stack[0])
        if like is None:
            return list(newton_schulz(matrices, self.kind).contiguous())
        if (group := row_group(like)) is None:
            return [
                shard_of(self.sharded[p], newton_schulz(gather(m, self.sharded[p])[None], self.kind)[0])
                for p, m in zip(stack, matrices, strict=True)
            ]
        # Already in the iteration's precision when they travel: half the traffic in bf16.
        exchange = RowExchange(like.shape, len(stack), group)
        owned = exchange.to_owners(list(matrices))
        return exchange.to_shards(newton_schulz(owned, self.kind) if len(owned) else owned)

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        if self.precision == "auto":
            return torch.bfloat16 if parameter.is_cuda else torch.promote_types(parameter.dtype, torch.float32)
        return DTYPES[self.precision]

    def _apply(self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        weight, state, lr = parameter.detach(), self.state[parameter], group["lr"]
        rate, shrink = lr * update_scale(self.scale, *self._shape(parameter)), lr * group["weight_decay"]
        if self._in_triton(parameter):
            from bessemer.optim.kernels import apply_update

            reject, _ = self._verdict(parameter)
            apply_update(weight, state.get("remainder"), update.contiguous(), reject, rate, shrink, self.cautious)
            return
        exact = join_weights(weight, state["remainder"]) if "remainder" in state else exact_dtype(weight)
        update = update.to(exact.dtype)
        decayed = exact * (1 - shrink)
        if self.cautious:
            decayed = torch.where(update * exact > 0, decayed, exact)
        new = decayed - rate * update
        if "remainder" in state:
            new, remainder = split_weights(new)
            self._select(state["remainder"], remainder)
        self._select(weight, new.to(weight.dtype))

    def _select(self, tensor: Tensor, new: Tensor) -> None:
        tensor.copy_(new if self.found_inf is None else torch.where(self.found_inf.bool(), tensor, new))


def row_group(like: Any) -> dist.ProcessGroup | None:
    """The processes that share the rows of a matrix, if that is how it is sharded and nothing else divides it."""
    from torch.distributed.tensor import Shard

    divided = [i for i, placement in enumerate(like.placements) if placement.is_shard()]
    if len(divided) != 1 or type(like.placements[divided[0]]) is not Shard or like.placements[divided[0]].dim != 0:
        return None
    group: dist.ProcessGroup = like.device_mesh.get_group(divided[0])
    return group


class RowExchange:
    """Passes rows of equal matrices to the rank that owns each matrix, and back. Matrix k belongs to rank k mod R."""

    def __init__(self, shape: torch.Size, count: int, group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        most = -(-shape[0] // self.ranks)  # rows of a rank, as DTensor divides them
        self.rows = [max(0, min(most, shape[0] - rank * most)) for rank in range(self.ranks)]
        self.columns, self.owned = shape[1], [list(range(rank, count, self.ranks)) for rank in range(self.ranks)]
        self.here = [len(owned) * self.rows[self.rank] * self.columns for owned in self.owned]  # by owner
        self.there = [len(self.owned[self.rank]) * rows * self.columns for rows in self.rows]  # by holder

    def to_owners(self, shards: list[Tensor]) -> Tensor:
        """The matrices that this rank owns, whole."""
        sent = torch.cat([shards[k].reshape(-1) for owned in self.owned for k in owned])
        received = sent.new_empty(sum(self.there))
        dist.all_to_all_single(received, sent, self.there, self.here, group=self.group)
        count = len(self.owned[self.rank])
        parts = zip(received.split(self.there), self.rows, strict=True)
        return torch.cat([part.view(count, rows, self.columns) for part, rows in parts], 1)

    def to_shards(self, matrices: Tensor) -> list[Tensor]:
        """This rank's rows of all matrices, of which every rank has the ones that it owns."""
        sent = torch.cat([part.reshape(-1) for part in matrices.split(self.rows, 1)])
        received = sent.new_empty(sum(self.here))
        dist.all_to_all_single(received, sent, self.here, self.there, group=self.group)
        rows: dict[int, Tensor] = {}
        for owned, part in zip(self.owned, received.split(self.here), strict=True):
            rows |= dict(zip(owned, part.view(len(owned), self.rows[self.rank], self.columns), strict=True))
        return [rows[k] for k in range(len(rows))]
