"""The anomaly report: a pure function of the `IncidentCase`, as Markdown, HTML and JSON; and its one-line summary.

What happened and what was done come first, the evidence after.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from bessemer.data.stream.exclusions import FILE_NAME, Exclusion, suspect_files
from bessemer.observe.figure import LineChart
from bessemer.observe.format import short_path
from bessemer.observe.page import (
    Block,
    Code,
    Items,
    Section,
    Table,
    Text,
    excerpt,
    format_number,
    format_share,
    html_page,
    make_visible,
    markdown,
)
from bessemer.run.journal import to_number
from bessemer.spec.quantity import human_time
from bessemer.storage import write_atomic
from bessemer.trial.case import AccusedDocument, Action, IncidentCase

_LINE_CHARS = 700
_MOST_FILES, _MOST_RANGES = 3, 6

ADVICE = {
    "data": "Read the excerpts: if more documents of that kind are in the data, a step in data.clean removes them all "
    "before training, while an exclusion list only names those that were caught.",
    "data x state": "These documents do no harm on other weights, so to exclude them is no cure: to skip the batch was "
    "enough. If such steps come back, lower optimizer.lr or optimizer.clip, or lengthen schedule.warmup.",
    "numerics": "The same step is normal in fp32, so rounding or overflow makes it: train with precision: fp32, or "
    "bound what grows in the layers named here (model.qk_norm: true bounds attention logits). The data is innocent.",
    "hardware": "The same step gives different results on this machine: take the host out of the run and test its "
    "memory and accelerators (on NVIDIA: dcgmi diag -r 3, and the ECC counters of nvidia-smi -q). Checkpoints written "
    "since it began to err are suspect. The data is innocent.",
    "learning rate": "The step is normal with a lower rate: lower optimizer.lr or lengthen schedule.warmup, and see "
    "what changed the rate lately.",
    "undetermined": "No cause was proven, and nothing is excluded on a guess. To look further, give trials more time "
    "(guard: {trial: {budget: 300s}}) or repeat this one by hand with bessemer replay.",
}


def summary(case: IncidentCase) -> str:
    """Two sentences: what happened; why, and what was done."""
    event = ", ".join([f"At step {case.step:,} of run {case.run}: {case.symptom.rstrip('.')}", *deviations(case)])
    if case.trial is None:
        why = f"It was not put on trial ({no_trial(case)})"
    else:
        why = f"The trial says {case.trial.verdict} (confidence {format_number(case.trial.confidence, '.2f')})"
        why += f": {_documents(documents)}" if (documents := convicted(case)) else ""
    done = _done([action for action in case.actions if action.kind != "skip"])
    return f"{event}. {'; '.join([why, *done, recovery(case, numbers=False)])}."


def deviations(case: IncidentCase) -> list[str]:
    """Loss and gradient norm of the step next to the normal values."""
    seen, normal, clauses = case.observed, case.normal, []
    for name, key, z, usual in (
        ("loss", "loss", "loss_z", normal.loss),
        ("gradient norm", "grad_norm", "grad_z", normal.grad_norm),
    ):
        if key in seen:
            sigmas = f" ({format_number(seen[z], ',.0f')} sigma)" if z in seen else ""
            clauses.append(f"{name} {format_number(seen[key])} where {format_number(usual)} is normal{sigmas}")
    return clauses


def one_line(case: IncidentCase) -> str:
    """The message for the team's channel."""
    parts = [f"{case.run} step {case.step:,}: {case.symptom}", *_done(case.actions), recovery(case)]
    if case.trial is None:
        parts.append(f"no trial: {no_trial(case)}")
    else:
        documents = convicted(case)
        why = _documents(documents) if documents else case.trial.reason
        parts.append(f"verdict: {case.trial.verdict} ({format_number(case.trial.confidence, '.2f')}): {why}")
        for experiment in case.trial.experiments:
            if experiment.name == "without the accused" and experiment.normal:
                parts.append("without these rows the batch is normal")
            elif experiment.name == "earlier weights":
                parts.append(f"at earlier weights the same batch is {'normal' if experiment.normal else 'no better'}")
    line = make_visible(" ".join("; ".join(dict.fromkeys(parts)).split()))
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


