"""Scores the answers of a file with a reward model: pairs, prompts with completions, or conversations. Pairs also
measure the model: accuracy, margin and calibration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from bessemer.align.calibration import calibration_table, summarise_calibration
from bessemer.align.reward_model import RewardModel
from bessemer.data.read.answers import CHOSEN, divide_answers
from bessemer.data.read.chat_formats import recognise_pairs, recognise_source
from bessemer.data.read.entry import BadRow, FileEntry, FilePiece
from bessemer.data.read.rows import PieceReader
from bessemer.data.tokenizer.chat import Message
from bessemer.errors import UserError
from bessemer.observe.figure import LineChart, svg_file
from bessemer.observe.format import align_columns
from bessemer.observe.progress import ProgressReport, silent, working
from bessemer.spec.data import SourceSpec
from bessemer.spec.load import read_text
from bessemer.storage import write_atomic

ROWS = 256  # scored together


@dataclass(frozen=True)
class AnswerRow:
    """A row and its answers as conversations: of a pair first the chosen one."""

    record: dict[str, Any]
    answers: list[list[Message]]

    def scored(self, scores: Sequence[tuple[float, float]], ensemble: bool) -> dict[str, Any]:
        names = ("chosen_", "rejected_") if len(scores) == 2 else ("",)
        row = dict(self.record)
        for name, (mean, std) in zip(names, scores, strict=True):
            row |= {f"{name}score": mean, **({f"{name}std": std} if ensemble else {})}
        return row


def score_file(
    place: Path, path: Path, columns: Sequence[str], write: Path | None, figure: Path | None, which: str, device: str
) -> dict[str, Any]:
    """What `bessemer align score` does; the summary of the scores."""
    if write is not None:
        check_new_file(write, "--write")
    rows = read_answers(path, dict(_column(text) for text in columns))
    with working("loading the reward model") as report:
        model = RewardModel.load(place, which, device)
        scores = list(score_rows(model, rows, report))
    ensemble = model.heads > 1
    summary = summarise_scores(scores, ensemble)
    if write is not None:
        lines = [
            json.dumps(row.scored(of_row, ensemble), ensure_ascii=False)
            for row, of_row in zip(rows, scores, strict=True)
        ]
        write_atomic(write, "".join(f"{line}\n" for line in lines), parents=True)
        summary["written"] = str(write)
    if figure is not None:
        if "reliability" not in summary:
            raise UserError(f"--figure: draws the calibration on pairs, and {path} has none: leave it out")
        write_atomic(figure, svg_file(reliability_chart(summary["reliability"]).svg()), parents=True)
        summary["figure"] = str(figure)
    return summary


def _column(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not role or not name:
        raise UserError(f"--column {text}: write its purpose and its name, such as --column chosen=good")
    return role, name


def check_new_file(path: Path, option: str) -> None:
    """Refuses an output that exists, before work is done for it."""
    if path.suffix != ".jsonl":
        raise UserError(f"{option} {path}: the rows are JSON lines: write a name that ends in .jsonl")
    if path.exists():
        raise UserError(f"{option} {path}: exists already: remove it or write another name")


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for a terminal."""
    spread = f", standard deviation of the heads {summary['mean_std']:.4g}" if "mean_std" in summary else ""
    lines = [f"rows         {summary['rows']:,}", f"mean score   {summary['mean_score']:.4g}{spread}"]
    if "pairs" in summary:
        scaled = ""
        if "temperature" in summary:
            scaled = f"; {summary['ece_scaled']:.3f} at temperature {summary['temperature']:.3g}, which fits best"
        lines += [
            f"accuracy     {summary['accuracy']:.1%} of {summary['pairs']:,} pairs, margin {summary['margin']:.4g}",
            f"calibration  error {summary['ece']:.3f}{scaled}", "",
            *align_columns([
                ["confidence", "accuracy", "pairs"],
                *([f"{sure:.1%}", f"{right:.1%}", f"{count:,.0f}"] for sure, right, count in summary["reliability"]),
            ]),
        ]  # fmt: skip
    return [*lines, *(f"{name:<11}  {summary[name]}" for name in ("written", "figure") if name in summary)]


def read_answers(path: Path, columns: dict[str, str] | None = None) -> list[AnswerRow]:
    """The rows of a .jsonl file in the formats that training reads."""
    try:
        source = SourceSpec.model_validate({"path": str(path), "columns": columns or None})
    except ValidationError as error:
        raise UserError(f"--column: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    source = recognise_pairs(source)
    if not source.columns:
        source = recognise_source(path.name, source)
    reader = PieceReader(FilePiece(FileEntry(str(path), 0, "jsonl", 0), 0), source)
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: is not JSON ({error}); correct or delete the row") from None
        document = reader.document(number, record if isinstance(record, dict) else {})
        if document is None or isinstance(document, BadRow):
            reason = document.reason if isinstance(document, BadRow) else "it has no text; delete the row"
            raise UserError(f"{path}:{number}: {reason}")
        parts = list(divide_answers(iter([document])))
        if not all(part.messages for part in parts):
            raise UserError(f"{path}:{number}: is a text: give prompts with answers, or conversations")
        parts.sort(key=lambda part: -int(part.fields[CHOSEN][0]) if CHOSEN in part.fields else 0)
        rows.append(AnswerRow(record, [_plain(part.messages or []) for part in parts]))
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def _plain(messages: Sequence[dict[str, Any]]) -> list[Message]:
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def score_rows(
    model: RewardModel, rows: Sequence[AnswerRow], report: ProgressReport = silent
) -> Iterator[list[tuple[float, float]]]:
    """The mean and the standard deviation of each answer of each row."""
    for first in range(0, len(rows), ROWS):
        report("scoring", first, len(rows))
        some = rows[first : first + ROWS]
        scores = iter(model.score_conversations([answer for row in some for answer in row.answers]))
        for row in some:
            yield [next(scores) for _ in row.answers]


def summarise_scores(scores: Sequence[Sequence[tuple[float, float]]], ensemble: bool) -> dict[str, Any]:
    """The mean score, and of pairs the accuracy, margin and calibration."""
    flat = [answer for row in scores for answer in row]
    summary: dict[str, Any] = {"rows": len(scores), "mean_score": _mean([mean for mean, _ in flat])}
    if ensemble:
        summary["mean_std"] = _mean([std for _, std in flat])
    if pairs := [row for row in scores if len(row) == 2]:
        differences = torch.tensor([chosen[0] - rejected[0] for chosen, rejected in pairs], dtype=torch.float64)
        summary |= {
            "pairs": len(pairs), "accuracy": float((differences > 0).double().mean()),
            "margin": float(differences.mean()), **summarise_calibration(calibration_table(differences)),
        }  # fmt: skip
    return summary


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def reliability_chart(reliability: Sequence[Sequence[float]]) -> LineChart:
    """How often the preferred answer is the better one, by how sure the model is of it."""
    confidence, accuracy = ([float(row[k]) for row in reliability] for k in range(2))
    return LineChart(
        "Calibration", confidence, {"accuracy": accuracy, "if calibrated": confidence}, "confidence of the model"
    )
