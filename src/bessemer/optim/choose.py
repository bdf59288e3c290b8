"""From the optimizer's section of a spec to a guarded optimizer, with a veto path that was proven here and now.

Which path is safe is not assumed: RMSprop, NAdam and Muon ignore `found_inf` without a word, and a device may lack a
fused kernel. A probe of one matrix takes an accepted and a rejected step before the real optimizer is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.optim.eager import eager
from bessemer.optim.groups import freeze, lr_scales
from bessemer.optim.guarded import FUSED, HOST, SELECT, Guarded, Named
from bessemer.optim.in_backward import InBackward
from bessemer.optim.lean import Lean, to_low_precision
from bessemer.optim.lion import Lion
from bessemer.optim.parts import Place, part_of, place_of
from bessemer.spec.memory import MemorySpec
from bessemer.spec.optimizer import FUSED as WITH_FUSED_KERNEL
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import RunSpec

PATHS = {"fused": FUSED, "host": HOST, "select": SELECT}
NOT_HIDDEN = {"embedding", "head", "router", "position", "types", "relative"}  # matrices left to AdamW


@dataclass(frozen=True)
class Kind:
    """One of torch's optimizers: its state as torch lays it out, and what it is always given."""

    make: Any
    state: tuple[str, ...]
    always: dict[str, Any] = field(default_factory=dict)
    capturable: bool = False  # can keep its counts on the GPU


KINDS = {
    "adamw": Kind(eager(torch.optim.AdamW), ("step", "exp_avg", "exp_avg_sq"), capturable=True),
    "adam": Kind(eager(torch.optim.Adam), ("step", "exp_avg", "exp_avg_sq"), capturable=True),
    "sgd": Kind(eager(torch.optim.SGD), ("momentum_buffer",)),
    "adagrad": Kind(eager(torch.optim.Adagrad), ("step", "sum")),
    "rmsprop": Kind(eager(torch.optim.RMSprop), ("step", "square_avg", "momentum_buffer"), capturable=True),
    "nadam": Kind(
        eager(torch.optim.NAdam),
        ("step", "mu_product", "exp_avg", "exp_avg_sq"),
        {"decoupled_weight_decay": True},
        capturable=True,
    ),
    "radam": Kind(
        eager(torch.optim.RAdam), ("step", "exp_avg", "exp_avg_sq"), {"decoupled_weight_decay": True}, capturable=True
    ),
    "adamax": Kind(eager(torch.optim.Adamax), ("step", "exp_avg", "exp_inf"), capturable=True),
    "lion": Kind(eager(Lion), ("exp_avg",)),
    "adafactor": Kind(eager(torch.optim.Adafactor), ("step", "row_var", "col_var", "variance")),
    # Moonshot's scaling gives updates the size of AdamW's, so that one learning rate serves both parts.
    "muon": Kind(eager(torch.optim.Muon), ("momentum_buffer",), {"adjust_lr_fn": "match_rms_adamw"}),
}


def optimizer_for(model: nn.Module, spec: RunSpec) -> Guarded:
    """The optimizer of a run. From here on what the spec freezes is frozen, and matrices are bf16 if it says so."""
    freeze(model, spec.optimizer.freeze)
    if spec.memory.kept != "fp32":
        to_low_precision(model)
    return make_optimizer(model.named_parameters(), spec.optimizer, lr_scales(model, spec), spec.memory, spec.seed)


def make_optimizer(
    named: Named, spec: OptimizerSpec, scales: Mapping[str, float] | None = None, memory: MemorySpec | None = None,
    seed: int = 0,
) -> Guarded:  # fmt: skip
    """The optimizer that the spec asks for over the parameters that are trained; `scales` are factors on the learning
    rate by parameter name, 1 where there is none; `seed` is that of stochastic rounding.

    Where the wanted veto path does not hold here, the verdict is read on the host and `fallback_reason` says why.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    memory, parts = memory or MemorySpec(), [part_of(parameter) for _, parameter in trained]
    first, places = parts[0], {part: place_of(p) for part, (_, p) in zip(parts, trained, strict=True)}
    stepped = [(name, part) for (name, _), part in zip(trained, parts, strict=True)]
    # On a GPU too: one scalar read costs less than a copy of all weights and moments (benchmarks/veto_cost.py).
    wanted = PATHS.get(spec.veto, FUSED if memory.lean or spec.name in WITH_FUSED_KERNEL else HOST)
    reason = None
    for path in dict.fromkeys((wanted, HOST)):
        fault = veto_fault(spec, path, first.device, first.dtype, memory)
        if fault is None:
            kind = InBackward if memory.update == "in_backward" else Guarded
            made = build(stepped, spec, path, scales or {}, memory, seed, places)
            return kind(trained, made, path, reason, parts)
        reason = f"{spec.name}, {path}: {fault}; the verdict is read on the host before each step"
    raise RuntimeError(f"torch {torch.__version__} cannot withhold a step of {spec.name} on {first.device}: {fault}")


def build(
    named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec, path: str, scales: Mapping[str, float],
    memory: MemorySpec, seed: int = 0, places: Mapping[nn.Parameter, Place] | None = None,
) -> list[Optimizer]:  # fmt: skip
    """Our own, torch's, or Muon and AdamW, with their state filled in. The learning rate comes with each step."""
    if memory.lean:
        groups = parameter_groups(named, spec.settings()["weight_decay"], scales)
        return [Lean(groups, named, spec, memory, seed, places)]
    if spec.name != "muon":
        return [_one(named, spec.name, spec.settings(), path, scales)]
    hidden = [pair for pair in named if pair[1].ndim == 2 and not NOT_HIDDEN & set(pair[0].split("."))]
    others = [pair for pair in named if not any(pair[1] is p for _, p in hidden)]
    muon = {key: value for key, value in spec.settings().items() if key not in ("betas", "eps")}
    adamw = {key: value for key, value in spec.settings().items() if key not in ("momentum", "nesterov")}
    parts = (hidden, "muon", muon), (others, "adamw", adamw)
    return [_one(part, name, settings, path, scales) for part, name, settings in parts if part]


