"""How often `judge_run` names the planted fault of tiny real runs, and how often healthy runs raise alarms.

    python benchmarks/diagnose.py --tuned 0:2 --held-out 100:102 --healthy 100:150 --write FILE.json

The rules were tuned on the seeds of `--tuned`. Those of `--held-out` draw other strengths, steps, rates and shapes, and
are reported apart. Every run is trained here, written in one of eight formats, read back and judged. `--keep FOLDER`
keeps the records, so that a second call goes on where one was stopped. `--part 1/2` only trains its share of the runs
into that folder: one call for each core, then one without `--part` that judges all:

    for i in 1 2; do python benchmarks/diagnose.py SEEDS --keep runs/diagnose --part $i/2 & done; wait
    python benchmarks/diagnose.py SEEDS --keep runs/diagnose --write FILE.json

with SEEDS `--tuned 0:3 --held-out 300:303 --healthy 300:450 --frameworks 1:2`: 87 + 87 faulty and 150
healthy runs here, 26 and 2 by frameworks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from diagnose_formats import CARRIES, WRITERS
from diagnose_runs import FAULTS, NEEDS, TinyRun, make_run

from bessemer.diagnose.rules import judge_run
from bessemer.observe.foreign import read
from bessemer.run.finding import Finding
from bessemer.storage import write_atomic


def load_or_train(kind: str | None, seed: int, folder: Path) -> TinyRun:
    path = folder / f"{(kind or 'healthy').replace(' ', '_').replace('/', 'over')}-{seed}.json"
    if path.exists():
        return TinyRun(**json.loads(path.read_text()))
    run = make_run(kind, seed)
    write_atomic(path, json.dumps(asdict(run)))
    return run


def judge_in_format(run: TinyRun, format: str) -> list[Finding]:
    """Writes, reads and judges. Settings that the format's files do not hold are added, as from a config file."""
    name, write = WRITERS[format]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(run, path)
        (foreign,) = read(path)
    foreign.settings = {**run.settings, **foreign.settings}
    foreign.restarts = foreign.restarts or [int(step) for step in run.restarts]
    foreign.total_steps = foreign.total_steps or run.total
    return judge_run(foreign)


def ranked_causes(findings: list[Finding]) -> list[str]:
    """The first two findings' causes, then the alternatives of the first."""
    names = [finding.rule for finding in findings[:1]]
    names += [cause.name for finding in findings[:1] for cause in finding.alternatives]
    later = [finding.rule for finding in findings[1:]]
    return list(dict.fromkeys(names[:1] + later[:1] + names[1:] + later[1:]))


def format_of(kind: str | None, seed: int) -> str:
    """A format that carries what the fault shows in."""
    needed = NEEDS.get(kind or "", set())
    able = [format for format in WRITERS if needed <= CARRIES[format]]
    return random.Random(f"format {kind} {seed}").choice(able)


def wilson(right: int, of: int) -> list[float]:
    if not of:
        return [0.0, 1.0]
    z, p = 1.96, right / of
    centre, spread = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return [round((centre + sign * spread) / (1 + z * z / of), 3) for sign in (-1, 1)]


def score(seeds: range, folder: Path) -> dict[str, Any]:
    misses, counts = [], defaultdict(int)
    by_format: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for seed in seeds:
        for kind in FAULTS:
            run, format = load_or_train(kind, seed, folder), format_of(kind, seed)
            findings = judge_in_format(run, format)
            causes = ranked_causes(findings)
            first = bool(causes) and causes[0] in run.right
            counts["runs"] += 1
            counts["top_1"] += first
            counts["top_3"] += any(name in run.right for name in causes[:3])
            by_format[format][0] += first
            by_format[format][1] += 1
            if not first:
                misses.append({"kind": kind, "seed": seed, "format": format, "right": run.right, "named": causes[:3]})
    n = counts["runs"]
    return {
        "runs": n, "kinds": len(FAULTS), "top_1": counts["top_1"] / max(1, n),
        "top_1_interval": wilson(counts["top_1"], n),
        "top_3": counts["top_3"] / max(1, n), "top_3_interval": wilson(counts["top_3"], n),
        "right_of_runs_by_format": dict(by_format), "misses": misses,
    }  # fmt: skip


def score_healthy(seeds: range, folder: Path) -> dict[str, Any]:
    alarms, notes = [], 0
    for seed in seeds:
        run, format = load_or_train(None, seed, folder), format_of(None, seed)
        findings = judge_in_format(run, format)
        loud = [finding for finding in findings if finding.severity != "note"]
        notes += bool(findings) and not loud
        if loud:
            alarms.append({"seed": seed, "format": format, "rule": loud[0].rule, "symptom": loud[0].symptom})
    return {
        "runs": len(seeds), "false_alarms": len(alarms), "interval": wilson(len(alarms), len(seeds)),
        "with_notes": notes, "alarms": alarms,
    }  # fmt: skip


