"""Weights and moments that ZeRO keeps in flat parts, as whole tensors by name and back: what a checkpoint holds.

A gathered tensor goes to the host's memory at once. Every process holds all of them there while it saves: 4 bytes a
parameter for each of weights (zero 3) and moments. Putting back needs no word from the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
