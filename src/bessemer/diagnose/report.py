"""What `bessemer inspect` works on (a model and the losses of its steps, by micro-batch) and what it returns (a report
for a terminal, a page or a program).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.observe.figure import Figure
from bessemer.observe.page import Block, Table, Text, html_page
from bessemer.run.finding import Finding
from bessemer.run.journal import json_ready


@dataclass(frozen=True)
class MicroBatchTerms:
    """The loss of one micro-batch; those of a step sum to its loss."""

    loss: Tensor
    share: float  # of the step's target tokens
    tokens: float


@dataclass(frozen=True)
class InspectedModel:
    """`parts(step, precision)` runs the forward passes of a step; precision None is the run's."""

    model: nn.Module
    parts: Callable[[int, str | None], Iterator[MicroBatchTerms]]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]


def backward_step(subject: InspectedModel, step: int, precision: str | None = None) -> Tensor:
    """Computes the gradients of a step and returns its loss, on the device."""
    subject.model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for part in subject.parts(step, precision):
        part.loss.backward()  # type: ignore[no-untyped-call]
        total = total.to(part.loss.device) + part.loss.detach().float()
    return total


@torch.no_grad()
def mean_step_loss(subject: InspectedModel, steps: list[int]) -> float:
    """Mean loss over steps, without gradients."""
    return sum(float(part.loss) for step in steps for part in subject.parts(step, None)) / len(steps)


TERMINAL_ROWS = 40  # of a table; the HTML page and JSON have all


@dataclass
class InspectionReport:
    """`conclusions` are sentences; `data` holds all numbers."""

    title: str
    conclusions: list[str]
    data: dict[str, Any]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    figures: Sequence[Figure] = ()
    findings: list[Finding] = field(default_factory=list)
    terminal_figures: int = 4

    def to_json(self) -> str:
        findings = [finding.to_json() for finding in self.findings]
        report = {"title": self.title, "said": self.conclusions, **self.data, "findings": findings}
        return json.dumps(json_ready(report), indent=1)

    def text(self) -> str:
        parts = [self.title, *(figure.text() for figure in self.figures[: self.terminal_figures])]
        cells = [[*self.columns], *([_cell(value) for value in row] for row in self.rows[:TERMINAL_ROWS])]
        if self.rows:
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            sides = ["<", *[">"] * (len(widths) - 1)]
            layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
            lines = [layout.format(*row) for row in cells]
            if len(self.rows) > TERMINAL_ROWS:
                lines.append(f"... {len(self.rows) - TERMINAL_ROWS} more rows: see --json or --html")
            parts.append("\n".join(line.rstrip() for line in lines))
        parts.append("\n".join([*self.conclusions, *map(_finding, self.findings)]))
        return "\n\n".join(parts)

    def html(self) -> str:
        blocks: list[Block] = [Text(line) for line in [*self.conclusions, *map(_finding, self.findings)]]
        blocks += self.figures
        if self.rows:
            blocks.append(Table([*self.columns], [[_cell(value) for value in row] for row in self.rows]))
        return html_page(self.title, [("", blocks)])


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _finding(finding: Finding) -> str:
    return "! " + " ".join(part for part in (finding.symptom + ".", finding.cause, finding.fix) if part)
