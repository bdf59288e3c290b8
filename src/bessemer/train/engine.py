"""Engine: what computes a training step. Model, objective, optimizer and their settings, with the one forward and
backward pass that training, trials, memory probes and speed measurements share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from bessemer.checkpoint.base import FrozenBase
from bessemer.data.stream.batches import Batch
from bessemer.model.moe import MixtureOfExperts, update_choice_bias
from bessemer.model.transformer import Decoder
from bessemer.optim.guarded import Ema, GuardedOptimizer
from bessemer.optim.wrappers import SharpnessAware
from bessemer.parallel.shard import reduce_expert_gradients, set_gradient_sync, squared_grad_norm
from bessemer.parallel.world import World
from bessemer.plan.decide import TrainPlan
from bessemer.plan.schedule import Schedule
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.compile import compute_in
from bessemer.train.device import synchronize
from bessemer.train.lowp import LossScale
from bessemer.train.objective import LossTerms, ModelInputs, Objective, Pretrain

if TYPE_CHECKING:
    from bessemer.parallel.pipeline import Pipeline


@dataclass
class PassResult:
    """Losses of the micro-batches of a step, still on the device and divided by the step's token count."""

    loss: Tensor
    metrics_M2: Tensor  # sum and count of each of the objective's metrics
    token_losses: list[Tensor] = field(default_factory=list)  # (R, T) of each micro-batch
    row_sums: list[Tensor] = field(default_factory=list)  # (2, R) of each micro-batch, as in `LossTerms`

    @classmethod
    def zeros(cls, device: torch.device, metrics: int) -> PassResult:
        return cls(torch.zeros((), device=device), torch.zeros(metrics, 2, device=device))

    def add(self, terms: LossTerms) -> None:
        self.loss += terms.nll
        for sums_2, metric in zip(self.metrics_M2, terms.metrics.values(), strict=True):
            sums_2 += torch.stack((metric[0].float(), metric[1].float()))
        self.token_losses.append(terms.nll_BT)
        self.row_sums.append(terms.rows_2B)


class PassHooks:
    """Called by `forward_backward` around each micro-batch. These do nothing."""

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def before_micro_batch(self) -> None: ...

    def after_micro_batch(self, done: int, total: int) -> None: ...


def hash_row(seed: int, step: int, position: int) -> int:
    """A seed for the draws of a row of a step."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {position}".encode()) >> 1


def plain_backward(loss: Tensor, last: bool) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def forward_backward(
    model: Decoder,
    objective: Objective,
    inputs: deque[ModelInputs],
    count: float,
    precision: str,
    scale: Tensor | float | None = None,
    backward: Callable[[Tensor, bool], None] = plain_backward,
    sync_gradients: bool = True,
    hooks: PassHooks | None = None,
) -> PassResult:
    """Run forward and backward over micro-batches. Gradients add up in the parameters; nothing is updated.

    `inputs` is consumed, so that the masks of a micro-batch are freed with it. Losses are divided by `count` and, for
    the backward pass, multiplied by `scale`. With `sync_gradients` the last backward pass reduces gradients over
    processes.
    """
    hooks, device, total = hooks or PassHooks(), inputs[0].tokens_BT.device, len(inputs)
    result = PassResult.zeros(device, len(objective.metrics))
    while inputs:
        hooks.before_micro_batch()
        last = len(inputs) == 1
        set_gradient_sync(model, now=last and sync_gradients)
        with hooks.span("forward"), compute_in(precision, device):
            terms = objective.loss(model, inputs.popleft(), count)
        with hooks.span("backward"):
            backward(terms.loss if scale is None else terms.loss * scale, last)
        result.add(terms)
        hooks.after_micro_batch(total - len(inputs), total)
    return result


def step_means(
    objective: Objective, model: Decoder, inputs: Iterable[ModelInputs], world: World
) -> dict[str, float]:  # fmt: skip
    """The objective's constants: means over the inputs of all ranks."""
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in objective.step_means}
    for part in inputs:
        for name, metric in objective.means(model, part).items():
            sums[name] = [total + float(value) for total, value in zip(sums[name], metric, strict=True)]
    flat = world.sums([value for pair in sums.values() for value in pair])
    return {name: total / (count or 1.0) for name, total, count in zip(sums, flat[::2], flat[1::2], strict=True)}


def sharpness_aware(optimizer: GuardedOptimizer, spec: OptimizerSpec, world: World) -> SharpnessAware | None:
    """SAM or ASAM, if the spec asks for it."""

    def norm() -> Tensor:
        if world.mesh is None:
            return optimizer.grad_norm()
        return world.add(squared_grad_norm(optimizer.parameters, world)).sqrt().float()

    return SharpnessAware(optimizer.named, spec.sam, norm if spec.sam_adaptive else None) if spec.sam else None


