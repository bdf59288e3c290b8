"""The anomaly report: a pure function of the `Case`, as Markdown, HTML and JSON.

Written for somebody who was woken by it: what happened and what was done come first, the evidence after.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from bessemer.data.exclude import FILE_NAME, Exclusion, convicted_shards
from bessemer.observe.words import short_path
from bessemer.run.directory import write_whole
from bessemer.run.journal import number
from bessemer.spec.quantity import human_time
from bessemer.trial.case import Accused, Case
from bessemer.trial.report_html import html_page
from bessemer.trial.report_page import Block, Code, Curve, Items, Section, Table, Text, excerpt, markdown, share, shown
from bessemer.trial.report_words import advice, convicted, no_trial, one_line, recovery, summary

__all__ = ["exclusions_of", "one_line", "report_sections", "write_report"]

_MOST_DOCUMENTS = 30  # in a table: a whole shard may be accused, and the JSON lists it
_MOST_EXCERPTS = 8


def write_report(folder: Path, case: Case) -> dict[str, Path]:
    """Writes reports/anomaly-STEP.md, .html and .json in the run's folder, or writes them again when the case went on.
    Each is replaced as a whole."""
    title = f"{case.run}: anomaly at step {case.step:,}"
    sections = report_sections(case, short_path(str(folder / FILE_NAME)))
    found = case.to_json() | {"summary": summary(case), "one_line": one_line(case), "advice": advice(case)}
    texts = {
        "md": markdown(title, sections),
        "html": html_page(title, sections),
        "json": json.dumps(found, indent=1, default=str) + "\n",
    }
    paths = {kind: folder / "reports" / f"anomaly-{case.step:06d}.{kind}" for kind in texts}
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    for kind, path in paths.items():
        write_whole(path, texts[kind])
    return paths


def exclusions_of(case: Case, from_step: int) -> list[Exclusion]:
    """What the case adds to the run's exclusion list: its convicted documents."""
    verdict = f"{case.trial.verdict} ({case.trial.confidence:.2f})" if case.trial else "no trial"
    return [
        Exclusion(
            found.file, found.row, found.document_id, found.source, found.document, from_step, case.run,
            case.step, f"{verdict}: {case.symptom}", found.mean_loss, found.excerpt,
        )
        for found in convicted(case)
    ]  # fmt: skip


def report_sections(case: Case, list_path: str = FILE_NAME) -> list[Section]:
    """Everything that a report says, in its order. `list_path` is the run's exclusion list."""
    sections: list[Section] = [
        ("What happened", [Text(summary(case)), Text(f"When: {_when(case.time)}."), *_curves(case)]),
        ("How far from normal", [_magnitude(case)]),
        ("Verdict", _verdict(case)),
        ("What was done", [_actions(case)]),
        ("Recovery", [Text(f"{recovery(case).capitalize()}.")]),
        ("What prevents it", _prevention(case, list_path)),
    ]
    if trial := case.trial:
        layers = [[layer.name, layer.quantity, shown(layer.value), shown(layer.normal)] for layer in trial.layers]
        head = ["layer", "quantity", "at the step", "on a normal batch"]
        none = Text("No layer stands out, or none was measured.")
        sections.append(("Documents", _accused(trial.accused)))
        sections.append(("Where it starts", [Table(head, layers) if layers else none]))
        changes = trial.changes or ["Nothing that the records show."]
        sections.append(("What changed lately", [Items(changes)]))
    return [*sections, ("What could not be determined", [Items(_unknown(case))])]


