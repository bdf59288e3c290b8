"""Which parameters train, and each one's learning rate as a factor on the schedule's.

Frozen ones have no gradient and no moments. Factors come from layer-wise decay and, with `init: mup`, from the width;
they become parameter groups of the optimizer. Checkpoints know parameters by name: factors may change at a resume.

From the optimizer's section of a spec to a guarded optimizer, with a veto path that was proven here and now.

Which path is safe is not assumed: RMSprop, NAdam and Muon ignore `found_inf` without a word, and a device may lack a
fused kernel. A probe of one matrix takes an accepted and a rejected step before the real optimizer is made.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.errors import UserError
from bessemer.optim.guarded import FUSED, HOST, SELECT, GuardedOptimizer, InBackward, Named, eager
from bessemer.optim.lion import Lion
from bessemer.optim.low_memory import LowMemoryOptimizer, ShardPlace, part_of, place_of, to_low_precision
from bessemer.plan.decision import Plan
from bessemer.spec.optimizer import FUSED as WITH_FUSED_KERNEL
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec, optimizer_bytes
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

INPUTS = {"embedding", "position", "types", "relative", "encoder_relative", "embedding_norm"}  # below the first block
# Matrices whose inputs do not grow with the width, and the head, whose logits are scaled instead.
NOT_WIDE = {"embedding", "head", "position", "types", "relative", "encoder_relative", "conv"}
NOT_MUP = ("sgd", "muon")  # the size of their updates depends on the width in other ways than Adam's


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[int, int]:
    """Leave what the patterns name out of training; how many parameters are frozen, and how many train.

    A pattern is a parameter, a layer (`blocks.3`, `blocks.0-11.attention`, `embedding`) or a glob (`*.ffn.*`).
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        for wanted in _expanded(pattern):
            found = [name for name in named if fnmatchcase(name, wanted) or fnmatchcase(name, f"{wanted}.*")]
            if not found:
                raise UserError(f"optimizer.freeze: {pattern!r} names nothing here: {_nearest(model, wanted)}")
            for name in found:
                named[name].requires_grad_(False)
    trained = sum(parameter.numel() for parameter in named.values() if parameter.requires_grad)
    if not trained:
        raise UserError(f"optimizer.freeze: {', '.join(patterns)} leave nothing to train: remove some of them")
    return sum(parameter.numel() for parameter in named.values()) - trained, trained


def _expanded(pattern: str) -> Iterator[str]:
    """`blocks.0-1.ffn` as `blocks.0.ffn`, `blocks.1.ffn`. A range that counts backwards names nothing."""
    found = re.search(r"(?<=\.)(\d+)-(\d+)(?=\.|$)", pattern)
    layers = range(int(found[1]), int(found[2]) + 1) if found else ()
    if found is None or not layers:
        return iter([pattern])
    return (f"{pattern[: found.start()]}{layer}{pattern[found.end() :]}" for layer in layers)


def _nearest(model: nn.Module, wanted: str) -> str:
    """What was perhaps meant, and what there is."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    names, modules = dict(model.named_parameters()), [name for name, _ in model.named_modules() if name]
    if wanted.split(".")[0] == "head" and shape.tied and "embedding.weight" in names:
        return "the head is the embedding; write embedding, which freezes both"
    blocks = f"blocks.0 to blocks.{shape.layers + shape.decoder_layers - 1}"
    there = ", ".join(blocks if name == "blocks" else name for name in modules if "." not in name)
    near = difflib.get_close_matches(wanted, [*modules, *names], n=3)
    return f"there are {there}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def lr_scales(model: nn.Module, spec: RunSpec) -> dict[str, float]:
    """Each parameter's learning rate as a factor on the schedule's."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    if spec.model.init == "mup" and spec.optimizer.name in NOT_MUP:
        raise UserError(f"optimizer.name: model.init mup has no rule for {spec.optimizer.name}: write adamw")
    layers, decay = shape.layers + shape.decoder_layers, spec.optimizer.layer_decay or 1.0
    # muP for Adam and its kin (Yang et al. 2022, table 8): matrices whose inputs grow with the width.
    width_scale = spec.model.mup_width / shape.width if spec.model.init == "mup" else 1.0

    def scale(name: str, parameter: nn.Parameter) -> float:
        parts = name.split(".")
        above = layers - 1 - int(parts[1]) if parts[0] == "blocks" else layers if parts[0] in INPUTS else 0
        wide = parameter.ndim >= 2 and not NOT_WIDE & set(parts)
        return float(decay**above * (width_scale if wide else 1.0))

    return {name: scale(name, parameter) for name, parameter in model.named_parameters()}


