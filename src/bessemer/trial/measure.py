"""Measures a pass over micro-batches at the present weights: its loss and gradient norm, how far they are from normal,
and the outputs and gradients of each layer.

Nothing here updates a weight. Experiments that load or train other weights do so inside `preserve_state`, which
restores everything bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.model.quantized import stored_bytes
from bessemer.model.transformer import weights_in_fp32
from bessemer.optim.low_memory import shard_place
from bessemer.parallel.shard import free_gathered_weights, local
from bessemer.parallel.world import World
from bessemer.train.compile import compute_in, compute_type, use_tf32
from bessemer.train.engine import Engine, PassResult
from bessemer.train.job import Job
from bessemer.train.lowp import scaled
from bessemer.trial.case import QUIET, LayerEvidence, NormalRange, StepScene


class RankPassError(RuntimeError):
    """A pass failed on one of several ranks. The others wait in it, so this one must end and the launcher restart all
    of them. Errors outside of a pass happen on every rank, and the run can continue."""


@dataclass(frozen=True)
class Measurement:
    """Loss, gradient norm and every token's loss of one pass."""

    loss: float
    grad_norm: float
    nll: list[npt.NDArray[np.float64]]  # (R, T) of each micro-batch


def global_batches(engine: Engine, stream: BatchStream | IterableStream, step: int) -> list[Batch]:
    """The micro-batches of a step of all ranks, in rank order. Each rank knows them all and computes its own."""
    degree = engine.world.layout.dp
    return [b for rank in range(degree) for b in stream.micro_batches(step, engine.plan.micro_rows, rank, degree)]


