"""`bessemer diagnose`: what is wrong with a run, a log or an error text, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import AS_JSON, print_json

if TYPE_CHECKING:
    from bessemer.diagnose.examine import Diagnosis, JudgedFinding

SHOWN = 12  # findings with all their parts; the others have one line
PLOTTED = 3  # findings with a figure
STDIN = "stdin.log"
MARKS = {"critical": ("!!", "bold red"), "warning": ("! ", "bold yellow"), "note": ("- ", "dim")}


def diagnose(
    paths: list[Path] = typer.Argument(
        help="Run folders, logs, error texts, dumps, traces, configurations; `-` reads standard input."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Find what is wrong with a run, a log or an error of any framework.

    Each finding has its evidence, causes ranked by confidence, what to check, and the fix.

    Reads run folders of Bessemer; metrics of Hugging Face, Lightning, TensorBoard, W&B, MLflow, CSV, JSON lines and
    plain logs; tracebacks, CUDA out of memory, NCCL errors, flight-recorder dumps (JSON), kernel logs, nvidia-smi
    output, torch.profiler traces. Files given together belong together: a log and its configuration, the dumps of
    all ranks.

    Example: bessemer diagnose runs/demo

    Example: bessemer diagnose train.log config.yaml
    Example: dmesg | bessemer diagnose -
    """
    from bessemer.diagnose.examine import examine

    with _progress_line():
        diagnosis = _examine_with_input(paths) if Path("-") in paths else examine(paths)
    if as_json:
        from bessemer.run.journal import json_ready

        print_json(json_ready(diagnosis.to_json()))
    else:
        _print_diagnosis(diagnosis)
    if diagnosis.unread:
        from bessemer.errors import UserError

        raise UserError("; ".join(diagnosis.unread.values()))


@contextmanager
def _progress_line() -> Iterator[None]:
    """A line on a terminal's standard error that tells how much of a file has been read."""
    import sys

    from bessemer.observe.foreign.text import progress

    if not sys.stderr.isatty():
        yield
        return
    token = progress.set(lambda path, share: print(f"\r\x1b[Kreading {path.name}: {share:.0%}", end="",
                                                   file=sys.stderr, flush=True))  # fmt: skip
    try:
        yield
    finally:
        progress.reset(token)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _examine_with_input(paths: list[Path]) -> Diagnosis:
    """Standard input becomes a file, so that every reader can read it."""
    import sys
    import tempfile

    from bessemer.diagnose.examine import examine
    from bessemer.errors import UserError

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / STDIN
        file.write_bytes(sys.stdin.buffer.read())
        try:
            diagnosis = examine([file if path == Path("-") else path for path in paths])
        except UserError as error:
            raise UserError(str(error).replace(str(file), "standard input")) from None
    diagnosis.read = {name.replace(str(file), "standard input"): kind for name, kind in diagnosis.read.items()}
    for entry in diagnosis.findings:
        entry.source = entry.source.replace(str(file), "standard input")
    return diagnosis


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for name, kind in diagnosis.read.items():
        console.print(Text(f"{name}: {kind}", style="dim"))
    entries = diagnosis.findings
    if not any(entry.finding.severity != "note" for entry in entries):
        console.print(_healthy(diagnosis))
    for number, entry in enumerate(entries[:SHOWN], 1):
        console.print()
        _print_finding(console, entry, number, plot=number <= PLOTTED)
    for entry in entries[SHOWN:]:
        console.print(f"{MARKS[entry.finding.severity or 'warning'][0]} {_title(entry)}")
    for note in diagnosis.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _healthy(diagnosis: Diagnosis) -> str:
    points = sum(len(series) for run in diagnosis.runs for series in run.series.values())
    checked = (
        f"{len(diagnosis.runs)} run{'s' * (len(diagnosis.runs) != 1)}, {points:,} points" if points else "the text"
    )
    remarks = "; notes follow" if diagnosis.findings else ""
    return f"Nothing is wrong in {checked}, as far as these files tell{remarks}."


def _title(entry: JudgedFinding) -> str:
    finding = entry.finding
    if finding.step is None or str(finding.step) in finding.symptom.replace(",", ""):
        return finding.symptom
    return f"{finding.symptom} at step {finding.step:,}"


