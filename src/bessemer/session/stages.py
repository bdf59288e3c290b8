"""Runs the stages of a chain, each in a process of its own, and writes one report of all.

A finished stage is skipped while its settings stay the same, so the same command continues a chain after any end.
Between two stages the model is exported as a Hugging Face folder, with adapters merged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bessemer.errors import UserError
from bessemer.parent import child_environment
from bessemer.run.directory import Run, mean_loss
from bessemer.run.journal import to_number
from bessemer.spec.load import dump_spec
from bessemer.spec.quantity import human_count, human_time
from bessemer.spec.stages import Chain, ChainStage
from bessemer.storage import write_atomic

REPORT = "report.md"
WINDOW = 16  # steps at either end of a run over which the report averages
# Keys of a step's record that are of no objective.
_GENERAL = {
    "step", "loss", "grad_norm", "lr", "clip", "clipped", "veto", "tokens", "tokens_per_s", "mfu", "step_s",
    "data_wait_s", "memory_bytes", "host_bytes", "epoch",
}  # fmt: skip


def train_chain(chain: Chain, options: list[str], restart: bool = False) -> int:
    """The exit code of the first stage that does not finish, or 0."""
    if "RANK" in os.environ:
        raise UserError(
            "stages: a chain starts the processes of its stages itself: start it without torchrun or another launcher"
        )
    for number, stage in enumerate(chain.stages, 1):
        title = f"stage {number} of {len(chain.stages)}: {stage.name} ({stage.spec.objective})"
        if not restart and is_finished(chain, stage):
            print(f"{title}: finished before", flush=True)
            continue
        print(title, flush=True)
        for name in stage.needs:
            _export(chain, next(other for other in chain.stages if other.name == name))
        path = chain.spec_file(stage)
        begins_anew = restart or (stage.run.exists() and path.exists() and not has_settings(chain, stage))
        write_atomic(path, dump_spec(stage.spec), parents=True)
        if stage.make and (code := make_rows(chain, stage, begins_anew)):
            return _ended(title, code)
        shutil.rmtree(chain.model_folder(stage.name), ignore_errors=True)  # a model of earlier settings
        command = [sys.executable, "-m", "bessemer", "train", str(path), *options]
        with signals_to_children() as children:
            children.append(subprocess.Popen(command + ["--restart"] * begins_anew, env=child_environment()))
            code = children[0].wait()
        write_report(chain)
        if code:
            return _ended(title, code)
        restart = restart or begins_anew  # later stages began from another model
    write_report(chain)
    print(f"report  {chain.folder / REPORT}")
    return 0


def _ended(title: str, code: int) -> int:
    print(f"{title}: ended with exit code {code}; the same command continues it", file=sys.stderr)
    return code if code > 0 else 128 - code


def make_arguments(chain: Chain, stage: ChainStage) -> list[str]:
    """The arguments of `align best` for the rows of a stage; none if it makes none. Each stage has its own seed."""
    if stage.make is None:
        return []
    out, rows = chain.made_rows(stage.name), stage.make.rows
    seed = stage.spec.seed + [other.name for other in chain.stages].index(stage.name)
    reward = rows.reward if isinstance(rows.reward, str) else json.dumps(rows.reward)
    return [
        str(stage.spec.model.hf), "--prompts", rows.prompts, "--reward", reward, "--n", str(rows.n),
        "--write", str(out), "--max-tokens", str(rows.max_tokens), "--temperature", str(rows.temperature),
        "--top-p", str(rows.top_p), "--seed", str(seed), "--device", stage.spec.parallel.device,
        *(["--pairs"] if stage.make.pairs else []),
    ]  # fmt: skip


def make_rows(chain: Chain, stage: ChainStage, anew: bool) -> int:
    """Samples the rows of a stage from the model that it starts from, once, in a process of its own: its exit code. The
    summary lies beside the rows, for the report."""
    assert stage.make is not None
    out, summary, arguments = chain.made_rows(stage.name), made_summary(chain, stage), make_arguments(chain, stage)
    if not anew and out.exists() and summary.get("arguments") == arguments:
        print(f"rows made before: {out}", flush=True)
        return 0
    out.unlink(missing_ok=True)
    print(f"sampling {'pairs' if stage.make.pairs else 'answers'} from {stage.spec.model.hf}", flush=True)
    with signals_to_children() as children:
        command = [sys.executable, "-m", "bessemer", "align", "best", *arguments, "--json"]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()))
        printed, _ = children[0].communicate()
    if children[0].returncode == 0:
        summary = {"arguments": arguments, **json.loads(printed)}
        if not summary["rows"]:
            out.unlink()
            problem = "no prompt has a finished answer that is better than another"
            cut = f"{1 - summary['finished']:.0%} of the answers were cut off at max_tokens"
            fix = "train the model before, or raise max_tokens or n"
            raise UserError(f"stage {stage.name}: make: {problem} ({cut}): {fix}")
        write_atomic(out.with_suffix(".json"), json.dumps(summary, indent=1))
        print("  ".join(describe_made(summary)), flush=True)
    return children[0].returncode


def made_summary(chain: Chain, stage: ChainStage) -> dict[str, Any]:
    """What `align best` printed of the rows of a stage; empty before it."""
    path = chain.made_rows(stage.name).with_suffix(".json")
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return summary


def describe_made(summary: dict[str, Any]) -> list[str]:
    """For the terminal and the report. The reward of one sample is that of the model which the stage starts from."""
    first, last = summary["curve"][0], summary["curve"][-1]
    return [
        f"rows made: {summary['rows']} of {summary['prompts']} prompts, {summary['samples']} samples each",
        f"reward of one sample: {_number(first['reward'])} ± {first['reward_error']:.2g}",
        f"reward of the best of {last['n']}: {_number(last['reward'])}",
    ]


def is_finished(chain: Chain, stage: ChainStage) -> bool:
    begun = (stage.run / "events.jsonl").exists()
    return begun and has_settings(chain, stage) and Run(stage.run).state == "finished"


def has_settings(chain: Chain, stage: ChainStage) -> bool:
    """Whether the stage was last started with these settings."""
    path = chain.spec_file(stage)
    same_rows = made_summary(chain, stage).get("arguments", []) == make_arguments(chain, stage)
    return path.exists() and path.read_text() == dump_spec(stage.spec) and same_rows


def _export(chain: Chain, stage: ChainStage) -> None:
    """The stage's model as a folder, once."""
    out = chain.model_folder(stage.name)
    if out.exists():
        return
    from bessemer.export.hf import open_native, to_hf

    print(f"exporting {stage.name} to {out}", flush=True)
    partial = out.with_name(f"{out.name}.partial")
    to_hf(open_native(stage.run), partial, overwrite=True)
    partial.rename(out)