def _when(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "not known"


def _bands(case: Case) -> list[tuple[float, float]]:
    """The accepted ranges of the loss and of the gradient norm, whose scale is of its log."""
    normal = case.normal
    width, factor = normal.loss_sigma * normal.loss_scale, normal.grad_sigma * normal.grad_scale
    spread = math.exp(factor) if abs(factor) < 700 else math.inf
    return [(normal.loss - width, normal.loss + width), (normal.grad_norm / spread, normal.grad_norm * spread)]


def _curves(case: Case) -> list[Block]:
    rollbacks = [number(action.details.get("to_step")) for action in case.actions if action.kind == "rollback"]
    marks = [(to, "rolled back to here") for to in rollbacks if to is not None and math.isfinite(to)]
    if case.recovery and case.recovery.rejoined_at is not None:
        marks.append((float(case.recovery.rejoined_at), "back on trend"))
    curves: list[Block] = []
    for key, band in zip(("loss", "grad_norm"), _bands(case), strict=True):
        found = [(number(one.get("step")), number(one.get(key)), bool(one.get("veto"))) for one in case.series]
        points = [(s, v, veto) for s, v, veto in found if s is not None and math.isfinite(s) and v is not None]
        if points:
            name = "loss" if key == "loss" else "gradient norm"
            curves.append(Curve(name, points, band, marks))
    return curves


def _magnitude(case: Case) -> Table:
    seen, rows = dict(case.observed), []
    usual = ("loss", case.normal.loss, "loss_z"), ("grad_norm", case.normal.grad_norm, "grad_z")
    for (key, normal, z), (low, high) in zip(usual, _bands(case), strict=True):
        distance = f"{shown(seen.pop(z), ',.1f')} sigma" if z in seen else ""
        accepted = f"{shown(low)} to {shown(high)}"
        rows.append([key.replace("grad_", "gradient "), shown(seen.pop(key, None)), shown(normal), accepted, distance])
    rows += [[key, shown(value), "", "", ""] for key, value in seen.items()]
    return Table(["", "at the step", "normal", "accepted", "distance"], rows)


def _verdict(case: Case) -> list[Block]:
    trial = case.trial
    if trial is None:
        return [Text(f"None: the step was not put on trial ({no_trial(case)}).")]
    state = "The weights behave on other batches." if trial.state_healthy else "The weights themselves are damaged."
    began = "" if trial.began_at is None else f" The update of step {trial.began_at:,} did the damage."
    blocks: list[Block] = [
        Text(f"{trial.verdict}, confidence {shown(trial.confidence, '.2f')}: {trial.reason}"),
        Text(f"{state}{began} The trial took {human_time(trial.seconds)}."),
    ]
    if trial.experiments:
        rows = [
            [one.name, one.question, shown(one.loss), shown(one.grad_norm), "yes" if one.normal else "NO", one.detail]
            for one in trial.experiments
        ]
        head = ["experiment", "question", "loss", "gradient norm", "normal?", "detail"]
        blocks.append(Table(head, rows, [not one.normal for one in trial.experiments]))
    if trial.spread is not None:
        blocks.append(Text(f"Repeats agree within {shown(trial.spread, '.1e')} (relative) on this device."))
    return blocks


def _actions(case: Case) -> Block:
    rows = []
    for action in case.actions:
        details = ", ".join(f"{key} {value}" for key, value in action.details.items())
        rows.append([f"{action.step:,}", action.kind, action.reason, details])
    return Table(["step", "action", "reason", "details"], rows) if rows else Text("Nothing.")


def _prevention(case: Case, list_path: str) -> list[Block]:
    blocks: list[Block] = []
    if convicted(case):
        path = list_path if re.fullmatch(r"[\w./-]+", list_path) else json.dumps(list_path)
        blocks.append(Code(f"data: {{exclude: [{path}]}}", "This line in a spec keeps the convicted documents out:"))
    seen = Counter(found.file for found in case.trial.accused) if case.trial else None
    for shard in convicted_shards(exclusions_of(case, case.step), seen):
        caption = f"{shard.file}: {shard.reason}. To leave out the whole file, add this line to {list_path}:"
        blocks.append(Code(shard.to_line(), caption))
    return [*blocks, Items(advice(case))]


def _accused(accused: list[Accused]) -> list[Block]:
    if not accused:
        return [Text("None is accused.")]
    listed = sorted(accused, key=lambda found: not found.convicted)[:_MOST_DOCUMENTS]
    rows = [
        [
            f"{found.file}:{found.row}", found.source, found.document_id, f"{found.tokens:,}", shown(found.mean_loss),
            share(found.loss_share), share(found.grad_share), "yes" if found.convicted else "no",
        ]
        for found in listed
    ]  # fmt: skip
    head = ["file:row", "source", "id", "tokens", "mean loss", "of the loss", "of the gradient", "convicted"]
    blocks: list[Block] = [Table(head, rows, [found.convicted for found in listed])]
    if len(accused) > len(listed):
        blocks.append(Text(f"And {len(accused) - len(listed):,} more, which the JSON report lists."))
    read = [found for found in listed if found.excerpt][:_MOST_EXCERPTS]
    return [*blocks, *(Code(excerpt(one.excerpt), f"{one.file}:{one.row}") for one in read)]


def _unknown(case: Case) -> list[str]:
    found = []
    if case.trial is None:
        found.append(f"The cause: there was no trial ({no_trial(case)}).")
    else:
        found += [f"{name}: left out, the trial's time was up." for name in case.trial.cut_short]
        if case.trial.verdict == "undetermined":
            found.append("The cause.")
        if any(one.grad_share is None for one in case.trial.accused):
            found.append("Some documents' share of the gradient: only the most suspicious are measured.")
    if case.recovery is None:
        found.append("Whether the loss rejoins its trend: this report is written again when that is known.")
    return found or ["Every experiment of the trial was made."]
