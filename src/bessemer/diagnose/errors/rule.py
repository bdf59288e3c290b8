"""ErrorRule: one error text that libraries print, with its possible causes. The texts are in texts/*.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from bessemer.diagnose.errors.log_text import LogText
from bessemer.run.finding import Cause, Finding

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


@cache
def error_rules() -> tuple[ErrorRule, ...]:
    """All rules of texts/*.yaml."""
    rules = []
    for path in sorted((Path(__file__).parent / "texts").glob("*.yaml")):
        for entry in yaml.load(path.read_text(encoding="utf-8"), _LOADER):
            causes = tuple(Cause(**cause) for cause in entry.pop("causes"))
            rules.append(ErrorRule("|".join(entry.pop("patterns")), causes=causes, **entry))
    return tuple(rules)


@dataclass(frozen=True)
class ErrorRule:
    """Recognises one error text. `{name}` in the texts stands for the pattern's group of that name.

    Patterns include words around a message which prose that merely mentions it does not have.
    """

    pattern: str
    symptom: str
    causes: tuple[Cause, ...]
    severity: str = "critical"
    follows: bool = False  # usually a consequence of another failure, which then comes first
    unless: str = ""  # another text that explains it better
    unknown: str = ""

    def match(self, log: LogText) -> Finding | None:
        """A finding for the first place in the log where the text occurs."""
        matches = _compiled(self.pattern).finditer(log.text)
        first = next(matches, None)
        if first is None or (self.unless and _compiled(self.unless).search(log.text)):
            return None
        groups = {name: (value or "").strip() for name, value in first.groupdict().items()}
        causes = [
            replace(cause, text=fill(cause.text, groups), check=fill(cause.check, groups), fix=fill(cause.fix, groups))
            for cause in self.causes
        ]
        evidence = place_evidence(log, first.start()) | {name: value for name, value in groups.items() if value}
        if repeats := sum(1 for _ in matches):
            evidence["times"] = repeats + 1
        return Finding.of_causes(
            fill(self.symptom, groups), causes, evidence=evidence, severity=self.severity, unknown=self.unknown,
            step=log.step_before(first.start()),
        )  # fmt: skip


def fill(text: str, groups: dict[str, str]) -> str:
    """Replaces `{name}` by the group's value; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1], match[0]), text)


def place_evidence(log: LogText, offset: int) -> dict[str, object]:
    """Where in the log an error is: line, rank, and the line's text."""
    rank = log.rank_of(offset)
    place: dict[str, object] = {"line": log.line_of(offset), "text": log.line_text(offset)[:300]}
    return place if rank is None else place | {"rank": rank}
