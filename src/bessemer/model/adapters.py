"""Low-rank adapters (LoRA, rsLoRA, DoRA, PiSSA) beside the linear layers of a model, and factors on them (IA3). Virtual
tokens (prompt and prefix tuning) are in virtual_tokens.py.

A layer is converted in place and keeps its name and weight: `blocks.0.attention.query.weight` stays, `.lora_a` and
`.lora_b` are added, and `.lora_scale` makes a checkpoint complete without its spec. The weight is never written to.
PiSSA's residual weight is therefore not stored: its initial factors are subtracted in every pass, which is the same
function (and exactly that of the base at the start). `modules_to_save` get a trained copy beside their weight.
`adapters_off` gives the function of the base model, bit for bit. Legend: R rank, O and I outputs and inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.dtensor import copy_shard, is_dtensor, local
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder, generator_for
from bessemer.model.virtual_tokens import VIRTUAL, VIRTUAL_KINDS, VirtualTokens, add_virtual, init_virtual
from bessemer.spec.adapter import AdapterSpec
from bessemer.spec.quantity import human_count
from bessemer.spec.trained import expand_ranges

if TYPE_CHECKING:
    from bessemer.model.attention_mask import AttentionMask

# Added to a layer.
PARTS = (
    "lora_a", "lora_b", "lora_scale", "initial_a", "initial_b", "magnitude", "trained", VIRTUAL, "ia3_in", "ia3_out",
)  # fmt: skip
MARKS = (".lora_a", ".trained", ".ia3_in", ".ia3_out")  # each adapted layer has one of them
IA3_TARGETS = ("key", "value", "down")
# The names of PEFT's users for native ones.
ALIASES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate"}
ALIASES |= {"up_proj": "up", "down_proj": "down", "embed_tokens": "embedding", "lm_head": "head"}
MERGE_TOLERANCE = 1e-4  # of a merged layer's output, besides the rounding of the merged weight


class AdapterLinear(nn.Linear):
    """y = W x + b + scale * B A dropout(x). DoRA also gives each row of W + scale * B A the trained length."""

    lora_a: nn.Parameter  # (R, I)
    lora_b: nn.Parameter  # (O, R)
    lora_scale: Tensor
    initial_a: nn.Parameter | None  # of PiSSA
    initial_b: nn.Parameter | None
    magnitude: nn.Parameter | None  # (O,) of DoRA
    adapter_dropout: float
    active: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return F.linear(x, self.weight, self.bias)
        h = F.dropout(x, self.adapter_dropout, self.training) if self.adapter_dropout else x
        if self.magnitude is None and self.initial_a is None:
            narrow = F.linear(h, self.lora_a) * self.lora_scale
            y = F.linear(x, self.weight, self.bias)
            if is_dtensor(y) or is_dtensor(self.lora_b):
                return y + F.linear(narrow, self.lora_b)
            # One product adds to the other's result: no pass over a wide activation for the sum.
            return torch.addmm(y.flatten(0, -2), narrow.flatten(0, -2), self.lora_b.t()).view(y.shape)
        low = F.linear(F.linear(h, self.lora_a), self.lora_b)
        if self.initial_a is not None and self.initial_b is not None:
            low = low - F.linear(F.linear(x, self.initial_a), self.initial_b)
        low = low * self.lora_scale
        if self.magnitude is None:
            return F.linear(x, self.weight, self.bias) + low
        y = F.linear(x, self.weight)
        dropped = F.linear(h, self.weight) if self.adapter_dropout and self.training else y
        factor_O = (self.magnitude / self.row_norms()).to(y.dtype)
        y = y + (factor_O - 1) * dropped + factor_O * low
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def row_norms(self) -> Tensor:
        """Lengths of the rows of W + scale * B A, without a gradient, as DoRA's authors compute them."""
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            delta_OI = self.lora_b.float() @ self.lora_a.float()
            return torch.linalg.vector_norm(self.weight.float() + self.lora_scale * delta_OI, dim=1)

    def merged_weight(self) -> Tensor:
        """The weight that computes as this layer does; for latent attention, which multiplies by it otherwise."""
        return self.weight if not self.active else merge("kv", self.weight.detach(), _parts(self))


