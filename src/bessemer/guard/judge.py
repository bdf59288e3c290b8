"""The judge: is this step's loss or gradient norm an outlier against the steps accepted lately?

Everything is tensor arithmetic on the device, without a host sync. A window holds the last accepted values of the
loss and of the log of the gradient norm. The centre is the median of its newer half (it lags a falling loss from above,
which errs on the side of accepting); the scale is 1.4826 times the median absolute deviation from a resistant line
through the two halves' medians, so that the trend of early training is not taken for noise, with a floor. Only high
values are outliers. Rejected steps never enter the window, but never for ever either: after `max_vetoes` in a row the
next finite one is accepted and the window starts anew (otherwise a harmless change of data would be vetoed without
end).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.spec.schema import GuardSpec

ACCEPT, NONFINITE, LOSS_OUTLIER, GRAD_OUTLIER = 0, 1, 2, 3
REASONS = {
    NONFINITE: "non-finite loss or gradient",
    LOSS_OUTLIER: "loss outlier",
    GRAD_OUTLIER: "gradient-norm outlier",
}
LOSS_FLOOR = 0.02  # the scale of the loss is at least 2 % of its centre
GRAD_FLOOR = (
    0.25  # and that of the log gradient norm 0.25: with 10 sigma, a factor of 12; clipping bounds the rest
)


@dataclass
class Verdict:
    """What the guard says of a step, still on the device. `reject` is exactly 0 or 1."""

    reject: Tensor
    numbers: Tensor  # code, streak, reopened, loss z, loss centre, gradient z, gradient centre

    NAMES = ("code", "streak", "reopened", "loss_z", "loss_center", "grad_z", "grad_center")

    def read(self) -> dict[str, float]:
        """One transfer to the host."""
        return dict(zip(self.NAMES, self.numbers.tolist(), strict=True))


class Judge:
    """Holds the window. `judge` is called once a step with all-reduced numbers, so every rank says the same."""

    def __init__(self, spec: GuardSpec, device: torch.device) -> None:
        self.spec = spec
        self.window_2N = torch.full((2, spec.window), float("nan"), device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.streak = torch.zeros((), device=device)
        self._age_N = torch.arange(spec.window, device=device)
        self._sigma_2 = torch.tensor([spec.loss_sigma, spec.grad_sigma], device=device)
        self._floor_2 = torch.tensor([LOSS_FLOOR, GRAD_FLOOR], device=device)

    def state(self) -> dict[str, Tensor]:
        return {"window": self.window_2N, "count": self.count, "streak": self.streak}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on with a saved window."""
        self.window_2N, self.count, self.streak = state["window"], state["count"], state["streak"]

    def reopen(self) -> None:
        """Forget the window: a known change (data phase, batch size) makes the past a bad reference."""
        self.window_2N.fill_(float("nan"))
        self.count.zero_()

    def _center_and_scale(self) -> tuple[Tensor, Tensor]:
        """For both rows. Slot i holds value number i mod N: `newer` marks the newer half, whatever the rotation."""
        size = self.spec.window
        age_N = (self.count - 1 - self._age_N) % size  # 0 is the newest
        held = torch.clamp(self.count, max=size)
        newer_N = age_N < (held + 1) // 2
        nan = torch.full_like(self.window_2N, float("nan"))
        new_2 = torch.where(newer_N, self.window_2N, nan).nanmedian(dim=1).values
        old_2 = torch.where(newer_N, nan, self.window_2N).nanmedian(dim=1).values
        slope_2 = (new_2 - old_2) / torch.clamp(held / 2, min=1)
        line_2N = new_2[:, None] + slope_2[:, None] * (held / 4 - age_N)
        scale_2 = 1.4826 * (self.window_2N - line_2N).abs().nanmedian(dim=1).values
        unit_2 = torch.stack((new_2[0].abs(), torch.ones_like(new_2[1])))
        return new_2, torch.maximum(scale_2, self._floor_2 * unit_2)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Verdict:
        """The verdict on a step, from its mean loss and its global gradient norm."""
        loss, grad_norm = loss.to(self.window_2N.device), grad_norm.to(self.window_2N.device)
        value_2 = torch.stack((loss.float(), grad_norm.float().clamp(min=1e-30).log()))
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        center_2, scale_2 = self._center_and_scale()
        z_2 = torch.nan_to_num((value_2 - center_2) / scale_2, nan=0.0, posinf=1e9, neginf=-1e9)
        ready = self.count >= self.spec.warmup
        outlier_2 = (z_2 > self._sigma_2) & ready & finite
        reopened = outlier_2.any() & (self.streak >= self.spec.max_vetoes)
        code = torch.where(outlier_2[0], LOSS_OUTLIER, torch.where(outlier_2[1], GRAD_OUTLIER, ACCEPT))
        code = torch.where(finite, torch.where(reopened, ACCEPT, code), NONFINITE)
        reject = (code != ACCEPT).float()

        kept_2N = torch.where(reopened, torch.full_like(self.window_2N, float("nan")), self.window_2N)
        count = torch.where(reopened, 0, self.count)
        here_N = (self._age_N == count % self.spec.window) & (reject == 0)
        self.window_2N = torch.where(here_N, value_2[:, None], kept_2N)
        self.count = count + (reject == 0).long()
        self.streak = torch.where(reject == 0, 0.0, self.streak + 1)
        parts = (code.float(), self.streak, reopened.float(), z_2[0], center_2[0], z_2[1], center_2[1].exp())
        return Verdict(reject, torch.stack(parts))
