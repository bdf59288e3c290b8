"""Tracker: what each forwarder implements; RunInfo and Row: what it gets."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.run.journal import Record, to_number
from bessemer.spec.load import load_spec
from bessemer.spec.observers import TrackerSpec

PROJECT = "bessemer"
# Module and class of each tracker in the spec.
KINDS = {
    "tensorboard": ("tensorboard", "TensorBoard"), "wandb": ("wandb", "Wandb"), "mlflow": ("mlflow", "MLflow"),
    "comet": ("comet", "Comet"), "clearml": ("clearml", "ClearML"), "trackio": ("trackio", "Trackio"),
    "prometheus": ("prometheus", "Prometheus"), "otel": ("otel", "OpenTelemetry"), "csv": ("tables", "Csv"),
    "parquet": ("tables", "Parquet"),
}  # fmt: skip
MISSING = "trackers: {name} needs the package {package}: pip install {package}"
MAX_LIST = 64  # numbers of a list that become metrics of their own


@dataclass
class RunInfo:
    """What a tracker knows about the run. `state` is its own memory, saved with the position: the run's id."""

    run: Run
    spec: TrackerSpec
    config: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def project(self) -> str:
        return self.spec.project or PROJECT

    @property
    def labels(self) -> list[str]:
        """Tags, with the group among them: for trackers without groups."""
        return [*self.spec.tags, *([f"group: {self.spec.group}"] if self.spec.group else [])]

    @property
    def id(self) -> str:
        """The id of the run, the same at every start."""
        return self.state.setdefault("id", f"{self.run.name}-{uuid.uuid4().hex[:8]}")

    def folder(self, name: str) -> Path:
        """Where files go: the spec's folder, else one in the run."""
        path = Path(self.spec.folder) if self.spec.folder else self.run.folder / "trackers" / name
        path.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class Row:
    """The numbers of one record. `prefix` is train or validation."""

    step: int
    time: float
    prefix: str
    values: dict[str, float]

    @property
    def named(self) -> dict[str, float]:
        return {f"{self.prefix}/{name}": value for name, value in self.values.items()}


class Tracker(ABC):
    """A destination. Any exception means that what was given has to be given again, after a new `open`; UserError means
    that trying again is of no use. Methods that a destination has no use for do nothing."""

    needs: tuple[str, str] = ("", "")  # module and package of its library

    def check(self, spec: TrackerSpec) -> None:
        """UserError if it cannot work: a library or a setting is missing. Imports nothing."""
        module, package = self.needs
        if module and importlib.util.find_spec(module) is None:
            raise UserError(MISSING.format(name=spec.to, package=package))

    def open(self, info: RunInfo) -> None:
        """Connect, and continue the run of `info.id`."""

    @abstractmethod
    def rows(self, rows: Sequence[Row]) -> None:
        """Metrics, oldest first. Some may have been given before."""

    def cut(self, step: int) -> None:
        """The run went back: rows of steps from `step` on are void and follow again."""

    def text(self, kind: str, step: int, text: str) -> None:
        """A sample, or a note about a rollback, a veto, a checkpoint."""

    def report(self, path: Path) -> None:
        """A report of the run, as a file."""

    def checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint that was saved, by reference."""
        self.text("checkpoint", step, str(folder.resolve()))

    def flush(self) -> None:
        """Return when what was given is delivered or safe on the disk."""

    def close(self, state: str) -> None:
        """The run ended in this state: finished, failed, stopped, interrupted; empty if the run goes on."""


def make_row(record: Record, prefix: str, time_s: float) -> Row | None:
    """The numbers of a record; None for one without a step."""
    step = to_number(record.get("step"))
    if step is None or not math.isfinite(step):
        return None
    values: dict[str, float] = {}
    for name, value in record.items():
        if name in ("step", "time"):
            continue
        if name == "veto":
            values["vetoed"] = float(value is not None)
        else:
            _add_numbers(values, name, value)
    recorded = to_number(record.get("time"))
    return Row(int(step), recorded if recorded is not None else time_s, prefix, values)


def _add_numbers(values: dict[str, float], name: str, value: Any) -> None:
    if isinstance(value, bool):
        values[name] = float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _add_numbers(values, f"{name}/{key}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value[:MAX_LIST]):
            _add_numbers(values, f"{name}/{i}", item)
    elif (number := to_number(value)) is not None:
        values[name] = number


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as `a.b.c: value`; lists and nulls as text."""
    if isinstance(value, dict):
        parts = [flatten(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items()]
        return {key: item for part in parts for key, item in part.items()}
    return {prefix: value if isinstance(value, (str, int, float, bool)) else json.dumps(value)}


def read_config(run: Run) -> dict[str, Any]:
    """What was asked for and what was decided, by key. Sections that the run does not use are left out."""
    requested = load_spec(run.folder / "spec.yaml").model_dump(mode="json", exclude_defaults=True)
    decided: dict[str, Any] = {}
    if (plan := run.folder / "plan.json").exists():
        decided = {f"plan.{entry['key']}": entry["value"] for entry in json.loads(plan.read_text())["decisions"]}
    return flatten(requested) | flatten(decided)


def make_tracker(name: str) -> Tracker:
    """The tracker of a name in the spec."""
    module, kind = KINDS[name]
    return getattr(importlib.import_module(f"bessemer.observe.trackers.{module}"), kind)()
