"""The guard's section: what makes a step an outlier, how far a repair may go, how long a trial may take."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from bessemer.spec.detect import DetectSpec
from bessemer.spec.part import Part
from bessemer.spec.quantity import AutoInterval, Seconds, Share, StepCount


class LadderSpec(Part):
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


class TrialSpec(Part):
    """The trial of a suspicious step."""

    enabled: bool = Field(True, description="try suspicious steps while the run goes on", examples=[True])
    budget: Seconds = Field(60.0, gt=0, description="longest time of one trial", examples=["60s"])
    share: Share = Field(0.05, description="largest share of the run's time that trials may take", examples=["5%"])
    exclude: bool = Field(True, description="leave convicted documents out for the rest of the run", examples=[True])


class ForgetSpec(Part):
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


class GuardSpec(Part):
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
