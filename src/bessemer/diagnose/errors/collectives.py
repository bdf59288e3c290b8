"""Hangs and failures of many ranks: watchdog timeouts, flight-recorder dumps, and torchrun's table of failures."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from bessemer.diagnose.errors.log_text import LogText
from bessemer.diagnose.errors.rule import place_evidence
from bessemer.observe.format import format_ranks
from bessemer.run.finding import Cause, Finding

_TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d+)\]\s+Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), "
    r"OpType=(?P<operation>\w+)(?:, NumelIn=(?P<elements>\d+))?[^)]*?(?:Timeout\(ms\)=(?P<timeout>\d+))?\)"
)
_WORLD = re.compile(r"\b(?:world_size|WORLD_SIZE|num_processes|world size)['\"]?\s*[:=]\s*(\d+)")
_DEBUG = "export TORCH_NCCL_TRACE_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"
_RECORD = f"{_DEBUG}: the next timeout writes a flight-recorder dump of each rank."
EARLY = 10  # collectives after which a hang is no longer one of the start


def judge_timeouts(log: LogText) -> list[Finding]:
    """One finding for all watchdog timeouts of a log: which rank was behind."""
    matches = list(_TIMEOUT.finditer(log.text))
    if not matches:
        return []
    waiting: dict[int, re.Match[str]] = {}
    for match in matches:
        rank = int(match["rank"])
        if rank not in waiting or int(match["sequence"]) < int(waiting[rank]["sequence"]):
            waiting[rank] = match
    world = max((int(match[1]) for match in _WORLD.finditer(log.text)), default=max(waiting) + 1)
    sequences = {rank: int(match["sequence"]) for rank, match in waiting.items()}
    calls = {(match["operation"], match["elements"]) for match in waiting.values()}
    first = matches[0]
    symptom = f"{first['operation']} timed out"
    if first["timeout"]:
        symptom += f" after {int(first['timeout']) / 1000:,.0f} s"
    operations = {rank: match["operation"] for rank, match in waiting.items()}
    evidence = place_evidence(log, first.start()) | {
        "sequence": dict(sorted(sequences.items())), "operations": sorted(set(operations.values())),
    }  # fmt: skip
    silent = sorted(set(range(world)) - set(waiting))
    causes = _timeout_causes(sequences, calls, silent)
    if len(set(operations.values())) > 1:
        evidence["collectives"] = differing = differing_ranks(operations)
        causes = [_naming_operations(cause, differing) for cause in causes]
    alone = "Only one rank's message is in this log; the others' would tell who was behind."
    unknown = alone if len(waiting) == 1 else ""
    return [
        Finding.of_causes(
            f"{symptom} on ranks {format_ranks(sorted(waiting))}", causes, evidence=evidence, severity="critical",
            step=log.step_before(first.start()), unknown=unknown,
        )
    ]  # fmt: skip


def differing_ranks(operations: dict[int, str]) -> str:
    """Which ranks were in another collective than the most, as `rank 2 was in ALLGATHER, the others in ALLREDUCE`."""
    usual, most = Counter(operations.values()).most_common(1)[0]
    parts = []
    for operation in sorted(set(operations.values())):
        ranks = sorted(rank for rank, name in operations.items() if name == operation)
        if operation != usual or 2 * most <= len(operations):
            named = f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} were"
            parts.append(f"{named} in {operation}")
    return ", ".join([*parts, f"the others in {usual}"] if 2 * most > len(operations) else parts)


def _naming_operations(cause: Cause, differing: str) -> Cause:
    if cause.name not in ("rank_behind", "collective_mismatch"):
        return cause
    check = f"Which branch of the code made the difference ({differing})? {cause.check}"
    return replace(cause, text=f"{cause.text} {differing[0].upper()}{differing[1:]}.", check=check)


def _timeout_causes(sequences: dict[int, int], calls: set[tuple[str, str]], silent: list[int]) -> list[Cause]:
    lowest, highest = min(sequences.values()), max(sequences.values())
    behind = sorted(rank for rank, sequence in sequences.items() if sequence == lowest)
    causes = [
        Cause("network_or_gpu_hang", "The ranks wait in the same collective: a link, a NIC or a GPU does not move "
              "data.",
              0.5 if highest == lowest else 0.15, "`dmesg | grep -i -E 'xid|nvlink|mlx5'` on all hosts; `ibstat`; "
              "`all_reduce_perf -b 1G -e 1G` from nccl-tests between pairs of hosts.",
              "Exclude the host that fails the pair test."),
        Cause("slow_rank", "A rank does something long outside of the collective: a save, an evaluation, tokenizing, a "
              "download on rank 0 alone.", 0.3, "`py-spy dump --pid PID` on the rank that does not wait.",
              "Let every rank take part or wait outside; raise the limit: "
              "`init_process_group(timeout=timedelta(hours=2))` (HF: `ddp_timeout=7200`)."),
    ]  # fmt: skip
    if highest > lowest:
        ranks = f"Rank {behind[0]} is" if len(behind) == 1 else f"Ranks {format_ranks(behind)} are"
        causes.append(
            Cause("rank_behind", f"{ranks} at collective {lowest:,}, others at {highest:,}: fewer collectives were "
                  f"called there, or it hung.", 0.8, f"What differs on it: number of batches, a skipped step, an "
                  f"exception? {_RECORD}",
                  "Give every rank the same number of batches (`drop_last=True`, `Join`), and no collective under "
                  "`if rank == 0`.")
        )  # fmt: skip
    elif len(calls) > 1:
        names = " and ".join(sorted({f"{operation} of {elements} elements" for operation, elements in calls})[:3])
        causes.append(
            Cause("collective_mismatch", f"Ranks call different collectives at the same place: {names}.", 0.85,
                  f"Which branch depends on the rank or its data? {_RECORD}",
                  "Call the same collectives in the same order on every rank.")
        )  # fmt: skip
    elif silent:
        ranks = f"Rank {silent[0]} does" if len(silent) == 1 else f"Ranks {format_ranks(silent)} do"
        likely = 0.7 if len(silent) < len(sequences) else 0.55  # the log may be of one node
        causes.append(
            Cause("rank_missing", f"{ranks} not wait: ended, or busy elsewhere; rank 0 alone in a save or an "
                  f"evaluation is usual.", likely, f"The log of that rank, and `py-spy dump --pid PID`. {_RECORD}",
                  "Let all ranks enter saves and evaluations, or end rank 0's work before the next collective.")
        )  # fmt: skip
    if highest <= EARLY:
        causes.append(
            Cause("first_collective", "It is one of the first collectives: peers never connected.", 0.6,
                  "`NCCL_DEBUG=INFO`: which interface and transport? `NCCL_P2P_DISABLE=1` as a test.",
                  "`NCCL_SOCKET_IFNAME`; in virtual machines turn ACS off or set `NCCL_P2P_DISABLE=1`.")
        )  # fmt: skip
    return causes


def is_flight_dump(content: Any) -> bool:
    """Whether a JSON value is a dump of PyTorch's flight recorder."""
    return isinstance(content, dict) and isinstance(content.get("entries"), list) and "pg_config" in content


