"""The NaN tracer: names the first module (forward) or gradient (backward) that is not finite, with its inputs.

Every tensor that enters or leaves a module is checked on the host, in the order of computation: a tool for one step,
not for a run. It keeps the activations of one micro-batch alive, as the backward pass does.
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
    """Key figures of a tensor; minimum, maximum and mean are of its finite values."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    mean: float | None
    nonfinite: float  # share


@dataclass
class NonfiniteTrace:
    """`stage` is where it began: forward, loss, backward, or None for a step that is finite everywhere."""

    stage: str | None = None
    module: str | None = None  # its name, or a gradient's parameter
    kind: str | None = None  # the module's class
    detail: str = ""
    facts: list[TensorFacts] = field(default_factory=list)
    bad_weights: dict[str, int] = field(default_factory=dict)  # name -> non-finite elements
    loss: float | None = None
    cured_by_fp32: bool | None = None  # None: not tried, or not needed


def describe_tensor(what: str, tensor: Tensor) -> TensorFacts:
    values = tensor.detach()
    finite = values[values.isfinite()].float()
    low, high, mean = (float(f(finite)) if finite.numel() else None for f in (Tensor.min, Tensor.max, Tensor.mean))
    bad = 1 - finite.numel() / max(1, values.numel())
    return TensorFacts(what, tuple(values.shape), str(values.dtype).removeprefix("torch."), low, high, mean, bad)


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a module's arguments or output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from floating_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from floating_tensors(item)


def is_bad(tensor: Tensor) -> bool:
    return not bool(tensor.detach().isfinite().all())


