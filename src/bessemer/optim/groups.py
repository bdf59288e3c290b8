"""Parameter groups: parameters with one learning-rate factor, weight decay, betas and training time.

A spec names groups by kind (embedding, head, vectors, matrices) or by patterns of names; the first that matches a
parameter counts. A group's factor may change with the step, and a group may train for a part of the run only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from bessemer.errors import UserError
from bessemer.plan.schedule import RateSegment, Schedule
from bessemer.spec.optimizer import GROUP_KINDS, GroupSpec
from bessemer.spec.trained import expand_ranges, matches


def group_of(name: str, parameter: nn.Parameter, groups: Iterable[str]) -> str | None:
    """The first of the groups that holds a parameter."""
    parts = set(name.split("."))
    for key in groups:
        match key:
            case "embedding" | "head":
                inside = key in parts
            case "vectors":
                inside = parameter.ndim < 2
            case "matrices":
                inside = parameter.ndim >= 2 and not parts & {"embedding", "head"}
            case _:
                inside = any(matches(name, glob) for glob in expand_ranges(key))
        if inside:
            return key
    return None


def check_groups(named: Iterable[tuple[str, nn.Parameter]], groups: Mapping[str, GroupSpec]) -> None:
    """Refuse a group that holds nothing."""
    used = {group_of(name, parameter, groups) for name, parameter in named}
    for key in groups:
        if key not in used and key != "head":  # a tied head is the embedding
            raise UserError(
                f"optimizer.groups: {key!r} holds no parameter that an earlier group does not: write a kind "
                f"({', '.join(GROUP_KINDS)}) or a pattern of names, the narrower ones first"
            )


def parameter_groups(
    named: list[tuple[str, nn.Parameter]], decay: float, scales: Mapping[str, float],
    groups: Mapping[str, GroupSpec] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One group per learning rate factor and group of the spec. Weight decay is for matrices, unless a group of the
    spec says otherwise."""
    groups, order = groups or {}, [None, *(groups or ())]
    divided: dict[tuple[int, bool, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        place = order.index(group_of(name, parameter, groups))
        divided.setdefault((place, parameter.ndim < 2, scales.get(name, 1.0)), []).append(parameter)
    return [_options(divided[key], key[1], key[2], decay, groups.get(order[key[0]] or "")) for key in sorted(divided)]


def _options(
    parameters: list[nn.Parameter], vectors: bool, scale: float, decay: float, group: GroupSpec | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"params": parameters, "weight_decay": 0.0 if vectors else decay, "lr_scale": scale}
    if group is None:
        return options
    options["lr_scale"] = scale * group.lr_factor
    if group.weight_decay is not None:
        options["weight_decay"] = group.weight_decay
    if group.betas is not None:
        options["betas"] = tuple(group.betas)
    for key, parts in (("course", group.segments), ("decay_course", group.decay_segments)):
        if parts:
            segments = tuple(RateSegment(part.from_step, part.to, int(part.length or 1), part.shape) for part in parts)
            options[key] = Schedule(1.0, 0, 1, "constant", segments=segments)
    options["full_decay"] = options["weight_decay"]
    if group.train_from is not None or group.train_until is not None:
        options["trains"] = (group.train_from or 0, group.train_until)
    return options


def factor_at(group: Mapping[str, Any], step: int) -> float:
    """A group's factor on its learning rate at a step."""
    course: Schedule | None = group.get("course")
    return course.lr(step) if course else 1.0


def decay_at(group: Mapping[str, Any], step: int) -> float:
    """A group's weight decay at a step."""
    course: Schedule | None = group.get("decay_course")
    return float(group["full_decay"] * course.lr(step)) if course else float(group["weight_decay"])


def trains_at(group: Mapping[str, Any], step: int) -> bool:
    first, end = group.get("trains", (0, None))
    return bool(step >= first and (end is None or step < end))