class ScaledLinear(nn.Linear):
    """IA3: a trained factor of each output, or of each input (of `down`: of the feed-forward units)."""

    ia3_in: nn.Parameter | None  # (I,)
    ia3_out: nn.Parameter | None  # (O,)
    active: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.active and self.ia3_in is not None:
            x = x * self.ia3_in.to(x.dtype)
        y = F.linear(x, self.weight, self.bias)
        return y * self.ia3_out.to(y.dtype) if self.active and self.ia3_out is not None else y

    def merged_weight(self) -> Tensor:
        return self.weight if not self.active else scaled("weight", self.weight.detach(), _parts(self))


def scaled(part: str, tensor: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight or bias that computes as an IA3 layer does."""
    result = tensor.double()
    if "ia3_out" in parts:
        factor_O = parts["ia3_out"].double()
        result = result * (factor_O[:, None] if part == "weight" else factor_O)
    if "ia3_in" in parts and part == "weight":
        result = result * parts["ia3_in"].double()
    return result.to(tensor.dtype)


class TrainedEmbedding(nn.Embedding):
    """An embedding with a trained copy of its weight, which is used unless adapters are off."""

    trained: nn.Parameter
    active: bool

    @property
    def active_weight(self) -> Tensor:
        return self.trained if self.active else self.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.active_weight)


class TrainedHead(nn.Linear):
    """The same for an output embedding, which the loss multiplies by itself."""

    trained: nn.Parameter
    active: bool

    @property
    def active_weight(self) -> Tensor:
        return self.trained if self.active else self.weight


LAYERS = (AdapterLinear, ScaledLinear)
ADAPTED = (*LAYERS, TrainedEmbedding, TrainedHead, VirtualTokens)


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """The converted modules by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ADAPTED)}


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that `all-linear` adapts: those of all blocks. Routers and stacked experts stay frozen."""
    blocks = getattr(model, "blocks", None)
    inside = {module for block in blocks or () for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside and "router" not in name
    }


def matching_layers(names: Collection[str], targets: str | Sequence[str]) -> list[str]:
    """The layers that the patterns name; UserError for a pattern that matches nothing."""
    if not names:
        raise UserError(
            "adapter: the model has no torch.nn.Linear layer in its blocks: train it in full, without adapter"
        )
    if targets == "all-linear":
        return list(names)
    chosen: set[str] = set()
    for target in targets:
        hits = _hits(names, target) or _hits(names, ALIASES.get(target, target))
        if not hits:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"adapter.targets: {target!r} matches no linear layer: write all-linear, or some of {ends}")
        chosen |= hits
    return [name for name in names if name in chosen]


def _hits(names: Collection[str], target: str) -> set[str]:
    globs = list(expand_ranges(target))
    return {
        name
        for name in names
        if any(fnmatchcase(name, form) for g in globs for form in (g, f"*.{g}", f"{g}.*", f"*.{g}.*"))
    }


def add_adapters(model: Decoder, spec: AdapterSpec, rank: int, alpha: float) -> list[str]:
    """Freeze the model and convert the layers that the spec targets; returns their names. The parts are allocated like
    the weights, on their device; `init_adapters` fills them later. A new head of labels trains."""
    new_head = {f"{name}." for name in ("head", "transform") if model.shape.labels}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(new_head)) or (bool(model.shape.labels) and name == "head_bias"))
    if spec.kind in VIRTUAL_KINDS:
        return add_virtual(model, spec.kind, spec.virtual_tokens)
    layers = linear_layers(model)
    targets = IA3_TARGETS if spec.kind == "ia3" and spec.targets == "all-linear" else spec.targets
    names = matching_layers(layers, targets)
    for name in names:
        if spec.kind == "pissa" and rank > min(layers[name].weight.shape):
            size = " x ".join(map(str, layers[name].weight.shape))
            raise UserError(f"adapter.rank: {rank} exceeds {name} ({size}), which pissa decomposes: write a lower rank")
        if spec.kind == "ia3":
            _convert_ia3(layers[name], on_input=name.endswith(".down"))
        else:
            _convert(layers[name], spec, rank, spec.scale(rank, alpha))
    for name in spec.modules_to_save:
        module = getattr(model, name, None)
        if module is None or (name == "head" and model.shape.labels):
            why = "the head of labels trains anyway" if model.shape.labels else "the head is the embedding"
            raise UserError(f"adapter.modules_to_save: head: {why}: write embedding, or remove it")
        module.__class__ = TrainedEmbedding if name == "embedding" else TrainedHead
        module.trained, module.active = nn.Parameter(torch.empty_like(module.weight)), True
    return names


def _convert_ia3(layer: nn.Module, on_input: bool) -> None:
    assert isinstance(layer, nn.Linear)
    size = layer.weight.shape[1 if on_input else 0]
    factor = nn.Parameter(torch.empty(size, device=layer.weight.device))
    layer.__class__ = ScaledLinear
    assert isinstance(layer, ScaledLinear)
    layer.ia3_in, layer.ia3_out, layer.active = factor if on_input else None, None if on_input else factor, True


def _convert(layer: nn.Module, spec: AdapterSpec, rank: int, scale: float) -> None:
    assert isinstance(layer, nn.Linear)
    outputs, inputs = layer.weight.shape
    layer.__class__ = AdapterLinear
    assert isinstance(layer, AdapterLinear)
    layer.adapter_dropout, layer.active = spec.dropout, True

    def empty(*shape: int, trained: bool = True, vector: bool = False) -> nn.Parameter:
        dtype = torch.float32 if vector else layer.weight.dtype  # vectors are always float32
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=layer.weight.device), requires_grad=trained)

    pissa, dora = spec.kind == "pissa", spec.kind == "dora"
    layer.lora_a, layer.lora_b = empty(rank, inputs), empty(outputs, rank)
    layer.initial_a = empty(rank, inputs, trained=False) if pissa else None
    layer.initial_b = empty(outputs, rank, trained=False) if pissa else None
    layer.magnitude = empty(outputs, vector=True) if dora else None
    layer.register_buffer("lora_scale", torch.full((), scale, device=layer.weight.device))


@torch.no_grad()
def clear_adapters(model: nn.Module) -> None:
    """All parts zero, factors one: the base model, until weights are loaded."""
    for module in adapted_modules(model).values():
        for tensor in _parts(module).values():
            local(tensor).fill_(isinstance(module, ScaledLinear))


def describe_adapters(model: nn.Module) -> str:
    """How many layers are adapted and how much trains."""
    modules = adapted_modules(model).values()
    layers = sum(isinstance(module, LAYERS) for module in modules)
    trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True))
    size = f"{human_count(trained)} of {human_count(total)} parameters train ({trained / total:.2%})"
    if virtual := next((module.count for module in modules if isinstance(module, VirtualTokens)), 0):
        return f"{virtual} virtual tokens; {size}"
    stacks = "; experts stay frozen" if any(name.endswith(".ffn.down") for name, _ in model.named_parameters()) else ""
    return f"{layers} linear layers; {size}{stacks}"


@torch.no_grad()
def init_adapters(
    model: nn.Module, spec: AdapterSpec, scale: float, seed: int, given: Mapping[str, Tensor] | None = None
) -> None:
    """The adapters of a new run, once the base's weights are loaded: `given` ones by name, else A uniform as in PEFT
    (Kaiming, a = sqrt(5)), B zero, DoRA's magnitudes the lengths of the rows, PiSSA's factors from a decomposition of
    each matrix. Each matrix draws from its own generator, so that every layout starts with the same values. Collective
    if the weights are sharded."""
    if spec.kind in VIRTUAL_KINDS and not given:
        assert isinstance(model, Decoder)
        init_virtual(model, seed)
    for name, module in adapted_modules(model).items():
        if isinstance(module, ScaledLinear | VirtualTokens):
            continue  # factors are one
        if not isinstance(module, AdapterLinear):
            local(module.trained).copy_(local(module.weight))
            continue
        module.lora_scale.fill_(scale)
        if spec.kind == "pissa":
            a, b = principal_factors(_full(module.weight), module.lora_a.shape[0], scale)
            for part, value in (("lora_a", a), ("lora_b", b), ("initial_a", a), ("initial_b", b)):
                copy_shard(getattr(module, part), value)
        else:
            bound = math.sqrt(1 / module.in_features)
            generator = generator_for(f"{name}.lora_a", seed, torch.device("cpu"))
            drawn = torch.empty(module.lora_a.shape).uniform_(-bound, bound, generator=generator)
            copy_shard(module.lora_a, drawn)
            local(module.lora_b).zero_()
        if module.magnitude is not None:  # rows are sharded like the weight's
            local(module.magnitude).copy_(torch.linalg.vector_norm(local(module.weight).float(), dim=1))
    parameters = dict(model.named_parameters())
    for name, value in (given or {}).items():
        if name.endswith(".lora_scale"):
            continue
        if parameters[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, the model's {tuple(parameters[name].shape)}"
            raise UserError(f"adapter.path: {spec.path}: {name} has shape {shapes}: the adapter is for another model")
        copy_shard(parameters[name], value)


def check_scale(model: nn.Module, scale: float, checkpoint: str) -> None:
    """Refuses a resume with another alpha or kind: the adapter would compute something else."""
    for module in adapted_modules(model).values():
        if isinstance(module, AdapterLinear) and not math.isclose(float(module.lora_scale), scale, rel_tol=1e-6):
            saved = f"the adapter of {checkpoint} is scaled by {float(module.lora_scale):g}, not {scale:g}"
            raise UserError(f"adapter.alpha: {saved}: put alpha and kind back, or name a new run")


def _full(weight: Tensor) -> Tensor:
    return weight.full_tensor() if is_dtensor(weight) else weight


def principal_factors(weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """PiSSA's A and B (Meng et al. 2024): scale * B A is the best approximation of that rank. Computed in float64 on
    the CPU, with a fixed sign of each vector, so that all ranks find the same."""
    u_OK, s_K, v_KI = torch.linalg.svd(weight_OI.detach().cpu().double(), full_matrices=False)
    u_OR, v_RI, root_R = u_OK[:, :rank], v_KI[:rank], (s_K[:rank] / scale).sqrt()
    sign_R = torch.where(v_RI.gather(1, v_RI.abs().argmax(1, keepdim=True))[:, 0] < 0, -1.0, 1.0).double()
    a_RI, b_OR = v_RI * (sign_R * root_R)[:, None], u_OR * (sign_R * root_R)
    return a_RI.to(weight_OI.dtype), b_OR.to(weight_OI.dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes as its base inside the block: the reference of preference training, without a second copy."""
    modules = list(adapted_modules(model).values())
    before = [module.active for module in modules]
    try:
        for module in modules:
            module.active = False
        yield
    finally:
        for module, active in zip(modules, before, strict=True):
            module.active = active


