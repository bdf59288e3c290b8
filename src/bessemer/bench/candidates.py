"""The changes that `bessemer bench optimise` may try from a configuration, and what the planner predicts of each.

All changes compute the same step: the same rows, sums and update, up to rounding. Only precision changes the numbers of
every pass, and is tried with permission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch

from bessemer.bench.scaling import DEGREES, USUAL, layouts_of
from bessemer.plan.cost_model.memory import MOST_TOKENS, RECOMPUTE_MODES, SHARE
from bessemer.plan.decide import TrainPlan
from bessemer.plan.expect import RunSetup, predict_run
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import Layout
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.speed import LONGEST_S, training_rate

PERMISSIONS = {"precision": ("bf16", "tf32"), "fp8": ("fp8",)}  # what --allow may name, and the precisions it tries
WORKERS = (1, 2, 4)
WAITING = 0.01  # share of a step spent waiting for batches, above which more workers are tried
MOST_WAITING = 0.9  # share that predictions count, since it is measured in short trials
LARGEST = 100e6  # parameters of a model whose passes are timed for a prediction on a CPU
PASSES_S = 0.3  # for timing them
RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}  # FLOPs; selective recomputes no matrix products
MORE_LAYOUTS = (*USUAL, "tp=2+dp_shard")


@dataclass(frozen=True)
class SpecChange:
    """Keys of the spec that are set together. `note` is what changes besides speed."""

    axis: str
    value: str
    settings: Mapping[str, Any] = field(hash=False)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.axis}: {self.value}"


@dataclass(frozen=True)
class Configuration:
    """A configuration that ran: what was set over the spec, and what the run decided and measured."""

    settings: dict[str, Any]
    training: TrainPlan
    layout: Layout
    workers: int
    data_wait: float  # share of a step


@dataclass(frozen=True)
class Predictor:
    """Predicts the seconds of a step: from the catalogue on a GPU, on a CPU from passes that are timed here."""

    spec: RunSpec
    shape: ModelShape
    machine: Machine
    rows: int  # of a step
    device: torch.device

    def seconds(self, config: Configuration) -> float | None:
        if self.device.type == "cuda":
            seconds = predict_run(self._setup(config), []).base_s
        else:
            seconds = self._timed(config)
        return None if seconds is None else seconds / (1 - min(config.data_wait, MOST_WAITING))

    def too_large(self, config: Configuration) -> str:
        """Why a configuration does not fit into memory by estimate; empty if it does."""
        setup, share = self._setup(config), SHARE.get(self.device.type, SHARE["cpu"])
        needed, limit = predict_run(setup, []).estimated_bytes, int(self.machine.memory_bytes * share)
        return f"needs {human_bytes(needed)} of {human_bytes(limit)} by estimate" if needed > limit else ""

    def _setup(self, config: Configuration) -> RunSetup:
        size = config.layout.size
        peak = self.machine.peak(config.training.precision)[0] * size
        return RunSetup(self.spec, self.shape, config.training, self.machine, config.layout, size, peak)

    def _timed(self, config: Configuration) -> float | None:
        training, shape = config.training, self.shape
        unmodelled = shape.wrapped or shape.decoder_layers or shape.labels
        if training.compiled or config.layout.size > 1 or unmodelled or shape.parameters > LARGEST:
            return None
        row_flops = shape.flops_per_token(training.context) * training.context
        if row_flops * training.micro_rows > LONGEST_S * self.machine.matmul["fp32"]:
            return None
        how = training.activations
        factor = RECOMPUTED[how] if isinstance(how, str) else 1 + (1 - how) / 3
        rate = _timed_rate(shape, training.context, training.micro_rows, training.precision, self.device)
        return factor * self.rows * training.context / rate


@cache
def _timed_rate(shape: ModelShape, context: int, rows: int, precision: str, device: torch.device) -> float:
    return training_rate(shape, context, rows, precision, device, PASSES_S, update=False)


def changes(config: Configuration, spec: RunSpec, rows: int, allowed: set[str], device: torch.device, devices: int
) -> Iterator[tuple[SpecChange, Configuration]]:  # fmt: skip
    """Every change of one axis, with the configuration that is expected of it."""
    for axis in (_compile, _activations, _micro_batch, _workers):
        for change, training in axis(config, spec, rows, device):
            settings = {**config.settings, **change.settings}
            workers = change.settings.get("data.workers", config.workers)
            data_wait = config.data_wait if workers == config.workers else 0.0
            yield change, replace(config, settings=settings, training=training, workers=workers, data_wait=data_wait)
    for precision in _precisions(config, allowed, device):
        note = "changes the numbers: passes round to it"
        change = SpecChange("precision", precision, {"precision": precision}, note)
        training = replace(config.training, precision=precision)
        yield change, replace(config, settings={**config.settings, "precision": precision}, training=training)
    for layout in _layouts(config, devices):
        degrees = {f"parallel.{key}": degree for key, degree in asdict(layout).items()}
        words = " ".join(f"{key}={degree}" for key, degree in asdict(layout).items() if degree > 1) or "one process"
        rows_each = max(1, rows // layout.dp)
        micro = max(n for n in range(1, min(rows_each, config.training.micro_rows) + 1) if rows_each % n == 0)
        settings = {**degrees, "budget.micro_batch": micro}
        change = SpecChange("layout", words, settings)
        training = replace(config.training, micro_rows=micro)
        yield change, replace(config, settings={**config.settings, **settings}, training=training, layout=layout)


Options = Iterator[tuple[SpecChange, TrainPlan]]
Axis = Callable[[Configuration, RunSpec, int, torch.device], Options]


def _compile(config: Configuration, spec: RunSpec, rows: int, device: torch.device) -> Options:
    modes = ("chain", "block", "off") if config.layout.size == 1 else ("block", "off")
    for mode in modes:
        if mode != config.training.compile:
            yield SpecChange("compile", mode, {"compile": mode}), replace(config.training, compile=mode)


def _activations(config: Configuration, spec: RunSpec, rows: int, device: torch.device) -> Options:
    for mode in RECOMPUTE_MODES:
        if mode != config.training.activations:
            settings = {"memory.activations": mode}
            yield SpecChange("memory.activations", mode, settings), replace(config.training, activations=mode)


def _micro_batch(config: Configuration, spec: RunSpec, rows: int, device: torch.device) -> Options:
    """Divisors of a process's rows: larger ones by powers of two, and half of the present one. Only the neighbours once
    a size has been chosen."""
    if spec.memory.update == "in_backward":
        return  # a step is one micro-batch
    each, present = max(1, rows // config.layout.dp), config.training.micro_rows
    most = max(1, MOST_TOKENS.get(device.type, MOST_TOKENS["cpu"]) // config.training.context)
    sizes = {2 * present, present // 2}
    if "budget.micro_batch" not in config.settings:
        sizes |= {present << k for k in range(2, 16)} | {each, most}
    for size in sorted(sizes):
        if 1 <= size <= min(each, 2 * most) and each % size == 0 and size != present:
            settings = {"budget.micro_batch": size}
            yield SpecChange("budget.micro_batch", str(size), settings), replace(config.training, micro_rows=size)


def _workers(config: Configuration, spec: RunSpec, rows: int, device: torch.device) -> Options:
    if config.data_wait > WAITING or config.workers == 0:
        for count in WORKERS:
            if count > config.workers:
                yield SpecChange("data.workers", str(count), {"data.workers": count}), config.training


def _precisions(config: Configuration, allowed: set[str], device: torch.device) -> Iterator[str]:
    names = [name for permission in PERMISSIONS if permission in allowed for name in PERMISSIONS[permission]]
    for name in names:
        if name != config.training.precision and (device.type == "cuda" or name == "bf16"):
            yield name


def _layouts(config: Configuration, devices: int) -> Iterator[Layout]:
    """Layouts over all devices; context, pipeline and expert parallelism stay as the spec has them."""
    present = config.layout
    if devices == 1 or present.cp * present.pp * present.ep > 1:
        return
    for degrees in layouts_of(MORE_LAYOUTS, devices):
        layout = Layout(**{key: degrees.get(key, 1) for key in DEGREES})
        if layout != present:
            yield layout
