"""DeepSpeed as the engine of a run: its ZeRO divides what an optimizer keeps, its step updates; the rest is ours.

Clipping and DeepSpeed's own loss scale are off. Gradients of a whole step are there before `engine.step()`, so the
verdict is read on the host between the two, and a vetoed step is one that DeepSpeed never hears of. Our divisor (what
clipping and fp16's scale divide by) goes in as an overridden loss scale, by which ZeRO divides in its update.
DeepSpeed takes the mean of the processes' gradients: the loss is multiplied by their number, so that it is a sum.

Weights and moments lie in flat parts, one for each group of parameters and process (`zero_state.py`).
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.errors import UserError
from bessemer.model.transformer import Decoder
from bessemer.optim.choose import KINDS, build, parameter_groups
from bessemer.optim.groups import freeze, lr_scales
from bessemer.optim.guarded import HOST, Guarded
from bessemer.parallel.world import World
from bessemer.parallel.zero_state import ZeroState
from bessemer.spec.parallel import DeepSpeedSpec
from bessemer.spec.schema import RunSpec

BUCKET = 50_000_000  # gradients or weights that are sent together: 200 MB, where DeepSpeed would take 2 GB
KNOWN = ((0, 19), (0, 20))  # from and below: what is read of DeepSpeed's insides was tried with these


def engage(model: Decoder, spec: RunSpec, world: World, micro_rows: int) -> Guarded:
    """Give the model to DeepSpeed, in place; the optimizer that the loop steps. Made by all processes together."""
    deepspeed = import_deepspeed(world.device)
    asked = spec.parallel.deepspeed
    freeze(model, spec.optimizer.freeze)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    inner, reason = _inner_optimizer(deepspeed, named, spec, lr_scales(model, spec))
    _meet(deepspeed, world)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=inner,
        config=config_of(asked, model.shape.width, micro_rows, world),
        dist_init_required=False,
    )
    return EngineGuarded(named, engine, inner, asked, world, reason)


def import_deepspeed(device: torch.device) -> Any:
    """The package, quiet, for this device. One line where it is missing or too far from what was tried."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("parallel.engine: deepspeed needs `pip install bessemer[deepspeed]`") from None
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not KNOWN[0] <= found < KNOWN[1]:
        known = f"deepspeed>={'.'.join(map(str, KNOWN[0]))},<{'.'.join(map(str, KNOWN[1]))}"
        raise UserError(f"parallel.engine: deepspeed {version} was not tried: pip install '{known}'")
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # Its calls of torch's older names, told at every step.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    return deepspeed


def config_of(asked: DeepSpeedSpec, width: int, micro_rows: int, world: World) -> dict[str, Any]:
    """DeepSpeed's own configuration. How often gradients add up is said at each pass, so that is 1 here."""
    on_gpu = world.device.type == "cuda"
    zero: dict[str, Any] = {"stage": asked.zero, "overlap_comm": on_gpu}
    zero |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if asked.zero == 3:
        zero["stage3_param_persistence_threshold"] = 10 * width  # vectors are not worth gathering
        zero["memory_efficient_linear"] = False  # which would replace torch's linear function, for everybody
    if asked.offload != "none":
        place: dict[str, Any] = {"device": asked.offload, "pin_memory": on_gpu}
        if asked.offload == "nvme":
            place["nvme_path"] = asked.folder
        zero["offload_optimizer"] = place
        if asked.zero == 3 and asked.offload == "cpu":
            zero["offload_param"] = dict(place)
    return {
        "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # where DeepSpeed's own cannot be built, torch's serves
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _inner_optimizer(
    deepspeed: Any, named: list[tuple[str, nn.Parameter]], spec: RunSpec, scales: dict[str, float]
) -> tuple[Optimizer, str | None]:
    """What steps the flat parts, and why it is not what was wanted, if so. Without ZeRO they are the parameters."""
    asked, settings = spec.parallel.deepspeed, dict(spec.optimizer.settings())
    if asked.zero == 0:
        return build(named, spec.optimizer, HOST, scales, spec.memory)[0], None
    groups, reason = parameter_groups(named, settings.pop("weight_decay"), scales), None
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    if asked.offload != "none" and spec.optimizer.name in ("adamw", "adam"):
        decoupled = spec.optimizer.name == "adamw"
        try:
            made: Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=0.0, adamw_mode=decoupled, **settings)
            return made, None
        except Exception as error:  # a compiler that is missing or fails says so in many ways
            said = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"DeepSpeed's own Adam for the host could not be built ({said}): torch's steps there"
    kind = KINDS[spec.optimizer.name]
    fused = {"fused": True} if asked.offload == "none" and groups[0]["params"][0].is_cuda else {}
    return kind.make(groups, lr=0.0, **settings, **kind.always, **fused), reason


