"""The model card of an export: data, training, evaluation, limits, energy and carbon, from the files of the run.

Nothing is invented: a section without records says so. Carbon is in grams, as the Hub's metadata wants it.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bessemer.data.curate.report import REPORT, source_table, step_table
from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import HOST_FACTOR, energy_kwh, load_prices
from bessemer.plan.hardware import find_gpu
from bessemer.run.directory import LAYOUT, Run
from bessemer.spec.load import load_spec
from bessemer.spec.quantity import human_count
from bessemer.spec.shape import ModelShape
from bessemer.storage import write_atomic

OWN_PUE = 1.2  # power usage effectiveness where no provider is known
_INCIDENTS = ("veto", "rollback", "hang", "out_of_memory", "restarted", "exclusions_offered", "failed")
_LIBRARIES = {"hf": "transformers", "gguf": "llama.cpp", "onnx": "onnxruntime", "pt": "pytorch"}


@dataclass(frozen=True)
class TrainingEnergy:
    """Energy of a run's training. `formula` is empty if it was measured."""

    kwh: float
    grams: float | None
    formula: str
    source: str
    place: str


def write_card(folder: Path, run: Path, kind: str, checks: Iterable[str], region: str | None = None) -> Path:
    """Write README.md into an export's folder."""
    path = folder / "README.md"
    write_atomic(path, card(run, kind, list(checks), region))
    return path


def card(place: Path, kind: str, checks: list[str], region: str | None = None) -> str:
    """The text of the card. `place` is a run's folder; an import has no records but its shape."""
    run = Run(place)
    shape = ModelShape.from_dict(json.loads((place / "model.json").read_text())["shape"])
    results, energy = read_evaluations(place), measure_energy(run, region)
    header: dict[str, Any] = {
        "library_name": _LIBRARIES[kind], "tags": ["bessemer", kind],
        "pipeline_tag": "text-classification" if shape.labels else "text-generation",
    }  # fmt: skip
    base = _base_model(place)
    header |= {"base_model": base} if base else {}
    header |= {"model-index": [_model_index(run.name, results)]} if results else {}
    if energy is not None and energy.grams is not None:
        header["co2_eq_emissions"] = {
            "emissions": round(energy.grams, 3), "source": energy.source,
            "training_type": "fine-tuning" if base else "pre-training", "geographical_location": energy.place,
            "hardware_used": _hardware(run),
        }  # fmt: skip
    limits = [
        f"- It was trained with a context of {_context(place)} tokens; longer texts were not measured.",
        "- It may repeat errors and prejudices of its data. It was not tested for safety beyond the results above.",
    ]
    sections = {
        f"{run.name}": [f"A language model of {human_count(shape.parameters)} parameters, trained with Bessemer."],
        "Data": _data_lines(place),
        "Training": _training_lines(run),
        "Evaluation": _evaluation_lines(run, results),
        "Limits": limits,
        "Energy and carbon": _energy_lines(energy),
        "This export": [f"- {line}" for line in checks] or ["The export was not compared with the model."],
    }
    text = "\n\n".join(
        f"{'#' if i == 0 else '##'} {title}\n\n" + "\n".join(lines) for i, (title, lines) in enumerate(sections.items())
    )
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n{text}\n"


def _context(place: Path) -> int | str:
    settings = place / "settings.json"
    return json.loads(settings.read_text())["context"] if settings.exists() else "an unknown number of"


def _base_model(place: Path) -> str | None:
    spec = load_spec(place / "spec.yaml") if (place / "spec.yaml").exists() else None
    start = spec and (spec.model.hf or spec.start_from)
    return Path(start).name if start else None


def _data_lines(place: Path) -> list[str]:
    """The tables of the curation report."""
    record = place / "data.json"
    report = Path(json.loads(record.read_text())["folder"], REPORT) if record.exists() else None
    if report is None or not report.exists():
        return ["The run has no curation report."]
    content = json.loads(report.read_text(encoding="utf-8"))
    lines = _markdown(source_table(content))
    return [*lines, "", "Curation:", "", *_markdown(step_table(content))] if content.get("steps") else lines


def _markdown(rows: list[list[str]]) -> list[str]:
    header, *body = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return [header, "|---" * len(rows[0]) + "|", *body]


