"""Findings of a run folder's own journal: what the guard did, why the run failed, and the verdicts of trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from bessemer.observe.format import event_line
from bessemer.run.directory import Run
from bessemer.run.finding import Cause, Finding
from bessemer.run.journal import Record, to_number

# Verdict of a trial -> what to do. The trial's report has the details.
_VERDICTS = {
    "data": "Exclude the documents that the report names: `bessemer replay RUN --step STEP` shows them.",
    "data x state": "Skipping the batch was enough; if it comes back, lower `optimizer.lr` or `optimizer.clip`.",
    "numerics": "Train in fp32 (`precision: fp32`), or bound attention logits (`model.qk_norm: true`).",
    "hardware": "Drain the device that the report names, and check it with `dcgmi diag -r 3`.",
    "learning rate": "Lower `optimizer.lr` or lengthen `schedule.warmup` in the spec.",
}


def judge_events(run: Run) -> list[Finding]:
    """Critical: the failure that ended the run. Warnings: alarms, hangs, verdicts. Notes: vetoes."""
    events = list(run.events())
    trials = {event.get("step"): event for event in events if event.get("kind") == "trial"}
    findings = _failures(run, events)
    findings += [_trial(run, event) for event in trials.values()]
    findings += _vetoes(run, events, trials)
    for event in events:
        kind = event.get("kind")
        if kind == "alarm":
            cause = Cause(str(event.get("alarm", "alarm")), str(event.get("cause") or event.get("reason", "")),
                          float(event.get("confidence") or 0.6), "", str(event.get("fix", "")))  # fmt: skip
            findings.append(_finding(event, f"the guard's alarm: {event.get('reason', '')}", [cause], "warning"))
        elif kind in ("hang", "out_of_memory"):
            cause = Cause(str(kind), str(event.get("reason", "")), 0.7, f"`bessemer runs {run.folder.parent}`", "")
            findings.append(
                _finding(event, f"{str(kind).replace('_', ' ')} at step {event.get('step')}", [cause], "warning")
            )
    return findings


def _finding(event: Mapping[str, Any], symptom: str, causes: list[Cause], severity: str) -> Finding:
    number = to_number(event.get("step"))
    evidence = {name: event[name] for name in ("loss", "grad_norm", "checkpoint", "statistics") if name in event}
    try:
        evidence["text"] = event_line(dict(event)) or ""
    except (KeyError, TypeError):  # an event of an earlier version has other fields
        evidence["text"] = str(event.get("reason", ""))
    return Finding.of_causes(symptom, causes, severity=severity, step=None if number is None else int(number),
                             evidence=evidence)  # fmt: skip


def _failures(run: Run, events: list[Record]) -> list[Finding]:
    """Why the last start ended, if it failed or was stopped."""
    endings = [
        event for event in events if event.get("kind") in ("started", "failed", "stopped", "finished", "refused")
    ]
    if not endings or endings[-1].get("kind") not in ("failed", "stopped", "refused"):
        return []
    last = endings[-1]
    reason = str(last.get("reason", "no reason recorded"))
    cause = Cause(f"run_{last['kind']}", reason, 0.8, f"{run.folder / 'logs'}: the log of the rank that failed first",
                  f"bessemer train {run.folder / 'spec.yaml'}")  # fmt: skip
    return [_finding(last, f"the run {last['kind']}: {reason[:200]}", [cause], "critical")]


def _trial(run: Run, event: Record) -> Finding:
    verdict = str(event.get("verdict", "undetermined"))
    fix = _VERDICTS.get(verdict, "").replace("RUN", str(run.folder)).replace("STEP", str(event.get("step")))
    cause = Cause(f"trial_{verdict}", str(event.get("reason", "")), float(event.get("confidence") or 0.0),
                  f"{run.folder / 'reports'}: the report of this step", fix)  # fmt: skip
    return _finding(event, f"the trial of step {event.get('step'):,} says: {verdict}", [cause], "warning")


def _vetoes(run: Run, events: list[Record], trials: dict[Any, Record]) -> list[Finding]:
    vetoes = [event for event in events if event.get("kind") == "veto" and event.get("step") not in trials]
    if not vetoes:
        return []
    first = vetoes[0]
    reasons = Counter(str(event.get("reason", "")) for event in vetoes)
    documents = first.get("documents") or []
    text = "The guard withheld these updates: weights and moments are as before."
    if documents:
        text += f" The first batch holds {documents[0].get('file')}, row {documents[0].get('row')}."
    cause = Cause("vetoed_batch", text, 0.6, f"bessemer replay {run.folder} --step {first.get('step')}",
                  "None needed for single steps; exclude documents that come back.")  # fmt: skip
    steps = [event.get("step") for event in vetoes]
    finding = _finding(first, f"{len(vetoes)} steps vetoed, the first at {first.get('step'):,}: {first.get('reason')}",
                       [cause], "note")  # fmt: skip
    finding.evidence.update(steps=steps[:20], reasons=dict(reasons))
    return [finding]