def framework_run(name: str, kind: str | None, seed: int, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A framework's own file of a run, which is trained unless an earlier call has ended it; and the right causes."""
    from diagnose_frameworks import FILES, FRAMEWORKS, plan_of

    path = folder / f"{name}-{(kind or 'healthy').replace(' ', '_').replace('/', 'over')}-{seed}"
    ended = path / "ended"
    if ended.exists():
        return path / FILES[name], plan_of(kind, seed)[1]
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    file, right = FRAMEWORKS[name](kind, seed, path)
    ended.touch()
    return file, right


def installed_frameworks() -> list[str]:
    from diagnose_frameworks import FRAMEWORKS

    return [name for name in FRAMEWORKS if find_spec(name) is not None]


def score_frameworks(seeds: range, folder: Path) -> dict[str, Any]:
    """Runs of Trainer and Lightning, where they are installed: all kinds, and a healthy run."""
    from diagnose_frameworks import FRAMEWORKS, KINDS

    result: dict[str, Any] = dict.fromkeys(FRAMEWORKS, "not installed")
    for name in installed_frameworks():
        right_runs, misses, alarms, healthy = 0, [], [], 0
        for seed in seeds:
            for kind in (None, *KINDS):
                file, right = framework_run(name, kind, seed, folder)
                (foreign,) = read(file)
                findings = judge_run(foreign)
                causes = ranked_causes(findings)
                if kind is None:
                    healthy += 1
                    alarms += [finding.symptom for finding in findings if finding.severity != "note"]
                elif causes and causes[0] in right:
                    right_runs += 1
                else:
                    misses.append({"kind": kind, "seed": seed, "right": right, "named": causes[:3]})
        total = len(seeds) * len(KINDS)
        result[name] = {
            "runs": total,
            "top_1": right_runs / max(1, total),
            "misses": misses,
            "healthy": healthy,
            "alarms": alarms,
        }
    return result


def train_part(arguments: argparse.Namespace, folder: Path) -> int:
    """Trains every N-th run of all that a call with these seeds judges; the number of runs."""
    from diagnose_frameworks import KINDS

    jobs: list[Callable[[], object]] = []
    for seeds, kinds in (
        (arguments.tuned, tuple(FAULTS)), (arguments.held_out, tuple(FAULTS)), (arguments.healthy, (None,)),
    ):  # fmt: skip
        jobs += [partial(load_or_train, kind, seed, folder) for seed in seeds for kind in kinds]
    for name in installed_frameworks():
        kinds = (None, *KINDS)
        jobs += [partial(framework_run, name, kind, seed, folder) for seed in arguments.frameworks for kind in kinds]
    index, count = arguments.part
    share = jobs[index - 1 :: count]
    for number, job in enumerate(share, 1):
        job()
        if number % 10 == 0:
            print(f"{number} of {len(share)} runs", file=sys.stderr, flush=True)
    return len(share)


def part_of(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise argparse.ArgumentTypeError(f"{text}: write 1/2 for the first of two parts")
    return int(index), int(count)


def seeds_of(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=seeds_of, default=range(2))
    parser.add_argument("--held-out", type=seeds_of, default=range(100, 102))
    parser.add_argument("--healthy", type=seeds_of, default=range(50))
    parser.add_argument("--frameworks", type=seeds_of, default=range(0))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--part", type=part_of, help="only train this share of the runs, such as 1/2")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.part and not arguments.keep:
        parser.error("--part needs --keep FOLDER, where the parts leave their runs")
    import torch

    torch.set_num_threads(1)
    began, commit = time.time(), ["git", "rev-parse", "HEAD"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.part:
            print(f"{train_part(arguments, folder)} runs of part {arguments.part[0]} are in {folder}")
            return
        result = {
            "command": "python benchmarks/diagnose.py " + " ".join(sys.argv[1:]), "date": date.today().isoformat(),
            "commit": subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} processors", "torch": torch.__version__,
            "formats": sorted(WRITERS), "tuned": score(arguments.tuned, folder),
            "held_out": score(arguments.held_out, folder), "healthy": score_healthy(arguments.healthy, folder),
            "frameworks": score_frameworks(arguments.frameworks, folder),
        }  # fmt: skip
    result["seconds"] = round(time.time() - began)
    text = json.dumps(result, indent=2)
    if arguments.write:
        arguments.write.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