def _print_finding(console: Any, entry: JudgedFinding, number: int, plot: bool) -> None:
    from rich.text import Text

    finding = entry.finding
    mark, style = MARKS.get(finding.severity, MARKS["warning"])
    line = finding.evidence.get("line")
    console.print(Text(f"{mark} {number}. {_title(entry)}", style=style))
    console.print(Text(f"   {entry.source}{f':{line}' if line else ''}", style="dim"))
    if text := finding.evidence.get("text"):
        console.print(Text(f"   | {str(text)[:200]}", style="dim"))
    if numbers := _numbers(finding.evidence):
        console.print(Text(f"   evidence  {numbers}"))
    if plot and (figure := _figure(entry)):
        for row in figure.splitlines():
            console.print(Text(f"   {row}"))
    if finding.cause:
        console.print(Text(f"   cause     {finding.cause} [{finding.rule}, {finding.confidence:.0%}]"))
    for name, part in (("check", finding.check), ("fix", finding.fix), ("unknown", finding.unknown)):
        if part:
            console.print(Text(f"   {name:<9} {part}"))
    for cause in finding.alternatives:
        console.print(Text(f"   or        {cause.text} [{cause.name}, {cause.confidence:.0%}]"))
        if cause.check:
            console.print(Text(f"             check: {cause.check}", style="dim"))


HIDDEN = ("line", "text", "also_in", "message")


def _numbers(evidence: dict[str, Any]) -> str:
    """JudgedFinding in one line."""
    parts = []
    for name, value in evidence.items():
        if name not in HIDDEN and value not in (None, "", [], {}):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            parts.append(f"{name.replace('_', ' ')} {shown[:120]}")
    return ", ".join(parts)


METRICS = ("loss", "validation_loss", "reward", "step_s", "tokens_per_s")
# Words of a symptom that name another metric than the loss.
WORDS = {
    "gradient": "grad_norm", "rate": "lr", "memory": "memory_bytes", "reward": "reward", "margin": "reward_margin",
    "tokens/s": "tokens_per_s", "steps wait": "data_wait_s", "one takes": "step_s", "step time": "step_s", "kl": "kl",
    "entropy": "entropy", "held-out": "validation_loss", "validation": "validation_loss", "scale": "loss_scale",
    "accuracy": "accuracy", "utilisation": "mfu",
}  # fmt: skip


def _figure(entry: JudgedFinding) -> str:
    """The metric that the finding is about, with its step marked; empty without a run."""
    from bessemer.observe.figure import LineChart

    run, finding = entry.run, entry.finding
    if run is None:
        return _memory_bar(finding.evidence)
    symptom = finding.symptom.lower()
    named = [metric for word, metric in WORDS.items() if word in symptom and metric in run.series]
    loss_first = ["loss"] if symptom.startswith(("loss", "the loss", "training loss")) else []
    metric = next((name for name in [*loss_first, *named, *METRICS] if name in run.series), None)
    if metric is None or len(run.series[metric]) < 3:
        return ""
    series = run.series[metric]
    marks = {"step": float(finding.step)} if finding.step is not None else {}
    steps, values = [float(step) for step in series.steps], [float(value) for value in series.values]
    return LineChart(metric, steps, {metric: values}, "step", marks=marks).text(width=64, height=8)


def _memory_bar(evidence: dict[str, Any]) -> str:
    """The GPU's memory at an out-of-memory error, as a bar."""
    total = evidence.get("total_gib")
    if not total:
        return ""
    allocated, unallocated = evidence.get("allocated_gib") or 0.0, evidence.get("unallocated_gib") or 0.0
    others = sum(evidence.get("other_processes_gib", []))
    outside = max(0.0, (evidence.get("process_gib") or 0.0) - allocated - unallocated)
    parts = {"#": ("allocated", allocated), "+": ("unallocated", unallocated), "o": ("outside PyTorch", outside),
             "x": ("other processes", others)}  # fmt: skip
    bar = "".join(letter * round(64 * size / total) for letter, (_, size) in parts.items())[:64].ljust(64, ".")
    legend = "   ".join(f"{letter} {name} {size:.1f}" for letter, (name, size) in parts.items() if size >= 0.05)
    return f"[{bar}] {total:.1f} GiB\n {legend}"
