"""What is examined: a model, and the losses of its steps, one micro-batch at a time as in training.

The result of a look: sentences, a table, figures and plain numbers, for a terminal, a page or a program.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.observe.figure import Figure, page
from bessemer.run.directory import Finding
from bessemer.run.journal import json_ready


@dataclass(frozen=True)
class MicroBatchTerms:
    """One micro-batch. The parts of a step sum to its loss."""

    loss: Tensor
    share: float  # of the step's target tokens
    tokens: float


@dataclass(frozen=True)
class InspectedModel:
    """`parts(step, precision)` makes the forward passes of a step; precision None is the run's own."""

    model: nn.Module
    parts: Callable[[int, str | None], Iterator[MicroBatchTerms]]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]


def backward(subject: InspectedModel, step: int, precision: str | None = None) -> Tensor:
    """Fresh gradients of a whole step; its loss, still on the device."""
    subject.model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for part in subject.parts(step, precision):
        part.loss.backward()  # type: ignore[no-untyped-call]
        total = total.to(part.loss.device) + part.loss.detach().float()
    return total


@torch.no_grad()
def loss_of(subject: InspectedModel, steps: list[int]) -> float:
    """Mean loss over some steps, without gradients."""
    return sum(float(part.loss) for step in steps for part in subject.parts(step, None)) / len(steps)


TERMINAL_ROWS = 40  # of a table: the HTML page and JSON have them all


@dataclass
class InspectionReport:
    """`said` are the conclusions; `data` holds everything in numbers."""

    title: str
    said: list[str]
    data: dict[str, Any]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    figures: Sequence[Figure] = ()
    findings: list[Finding] = field(default_factory=list)
    shown: int = 4  # figures in the terminal

    def to_json(self) -> str:
        found = [finding.to_json() for finding in self.findings]
        return json.dumps(
            json_ready({"title": self.title, "said": self.said, **self.data, "findings": found}), indent=1
        )

    def text(self) -> str:
        parts = [self.title, *(figure.text() for figure in self.figures[: self.shown])]
        cells = [[*self.columns], *([_cell(value) for value in row] for row in self.rows[:TERMINAL_ROWS])]
        if self.rows:
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            sides = ["<", *[">"] * len(widths)]
            shapes = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=False)]
            lines = ["  ".join(shapes).format(*row) for row in cells]
            if len(self.rows) > TERMINAL_ROWS:
                lines.append(f"... {len(self.rows) - TERMINAL_ROWS} more rows: see --json or --html")
            parts.append("\n".join(line.rstrip() for line in lines))
        parts.append("\n".join([*self.said, *map(_finding, self.findings)]))
        return "\n\n".join(parts)

    def html(self) -> str:
        said = "".join(f"<p>{html.escape(line)}</p>" for line in [*self.said, *map(_finding, self.findings)])
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row) + "</tr>" for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""
        return page(self.title, said + "".join(figure.svg() for figure in self.figures) + table)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _finding(finding: Finding) -> str:
    return "! " + " ".join(part for part in (finding.symptom + ".", finding.cause, finding.fix) if part)