def _training_lines(run: Run) -> list[str]:
    if not run.steps_path.exists():
        return ["The model was imported; its training is not recorded here."]
    steps = list(run.metrics())
    last: Mapping[str, Any] = steps[-1] if steps else {}
    started = next(run.events("started"), {})
    lines = [
        f"- Steps and tokens: {len(steps):,} and {last.get('tokens', 0):,}",
        f"- Last training loss: {last['loss']:.4f}" if "loss" in last else "- No step was recorded.",
    ]
    if (run.folder / "spec.yaml").exists():
        spec = load_spec(run.folder / "spec.yaml")
        lines.append(f"- Objective: {spec.objective}; optimizer: {spec.optimizer.name}; seed: {spec.seed}")
    if started:
        versions = started.get("versions", {})
        lines.append(f"- Hardware: {_hardware(run)}")
        lines.append("- Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    plan = run.folder / "plan.json"
    if plan.exists():
        decisions = json.loads(plan.read_text())["decisions"]
        lines += ["", "| setting | value | why |", "|---|---|---|"]
        lines += [f"| {d['key']} | {_cell(d['value'])} | {_cell(d['reason'])} |" for d in decisions]
    kinds = Counter(str(event["kind"]) for event in run.events() if event["kind"] in _INCIDENTS)
    vetoed = sum(bool(step.get("veto")) for step in steps)
    incidents = [f"{name.replace('_', ' ')} {count}" for name, count in sorted(kinds.items())]
    incidents += [f"updates refused {vetoed}"] if vetoed else []
    return [*lines, "", f"Incidents: {', '.join(incidents) or 'none'}."]


def _hardware(run: Run) -> str:
    started = next(run.events("started"), {}) if run.events_path.exists() else {}
    return str(started.get("machine", {}).get("name", started.get("device", "unknown")))


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def read_evaluations(place: Path) -> list[dict[str, Any]]:
    """The scores of the run's evaluations, of each task and metric those of its latest checkpoint."""
    scores: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted((place / "evaluations").glob("*/results.json")):
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))["bessemer"]["scores"]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # of another program
        for row in rows:
            kind = row["metric"] + (f" ({row['filter']})" if row["filter"] != "none" else "")
            interval = [row["low"], row["high"]] if row["low"] is not None else None
            scores[row["task"], kind] = {
                "task": row["task"], "metric": kind, "value": row["score"], "interval": interval,
                "questions": row["questions"], "shots": row["shots"], "checkpoint": file.parent.name,
                "clean": row.get("clean_score"),
            }  # fmt: skip
    return [score for score in scores.values() if isinstance(score["value"], int | float)]


def score_table(scores: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The scores of `read_evaluations` with a header; what the training data held is left out of `clean`."""
    rows = [["task", "metric", "value", "95 % interval", "questions", "shots", "checkpoint"]]
    rows[0] += ["without contaminated"] * any(score["clean"] is not None for score in scores)
    for score in scores:
        interval = " to ".join(f"{end:.4g}" for end in score["interval"] or ())
        row = [score["task"], score["metric"], f"{score['value']:.4g}", interval, f"{score['questions']:,}",
               str(score["shots"]), score["checkpoint"]]  # fmt: skip
        if len(rows[0]) > len(row):
            row.append("" if score["clean"] is None else f"{score['clean']:.4g}")
        rows.append(row)
    return rows


def _evaluation_lines(run: Run, results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    validations = list(run.validations()) if run.validation_path.exists() else []
    if validations:
        last = validations[-1]
        lines.append(
            f"Held-out loss {last['loss']:.4f} at step {last['step']:,}, over {last.get('tokens', 0):,} tokens."
        )
    if not results:
        return [*lines, "No task was evaluated."]
    return [*lines, "", *_markdown(score_table(results))]


def _model_index(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": score["task"], "type": score["task"]},
            "metrics": [{"type": score["metric"], "value": score["value"]}],
        }
        for score in results
    ]
    return {"name": name, "results": rows}


def measure_energy(run: Run, region: str | None) -> TrainingEnergy | None:
    """CodeCarbon's emissions.csv in the run's folder; else an estimate from rated power, for a GPU of the catalogue."""
    measured = run.folder / "emissions.csv"
    if measured.exists():
        with open(measured, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        kwh, kilograms = (sum(float(row[key]) for row in rows) for key in ("energy_consumed", "emissions"))
        place = rows[-1].get("country_name", "") if rows else ""
        return TrainingEnergy(kwh, 1000 * kilograms, "", "CodeCarbon", place)
    machine = next(run.events("started"), {}).get("machine", {}) if run.events_path.exists() else {}
    try:
        gpu = find_gpu(str(machine.get("name", "")))
    except UserError:
        return None
    hours = sum(float(step.get("step_s") or 0) for step in run.metrics()) / 3600
    layout = run.folder / LAYOUT
    gpus = len(json.loads(layout.read_text())["ranks"]) if layout.exists() else 1
    kwh = energy_kwh(gpu, hours * gpus, OWN_PUE)
    formula = f"{hours:.3g} h x {gpus} GPU x {gpu.watts} W rated x {HOST_FACTOR:g} for the host x PUE {OWN_PUE:g}"
    grams = kwh * load_prices().region(region).grams_kwh if region else None
    return TrainingEnergy(kwh, grams, formula, "estimated from rated power: " + formula, region or "")


def _energy_lines(energy: TrainingEnergy | None) -> list[str]:
    if energy is None:
        return ["Energy was not measured, and the hardware has no rated power here to estimate it from."]
    how = f"Estimate, not measured: {energy.formula}" if energy.formula else f"Measured by {energy.source}"
    lines = [f"{how}: {energy.kwh:.3g} kWh."]
    if energy.grams is None:
        return [*lines, "Carbon is not stated, since the region of the electricity is unknown (`--region`)."]
    return [*lines, f"Carbon: {energy.grams:,.3g} g CO2 equivalent ({energy.place or 'place not stated'})."]