def advice(case: IncidentCase) -> list[str]:
    """How to prevent it: the case's own advice, and that of the verdict."""
    return [*case.prevention, ADVICE[case.trial.verdict if case.trial else "undetermined"]]


def convicted(case: IncidentCase) -> list[AccusedDocument]:
    return [document for document in case.trial.accused if document.convicted] if case.trial else []


def no_trial(case: IncidentCase) -> str:
    """Why there was no trial: the reasons of the actions of kind `no trial`."""
    reasons = [action.reason for action in case.actions if action.kind == "no trial"]
    return "; ".join(dict.fromkeys(reasons)) or "no reason was recorded"


def recovery(case: IncidentCase, numbers: bool = True) -> str:
    outcome = case.recovery
    if outcome is None:
        return "whether the loss rejoins its trend is not known yet"
    known = numbers and outcome.loss is not None
    against = f" (loss {format_number(outcome.loss)}, trend {format_number(outcome.trend)})" if known else ""
    if outcome.rejoined_at is None:
        return f"the loss has not rejoined its trend{against}"
    after = "" if outcome.steps is None else f", after {outcome.steps:,} steps"
    return f"the loss rejoined its trend at step {outcome.rejoined_at:,}{after}{against}"


def _documents(documents: Sequence[AccusedDocument]) -> str:
    """`web-0017.jsonl rows 45,000-45,127 (91.0% of the loss), one 3-token pattern repeated 4,812 times`."""
    by_file: dict[str, list[AccusedDocument]] = {}
    for document in documents:
        by_file.setdefault(document.file, []).append(document)
    clauses = []
    for file, group in list(by_file.items())[:_MOST_FILES]:
        name = "/".join(file.split("/")[-2:])  # the tables have the full path
        text = f"{name} row{'s' * (len(group) > 1)} {_ranges([document.row for document in group])}"
        if shares := [document.loss_share for document in group if document.loss_share is not None]:
            text += f" ({format_share(sum(shares))} of the loss)"
        # The trial writes a repetition before the text of an excerpt.
        pattern = re.match(r"\[(one \d+-token pattern repeated \d+ times)\]", group[0].excerpt)
        clauses.append(f"{text}, {pattern[1]}" if pattern else text)
    more = len(by_file) - _MOST_FILES
    return "; ".join([*clauses, f"and {more} more files"] if more > 0 else clauses)


def _ranges(numbers: Sequence[int]) -> str:
    """`5,000-5,003, 5,007`."""
    places = enumerate(sorted(set(numbers)))
    runs = [[value for _, value in run] for _, run in groupby(places, lambda place: place[1] - place[0])]
    ranges = [f"{run[0]:,}-{run[-1]:,}" if len(run) > 1 else f"{run[0]:,}" for run in runs[:_MOST_RANGES]]
    more = len(runs) - _MOST_RANGES
    return ", ".join([*ranges, f"{more} more"] if more > 0 else ranges)


def _done(actions: Sequence[Action]) -> list[str]:
    """The actions as short clauses."""
    clauses = []
    if vetoed := [action.step for action in actions if action.kind == "veto"]:
        clauses.append(f"step{'s' * (len(set(vetoed)) > 1)} {_ranges(vetoed)} vetoed, weights untouched")
    for action in actions:
        to, position = to_number(action.details.get("to_step")), to_number(action.details.get("position"))
        if action.kind == "rollback":
            clauses.append("rolled back" if to is None else f"rolled back to step {to:,.0f}")
        elif action.kind == "skip":
            clauses.append("data skipped" + ("" if position is None else f" up to position {position:,.0f}"))
        elif action.kind == "stop":
            clauses.append(f"the run was stopped: {action.reason}")
        elif action.kind not in ("veto", "save", "no trial"):
            clauses.append(action.reason or action.kind)
    return list(dict.fromkeys(clauses))


_MOST_DOCUMENTS = 30  # in a table; the JSON lists all
_MOST_EXCERPTS = 8


