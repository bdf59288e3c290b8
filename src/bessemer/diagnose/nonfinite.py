"""The NaN tracer: names the first module (forward) or gradient (backward) that is not finite, with what went into it.

Every tensor that enters or leaves a module is checked on the host, in the order of computation: a tool for one step,
not for a run. It keeps the activations of one micro-batch alive, as the backward pass does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from bessemer.diagnose.report import InspectionReport


@dataclass(frozen=True)
class TensorFacts:
    """What one tensor is like; minimum, maximum and mean are of its finite values."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    mean: float | None
    nonfinite: float  # share


@dataclass
class NonfiniteTrace:
    """`stage` is where it began: forward, loss, backward, or None for a step that is finite throughout."""

    stage: str | None = None
    module: str | None = None  # its name, or a gradient's parameter
    kind: str | None = None  # the module's class
    detail: str = ""
    facts: list[TensorFacts] = field(default_factory=list)
    bad_weights: dict[str, int] = field(default_factory=dict)  # name -> elements that are not finite
    loss: float | None = None
    cured_by_fp32: bool | None = None  # None: not tried, or nothing to cure


def facts(what: str, tensor: Tensor) -> TensorFacts:
    values = tensor.detach()
    finite = values[values.isfinite()].float()
    low, high, mean = (float(f(finite)) if finite.numel() else None for f in (Tensor.min, Tensor.max, Tensor.mean))
    bad = 1 - finite.numel() / max(1, values.numel())
    return TensorFacts(what, tuple(values.shape), str(values.dtype).removeprefix("torch."), low, high, mean, bad)


def tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a module's arguments or output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def is_bad(tensor: Tensor) -> bool:
    return not bool(tensor.detach().isfinite().all())


class _Watch:
    """Follows a pass. The first thing that is not finite decides; later ones are its consequences."""

    def __init__(self, model: nn.Module) -> None:
        self.trace, self.modules = NonfiniteTrace(), dict(model.named_modules())
        self.running: list[str] = []
        self.kept: dict[int, Tensor] = {}  # by id: alive, so that no id is used twice
        self.readers: dict[int, list[str]] = {}  # tensor -> modules that it enters, the outer before the inner
        self.sound: dict[str, TensorFacts] = {}  # modules whose output's gradient came finite

    def decide(self, stage: str, module: str, detail: str, found: list[TensorFacts]) -> None:
        if self.trace.stage is None:
            kind = type(self.modules[module]).__name__ if module in self.modules else None
            self.trace.stage, self.trace.module, self.trace.kind = stage, module or "the model", kind
            self.trace.detail, self.trace.facts = detail, found

    def enters(self, name: str, inputs: Any) -> None:
        if not self.running:  # another micro-batch
            self.forget()
        for tensor in tensors(inputs):
            if is_bad(tensor):
                owner = self.running[-1] if self.running else "the batch"
                detail = f"in what it makes for {name}" if self.running else "before any module"
                self.decide("forward", owner, detail, [facts(f"input of {name or 'the model'}", tensor)])
            self.readers.setdefault(id(tensor), []).append(name)
            self.follow(tensor, None)
        self.running.append(name)

    def leaves(self, name: str, inputs: Any, output: Any) -> None:
        self.running.pop()
        for tensor in tensors(output):
            if is_bad(tensor):
                found = [facts(f"input {i}", one) for i, one in enumerate(tensors(inputs))]
                own = self.modules[name].named_parameters(recurse=False)
                found += [facts(parameter, weight) for parameter, weight in own]
                self.decide("forward", name, "in its output", [*found, facts("output", tensor)])
            self.follow(tensor, name)

    def follow(self, tensor: Tensor, made_by: str | None) -> None:
        if tensor.requires_grad:
            key = id(tensor)
            self.kept[key] = tensor
            tensor.register_hook(lambda grad: self.gradient(key, grad, made_by))

    def gradient(self, key: int, grad: Tensor, made_by: str | None) -> None:
        if not is_bad(grad):
            if made_by is not None:
                self.sound[made_by] = facts(f"gradient of the output of {made_by}", grad)
            return
        # A gradient is made by what reads the tensor: the innermost modules whose own output's gradient was finite.
        sound = [reader for reader in self.readers.get(key, []) if reader in self.sound]
        inner = [one for one in sound if not any(other.startswith(f"{one}.") for other in sound)]
        found = [facts("value", self.kept[key]), facts("gradient", grad)]
        if inner:
            others = f" (or of {', '.join(inner[:-1])}, which read the same)" if inner[1:] else ""
            known = [self.sound[inner[-1]], *found]
            self.decide("backward", inner[-1], f"in the gradient of its input{others}", known)
        elif made_by is not None:  # read by the arithmetic of a module around it or, at the very end, by the loss
            around = [owner for owner in self.sound if made_by.startswith(f"{owner}." if owner else "")]
            owner = max(around, key=len, default="the loss")
            self.decide("backward", owner, f"in the gradient of what it makes of the output of {made_by}", found)

    def parameter(self, name: str, weight: Tensor, grad: Tensor) -> None:
        if is_bad(grad):
            owner, _, last = name.rpartition(".")
            before = [self.sound[owner]] if owner in self.sound else []
            found = [*before, facts("weight", weight), facts("gradient", grad)]
            self.decide("backward", owner, f"in the gradient of its {last}", found)

    def forget(self) -> None:
        for memory in (self.kept, self.readers, self.sound):
            memory.clear()


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    watch, handles = _Watch(model), []
    for name, module in model.named_modules():
        enter = lambda _, args, kwargs, name=name: watch.enters(name, (args, kwargs))  # noqa: E731
        leave = lambda _, args, kwargs, out, name=name: watch.leaves(name, (args, kwargs), out)  # noqa: E731
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            check = lambda grad, name=name, weight=weight: watch.parameter(name, weight, grad)  # noqa: E731
            handles.append(weight.register_hook(check))
    try:
        yield watch
    finally:
        watch.forget()
        for handle in handles:
            handle.remove()


