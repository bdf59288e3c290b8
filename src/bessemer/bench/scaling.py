"""Measures the scaling of training over processes and layouts (`bessemer bench scaling`). Each combination starts as
with `bessemer train`, times some real steps, and ends.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bessemer.bench.scaling_worker import FAULT, SILENT, TIMED, WARMUP
from bessemer.errors import UserError
from bessemer.export.describe import find_shape
from bessemer.observe.format import align_columns
from bessemer.parent import child_environment
from bessemer.session.start import complete_spec, dry_run
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import preset
from bessemer.storage import write_atomic
from bessemer.train.device import name_and_memory, pick_device
from bessemer.train.saver import package_versions

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
USUAL = ("dp_replicate", "dp_shard", "dp_replicate=2+dp_shard")  # layouts that every model supports
ROWS = 16  # of a step, if only a model is named
BUSY = 0.5  # load per core above which measurements on a CPU are unreliable
ENDS_S = 30.0  # for a process that is asked to end
NOISE = 0.03  # of throughputs; within it the layout with less memory is suggested
Layout = dict[str, int]


@dataclass(frozen=True)
class ScalingRow:
    """One measurement. `communication` is the share of a step that vanishes if nothing is sent."""

    ranks: int
    layout: Layout
    tokens_per_s: float | None = None
    step_s: float | None = None
    efficiency: float | None = None
    communication: float | None = None
    memory_bytes: int | None = None
    fault: str = ""

    @property
    def words(self) -> str:
        return layout_words(self.layout)


@dataclass(frozen=True)
class Scaling:
    """All measurements of one model."""

    target: str
    kind: str  # strong: the same batch for all; weak: the same tokens per process
    date: str
    machine: str
    device: str
    threads: int | None  # of each process, on a CPU
    context: int
    batch_tokens: int  # of one process under weak scaling
    steps: int
    versions: dict[str, str]
    load: float = 0.0  # of the machine by others at the start, per core
    rows: list[ScalingRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"suggestion": suggestion(self)}


def layout_words(layout: Layout) -> str:
    return " x ".join(f"{key} {degree}" for key, degree in layout.items() if degree > 1) or "one process"


def parse_layout(text: str) -> dict[str, int | None]:
    """`tp=2+dp_shard` as degrees; None for the degree that takes the remaining processes."""
    degrees: dict[str, int | None] = {}
    for item in text.split("+"):
        key, _, degree = item.strip().partition("=")
        if key not in DEGREES or (degree and not (degree.isdigit() and int(degree))):
            raise UserError(
                f"--layouts {text}: write degrees such as dp_shard or tp=2+dp_shard, of {', '.join(DEGREES)}"
            )
        degrees[key] = int(degree) if degree else None
    if sum(degree is None for degree in degrees.values()) > 1:
        raise UserError(f"--layouts {text}: only one degree can take the rest: write a number for the others")
    return degrees


def fill_layout(degrees: dict[str, int | None], ranks: int) -> Layout | None:
    """The layout over `ranks` processes; None if it does not divide evenly, or the open degree would be 1."""
    product = 1
    for key, degree in degrees.items():
        product *= (degree or 1) if key != "ep" else 1  # experts are divided among the same processes
    left = ranks // product
    opens = any(degree is None for degree in degrees.values())
    if product * left != ranks or (left > 1 and not opens) or (left == 1 and opens and len(degrees) > 1):
        return None
    return {key: degree or left for key, degree in degrees.items()}


def layouts_of(texts: Sequence[str], ranks: int) -> list[Layout]:
    if ranks == 1:
        return [{}]
    return [layout for text in texts if (layout := fill_layout(parse_layout(text), ranks)) is not None]


def spec_of(
    target: str, settings: list[str], context: int, batch: int | None, scratch: Path
) -> tuple[RunSpec, int | None]:
    """The spec of a file, or one for a preset or a folder of weights with random text; and the model's vocabulary if
    the text needs a smaller one."""
    if Path(target).is_file():
        return load_spec(target, [*settings, *([f"budget.batch={batch}"] if batch else [])]), None
    named = preset(target) is not None
    shape = find_shape(target)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(400)]
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=400))}) for _ in range(1000))
    (scratch / "words.jsonl").write_text("\n".join(lines) + "\n")
    data: dict[str, Any] = {
        "name": "scaling", "runs": str(scratch / "runs"),
        "model": {"preset": target} if named else {"hf": target},
        "data": {"sources": {"words": str(scratch / "words.jsonl")}, "context": context},
        "budget": {"steps": 1000, "batch": batch or ROWS * context},
    } | ({"tokenizer": {"vocab": 512}} if named else {})  # fmt: skip
    path = scratch / "scaling.yaml"
    path.write_text(json.dumps(data))  # which is YAML too
    return load_spec(path, settings), shape.vocab if named else None


def timed_spec(spec: RunSpec, layout: Layout | None, batch_tokens: int, steps: int) -> RunSpec:
    """The spec as a worker runs it: in this layout (None: in the spec's), only as many steps as needed, without guard
    (which would stop runs that do not communicate) and remote checkpoints."""
    degrees = {} if layout is None else {key: layout.get(key, 1) for key in DEGREES}
    budget: dict[str, Any] = {"steps": WARMUP + steps + 2, "tokens": None, "batch": batch_tokens, "batch_changes": []}
    return spec.model_copy(
        update={
            "parallel": spec.parallel.model_copy(update=degrees),
            "budget": spec.budget.model_copy(update=budget),
            "schedule": spec.schedule.model_copy(update={"warmup": 0}),
            "guard": spec.guard.model_copy(update={"enabled": False, "forget": None}),
            "checkpoint": spec.checkpoint.model_copy(update={"remote": None}),
        }
    )


def run_workers(folder: Path, ranks: int, threads: int | None, timeout_s: float | None = None) -> str:
    """Start the processes of one measurement and wait for them; what was wrong, if anything."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["bessemer.parallel.agent", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = child_environment(**({"OMP_NUM_THREADS": str(threads)} if threads else {}))
    command += ["bessemer.bench.scaling_worker", str(folder)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"not done after {timeout_s:.0f} s"
        except BaseException:  # Ctrl-C: torchrun ends its processes when it is asked to
            process.terminate()
            process.wait()
            raise
    faults = sorted(folder.glob(f"{FAULT}-*.txt"))
    if faults:
        return faults[0].read_text()
    return f"the processes ended with code {code}" if code else ""


def measure_row(spec: RunSpec, ranks: int, layout: Layout, request: dict[str, Any], threads: int | None) -> ScalingRow:
    with tempfile.TemporaryDirectory(prefix="bessemer-scaling-") as scratch:
        folder = Path(scratch)
        (folder / "spec.yaml").write_text(dump_spec(spec))
        (folder / "request.json").write_text(json.dumps(request))
        fault = run_workers(folder, ranks, threads)
        if not (folder / TIMED).exists():
            return ScalingRow(ranks, layout, fault=fault)
        timed = json.loads((folder / TIMED).read_text())
        quiet = [json.loads(path.read_text())["step_s"] for path in folder.glob(f"{SILENT}-*.json")]
    step_s = timed["step_s"]
    share = max(0.0, 1 - max(quiet) / step_s) if len(quiet) == ranks else None
    return ScalingRow(
        ranks, layout, timed["tokens"] / step_s, step_s, None, share if ranks > 1 else 0.0, timed["memory_bytes"], fault
    )


def with_efficiency(rows: list[ScalingRow]) -> list[ScalingRow]:
    """Throughput per process relative to the smallest number of processes."""
    done = [row for row in rows if row.tokens_per_s]
    if not done:
        return rows
    fewest = min(row.ranks for row in done)
    base = max((row.tokens_per_s or 0.0) / row.ranks for row in done if row.ranks == fewest)
    return [
        ScalingRow(**(asdict(row) | {"efficiency": row.tokens_per_s / row.ranks / base})) if row.tokens_per_s else row
        for row in rows
    ]


def suggestion(scaling: Scaling) -> dict[str, Any] | None:
    """The fastest layout; among equally fast ones, the one with the fewest processes and the least memory."""
    done = [row for row in scaling.rows if row.tokens_per_s]
    if not done:
        return None
    best = max(row.tokens_per_s or 0.0 for row in done)
    near = [row for row in done if (row.tokens_per_s or 0.0) >= (1 - NOISE) * best]
    fewest = min(row.ranks for row in near)
    chosen = min((row for row in near if row.ranks == fewest), key=lambda row: row.memory_bytes or 0)
    most = max(row.ranks for row in done)
    reason = f"{chosen.tokens_per_s:,.0f} tokens/s, the most of {len(done)} measured"
    if len(near) > 1:
        reason += f" within {NOISE:.0%}, with the least memory of those"
    if chosen.ranks < most:
        reason += f"; {most} processes gain nothing with this batch"
    return {"ranks": chosen.ranks, "parallel": chosen.layout, "reason": reason}


def measure_scaling(
    target: str, settings: list[str], ranks: Sequence[int] | None = None, layouts: Sequence[str] = USUAL,
    weak: bool = False, steps: int = 10, context: int = 1024, batch: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Scaling:  # fmt: skip
    """Measures every number of processes in every layout, one after the other."""
    if "WORLD_SIZE" in os.environ:
        raise UserError("bench scaling starts processes itself: run it without torchrun")
    if steps < 1:
        raise UserError(f"--steps {steps}: write 1 or more")
    for text in layouts:
        parse_layout(text)
    with tempfile.TemporaryDirectory(prefix="bessemer-scaling-") as scratch:
        spec, vocab = spec_of(target, settings, context, batch, Path(scratch))
        spec = complete_spec(spec)
        device = pick_device(spec.parallel)
        counts = check_ranks(ranks, device)
        threads = None
        if device.type == "cpu":  # the same for any number of processes, so that efficiencies are comparable
            setting = spec.parallel.threads
            threads = setting if isinstance(setting, int) else max(1, (os.cpu_count() or 1) // max(counts))
        load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
        tell(f"preparing {target}")
        decided = dry_run(spec, device)
        tokens = decided.training.batch_rows[0][1] * decided.context
        scaling = Scaling(
            target, "weak" if weak else "strong", datetime.now(UTC).isoformat(timespec="seconds"),
            name_and_memory(device)[0], device.type, threads, decided.context, tokens, steps, package_versions(),
            load,
        )  # fmt: skip
        rows: list[ScalingRow] = []
        for count, layout in combinations(counts, layouts, tell):
            tell(f"measuring {count} processes: {layout_words(layout)}" if count > 1 else "measuring one process")
            worker_spec = timed_spec(spec, layout, tokens * (count if weak else 1), steps)
            rows.append(measure_row(worker_spec, count, layout, {"steps": steps, "vocab": vocab}, threads))
            tell(f"  {rows[-1].tokens_per_s:,.0f} tokens/s" if rows[-1].tokens_per_s else f"  {rows[-1].fault}")
        scaling.rows.extend(with_efficiency(rows))
        return scaling


def combinations(
    counts: Sequence[int], layouts: Sequence[str], tell: Callable[[str], None]
) -> Iterator[tuple[int, Layout]]:
    for count in counts:
        possible = layouts_of(layouts, count)
        if not possible:
            tell(f"none of {', '.join(layouts)} divides {count} processes evenly")
        yield from ((count, layout) for layout in possible)


def check_ranks(ranks: Sequence[int] | None, device: torch.device) -> list[int]:
    """The given numbers of processes; by default powers of two up to the GPUs or cores of this machine."""
    most = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    if ranks is None:
        return [2**k for k in range(4) if 2**k <= most]
    if any(count < 1 for count in ranks):
        raise UserError(f"--ranks {','.join(map(str, ranks))}: write numbers of 1 or more")
    if device.type == "cuda" and max(ranks) > most:
        raise UserError(f"--ranks {max(ranks)}: this machine has {most} GPUs: write {most} or less")
    return sorted(set(ranks))


def table(scaling: Scaling) -> list[str]:
    """The measurements and the suggestion."""
    rows = [["ranks", "layout", "tokens/s", "step", "efficiency", "communication", "memory"]]
    for row in scaling.rows:
        if row.tokens_per_s is None or row.step_s is None:
            rows.append([str(row.ranks), row.words, "-", "-", "-", "-", row.fault])
            continue
        share = "not measured" if row.communication is None else f"{row.communication:.0%}"
        rows.append([
            str(row.ranks), row.words, f"{row.tokens_per_s:,.0f}", f"{row.step_s * 1000:,.0f} ms",
            f"{row.efficiency or 0:.0%}", share if row.ranks > 1 else "-", human_bytes(row.memory_bytes or 0),
        ])  # fmt: skip
    batch = f"{human_count(scaling.batch_tokens)} tokens a step"
    size = f"{batch} for each process (weak scaling)" if scaling.kind == "weak" else f"{batch} in all (strong scaling)"
    shared = f"; {scaling.threads} threads for each process" if scaling.threads else ""
    lines = [
        f"{scaling.target} on {scaling.machine}: {size}, {scaling.steps} steps each{shared}",
        "",
        *align_columns(rows),
        "",
    ]
    lines.append("communication: the share of a step that vanishes if the same processes send nothing")
    if scaling.load > BUSY:
        lines.append(
            f"other programs used this machine (load {scaling.load:g} per core): measure again when it is idle"
        )
    if suggested := suggestion(scaling):
        inner = ", ".join(f"{key}: {degree}" for key, degree in suggested["parallel"].items())
        words = f"parallel: {{{inner}}}" if inner else "one process"
        lines.append(f"suggested: {words}: {suggested['reason']}")
    return lines


def save(scaling: Scaling, place: Path) -> Path:
    """Write JSON with the command line to a file, or to a dated file in a folder."""
    path = place / f"scaling-{scaling.date[:10]}.json" if place.is_dir() or not place.suffix else place
    path.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["bessemer", *sys.argv[1:]])
    write_atomic(path, json.dumps({"command": command, **scaling.to_json()}, indent=1) + "\n")
    return path
