"""Thresholds of the detectors that watch a run from the host.

The guard's section: what makes a step an outlier, how far a repair may go, how long a trial may take.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from bessemer.spec.quantity import AutoInterval, Seconds, Share, SpecSection, StepCount


def _factor(default: float, description: str) -> float:
    """A threshold above 1: how many times larger or smaller than usual."""
    found: float = Field(default, gt=1, le=1e12, description=description, examples=[default])
    return found


def _share(default: float, description: str) -> float:
    found: float = Field(default, description=description, examples=[f"{100 * default:g}%"])
    return found


class HangSpec(SpecSection):
    """When a step that does not end counts as hung."""

    factor: float = _factor(5.0, "a step may take so many times the longest of the recent ones")
    least: Seconds = Field(
        30.0,
        gt=0,
        description="and always at least this long; after it, several processes look whether one of them is frozen",
        examples=["60s"],
    )
    first: Seconds = Field(
        1800.0,
        gt=0,
        description="limit of the first step and of evaluations and saves, which may compile or wait for storage",
        examples=["30 min"],
    )
    end: Seconds | None = Field(
        600.0,
        gt=0,
        description="how long after that several processes end, for the launcher to start them again; null: never",
        examples=["10 min"],
    )


class DetectSpec(SpecSection):
    """When a watched number counts as trouble. The defaults hold from 1M to 70B parameters."""

    window: int = Field(
        512, ge=128, le=65536, description="accepted steps that slow changes are compared with", examples=[512]
    )
    warmup: int = Field(
        128, ge=64, le=1_000_000, description="accepted steps before slow changes are looked for", examples=[128]
    )
    spike_rise: float = Field(0.5, ge=0, le=1e9, description="rise of the loss that makes a spike", examples=[0.5])
    spike_tail: float = _factor(
        4.0, "a spike lies so many times beyond the largest deviation of the last thousands of steps"
    )
    divergence_rise: Share = _share(0.05, "lasting rise of the loss that is reported")
    divergence_rollback: Share = _share(0.2, "lasting rise of the loss that asks for a rollback")
    divergence_sum: float = Field(
        10.0,
        gt=0,
        le=1e9,
        description="robust deviations, summed over blocks of 16 steps (CUSUM), that make a rise significant",
        examples=[10.0],
    )
    oscillation_power: Share = _share(0.4, "share of the loss's variance in one period that makes an oscillation")
    oscillation_swing: Share = _share(0.1, "and its size from trough to crest, as a share of the loss")
    plateau_span: Share = _share(0.35, "share of the run over which the loss has to fall")
    plateau_least: StepCount = Field(4000, description="and at least so many steps", examples=[4000])
    plateau_fall: Share = _share(0.005, "by at least this")
    gradient_factor: float = _factor(10.0, "lasting rise of the gradient norm that counts as exploding")
    gradient_vanish: float = _factor(30.0, "lasting fall of the gradient norm that counts as vanishing")
    layer_factor: float = _factor(
        30.0, "the same of one layer's gradient, activation or update against its own past and its peers"
    )
    update_high: float = Field(
        0.3, gt=0, le=1e9, description="largest change of a layer in one step, against its weights", examples=[0.3]
    )
    update_low: float = Field(
        1e-8, ge=0, le=1, description="smallest such change while the learning rate is high", examples=[1e-8]
    )
    dead_units: Share = _share(0.25, "share of a layer's units that never open")
    saturated_units: Share = _share(0.25, "share of a layer's units whose gate is always fully open")
    attention_logit: float = Field(
        100.0, gt=0, le=1e9, description="attention logit beyond which its growth is reported", examples=[100.0]
    )
    attention_entropy: Share = _share(
        0.03, "mean attention entropy, of the largest possible, below which a layer has collapsed"
    )
    router_balance: Share = _share(0.25, "share of the experts that are in effect used (exp of the entropy)")
    overfit_rise: Share = _share(0.01, "rise of the validation loss above its best while training still falls")
    loss_scale_least: float = Field(
        1.0, gt=0, le=2.0**32, description="fp16 loss scale below which gradients are lost", examples=[1.0]
    )
    lr_jump: float = _factor(3.0, "learning rate against the planned one that asks for a rollback")
    slowdown: float = _factor(2.0, "time of a token against the usual one")
    data_wait: Share = _share(0.25, "share of the time that is spent waiting for data")
    straggler: float = _factor(1.33, "time of a rank against the median rank")
    weights: StepCount | None = Field(
        100,
        description="steps between comparisons of the weights that several processes hold alike; null: never",
        examples=[100],
    )
    slow_for: Seconds = Field(30.0, description="how long slowness has to last to be reported", examples=["30s"])
    clock_jump: Seconds = Field(
        5.0, gt=0, description="difference between wall clock and steady clock in one step", examples=["5s"]
    )
    hang: HangSpec = Field(default_factory=HangSpec, description="steps that do not end")


class LadderSpec(SpecSection):
    """What is done when a veto is not enough: roll back and skip, roll back further with a gentler step, stop."""

    rollbacks: int = Field(
        3, ge=0, le=1_000_000, description="rollbacks in one stretch of trouble before the run stops", examples=[3]
    )
    relapse: StepCount = Field(
        500, description="steps after a rollback in which new trouble climbs to the next rung", examples=[500]
    )
    lr_scale: float = Field(
        0.5, gt=0, le=1, description="learning rate after the second rollback, as a factor", examples=[0.5]
    )
    clip_scale: float = Field(
        0.5, gt=0, le=1, description="clipping limit after the second rollback, as a factor", examples=[0.5]
    )
    gentle: StepCount = Field(
        200, description="steps for which the gentler step lasts after a rollback", examples=[200]
    )
    careful: StepCount = Field(200, description="steps after an incident with more frequent saves", examples=[200])


class TrialSpec(SpecSection):
    """The trial of a suspicious step."""

    enabled: bool = Field(True, description="try suspicious steps while the run goes on", examples=[True])
    budget: Seconds = Field(60.0, gt=0, description="longest time of one trial", examples=["60s"])
    share: Share = Field(0.05, description="largest share of the run's time that trials may take", examples=["5%"])
    exclude: bool = Field(True, description="leave convicted documents out for the rest of the run", examples=[True])


class ForgetSpec(SpecSection):
    """What a run that goes on from trained weights must not unlearn: held-out losses against those before step 0."""

    sources: list[str] = Field(
        min_length=1, description="data sources whose held-out loss is watched", examples=[["general"]]
    )
    limit: Share = Field(0.05, description="rise of such a loss that is too much", examples=["5%"])
    patience: int = Field(
        2, ge=1, le=1_000_000, description="evaluations in a row beyond the limit before it acts", examples=[2]
    )
    action: Literal["stop", "rollback", "note"] = Field(
        "stop",
        description="stop the run; go back to the last checkpoint within the limit and stop there; or only say so",
        examples=["rollback"],
    )


class GuardSpec(SpecSection):
    """Judges every step before the update; a bad one is vetoed, and what a veto cannot cure is rolled back."""

    enabled: bool = Field(True, description="judge steps", examples=[True])
    window: int = Field(128, ge=16, le=4096, description="accepted steps that a step is compared with", examples=[128])
    warmup: int = Field(32, ge=8, le=1_000_000, description="accepted steps before outliers are judged", examples=[32])
    loss_sigma: float = Field(
        10.0, gt=0, le=1e9, description="robust deviations of the loss that make an outlier", examples=[10.0]
    )
    grad_sigma: float = Field(
        13.0, gt=0, le=1e9, description="the same for the log of the gradient norm", examples=[13.0]
    )
    max_vetoes: int = Field(
        5, ge=1, le=1_000_000, description="vetoes in a row before the ladder takes over", examples=[5]
    )
    veto_share: Share = Field(
        0.05,
        description="share of the window's steps that may be vetoed as outliers; beyond it they are the data",
        examples=["5%"],
    )
    suspect_sigma: float = Field(
        3.5,
        gt=0,
        le=1e6,
        description="robust deviations of the loss, or of what one row adds to it, from which documents are examined",
        examples=[3.5],
    )
    look_every: AutoInterval = Field(
        "auto", description="interval of looks inside the model: layers, units, attention", examples=["50 steps"]
    )
    copies: Literal["auto", "off"] = Field(
        "auto", description="keep two recent states in memory to roll back to, where there is room", examples=["off"]
    )
    copy_every: AutoInterval = Field("auto", description="interval of the copies in memory", examples=["50 steps"])
    detect: DetectSpec = Field(default_factory=DetectSpec, description="thresholds of the detectors")
    ladder: LadderSpec = Field(default_factory=LadderSpec, description="rollbacks")
    trial: TrialSpec = Field(default_factory=TrialSpec, description="trials of suspicious steps")
    forget: ForgetSpec | None = Field(
        None, description="watch what the run may forget", examples=[{"sources": ["general"], "limit": "5%"}]
    )

    @model_validator(mode="before")
    @classmethod
    def _former_runs(cls, value: Any) -> Any:
        """Runs of earlier versions have a `repeat_share` in their folder, which nothing needs any more."""
        return {key: one for key, one in value.items() if key != "repeat_share"} if isinstance(value, dict) else value
