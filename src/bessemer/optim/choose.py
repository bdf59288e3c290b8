"""From the spec's optimizer section to a guarded optimizer: which parameters train, each one's learning rate as a
factor on the schedule's, and a veto path that was tested on this device.

Learning rate factors come from layer-wise decay and, with `init: mup`, from the width; they become parameter groups.
Checkpoints identify parameters by name, so factors may change at a resume. No veto path is assumed to work: RMSprop,
NAdam and Muon silently ignore `found_inf`, and a device may lack a fused kernel. A probe takes an accepted and a
rejected step on one matrix before the real optimizer is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.dtensor import is_dtensor
from bessemer.errors import UserError
from bessemer.optim.clipping import GradientClipper
from bessemer.optim.external import external_optimizer
from bessemer.optim.groups import check_groups, parameter_groups
from bessemer.optim.guarded import FUSED, HOST, SELECT, GuardedOptimizer, Named, OptimizerInBackward, eager
from bessemer.optim.low_memory import LowMemoryOptimizer, ShardPlace, local_parameter, shard_place, to_low_precision
from bessemer.optim.muon import Muon
from bessemer.optim.rule_optimizer import RuleOptimizer, Sharded
from bessemer.optim.rules import RULES
from bessemer.optim.wrappers import Lookahead
from bessemer.plan.decision import Plan
from bessemer.spec.optimizer import FUSED as WITH_FUSED_KERNEL
from bessemer.spec.optimizer import GroupSpec, MemorySpec, OptimizerSpec, optimizer_bytes
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.spec.trained import expand_ranges, matches

INPUTS = {"embedding", "position", "types", "relative", "encoder_relative", "embedding_norm"}  # before the first block
# Matrices whose input does not grow with the width, and the head, whose logits are scaled instead.
NOT_WIDE = {"embedding", "head", "position", "types", "relative", "encoder_relative", "conv"}
NOT_MUP = ("sgd", "muon")  # muP's rules for Adam do not apply to them


def freeze(model: nn.Module, patterns: Sequence[str], stage: bool = False) -> tuple[int, int]:
    """Exclude parameters that match the patterns from training; returns how many are frozen and how many train.

    A pattern is a parameter, a layer (`blocks.3`, `blocks.0-11.attention`, `embedding`) or a glob (`*.ffn.*`).
    One that matches nothing is refused, and so is a model of which nothing trains, unless it is a pipeline stage.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        for glob in expand_ranges(pattern):
            names = [name for name in named if matches(name, glob)]
            if not names and not stage:
                raise UserError(f"optimizer.freeze: {pattern!r} matches nothing: {_suggest_names(model, glob)}")
            for name in names:
                named[name].requires_grad_(False)
    trained = sum(parameter.numel() for parameter in named.values() if parameter.requires_grad)
    if not trained and not stage:
        raise UserError(f"optimizer.freeze: {', '.join(patterns)} freeze every parameter: remove some patterns")
    return sum(parameter.numel() for parameter in named.values()) - trained, trained


def _suggest_names(model: nn.Module, glob: str) -> str:
    """The available names, and similar ones."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    names, modules = dict(model.named_parameters()), [name for name, _ in model.named_modules() if name]
    if glob.split(".")[0] == "head" and shape.tied and "embedding.weight" in names:
        return "the head is the embedding; write embedding, which freezes both"
    blocks = f"blocks.0 to blocks.{shape.layers + shape.decoder_layers - 1}"
    available = ", ".join(blocks if name == "blocks" else name for name in modules if "." not in name)
    near = difflib.get_close_matches(glob, [*modules, *names], n=3)
    return f"there are {available}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def lr_scales(model: nn.Module, spec: RunSpec) -> dict[str, float]:
    """Each parameter's learning rate as a factor on the schedule's."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    if spec.model.init == "mup" and spec.optimizer.name in NOT_MUP:
        raise UserError(f"optimizer.name: model.init: mup does not support {spec.optimizer.name}: write adamw")
    layers, decay = shape.layers + shape.decoder_layers, spec.optimizer.layer_decay or 1.0
    ratio = spec.adapter.lr_ratio if spec.adapter else 1.0
    # muP for Adam and similar (Yang et al. 2022, table 8): matrices whose inputs grow with the width.
    width_scale = spec.model.mup_width / shape.width if spec.model.init == "mup" else 1.0

    def scale(name: str, parameter: nn.Parameter) -> float:
        parts = name.split(".")
        above = layers - 1 - int(parts[1]) if parts[0] == "blocks" else layers if parts[0] in INPUTS else 0
        wide = parameter.ndim >= 2 and not NOT_WIDE & set(parts)
        low_rank = ratio if parts[-1] == "lora_b" else 1.0  # LoRA+
        return float(decay**above * (width_scale if wide else 1.0) * low_rank)

    return {name: scale(name, parameter) for name, parameter in model.named_parameters()}


