"""Findings of one text or JSON file about faults, ranked: root causes first, then their consequences."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.diagnose.errors.collectives import is_flight_dump, judge_flight, judge_launcher, judge_timeouts
from bessemer.diagnose.errors.device_trace import is_trace, judge_trace
from bessemer.diagnose.errors.kernel_log import judge_kernel_log
from bessemer.diagnose.errors.log_text import LogText, RaisedError
from bessemer.diagnose.errors.memory import judge_memory
from bessemer.diagnose.errors.nvidia_smi import judge_smi
from bessemer.diagnose.errors.rule import error_rules
from bessemer.errors import UserError
from bessemer.run.finding import SEVERITIES, Finding

READ_BYTES = 64 << 20  # of the end of a longer log
TRACE_BYTES = 2 << 30  # a larger trace is refused
# Errors that tell of another process's failure, or of the end.
_ENDINGS = (
    "ChildFailedError", "KeyboardInterrupt", "SystemExit", "ProcessRaisedException", "CalledProcessError",
    "DistBackendError", "DistNetworkError", "DistStoreError", "SignalException",
)  # fmt: skip


def judge_text(raw: str) -> list[Finding]:
    """Findings of a log, a traceback, kernel messages or `nvidia-smi` output; empty if nothing in it is a fault."""
    log = LogText(raw)
    origins = [*judge_memory(log), *judge_kernel_log(log), *judge_smi(log)]
    followers = [*judge_timeouts(log), *judge_launcher(log)]
    for rule in error_rules():
        if finding := rule.match(log):
            (followers if rule.follows else origins).append(finding)
    critical = [finding for finding in origins if finding.severity == "critical"]
    if not critical and (error := _first_error(log.errors)):
        origins.append(_unexplained(error))
        critical = origins[-1:]
    if not origins and not followers and log.errors:  # only of an end, such as KeyboardInterrupt
        origins.append(replace(_unexplained(log.errors[0]), severity="warning"))
    if critical:
        followers = [_demote(finding, critical[0]) for finding in followers]
    return rank_findings([*origins, *followers])


def rank_findings(findings: list[Finding]) -> list[Finding]:
    """The most severe first; of equal severity the more certain, then the earlier in its file."""

    def key(finding: Finding) -> tuple[int, float, int]:
        severity = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else 1
        return -severity, -finding.confidence, int(finding.evidence.get("line", 0))

    return sorted(findings, key=key)


def _demote(finding: Finding, origin: Finding) -> Finding:
    """A consequence of another failure needs no action of its own."""
    evidence = finding.evidence | {"follows": origin.rule or origin.symptom}
    return replace(finding, severity="note", evidence=evidence)


def _first_error(errors: list[RaisedError]) -> RaisedError | None:
    origins = [error for error in errors if error.kind.rsplit(".", 1)[-1] not in _ENDINGS]
    return origins[0] if origins else None


def _unexplained(error: RaisedError) -> Finding:
    """A traceback that no rule explains: its first error and the line of the user's code."""
    evidence: dict[str, Any] = {
        "line": error.line,
        "error": error.kind,
        "message": error.message[:500],
        "at": error.place,
    }
    if error.rank is not None:
        evidence["rank"] = error.rank
    message = f": {error.message[:160]}" if error.message else ""
    where = f" in {error.function} ({error.place})" if error.place else ""
    return Finding(
        f"{error.kind.rsplit('.', 1)[-1]}{message}", evidence, severity="critical",
        check=f"Read the first traceback{where}: later ones follow from it.",
        unknown="No rule knows this error.",
    )  # fmt: skip


def read_tail(path: Path) -> str:
    """The text of a file, gzip too; of a long one the end."""
    with path.open("rb") as file:
        head = file.read(2)
    if head == b"\x1f\x8b":
        try:
            with gzip.open(path, "rb") as packed:
                content = packed.read(TRACE_BYTES)
        except (OSError, EOFError) as error:
            raise UserError(f"{path}: the gzip file is damaged ({error}); copy it again") from None
        return content.decode("utf-8", "replace")
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - READ_BYTES))
        return file.read().decode("utf-8", "replace")


def refuse_pickle(path: Path) -> None:
    """Pickles run code when they are read: UserError with the way to JSON."""
    with path.open("rb") as file:
        head = file.read(2)
    if re.fullmatch(rb"\x80[\x02-\x05]", head):
        raise UserError(
            f"{path}: a pickle, which runs code when it is read. For a flight-recorder dump that you trust write JSON: "
            f"python -c \"import json, pickle, sys; json.dump(pickle.load(open(sys.argv[1], 'rb')), sys.stdout, "
            f'default=str)" {path} > {path.name}.json'
        )


def read_json(path: Path) -> Any:
    """The value of a JSON file, gzip too; None if it is not one document of JSON."""
    with path.open("rb") as file:
        head = file.read(64).lstrip()
    if not head.startswith((b"{", b"[", b"\x1f\x8b")):
        return None
    if path.stat().st_size > TRACE_BYTES:
        raise UserError(
            f"{path}: over {TRACE_BYTES >> 30} GiB; profile fewer steps (schedule(wait=1, warmup=1, active=3))"
        )
    try:
        with gzip.open(path, "rb") if head.startswith(b"\x1f\x8b") else path.open("rb") as file:
            return json.load(file)
    except (ValueError, OSError, EOFError):
        return None


def judge_json(content: Any) -> list[Finding] | None:
    """Findings of a profiler trace; None if the value is not one. Flight-recorder dumps are judged together."""
    return rank_findings(judge_trace(content)) if is_trace(content) else None


def rank_of_dump(path: Path, content: dict[str, Any], position: int) -> int:
    """The rank of a flight-recorder dump: its own entry, or the number that ends the file's name."""
    if isinstance(content.get("rank"), int):
        return int(content["rank"])
    number = re.search(r"(\d+)(?:\.\w+)?$", path.name)
    return int(number[1]) if number else position


__all__ = [
    "is_flight_dump", "judge_flight", "judge_json", "judge_text", "rank_findings", "rank_of_dump", "read_json",
    "read_tail", "refuse_pickle",
]  # fmt: skip
