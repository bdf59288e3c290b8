"""Detects trouble inside the model from layer statistics: gradients, updates, units, attention, experts.

A layer must be bad in two samples in a row, against fixed bounds where theory gives them and otherwise against its own
last samples. Outliers stay out of that history, but for no more samples than it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from bessemer.guard.detect.alarm import Alarm, alarm, debounce, median, theil_sen
from bessemer.spec.guard import GuardSpec

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
            return alarm("nonfinite_layer", step, "warning", symptom, 1.0, layers=broken[:16])
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
        return alarm(kind, step, "warning", f"{what} {value:.3g} in {first}{more}", 0.85, layers=shown)

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
