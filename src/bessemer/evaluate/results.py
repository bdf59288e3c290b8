"""Scores with everything that is needed to judge and repeat them, as a table and in lm-eval's JSON shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer.errors import UserError
from bessemer.evaluate.statistics import (
    PAIRED_VARIANCE,
    Clusters,
    calibration_error,
    choice_confidence,
    detectable_difference,
    score_interval,
    standard_error,
)
from bessemer.statistics import Interval
from bessemer.storage import write_atomic

RESULTS = "results.json"


@dataclass
class TaskResult:
    """One metric of one task. `values` are those of the questions, in the order of `ids`; empty if the metric is no
    mean. `template` is a hash of what makes the prompts, `prompt` the first one as the model read it."""

    task: str
    metric: str
    values: list[float]
    ids: list[str]
    reported: float
    shots: int
    template: str
    prompt: str
    filter: str = "none"
    clusters: list[str] | None = None
    higher_is_better: bool = True
    formats: dict[str, float] = field(default_factory=dict)  # scores with other prompt formats
    contaminated: list[int] = field(default_factory=list)  # numbers of questions
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.task} {self.metric}" + (f" ({self.filter})" if self.filter != "none" else "")

    @property
    def interval(self) -> tuple[Interval, str]:
        return score_interval(self.values, self.groups)

    @property
    def groups(self) -> Clusters:
        return self.clusters

    @property
    def calibration(self) -> float | None:
        """ECE of multiple-choice questions, from the likelihoods of their choices."""
        if self.metric != "acc" or not self.values:
            return None
        rows = [choice_logps(row) for row in self.samples]
        if len(rows) != len(self.values) or any(len(logps) < 2 for logps in rows):
            return None
        return calibration_error([choice_confidence(logps) for logps in rows], self.values)

    @property
    def clean(self) -> float | None:
        """The score without contaminated questions."""
        left = [value for number, value in enumerate(self.values) if number not in set(self.contaminated)]
        return math.fsum(left) / len(left) if left and self.contaminated else None

    def to_json(self) -> dict[str, Any]:
        (low, high), method = self.interval
        result: dict[str, Any] = {
            "task": self.task, "metric": self.metric, "filter": self.filter, "score": self.reported,
            "questions": len(self.ids), "low": low, "high": high, "interval": method,
            "stderr": standard_error(self.values, self.groups) if self.values else None,
            "detectable_difference": detectable_difference(len(self.ids)), "shots": self.shots,
            "template": self.template, "prompt": self.prompt, "higher_is_better": self.higher_is_better,
            "ids": self.ids, "values": self.values, "clusters": self.clusters,
        }  # fmt: skip
        if (error := self.calibration) is not None:
            result["ece"] = error
        if self.formats:
            scores = list(self.formats.values())
            result |= {"formats": self.formats, "format_range": max(scores) - min(scores)}
        if self.contaminated:
            share = len(self.contaminated) / len(self.ids)
            result |= {"contaminated": self.contaminated, "contaminated_share": share, "clean_score": self.clean}
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in result.items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TaskResult:
        return cls(
            task=row["task"], metric=row["metric"], filter=row["filter"], values=row["values"], ids=row["ids"],
            reported=row["score"], shots=row["shots"], template=row["template"], prompt=row["prompt"],
            clusters=row["clusters"], higher_is_better=row["higher_is_better"], formats=row.get("formats", {}),
            contaminated=row.get("contaminated", []),
        )  # fmt: skip


def choice_logps(row: Mapping[str, Any]) -> list[float]:
    """The log-probabilities of the choices in a logged sample of lm-eval or of our own tasks."""
    responses = row.get("filtered_resps", [])
    return [float(each[0]) for each in responses if isinstance(each, list | tuple) and isinstance(each[0], float | int)]


@dataclass
class Evaluation:
    """All results of one model: scores, held-out losses by source, and how they were made."""

    model: str
    results: list[TaskResult]
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    harness: dict[str, Any] = field(default_factory=dict)  # lm-eval's own result

    def find(self, task: str, metric: str | None = None) -> TaskResult | None:
        """The named metric, else the first of the task."""
        return next((r for r in self.results if r.task == task and metric in (None, r.metric)), None)

    def to_json(self) -> dict[str, Any]:
        """lm-eval's shape; everything that it has no key for is under `bessemer`."""
        shape: dict[str, Any] = {name: dict(self.harness.get(name, {})) for name in _SHAPE}
        for result in self.results:
            row = shape["results"].setdefault(result.task, {"alias": result.task})
            row[f"{result.metric},{result.filter}"] = result.reported
            row[f"{result.metric}_stderr,{result.filter}"] = (
                standard_error(result.values, result.groups) if len(result.values) > 1 else "N/A"
            )
            shape["n-shot"][result.task] = result.shots
            shape["n-samples"].setdefault(result.task, {"original": len(result.ids), "effective": len(result.ids)})
            shape["higher_is_better"].setdefault(result.task, {})[result.metric] = result.higher_is_better
        own = {"model": self.model, "held_out": self.held_out, "settings": self.settings,
               "scores": [result.to_json() for result in self.results]}  # fmt: skip
        return plain_json({**shape, "config": {"model": self.model, **self.settings}, "bessemer": own})

    def write(self, folder: Path) -> Path:
        """results.json and a samples_TASK.jsonl of each task, as lm-eval names them. Returns the first."""
        path = folder / RESULTS
        write_atomic(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n", parents=True)
        for task in dict.fromkeys(result.task for result in self.results):
            rows = {id(row): row for result in self.results if result.task == task for row in result.samples}
            text = "".join(json.dumps(plain_json(row), ensure_ascii=False) + "\n" for row in rows.values())
            write_atomic(folder / f"samples_{make_name(task)}.jsonl", text)
        return path

    @classmethod
    def read(cls, place: Path) -> Evaluation:
        """Reads a results.json or its folder."""
        path = place / RESULTS if place.is_dir() else place
        try:
            own = json.loads(path.read_text(encoding="utf-8"))["bessemer"]
            results = [TaskResult.from_json(row) for row in own["scores"]]
            return cls(own["model"], results, own["held_out"], own["settings"])
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: give a folder that `bessemer evaluate --out` wrote") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: is not a result of `bessemer evaluate`: give a folder that --out wrote") from None