def trace_nonfinite(
    model: nn.Module, run_forward_backward: Callable[[], Tensor], in_fp32: Callable[[], Tensor] | None = None
) -> NonfiniteTrace:
    """`run_forward_backward` computes the loss, calls its backward and returns it; `in_fp32` does the same in fp32.

    Gradients are gone afterwards, weights are untouched.
    """
    model.zero_grad(set_to_none=True)
    with _watching(model) as watch:
        loss = run_forward_backward()
        trace = watch.trace
        trace.loss = float(loss.detach())
        if is_bad(loss) and trace.stage != "forward":
            # What the backward pass found after it does not explain a loss that was bad already.
            trace.stage = None
            watch.decide("loss", "the loss", "while every module's output is finite", [facts("loss", loss)])
        for name, weight in model.named_parameters():
            if weight.grad is not None:  # finite parts may have a sum that is not
                watch.parameter(name, weight, weight.grad)
    trace.bad_weights = {name: count for name, p in model.named_parameters() if (count := int((~p.isfinite()).sum()))}
    if trace.stage is not None and in_fp32 is not None:
        model.zero_grad(set_to_none=True)
        again = in_fp32()
        trace.cured_by_fp32 = not is_bad(again) and not any(
            is_bad(p.grad) for p in model.parameters() if p.grad is not None
        )
    model.zero_grad(set_to_none=True)
    return trace


def report(trace: NonfiniteTrace, step: int, where: str) -> InspectionReport:
    said = [f"Step {step} is finite throughout (loss {trace.loss:.4f}): activations, loss and gradients."]
    if trace.stage is not None:
        kind = f" ({trace.kind})" if trace.kind else ""
        place = f"{trace.module}{kind}, {trace.detail}"
        said = [f"Step {step}, {trace.stage}: the first value that is not finite is at {place}."]
    if trace.bad_weights:
        listed = ", ".join(f"{name} ({count:,} elements)" for name, count in list(trace.bad_weights.items())[:8])
        said.append(f"Weights that are not finite: {listed}. Go back to a checkpoint from before.")
    if trace.cured_by_fp32 is True:
        said.append("In fp32 the step is finite: the numbers leave the range or precision of the run's arithmetic.")
    elif trace.cured_by_fp32 is False:
        said.append("In fp32 the step is not finite either: precision is not the cause.")
    rows = [
        (one.what, str(list(one.shape)), one.dtype, one.low, one.high, one.mean, f"{one.nonfinite:.2%}")
        for one in trace.facts
    ]
    columns = ("tensor", "shape", "dtype", "min", "max", "mean", "not finite")
    return InspectionReport(f"NaN trace, {where}", said, {"step": step, **asdict(trace)}, columns, rows)
