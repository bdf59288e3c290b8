"""What the page shows of a run besides curves: spec, plan, comparison with the plan, checkpoints, reports, samples."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from bessemer.checkpoint.lineage import read_tags
from bessemer.checkpoint.manifest import CONFIRMED, DamagedCheckpoint, verify
from bessemer.checkpoint.store import CheckpointStore
from bessemer.observe.profile import read_trace, step_time
from bessemer.plan.actual import compare_run, comparison_json
from bessemer.run.directory import LAYOUT, LOSS_WINDOW, Run, mean_loss
from bessemer.run.journal import last_record, last_records, parse_record, to_number

MAX_SAMPLES, MAX_TEXT = 64, 20_000
MAX_FILE_BYTES = 8 << 20
MAX_TRACE_BYTES = 32 << 20  # packed; about a minute to read
SAMPLE_FOLDERS = ("samples", "rollouts")


def read_text(path: Path) -> str:
    """A file of the run as text; empty if it is missing or too large to show."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return ""
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def describe_run(run: Run) -> dict[str, Any]:
    """Spec, decisions of the plan, plan against actual, layout of the processes."""
    facts: dict[str, Any] = {"name": run.name, "spec": read_text(run.folder / "spec.yaml"), "decisions": []}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        facts["decisions"] = json.loads(read_text(run.folder / "plan.json"))["decisions"]
    with contextlib.suppress(ValueError, KeyError, TypeError, ZeroDivisionError, OSError):
        if comparison := compare_run(run):
            facts["against_plan"] = comparison_json(*comparison)
    with contextlib.suppress(ValueError):
        facts["layout"] = json.loads(read_text(run.folder / LAYOUT))
    facts["ranks"] = last_record(run.ranks_path)
    facts["validation"] = last_record(run.validation_path)
    facts["reports"] = sorted(path.stem for path in run.folder.glob("reports/*.html"))
    return facts


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as `a.b.c: value`."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [flatten(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items()]
    return {key: item for part in parts for key, item in part.items()}


def settings(run: Run) -> dict[str, Any]:
    """What a run was asked for and what was decided, by key. Decisions come from plan.json, marked as such."""
    by_key: dict[str, Any] = {}
    with contextlib.suppress(yaml.YAMLError):
        by_key |= flatten(yaml.safe_load(read_text(run.folder / "spec.yaml")) or {})
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for decision in json.loads(read_text(run.folder / "plan.json"))["decisions"]:
            by_key[f"plan: {decision['key']}"] = decision["value"]
    return by_key


def compare_settings(runs: list[Run]) -> list[dict[str, Any]]:
    """The settings in which runs differ, one value for each run."""
    by_run = [settings(run) for run in runs]
    keys = list(dict.fromkeys(key for by_key in by_run for key in by_key))
    rows = [{"key": key, "values": [by_key.get(key) for by_key in by_run]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def results(run: Run) -> dict[str, float | None]:
    """What runs are compared by, from the run's last records."""
    last, validation = last_record(run.steps_path) or {}, last_record(run.validation_path) or {}
    numbers = {
        "tokens/s": to_number(last.get("tokens_per_s")), "loss": mean_loss(last_records(run.steps_path, LOSS_WINDOW)),
        "validation loss": to_number(validation.get("loss")),
    }  # fmt: skip
    return {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}


def compare_results(runs: list[Run]) -> list[dict[str, Any]]:
    """The results that any of the runs has, one value for each run."""
    by_run = [results(run) for run in runs]
    rows = [{"key": key, "values": [by_key[key] for by_key in by_run]} for key in by_run[0]] if by_run else []
    return [row for row in rows if any(value is not None for value in row["values"])]


def list_checkpoints(run: Run) -> list[dict[str, Any]]:
    """Committed checkpoints, newest first. Their files are verified on request only: that reads all of them."""
    store, tags = CheckpointStore(run.checkpoints), read_tags(run.checkpoints)
    full, best = store.committed(), store.best()
    return [
        {
            "name": path.name, "step": manifest.step, "bytes": manifest.bytes, "content": manifest.content,
            "age_s": max(0.0, time.time() - manifest.time), "validation_loss": manifest.validation_loss,
            "confirmed": (path / CONFIRMED).exists(),
            "tags": sorted(tag for tag, name in tags.items() if name == path.name),
            "best": path == best, "last": path == full[-1][0],
        }
        for path, manifest in reversed(full)
    ]  # fmt: skip


def verify_checkpoint(run: Run, name: str) -> dict[str, Any]:
    """Read all files of a checkpoint and compare them with its manifest. KeyError for an unknown name."""
    folder = next((path for path, _ in CheckpointStore(run.checkpoints).committed() if path.name == name), None)
    if folder is None:
        raise KeyError(name)
    try:
        return {"name": name, "sound": True, "files": len(verify(folder).files)}
    except (DamagedCheckpoint, OSError) as error:
        return {"name": name, "sound": False, "reason": str(error)}


def newest_samples(run: Run) -> list[dict[str, Any]]:
    """Texts that the model wrote during the run, newest first: answers of a run that trains on its own."""
    samples: list[dict[str, Any]] = []
    paths = [path for folder in SAMPLE_FOLDERS for path in (run.folder / folder).glob("*.jsonl")]
    for path in sorted(paths, key=lambda path: path.name, reverse=True):
        for line in read_text(path).splitlines():
            if (record := parse_record(line.encode())) is not None:
                samples.append({"from": path.stem, **{key: _clip(value) for key, value in record.items()}})
            if len(samples) >= MAX_SAMPLES:
                return samples
    return samples


def _clip(value: Any) -> Any:
    """Short values as they are, long texts cut."""
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def profile_file(run: Run, name: str) -> Path:
    """A trace by its name. KeyError if there is none."""
    folder = run.profiles.resolve()
    path = (folder / name).resolve()
    inside = path.parent == folder and folder.is_relative_to(run.folder.resolve())
    if not inside or not name.endswith(".json.gz") or not path.is_file():
        raise KeyError(name)
    return path


def profile_parts(path: Path) -> dict[str, Any]:
    """Where the time of profiled steps went: microseconds of all of them by part, and the longest kernels."""
    if path.stat().st_size > MAX_TRACE_BYTES:
        return {"reason": "the trace is too large to be split here: download it"}
    try:
        time = step_time(read_trace(path))
    except (OSError, EOFError, ValueError, KeyError, StopIteration) as error:  # it is being written, or damaged
        return {"reason": f"the trace cannot be read: {type(error).__name__}"}
    kernels = [asdict(kernel) for kernel in time.kernels[:20]]
    return {"wall_us": time.wall, "parts": {part: us for part, us in time.parts.items() if us}, "kernels": kernels}


def report_file(run: Run, name: str) -> str | None:
    """The HTML of a report by its name without extension; None if there is none."""
    folder = (run.folder / "reports").resolve()
    path = (folder / f"{name}.html").resolve()
    if path.parent != folder or not folder.is_relative_to(run.folder.resolve()) or not path.is_file():
        return None
    return read_text(path)