class _Tracer:
    """Follows a pass. The first non-finite tensor decides; later ones are its consequences."""

    def __init__(self, model: nn.Module) -> None:
        self.trace, self.modules = NonfiniteTrace(), dict(model.named_modules())
        self.running: list[str] = []
        self.alive: dict[int, Tensor] = {}  # by id; kept alive so that no id is reused
        self.readers: dict[int, list[str]] = {}  # tensor -> modules that it enters, outer before inner
        self.finite_modules: dict[str, TensorFacts] = {}  # modules whose output gradient was finite

    def decide(self, stage: str, module: str, detail: str, tensors: list[TensorFacts]) -> None:
        if self.trace.stage is None:
            kind = type(self.modules[module]).__name__ if module in self.modules else None
            self.trace.stage, self.trace.module, self.trace.kind = stage, module or "the model", kind
            self.trace.detail, self.trace.facts = detail, tensors

    def enters(self, name: str, inputs: Any) -> None:
        if not self.running:  # the next micro-batch
            self.forget()
        for tensor in floating_tensors(inputs):
            if is_bad(tensor):
                owner = self.running[-1] if self.running else "the batch"
                detail = f"in what it makes for {name}" if self.running else "before any module"
                self.decide("forward", owner, detail, [describe_tensor(f"input of {name or 'the model'}", tensor)])
            self.readers.setdefault(id(tensor), []).append(name)
            self.follow(tensor, None)
        self.running.append(name)

    def leaves(self, name: str, inputs: Any, output: Any) -> None:
        self.running.pop()
        for tensor in floating_tensors(output):
            if is_bad(tensor):
                facts = [describe_tensor(f"input {i}", one) for i, one in enumerate(floating_tensors(inputs))]
                parameters = self.modules[name].named_parameters(recurse=False)
                facts += [describe_tensor(parameter, weight) for parameter, weight in parameters]
                self.decide("forward", name, "in its output", [*facts, describe_tensor("output", tensor)])
            self.follow(tensor, name)

    def follow(self, tensor: Tensor, made_by: str | None) -> None:
        if tensor.requires_grad:
            key = id(tensor)
            self.alive[key] = tensor
            tensor.register_hook(lambda grad: self.gradient(key, grad, made_by))

    def gradient(self, key: int, grad: Tensor, made_by: str | None) -> None:
        if not is_bad(grad):
            if made_by is not None:
                self.finite_modules[made_by] = describe_tensor(f"gradient of the output of {made_by}", grad)
            return
        # A gradient comes from what reads the tensor: the innermost modules whose output gradient was finite.
        finite = [reader for reader in self.readers.get(key, []) if reader in self.finite_modules]
        inner = [name for name in finite if not any(other.startswith(f"{name}.") for other in finite)]
        facts = [describe_tensor("value", self.alive[key]), describe_tensor("gradient", grad)]
        if inner:
            others = f" (or of {', '.join(inner[:-1])}, which read the same)" if inner[1:] else ""
            facts = [self.finite_modules[inner[-1]], *facts]
            self.decide("backward", inner[-1], f"in the gradient of its input{others}", facts)
        elif made_by is not None:  # read by an enclosing module or by the loss
            around = [owner for owner in self.finite_modules if made_by.startswith(f"{owner}." if owner else "")]
            owner = max(around, key=len, default="the loss")
            self.decide("backward", owner, f"in the gradient of its computation on the output of {made_by}", facts)

    def parameter(self, name: str, weight: Tensor, grad: Tensor) -> None:
        if is_bad(grad):
            owner, _, last = name.rpartition(".")
            before = [self.finite_modules[owner]] if owner in self.finite_modules else []
            facts = [*before, describe_tensor("weight", weight), describe_tensor("gradient", grad)]
            self.decide("backward", owner, f"in the gradient of its {last}", facts)

    def forget(self) -> None:
        for memory in (self.alive, self.readers, self.finite_modules):
            memory.clear()


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Tracer]:
    watch, handles = _Tracer(model), []
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
    """`run_forward_backward` computes the loss, calls its backward and returns it; `try_fp32` does the same in fp32.

    Clears the gradients; the weights are not changed.
    """
    model.zero_grad(set_to_none=True)
    with _watching(model) as watch:
        loss = run_forward_backward()
        trace = watch.trace
        trace.loss = float(loss.detach())
        if is_bad(loss) and trace.stage != "forward":
            # A finding of the backward pass does not explain a loss that was bad before it.
            trace.stage = None
            watch.decide("loss", "the loss", "while every module's output is finite", [describe_tensor("loss", loss)])
        for name, weight in model.named_parameters():
            if weight.grad is not None:  # finite parts may have a non-finite sum
                watch.parameter(name, weight, weight.grad)
    trace.bad_weights = {name: count for name, p in model.named_parameters() if (count := int((~p.isfinite()).sum()))}
    if trace.stage is not None and in_fp32 is not None:
        model.zero_grad(set_to_none=True)
        loss = in_fp32()
        trace.cured_by_fp32 = not is_bad(loss) and not any(
            is_bad(p.grad) for p in model.parameters() if p.grad is not None
        )
    model.zero_grad(set_to_none=True)
    return trace


def nonfinite_report(trace: NonfiniteTrace, step: int, label: str) -> InspectionReport:
    conclusions = [f"Step {step} is finite everywhere (loss {trace.loss:.4f}): activations, loss and gradients."]
    if trace.stage is not None:
        kind = f" ({trace.kind})" if trace.kind else ""
        place = f"{trace.module}{kind}, {trace.detail}"
        conclusions = [f"Step {step}, {trace.stage}: the first value that is not finite is at {place}."]
    if trace.bad_weights:
        listed = ", ".join(f"{name} ({count:,} elements)" for name, count in list(trace.bad_weights.items())[:8])
        conclusions.append(f"Weights that are not finite: {listed}. Go back to an earlier checkpoint.")
    if trace.cured_by_fp32 is True:
        conclusions.append(
            "In fp32 the step is finite: the values exceed the range or precision of the run's arithmetic."
        )
    elif trace.cured_by_fp32 is False:
        conclusions.append("In fp32 the step is not finite either: precision is not the cause.")
    rows = [
        (one.what, str(list(one.shape)), one.dtype, one.low, one.high, one.mean, f"{one.nonfinite:.2%}")
        for one in trace.facts
    ]
    columns = ("tensor", "shape", "dtype", "min", "max", "mean", "not finite")
    return InspectionReport(f"NaN trace, {label}", conclusions, {"step": step, **asdict(trace)}, columns, rows)
