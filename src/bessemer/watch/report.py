"""`bessemer report`: a run on one page, to read and to send. Curves, plan and actual, incidents, results, cost, spec.

The page has no script and loads nothing. `watch export` writes the interactive page instead.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.export.card import TrainingEnergy, measure_energy, read_evaluations, score_table
from bessemer.observe.figure import LineChart
from bessemer.observe.page import Block, Code, Details, Items, Section, Table, Text, html_page, markdown
from bessemer.observe.watched import describe_event
from bessemer.plan.actual import compare, compare_run, comparison_json
from bessemer.plan.cost_model.cost import list_price
from bessemer.run.directory import LAYOUT, Run, summarize
from bessemer.run.journal import Record, json_ready, last_record
from bessemer.spec.quantity import human_bytes, human_count, human_time
from bessemer.watch import facts
from bessemer.watch.library import WatchedRun, cache_folder

BINS = 600
# A chart for each group of columns, with the axis' scale.
CHARTS = (
    ("Loss", ("loss", "validation:loss"), False),
    ("Learning rate", ("lr",), False),
    ("Gradient norm", ("grad_norm",), True),
    ("Speed, tokens/s", ("tokens_per_s",), False),
    ("Reward", ("reward",), False),
)
INCIDENTS = (
    "veto", "alarm", "rollback", "trial", "exclude", "lower_lr", "hang", "out_of_memory", "restarted", "failed",
    "control",
)  # fmt: skip
MARKED = ("rollback", "failed", "restarted")
MOST_MARKS, MOST_INCIDENTS = 6, 200


@dataclass(frozen=True)
class RunCost:
    """What the training took. Money is None without a price."""

    training_s: float  # sum of the steps that count
    elapsed_s: float  # from the first start to the last event
    devices: int
    usd_hour: float | None  # of one device
    price: str
    energy: TrainingEnergy | None

    @property
    def device_hours(self) -> float:
        return self.elapsed_s * self.devices / 3600

    @property
    def usd(self) -> float | None:
        return None if self.usd_hour is None else self.device_hours * self.usd_hour


class RunReport:
    """The content of the report of a run, finished or not."""

    def __init__(self, run: Run, usd_hour: float | None = None, region: str | None = None) -> None:
        self.run, self.summary = run, summarize(run)
        watched = WatchedRun(run.folder.resolve(), cache_folder())
        try:
            watched.refresh(wait=True)
            names = [name for _, columns, _ in CHARTS for name in columns]
            self.curves = watched.series(names, "step", None, None, BINS)["groups"]
            self.training_s = float(watched.x_of_steps("time")[1][-1]) if watched.rollup("steps").rows else 0.0
        finally:
            watched.close()
        self.events = list(run.events())
        self.last = last_record(run.steps_path) or {}
        self.comparison = compare_run(run)
        self.results = read_evaluations(run.folder)
        self.cost = self._cost(usd_hour, region)

    def html(self) -> str:
        return html_page(self.run.name, self.sections())

    def markdown(self) -> str:
        return markdown(self.run.name, self.sections())

    def to_json(self) -> dict[str, Any]:
        """The numbers of the report."""
        summary, cost = facts_of(self.summary), self.cost
        content = {
            **summary, "tokens": self.last.get("tokens"), "incidents": dict(self._counts()),
            "against_plan": comparison_json(*self.comparison) if self.comparison else None,
            "evaluations": self.results,
            "cost": {
                "training_s": cost.training_s, "elapsed_s": cost.elapsed_s, "devices": cost.devices,
                "device_hours": cost.device_hours, "usd_hour": cost.usd_hour, "usd": cost.usd,
                "energy_kwh": cost.energy and cost.energy.kwh, "carbon_g": cost.energy and cost.energy.grams,
            },
        }  # fmt: skip
        return dict(json_ready(content))

    def sections(self) -> list[Section]:
        return [
            ("", [Text(self._headline())]),
            ("Curves", list(self._charts())),
            ("Plan and actual", self._plan()),
            ("Incidents", self._incidents()),
            ("Results", self._results()),
            ("Time, energy and cost", [Items(self._cost_lines())]),
            ("Reproduce it", self._reproduction()),
        ]

    def _headline(self) -> str:
        summary, started = self.summary, self._started()
        parts = [f"{summary.state}" + (f": {summary.reason}" if summary.reason else "")]
        if summary.step is not None:
            parts.append(f"step {summary.step:,}" + (f" of {summary.total_steps:,}" if summary.total_steps else ""))
        if parameters := started.get("parameters"):
            parts.append(f"{human_count(parameters)} parameters")
        if tokens := self.last.get("tokens"):
            parts.append(f"{human_count(tokens)} tokens")
        for name, value in (("loss", summary.mean_loss), ("validation loss", summary.validation_loss)):
            if value is not None:
                parts.append(f"{name} {value:.4f}")
        return "; ".join(parts)

    def _started(self) -> Record:
        return next((event for event in self.events if event.get("kind") == "started"), {})

    def _charts(self) -> Iterator[LineChart]:
        marks: dict[str, float] = {}
        for event in self.events:
            step = event.get("step")
            if event.get("kind") in MARKED and isinstance(step, int) and len(marks) < MOST_MARKS:
                marks[f"{event['kind']} {step:,}"] = float(step)
        for title, names, log in CHARTS:
            for group in self.curves:
                series = {name: group["series"][name] for name in names if name in group["series"]}
                lines = {name.replace(":", " "): numbers(bins["mean"]) for name, bins in series.items()}
                # A spike of one step is visible though a bin holds many.
                lines |= {f"{name}, highest": numbers(bins["high"]) for name, bins in series.items() if "high" in bins}
                lines = {name: values for name, values in lines.items() if any(map(math.isfinite, values))}
                if lines:
                    source = "" if group["journal"] == "steps" else ", held out"
                    yield LineChart(title + source, numbers(group["x"]), lines, "step", log_y=log, marks=marks)

    def _plan(self) -> list[Block]:
        blocks: list[Block] = []
        if self.comparison:
            rows = [
                [row.name, *row.words, "" if row.ratio is None else f"{row.ratio:.2f}"]
                for row in compare(*self.comparison)
            ]
            blocks = [Table(["", "plan", "run", "run / plan"], rows), Text(self.comparison[0].basis)]
        decisions = facts.describe_run(self.run)["decisions"]
        rows = [[str(d.get(key, "")) for key in ("key", "value", "reason", "source")] for d in decisions]
        if rows:
            table = Table(["key", "value", "reason", "source"], rows)
            blocks.append(Details(f"{len(rows)} decisions of the planner", [table]))
        return blocks or [Text("The run has no plan, or too few steps to compare with it.")]

    def _counts(self) -> Counter[str]:
        return Counter(str(event["kind"]) for event in self.events if event.get("kind") in INCIDENTS)

    def _incidents(self) -> list[Block]:
        shown = [event for event in self.events if event.get("kind") in INCIDENTS]
        if not shown:
            return [Text("None: no veto, no alarm, no rollback, no restart.")]
        counts = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in sorted(self._counts().items()))
        rows = [[f"{event.get('step', '')}", describe_event(event)] for event in shown[:MOST_INCIDENTS]]
        blocks: list[Block] = [Text(counts), Table(["step", "what happened"], rows)]
        if (more := len(shown) - MOST_INCIDENTS) > 0:
            blocks.append(Text(f"{more:,} later ones are in events.jsonl."))
        names = [path.stem for path in sorted(self.run.folder.glob("reports/*.html"))]
        return [*blocks, Items([f"reports/{name}.html" for name in names])] if names else blocks

    def _results(self) -> list[Block]:
        validation, blocks = last_record(self.run.validation_path), list[Block]()
        if validation:
            sources: Mapping[str, Any] = validation.get("per_source") or {}
            rows = [["all", shown_number(validation.get("loss"))]]
            rows += [[name, shown_number(loss)] for name, loss in sources.items()] if len(sources) > 1 else []
            blocks.append(Table(["held-out source", f"loss at step {validation.get('step', 0):,}"], rows))
        if self.results:
            header, *rows = score_table(self.results)
            blocks.append(Table(header, rows))
        return blocks or [Text("The run has no held-out data and no evaluated task.")]

    def _cost(self, usd_hour: float | None, region: str | None) -> RunCost:
        times = [event["time"] for event in self.events if isinstance(event.get("time"), int | float)]
        layout = self.run.folder / LAYOUT
        devices = len(json.loads(layout.read_text())["ranks"]) if layout.exists() else 1
        on_cpu = self._started().get("device") == "cpu"
        price = "as given" if usd_hour is not None else ""
        if usd_hour is None and not on_cpu:
            usd_hour, price = list_price(str(self._started().get("machine", {}).get("name", "")))
        elapsed_s = max(times) - min(times) if times else 0.0
        energy = measure_energy(self.run, region)
        return RunCost(self.training_s, elapsed_s, 1 if on_cpu else devices, usd_hour, price, energy)

    def _cost_lines(self) -> list[str]:
        cost = self.cost
        lines = [
            f"{human_time(cost.training_s)} in steps, {human_time(cost.elapsed_s)} from the first start to the end"
        ]
        if cost.usd is None:
            lines.append("no price is known for this machine; give one with --usd-hour")
        else:
            plural = "s" if cost.devices > 1 else ""
            hours = f"{cost.device_hours:,.2f} h of {cost.devices} device{plural}"
            lines.append(f"${cost.usd:,.2f}: {hours} at ${cost.usd_hour:,.2f} an hour ({cost.price})")
        if cost.energy:
            grams = f", {cost.energy.grams:,.3g} g of CO2" if cost.energy.grams is not None else ""
            lines.append(f"{cost.energy.kwh:.3g} kWh{grams} ({cost.energy.source})")
        return lines

    def _reproduction(self) -> list[Block]:
        started = self._started()
        versions = ", ".join(f"{name} {version}" for name, version in started.get("versions", {}).items())
        machine = started.get("machine", {})
        memory = machine.get("memory_bytes")
        lines = [
            f"machine: {machine.get('name', 'unknown')}" + (f", {human_bytes(memory)}" if memory else ""),
            f"versions: {versions or 'unknown'}",
        ]
        saved = [event for event in self.events if event.get("kind") == "saved"]
        lines += [f"newest checkpoint: {saved[-1]['checkpoint']}"] if saved else []
        command = f"bessemer train {shlex.quote(str(self.run.folder / 'spec.yaml'))} --set name=again"
        spec = facts.read_text(self.run.folder / "spec.yaml")
        return [
            Items(lines),
            Code(command, "The same spec trains again. On a CPU with as many threads the losses are bit-identical."),
            Details("The spec with every default", [Code(spec)]),
        ]


def facts_of(summary: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(summary).items() if key not in ("folder", "age_s")}


def numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def shown_number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not finite"