class BaseModel:
    """A model with its adapters off, for objectives that use a frozen reference. Shares all memory with the model."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens_BT: Tensor, attention_mask: AttentionMask | None = None, **more: Any) -> Tensor:
        with torch.no_grad(), adapters_off(self.model):
            hidden_BTW: Tensor = self.model(tokens_BT, attention_mask, **more)
        return hidden_BTW

    @property
    def head_weight(self) -> Tensor:
        with adapters_off(self.model):
            return self.model.head_weight.detach()

    def logits(self, hidden_BTW: Tensor) -> Tensor:
        with torch.no_grad(), adapters_off(self.model):
            return self.model.logits(hidden_BTW)


@contextmanager
def using_adapter(model: nn.Module, adapter: Mapping[str, Tensor]) -> Iterator[None]:
    """Another adapter of the same base inside the block, for inference: tensors by name, as `read_adapter` (PEFT) and
    checkpoints have them. Ranks may differ; layers that it does not adapt compute as the base."""
    modules = adapted_modules(model)
    if unknown := {name.rpartition(".")[0] for name in adapter} - set(modules):
        raise UserError(f"the adapter changes {min(unknown)}, which has no adapter here: add it to the targets")
    saved = {name: (module.active, _parts(module)) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            given = {part: adapter[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in adapter}
            like = module.virtual if isinstance(module, VirtualTokens) else module.weight
            module.active = bool(given)
            for part in _parts(module):
                setattr(module, part, None)
            for part, tensor in given.items():
                kind = torch.float32 if tensor.ndim < 2 else like.dtype
                tensor = tensor.to(like.device, kind)
                setattr(module, part, tensor if part == "lora_scale" else nn.Parameter(tensor, requires_grad=False))
        yield
    finally:
        for name, (active, parts) in saved.items():
            modules[name].active = active
            for part in _parts(modules[name]).keys() | parts.keys():
                setattr(modules[name], part, parts.get(part))


def _parts(module: nn.Module) -> dict[str, Tensor]:
    return {part: tensor for part in PARTS if (tensor := getattr(module, part, None)) is not None}


def merge(name: str, weight_OI: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight that computes as the layer with its adapter does, in the weight's dtype. In float64, so that every
    machine gets the same bits. Compares the outputs of both for random inputs."""
    a, b, scale = parts["lora_a"].double(), parts["lora_b"].double(), float(parts["lora_scale"])
    base, delta = weight_OI.double(), b @ a
    if "initial_a" in parts:
        delta -= parts["initial_b"].double() @ parts["initial_a"].double()
    merged = base + scale * delta
    factor_O = torch.ones_like(base[:, 0])
    if "magnitude" in parts:
        factor_O = parts["magnitude"].double() / torch.linalg.vector_norm(merged, dim=1)
        merged *= factor_O[:, None]
    result = merged.to(weight_OI.dtype)
    x_IK = torch.randn(base.shape[1], 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        base.device
    )
    low_OK = b @ (a @ x_IK)
    if "initial_a" in parts:
        low_OK -= parts["initial_b"].double() @ (parts["initial_a"].double() @ x_IK)
    expected_OK, actual_OK = factor_O[:, None] * (base @ x_IK + scale * low_OK), result.double() @ x_IK
    gap = float((actual_OK - expected_OK).abs().max() / expected_OK.abs().max().clamp(min=1e-30))
    if not gap <= MERGE_TOLERANCE + torch.finfo(weight_OI.dtype).eps:  # NaN is wrong
        raise UserError(f"{name}: the merged weight differs from weight and adapter by {gap:.1e}: not merged")
    return result