def add_groups_to_plan(model: nn.Module, spec: RunSpec, plan: Plan) -> None:
    """Add to the plan what trains, at which rates and in how many bytes, where the spec deviates from the defaults."""
    shape: ModelShape = model.shape  # type: ignore[assignment]
    named, decay, mup = dict(model.named_parameters()), spec.optimizer.layer_decay, spec.model.init == "mup"
    if spec.optimizer.freeze:
        trained, total = (sum(p.numel() for p in named.values() if p.requires_grad or every) for every in (False, True))
        embedding = named.get("embedding.weight")  # has another name in a wrapped model
        head_frozen = shape.tied and embedding is not None and not embedding.requires_grad
        reason = f"{human_count(trained)} of {human_count(total)} parameters train"
        reason += "; the head is the embedding, and frozen with it" if head_frozen else ""
        plan.add("optimizer.freeze", ", ".join(spec.optimizer.freeze), reason, "asked")
    if decay or mup:
        scales = [scale for name, scale in lr_scales(model, spec).items() if named[name].requires_grad]
        reasons = [f"layer_decay {decay:g}"] if decay else []
        reasons += [f"muP from width {spec.model.mup_width} to {shape.width}"] if mup else []
        plan.add("learning rates", f"x{min(scales):.3g} to x{max(scales):.3g}", " and ".join(reasons), "asked")
    add_memory_to_plan(spec, plan)


def add_memory_to_plan(spec: RunSpec, plan: Plan) -> None:
    """Add the bytes per parameter of low-memory settings to the plan."""
    memory = spec.memory
    if not memory.lean:
        return
    precision = str(plan.value("precision")) if "precision" in plan.decisions else spec.precision
    chosen, default = (optimizer_bytes(spec.optimizer, m, precision) for m in (memory, MemorySpec()))
    kinds = f"weights {memory.kept}, moments {memory.moments}"
    on_host = f", and {chosen.host:.3g} on the host" if chosen.host else ""
    reason = f"{chosen.device:.3g} bytes per parameter on the device instead of {default.device:.3g}{on_host}"
    plan.add("optimizer state", kinds, reason, "asked")
    if memory.update == "in_backward":
        late = "a step is judged after its update: outliers are reported, persistent ones rolled back"
        finite = "a non-finite gradient does not change its parameter"
        reason = f"saves the memory of gradients: {late}; no clipping; {finite}"
        plan.add("memory.update", "in_backward", reason, "asked")


VETO_PATHS = {"fused": FUSED, "host": HOST, "select": SELECT}
NOT_HIDDEN = {"embedding", "head", "router", "position", "types", "relative"}  # matrices that Muon leaves to AdamW


@dataclass(frozen=True)
class OptimizerKind:
    """One of torch's optimizers: its state as torch lays it out, and its fixed arguments."""

    make: Any
    state: tuple[str, ...]
    always: dict[str, Any] = field(default_factory=dict)
    capturable: bool = False  # can keep its step counts on the GPU


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of a blended momentum, with decoupled weight decay. One
    moment per parameter; every weight moves by `lr` or not at all, so use an `lr` 3 to 10 times smaller than
    AdamW's."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            for p in moved:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            grads, moments = [p.grad for p in moved], [self.state[p]["exp_avg"] for p in moved]
            (blend, keep), lr = group["betas"], group["lr"]
            updates = torch._foreach_lerp(moments, grads, 1 - blend)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(moved, 1 - lr * group["weight_decay"])
            torch._foreach_add_(moved, updates, alpha=-lr)
            torch._foreach_lerp_(moments, grads, 1 - keep)


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
}


def optimizer_for(model: nn.Module, spec: RunSpec, stage: bool = False) -> GuardedOptimizer:
    """The optimizer of a run, or of a pipeline stage. Freezes what the spec freezes, and converts matrices to bf16 if
    the spec says so."""
    freeze(model, spec.optimizer.freeze, stage)
    if not stage:
        check_groups(model.named_parameters(), spec.optimizer.groups)
    if spec.memory.kept != "fp32":
        to_low_precision(model)
    optimizer = make_optimizer(model.named_parameters(), spec.optimizer, lr_scales(model, spec), spec.memory, spec.seed)
    if spec.optimizer.lookahead and optimizer.named:
        optimizer.lookahead = Lookahead(optimizer.named, spec.optimizer.lookahead.every, spec.optimizer.lookahead.share)
    if not spec.optimizer.plain_clipping and optimizer.named:
        pairs = zip(optimizer.shards, optimizer.parameters, strict=True)
        sharded = {shard: parameter for shard, parameter in pairs if is_dtensor(parameter)}
        optimizer.clipper = GradientClipper(spec.optimizer, optimizer.shards, sharded, spec.seed)
    return optimizer


