"""Runs all rules over a run, drops what another finding explains, and ranks the rest."""

from __future__ import annotations

from bessemer.diagnose.rules.alignment import judge_alignment
from bessemer.diagnose.rules.data import judge_data
from bessemer.diagnose.rules.loss import judge_gradients, judge_loss
from bessemer.diagnose.rules.rates import judge_rates
from bessemer.diagnose.rules.speed import judge_speed
from bessemer.diagnose.rules.view import JudgedRun
from bessemer.observe.foreign.series import ForeignRun
from bessemer.run.finding import SEVERITIES, Finding

# A finding with the first cause explains what the others are seen by.
EXPLAINS: dict[str, frozenset[str]] = {
    "schedule_restarted": frozenset({"lr_jump", "schedule_too_long", "optimizer_state_lost", "plateau"}),
    "lr_jump": frozenset(
        {"lr_too_high", "gradient_explosion", "plateau", "bad_batch", "weights_damaged", "diverged"}
    ),
    "loss_summed_over_accumulation": frozenset({"initial_loss_above_uniform", "lr_too_high", "validation_leak"}),
    "loss_divided_twice": frozenset({"validation_mismatch", "lr_too_low"}),
    "warmup_missing": frozenset({"lr_too_high", "plateau"}),
    "fp16_overflow": frozenset({"nonfinite_input", "weights_frozen"}),
    "lr_too_high": frozenset({"plateau", "gradient_explosion", "batch_too_small"}),
    "lr_too_low": frozenset({"plateau"}),
    "schedule_too_short": frozenset({"plateau"}),
    "overfitting": frozenset({"epoch_memorised", "validation_mismatch", "batch_too_small"}),
    "data_ordered": frozenset({"batch_too_small", "plateau", "bad_batch"}),
    "labels_masked": frozenset(
        {"weights_frozen", "gradient_vanishing", "lr_too_low", "validation_mismatch", "batch_too_small"}
    ),
    "labels_not_shifted": frozenset({"gradient_vanishing", "epoch_memorised", "batch_too_small"}),
    "batch_too_small": frozenset({"lr_too_high", "bad_batch", "weights_damaged"}),
    "memory_leak": frozenset({"step_time_grows"}),
    "slow_data": frozenset({"stragglers", "worker_stall", "slowed_down"}),
    "weights_frozen": frozenset({"plateau", "gradient_vanishing"}),
    "kl_blowup": frozenset({"reward_collapse"}),
}  # fmt: skip


def judge_run(run: ForeignRun) -> list[Finding]:
    """Findings of a run, the most severe and probable first. Empty if the rules find nothing."""
    view = JudgedRun(run)
    findings = [
        *judge_loss(view), *judge_gradients(view), *judge_rates(view), *judge_data(view), *judge_speed(view),
        *judge_alignment(view),
    ]  # fmt: skip
    findings = _without_repeats(_without_consequences(findings))
    return sorted(findings, key=lambda finding: (-SEVERITIES.index(finding.severity), -finding.confidence))


def _without_consequences(findings: list[Finding]) -> list[Finding]:
    names = {finding.rule for finding in findings if finding.severity != "note"}
    explained = {name for cause in names for name in EXPLAINS.get(cause, frozenset())}
    return [finding for finding in findings if finding.rule not in explained]


def _without_repeats(findings: list[Finding]) -> list[Finding]:
    """The most severe and confident finding of each cause; the steps of the others become its evidence."""
    best: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda f: (-SEVERITIES.index(f.severity), -f.confidence)):
        if finding.rule in best:
            best[finding.rule].evidence.setdefault("seen_too", []).append(finding.symptom)
        else:
            best[finding.rule] = finding
    return list(best.values())
