"""The judge: is this step's loss or gradient norm an outlier against the steps accepted lately?

Everything is tensor arithmetic on the device, without a host sync. A window holds the last accepted values of the
loss and of the log of the gradient norm. The centre is the median of its newer half (it lags a falling loss from above,
which errs on the side of accepting). Deviations are taken from a resistant line through the two halves' medians, so
that the trend of early training is not taken for noise; the scale is the largest of 1.4826 times their median, their
upper 5 % over 1.645 (small batches have heavy tails, and a median alone does not see them), and a floor: with the
default limit, one odd row of a healthy corpus cannot make its step an outlier, however few rows there are. Only high
values are outliers. Rejected steps never enter the window, but never for ever either: after `max_vetoes` in a row the
next finite one is accepted and the window starts anew, and where more than `veto_share` of the last steps were vetoed
the outliers are the data, and are accepted (otherwise the guard would filter a hard source out of the run).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.spec.guard import GuardSpec

ACCEPT, NONFINITE, LOSS_OUTLIER, GRAD_OUTLIER, REPETITION = 0, 1, 2, 3, 4
REASONS = {
    NONFINITE: "non-finite loss or gradient",
    LOSS_OUTLIER: "loss outlier",
    GRAD_OUTLIER: "gradient-norm outlier",
    REPETITION: "repeated pattern",
}
# The scale of the loss is at least 1 % of its centre, and 36 % divided by the rows of a step: the oddest rows of clean
# code (other scripts, tables) had 4.6 times the usual loss, so one of them lifts a mean over R rows by 3.6 / R.
LOSS_FLOOR, ODD_ROW = 0.01, 0.36
# That of the log gradient norm is 0.2 and 0.3 divided by the rows: 13 scales are a factor of 13 for many rows, 95 for
# two and 665 for one, where clean rows of other scripts had 23 and 26 times the usual norm. Clipping bounds the rest.
GRAD_FLOOR, GRAD_ODD_ROW = 0.2, 0.3
UPPER, UPPER_NORMAL = 0.95, 1.645  # a quantile, and where it lies in a normal distribution


@dataclass
class Verdict:
    """What the guard says of a step, still on the device. `reject` is exactly 0 or 1."""

    reject: Tensor
    numbers: Tensor

    NAMES = (
        "code", "streak", "reopened", "gave_way", "loss_z", "loss_center", "loss_scale", "grad_z", "grad_center",
        "grad_scale",
    )  # fmt: skip

    def read(self) -> dict[str, float]:
        """One transfer to the host, which waits for the device."""
        return self.named(self.numbers.tolist())

    @classmethod
    def named(cls, numbers: list[float]) -> dict[str, float]:
        return dict(zip(cls.NAMES, numbers, strict=True))


class Judge:
    """Holds the window. `judge` is called once a step with all-reduced numbers, so every rank says the same."""

    def __init__(self, spec: GuardSpec, device: torch.device, rows: int = 64) -> None:
        """`rows`: sequences of a step."""
        self.spec = spec
        self.window_2N = torch.full((2, spec.window), float("nan"), device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.streak = torch.zeros((), device=device)
        self.judged = torch.zeros((), dtype=torch.int64, device=device)
        self.vetoed_N = torch.zeros(spec.window, device=device)  # of the last steps, accepted or not
        self._age_N = torch.arange(spec.window, device=device)
        self._sigma_2 = torch.tensor([spec.loss_sigma, spec.grad_sigma], device=device)
        self.expect(rows)

    def expect(self, rows: int) -> None:
        """From now on a step has so many rows."""
        floors = [max(LOSS_FLOOR, ODD_ROW / rows), GRAD_FLOOR + GRAD_ODD_ROW / rows]
        self._floor_2 = torch.tensor(floors, device=self.window_2N.device)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps. These tensors are never changed in place."""
        return {
            "window": self.window_2N, "count": self.count, "streak": self.streak, "judged": self.judged,
            "vetoed": self.vetoed_N,
        }  # fmt: skip

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on with a saved window."""
        self.window_2N, self.count, self.streak = state["window"], state["count"], state["streak"]
        self.judged, self.vetoed_N = state["judged"], state["vetoed"]

    def reopen(self) -> None:
        """Forget the window: a known change (data phase, batch size) makes the past a bad reference."""
        self.window_2N = torch.full_like(self.window_2N, float("nan"))
        self.count, self.streak = torch.zeros_like(self.count), torch.zeros_like(self.streak)

    def pardon(self) -> None:
        """The vetoes so far were right, and do not count towards giving way. Their streak goes on."""
        self.vetoed_N = torch.zeros_like(self.vetoed_N)

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
        away_2N = (self.window_2N - line_2N).sort(dim=1).values  # NaN, an empty slot, sorts last
        at = ((held - 1).clamp(min=0) * UPPER).long().expand(2, 1)
        upper_2 = away_2N.gather(1, at)[:, 0].nan_to_num(nan=0.0) / UPPER_NORMAL
        scale_2 = torch.fmax(1.4826 * away_2N.abs().nanmedian(dim=1).values, upper_2)
        unit_2 = torch.stack((new_2[0].abs(), torch.ones_like(new_2[1])))
        return new_2, torch.maximum(scale_2, self._floor_2 * unit_2)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, repeated: bool | Tensor = False) -> Verdict:
        """The verdict on a step, from its mean loss and its global gradient norm, and from what is known of its tokens:
        that much of it is a repeated pattern."""
        loss, grad_norm = loss.to(self.window_2N.device), grad_norm.to(self.window_2N.device)
        value_2 = torch.stack((loss.float(), grad_norm.float().clamp(min=1e-30).log()))
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        center_2, scale_2 = self._center_and_scale()
        z_2 = torch.nan_to_num((value_2 - center_2) / scale_2, nan=0.0, posinf=1e9, neginf=-1e9)
        ready = self.count >= self.spec.warmup
        outlier_2 = (z_2 > self._sigma_2) & ready & finite
        outlier = outlier_2.any()
        reopened = outlier & (self.streak >= self.spec.max_vetoes)
        often = self.vetoed_N.sum() >= max(1.0, self.spec.veto_share * self.spec.window)
        gave_way = (outlier | (finite & repeated)) & often & ~reopened
        code = torch.where(outlier_2[0], LOSS_OUTLIER, torch.where(outlier_2[1], GRAD_OUTLIER, ACCEPT))
        code = torch.where(reopened | gave_way, ACCEPT, code)
        code = torch.where((code == ACCEPT) & ~gave_way & repeated, REPETITION, code)
        code = torch.where(finite, code, NONFINITE)
        reject = (code != ACCEPT).float()

        kept_2N = torch.where(reopened, torch.full_like(self.window_2N, float("nan")), self.window_2N)
        count = torch.where(reopened, 0, self.count)
        here_N = (self._age_N == count % self.spec.window) & (reject == 0)
        self.window_2N = torch.where(here_N, value_2[:, None], kept_2N)
        self.count = count + (reject == 0).long()
        self.streak = torch.where(reject == 0, 0.0, self.streak + 1)
        # Of outliers only: steps that are not finite are never the data, however often they come.
        self.vetoed_N = torch.where(self._age_N == self.judged % self.spec.window, reject * finite, self.vetoed_N)
        self.judged = self.judged + 1
        parts = (
            code.float(), self.streak, reopened.float(), gave_way.float(), z_2[0], center_2[0], scale_2[0], z_2[1],
            center_2[1].exp(), scale_2[1],
        )  # fmt: skip
        return Verdict(reject, torch.stack(parts))
