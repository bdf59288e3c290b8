"""Runs every check on a script, and applies the patches until none is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.diagnose.review import framework_checks, loop_checks, loss_checks, mode_checks, module_checks, rank_checks
from bessemer.diagnose.review.catalogue import RULES, ScriptFault
from bessemer.diagnose.review.edits import apply_edits, unified_diff
from bessemer.diagnose.review.script import TrainingScript
from bessemer.diagnose.review.trace import traces
from bessemer.errors import UserError

CHECKS = tuple(
    check
    for module in (loop_checks, mode_checks, loss_checks, module_checks, rank_checks, framework_checks)
    for check in module.CHECKS
)
ROUNDS = 12  # a patch may uncover another fault, and patches of one place are applied one after another


@dataclass(frozen=True)
class ScriptReview:
    """The faults of one script, and its text with all patches applied."""

    path: str
    text: str
    faults: list[ScriptFault]
    patched: str

    @property
    def patch(self) -> str:
        return unified_diff(self.text, self.patched, self.path)

    def to_json(self) -> dict[str, Any]:
        findings = [fault.finding(self.path).to_json() for fault in self.faults]
        return {"file": self.path, "findings": findings, "patch": self.patch}


def find_faults(text: str, path: str) -> list[ScriptFault]:
    """The faults of a script's text by line. An edit that cannot be applied alone is left out."""
    try:
        script = TrainingScript(text, path)
    except (SyntaxError, ValueError) as error:
        place = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}{place}: is not valid Python: {getattr(error, 'msg', error)}") from None
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


def review_text(text: str, path: str) -> ScriptReview:
    return ScriptReview(path, text, find_faults(text, path), apply_patches(text, path))


def review_file(path: Path) -> ScriptReview:
    """Read and review a script. Nothing of it is run or imported."""
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name Python files, such as {path}/*.py") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a Python file") from None
    return review_text(text, str(path))


__all__ = ["RULES", "ScriptReview", "apply_patches", "find_faults", "review_file", "review_text"]
