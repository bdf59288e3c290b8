"""The schedule section: the shape of the learning rate over the run. `plan/schedule.py` computes and draws it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from bessemer.spec.quantity import AutoSpan, Share, SpecSection, StepCount, parse_span, setting

KINDS = (
    "cosine", "linear", "constant", "wsd", "polynomial", "exponential", "step", "inverse_sqrt", "one_cycle", "cyclical"
)  # fmt: skip
PORTABLE = ("cosine", "linear", "constant")  # kinds that every framework has
# Keys that only some kinds have, with their defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "cosine": {"cycles": 1},
    "cyclical": {"cycles": 1},
    "wsd": {"decay": 0.2, "decay_shape": "linear", "power": 2.0},
    "polynomial": {"power": 2.0},
    "step": {"every": 0.25, "factor": 0.5},
    "inverse_sqrt": {"timescale": None},
}
Span = Annotated[
    int | float | str, BeforeValidator(parse_span), WithJsonSchema({"type": ["number", "string"], "examples": ["20%"]})
]
DecayShape = Literal["linear", "sqrt", "cosine", "exponential", "power"]


class SegmentSpec(SpecSection):
    """Another course from a step on. It starts at the rate that the schedule has there."""

    from_step: StepCount = setting(..., "first step of the segment", 8000)
    to: Share | None = setting(None, "rate at its end, as a share of the peak; left out, the rate is held", "0%")
    length: Span | None = setting(
        None, "its length, after which the rate is held (default: up to the next segment or the end)", "500 steps"
    )
    shape: DecayShape = setting("linear", "linear, sqrt, cosine, exponential or power", "sqrt")


class ScheduleSpec(SpecSection):
    """The learning-rate schedule: warm-up from zero, then a course that ends at the floor. `bessemer spec show --plot`
    draws it. Keys that the kind does not have are errors."""

    kind: Literal[
        "cosine", "linear", "constant", "wsd", "polynomial", "exponential", "step", "inverse_sqrt", "one_cycle",
        "cyclical"
    ] = setting(
        "cosine",
        "cosine, linear, constant, wsd (constant, then decay at the end), polynomial, exponential, step, inverse_sqrt, "
        "one_cycle or cyclical (triangles between floor and peak)",
        "cosine",
    )  # fmt: skip
    warmup: AutoSpan = setting("auto", "length of the warm-up; of one_cycle the rise, 30 % by default", "2%")
    warmup_shape: Literal["linear", "cosine", "exponential", "polynomial"] = setting(
        "linear", "linear, cosine, exponential (from 1 % of the peak) or polynomial (quadratic)", "cosine"
    )
    floor: Share = setting(0.1, "final learning rate as a share of the peak; no kind falls below it", "10%")
    length: Span | None = setting(
        None, "length of the schedule, if another than the run's: afterwards the floor is held", "100K steps"
    )
    unit: Literal["steps", "tokens"] = setting(
        "steps", "what progress is measured in: steps, or tokens, which differ if the batch size changes", "tokens"
    )
    batch_rule: Literal["none", "sqrt", "linear"] = setting(
        "none", "how the rate follows budget.batch_changes: not, with the root of the batch (adamw, muon), or with the "
        "batch (sgd)", "sqrt",
    )  # fmt: skip
    cycles: int | None = setting(None, "cosine: cycles, each restarting at the peak (1); cyclical: triangles", 4, ge=1)
    decay: Span | None = setting(None, "wsd: length of the decay (20%)", "20%")
    decay_shape: DecayShape | None = setting(None, "wsd: linear (default), sqrt, cosine, exponential or power", "sqrt")
    power: float | None = setting(None, "exponent of polynomial, and of wsd with shape power (2)", 1.5, gt=0, le=100)
    every: Span | None = setting(None, "step: interval of the drops (25%)", "25%")
    factor: Annotated[float, Field(gt=0, lt=1)] | None = setting(None, "step: factor of each drop (0.5)", 0.1)
    timescale: Span | None = setting(
        None, "inverse_sqrt: steps after which the rate has fallen by sqrt(2) (default: the warm-up)", "4000 steps"
    )
    segments: list[SegmentSpec] = setting(
        [],
        "later changes of course: decay from here on, warm up again, hold",
        [{"from_step": 8000, "to": "0%", "shape": "sqrt"}],
    )

    @property
    def portable_kind(self) -> str:
        """The kind, or the nearest one that other frameworks have."""
        return self.kind if self.kind in PORTABLE else "linear" if self.kind == "polynomial" else "cosine"

    def settings(self) -> dict[str, Any]:
        """The keys that only this kind has, with their defaults filled in."""
        defaults = SETTINGS.get(self.kind, {})
        return {k: default if (value := getattr(self, k)) is None else value for k, default in defaults.items()}


def schedule_problems(schedule: ScheduleSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Keys of the section that conflict with each other, each with the fix."""
    own = SETTINGS.get(schedule.kind, {})
    for key in dict.fromkeys(key for settings in SETTINGS.values() for key in settings):
        if key not in own and getattr(schedule, key) is not None:
            owners = " or ".join(kind for kind in KINDS if key in SETTINGS.get(kind, {}))
            yield (key,), f"{schedule.kind} has no {key}: remove it, or write kind: {owners}"
    settings = schedule.settings()
    to_zero = "an exponential decay never reaches 0"
    if not schedule.floor and (schedule.kind == "exponential" or settings.get("decay_shape") == "exponential"):
        yield ("floor",), f"{to_zero}: write floor: 1%"
    if schedule.kind == "wsd" and schedule.power is not None and settings["decay_shape"] != "power":
        yield ("power",), "has no effect: write decay_shape: power, or remove it"
    if schedule.kind == "one_cycle" and schedule.warmup_shape != "linear":
        yield ("warmup_shape",), "one_cycle rises on a cosine: remove this"
    for i, segment in enumerate(schedule.segments):
        place = ("segments", i)
        if segment.to == 0 and segment.shape == "exponential":
            yield (*place, "to"), f"{to_zero}: write to: 1%"
        if segment.to is None and segment.length is not None:
            yield (*place, "length"), "without `to` the rate is held: remove the length, or write to: 0%"
        if i and segment.from_step <= (before := schedule.segments[i - 1].from_step):
            yield (*place, "from_step"), f"{segment.from_step} is not after {before}: order the segments by step"
