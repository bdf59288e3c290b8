"""Which parameters train, and each one's learning rate as a factor on the schedule's.

Frozen ones have no gradient and no moments. Factors come from layer-wise decay and, with `init: mup`, from the width;
they become parameter groups of the optimizer. Checkpoints know parameters by name: factors may change at a resume.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.spec.memory import MemorySpec, optimizer_bytes
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
