"""Makes findings out of scores: causes with the texts of the runbook and a line for the run's framework."""

from __future__ import annotations

from typing import Any

from bessemer.diagnose.rules.config import config_line
from bessemer.diagnose.rules.runbook import RUNBOOK
from bessemer.diagnose.rules.view import RunView
from bessemer.run.finding import Cause, Finding

LEAST = 0.05  # confidence under which a cause is not worth a line


def rank(view: RunView, **scores: float) -> list[Cause]:
    """Causes by identifier, with their confidence."""
    causes = []
    for name, confidence in scores.items():
        entry = RUNBOOK[name]
        line = config_line(view.run.format, entry.setting, suggested_value(view, entry.setting, entry.factor))
        causes.append(Cause(name, entry.text, round(confidence, 2), entry.check, f"{entry.fix} {line}".strip()))
    return [cause for cause in causes if cause.confidence >= LEAST]


def make_finding(
    text: str, causes: list[Cause], severity: str, step: float, evidence: dict[str, Any], unknown: str = ""
) -> Finding:
    return Finding.of_causes(text, causes, severity=severity, step=int(step), evidence=evidence, unknown=unknown)


def suggested_value(view: RunView, setting: str, factor: float) -> Any:
    """What the run should set: from its own value where that is known, else a usual one."""
    if setting == "lr":
        rates = view.curve("lr")
        peak = view.number("lr") or (float(rates.values.max()) if rates is not None else None)
        return peak * factor if peak else f"{factor:.2g} times the present rate"
    if setting == "length":
        limit = view.number("answer_limit") or view.number("context")
        return int(factor * limit) if limit else "another limit"
    steps = view.run.total_steps or view.last_step
    usual: dict[str, Any] = {
        "warmup": max(10, round(0.03 * steps)), "steps": steps, "clip": 1.0, "save": max(100, steps // 5), "epochs": 1,
        "accumulation": int(factor * (view.number("accumulation") or 1)), "kl": 0.05, "temperature": 1.0,
        "workers": max(4, int(2 * (view.number("workers") or 0))), "beta": factor * (view.number("beta") or 0.1),
        "samples": int(factor * (view.number("samples") or 8)),
    }  # fmt: skip
    return usual.get(setting, "")
