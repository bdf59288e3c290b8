"""The judge vetoes a step whose loss or gradient norm is an outlier against the recently accepted steps.

Everything is tensor arithmetic on the device, without a host sync. A window holds the last accepted values of the
loss, of the log gradient norm and of the largest lift: how much a single row raises the loss of its step.

- Centre: the median of the window's newer half. It lags a falling loss from above, which errs towards accepting.
- Deviations: from a resistant line through the medians of both halves, so that the trend of early training is not
  taken for noise.
- Scale: the largest of 1.4826 times the median deviation, the upper 5 % over 1.645 (small batches have heavy tails,
  which a median does not show) and a floor. With the default limit one unusual row of a healthy corpus cannot make its
  step an outlier, however few rows there are.

Only high values are outliers, unless the objective's `JudgedNumber` says otherwise. Rejected steps do not enter the
window, but rejection is bounded: after `max_vetoes` in a row the next finite step is accepted and the window is reset,
and if more than `veto_share` of the last steps were vetoed, the outliers are the data and are accepted (otherwise the
guard would filter a hard source out of the run).

An accepted step may still be suspect: its loss or largest lift is more than `suspect_sigma` scales above the centre.
Its documents are then examined (`trial/examine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bessemer.spec.guard import GuardSpec

ACCEPT, NONFINITE, LOSS_OUTLIER, GRAD_OUTLIER = 0, 1, 2, 3
REASONS = {
    NONFINITE: "non-finite loss or gradient",
    LOSS_OUTLIER: "loss outlier",
    GRAD_OUTLIER: "gradient-norm outlier",
}
# The scale of the loss is at least 1 % of its centre, and 36 % divided by the rows of a step: the most unusual rows of
# clean code (other scripts, tables) had 4.6 times the usual loss, so one of them raises a mean over R rows by 3.6 / R.
LOSS_FLOOR, ODD_ROW = 0.01, 0.36
# That of the log gradient norm is 0.2 and 0.3 divided by the rows: 13 scales are a factor of 13 for many rows, 95 for
# two and 665 for one, where clean rows of other scripts had 23 and 26 times the usual norm. Clipping bounds the rest.
GRAD_FLOOR, GRAD_ODD_ROW = 0.2, 0.3
# Lifts below 1 % of the loss are not worth an examination.
ROW_FLOOR = 0.0025
UPPER, UPPER_NORMAL = 0.95, 1.645  # a quantile, and where it lies in a normal distribution


@dataclass(frozen=True)
class JudgedNumber:
    """The number of an objective that is judged before each update.

    `name` is "loss" or one of the objective's metrics, and `bad` the side on which a value is an outlier. Outliers are
    measured relative to the number itself, which fails where it approaches zero: `row` is the loss of one row that a
    good model gets wrong, and `level` that of a model which knows nothing. Gradient norms below `least_norm` are all
    alike. Without `examine`, accepted steps are never suspect: where most losses are near zero, every hard row is.
    """

    name: str = "loss"
    bad: Literal["high", "low", "both"] = "high"
    row: float = 0.0
    level: float = 0.0
    least_norm: float = 0.0
    examine: bool = True


LOSS = JudgedNumber()


@dataclass
class Verdict:
    """The verdict on a step, still on the device. `reject` is exactly 0 or 1."""

    reject: Tensor
    scalars: dict[str, Tensor]

    def read(self) -> dict[str, float]:
        """One transfer to the host, which waits for the device."""
        return dict(zip(self.scalars, torch.stack(list(self.scalars.values())).tolist(), strict=True))


class Judge:
    """Holds the window. `judge` is called once per step with all-reduced numbers, so all ranks get the same verdict."""

    def __init__(self, spec: GuardSpec, device: torch.device, rows: int = 64, judged: JudgedNumber = LOSS) -> None:
        """`rows`: sequences of a step."""
        self.spec, self.number = spec, judged
        self.window_3N = torch.full((3, spec.window), float("nan"), device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.streak = torch.zeros((), device=device)
        self.judged = torch.zeros((), dtype=torch.int64, device=device)
        self.vetoed_N = torch.zeros(spec.window, device=device)  # of the last steps, accepted or not
        self._age_N = torch.arange(spec.window, device=device)
        self._sigma_2 = torch.tensor([spec.loss_sigma, spec.grad_sigma], device=device)
        self.set_rows(rows)

    def set_rows(self, rows: int) -> None:
        """Sets the rows of a step, from now on."""
        floors = [max(LOSS_FLOOR, ODD_ROW / rows), GRAD_FLOOR + GRAD_ODD_ROW / rows, ROW_FLOOR]
        self._floor_3 = torch.tensor(floors, device=self.window_3N.device)

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint. These tensors are never changed in place."""
        return {
            "window": self.window_3N[:2], "rows": self.window_3N[2], "count": self.count, "streak": self.streak,
            "judged": self.judged, "vetoed": self.vetoed_N,
        }  # fmt: skip

    def load(self, state: dict[str, Tensor]) -> None:
        """Restores a saved window. Earlier versions saved no rows; these are then learnt from here on."""
        rows_N = state.get("rows", torch.full_like(state["vetoed"], float("nan")))
        self.window_3N = torch.cat((state["window"], rows_N[None]))
        self.count, self.streak = state["count"], state["streak"]
        self.judged, self.vetoed_N = state["judged"], state["vetoed"]

    def reopen(self) -> None:
        """Resets the window: a known change (data phase, batch size) makes the past a bad reference."""
        self.window_3N = torch.full_like(self.window_3N, float("nan"))
        self.count, self.streak = torch.zeros_like(self.count), torch.zeros_like(self.streak)

    def forgive_vetoes(self) -> None:
        """The vetoes so far were right: they do not count towards `veto_share`. Their streak continues."""
        self.vetoed_N = torch.zeros_like(self.vetoed_N)

    def _center_and_scale(self) -> tuple[Tensor, Tensor]:
        """Of all three quantities. Slot i holds value number i mod N; `newer` marks the newer half."""
        size = self.spec.window
        age_N = (self.count - 1 - self._age_N) % size  # 0 is the newest
        held = torch.clamp(self.count, max=size)
        newer_N = age_N < (held + 1) // 2
        nan = torch.full_like(self.window_3N, float("nan"))
        new_3 = torch.where(newer_N, self.window_3N, nan).nanmedian(dim=1).values
        old_3 = torch.where(newer_N, nan, self.window_3N).nanmedian(dim=1).values
        slope_3 = (new_3 - old_3) / torch.clamp(held / 2, min=1)
        line_3N = new_3[:, None] + slope_3[:, None] * (held / 4 - age_N)
        away_3N = (self.window_3N - line_3N).sort(dim=1).values  # NaN, an empty slot, sorts last
        at = ((held - 1).clamp(min=0) * UPPER).long().expand(3, 1)
        upper_3 = away_3N.gather(1, at)[:, 0].nan_to_num(nan=0.0) / UPPER_NORMAL
        scale_3 = torch.fmax(1.4826 * away_3N.abs().nanmedian(dim=1).values, upper_3)
        one = torch.ones_like(new_3[0])
        return new_3, torch.maximum(scale_3, self._floor_3 * torch.stack((new_3[0].abs(), one, one)))

    def _largest_lift(self, rows_2R: Tensor | None, center: Tensor) -> Tensor:
        """The largest share by which one row raises the loss of the step above the centre; NaN if unknown."""
        if rows_2R is None:
            return torch.full_like(center, float("nan"))
        nll_R, weight_R = rows_2R.to(center.device, torch.float32)
        nll_R = nll_R + self.number.row * weight_R if self.number.row else nll_R
        return (nll_R - center * weight_R).max() / (center * weight_R.sum())

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, rows_2R: Tensor | None = None) -> Verdict:
        """The verdict from the mean loss (or the number that is judged in its place), the global gradient norm and each
        row's sums of losses and weights."""
        number, sign = self.number, -1.0 if self.number.bad == "low" else 1.0
        loss, grad_norm = loss.to(self.window_3N.device), grad_norm.to(self.window_3N.device)
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        if number != LOSS:
            loss = sign * loss + number.row
        center_3, scale_3 = self._center_and_scale()
        lift = self._largest_lift(rows_2R, center_3[0])
        value_3 = torch.stack((loss.float(), grad_norm.float().clamp(min=max(1e-30, number.least_norm)).log(), lift))
        z_3 = torch.nan_to_num((value_3 - center_3) / scale_3, nan=0.0, posinf=1e9, neginf=-1e9)
        if number.bad == "both":
            z_3 = torch.cat((z_3[:1].abs(), z_3[1:]))
        ready = self.count >= self.spec.warmup
        outlier_2 = (z_3[:2] > self._sigma_2) & ready & finite
        outlier = outlier_2.any()
        reopened = outlier & (self.streak >= self.spec.max_vetoes)
        often = self.vetoed_N.sum() >= max(1.0, self.spec.veto_share * self.spec.window)
        gave_way = outlier & often & ~reopened
        code = torch.where(outlier_2[0], LOSS_OUTLIER, torch.where(outlier_2[1], GRAD_OUTLIER, ACCEPT))
        code = torch.where(reopened | gave_way, ACCEPT, code)
        code = torch.where(finite, code, NONFINITE)
        reject = (code != ACCEPT).float()
        lifts_known = self.window_3N[2].isfinite().sum() >= self.spec.warmup
        high = (z_3[0] > self.spec.suspect_sigma) | ((z_3[2] > self.spec.suspect_sigma) & lifts_known)
        suspect = high & ready & (reject == 0) & ~reopened & number.examine

        window_3N = torch.where(reopened, torch.full_like(self.window_3N, float("nan")), self.window_3N)
        count = torch.where(reopened, 0, self.count)
        slot_N = (self._age_N == count % self.spec.window) & (reject == 0)
        self.window_3N = torch.where(slot_N, value_3[:, None], window_3N)
        self.count = count + (reject == 0).long()
        self.streak = torch.where(reject == 0, 0.0, self.streak + 1)
        # Outliers only: non-finite steps are never the data, however frequent.
        self.vetoed_N = torch.where(self._age_N == self.judged % self.spec.window, reject * finite, self.vetoed_N)
        self.judged = self.judged + 1
        return Verdict(reject, {
            "code": code.float(), "streak": self.streak, "reopened": reopened.float(), "gave_way": gave_way.float(),
            "suspect": suspect.float(),
            "loss_z": z_3[0], "loss_center": (center_3[0] - number.row) * sign, "loss_scale": scale_3[0],
            "grad_z": z_3[1], "grad_center": center_3[1].exp(), "grad_scale": scale_3[1],
            "row_z": z_3[2], "row_center": center_3[2], "row_scale": scale_3[2],
        })  # fmt: skip
