"""A chaos campaign: clean reference runs, then the same runs continued from their middle with faults.

Each run is a process of its own, restarted when a fault ends it. Results are read from the records of the runs. Faults
come late: to a model that has learnt little, poisoned documents look like ordinary ones.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bessemer.chaos.faults import KINDS, Fault, plan_faults
from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.parent import child_environment
from bessemer.run.directory import Run
from bessemer.run.journal import last_record
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec

FAULT_DISTANCE, QUIET_END = 64, 96  # steps between two faults, and after the last
MAX_STARTS = 6  # of one run
TOLERANCE = 0.01  # of the clean loss


@dataclass(frozen=True)
class CampaignRow:
    """One fault and its outcome."""

    run: str
    kind: str
    step: int
    detected_at: int | None
    sign: str
    verdict: str | None
    right: bool | None  # None if no verdict is due
    action: str
    recovered: bool
    cost_steps: int


@dataclass(frozen=True)
class Campaign:
    """The result of a campaign."""

    rows: list[CampaignRow]
    clean_losses: list[float]  # by seed
    final_losses: dict[str, tuple[float, float]]  # of each faulty run, and of the clean run with its seed
    clean_alarms: int  # vetoes, rollbacks and alarms in the clean runs
    clean_steps: int
    seconds: float

    def summary(self) -> dict[str, Any]:
        judged = [row for row in self.rows if row.right is not None]
        worse = [(loss - clean) / clean for loss, clean in self.final_losses.values()]
        limit = statistics.fmean(self.clean_losses) + 2 * statistics.stdev(self.clean_losses)
        return {
            "faults": len(self.rows),
            "detected": sum(row.detected_at is not None for row in self.rows),
            "verdicts_due": len(judged),
            "verdicts_right": sum(row.right is True for row in judged),
            "recovered": sum(row.recovered for row in self.rows),
            "clean_losses": [round(loss, 4) for loss in self.clean_losses],
            "runs": len(worse), f"runs_within_{TOLERANCE:.0%}": sum(share <= TOLERANCE for share in worse),
            "runs_within_two_sigma": sum(loss <= limit for loss, _ in self.final_losses.values()),
            "largest_loss_increase": f"{max(worse, default=0.0):.2%}",
            "clean_steps": self.clean_steps, "clean_alarms": self.clean_alarms, "seconds": round(self.seconds, 1),
        }  # fmt: skip


def chaos_spec(
    spec: RunSpec, folder: Path, name: str, steps: int, learn: int, seed: int, kinds: Collection[str]
) -> RunSpec:
    """The user's spec for a short run with frequent saves. Storage faults get a remote tier, overflows bf16."""
    remote = f"flaky://{(folder / 'remote').resolve()}" if "flaky-storage" in kinds else None
    checkpoint = spec.checkpoint.model_copy(update={"every": 25, "keep_every": learn, "remote": remote})
    hang = spec.guard.detect.hang.model_copy(update={"least": 4.0})
    guard = spec.guard.model_copy(update={"detect": spec.guard.detect.model_copy(update={"hang": hang})})
    budget = spec.budget.model_copy(update={"steps": steps, "tokens": "auto", "epochs": None})
    evaluate = spec.evaluate.model_copy(update={"every": steps})
    update: dict[str, Any] = {"precision": "bf16"} if "overflow" in kinds else {}
    update |= {
        "name": name, "runs": str(folder), "seed": seed, "checkpoint": checkpoint, "guard": guard, "budget": budget,
        "evaluate": evaluate,
    }  # fmt: skip
    return spec.model_copy(update=update)


def run_campaign(
    spec: RunSpec,
    kinds: Sequence[str],
    count: int,
    folder: Path,
    per_run: int = 4,
    learn: int = 1000,
    seeds: int = 5,
    jobs: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Campaign:
    """Trains `seeds` clean runs, then `count` faults with `per_run` in each run, after `learn` steps."""
    began = time.monotonic()
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    learn = 25 * max(1, round(learn / 25))  # a checkpoint exists there
    steps = learn + FAULT_DISTANCE * (per_run + 1) + QUIET_END
    plans = plan_faults(kinds, count, learn + FAULT_DISTANCE, FAULT_DISTANCE, steps - QUIET_END, seed)
    names = [f"clean-{i}" for i in range(seeds)] + [f"chaos-{i:03d}" for i in range(len(plans))]
    faults: list[list[Fault]] = [[] for _ in range(seeds)] + plans

    def work(i: int) -> None:
        used_kinds = {fault.kind for fault in faults[i]}
        run_spec = chaos_spec(spec, folder, names[i], steps, learn, spec.seed + i % seeds, used_kinds)
        if i >= seeds:
            fork(folder / names[i % seeds], folder / names[i], learn)
        start_until_done(run_spec, faults[i], folder / names[i])

    work(0)  # prepares the data for all
    say(f"chaos {names[0]} done; {len(names) - 1} runs left, of {steps} or {steps - learn} steps")
    done = 1
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for part in (range(1, seeds), range(seeds, len(names))):
            for _ in pool.map(work, part):
                done += 1
                if done % 10 == 0:
                    say(f"chaos {done}/{len(names)} runs in {time.monotonic() - began:.0f} s")
    return read_campaign(folder, time.monotonic() - began)


def read_campaign(folder: Path, seconds: float = 0.0) -> Campaign:
    """The result of a finished campaign, from its folder."""
    clean = [Run(path) for path in sorted(folder.glob("clean-*"))]
    faulty = [Run(path) for path in sorted(folder.glob("chaos-*"))]
    signs = ("veto", "rollback", "hang", "alarm")
    alarms = sum(event["kind"] in signs and event.get("severity") != "note" for run in clean for event in run.events())
    faults = {run.name: [Fault(**f) for f in json.loads((run.folder / "faults.json").read_text())] for run in faulty}
    return Campaign(
        rows=[row for run in faulty for row in assess(run, faults[run.name])],
        clean_losses=[final_loss(run) for run in clean],
        final_losses={
            run.name: (final_loss(run), final_loss(clean[i % len(clean)])) for i, run in enumerate(faulty)
        },
        clean_alarms=alarms, clean_steps=sum(1 for run in clean for _ in run.metrics()), seconds=seconds,
    )  # fmt: skip


def fork(source: Path, target: Path, step: int) -> None:
    """Copies a run's folder as it was after `step` steps."""
    others = ("checkpoints", "logs", "reports", "events.jsonl", "owner.json", "lock")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*others))
    for folder, manifest in CheckpointStore(source / "checkpoints").committed():
        if manifest.step == step:
            shutil.copytree(folder, target / "checkpoints" / folder.name)