def note_groups(model: nn.Module, spec: RunSpec, plan: Plan) -> None:
    """What trains, how fast and in how many bytes, in the plan, where the spec asks for anything special."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    named, decay, mup = dict(model.named_parameters()), spec.optimizer.layer_decay, spec.model.init == "mup"
    if spec.optimizer.freeze:
        trained, total = (sum(p.numel() for p in named.values() if p.requires_grad or every) for every in (False, True))
        embedding = named.get("embedding.weight")  # by another name in a wrapped model
        both = shape.tied and embedding is not None and not embedding.requires_grad
        reason = f"{human_count(trained)} of {human_count(total)} parameters train"
        reason += "; the head is the embedding, and frozen with it" if both else ""
        plan.add("optimizer.freeze", ", ".join(spec.optimizer.freeze), reason, "asked")
    if decay or mup:
        scales = [scale for name, scale in lr_scales(model, spec).items() if named[name].requires_grad]
        why = [f"layer_decay {decay:g}"] if decay else []
        why += [f"muP from width {spec.model.mup_width} to {shape.width}"] if mup else []
        plan.add("learning rates", f"x{min(scales):.3g} to x{max(scales):.3g}", " and ".join(why), "asked")
    note_memory(spec, plan)


def note_memory(spec: RunSpec, plan: Plan) -> None:
    """What little memory costs, in the plan."""
    memory = spec.memory
    if not memory.lean:
        return
    precision = str(plan.value("precision")) if "precision" in plan.decisions else spec.precision
    counted, usual = (optimizer_bytes(spec.optimizer, each, precision) for each in (memory, MemorySpec()))
    kinds = f"weights {memory.kept}, moments {memory.moments}"
    where = f", and {counted.host:.3g} on the host" if counted.host else ""
    reason = f"{counted.device:.3g} bytes a parameter on the device instead of {usual.device:.3g}{where}"
    plan.add("optimizer state", kinds, reason, "asked")
    if memory.update == "in_backward":
        lost = "a step is judged after its update: an outlier is only told of, and what lasts is rolled back"
        kept = "a gradient that is not finite leaves its own parameter as it is"
        plan.add("memory.update", "in_backward", f"no room for gradients: {lost}; nothing is clipped; {kept}", "asked")


PATHS = {"fused": FUSED, "host": HOST, "select": SELECT}
NOT_HIDDEN = {"embedding", "head", "router", "position", "types", "relative"}  # matrices left to AdamW


@dataclass(frozen=True)
class OptimizerKind:
    """One of torch's optimizers: its state as torch lays it out, and what it is always given."""

    make: Any
    state: tuple[str, ...]
    always: dict[str, Any] = field(default_factory=dict)
    capturable: bool = False  # can keep its counts on the GPU


KINDS = {
    "adamw": OptimizerKind(eager(torch.optim.AdamW), ("step", "exp_avg", "exp_avg_sq"), capturable=True),
    "adam": OptimizerKind(eager(torch.optim.Adam), ("step", "exp_avg", "exp_avg_sq"), capturable=True),
    "sgd": OptimizerKind(eager(torch.optim.SGD), ("momentum_buffer",)),
    "adagrad": OptimizerKind(eager(torch.optim.Adagrad), ("step", "sum")),
    "rmsprop": OptimizerKind(eager(torch.optim.RMSprop), ("step", "square_avg", "momentum_buffer"), capturable=True),
    "nadam": OptimizerKind(
        eager(torch.optim.NAdam),
        ("step", "mu_product", "exp_avg", "exp_avg_sq"),
        {"decoupled_weight_decay": True},
        capturable=True,
    ),
    "radam": OptimizerKind(
        eager(torch.optim.RAdam), ("step", "exp_avg", "exp_avg_sq"), {"decoupled_weight_decay": True}, capturable=True
    ),
    "adamax": OptimizerKind(eager(torch.optim.Adamax), ("step", "exp_avg", "exp_inf"), capturable=True),
    "lion": OptimizerKind(eager(Lion), ("exp_avg",)),
    "adafactor": OptimizerKind(eager(torch.optim.Adafactor), ("step", "row_var", "col_var", "variance")),
    # Moonshot's scaling gives updates the size of AdamW's, so that one learning rate serves both parts.
    "muon": OptimizerKind(eager(torch.optim.Muon), ("momentum_buffer",), {"adjust_lr_fn": "match_rms_adamw"}),
}


def optimizer_for(model: nn.Module, spec: RunSpec) -> GuardedOptimizer:
    """The optimizer of a run. From here on what the spec freezes is frozen, and matrices are bf16 if it says so."""
    freeze(model, spec.optimizer.freeze)
    if spec.memory.kept != "fp32":
        to_low_precision(model)
    return make_optimizer(model.named_parameters(), spec.optimizer, lr_scales(model, spec), spec.memory, spec.seed)


def make_optimizer(
    named: Named, spec: OptimizerSpec, scales: Mapping[str, float] | None = None, memory: MemorySpec | None = None,
    seed: int = 0,
) -> GuardedOptimizer:  # fmt: skip
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
            kind = InBackward if memory.update == "in_backward" else GuardedOptimizer
            made = build(stepped, spec, path, scales or {}, memory, seed, places)
            return kind(trained, made, path, reason, parts)
        reason = f"{spec.name}, {path}: {fault}; the verdict is read on the host before each step"
    raise RuntimeError(f"torch {torch.__version__} cannot withhold a step of {spec.name} on {first.device}: {fault}")


def build(
    named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec, path: str, scales: Mapping[str, float],
    memory: MemorySpec, seed: int = 0, places: Mapping[nn.Parameter, ShardPlace] | None = None,
) -> list[Optimizer]:  # fmt: skip
    """Our own, torch's, or Muon and AdamW, with their state filled in. The learning rate comes with each step."""
    if memory.lean:
        groups = parameter_groups(named, spec.settings()["weight_decay"], scales)
        return [LowMemoryOptimizer(groups, named, spec, memory, seed, places)]
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
        probe = GuardedOptimizer([("probe", weight)], build([("probe", weight)], plain, path, {}, memory), path)
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