def local_share(world: World, batches: Sequence[Batch]) -> list[Batch]:
    """This rank's share of the micro-batches of a step, padded to the same number on each rank. Those of
    `global_batches` go to the ranks that trained on them."""
    share = -(-len(batches) // world.layout.dp)
    local_batches = list(batches[world.dp_rank * share :][:share])
    return local_batches + [_padding(batches[0])] * (share - len(local_batches))


def _padding(like: Batch) -> Batch:
    """One row without weight, as the stream pads."""
    first = vars(like.part(0, 1))
    row = {name: np.zeros_like(array) for name, array in first.items() if name != "fields"}
    row |= {name: row[name] - 1 for name in ("positions", "sources", "sequences")}
    return Batch(**row, fields=first["fields"])


def run_pass(
    engine: Engine, batches: Sequence[Batch], count: float | None = None, precision: str | None = None
) -> Measurement:
    """The forward and backward pass of training over the micro-batches of all ranks, of which each rank computes its
    share. Gradients add up in the parameters. `count` is what the loss is divided by: by default the tokens of the
    batches."""
    with _fail_all_ranks(engine.world):
        result, norm = _pass(engine, local_share(engine.world, batches), count, precision)
    return Measurement(*_to_host(result, norm), gather_rows(engine, result.token_losses)[: len(batches)])


def run_step(engine: Engine, stream: BatchStream | IterableStream, step: int) -> Measurement:
    """The same for a step of the stream, of which each rank reads its own rows; without token losses."""
    world = engine.world
    engine.optimizer.at_step(step)
    local_batches = stream.micro_batches(step, engine.plan.micro_rows, world.dp_rank, world.layout.dp)
    with _fail_all_ranks(world):
        result, norm = _pass(engine, local_batches, stream.step_count(step))
    return Measurement(*_to_host(result, norm), [])


def _pass(
    engine: Engine, batches: Sequence[Batch], count: float | None, precision: str | None = None
) -> tuple[PassResult, Tensor]:
    """Loss and gradient norm over all ranks, and this rank's token losses."""
    inputs = engine.inputs(batches)
    count = engine.token_count(inputs, count)
    chosen = precision or engine.plan.precision
    loss_scale = engine.loss_scale if chosen == "fp16" else None
    with use_tf32(chosen), scaled(loss_scale, engine.optimizer.parameters) as factor:
        result = engine.compute_gradients(inputs, count, precision, factor)
    return result, engine.reduce(result)


def _to_host(result: PassResult, norm: Tensor) -> tuple[float, float]:
    loss, grad_norm = torch.stack((result.loss, norm.float())).tolist()
    return loss, grad_norm


def token_losses(engine: Engine, batches: Sequence[Batch]) -> list[npt.NDArray[np.float64]]:
    """Every token's loss, (R, T) of each micro-batch, by forward passes alone: gradients in the parameters stay."""
    model, precision, losses = engine.model, engine.plan.precision, []
    training = model.training
    model.eval()
    try:
        with _fail_all_ranks(engine.world), torch.no_grad(), use_tf32(precision):
            for batch in local_share(engine.world, batches):
                inputs = engine.objective.feed(batch, engine.device)
                with compute_in(precision, engine.device):
                    losses.append(engine.objective.loss(model, inputs, 1.0).nll_BT)
    finally:
        model.train(training)
        free_gathered_weights(model)
    return gather_rows(engine, losses)[: len(batches)]


def gather_rows(engine: Engine, losses: Sequence[Tensor]) -> list[npt.NDArray[np.float64]]:
    """The losses of all ranks' micro-batches, in the order of `global_batches`."""
    world = engine.world
    local_losses = [np.asarray(nll.float().cpu(), dtype=np.float64) for nll in losses]
    everyone = dict(world.gather(((world.dp_rank, world.cp_rank), local_losses)))
    columns = engine.objective.columns  # of rows that ranks share
    return [
        columns.whole(parts) if columns else parts[0]
        for rank in range(world.layout.dp)
        for parts in zip(*(everyone[rank, part] for part in range(world.layout.cp)), strict=True)
    ]


@contextmanager
def _fail_all_ranks(world: World) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if world.size == 1:
            raise
        raise RankPassError(f"a pass of a trial failed in process {world.rank}: {error}") from error


def measure(
    engine: Engine, batches: Sequence[Batch], count: float | None = None, precision: str | None = None
) -> Measurement:
    """`run_pass` that leaves no gradients. For fp32, weights held in bf16 are widened."""
    engine.discard_gradients()
    wide = compute_type(precision or engine.plan.precision) == torch.float32
    try:
        with weights_in_fp32(engine.model) if wide else nullcontext():
            return run_pass(engine, batches, count, precision)
    finally:
        engine.discard_gradients()


@dataclass(frozen=True)
class Yardstick:
    """Measures how far loss and gradient norm are beyond normal; 1 is the guard's limit for an outlier.

    A change explains the step if it brings the excess below `limit`: the guard's limit, or half of the step's own
    excess where that is smaller (slow divergence). With `low`, a loss below normal counts instead.
    """

    normal: NormalRange
    limit: float
    low: bool = False

    @classmethod
    def of(cls, scene: StepScene) -> Yardstick:
        high = cls(scene.normal, 1.0)
        low = replace(high, low=True)
        is_low = high.excess(scene.loss, scene.grad_norm) < 0.5 and low.excess(scene.loss, scene.grad_norm) > 1
        chosen = low if is_low else high
        observed = chosen.excess(scene.loss, scene.grad_norm)
        return replace(chosen, limit=min(1.0, observed / 2) if observed > QUIET else 1.0)

    def excess(self, loss: float, grad_norm: float) -> float:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return math.inf
        normal = self.normal
        loss_z = (loss - normal.loss) / max(normal.loss_scale, 1e-12) * (-1 if self.low else 1)
        grad_z = math.log(max(grad_norm, 1e-30) / max(normal.grad_norm, 1e-30)) / normal.grad_scale
        return max(0.0, loss_z / normal.loss_sigma, grad_z / normal.grad_sigma)

    def excess_of(self, measured: Measurement) -> float:
        return self.excess(measured.loss, measured.grad_norm)

    def centred_on(self, measured: Measurement) -> Yardstick:
        """The same scales around other values, for other weights."""
        return replace(self, normal=replace(self.normal, loss=measured.loss, grad_norm=measured.grad_norm))


def mean_measurement(results: Sequence[Measurement]) -> Measurement:
    """The mean loss, and the geometric mean of the gradient norms."""
    norms = [math.log(max(result.grad_norm, 1e-30)) for result in results]
    loss = sum(result.loss for result in results) / len(results)
    return Measurement(loss, math.exp(sum(norms) / len(norms)), [])


def local_state(engine: Engine) -> dict[str, Tensor]:
    """The engine's tensors, live, as far as this rank holds them."""
    with torch.no_grad():
        return {name: local(tensor) for name, tensor in engine.state().items()}


@contextmanager
def preserve_state(job: Job) -> Iterator[dict[str, Tensor]]:
    """Restores weights, moments, counts, the guard's window and random states on exit, also after an error. Yields the
    saved tensors. They take three times the memory of the weights (each rank its shards), on the host where the device
    has none left."""
    engine, recorder, judge = job.engine, job.recorder, job.guard.judge
    device, state, window = engine.device, local_state(engine), judge.state()
    size = sum(map(stored_bytes, state.values()))
    fits = device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 1.5 * size
    saved = {name: t.detach().to(t.device if fits else "cpu", copy=True) for name, t in state.items()}
    rng_state = torch.get_rng_state()
    device_rng_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    training, progress = engine.model.training, copy.copy(recorder.progress)
    try:
        yield saved
    finally:
        restore_state(engine, saved)
        judge.load(window)  # its tensors are never changed in place
        engine.model.train(training)
        recorder.progress = progress
        torch.set_rng_state(rng_state)
        if device_rng_state is not None:
            torch.cuda.set_rng_state(device_rng_state, device)


@torch.no_grad()
def restore_state(engine: Engine, saved: dict[str, Tensor]) -> None:
    """Copy saved weights and moments back; gradients are cleared."""
    engine.discard_gradients()
    for name, tensor in local_state(engine).items():
        tensor.copy_(saved[name])


NOTABLE = 1.5  # times the normal value
MOST = 5


@dataclass(frozen=True)
class LayerMeasurement:
    """(rms, largest, non-finite) of each module's output in execution order, and each parameter's gradient norm."""

    outputs: dict[str, tuple[float, float, float]]
    gradients: dict[str, float]


@contextmanager
def _hook_outputs(model: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Collects (sum of squares, finite, largest, non-finite) of each module's output on the device."""

    def hook(name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.is_floating_point():
                values = local(output.detach()).float()
                finite = values.isfinite()
                clean, count = torch.where(finite, values, 0.0), finite.sum().float()
                numbers = (clean.square().sum(), count, clean.abs().max(), values.numel() - count)
                seen.setdefault(name, []).append(torch.stack(numbers))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sample_layers(engine: Engine, batches: Sequence[Batch]) -> LayerMeasurement:
    """Run one pass over the batches and collect layer statistics. Inner modules come before their parents."""
    notes: dict[str, list[Tensor]] = {}
    engine.discard_gradients()
    try:
        with _hook_outputs(engine.model, notes):
            run_pass(engine, batches)
        named = [(name, p.grad) for name, p in engine.model.named_parameters() if p.grad is not None]
        norms = {name: torch.linalg.vector_norm(local(gradient).float()).item() for name, gradient in named}
    finally:
        engine.discard_gradients()
    sums: dict[str, list[float]] = {}
    # Each rank ran its own rows: one line for each micro-batch of each rank.
    for tables in engine.world.gather({name: torch.stack(lines).tolist() for name, lines in notes.items()}):
        for name, table in tables.items():
            for squares, count, largest, bad in table:
                total = sums.setdefault(name, [0.0, 0.0, 0.0, 0.0])
                sums[name] = [total[0] + squares, total[1] + count, max(total[2], largest), total[3] + bad]
    outputs = {name: (math.sqrt(s / max(1.0, count)), largest, bad) for name, (s, count, largest, bad) in sums.items()}
    squares_of = {name: norm**2 for name, norm in norms.items()}
    return LayerMeasurement(
        outputs, {name: math.sqrt(square) for name, square in sum_shards(engine, squares_of).items()}
    )


def sum_shards(engine: Engine, numbers: Mapping[str, float]) -> dict[str, float]:
    """Sum per-shard numbers over ranks to numbers of full parameters; replicated shards count once."""
    places = {name: shard_place(parameter).first for name, parameter in engine.model.named_parameters()}
    parts: dict[str, dict[int, float]] = {}
    for of_rank in engine.world.gather({(name, places[name]): number for name, number in numbers.items()}):
        for (name, first), number in of_rank.items():
            parts.setdefault(name, {})[first] = number
    return {name: sum(shards.values()) for name, shards in parts.items()}


def _ratio(value: float, normal: float) -> float:
    if not math.isfinite(value):
        return math.inf
    return value / normal if normal > 0 and math.isfinite(normal) else math.inf if value > 0 else 0.0


def compare_layers(bad: LayerMeasurement, normal: LayerMeasurement) -> list[LayerEvidence]:
    """The first module with non-finite outputs, or the first notable one and the worst; then the parameters whose
    gradients grew most."""
    layers = []
    for name, (_, _, count) in bad.outputs.items():
        if count:
            usual = normal.outputs.get(name, (0.0, 0.0, 0.0))[2]
            layers.append(LayerEvidence(name, "non-finite outputs", count, usual))
            break
    for place, quantity in enumerate(("output rms", "largest output")):
        ratios = {
            name: _ratio(values[place], normal.outputs[name][place])
            for name, values in bad.outputs.items()
            if name in normal.outputs
        }
        worst = max(ratios, key=lambda name: ratios[name], default="")
        if layers or not worst or ratios[worst] < NOTABLE:
            continue
        first = next(name for name in ratios if ratios[name] >= max(NOTABLE, ratios[worst] ** 0.5))
        for name in dict.fromkeys((first, worst)):
            layers.append(LayerEvidence(name, quantity, bad.outputs[name][place], normal.outputs[name][place]))
    growth = {name: _ratio(norm, normal.gradients.get(name, 0.0)) for name, norm in bad.gradients.items()}
    for name in sorted(growth, key=lambda name: -growth[name])[:MOST]:
        if growth[name] >= NOTABLE:
            layers.append(LayerEvidence(name, "gradient norm", bad.gradients[name], normal.gradients.get(name, 0.0)))
    return layers


def damaged_weights(engine: Engine) -> list[LayerEvidence]:
    """Parameters with NaN or Inf, and how many elements."""
    named = [(name, local(parameter.detach())) for name, parameter in engine.model.named_parameters()]
    counts = torch.stack([(~weight.isfinite()).sum() for _, weight in named]).tolist()
    totals = sum_shards(engine, {name: float(count) for (name, _), count in zip(named, counts, strict=True)})
    return [LayerEvidence(name, "non-finite weights", count, 0.0) for name, count in totals.items() if count]