def make_optimizer(
    named: Named, spec: OptimizerSpec, scales: Mapping[str, float] | None = None, memory: MemorySpec | None = None,
    seed: int = 0,
) -> GuardedOptimizer:  # fmt: skip
    """The spec's optimizer over the trained parameters; `scales` are learning rate factors by parameter name, 1 by
    default; `seed` is that of stochastic rounding.

    If the preferred veto path does not work here, the verdict is read on the host, and `fallback_reason` says why.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:  # a pipeline stage of frozen layers
        return GuardedOptimizer([], [], HOST)
    memory, shards = memory or MemorySpec(), [local_parameter(parameter) for _, parameter in trained]
    first, places = shards[0], {shard: shard_place(p) for shard, (_, p) in zip(shards, trained, strict=True)}
    named_shards = [(name, shard) for (name, _), shard in zip(trained, shards, strict=True)]
    # On a GPU too: reading one scalar costs less than copying all weights and moments (benchmarks/veto_cost.py).
    preferred = VETO_PATHS.get(spec.veto, FUSED if memory.lean or spec.name in WITH_FUSED_KERNEL else HOST)
    sharded = {shard: p for shard, (_, p) in zip(shards, trained, strict=True) if is_dtensor(p)}
    reason = None
    for path in dict.fromkeys((preferred, HOST)):
        fault = veto_fault(spec, path, first.device, first.dtype, memory)
        if fault is None:
            kind = OptimizerInBackward if memory.update == "in_backward" else GuardedOptimizer
            optimizers = build_optimizers(named_shards, spec, path, scales or {}, memory, seed, places, sharded)
            return kind(trained, optimizers, path, reason, shards)
        reason = f"{spec.name}, {path}: {fault}; the verdict is read on the host before each step"
    if spec.external:
        raise UserError(f"optimizer.name: {spec.name} cannot reject a step: {fault}: choose another")
    raise RuntimeError(f"torch {torch.__version__} cannot reject steps of {spec.name} on {first.device}: {fault}")


def build_optimizers(
    named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec, path: str, scales: Mapping[str, float],
    memory: MemorySpec, seed: int = 0, places: Mapping[nn.Parameter, ShardPlace] | None = None,
    sharded: Sharded | None = None,
) -> list[Optimizer]:  # fmt: skip
    """Our own optimizer, torch's, or Muon and AdamW, with initialised state. The learning rate comes with each step."""
    if memory.lean and spec.name != "muon":
        groups = parameter_groups(named, spec.settings()["weight_decay"], scales, spec.groups)
        return [LowMemoryOptimizer(groups, named, spec, memory, seed, places)]
    if spec.external:
        settings = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.settings().items()}
        decay: Any = settings.pop("weight_decay")
        groups = parameter_groups(named, decay, scales, spec.groups)
        return [external_optimizer(spec.name, groups, settings)]
    if spec.name in RULES:
        settings = spec.settings()
        groups = parameter_groups(named, settings.pop("weight_decay"), scales, spec.groups)
        return [RuleOptimizer(groups, RULES[spec.name], settings, sharded)]
    if spec.name != "muon":
        return [_torch_optimizer(named, spec.name, spec.settings(), path, scales, spec.groups)]
    hidden = [pair for pair in named if pair[1].ndim == 2 and not NOT_HIDDEN & set(pair[0].split("."))]
    others = [pair for pair in named if not any(pair[1] is p for _, p in hidden)]
    settings, made = spec.settings(), list[Optimizer]()
    momentum, nesterov = settings.pop("momentum"), settings.pop("nesterov")
    if hidden:
        groups = parameter_groups(hidden, settings["weight_decay"], scales, spec.groups)
        split = memory.kept == "kahan"
        made.append(Muon(groups, momentum, nesterov, **spec.muon.model_dump(), sharded=sharded, split=split))
    if others and memory.lean:
        beside = spec.model_copy(update={"name": "adamw"})
        groups = parameter_groups(others, settings["weight_decay"], scales, spec.groups)
        made.append(LowMemoryOptimizer(groups, others, beside, memory, seed, places))
    elif others:
        made.append(_torch_optimizer(others, "adamw", settings, path, scales, spec.groups))
    return made


