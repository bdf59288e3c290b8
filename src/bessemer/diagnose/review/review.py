"""Runs every check on a script, and applies the patches until none is left."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.diagnose.review import framework_checks, loop_checks, loss_checks, mode_checks, module_checks, rank_checks
from bessemer.diagnose.review.catalogue import RULES, ScriptFault
from bessemer.diagnose.review.edits import apply_edits, unified_diff
from bessemer.diagnose.review.script import TrainingScript
from bessemer.diagnose.review.sources import SourceFile, read_source
from bessemer.diagnose.review.trace import traces
from bessemer.errors import UserError

CHECKS = tuple(
    check
    for module in (loop_checks, mode_checks, loss_checks, module_checks, rank_checks, framework_checks)
    for check in module.CHECKS
)
PYTHON_2 = ("Missing parentheses in call to 'print'", "Missing parentheses in call to 'exec'",
            "multiple exception types must be parenthesized", "leading zeros in decimal integer")  # fmt: skip
ROUNDS = 12  # a patch may uncover another fault, and patches of one place are applied one after another


@dataclass(frozen=True)
class ScriptReview:
    """The faults of one script, and its text with all patches applied."""

    source: SourceFile
    faults: list[ScriptFault]
    patched: str

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def changed(self) -> bool:
        return self.patched != self.source.text

    @property
    def patch(self) -> str:
        """A diff with the path as seen from the current folder, as `git apply` and `patch -p1` need it."""
        path, here = Path(self.path), Path.cwd()
        if path.is_absolute():
            path = path.relative_to(here) if path.is_relative_to(here) else path.relative_to(path.anchor)
        if not self.changed:
            return ""
        return unified_diff(self.source.in_file(self.source.text), self.source.in_file(self.patched), path.as_posix())

    def symptom(self, fault: ScriptFault) -> str:
        """The fault's symptom, with places instead of lines."""
        return re.sub(r"(?<=\bin line )\d+", lambda match: self.source.place(int(match[0])), fault.symptom)

    def to_json(self) -> dict[str, Any]:
        findings = []
        for fault in self.faults:
            finding = fault.finding(self.path).to_json()
            finding["symptom"] = self.symptom(fault)
            if self.source.cells:
                cell, line = self.source.cells[fault.line - 1]
                finding["evidence"] |= {"cell": cell, "line": line}
            findings.append(finding)
        return {"file": self.path, "findings": findings, "patch": self.patch}


def syntax_message(error: SyntaxError) -> str:
    message = error.msg or ""
    if any(sign in message for sign in PYTHON_2):
        return "is Python 2; `bessemer review` reads Python 3"
    return f"is not valid Python: {message}"


def find_faults(text: str, path: str, source: SourceFile | None = None) -> list[ScriptFault]:
    """The faults of a script's text by line. An edit that cannot be applied alone is left out.

    `source` names the places of a notebook in messages.
    """
    try:
        script = TrainingScript(text, path)
    except SyntaxError as error:
        line = error.lineno or 1
        place = source.place(min(line, len(source.cells) or line)) if source else str(line)
        raise UserError(f"{path}:{place}: {syntax_message(error)}") from None
    except (ValueError, RecursionError, MemoryError):
        raise UserError(f"{path}: is not valid Python") from None
    faults: dict[tuple[str, int], ScriptFault] = {}
    for trace in traces(script):
        for check in CHECKS:
            for fault in check(script, trace):
                applies = not fault.edits or apply_edits(text, fault.edits) is not None
                checked = fault if applies else ScriptFault(fault.rule, fault.line, fault.symptom)
                faults.setdefault((fault.rule, fault.line), checked)
    return sorted(faults.values(), key=lambda fault: (fault.line, fault.rule))


def apply_patches(text: str, path: str) -> str:
    """The text with the patches of all faults but notes."""
    for _ in range(ROUNDS):
        edits = [fault.edits for fault in find_faults(text, path) if fault.edits and fault.severity != "note"]
        changed = apply_edits(text, [edit for group in edits for edit in group])
        if changed is None:  # two patches touch one place
            changed = apply_edits(text, edits[0])
        if changed is None or changed == text:
            return text
        text = changed
    return text


def review_source(source: SourceFile) -> ScriptReview:
    faults = find_faults(source.text, source.path, source)
    if source.cells:  # lines of several cells cannot be written back
        return ScriptReview(source, [ScriptFault(f.rule, f.line, f.symptom) for f in faults], source.text)
    return ScriptReview(source, faults, apply_patches(source.text, source.path))


def review_text(text: str, path: str) -> ScriptReview:
    return review_source(SourceFile(path, text))


def review_file(path: Path) -> ScriptReview:
    """Read and review a script or notebook. Nothing of it is run or imported."""
    return review_source(read_source(path))


__all__ = ["RULES", "ScriptReview", "apply_patches", "find_faults", "review_file", "review_source", "review_text"]
