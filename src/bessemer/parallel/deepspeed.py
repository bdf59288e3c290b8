"""DeepSpeed as the engine of a run: its ZeRO shards the optimizer state and its step updates; everything else is ours.

Clipping and DeepSpeed's loss scale are off. All gradients of a step exist before `engine.step()`, so the verdict is
read on the host in between, and DeepSpeed never sees a rejected step. Our divisor (clipping and fp16's scale) is passed
as an overridden loss scale, by which ZeRO divides in its update. DeepSpeed averages gradients over processes: the loss
is multiplied by their number, so that gradients are sums.

ZeRO keeps weights and moments in flat partitions, one per parameter group and process; `ZeroState` converts them to
full tensors by name for checkpoints, and back. Gathered tensors go to host memory at once: while saving, every process
holds 4 bytes per parameter for each of the weights (ZeRO 3) and moments. Restoring needs no communication.
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
from bessemer.optim.choose import KINDS, build_optimizers, freeze, lr_scales
from bessemer.optim.groups import parameter_groups
from bessemer.optim.guarded import HOST, GuardedOptimizer
from bessemer.parallel.world import World
from bessemer.spec.schema import DeepSpeedSpec, RunSpec

MODEL, OPTIMIZER = "model.", "optimizer."
COUNTS = ("step",)  # one number per flat partition


class ZeroState:
    """The state of one engine's ZeRO optimizer. All methods but `targets` and `put_back` are collective."""

    def __init__(self, engine: Any, inner: Optimizer, named: list[tuple[str, nn.Parameter]], stage: int) -> None:
        self.zero, self.inner, self.named, self.stage = engine.optimizer, inner, named, stage
        self.rank, self.size = engine.global_rank, engine.world_size
        flats = self.zero.fp32_partitioned_groups_flat if stage == 3 else self.zero.single_partition_of_fp32_groups
        self.flat_of = {parameter: flats[self._group(parameter)] for _, parameter in named}
        self._make_state(flats)
        module = engine.module
        self.head = [p for p in (module.head_weight, module.head_bias) if p is not None] if stage == 3 else []
        for parameter in self.head:
            parameter.is_external_param = True  # stays gathered: the loss multiplies by it outside of any layer
        self.gather_head()

    def _group(self, parameter: nn.Parameter) -> int:
        if self.stage == 3:
            return int(self.zero.grad_position[self.zero.get_param_id(parameter)][0])
        return next(i for i, group in enumerate(self.zero.bit16_groups) if any(p is parameter for p in group))

    def gather_head(self) -> None:
        """Gather the head on every process again after a step has partitioned it."""
        missing = [p for p in self.head if p.ds_status.name == "NOT_AVAILABLE"]
        if missing:
            missing[0].all_gather(param_list=missing)

    def _make_state(self, flats: list[Tensor]) -> None:
        """Initialise the state as the optimizer's first step would: a run may be saved or loaded before that."""
        count = 0 if type(self.inner).__name__ == "DeepSpeedCPUAdam" else None  # counts steps in Python
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
        """Weights by name: the model's if it holds them unsharded, otherwise copies on the host."""
        weights = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        if self.stage < 3:
            return weights
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                weights[name] = safe_get_full_fp32_param(parameter).cpu()
            elif any(parameter is p for p in self.head):
                weights[name] = parameter.detach().cpu()
            else:
                with GatheredParameters([parameter]):
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

    def moments(self) -> dict[str, Tensor]:
        """Moments by name, gathered to the host."""
        from deepspeed.utils import safe_get_full_optimizer_state

        moments: dict[str, Tensor] = {}
        for name, parameter in self.named:
            for key in self._keys(parameter):
                if key in COUNTS:
                    moments[f"{name}.{key}"] = torch.tensor(float(self.inner.state[self.flat_of[parameter]][key]))
                else:
                    moments[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).cpu()
        return moments

    def targets(self, model: nn.Module) -> dict[str, Tensor]:
        """Tensors to load into before `put_back`; not collective."""
        targets = {f"{MODEL}{name}": tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        if self.stage == 3:
            targets |= {f"{MODEL}{name}": torch.empty(shape_of(p)) for name, p in model.named_parameters()}
        for name, parameter in self.named:
            for key in self._keys(parameter):
                shape = () if key in COUNTS else shape_of(parameter)
                targets[f"{OPTIMIZER}{name}.{key}"] = torch.empty(shape)
        return targets

    @torch.no_grad()
    def apply_loaded(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Copy weights and moments from the tensors of `targets`, or some of them."""
        if self.stage < 3:
            self.zero.refresh_fp32_params()  # from the model's weights, which were loaded in place
        else:
            for name, parameter in model.named_parameters():
                if (tensor := state.get(f"{MODEL}{name}")) is not None:
                    self._put_weight(parameter, tensor)
        for name, parameter in self.named:
            for key in self._keys(parameter):
                if (tensor := state.get(f"{OPTIMIZER}{name}.{key}")) is not None:
                    self._put_moment(parameter, key, tensor)

    def _put_weight(self, parameter: Any, tensor: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        shard = self._shard(parameter, tensor)
        parameter.ds_tensor.data.copy_(shard.view_as(parameter.ds_tensor))
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, shard)
        if parameter.ds_status.name == "AVAILABLE":  # stays gathered between steps
            parameter.data.copy_(tensor)

    def _put_moment(self, parameter: nn.Parameter, key: str, tensor: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if key in COUNTS:
            state = self.inner.state[self.flat_of[parameter]]
            if isinstance(state[key], Tensor):
                state[key].copy_(tensor)
            else:
                state[key] = int(tensor)
        elif self.stage == 3:
            safe_set_local_optimizer_state(parameter, self._shard(parameter, tensor), key)
        else:
            safe_set_full_optimizer_state(parameter, tensor, key)

    def _shard(self, parameter: Any, tensor: Tensor) -> Tensor:
        """This process's part of a tensor as ZeRO 3 splits it: equal parts, the last padded with zeros."""
        length = parameter.ds_tensor.numel()
        flat = torch.zeros(length * self.size)
        flat[: tensor.numel()] = tensor.flatten()
        return flat[length * self.rank : length * (self.rank + 1)]

    @contextmanager
    def writable_weights(self, model: nn.Module) -> Iterator[None]:
        """The model's weights gathered and writable on all processes alike; changes persist."""
        if self.stage < 3:
            yield
        else:
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters(list(model.parameters()), modifier_rank=0):
                yield
            self.gather_head()
        self.zero.refresh_fp32_params()


def state_keys(name: str, group: dict[str, Any]) -> tuple[str, ...]:
    """The state of an optimizer per flat partition."""
    if name == "SGD":
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg",) if name == "Lion" else ("step", "exp_avg", "exp_avg_sq")


def shape_of(parameter: Any) -> torch.Size:
    """The full shape; with ZeRO 3 the parameter itself is empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


BUCKET = 50_000_000  # gradients or weights per message: 200 MB, where DeepSpeed's default is 2 GB
TESTED = ((0, 19), (0, 20))  # minimum and upper bound: this module uses DeepSpeed's internals


def initialize_deepspeed(model: Decoder, spec: RunSpec, world: World, micro_rows: int) -> GuardedOptimizer:
    """Pass the model to DeepSpeed, in place; returns the optimizer that the loop steps. A collective call."""
    deepspeed = import_deepspeed(world.device)
    settings = spec.parallel.deepspeed
    freeze(model, spec.optimizer.freeze)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    inner, reason = _inner_optimizer(deepspeed, named, spec, lr_scales(model, spec))
    _init_process_group(deepspeed, world)
    config = config_of(settings, model.shape.width, micro_rows, world)
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=config, dist_init_required=False)
    return DeepSpeedOptimizer(named, engine, inner, settings, world, reason)


def import_deepspeed(device: torch.device) -> Any:
    """The package, with quiet logging, for this device. UserError if it is missing or an untested version."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("parallel.engine: deepspeed needs `pip install bessemer[deepspeed]`") from None
    installed = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not TESTED[0] <= installed < TESTED[1]:
        tested = f"deepspeed>={'.'.join(map(str, TESTED[0]))},<{'.'.join(map(str, TESTED[1]))}"
        raise UserError(f"parallel.engine: deepspeed {version} is untested: pip install '{tested}'")
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # It calls deprecated torch functions at every step.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    return deepspeed


def config_of(settings: DeepSpeedSpec, width: int, micro_rows: int, world: World) -> dict[str, Any]:
    """DeepSpeed's configuration. Gradient accumulation is 1 here; each backward pass sets its boundary."""
    on_gpu = world.device.type == "cuda"
    zero: dict[str, Any] = {"stage": settings.zero, "overlap_comm": on_gpu}
    zero |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if settings.zero == 3:
        zero["stage3_param_persistence_threshold"] = 10 * width  # keep vectors unsharded
        zero["memory_efficient_linear"] = False  # it would replace torch's linear function globally
    if settings.offload != "none":
        target: dict[str, Any] = {"device": settings.offload, "pin_memory": on_gpu}
        if settings.offload == "nvme":
            target["nvme_path"] = settings.folder
        zero["offload_optimizer"] = target
        if settings.zero == 3 and settings.offload == "cpu":
            zero["offload_param"] = dict(target)
    return {
        "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # use torch's where DeepSpeed's cannot be built
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _inner_optimizer(
    deepspeed: Any, named: list[tuple[str, nn.Parameter]], spec: RunSpec, scales: dict[str, float]
) -> tuple[Optimizer, str | None]:
    """The optimizer of the flat partitions, and a reason if it is not the preferred one. Without ZeRO it updates the
    parameters."""
    deepspeed_spec, settings = spec.parallel.deepspeed, dict(spec.optimizer.settings())
    if deepspeed_spec.zero == 0:
        [optimizer] = build_optimizers(
            named, spec.optimizer, HOST, scales, spec.memory
        )  # Muon, which has two, is refused
        return optimizer, None
    groups, reason = parameter_groups(named, settings.pop("weight_decay"), scales), None
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    if deepspeed_spec.offload != "none" and spec.optimizer.name in ("adamw", "adam"):
        decoupled = spec.optimizer.name == "adamw"
        try:
            return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=0.0, adamw_mode=decoupled, **settings), None
        except Exception as error:  # a missing or failing compiler raises many kinds
            message = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"DeepSpeed's CPU Adam could not be built ({message}): using torch's"
    kind = KINDS[spec.optimizer.name]
    fused = {"fused": True} if deepspeed_spec.offload == "none" and groups[0]["params"][0].is_cuda else {}
    return kind.make(groups, lr=0.0, **settings, **kind.always, **fused), reason


def _init_process_group(deepspeed: Any, world: World) -> None:
    """DeepSpeed needs a process group even for one process."""
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


class DeepSpeedOptimizer(GuardedOptimizer):
    """DeepSpeed's engine as a guarded optimizer: the verdict is read on the host before each step."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], engine: Any, inner: Optimizer,
        settings: DeepSpeedSpec, world: World, reason: str | None,
    ) -> None:  # fmt: skip
        super().__init__(named, [inner], HOST, reason)
        self.engine, self.zero, self.stage, self.world = engine, engine.optimizer, settings.zero, world
        self.offloads = settings.offload != "none"
        self.whole = self.stage == 0
        self.zero_state = ZeroState(engine, inner, self.named, self.stage) if self.stage else None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        if self.stage:  # as `engine.forward` does; the loop calls the model, not the engine
            self.zero.clear_backward_seen_flag()
            self.engine._backward_prologue()
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def accumulate(self, several: bool) -> None:
        """Weights and gradients are fp32 anyway."""

    def square(self) -> Tensor:
        """This process's share of the squared gradient norm; the sum over all processes is the total."""
        if self.stage == 3 and self.offloads:  # the gradients may be on disk already; their norms are kept
            norms = list(self.zero.norm_for_param_grads.values())
        else:
            norms = list(torch._foreach_norm(self._gradients(), 2, dtype=torch.float32))
        share = 1.0 if self.stage else 1 / self.world.size
        total = torch.stack([norm.to(self.world.device) for norm in norms]).double().square().sum() if norms else None
        return torch.zeros((), device=self.world.device, dtype=torch.float64) if total is None else total * share

    def grad_norm(self) -> Tensor:
        """For one process; with several, `square` is summed."""
        return self.square().sqrt().float()

    def _gradients(self) -> list[Tensor]:
        """This process's shards, after the last backward pass of a step."""
        if self.stage == 0:
            return super()._gradients()
        if self.offloads:
            return [flat.grad for flat in self.zero.single_partition_of_fp32_groups]
        return [part for parts in self.zero.averaged_gradients.values() for part in parts or () if part.numel()]

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """As in the base class, with one read on the host. DeepSpeed never sees a rejected step."""
        self.set_lr(lr)
        rejected, factor = torch.stack((reject.float(), divisor.float())).tolist()
        if not rejected and self.stage == 0:
            torch._foreach_div_(self._gradients(), factor)
            self.engine.step()
        elif not rejected:
            self.zero.override_loss_scale(factor)
            self.engine.step()
            self.zero.override_loss_scale(1.0)
        self.discard()
        if self.zero_state:
            self.zero_state.gather_head()
        for hook in self.post_step_hooks:
            hook(reject)

    def discard(self) -> None:
        """Drop the gradients and DeepSpeed's record of their backward passes, as its own step does on overflow.
        Weights, moments and counts are unchanged."""
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
        return self.zero_state.weights(model) if self.zero_state else super().weights(model)

    def state(self) -> dict[str, Tensor]:
        """Copies on the host, gathered from all processes: 8 bytes per parameter for AdamW, on every process."""
        return self.zero_state.moments() if self.zero_state else super().state()

    def targets(self, model: nn.Module) -> dict[str, Tensor]:
        return self.zero_state.targets(model) if self.zero_state else super().targets(model)

    def apply_loaded(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        if self.zero_state:
            self.zero_state.apply_loaded(model, state)

    @contextmanager
    def writable_weights(self, model: nn.Module) -> Iterator[None]:
        if self.zero_state is None:
            yield
            return
        with self.zero_state.writable_weights(model):
            yield