class PipelineRunner:
    """Runs the micro-batches of a step through the stages of a pipeline."""

    def __init__(
        self, pipeline: Pipeline, model: Decoder, objective: Objective, precision: str, sequence: bool
    ) -> None:
        from bessemer.parallel.tensor import uses_sequence_parallel

        self.pipeline, self.model, self.objective = pipeline, model, objective
        world = pipeline.world
        pipeline.compute_context = lambda: compute_in(precision, world.device)
        pipeline.divided_rows = world.layout.tp > 1 and uses_sequence_parallel(model.shape, sequence)

    @property
    def repeated_weight(self) -> Tensor | None:
        """The last stage's copy of a tied embedding, whose gradient counts on the first stage."""
        repeated = self.model.shape.tied and self.pipeline.is_last and not self.pipeline.is_first
        return self.model.embedding.weight if repeated else None

    def run(
        self, inputs: Sequence[ModelInputs], count: float, scale: Tensor | float | None = None,
        objective: Objective | None = None,
    ) -> list[LossTerms]:  # fmt: skip
        """Losses of all micro-batches on ranks with the last stage, elsewhere none; gradients if they are enabled."""
        chosen = objective or self.objective

        def compute_terms(part: ModelInputs, hidden_BTW: Tensor) -> LossTerms:
            terms = chosen.compute_terms(self.model, part, hidden_BTW, count)
            return terms if scale is None else replace(terms, loss=terms.loss * scale)

        def weight(part: ModelInputs) -> Tensor:
            share = (part.weights_BT > 0).sum() / count
            return share if scale is None else share * scale

        self.pipeline.weight = weight
        return self.pipeline.run(inputs, compute_terms, training=torch.is_grad_enabled())