def _meet(deepspeed: Any, world: World) -> None:
    """DeepSpeed wants a process group of one process too."""
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


class EngineGuarded(Guarded):
    """DeepSpeed's engine in the place of a guarded optimizer: the verdict is read on the host before each step."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], engine: Any, inner: Optimizer, asked: DeepSpeedSpec, world: World,
        reason: str | None,
    ) -> None:  # fmt: skip
        super().__init__(named, [inner], HOST, reason)
        self.engine, self.zero, self.stage, self.world = engine, engine.optimizer, asked.zero, world
        self.offloads = asked.offload != "none"
        self.whole = self.stage == 0
        self.held = ZeroState(engine, inner, self.named, self.stage) if self.stage else None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        if self.stage:  # what `engine.forward` would have done: the loop calls the model, not the engine
            self.zero.clear_backward_seen_flag()
            self.engine._backward_prologue()
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def accumulate(self, several: bool) -> None:
        """Weights are in fp32, and so are their gradients."""

    def square(self) -> Tensor:
        """This process's part of the square of the gradients' norm: the sum over all is the whole."""
        if self.stage == 3 and self.offloads:  # the gradients may be on a disk already; their norms are kept
            norms = list(self.zero.norm_for_param_grads.values())
        else:
            norms = list(torch._foreach_norm(self._gradients(), 2, dtype=torch.float32))
        share = 1.0 if self.stage else 1 / self.world.size
        total = torch.stack([norm.to(self.world.device) for norm in norms]).double().square().sum() if norms else None
        return torch.zeros((), device=self.world.device, dtype=torch.float64) if total is None else total * share

    def grad_norm(self) -> Tensor:
        """Of one process alone; of several, `square` is added up."""
        return self.square().sqrt().float()

    def _gradients(self) -> list[Tensor]:
        """This process's parts of them, after the last backward pass of a step."""
        if self.stage == 0:
            return super()._gradients()
        if self.offloads:
            return [flat.grad for flat in self.zero.single_partition_of_fp32_groups]
        return [part for parts in self.zero.averaged_gradients.values() for part in parts or () if part.numel()]

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """As ever, with one read on the host. A vetoed step is dropped before DeepSpeed hears of it."""
        self.set_lr(lr)
        vetoed, by = torch.stack((reject.float(), divisor.float())).tolist()
        if not vetoed and self.stage == 0:
            torch._foreach_div_(self._gradients(), by)
            self.engine.step()
        elif not vetoed:
            self.zero.override_loss_scale(by)
            self.engine.step()
            self.zero.override_loss_scale(1.0)
        self.discard()
        if self.held:
            self.held.keep_head()
        for follow in self.afterwards:
            follow(reject)

    def discard(self) -> None:
        """Drop the gradients and what DeepSpeed remembers of the passes that made them, as its own step would for an
        overflow. Weights, moments and counts are not touched."""
        zero = self.zero
        if self.stage == 0:
            super().discard()
        elif self.stage == 3:
            zero._pre_step()
            zero._overflow_clean_up(1.0)
        else:
            zero.micro_step_id = -1
            zero.zero_grad(set_to_none=True)
            if self.offloads:
                zero._offload_accumulated_param_ids = set()
                zero.reset_cpu_buffers()
            for group in range(len(zero.bit16_groups)):
                zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None

    def remainders(self) -> dict[nn.Parameter, Tensor]:
        return {}

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        return self.held.weights(model) if self.held else super().weights(model)

    def state(self) -> dict[str, Tensor]:
        """Copies on the host, gathered from all: 8 bytes a parameter for AdamW, in every process."""
        return self.held.moments() if self.held else super().state()

    def targets(self, model: nn.Module) -> dict[str, Tensor]:
        return self.held.targets(model) if self.held else super().targets(model)

    def put_back(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        if self.held:
            self.held.put_back(model, state)

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[None]:
        if self.held is None:
            yield
            return
        with self.held.opened(model):
            yield