def write_report(folder: Path, case: IncidentCase) -> dict[str, Path]:
    """Write or replace reports/anomaly-STEP.md, .html and .json in the run's folder."""
    title = f"{case.run}: anomaly at step {case.step:,}"
    sections = report_sections(case, short_path(str(folder / FILE_NAME)))
    record = case.to_json() | {"summary": summary(case), "one_line": one_line(case), "advice": advice(case)}
    texts = {
        "md": markdown(title, sections),
        "html": html_page(title, sections),
        "json": json.dumps(record, indent=1, default=str) + "\n",
    }
    paths = {kind: folder / "reports" / f"anomaly-{case.step:06d}.{kind}" for kind in texts}
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    for kind, path in paths.items():
        write_atomic(path, texts[kind])
    return paths


def case_exclusions(case: IncidentCase, from_step: int) -> list[Exclusion]:
    """The convicted documents as entries of the run's exclusion list."""
    verdict = f"{case.trial.verdict} ({case.trial.confidence:.2f})" if case.trial else "no trial"
    return [
        Exclusion(
            document.file, document.row, document.document_id, document.source, document.document, from_step, case.run,
            case.step, f"{verdict}: {case.symptom}", document.mean_loss, document.excerpt,
        )
        for document in convicted(case)
    ]  # fmt: skip


def report_sections(case: IncidentCase, list_path: str = FILE_NAME) -> list[Section]:
    """The sections of a report, in order. `list_path` is the run's exclusion list."""
    sections: list[Section] = [
        ("What happened", [Text(summary(case)), Text(f"When: {_when(case.time)}."), *_curves(case)]),
        ("How far from normal", [_magnitude(case)]),
        ("Verdict", _verdict(case)),
        ("What was done", [_actions(case)]),
        ("Recovery", [Text(f"{recovery(case).capitalize()}.")]),
        ("What prevents it", _prevention(case, list_path)),
    ]
    if trial := case.trial:
        layers = [
            [layer.name, layer.quantity, format_number(layer.value), format_number(layer.normal)]
            for layer in trial.layers
        ]
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


def _bands(case: IncidentCase) -> list[tuple[float, float]]:
    """The accepted ranges of the loss and of the gradient norm."""
    normal = case.normal
    width, factor = normal.loss_sigma * normal.loss_scale, normal.grad_sigma * normal.grad_scale
    spread = math.exp(factor) if abs(factor) < 700 else math.inf
    return [(normal.loss - width, normal.loss + width), (normal.grad_norm / spread, normal.grad_norm * spread)]


def _curves(case: IncidentCase) -> list[Block]:
    """Loss and gradient norm around the incident, in the order of time: after a rollback the steps start over."""
    rollbacks = [to_number(action.details.get("to_step")) for action in case.actions if action.kind == "rollback"]
    marks = {f"rolled back to step {to:,.0f}": to for to in rollbacks if to is not None and math.isfinite(to)}
    if case.recovery and case.recovery.rejoined_at is not None:
        marks["back on trend"] = float(case.recovery.rejoined_at)
    charts: list[Block] = []
    for (key, name), band in zip((("loss", "loss"), ("grad_norm", "gradient norm")), _bands(case), strict=True):
        records = [(to_number(one.get("step")), to_number(one.get(key)), bool(one.get("veto"))) for one in case.series]
        points = [(s, v, veto) for s, v, veto in records if s is not None and math.isfinite(s) and v is not None]
        if points:
            steps, values, _ = map(list, zip(*points, strict=True))
            flagged = [i for i, (_, value, veto) in enumerate(points) if veto or not math.isfinite(value)]
            finite = [value for value in values if math.isfinite(value)]
            # A spike would flatten the rest of the curve on a linear scale.
            log = bool(finite) and min(*finite, *band) > 0 and max(finite) > 4 * min(finite)
            limits = min([*steps, *marks.values()]), max([*steps, *marks.values()])
            title = f"{name} (log scale)" if log else name
            charts.append(LineChart(title, steps, {name: values}, "step", False, log, marks, band, flagged, limits))
    return charts


def _magnitude(case: IncidentCase) -> Table:
    seen, rows = dict(case.observed), []
    usual = ("loss", case.normal.loss, "loss_z"), ("grad_norm", case.normal.grad_norm, "grad_z")
    for (key, normal, z), (low, high) in zip(usual, _bands(case), strict=True):
        distance = f"{format_number(seen.pop(z), ',.1f')} sigma" if z in seen else ""
        accepted = f"{format_number(low)} to {format_number(high)}"
        rows.append(
            [
                key.replace("grad_", "gradient "),
                format_number(seen.pop(key, None)),
                format_number(normal),
                accepted,
                distance,
            ]
        )
    rows += [[key, format_number(value), "", "", ""] for key, value in seen.items()]
    return Table(["", "at the step", "normal", "accepted", "distance"], rows)


