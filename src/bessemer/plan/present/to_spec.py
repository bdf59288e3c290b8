"""A plan as a spec: every decision under its key, with its reason, source and basis as a comment above it.

What comes out is checked by the same code as any spec, and planned again it gives the same plan.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.decision import Decision
from bessemer.plan.present.show import offer, speed, title
from bessemer.plan.search.proposal import Proposal
from bessemer.spec.document import parse, scalar
from bessemer.spec.load import validate
from bessemer.spec.schema import RunSpec

WIDTH = 110
PLAIN = re.compile(r"[A-Za-z0-9][\w ./%-]*")
INTERVAL = "checkpoint.every"


def spec_text(proposal: Proposal, command: str = "") -> str:
    """YAML of the run, ready for `bessemer train` once its data is named."""
    data = proposal.asked.spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if data.get("name") == "auto":
        del data["name"]
    comments: dict[str, str] = {}
    for decision in proposal.plan.decisions.values():
        if (key := _key(decision, data)) is None:
            continue
        basis = f"; {decision.basis}" if decision.basis else ""
        comments[key] = f"{decision.reason} [{decision.source}{basis}]"
        if key != "model":
            _put(data, key, _value(decision, proposal))
    if proposal.wish.precision == "fp16" and proposal.asked.spec.precision == "auto":
        silent = data.setdefault("lints", {}).setdefault("silence", [])
        silent.append("fp16_on_new_hardware")
        comments["lints"] = f"{proposal.wish.cluster.gpu.name} is not new"
    if proposal.asked.from_words:
        comments["data.sources"] = "yours: files, folders, globs or URLs of text"
    ordered = {key: data[key] for key in RunSpec.model_fields if key in data}
    text = "\n".join([*_head(proposal, command), "", *_lines(ordered, comments, "", 0)]) + "\n"
    validate(parse(text, "the planned spec"))  # a fault here is ours, and better told now than by `train`
    return text


def write_spec(path: Path, text: str) -> None:
    if path.exists():
        raise UserError(f"--write {path}: is there already: give another name, or remove it")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write {path}: cannot be written: {error.strerror}") from None


def _head(proposal: Proposal, command: str) -> list[str]:
    told = [title(proposal), *(line.strip() for line in speed(proposal))]
    if proposal.costs:
        told.append(f"cost    from ${proposal.costs[0].usd:,.0f} at {offer(proposal.costs[0])}")
    told += [f"note    {note}" for note in proposal.notes]
    steps = proposal.plan.decisions.get("steps")
    if steps:
        told.append(f"steps   {steps.value:,}: {steps.reason}")
    told += [f"by      {command}"] if command else []
    return [f"# {line}" for long in told for line in textwrap.wrap(long, WIDTH, subsequent_indent="        ")]


def _key(decision: Decision, data: Mapping[str, Any]) -> str | None:
    """Where the decision stands in a spec; None for what is only counted."""
    if decision.key == "steps":
        return None
    section = decision.key.split(".")[0]
    if section == "model" and decision.key != "model" and isinstance(data.get("model"), str):
        return None
    return decision.key


def _value(decision: Decision, proposal: Proposal) -> Any:
    if decision.key == "model.rope":
        return {"theta": proposal.shape.rope.theta}
    if decision.source == "asked":  # as the user wrote it
        return _kept(proposal.asked.spec, decision.key)
    if decision.key == INTERVAL:
        minutes = max(1, round(_seconds(decision.value) / 60))
        return f"{minutes} min"
    if decision.key == "schedule.warmup":
        return f"{decision.value} steps"
    return decision.value


def _seconds(text: str) -> float:
    from bessemer.spec.quantity import parse_duration

    return parse_duration(text)


def _kept(spec: RunSpec, key: str) -> Any:
    found: Any = spec.model_dump(mode="json", exclude_none=True)
    for part in key.split("."):
        found = found[part]
    return found


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        data = data.setdefault(part, {})
    data[last] = value


def _lines(data: Mapping[str, Any], comments: Mapping[str, str], above: str, depth: int) -> list[str]:
    pad, found = "  " * depth, []
    for name, value in data.items():
        key = f"{above}.{name}" if above else name
        if key in comments:
            wrapped = textwrap.wrap(comments[key], WIDTH - len(pad), break_long_words=False)
            found += [f"{pad}# {line}" for line in wrapped]
        if (
            above == "data.sources"
            and isinstance(value, Mapping)
            and list(value) == ["path"]
            and len(value["path"]) == 1
        ):
            value = value["path"][0]  # the short form
        nested = isinstance(value, Mapping) and bool(value)
        if nested:
            found += [f"{pad}{_leaf(name)}:", *_lines(value, comments, key, depth + 1)]
        else:
            found.append(f"{pad}{_leaf(name)}: {_leaf(value)}")
    return found


def _leaf(value: Any) -> str:
    """On one line, and read back as what it is: JSON is YAML, and plain words need no quotes."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and isinstance(scalar(value), str) and not value.endswith(" "):
        return value
    return json.dumps(value, ensure_ascii=False)