@contextmanager
def signals_to_children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ctrl-C reaches the children through the terminal; other signals are passed on. This process waits for a save."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: Any) -> None:
        for child in children:
            if number != signal.SIGINT and child.poll() is None:
                child.send_signal(number)

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {name: signal.signal(name, pass_on) for name in names}
    try:
        yield children
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def write_report(chain: Chain) -> None:
    """One table of all stages, and the measures of each objective at its beginning and end."""
    lines = [f"# {chain.folder.name}", "", "| stage | objective | state | steps | tokens | loss | validation | time |"]
    lines.append("|" + " --- |" * 8)
    details: list[str] = []
    for stage in chain.stages:
        if not (stage.run / "events.jsonl").exists():
            lines.append(f"| {stage.name} | {stage.spec.objective} | not begun |  |  |  |  |  |")
            continue
        run = Run(stage.run)
        records, validations = list(run.metrics()), list(run.validations())
        window = max(1, min(WINDOW, len(records) // 2))
        first, last = records[:window], records[-window:]
        vetoes = sum(record.get("veto") is not None for record in records)
        tokens = human_count(int(sum(to_number(record.get("tokens")) or 0 for record in records)))
        seconds = human_time(sum(to_number(record.get("step_s")) or 0.0 for record in records))
        validation = _change(validations[:1], validations[-1:], "loss")
        loss = f"{_number(mean_loss(first))} to {_number(mean_loss(last))}"
        lines.append(
            f"| {stage.name} | {stage.spec.objective} | {run.state} | {len(records)} | {tokens} | {loss} | "
            f"{validation} | {seconds} |"
        )
        names = [name for name in (last[-1] if last else {}) if name not in _GENERAL and _mean(last, name) is not None]
        details += [f"## {stage.name}", "", f"Run: {stage.run}. Steps vetoed: {vetoes}.", ""]
        if stage.make and (summary := made_summary(chain, stage)):
            details += [f"- {line}" for line in describe_made(summary)]
        details += [f"- {name}: {_change(first, last, name)}" for name in names]
        last_validation = validations[-1] if validations else {}
        for name in last_validation:
            change = _change(validations[:1], validations[-1:], name)
            if change and name not in (*_GENERAL, "time", "seconds"):
                details.append(f"- validation {name}: {change}")
        reasons = [str(event["reason"]) for event in run.events("alarm") if "reason" in event]
        details += [f"- alarm: {reason}" for reason in reasons] + [""]
    note = f"Numbers are means over the first and the last {WINDOW} steps, or over the halves of a shorter run."
    text = "\n".join([*lines, "", note, "", *details])
    write_atomic(chain.folder / REPORT, text, parents=True)


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    values = [value for record in records if (value := to_number(record.get(name))) is not None]
    return sum(values) / len(values) if values else None


def _change(first: list[dict[str, Any]], last: list[dict[str, Any]], name: str) -> str:
    begin, end = _mean(first, name), _mean(last, name)
    return "" if begin is None or end is None else f"{_number(begin)} to {_number(end)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