def start_until_done(spec: RunSpec, faults: Sequence[Fault], folder: Path) -> None:
    """Starts the run, and again for as long as faults end it."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "faults.json"
    plan.write_text(json.dumps([asdict(fault) for fault in faults]))
    (folder / "chaos-spec.yaml").write_text(dump_spec(spec))
    command = [sys.executable, "-m", "bessemer.chaos.inject", str(folder / "chaos-spec.yaml"), str(plan)]
    for _ in range(MAX_STARTS):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
        state = Run(folder).state
        if state in ("finished", "failed"):
            return
        if done.returncode == 2:
            raise UserError(f"{folder.name}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'refused'}")
    raise UserError(f"{folder}: not finished after {MAX_STARTS} starts; see {folder}/logs/rank-0.log")


def final_loss(run: Run) -> float:
    last = last_record(run.validation_path)
    return float(last["loss"]) if last else float("nan")


def assess(run: Run, faults: Sequence[Fault]) -> Iterator[CampaignRow]:
    """The outcome of each fault, from the run's events."""
    log = run.folder / "chaos.jsonl"
    times = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        times[entry["step"]] = float(entry["time"])
    events = list(run.events())
    finished = run.state == "finished" and _every_step_once(run)
    ordered = sorted(faults, key=lambda fault: fault.step)
    for i, fault in enumerate(ordered):
        until = ordered[i + 1].step if i + 1 < len(ordered) else 10**9
        yield _row(run, fault, events, times, until, finished)


def _row(
    run: Run, fault: Fault, events: list[dict[str, Any]], times: dict[int, float], until: int, finished: bool
) -> CampaignRow:
    kind = KINDS[fault.kind]
    last = min(fault.step + kind.within, until)
    signs = [event for event in events if _is_sign(event, fault, last, times, kind.signs)]
    trials = [e for e in events if e["kind"] == "trial" and fault.step <= e["step"] <= min(fault.step + 24, until)]
    verdict = max(trials, key=lambda e: e["confidence"])["verdict"] if trials else None
    back = [e for e in events if e["kind"] == "rollback" and fault.step <= e["step"] < min(fault.step + 48, until)]
    vetoes = [e for e in events if e["kind"] == "veto" and fault.step <= e["step"] < min(fault.step + 48, until)]
    action = ", ".join(
        part
        for part in (
            f"{len(vetoes)} vetoed" if vetoes else "",
            f"rolled back to {back[-1]['to_step']}" if back else "",
            "restarted" if kind.restarts else "",
        )
        if part
    )
    return CampaignRow(
        run=run.name, kind=fault.kind, step=fault.step,
        detected_at=int(signs[0].get("step", fault.step)) if signs else None, sign=signs[0]["kind"] if signs else "",
        verdict=verdict, right=verdict in kind.verdicts if kind.verdicts else None, action=action or "none needed",
        recovered=finished, cost_steps=len(vetoes) + sum(e["step"] - e["to_step"] for e in back),
    )  # fmt: skip


def _is_sign(event: dict[str, Any], fault: Fault, last: int, times: dict[int, float], signs: tuple[str, ...]) -> bool:
    name = event["kind"]
    if name == "alarm":
        name = f"alarm:{event['alarm']}"
    elif name == "uploaded" and event.get("retried"):
        name = "uploaded:retried"
    if name not in signs or fault.step not in times:
        return False
    if KINDS[fault.kind].restarts:
        resumed = float(event["time"]) > times[fault.step] and bool(event.get("resumed_from"))
        return name != "started" or resumed
    if "step" not in event:
        return bool(event["time"] >= times[fault.step])
    # Events read while a step runs carry the step before it.
    return fault.step - 1 <= int(event["step"]) <= last


def _every_step_once(run: Run) -> bool:
    steps = [record["step"] for record in run.metrics()]
    return steps == list(range(len(steps)))