def _one(
    named: list[tuple[str, nn.Parameter]], name: str, settings: dict[str, Any], path: str, scales: Mapping[str, float]
) -> Optimizer:
    """One of torch's optimizers."""
    kind, on_gpu = KINDS[name], named[0][1].device.type == "cuda"
    capturable = path == SELECT and kind.capturable and on_gpu
    mode = {"fused": True} if path == FUSED else {"capturable": True} if capturable else {}
    if "betas" in settings:
        settings = settings | {"betas": tuple(settings["betas"])}
    parts = parameter_groups(named, settings.pop("weight_decay"), scales)
    optimizer: Optimizer = kind.make(parts, lr=0.0, **settings, **kind.always, **mode)
    for _, parameter in named:
        state = optimizer.state[parameter]
        for key in kind.state:
            if key != "momentum_buffer" or settings["momentum"]:
                value = _first_value(key, parameter, device_counts=bool(mode))
                if value is not None:
                    state[key] = value
    return optimizer


def parameter_groups(
    named: list[tuple[str, nn.Parameter]], decay: float, scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Matrices are decayed, vectors are not. A group for each learning rate, at most two for a layer."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for key, parameter in named:
        groups.setdefault((parameter.ndim < 2, scales.get(key, 1.0)), []).append(parameter)
    return [
        {"params": groups[vectors, scale], "weight_decay": 0.0 if vectors else decay, "lr_scale": scale}
        for vectors, scale in sorted(groups)
    ]


def _first_value(key: str, parameter: nn.Parameter, device_counts: bool) -> Tensor | None:
    """A piece of state as torch makes it in its first step; None where this parameter has no such piece."""
    if key in ("step", "mu_product"):
        device = parameter.device if device_counts else "cpu"
        return torch.full((), float(key == "mu_product"), dtype=torch.float32, device=device)
    shape = list(parameter.shape)
    if key in ("row_var", "col_var"):
        if parameter.ndim < 2:
            return None
        shape[-1 if key == "row_var" else -2] = 1
        return parameter.new_zeros(shape)
    if key == "variance" and parameter.ndim >= 2:
        return None
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def veto_fault(
    spec: OptimizerSpec, path: str, device: torch.device, dtype: torch.dtype = torch.float32,
    memory: MemorySpec | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with this path here, found by stepping one matrix; None when a veto holds and a step moves all."""
    memory = memory or MemorySpec()
    if path == FUSED and spec.name not in WITH_FUSED_KERNEL and not memory.lean:
        return "torch has no such kernel"
    # Numbers of the kernel's own: an epsilon of 1e9 would look like a kernel that does not move.
    plain = OptimizerSpec(name=spec.name, momentum=spec.momentum, nesterov=spec.nesterov)
    # Vector blocks and a remainder: torch 2.13's fused SGD skips whole blocks of bf16 weights on a CPU.
    # Our own steps need a matrix that is large enough for blocks of 8 bits and for the way to the host.
    shape = (257, 256) if memory.lean else (9, 15)
    dtype = dtype if memory.kept == "fp32" else torch.bfloat16
    weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
    seen: list[list[Tensor]] = []
    try:
        probe = Guarded([("probe", weight)], build([("probe", weight)], plain, path, {}, memory), path)
        for reject in (None, 1.0, 0.0, 1.0):
            if reject is not None:
                value = torch.tensor(float("nan") if reject else 1.0, device=device)
                weight.grad = torch.ones_like(weight) * value.to(dtype)
                probe.step(0.3, torch.tensor(reject, device=device), value)  # to numbers that bf16 does not have
            seen.append([tensor.clone() for tensor in (weight.detach(), *probe.state().values())])
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split("\n")[:2])  # the compiler's own name, then what it found
    fresh, rejected_first, accepted, rejected = seen
    if not all(bool((a != b).all()) for a, b in zip(fresh, accepted, strict=True)):
        return "an accepted step left weights, moments or counts as they were"
    pairs = [*zip(fresh, rejected_first, strict=True), *zip(accepted, rejected, strict=True)]
    if not all(torch.equal(a, b) for a, b in pairs):
        return "a rejected step changed weights, moments or counts"
    return None
