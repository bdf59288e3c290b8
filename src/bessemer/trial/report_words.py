"""A case in sentences: the two that open its report, the line for the team's channel, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from bessemer.run.journal import number
from bessemer.trial.case import Accused, Action, Case
from bessemer.trial.report_page import share, shown, visible

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


def summary(case: Case) -> str:
    """Two sentences: what happened, and why and what became of it."""
    what = ", ".join([f"At step {case.step:,} of run {case.run}: {case.symptom.rstrip('.')}", *deviations(case)])
    if case.trial is None:
        why = f"It was not put on trial ({no_trial(case)})"
    else:
        why = f"The trial says {case.trial.verdict} (confidence {shown(case.trial.confidence, '.2f')})"
        why += f": {_documents(found)}" if (found := convicted(case)) else ""
    done = _done([action for action in case.actions if action.kind != "skip"])
    return f"{what}. {'; '.join([why, *done, recovery(case, numbers=False)])}."


def deviations(case: Case) -> list[str]:
    """Loss and gradient norm of the step beside what is normal."""
    seen, normal, clauses = case.observed, case.normal, []
    for name, key, z, usual in (
        ("loss", "loss", "loss_z", normal.loss),
        ("gradient norm", "grad_norm", "grad_z", normal.grad_norm),
    ):
        if key in seen:
            sigmas = f" ({shown(seen[z], ',.0f')} sigma)" if z in seen else ""
            clauses.append(f"{name} {shown(seen[key])} where {shown(usual)} is normal{sigmas}")
    return clauses


def one_line(case: Case) -> str:
    """The message for the team's channel."""
    parts = [f"{case.run} step {case.step:,}: {case.symptom}", *_done(case.actions), recovery(case)]
    if case.trial is None:
        parts.append(f"no trial: {no_trial(case)}")
    else:
        found = convicted(case)
        why = _documents(found) if found else case.trial.reason
        parts.append(f"verdict: {case.trial.verdict} ({shown(case.trial.confidence, '.2f')}): {why}")
        for one in case.trial.experiments:
            if one.name == "without the accused" and one.normal:
                parts.append("without these rows the batch is normal")
            elif one.name == "earlier weights":
                parts.append(f"on earlier weights the same batch is {'normal' if one.normal else 'no better'}")
    line = visible(" ".join("; ".join(dict.fromkeys(parts)).split()))
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


def advice(case: Case) -> list[str]:
    """What prevents it the next time: what the case itself says, and what follows from the verdict."""
    return [*case.prevention, ADVICE[case.trial.verdict if case.trial else "undetermined"]]


def convicted(case: Case) -> list[Accused]:
    return [found for found in case.trial.accused if found.convicted] if case.trial else []


def no_trial(case: Case) -> str:
    """Why there was none: the reasons of actions of the kind `no trial`, each once."""
    reasons = [action.reason for action in case.actions if action.kind == "no trial"]
    return "; ".join(dict.fromkeys(reasons)) or "no reason was recorded"


def recovery(case: Case, numbers: bool = True) -> str:
    found = case.recovery
    if found is None:
        return "whether the loss rejoins its trend is not known yet"
    told = numbers and found.loss is not None
    against = f" (loss {shown(found.loss)}, trend {shown(found.trend)})" if told else ""
    if found.rejoined_at is None:
        return f"the loss has not rejoined its trend{against}"
    after = "" if found.steps is None else f", after {found.steps:,} steps"
    return f"the loss rejoined its trend at step {found.rejoined_at:,}{after}{against}"


def _documents(documents: Sequence[Accused]) -> str:
    """`web-0017.jsonl rows 45,000-45,127 (91.0% of the loss), one 3-token pattern repeated 4,812 times`."""
    by_file: dict[str, list[Accused]] = {}
    for found in documents:
        by_file.setdefault(found.file, []).append(found)
    told = []
    for file, group in list(by_file.items())[:_MOST_FILES]:
        name = "/".join(file.split("/")[-2:])  # the tables have the whole path
        text = f"{name} row{'s' * (len(group) > 1)} {_ranges([found.row for found in group])}"
        if shares := [found.loss_share for found in group if found.loss_share is not None]:
            text += f" ({share(sum(shares))} of the loss)"
        # The trial writes a repetition before the text of an excerpt.
        pattern = re.match(r"\[(one \d+-token pattern repeated \d+ times)\]", group[0].excerpt)
        told.append(f"{text}, {pattern[1]}" if pattern else text)
    more = len(by_file) - _MOST_FILES
    return "; ".join([*told, f"and {more} more files"] if more > 0 else told)


def _ranges(numbers: Sequence[int]) -> str:
    """`5,000-5,003, 5,007`."""
    places = enumerate(sorted(set(numbers)))
    runs = [[value for _, value in run] for _, run in groupby(places, lambda place: place[1] - place[0])]
    told = [f"{run[0]:,}-{run[-1]:,}" if len(run) > 1 else f"{run[0]:,}" for run in runs[:_MOST_RANGES]]
    more = len(runs) - _MOST_RANGES
    return ", ".join([*told, f"{more} more"] if more > 0 else told)


def _done(actions: Sequence[Action]) -> list[str]:
    """The actions as short clauses. Of the details, `to_step` of a rollback and `position` of a skip are read."""
    clauses = []
    if vetoed := [action.step for action in actions if action.kind == "veto"]:
        clauses.append(f"step{'s' * (len(set(vetoed)) > 1)} {_ranges(vetoed)} vetoed, weights untouched")
    for action in actions:
        to, position = number(action.details.get("to_step")), number(action.details.get("position"))
        if action.kind == "rollback":
            clauses.append("rolled back" if to is None else f"rolled back to step {to:,.0f}")
        elif action.kind == "skip":
            clauses.append("data skipped" + ("" if position is None else f" up to position {position:,.0f}"))
        elif action.kind == "stop":
            clauses.append(f"the run was stopped: {action.reason}")
        elif action.kind not in ("veto", "save", "no trial"):
            clauses.append(action.reason or action.kind)
    return list(dict.fromkeys(clauses))