def judge_flight(dumps: dict[int, dict[str, Any]]) -> list[Finding]:
    """Compares dumps by rank: the first collective that not all ranks have completed."""
    groups: dict[str, dict[int, dict[int, dict[str, Any]]]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            if isinstance(entry, dict) and isinstance(entry.get("collective_seq_id"), int) and not entry.get("is_p2p"):
                name = "/".join(map(str, entry.get("process_group") or ["default"]))
                groups[name].setdefault(rank, {})[entry["collective_seq_id"]] = entry
    findings = [finding for name, ranks in groups.items() if (finding := _judge_group(name, ranks, sorted(dumps)))]
    return sorted(findings, key=lambda finding: -finding.confidence)


def _judge_group(name: str, ranks: dict[int, dict[int, dict[str, Any]]], dumped: list[int]) -> Finding | None:
    open_sequences = [s for entries in ranks.values() for s, e in entries.items() if e.get("state") != "completed"]
    if not open_sequences:
        return None
    stuck = min(open_sequences)
    at = {rank: entries[stuck] for rank, entries in ranks.items() if stuck in entries}
    absent = sorted(rank for rank in ranks if rank not in at)
    states = Counter(str(entry.get("state")) for entry in at.values())
    operations = {str(entry.get("profiling_name")) for entry in at.values()}
    shapes = {str(entry.get("input_sizes")) for entry in at.values()}
    not_started = sorted(rank for rank, entry in at.items() if entry.get("state") == "scheduled")
    example = next(iter(at.values()))
    frames = [frame for frame in example.get("frames") or [] if isinstance(frame, dict)]
    frames = [frame for frame in frames if "site-packages" not in str(frame.get("filename"))]
    evidence: dict[str, Any] = {
        "group": name, "sequence": stuck, "operation": sorted(operations), "states": dict(states)
    }  # fmt: skip
    if frames:
        evidence["code"] = f"{frames[0].get('filename')}:{frames[0].get('line')}"
    if len(operations) > 1 or len(shapes) > 1:
        what = " and ".join(sorted(operations if len(operations) > 1 else shapes))
        cause = Cause("collective_mismatch", f"Ranks disagree about collective {stuck:,}: {what}.", 0.9,
                      "Compare the frames of the two ranks in the dumps.",
                      "Call the same collectives with the same sizes on every rank.")  # fmt: skip
    elif absent:
        last = {rank: max(ranks[rank]) for rank in absent}
        cause = Cause("rank_behind", f"Ranks {format_ranks(absent)} never called collective {stuck:,}; their last is "
                      f"{max(last.values()):,}.", 0.9, "`py-spy dump --pid PID` on them; their log's end.",
                      "Give every rank the same number of batches, and no collective under `if rank == "
                      "0`.")  # fmt: skip
    elif not_started and len(not_started) < len(at):
        cause = Cause("gpu_behind", f"Ranks {format_ranks(not_started)} have scheduled it, but their GPU has not "
                      f"started it: earlier kernels hang there.", 0.8, "`nvidia-smi` and Xid lines on that host.",
                      "Drain that GPU if it happens again.")  # fmt: skip
    else:
        cause = Cause("network_or_gpu_hang", "Every rank has entered the collective, and none completes: a link or "
                      "GPU.", 0.75,
                      "`dmesg | grep -i -E 'xid|nvlink|mlx5'`, `ibstat`, nccl-tests between pairs of hosts.",
                      "Exclude the host that fails the pair test.")  # fmt: skip
    missing = sorted(set(dumped) - set(ranks))
    alone = "One rank's dump cannot show who was behind: give those of all ranks." if len(dumped) == 1 else ""
    unknown = f"Ranks {format_ranks(missing)} have no entry of this group. {alone}" if missing else alone
    symptom = f"collective {stuck:,} ({', '.join(sorted(operations))}) did not complete"
    return Finding.of_causes(symptom, [cause], evidence=evidence, severity="critical", unknown=unknown.strip())


_TABLE = re.compile(r"Root Cause \(first observed failure\):\n(?P<body>(?:.*\n?){1,9})")
_ROW = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$", re.MULTILINE)
_OTHERS = re.compile(r"Failures:\n([\s\S]*?)Root Cause")


def judge_launcher(log: LogText) -> list[Finding]:
    """torchrun's table of failures: the rank that failed first."""
    tables = list(_TABLE.finditer(log.text))
    if not tables:
        return []
    table = tables[-1]
    row = {name: value.strip() for name, value in _ROW.findall(table["body"])}
    rank = re.match(r"\d+", row.get("rank", ""))
    code = re.match(r"-?\d+", row.get("exitcode", ""))
    others = _OTHERS.search(log.text)
    evidence = place_evidence(log, table.start()) | {
        "rank": int(rank[0]) if rank else None, "exitcode": int(code[0]) if code else None, "host": row.get("host", ""),
        "failed_ranks": 1 + (len(re.findall(r"^\s*rank\s*:", others[1], re.MULTILINE)) if others else 0),
    }  # fmt: skip
    cause = Cause(
        "first_failed_rank", f"Rank {row.get('rank', '?')} on {row.get('host', '?')} failed first (exit code "
        f"{row.get('exitcode', '?')}).", 0.5, "The traceback of that rank is the one to read; later failures follow "
        "from it.",
        "torchrun --log-dir logs --redirects 3 --tee 3 ...; `@record` of torch.distributed.elastic on main writes its "
        "error into this table.",
    )  # fmt: skip
    unknown = "The table holds no traceback of that rank." if row.get("error_file") == "<N/A>" else ""
    return [
        Finding.of_causes(f"torchrun: rank {row.get('rank', '?')} failed first", [cause], evidence=evidence,
                          severity="critical", unknown=unknown)
    ]  # fmt: skip