_SHAPE = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


def make_name(task: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in task)


def make_hash(parts: Any) -> str:
    """A hash of settings, whatever their order."""
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def plain_json(value: Any) -> Any:
    """Numbers of numpy and other objects as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain_json(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain_json(value.item()) if hasattr(value, "item") else str(value)


def score_lines(evaluation: Evaluation) -> list[list[str]]:
    """Rows of a table: task, score, 95 % interval, questions, and what should be known about it."""
    rows = [["task", "score", "95 % interval", "questions", "notes"]]
    for result in evaluation.results:
        (low, high), _ = result.interval
        interval = f"{low:.1%} to {high:.1%}" if result.values else "-"
        rows.append([result.name, _number(result), interval, f"{len(result.ids):,}", "; ".join(_notes(result))])
    return rows


def _number(result: TaskResult) -> str:
    return f"{result.reported:.1%}" if result.values else f"{result.reported:.4g}"


def _notes(result: TaskResult) -> Iterable[str]:
    yield f"{result.shots}-shot"
    if (error := result.calibration) is not None:
        yield f"ECE {error:.3f}"
    if result.formats:
        low, high = min(result.formats.values()), max(result.formats.values())
        yield f"{low:.1%} to {high:.1%} over {len(result.formats)} prompt formats"
    if result.contaminated:
        clean = "" if result.clean is None else f", {result.clean:.1%} without"
        yield f"{len(result.contaminated) / len(result.ids):.1%} in the training data{clean}"


def power_line(results: Sequence[TaskResult]) -> str:
    """What the smallest task cannot show."""
    small = min((result for result in results if result.values), key=lambda result: len(result.ids), default=None)
    if small is None:
        return ""
    points = 100 * detectable_difference(len(small.ids), PAIRED_VARIANCE)
    return (
        f"power  {len(small.ids):,} questions of {small.task} cannot show a difference of two models under "
        f"{points:.1f} points (paired, 5 % level, 80 % of cases)"
    )