class MergedWeights(Mapping[str, Tensor]):
    """The weights of a model whose adapters are merged, read on access from tensors by name. Without adapters, the
    tensors themselves."""

    def __init__(self, tensors: Mapping[str, Tensor], blank: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        self._tensors, self._blank = tensors, blank
        if virtual := next((name for name in tensors if name.endswith(f".{VIRTUAL}")), None):
            raise UserError(
                f"{virtual}: virtual tokens of prompt or prefix tuning cannot be merged into weights: generate with "
                "the run itself, or write them for PEFT with `bessemer export RUN --to peft`"
            )
        self.adapted = {name.rpartition(".")[0] for name in tensors if name.endswith(MARKS)}

    def __getitem__(self, name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        factors = {key: self._tensors[full] for key in PARTS[-2:] if (full := f"{module}.{key}") in self._tensors}
        if factors and not is_part(name):
            return scaled(part, self._tensors[name], factors)
        if part != "weight" or module not in self.adapted:
            return self._tensors[name]
        if f"{module}.trained" in self._tensors:
            return self._tensors[f"{module}.trained"]
        names = {part: f"{module}.{part}" for part in PARTS if f"{module}.{part}" in self._tensors}
        return merge(module, self._tensors[name], {part: self._tensors[full] for part, full in names.items()})

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if not is_part(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def blank(self) -> dict[str, Tensor]:
        """All weights by name, on the meta device."""
        assert self._blank is not None
        return {name: tensor for name, tensor in self._blank().items() if not is_part(name)}


def is_part(name: str) -> bool:
    """Whether a tensor of that name belongs to an adapter."""
    return name.rpartition(".")[2] in PARTS