def _torch_optimizer(
    named: list[tuple[str, nn.Parameter]], name: str, settings: dict[str, Any], path: str, scales: Mapping[str, float],
    by_name: Mapping[str, GroupSpec],
) -> Optimizer:  # fmt: skip
    kind, on_gpu = KINDS[name], named[0][1].device.type == "cuda"
    capturable = path == SELECT and kind.capturable and on_gpu
    mode = {"fused": True} if path == FUSED else {"capturable": True} if capturable else {}
    if "betas" in settings:
        settings = settings | {"betas": tuple(settings["betas"])}
    groups = parameter_groups(named, settings.pop("weight_decay"), scales, by_name)
    optimizer: Optimizer = kind.make(groups, lr=0.0, **settings, **kind.always, **mode)
    for _, parameter in named:
        state = optimizer.state[parameter]
        for key in kind.state:
            if key != "momentum_buffer" or settings["momentum"]:
                state[key] = _initial_state(key, parameter, device_counts=bool(mode))
    return optimizer


def _initial_state(key: str, parameter: nn.Parameter, device_counts: bool) -> Tensor:
    """A state tensor as torch initialises it in its first step."""
    if key in ("step", "mu_product"):
        device = parameter.device if device_counts else "cpu"
        return torch.full((), float(key == "mu_product"), dtype=torch.float32, device=device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def veto_fault(
    spec: OptimizerSpec, path: str, device: torch.device, dtype: torch.dtype = torch.float32,
    memory: MemorySpec | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with this veto path here, found by stepping one matrix; None if rejected steps change nothing and
    accepted steps change everything."""
    memory = memory or MemorySpec()
    if path == FUSED and spec.name not in WITH_FUSED_KERNEL and not memory.lean:
        return "torch has no such kernel"
    # Default settings: with an epsilon of 1e9 a working kernel would look like one that does not move.
    # With LARS's usual trust a bf16 weight would not move.
    defaults = OptimizerSpec(
        name=spec.name, momentum=spec.momentum, nesterov=spec.nesterov, muon=spec.muon, arguments=spec.arguments,
        trust=1.0 if spec.name == "lars" else None,
    )  # fmt: skip
    settling = RULES[spec.name].settling if spec.name in RULES else 0
    # Full vector blocks and a remainder: torch 2.13's fused SGD skips whole blocks of bf16 weights on a CPU. Our own
    # optimizers need a matrix that is large enough for 8-bit blocks and for offloading.
    shape = (257, 256) if memory.lean else (9, 15)
    dtype = dtype if memory.kept == "fp32" else torch.bfloat16
    weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
    snapshots: list[list[Tensor]] = []
    try:
        probe = GuardedOptimizer(
            [("probe", weight)], build_optimizers([("probe", weight)], defaults, path, {}, memory), path
        )
        for reject in (None, 1.0, *[0.0] * (settling + 1), 1.0):
            if reject is not None:
                value = torch.tensor(float("nan") if reject else 1.0, device=device)
                weight.grad = torch.ones_like(weight) * value.to(dtype)
                if probe.curvature_due(0):
                    probe.follow_curvature(2.0, torch.tensor(reject, device=device))
                probe.step(0.3, torch.tensor(reject, device=device), value)  # results that are not bf16 numbers
            snapshots.append([tensor.clone() for tensor in (weight.detach(), *probe.state().values())])
    except UserError:
        raise
    except Exception as error:
        if not (spec.external or isinstance(error, (RuntimeError, AssertionError))):
            raise
        return " ".join(str(error).split("\n")[:2])  # the compiler's name, then its message
    fresh, rejected_first, *_, accepted, rejected = snapshots
    if len({len(snapshot) for snapshot in snapshots}) > 1:
        return "its state grows in a step, so that no checkpoint before it would fit"
    # Sums of rows and eigenbases need not change in every element.
    pairs = list(zip(fresh, accepted, strict=True))
    changed = [bool((a != b).any() if settling or spec.external else (a != b).all()) for a, b in pairs]
    changed = changed[:1] if spec.external else changed
    if not all(changed):
        return "an accepted step did not change weights, moments or counts"
    pairs = [*zip(fresh, rejected_first, strict=True), *zip(accepted, rejected, strict=True)]
    if not all(torch.equal(a, b) for a, b in pairs):
        return "a rejected step changed weights, moments or counts"
    return None
