"""Weights and moments that ZeRO keeps in flat parts, as whole tensors by name and back: what a checkpoint holds.

A gathered tensor goes to the host's memory at once. Every process holds all of them there while it saves: 4 bytes a
parameter for each of weights (zero 3) and moments. Putting back needs no word from the others.

DeepSpeed as the engine of a run: its ZeRO divides what an optimizer keeps, its step updates; the rest is ours.

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
from bessemer.optim.choose import KINDS, build, freeze, lr_scales, parameter_groups
from bessemer.optim.guarded import HOST, GuardedOptimizer
from bessemer.parallel.world import World
from bessemer.spec.parallel import DeepSpeedSpec
from bessemer.spec.schema import RunSpec

MODEL, OPTIMIZER = "model.", "optimizer."
COUNTS = ("step",)  # one number for a whole flat part


class ZeroState:
    """What one engine's ZeRO optimizer holds. All but `targets` and `put_back` are asked of all processes together."""

    def __init__(self, engine: Any, inner: Optimizer, named: list[tuple[str, nn.Parameter]], stage: int) -> None:
        self.zero, self.inner, self.named, self.stage = engine.optimizer, inner, named, stage
        self.rank, self.size = engine.global_rank, engine.world_size
        flats = self.zero.fp32_partitioned_groups_flat if stage == 3 else self.zero.single_partition_of_fp32_groups
        self.flat_of = {parameter: flats[self._group(parameter)] for _, parameter in named}
        self._make_state(flats)
        module = engine.module
        self.head = [p for p in (module.head_weight, module.head_bias) if p is not None] if stage == 3 else []
        for parameter in self.head:
            parameter.is_external_param = True  # no layer lets go of it: the loss multiplies by it outside of any
        self.keep_head()

    def _group(self, parameter: nn.Parameter) -> int:
        if self.stage == 3:
            return int(self.zero.grad_position[self.zero.get_param_id(parameter)][0])
        return next(i for i, group in enumerate(self.zero.bit16_groups) if any(p is parameter for p in group))

    def keep_head(self) -> None:
        """Have the head whole in every process again, after a step has divided it."""
        missing = [p for p in self.head if p.ds_status.name == "NOT_AVAILABLE"]
        if missing:
            missing[0].all_gather(param_list=missing)

    def _make_state(self, flats: list[Tensor]) -> None:
        """State as the optimizer would make it in its first step: a run may be saved, or loaded, before that."""
        count = 0 if type(self.inner).__name__ == "DeepSpeedCPUAdam" else None  # which counts in Python
        for flat, group in self._flat_groups(flats):
            for key in state_keys(type(self.inner).__name__, group):
                value: Any = torch.zeros_like(flat, requires_grad=False)
                if key in COUNTS:
                    on_device = group.get("fused") and flat.is_cuda
                    value = torch.zeros((), device=flat.device if on_device else "cpu") if count is None else count
                self.inner.state[flat][key] = value
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def _flat_groups(self, flats: list[Tensor]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        of_group = self.zero.sub_group_to_group_id if self.stage == 3 else range(len(flats))
        for i, flat in enumerate(flats):
            yield flat, self.inner.param_groups[of_group[i]]

    def _keys(self, parameter: nn.Parameter) -> list[str]:
        return list(self.inner.state[self.flat_of[parameter]])

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """By name: those of the model where it has them whole, else copies on the host."""
        found = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        if self.stage < 3:
            return found
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[name] = safe_get_full_fp32_param(parameter).cpu()
            elif any(parameter is p for p in self.head):
                found[name] = parameter.detach().cpu()
            else:
                with GatheredParameters([parameter]):
                    found[name] = parameter.detach().to("cpu", copy=True)
        return found

    def moments(self) -> dict[str, Tensor]:
        """By name, gathered to the host."""
        from deepspeed.utils import safe_get_full_optimizer_state

        found: dict[str, Tensor] = {}
        for name, parameter in self.named:
            for key in self._keys(parameter):
                if key in COUNTS:
                    found[f"{name}.{key}"] = torch.tensor(float(self.inner.state[self.flat_of[parameter]][key]))
                else:
                    found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).cpu()
        return found

    def targets(self, model: nn.Module) -> dict[str, Tensor]:
        """Tensors to load into, before they are put back; nobody else is asked."""
        found = {f"{MODEL}{name}": tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        if self.stage == 3:
            found |= {f"{MODEL}{name}": torch.empty(shape_of(p)) for name, p in model.named_parameters()}
        for name, parameter in self.named:
            for key in self._keys(parameter):
                shape = () if key in COUNTS else shape_of(parameter)
                found[f"{OPTIMIZER}{name}.{key}"] = torch.empty(shape)
        return found

    @torch.no_grad()
    def put_back(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Fill weights and moments from what was loaded into `targets`, or into some of them."""
        if self.stage < 3:
            self.zero.refresh_fp32_params()  # from the model's own, which were loaded in place
        else:
            for name, parameter in model.named_parameters():
                if (whole := state.get(f"{MODEL}{name}")) is not None:
                    self._put_weight(parameter, whole)
        for name, parameter in self.named:
            for key in self._keys(parameter):
                if (whole := state.get(f"{OPTIMIZER}{name}.{key}")) is not None:
                    self._put_moment(parameter, key, whole)

    def _put_weight(self, parameter: Any, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        part = self._part(parameter, whole)
        parameter.ds_tensor.data.copy_(part.view_as(parameter.ds_tensor))
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, part)
        if parameter.ds_status.name == "AVAILABLE":  # kept whole between steps
            parameter.data.copy_(whole)

    def _put_moment(self, parameter: nn.Parameter, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if key in COUNTS:
            held = self.inner.state[self.flat_of[parameter]]
            if isinstance(held[key], Tensor):
                held[key].copy_(whole)
            else:
                held[key] = int(whole)
        elif self.stage == 3:
            safe_set_local_optimizer_state(parameter, self._part(parameter, whole), key)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This process's part of a tensor as zero 3 cuts it: equal parts, the last filled up with zeros."""
        length = parameter.ds_tensor.numel()
        flat = torch.zeros(length * self.size)
        flat[: whole.numel()] = whole.flatten()
        return flat[length * self.rank : length * (self.rank + 1)]

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[None]:
        """The model's weights whole and to be written to, by all alike; what is written stays."""
        if self.stage < 3:
            yield
        else:
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters(list(model.parameters()), modifier_rank=0):
                yield
            self.keep_head()
        self.zero.refresh_fp32_params()


def state_keys(name: str, group: dict[str, Any]) -> tuple[str, ...]:
    """What an optimizer keeps for a flat part."""
    if name == "SGD":
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg",) if name == "Lion" else ("step", "exp_avg", "exp_avg_sq")


def shape_of(parameter: Any) -> torch.Size:
    """Of the whole; zero 3 leaves nothing at the parameter itself."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


BUCKET = 50_000_000  # gradients or weights that are sent together: 200 MB, where DeepSpeed would take 2 GB
KNOWN = ((0, 19), (0, 20))  # from and below: what is read of DeepSpeed's insides was tried with these


def engage(model: Decoder, spec: RunSpec, world: World, micro_rows: int) -> GuardedOptimizer:
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


class EngineGuarded(GuardedOptimizer):
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
