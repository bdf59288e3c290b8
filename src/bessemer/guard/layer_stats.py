"""Layer statistics: samples gradients, updates, activations, units and attention of each layer, and detects trouble.

`record_gradients` and `record_updates` surround the optimizer's step; `sample` runs a few rows through the model with
temporary hooks. Steps without a sample cost nothing, and training keeps its fused attention. Everything stays on the
device until `LayerMeasurement.read`, which is one transfer; reading a step later does not wait.

The detector calls a layer bad after two bad samples in a row, against fixed bounds where theory gives them and
otherwise against its own last samples. Outliers stay out of that history, but for no more samples than it holds.

Legend: B rows, Q sampled queries, S keys, N query heads, K key-value heads, G query heads to a key, D head size,
F units, R positions of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.guard.alarm import Alarm, debounce, make_alarm, median, theil_sen
from bessemer.model.attention import AttentionInputs, SelfAttention
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import FeedForward
from bessemer.model.moe import router_shares
from bessemer.model.transformer import Decoder, TransformerBlock
from bessemer.optim.low_memory import join_weights
from bessemer.parallel.shard import local, replica_share
from bessemer.parallel.world import World
from bessemer.spec.guard import GuardSpec

SAMPLE = 4096  # sampled elements of a parameter
QUERIES = 64  # positions whose attention is computed in full
GATE = 8.0  # beyond this, silu is 0 or the identity within 0.3 %
DEAD = 1e-3  # a unit is dead if its largest output is below this share of the others' (of their 90 % quantile: a few
# units of large models are a thousand times the rest)


@dataclass
class LayerSample:
    """Numbers on the device: for each quantity the layers in which it was measured."""

    rows: dict[str, list[str]]
    numbers: Tensor
    router: dict[str, int] = field(default_factory=dict)  # experts of each layer that has them

    def read(self) -> dict[str, Any]:
        """`{"layers": {layer: {quantity: value}}}`, and `router` with the expert loads; one transfer to the host."""
        values = iter(self.numbers.tolist())
        layers: dict[str, dict[str, float]] = {}
        for quantity, names in self.rows.items():
            for name in names:
                layers.setdefault(name, {})[quantity] = next(values)
        router = {name: [next(values) for _ in range(count)] for name, count in self.router.items()}
        return {"layers": layers, **({"router": router} if router else {})}


def layer_of(name: str) -> str:
    """`blocks.3.ffn.up.weight` belongs to `blocks.3`, `embedding.weight` to `embedding`, and of a wrapped model
    `inner.model.layers.3.mlp.up_proj.weight` to `blocks.3`."""
    parts = name.split(".")
    if parts[0] == "inner":
        number = next((part for part in parts if part.isdigit()), None)
        return f"blocks.{number}" if number else ".".join(parts[-2:-1])
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


class LayerStats:
    """Samples one model. All ranks sample the same steps: norms are of full layers, the rest is of rank 0's rows."""

    def __init__(
        self, model: Decoder, remainders: Mapping[nn.Parameter, Tensor] | None = None, world: World | None = None
    ) -> None:
        self._world = world or World()
        self._remainders = remainders or {}  # low halves of bf16 weights: an update may be smaller than bf16 resolves
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        local_layers = list(dict.fromkeys(layer_of(name) for name, _ in named))
        # Pipeline stages hold different layers; each lists the layers of all.
        self.layers = list(dict.fromkeys(name for names in self._world.gather(local_layers) for name in names))
        at = [self.layers.index(layer_of(name)) for name, _ in named]
        device = self.parameters[0].device if named else self._world.device  # nothing trains in a frozen stage
        self._at = torch.tensor(at, dtype=torch.long, device=device)  # made once: a copy to a GPU synchronizes
        # In a sum over all processes, a replicated parameter counts by its share on each.
        shares = [replica_share(parameter, self._world) for parameter in self.parameters]
        self._shares = torch.tensor(shares, device=self._at.device)
        self._samples: list[Tensor] = []
        self._quantities: dict[str, tuple[list[str], Tensor]] = {}

    def _by_layer(self, tensors: list[Tensor]) -> Tensor:
        """Norms of layers from one tensor per parameter."""
        norms = torch._foreach_norm([local(tensor) for tensor in tensors]) if tensors else ()
        squares = _exact(torch.stack(norms)) ** 2 if norms else self._shares
        squares = squares * self._shares if self._world.size > 1 else squares
        return self._world.add(squares.new_zeros(len(self.layers)).index_add_(0, self._at, squares)).sqrt()

    def _sampled_weights(self) -> list[Tensor]:
        """Evenly spaced elements of each parameter; the stride is odd so that it does not stay in one column."""

        def some(tensor: Tensor) -> Tensor:
            flat = local(tensor.detach()).reshape(-1)
            return flat[:: (flat.numel() // SAMPLE) | 1]

        rests = self._remainders
        parts = [join_weights(some(p), some(rests[p])) if p in rests else _exact(some(p)) for p in self.parameters]
        # one copy kernel instead of hundreds
        return list(torch.cat(parts).split([len(part) for part in parts])) if parts else []

    @torch.no_grad()
    def record_gradients(self, scale: Tensor | float = 1.0) -> None:
        """Before the optimizer's step: gradient norms before clipping. A missing gradient counts as 0; `scale` is the
        factor that gradients are too large by."""
        grads = [p.new_zeros(1) if p.grad is None else p.grad for p in self.parameters]
        self._quantities = {"grad_norm": (self.layers, self._by_layer(grads) / scale)}
        self._samples = self._sampled_weights()

    @torch.no_grad()
    def record_updates(self) -> None:
        """After the optimizer's step: how far the sampled weights moved, relative to their norm."""
        after = self._sampled_weights()
        moved = self._by_layer(list(torch._foreach_sub(after, self._samples)) if after else [])
        self._quantities["update_ratio"] = (self.layers, moved / self._by_layer(self._samples).clamp(min=1e-12))
        self._quantities["weight_norm"] = (self.layers, self._by_layer([p.detach() for p in self.parameters]))
        self._samples = []

    @torch.no_grad()
    def sample(
        self, model: Decoder, tokens_BT: Tensor, sight: AttentionMask | None = None, **more: Tensor
    ) -> LayerSample:
        """Runs a row or two under the caller's precision, without touching training. `more` is for an encoder.

        On an H200 a sample (without the transfer) took 26 ms at 18M parameters, nearly all of it kernel launches, and
        35 ms at 1B with 2 of 8 rows: choose the interval accordingly.
        """
        seen: list[dict[str, Tensor]] = [{} for _ in model.blocks]
        if not self._world.layout.inner:  # otherwise no process has a full layer or row
            with ExitStack() as hooks:
                for block, values in zip(model.blocks, seen, strict=True):
                    hooks.enter_context(_watching(block, values))
                model(tokens_BT, sight, **more)
        quantities = dict(self._quantities)
        for quantity in dict.fromkeys(quantity for values in seen for quantity in values):
            present = [i for i, values in enumerate(seen) if quantity in values]  # layers may differ in type
            quantities[quantity] = ([f"blocks.{i}" for i in present], torch.stack([seen[i][quantity] for i in present]))
        self._quantities = {}
        shares = router_shares(model)
        numbers = self._world.broadcast_tensor(
            torch.cat([*(values for _, values in quantities.values()), *shares.values()])
        )
        router = {name: len(values) for name, values in shares.items()}
        return LayerSample({quantity: layers for quantity, (layers, _) in quantities.items()}, numbers, router)


@contextmanager
def _watching(block: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Hooks on one block that fill `values`, for as long as the context lasts."""

    def output(module: nn.Module, inputs: Any, given: Any) -> None:
        x_BTW = _exact(given[0] if isinstance(given, tuple) else given)  # some wrapped layers say more
        values["rms"], values["largest"] = x_BTW.square().mean().sqrt(), x_BTW.abs().max()

    def gate(module: nn.Module, inputs: Any, gate_BTF: Tensor) -> None:
        flat_RF = gate_BTF.flatten(0, -2)
        values["closed"], values["saturated"] = (flat_RF.amax(0) <= -GATE, (flat_RF.amin(0) >= GATE).float().mean())

    def units(module: nn.Module, inputs: tuple[Tensor]) -> None:
        largest_F = _exact(inputs[0]).flatten(0, -2).abs().amax(0)
        usual = largest_F.kthvalue(max(1, int(0.9 * len(largest_F)))).values
        closed_F = values.pop("closed", torch.zeros((), dtype=torch.bool, device=largest_F.device))
        values["dead"] = ((largest_F <= DEAD * usual) | closed_F).float().mean()

    def attention(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(module, SelfAttention)
        values["logit"], values["entropy"] = attention_numbers(module, *inputs[:2])

    handles = [block.register_forward_hook(output)]
    if isinstance(block, TransformerBlock) and block.has_attention:
        handles.append(block.attention.register_forward_pre_hook(attention))
    if isinstance(block, TransformerBlock) and block.has_ffn and isinstance(block.ffn, FeedForward):
        if block.ffn.gate is not None and block.shape.activation == "silu":
            handles.append(block.ffn.gate.register_forward_hook(gate))
        handles.append(block.ffn.down.register_forward_pre_hook(units))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _exact(x: Tensor) -> Tensor:
    """bf16 sums lose digits; float64 models keep theirs."""
    return x if x.dtype == torch.float64 else x.float()


def attention_numbers(attention: SelfAttention, x_BTW: Tensor, place: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The largest visible logit by size, and the mean entropy of attention as a share of the largest possible.

    All heads, at most QUERIES positions of each row. A position that sees only itself has no entropy to lose.
    """
    B, T, _ = x_BTW.shape
    places_Q = torch.arange(0, T, max(1, T // QUERIES), device=x_BTW.device)
    q_BTND, k_BTKD, _ = attention.project(x_BTW, attention.rotary(place))
    q_BQKGD = _exact(q_BTND[:, places_Q]).unflatten(2, (k_BTKD.shape[2], -1))
    with torch.autocast(x_BTW.device.type, enabled=False):  # which would round the logits to bf16
        logits_BKGQS = torch.einsum("bqkgd,bskd->bkgqs", q_BQKGD, _exact(k_BTKD)) * attention.scale
    if (cap := attention.shape.attention_cap) is not None:
        logits_BKGQS = cap * torch.tanh(logits_BKGQS / cap)
    if place.bias_1NTS is not None:
        logits_BKGQS = logits_BKGQS + place.bias_1NTS[:, :, places_Q].unflatten(1, logits_BKGQS.shape[1:3])
    rows_B11, keys_T = torch.arange(B, device=x_BTW.device)[:, None, None], torch.arange(T, device=x_BTW.device)
    seen_BQS = place.attention_mask.can_attend(attention.window)(rows_B11, 0, places_Q[:, None], keys_T).expand(
        B, -1, -1
    )
    visible = seen_BQS[:, None, None]
    logit = logits_BKGQS.abs().where(visible, 0.0).amax()
    shares = logits_BKGQS.masked_fill(~visible, float("-inf")).softmax(-1)
    entropy_BKGQ = torch.special.entr(shares).sum(-1)
    count_BQ = seen_BQS.sum(-1)
    many = (count_BQ > 1)[:, None, None]
    share = entropy_BKGQ / count_BQ.clamp(min=2)[:, None, None].to(entropy_BKGQ.dtype).log()
    return logit, share.where(many, 0.0).sum() / many.expand_as(share).sum().clamp(min=1)


PAST = 16  # samples that a layer is compared with
READY = 4  # samples before it is compared
TWICE = 2
REARM = 8  # clear samples before an alarm of the same kind may be raised again
Values = dict[str, float]  # by layer


@dataclass
class LayerDetector:
    """Reads the samples of `LayerStats`; `router` holds each layer's expert shares if the model has experts."""

    guard: GuardSpec
    past: dict[str, list[float]] = field(default_factory=dict)  # "quantity of layer" -> its last values
    refused: dict[str, int] = field(default_factory=dict)  # consecutive values kept out of the past
    streaks: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> layer -> consecutive bad samples
    top_lr: float = 0.0
    active: dict[str, int] = field(default_factory=dict)

    def check(self, step: int, sample: dict[str, Any], lr: float) -> list[Alarm]:
        layers: dict[str, Values] = sample["layers"]
        broken = [name for name, values in layers.items() if not all(map(math.isfinite, values.values()))]
        if debounce(self.active, "nonfinite_layer", bool(broken), 1):
            symptom = f"non-finite values inside the model, first in {broken[0]}"
            return make_alarm("nonfinite_layer", step, "warning", symptom, 1.0, layers=broken[:16])
        if broken:
            return []
        router: dict[str, list[float]] = sample.get("router") or {}
        used = {layer: _experts_in_use(shares) for layer, shares in router.items()}
        idle = {name: share for name, share in used.items() if share < self.guard.detect.router_balance}
        return [
            *self._gradients(step, layers),
            *self._updates(step, _column(layers, "update_ratio"), lr),
            *self._units(step, layers),
            *self._attention(step, layers),
            *self._report("router_collapse", step, idle, "share of experts in use:"),
        ]

    def _report(self, kind: str, step: int, bad: Values, what: str) -> list[Alarm]:
        """Raises `kind` for layers that were bad in two samples in a row."""
        before = self.streaks.get(kind, {})
        self.streaks[kind] = {layer: before.get(layer, 0) + 1 for layer in bad}
        lasting = {layer: value for layer, value in bad.items() if self.streaks[kind][layer] >= TWICE}
        if not debounce(self.active, kind, bool(lasting), REARM):
            return []
        first, value = next(iter(lasting.items()))
        more = f" and {len(lasting) - 1} more layers" if len(lasting) > 1 else ""
        shown = dict(list(lasting.items())[:16])
        return make_alarm(kind, step, "warning", f"{what} {value:.3g} in {first}{more}", 0.85, layers=shown)

    def _ratios(self, quantity: str, values: Values, factor: float) -> Values:
        """Each value as a multiple of the layer's own past; 1 while that is too short."""
        ratios = {}
        for layer, value in values.items():
            key = f"{quantity} of {layer}"
            past = self.past.setdefault(key, [])
            ratios[layer] = max(value, 1e-30) / max(median(past), 1e-30) if len(past) >= READY else 1.0
            refused = self.refused.pop(key, 0)
            if not 1 / factor < ratios[layer] < factor and refused < PAST:
                self.refused[key] = refused + 1
                continue
            if refused >= PAST:  # as many as the past holds: the new normal
                past.clear()
            past.append(value)
            del past[:-PAST]
        return ratios

    def _gradients(self, step: int, layers: dict[str, Values]) -> list[Alarm]:
        """Compares each layer's gradient with its peers', and that share with its past: if all layers move, the global
        norm shows it. Activations are compared with their own past."""
        factor, alarms = self.guard.detect.layer_factor, []
        gradients = _column(layers, "grad_norm")
        if len(gradients) > 1:
            typical = max(median(list(gradients.values())), 1e-30)
            shares = {layer: value / typical for layer, value in gradients.items()}
            ratios = self._ratios("gradient", shares, factor)
            what = "gradient norm, against its peers and its own past, times"
            high = {layer: ratio for layer, ratio in ratios.items() if ratio >= factor}
            low = {layer: ratio for layer, ratio in ratios.items() if ratio <= 1 / factor}
            alarms += self._report("layer_gradient_exploding", step, high, what)
            alarms += self._report("layer_gradient_vanishing", step, low, what)
        ratios = self._ratios("activation", _column(layers, "rms"), factor)
        grown = {layer: ratio for layer, ratio in ratios.items() if ratio >= factor}
        return alarms + self._report("activation_growth", step, grown, "activations, against their past, times")

    def _updates(self, step: int, updates: Values, lr: float) -> list[Alarm]:
        self.top_lr = max(self.top_lr, lr)
        if not any(updates.values()):  # vetoed: nothing was changed
            return []
        detect = self.guard.detect
        per_lr = {layer: value / max(lr, 1e-30) for layer, value in updates.items()}
        ratios = self._ratios("update", per_lr, detect.layer_factor)
        large = {
            layer: value
            for layer, value in updates.items()
            if value > detect.update_high or ratios[layer] >= detect.layer_factor
        }
        small = {layer: value for layer, value in updates.items() if value < detect.update_low}
        what = "weights changed in one step by a share of"
        return self._report("update_large", step, large, what) + self._report(
            "update_small", step, small if lr >= 0.1 * self.top_lr else {}, what
        )

    def _units(self, step: int, layers: dict[str, Values]) -> list[Alarm]:
        detect, alarms = self.guard.detect, []
        for kind, limit in (("dead", detect.dead_units), ("saturated", detect.saturated_units)):
            shares = {name: share for name, share in _column(layers, kind).items() if share > limit}
            alarms += self._report(f"{kind}_units", step, shares, f"share of {kind} units")
        return alarms

    def _attention(self, step: int, layers: dict[str, Values]) -> list[Alarm]:
        limit, least = self.guard.detect.attention_logit, self.guard.detect.attention_entropy
        logits, entropies = _column(layers, "logit"), _column(layers, "entropy")
        ratios = self._ratios("logit", logits, 2.0)
        grown = {
            layer: value
            for layer, value in logits.items()
            if value > limit
            # Far beyond what bf16 can hold, a multiple of its past, or rising steadily.
            and (value > 10 * limit or ratios[layer] >= 2 or _rises(self.past[f"logit of {layer}"]))
        }
        ratios = self._ratios("entropy", entropies, 4.0)
        fallen = {layer: value for layer, value in entropies.items() if value < least and ratios[layer] < 0.25}
        return self._report("attention_logit_growth", step, grown, "largest attention logit") + self._report(
            "attention_entropy_collapse", step, fallen, "attention entropy, of the largest possible,"
        )


def _rises(past: list[float]) -> bool:
    """True for a steady rise by a sixth or more."""
    full = len(past) == PAST
    return full and median(past[-READY:]) > 7 / 6 * median(past[:READY]) and theil_sen(past)[1] > 0.6


def _experts_in_use(shares: list[float]) -> float:
    """exp(entropy) of the shares over the number of experts: 1 if they are even, 1/n if one expert has all."""
    total = sum(shares)
    parts = [share / total for share in shares if share > 0]
    return math.exp(-sum(part * math.log(part) for part in parts)) / len(shares)


def _column(layers: dict[str, Values], quantity: str) -> Values:
    return {name: values[quantity] for name, values in layers.items() if quantity in values}
