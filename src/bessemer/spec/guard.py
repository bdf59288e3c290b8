"""The guard section: when a step is an outlier, thresholds of the detectors, rollbacks, trials, and hangs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from bessemer.spec.quantity import AutoInterval, Seconds, Share, SpecSection, StepCount, section, setting


def _factor(default: float, description: str) -> Any:
    """A threshold above 1: how many times larger or smaller than usual."""
    return setting(default, description, default, gt=1, le=1e12)


def _share(default: float, description: str) -> Any:
    return setting(default, description, f"{100 * default:g}%")


class HangSpec(SpecSection):
    """When a step that does not finish counts as a hang."""

    factor: float = _factor(5.0, "a step may take this many times the longest of the recent steps")
    least: Seconds = setting(30.0, "but at least this long; then the processes look for a frozen one", "60s", gt=0)
    first: Seconds = setting(
        1800.0,
        "limit of the first step, of evaluations and of saves, which may compile or wait for storage",
        "30 min",
        gt=0,
    )
    end: Seconds | None = setting(
        600.0, "processes exit this long after a hang, so that the launcher restarts them; null: never", "10 min", gt=0
    )


class DetectSpec(SpecSection):
    """Thresholds of the detectors. The defaults hold from 1M to 70B parameters."""

    window: int = setting(512, "accepted steps in the baseline of slow changes", 512, ge=128, le=65536)
    warmup: int = setting(128, "accepted steps before slow changes are detected", 128, ge=64, le=1_000_000)
    loss_unit: float | None = setting(
        None,
        "changes of a loss below this are relative to this (default: 0.1; of classification, the loss of chance)",
        0.1,
        gt=0,
        le=1e9,
    )
    spike_rise: float = setting(0.5, "rise of the loss that counts as a spike", 0.5, ge=0, le=1e9)
    spike_tail: float = _factor(4.0, "a spike is this many times the largest deviation of the last thousands of steps")
    divergence_rise: Share = _share(0.05, "lasting rise of the loss that is reported")
    divergence_rollback: Share = _share(0.2, "lasting rise of the loss that causes a rollback")
    divergence_sum: float = setting(
        10.0,
        "sum of robust deviations over blocks of 16 steps (CUSUM) that makes a rise significant",
        10.0,
        gt=0,
        le=1e9,
    )
    oscillation_power: Share = _share(0.4, "share of the loss variance at one period that counts as an oscillation")
    oscillation_swing: Share = _share(0.1, "and its peak-to-peak size as a share of the loss")
    plateau_span: Share = _share(0.35, "share of the run over which the loss must fall")
    plateau_least: StepCount = setting(4000, "and at least this many steps", 4000)
    plateau_fall: Share = _share(0.005, "by at least this")
    gradient_factor: float = _factor(10.0, "lasting rise of the gradient norm that counts as exploding")
    gradient_vanish: float = _factor(30.0, "lasting fall of the gradient norm that counts as vanishing")
    layer_factor: float = _factor(
        30.0,
        "lasting change of the gradient, activation or update of one layer, relative to its history and to other "
        "layers",
    )
    update_high: float = setting(0.3, "largest update of a layer, relative to its weights", 0.3, gt=0, le=1e9)
    update_low: float = setting(1e-8, "smallest relative update while the learning rate is high", 1e-8, ge=0, le=1)
    dead_units: Share = _share(0.25, "share of units of a layer that are always inactive")
    saturated_units: Share = _share(0.25, "share of units of a layer that are always saturated")
    attention_logit: float = setting(100.0, "attention logit above which growth is reported", 100.0, gt=0, le=1e9)
    attention_entropy: Share = _share(0.03, "mean attention entropy, of the maximum, below which a layer has collapsed")
    router_balance: Share = _share(0.25, "effective share of experts in use (exp of the routing entropy)")
    overfit_rise: Share = _share(0.01, "rise of the validation loss above its best while the training loss still falls")
    loss_scale_least: float = setting(1.0, "fp16 loss scale below which gradients are lost", 1.0, gt=0, le=2.0**32)
    lr_jump: float = _factor(3.0, "ratio of the learning rate to the planned one that causes a rollback")
    slowdown: float = _factor(2.0, "time per token relative to the usual")
    data_wait: Share = _share(0.25, "share of the time spent waiting for data")
    straggler: float = _factor(1.33, "time of a rank relative to the median rank")
    weights: StepCount | None = setting(
        100,
        "steps between comparisons of replicated weights across processes (silent data corruption); null: never",
        100,
    )
    slow_for: Seconds = setting(30.0, "how long a slowdown must last to be reported", "30s")
    clock_jump: Seconds = setting(5.0, "difference between wall clock and monotonic clock in one step", "5s", gt=0)
    hang: HangSpec = section(HangSpec, "steps that do not finish")


class LadderSpec(SpecSection):
    """Escalation when a veto is not enough: roll back and skip data, roll back further with a lower rate, stop."""

    rollbacks: int = setting(3, "rollbacks in one incident before the run stops", 3, ge=0, le=1_000_000)
    relapse: StepCount = setting(500, "steps after a rollback within which a new incident escalates", 500)
    lr_scale: float = setting(0.5, "factor on the learning rate after the second rollback", 0.5, gt=0, le=1)
    clip_scale: float = setting(0.5, "factor on the clipping limit after the second rollback", 0.5, gt=0, le=1)
    gentle: StepCount = setting(200, "steps for which these factors apply", 200)
    careful: StepCount = setting(200, "steps with more frequent saves after an incident", 200)


class TrialSpec(SpecSection):
    """Trials: replay experiments that find the cause of a suspicious step."""

    enabled: bool = setting(True, "run trials during training", True)
    budget: Seconds = setting(60.0, "time limit of one trial", "60s", gt=0)
    share: Share = setting(0.05, "largest share of the training time for trials", "5%")
    exclude: bool = setting(True, "exclude documents that a trial found harmful for the rest of the run", True)


class ForgetSpec(SpecSection):
    """Limits forgetting in a run that starts from trained weights: held-out losses against those before step 0."""

    sources: list[str] = setting(..., "data sources whose held-out loss is watched", ["general"], min_length=1)
    limit: Share = setting(0.05, "largest allowed rise of that loss", "5%")
    patience: int = setting(2, "consecutive evaluations above the limit before it acts", 2, ge=1, le=1_000_000)
    action: Literal["stop", "rollback", "note"] = setting(
        "stop",
        "stop: end the run; rollback: return to the last checkpoint within the limit and end; note: only report",
        "rollback",
    )


AlarmAction = Literal["off", "note", "warning", "stop", "rollback"]


class AlignmentSpec(SpecSection):
    """Detectors of preference and reinforcement runs, each with what its alarm does: note and warning only inform, stop
    saves the state and ends the run, rollback ends it at the best checkpoint from before the trouble."""

    hacking: AlarmAction = setting(
        "stop", "the reward rises, and a held-out judge falls or a surface feature explains the rise", "rollback"
    )
    kl: AlarmAction = setting("warning", "the KL divergence to the reference runs away", "stop")
    entropy: AlarmAction = setting("warning", "the entropy collapses before the task is solved", "stop")
    length: AlarmAction = setting("warning", "answers get longer or shorter without more reward", "off")
    format: AlarmAction = setting("warning", "answers are truncated or repetitive, or a format reward falls", "stop")
    equal_groups: AlarmAction = setting("note", "nearly all groups have equal rewards: nothing is learned", "warning")
    reward_drift: AlarmAction = setting("warning", "the level of a reward model shifts, its accuracy does not", "off")
    over_optimisation: AlarmAction = setting("warning", "the held-out score is past its best", "rollback")
    displacement: AlarmAction = setting("warning", "the margin grows while chosen answers get less likely", "stop")
    judge: list[str] | None = setting(
        None,
        "rewards that measure the true goal (default: verifiers, and rewards with weight 0); hacking is a rising total "
        "while one of them falls",
        ["quality"],
    )
    expected: list[str] = setting([], "texts that good answers contain, such as a format: never hacking", ["<answer>"])
    explained: Share = _share(0.6, "share of the reward's rise that one surface feature must explain")
    depends: Share = _share(0.4, "and the share of the variance of reward ranks among answers to one prompt")
    kl_limit: float = setting(0.5, "KL divergence per token that is reported if it buys no reward", 0.5, gt=0, le=1e9)
    entropy_low: float = setting(0.01, "entropy per token (nats) that counts as collapsed", 0.01, ge=0, le=100)
    length_factor: float = _factor(2.0, "change of the mean answer length that is reported")
    truncated: Share = _share(0.3, "share of answers without an end that is reported")
    repetition: Share = _share(0.2, "share of repeated 4-grams that is reported")
    equal_share: Share = _share(0.8, "share of groups with equal rewards that is reported")


class GuardSpec(SpecSection):
    """Checks every step before the update. A bad step is vetoed; what a veto cannot fix is rolled back."""

    enabled: bool = setting(True, "check steps", True)
    window: int = setting(128, "accepted steps in the baseline", 128, ge=16, le=4096)
    warmup: int = setting(32, "accepted steps before outliers are detected", 32, ge=8, le=1_000_000)
    loss_sigma: float = setting(10.0, "robust deviations of the loss that count as an outlier", 10.0, gt=0, le=1e9)
    grad_sigma: float = setting(13.0, "the same for the log of the gradient norm", 13.0, gt=0, le=1e9)
    max_vetoes: int = setting(5, "consecutive vetoes before a rollback", 5, ge=1, le=1_000_000)
    veto_share: Share = setting(0.05, "largest share of vetoed outliers in the window; more are normal data", "5%")
    suspect_sigma: float = setting(
        3.5,
        "robust deviations of the loss, or of the share of one row in it, from which documents are examined",
        3.5,
        gt=0,
        le=1e6,
    )
    look_every: AutoInterval = setting("auto", "interval between measurements inside the model", "50 steps")
    copies: Literal["auto", "off"] = setting("auto", "keep two recent states in memory for rollbacks", "off")
    copy_every: AutoInterval = setting("auto", "interval between snapshots in memory", "50 steps")
    detect: DetectSpec = section(DetectSpec, "thresholds of the detectors")
    alignment: AlignmentSpec = section(AlignmentSpec, "preference and reinforcement runs")
    ladder: LadderSpec = section(LadderSpec, "rollbacks")
    trial: TrialSpec = section(TrialSpec, "trials of suspicious steps")
    forget: ForgetSpec | None = setting(None, "limit forgetting", {"sources": ["general"], "limit": "5%"})

    @model_validator(mode="before")
    @classmethod
    def _drop_obsolete_keys(cls, value: Any) -> Any:
        """Specs of earlier versions have a `repeat_share`, which is ignored."""
        return {key: item for key, item in value.items() if key != "repeat_share"} if isinstance(value, dict) else value