@dataclass
class Engine:
    """Computes gradients and updates. Its tensors are those of a checkpoint, besides the guard's window."""

    spec: RunSpec
    plan: TrainPlan
    device: torch.device
    model: Decoder
    objective: Objective
    optimizer: GuardedOptimizer
    schedule: Schedule
    world: World = field(default_factory=World)
    ema: Ema | None = None
    pipeline: PipelineRunner | None = None
    loss_scale: LossScale | None = None  # with fp16
    sam: SharpnessAware | None = None
    base: FrozenBase | None = None  # holds the frozen weights that checkpoints leave out

    def inputs(self, batches: Sequence[Batch]) -> deque[ModelInputs]:
        """The micro-batches on the device."""
        return deque(self.objective.feed(batch, self.device) for batch in batches)

    def token_count(self, inputs: Sequence[ModelInputs], count: float | None) -> float:
        """What a step's loss is divided by: `count`, unless only the inputs tell. Sets the totals of further terms."""
        if count is not None and not self.objective.counts_inputs:
            return count
        names = list(inputs[0].counts)
        sums = self.world.sums([sum(part.count for part in inputs), *(sum(p.counts[n] for p in inputs) for n in names)])
        copies = self.world.size // self.world.layout.dp  # ranks that share rows have counted the same
        total, *others = (each / copies for each in sums)
        for part in inputs:
            part.totals = dict(zip(names, others, strict=True))
        return total

    def compute_gradients(
        self,
        inputs: deque[ModelInputs],
        count: float,
        precision: str | None = None,
        scale: Tensor | float | None = None,
        hooks: PassHooks | None = None,
    ) -> PassResult:
        """Losses and gradients of a step on this rank, through the pipeline where there is one. `precision` other than
        the plan's is for weights that the caller has widened."""
        self._compute_means(inputs, precision or self.plan.precision)
        count = count or 1.0  # all documents of the step are banned: a loss of zero
        if precision is None:  # widened weights have fp32 gradients anyway
            self.optimizer.accumulate(len(inputs) > 1)
        if self.pipeline:
            result = PassResult.zeros(self.device, len(self.objective.metrics))
            with (hooks or PassHooks()).span("pipeline"):
                terms_of_all = self.pipeline.run(list(inputs), count, scale)
            for terms in terms_of_all:
                result.add(terms)
            inputs.clear()
        else:
            result = forward_backward(
                self.model, self.objective, inputs, count, precision or self.plan.precision, scale,
                self.optimizer.backward, hooks=hooks,
            )  # fmt: skip
        reduce_expert_gradients(self.model, self.world)
        return result

    def _compute_means(self, inputs: deque[ModelInputs], precision: str) -> None:
        """The objective's constants of this step, by forward passes without gradients, into the inputs."""
        if not self.objective.step_means:
            return
        training = self.model.training
        self.model.eval()
        with torch.no_grad(), compute_in(precision, self.device):
            totals = step_means(self.objective, self.model, inputs, self.world)
        self.model.train(training)
        for part in inputs:
            part.totals |= totals

    def reduce(self, result: PassResult, rows: int = 0) -> Tensor:
        """The global gradient norm. Over several ranks also makes the result that of all of them, in one all-reduce:
        loss, metrics, and the sums of `rows` rows a rank."""
        world = self.world
        self.optimizer.drop_held_gradients()
        if world.mesh is None:
            return self.optimizer.grad_norm()
        square = self.optimizer.square()
        if square is None:
            repeated = self.pipeline.repeated_weight if self.pipeline else None
            square = squared_grad_norm((p for p in self.optimizer.parameters if p is not repeated), world)
        reports = 1.0 if world.reports_losses else 0.0
        metrics_K = result.metrics_M2.double().flatten() * reports
        scalars = torch.cat((torch.stack((result.loss.double() * reports, square)), metrics_K))
        # A slot for every row of the step. Context-parallel ranks add their columns up; the other ranks add zeros.
        rows_2R = torch.zeros(2, rows * world.layout.dp, dtype=torch.float64, device=self.device)
        if world.reports_losses and rows and result.row_sums:
            rows_2R[:, rows * world.dp_rank :][:, :rows] = torch.cat(result.row_sums, 1).double()
        sums = world.add(torch.cat((scalars, rows_2R.flatten())))
        result.loss, result.metrics_M2 = sums[0].float(), sums[2 : len(scalars)].float().view_as(result.metrics_M2)
        result.row_sums = [sums[len(scalars) :].view_as(rows_2R)]
        return sums[1].sqrt().float()

    def sharpen(self, batches: Sequence[Batch], predicted: float | None, norm: Tensor) -> Tensor:
        """SAM: replaces the gradients, of that norm, by those at the perturbed weights. Their norm; NaN if their loss
        is not finite."""
        assert self.sam is not None
        scale = self.loss_scale.scale if self.loss_scale else None
        with self.sam.perturbed(norm):
            self.discard_gradients()  # and the expert loads of the first pass
            inputs = self.inputs(batches)
            count = self.token_count(inputs, predicted)
            second = self.compute_gradients(inputs, count, scale=scale)
            second_norm = self.reduce(second)
        return torch.where(torch.isfinite(second.loss), second_norm, torch.full_like(second_norm, float("nan")))

    def follow_curvature(self, batches: Sequence[Batch], predicted: float | None, step: int, reject: Tensor) -> None:
        """Sophia: renew the curvature by the gradients of labels drawn from the model's own logits, unless the step is
        rejected or they are not finite. The step's own gradients stay. Costs two forward passes and a backward one."""
        assert isinstance(self.objective, Pretrain)
        scale = self.loss_scale.scale if self.loss_scale else None
        with self.optimizer.other_gradients(copy=self.world.layout.dp_replicate > 1):  # which reuses its buckets
            inputs, sampled = self.inputs(batches), deque[ModelInputs]()
            count = self.token_count(inputs, predicted)
            for feed, batch in zip(inputs, batches, strict=True):
                seeds = [hash_row(self.spec.seed, step, int(position)) for position in batch.positions]
                with compute_in(self.plan.precision, self.device):
                    sampled.append(self.objective.sample_targets(self.model, feed, seeds))
            norm = self.reduce(self.compute_gradients(sampled, count, scale=scale))
            self.optimizer.follow_curvature(count, torch.maximum(reject, (~norm.isfinite()).float()), scale)

    def update(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Update weights, expert biases and averages, unless `reject` is 1; no host sync where the optimizer allows."""
        self.optimizer.step(lr, reject, divisor)
        if (moe := self.model.shape.moe) is not None and moe.choice_bias:
            update_choice_bias(
                self.model, moe.bias_rate, reject, lambda counts: self.world.add(counts, self.world.data_parallel_group)
            )
        if self.ema:
            self.ema.update(reject)

    def discard_gradients(self) -> None:
        """Forget what passes without an update leave behind: gradients, and the expert loads of this step."""
        self.optimizer.discard()
        if self.model.shape.moe is not None:
            for module in self.model.modules():
                if isinstance(module, MixtureOfExperts):
                    module.routing, module.assigned = None, []

    def release_memory(self) -> None:
        """Free what a step without an update has left behind."""
        synchronize(self.device)  # copies may still be on their way into memory that is free again
        self.discard_gradients()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def state(self) -> dict[str, Tensor]:
        """Weights, moments, averages and the loss scale by name. Live, except where another engine such as DeepSpeed
        holds them: then all ranks together make copies."""
        state = {f"model.{name}": tensor for name, tensor in self.optimizer.weights(self.model).items()}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return state | self._averages_and_scale()

    def load_targets(self) -> dict[str, Tensor]:
        """Tensors for a load to write into; then call `finish_load`."""
        return self.optimizer.targets(self.model) | self._averages_and_scale()

    def finish_load(self, state: dict[str, Tensor]) -> None:
        """After a load into all or some of `load_targets`."""
        self.optimizer.apply_loaded(self.model, state)

    def _averages_and_scale(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        if self.ema:
            state |= {f"ema.{name}": tensor for name, tensor in self.ema.state().items()}
        if self.loss_scale:
            state |= {f"scaling.{name}": tensor for name, tensor in self.loss_scale.state().items()}
        return state

    @property
    def can_abandon_step(self) -> bool:
        """Whether a step may end between two micro-batches without a trace: one rank decides alone, and nothing is
        updated before the backward passes are over."""
        return self.world.size == 1 and self.optimizer.rejects_before_update and self.optimizer.whole

    @property
    def is_compiled(self) -> bool:
        return any(getattr(block, "compiled", None) is not None for block in self.model.blocks)