def _verdict(case: IncidentCase) -> list[Block]:
    trial = case.trial
    if trial is None:
        return [Text(f"None: the step was not put on trial ({no_trial(case)}).")]
    state = "The weights behave on other batches." if trial.state_healthy else "The weights themselves are damaged."
    began = "" if trial.began_at is None else f" The update of step {trial.began_at:,} did the damage."
    blocks: list[Block] = [
        Text(f"{trial.verdict}, confidence {format_number(trial.confidence, '.2f')}: {trial.reason}"),
        Text(f"{state}{began} The trial took {human_time(trial.seconds)}."),
    ]
    if trial.experiments:
        rows = [
            [
                one.name,
                one.question,
                format_number(one.loss),
                format_number(one.grad_norm),
                "yes" if one.normal else "NO",
                one.detail,
            ]
            for one in trial.experiments
        ]
        head = ["experiment", "question", "loss", "gradient norm", "normal?", "detail"]
        blocks.append(Table(head, rows, [not one.normal for one in trial.experiments]))
    if trial.spread is not None:
        blocks.append(Text(f"Repeats agree within {format_number(trial.spread, '.1e')} (relative) on this device."))
    return blocks


def _actions(case: IncidentCase) -> Block:
    rows = []
    for action in case.actions:
        details = ", ".join(f"{key} {value}" for key, value in action.details.items())
        rows.append([f"{action.step:,}", action.kind, action.reason, details])
    return Table(["step", "action", "reason", "details"], rows) if rows else Text("Nothing.")


def _prevention(case: IncidentCase, list_path: str) -> list[Block]:
    blocks: list[Block] = []
    if convicted(case):
        path = list_path if re.fullmatch(r"[\w./-]+", list_path) else json.dumps(list_path)
        blocks.append(Code(f"data: {{exclude: [{path}]}}", "This line in a spec keeps the convicted documents out:"))
    seen = Counter(document.file for document in case.trial.accused) if case.trial else None
    for shard in suspect_files(case_exclusions(case, case.step), seen):
        caption = f"{shard.file}: {shard.reason}. To leave out the whole file, add this line to {list_path}:"
        blocks.append(Code(shard.to_line(), caption))
    return [*blocks, Items(advice(case))]


def _accused(accused: list[AccusedDocument]) -> list[Block]:
    if not accused:
        return [Text("None is accused.")]
    listed = sorted(accused, key=lambda document: not document.convicted)[:_MOST_DOCUMENTS]
    rows = [
        [
            f"{document.file}:{document.row}", document.source, document.document_id, f"{document.tokens:,}",
            format_number(document.mean_loss), format_share(document.loss_share), format_share(document.grad_share),
            "yes" if document.convicted else "no",
        ]
        for document in listed
    ]  # fmt: skip
    head = ["file:row", "source", "id", "tokens", "mean loss", "of the loss", "of the gradient", "convicted"]
    blocks: list[Block] = [Table(head, rows, [document.convicted for document in listed])]
    if len(accused) > len(listed):
        blocks.append(Text(f"And {len(accused) - len(listed):,} more, which the JSON report lists."))
    read = [document for document in listed if document.excerpt][:_MOST_EXCERPTS]
    return [*blocks, *(Code(excerpt(one.excerpt), f"{one.file}:{one.row}") for one in read)]


def _unknown(case: IncidentCase) -> list[str]:
    lines = []
    if case.trial is None:
        lines.append(f"The cause: there was no trial ({no_trial(case)}).")
    else:
        lines += [f"{name}: left out, the trial's time was up." for name in case.trial.cut_short]
        if case.trial.verdict == "undetermined":
            lines.append("The cause.")
        if any(one.grad_share is None for one in case.trial.accused):
            lines.append("Some documents' share of the gradient: only the most suspicious are measured.")
    if case.recovery is None:
        lines.append("Whether the loss rejoins its trend: this report is written again when that is known.")
    return lines or ["Every experiment of the trial was made."]
