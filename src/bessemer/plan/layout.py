"""How a model is laid over the processes of a run: how many replicas, and among how many each is divided."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.machine import Machine
from bessemer.spec.memory import optimizer_bytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

REPLICATE, SHARD = "parallel.dp_replicate", "parallel.dp_shard"
ELEMENTWISE = ("adamw", "adam", "sgd")  # those whose step of a part is the part of their step
WHOLE = 0.25  # of a device's memory that weights, gradients and moments may take before they are divided


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of processes."""

    dp_replicate: int = 1
    dp_shard: int = 1

    @property
    def dp(self) -> int:
        """Among how many processes the rows of a step are divided."""
        return self.dp_replicate * self.dp_shard


ALONE = Layout()


def decide_layout(spec: RunSpec, shape: ModelShape, machine: Machine, size: int, plan: Plan) -> Layout:
    """What the spec asks for if it fills the processes; what it leaves open is decided by whether one device holds a
    whole replica with room to spare. Either gives the same losses, so a resumed run is free to choose anew."""
    asked = spec.parallel
    given = {REPLICATE: asked.dp_replicate, SHARD: asked.dp_shard}
    fixed = {key: int(degree) for key, degree in given.items() if degree != "auto"}
    product = 1
    for key, degree in fixed.items():
        plan.asked(key, degree)
        product *= degree
    if size % product or (len(fixed) == 2 and product != size):
        words = " x ".join(f"{key.removeprefix('parallel.')} {degree}" for key, degree in fixed.items())
        raise UserError(f"parallel: {words} needs {product} processes, and there are {size}: {_nearest(size, fixed)}")
    left = size // product
    if size == 1:
        return Layout()
    whole = optimizer_bytes(spec.optimizer, spec.memory, spec.precision).device * shape.parameters
    if len(fixed) == 2:
        degrees = fixed
    elif len(fixed) == 1:
        (open_key,) = given.keys() - fixed.keys()
        degrees = {**fixed, open_key: plan.add(open_key, left, f"what is left of {size} processes", "rule")}
    else:
        fits = whole <= WHOLE * machine.memory_bytes
        reason = f"weights, gradients and moments are {human_bytes(whole)} of {human_bytes(machine.memory_bytes)}: " + (
            "each device holds them whole" if fits else "they are divided among all devices"
        )
        degrees = {REPLICATE: left if fits else 1, SHARD: 1 if fits else left}
        for key, degree in degrees.items():
            plan.add(key, degree, reason, "estimate")
    layout = Layout(degrees[REPLICATE], degrees[SHARD])
    _refuse(spec, shape, layout)
    return layout


def _refuse(spec: RunSpec, shape: ModelShape, layout: Layout) -> None:
    """What would not be the same run over several processes."""
    name = spec.optimizer.name
    faults = {
        "model: experts route the tokens of their own process": bool(shape.moe),
        "model: another library's modules are not divided": bool(shape.wrapped),
        "memory: weights, moments, offload_optimizer and update": spec.memory.lean,
        "memory.offload_activations": spec.memory.offload_activations,
        f"precision: {spec.precision}": spec.precision in ("fp8", "fp8_rowwise"),
        f"optimizer.name: {name} over parts of a matrix": layout.dp_shard > 1 and name not in ELEMENTWISE,
    }
    for words, found in faults.items():
        if found:
            raise UserError(f"{words}: for one process in this version; change this, or run it in one (WORLD_SIZE=1)")


def _nearest(size: int, fixed: dict[str, int]) -> str:
    """The degree that would fit, of the key that is given last."""
    key = list(fixed)[-1]
    others = 1
    for name, degree in fixed.items():
        others *= degree if name != key else 1
    best = size // others if size % others == 0 else 1
    return f"write {key}: {best}, or auto"
