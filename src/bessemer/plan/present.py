"""Prints a plan: as text, as JSON, and as a commented spec that gives the same plan when it is planned again."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import Cost
from bessemer.plan.decision import Decision, Plan
from bessemer.plan.search.budget import BudgetOption, BudgetRanking
from bessemer.plan.search.proposal import Proposal
from bessemer.plan.search.search import Candidate, explain_loss
from bessemer.spec.document import parse_scalar, parse_yaml
from bessemer.spec.load import validate
from bessemer.spec.quantity import human_bytes, human_count, human_time, parse_duration
from bessemer.spec.schema import RunSpec

WIDTH = 150  # of a printed line; the JSON and the written spec have the whole text
SHOWN_OPTIONS = 8  # of a ranking
SPEC_WIDTH = 110  # of a comment in the written spec
PLAIN = re.compile(r"[A-Za-z0-9][\w ./%-]*")


def title(proposal: Proposal) -> str:
    size, tokens = human_count(proposal.shape.parameters), human_count(proposal.tokens)
    idle = proposal.available.count - proposal.goal.cluster.count
    idle_words = f", {idle} of {proposal.available.count} idle" if idle else ""
    return f"{size} parameters on {tokens} tokens, {proposal.goal.cluster}{idle_words}"


def proposal_lines(proposal: Proposal, width: int = WIDTH) -> list[str]:
    lines = [title(proposal), "", *decision_lines(proposal.plan, width), "", *memory_bar(proposal), ""]
    lines += speed_lines(proposal)
    lines += [f"  cost    ${cost.usd:>12,.0f}  {offer(cost)}" for cost in proposal.costs[:5]]
    best, goal = proposal.best, proposal.goal
    if not proposal.costs:
        lines.append(f"  cost    no provider in the price list rents {goal.cluster.count} x {goal.cluster.gpu.name}")
    others = [("next", other) for other in proposal.result.ranked[1:3]]
    others += [("not ", other) for other in proposal.result.too_large[:1]]
    lines += [f"  {word}    {other.name()}: {explain_loss(best, other, goal)}"[:width] for word, other in others]
    return lines + [f"  note    {note}" for note in proposal.notes]


def decision_lines(plan: Plan, width: int = WIDTH) -> list[str]:
    rows = [(key, value, f"{reason} [{source}]") for key, value, reason, source in plan.rows()]
    first, second = max(len(row[0]) for row in rows), min(44, max(len(row[1]) for row in rows))
    return [f"  {key:<{first}}  {value:<{second}}  {reason}"[:width] for key, value, reason in rows]


def speed_lines(proposal: Proposal) -> list[str]:
    """Tokens per second, where the time of a step goes, and days, each with its error."""
    best, goal, error = proposal.best, proposal.goal, proposal.error
    parts = sorted(best.time.parts.items(), key=lambda item: -item[1])
    times = [proposal.wall_s, proposal.wall_s / (1 + error), proposal.wall_s / (1 - error)]
    unit = " days" if times[-1] >= 86_400 else ""
    expected, soonest, latest = (f"{s / 86_400:,.1f}" if unit else human_time(s) for s in times)
    hours = proposal.wall_s / 3600 * goal.cluster.count
    return [
        f"  speed   {best.tokens_per_s:,.0f} tokens/s, {best.mfu:.1%} MFU, a step in {best.time.total_s:.2f} s "
        f"(mean error {error:.0%}: {best.time.basis})",
        "  a step  " + ", ".join(f"{name} {s / best.time.total_s:.0%}" for name, s in parts if s),
        f"  time    {expected}{unit} ({soonest} to {latest}), {hours:,.0f} GPU-hours, "
        f"including failures (goodput {proposal.seconds / proposal.wall_s:.1%})",
    ]


def offer(cost: Cost) -> str:
    """Provider, region, term and price per hour."""
    price, notes = cost.price, f" ({'; '.join(cost.notes)})" if cost.notes else ""
    term = price.term.replace("_", " ")
    return f"{price.provider} {price.region}, {term} at ${price.usd_hour:.2f} (prices of {price.date}){notes}"


def memory_bar(proposal: Proposal, cells: int = 60) -> list[str]:
    """Memory of the fullest GPU as a bar."""
    needs, capacity = proposal.best.needs, proposal.goal.cluster.gpu.memory_bytes
    kinds = {
        "W weights": needs.weights, "G gradients": needs.gradients, "M moments": needs.moments,
        "A activations": needs.activations,
        "+ rest": needs.total - needs.weights - needs.gradients - needs.moments - needs.activations,
    }  # fmt: skip
    bar = "".join(name[0] * round(cells * size / capacity) for name, size in kinds.items())[:cells]
    words = ", ".join(f"{name} {human_bytes(size)}" for name, size in kinds.items() if size > capacity / 1000)
    return [f"  memory  [{bar:<{cells}}] {human_bytes(needs.total)} of {human_bytes(capacity)}", f"          {words}"]


def proposal_json(proposal: Proposal) -> dict[str, Any]:
    goal = proposal.goal
    return {
        "model": proposal.shape.to_dict(), "parameters": proposal.shape.parameters, "tokens": proposal.tokens,
        "gpus": str(goal.cluster), "idle_gpus": proposal.available.count - goal.cluster.count,
        "context": goal.context, "batch_rows": goal.rows,
        "decisions": [asdict(decision) for decision in proposal.plan.decisions.values()],
        "best": _candidate_json(proposal.best),
        "next": [_candidate_json(other) for other in proposal.result.ranked[1:3]],
        "error": proposal.error, "training_s": proposal.seconds, "wall_s": proposal.wall_s,
        "gpu_hours": proposal.wall_s / 3600 * goal.cluster.count,
        "costs": [cost_json(cost) for cost in proposal.costs], "notes": list(proposal.notes),
    }  # fmt: skip


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": asdict(candidate.layout), "micro_batch": candidate.micro_rows,
        "activations": candidate.activations, "stages_each": candidate.virtual,
        "memory_bytes": asdict(candidate.needs) | {"total": candidate.needs.total},
        "step": candidate.time.to_dict(), "tokens_per_s": candidate.tokens_per_s, "mfu": candidate.mfu,
    }  # fmt: skip


def cost_json(cost: Cost) -> dict[str, Any]:
    price = cost.price
    return {
        "provider": price.provider, "region": price.region, "term": price.term, "usd": cost.usd, "days": cost.days,
        "usd_hour": price.usd_hour, "date": price.date, "estimate": price.estimate, "energy_kwh": cost.energy_kwh,
        "carbon_kg": cost.carbon_kg, "parts_usd": dict(cost.parts),
    }  # fmt: skip


def ranking_lines(ranking: BudgetRanking) -> list[str]:
    """The best offer of each GPU type and term, why other types lost, and the plan of the best one."""
    limits = ranking.limits
    default = " (no --deadline was given)" if limits.default_deadline else ""
    lines = [f"within {limits}{default}, cheapest first:", ""]
    best_offers: dict[tuple[str, str], tuple[BudgetOption, Cost]] = {}
    for option, cost in ranking.offers():
        best_offers.setdefault((option.name, cost.price.term), (option, cost))
    for option, cost in list(best_offers.values())[:SHOWN_OPTIONS]:
        price = cost.price
        place = f"{price.provider} {price.region}, {price.term.replace('_', ' ')} at ${price.usd_hour:.2f}"
        notes = f" ({'; '.join(cost.notes)})" if cost.notes else ""
        mfu = f"{option.proposal.best.mfu:.0%} MFU"
        row = f"  {option.name:<18} {human_time(cost.wall_s):>8}  ${cost.usd:>12,.0f}  {mfu}  {place}{notes}"
        lines.append(row[:WIDTH])
    if ranking.lost:
        lines.append("")
        lines += [f"  {name:<18} lost: {why}"[:WIDTH] for name, why in ranking.lost[:SHOWN_OPTIONS]]
        if more := ranking.lost[SHOWN_OPTIONS:]:
            lines.append(f"  and {len(more)} more: {', '.join(name for name, _ in more)}"[:WIDTH])
    cluster = ranking.best.goal.cluster
    if cluster.count < cluster.gpu.node:
        lines.append(f"  note: some providers rent only whole nodes of {cluster.gpu.node} {cluster.gpu.name}")
    return [*lines, "", *proposal_lines(ranking.best)]


def ranking_json(ranking: BudgetRanking) -> dict[str, Any]:
    offers = [
        {"gpus": option.proposal.goal.cluster.count, "gpu": option.proposal.goal.cluster.gpu.name,
         "mfu": option.proposal.best.mfu, **cost_json(cost)}
        for option, cost in ranking.offers()
    ]  # fmt: skip
    limits = {"budget_usd": ranking.limits.budget_usd, "deadline_days": ranking.limits.deadline_s / 86_400}
    return proposal_json(ranking.best) | {
        "limits": limits, "offers": offers, "lost": [{"gpus": name, "why": why} for name, why in ranking.lost],
    }  # fmt: skip


def spec_text(proposal: Proposal, command: str = "") -> str:
    """YAML of the run: every decision under its key, its reason as a comment above. Ready for `bessemer train` once the
    data is named."""
    spec = proposal.request.spec
    data = spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if data.get("name") == "auto":
        del data["name"]
    comments: dict[str, str] = {}
    for decision in proposal.plan.decisions.values():
        if not _is_spec_key(decision.key, data):
            continue
        basis = f"; {decision.basis}" if decision.basis else ""
        comments[decision.key] = f"{decision.reason} [{decision.source}{basis}]"
        if decision.key != "model":
            _set_key(data, decision.key, _spec_value(decision, proposal))
    if proposal.goal.precision == "fp16" and spec.precision == "auto":
        data.setdefault("lints", {}).setdefault("silence", []).append("fp16_on_new_hardware")
        comments["lints"] = f"{proposal.goal.cluster.gpu.name} is not new"
    if proposal.request.from_options:
        comments["data.sources"] = "yours: files, folders, globs or URLs of text"
    ordered = {key: data[key] for key in RunSpec.model_fields if key in data}
    text = "\n".join([*_header(proposal, command), "", *_yaml_lines(ordered, comments, "", 0)]) + "\n"
    validate(
        parse_yaml(text, "the planned spec")
    )  # an error here is a bug of the planner; `train` should not be the first
    return text


def write_spec(path: Path, text: str) -> None:
    if path.exists():
        raise UserError(f"--write {path}: the file exists: give another name, or remove it")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write {path}: cannot be written: {error.strerror}") from None


def _header(proposal: Proposal, command: str) -> list[str]:
    lines = [title(proposal), *(line.strip() for line in speed_lines(proposal))]
    if proposal.costs:
        lines.append(f"cost    from ${proposal.costs[0].usd:,.0f} at {offer(proposal.costs[0])}")
    lines += [f"note    {note}" for note in proposal.notes]
    if steps := proposal.plan.decisions.get("steps"):
        lines.append(f"steps   {steps.value:,}: {steps.reason}")
    lines += [f"by      {command}"] if command else []
    return [f"# {part}" for line in lines for part in textwrap.wrap(line, SPEC_WIDTH, subsequent_indent="        ")]


def _is_spec_key(key: str, data: Mapping[str, Any]) -> bool:
    """False for `steps`, which is only counted, and for parts of a model that the spec names by its preset."""
    preset = key.startswith("model.") and isinstance(data.get("model"), str)
    return key != "steps" and not preset


def _spec_value(decision: Decision, proposal: Proposal) -> Any:
    if decision.key == "model.rope":
        return {"theta": proposal.shape.rope.theta}
    if decision.source == "asked":  # as the user wrote it
        value: Any = proposal.request.spec.model_dump(mode="json", exclude_none=True)
        for part in decision.key.split("."):
            value = value[part]
        return value
    if decision.key == "checkpoint.every":
        return f"{max(1, round(parse_duration(decision.value) / 60))} min"
    if decision.key == "schedule.warmup":
        return f"{decision.value} steps"
    return decision.value


def _set_key(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[last] = value


def _yaml_lines(data: Mapping[str, Any], comments: Mapping[str, str], section: str, depth: int) -> list[str]:
    indent, lines = "  " * depth, []
    for name, value in data.items():
        key = f"{section}.{name}" if section else name
        if key in comments:
            wrapped = textwrap.wrap(comments[key], SPEC_WIDTH - len(indent), break_long_words=False)
            lines += [f"{indent}# {line}" for line in wrapped]
        if section == "data.sources" and isinstance(value, Mapping) and list(value) == ["path"]:
            value = value["path"][0] if len(value["path"]) == 1 else value  # the short form
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{_yaml_scalar(name)}:", *_yaml_lines(value, comments, key, depth + 1)]
        else:
            lines.append(f"{indent}{_yaml_scalar(name)}: {_yaml_scalar(value)}")
    return lines


def _yaml_scalar(value: Any) -> str:
    """On one line: JSON, which is valid YAML, or a plain word that YAML reads back as the same string."""
    if (
        isinstance(value, str)
        and PLAIN.fullmatch(value)
        and isinstance(parse_scalar(value), str)
        and not value.endswith(" ")
    ):
        return value
    return json.dumps(value, ensure_ascii=False)
