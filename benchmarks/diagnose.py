"""How often `judge_run` names the planted fault of tiny real runs, and how often healthy runs raise alarms.

    python benchmarks/diagnose.py --tuned 0:2 --held-out 100:102 --healthy 100:150 --write FILE.json

The rules were tuned on the seeds of `--tuned`. Those of `--held-out` draw other strengths, steps, rates and shapes, and
are reported apart. Every run is trained here, written in one of eight formats, read back and judged. `--keep FOLDER`
keeps the records, so that a second call judges them without training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from diagnose_formats import CARRIES, WRITERS
from diagnose_runs import FAULTS, NEEDS, TinyRun, make_run

from bessemer.diagnose.rules import judge_run
from bessemer.observe.foreign import read
from bessemer.run.finding import Finding


def load_or_train(kind: str | None, seed: int, folder: Path) -> TinyRun:
    path = folder / f"{(kind or 'healthy').replace(' ', '_').replace('/', 'over')}-{seed}.json"
    if path.exists():
        return TinyRun(**json.loads(path.read_text()))
    run = make_run(kind, seed)
    path.write_text(json.dumps(asdict(run)))
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


def seeds_of(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=seeds_of, default=range(2))
    parser.add_argument("--held-out", type=seeds_of, default=range(100, 102))
    parser.add_argument("--healthy", type=seeds_of, default=range(50))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    began, commit = time.time(), ["git", "rev-parse", "HEAD"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = {
            "command": "python benchmarks/diagnose.py " + " ".join(sys.argv[1:]), "date": date.today().isoformat(),
            "commit": subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} processors", "torch": torch.__version__,
            "formats": sorted(WRITERS), "tuned": score(arguments.tuned, folder),
            "held_out": score(arguments.held_out, folder), "healthy": score_healthy(arguments.healthy, folder),
        }  # fmt: skip
    result["seconds"] = round(time.time() - began)
    text = json.dumps(result, indent=2)
    if arguments.write:
        arguments.write.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
