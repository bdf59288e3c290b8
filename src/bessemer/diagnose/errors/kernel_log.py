"""Kernel messages about GPUs: Xid codes of the NVIDIA driver, and what to do with the GPU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from bessemer.diagnose.errors.log_text import LogText
from bessemer.diagnose.errors.rule import place_evidence
from bessemer.run.finding import Cause, Finding

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, (?P<detail>.*))?")
_LOST = re.compile(
    r"NVRM: GPU (?:at )?(?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)[^\n]*has fallen off the bus"
    r"|NVRM:[^\n]*fallen off the bus and is not responding"
)
RESTART = "Restart the job; the GPU needs nothing."
WATCH = "The job may go on; count the events of this GPU, and reset it at the next pause: nvidia-smi --gpu-reset -i BUS"
RESET = "End the jobs on it, then nvidia-smi --gpu-reset -i BUS; resume from the last checkpoint."
DRAIN = "Drain the node; nvidia-smi --gpu-reset -i BUS, then dcgmi diag -r 3. Resume from the checkpoint elsewhere."
REBOOT = "Drain and reboot the node; if it comes back, reseat or replace the GPU."
LINKS = "nvidia-smi nvlink -e -i BUS; restart nvidia-fabricmanager, reset the node's GPUs; replace what fails again."
_REMAP = "nvidia-smi -q -d ECC,ROW_REMAPPER -i BUS: replace it after a remapping failure or over 4 SRAM errors."


@dataclass(frozen=True)
class Xid:
    """What a code means. `own_code` means that the program on the GPU is the usual cause."""

    name: str
    text: str
    action: str
    severity: str = "critical"
    own_code: bool = False
    check: str = "dcgmi diag -r 3 on that node"
    follows: bool = False  # usually a consequence of another code


_GSP = Xid("gsp_timeout", "The GPU's system processor does not answer the driver.", RESET)
_NVLINK = Xid("nvlink_error", "An NVLink connection has an error.", LINKS, check="nvidia-smi nvlink -s -i BUS")
_KERNEL_CHECK = "compute-sanitizer python train.py; does another GPU fail at the same step?"
XIDS: dict[int, Xid] = {
    13: Xid("gpu_program_exception", "A kernel raised an exception: an access out of bounds or an illegal instruction "
            "in the program.", RESTART, own_code=True, check=_KERNEL_CHECK),
    31: Xid("gpu_page_fault", "A kernel accessed an address that is not mapped.", RESTART, own_code=True,
            check=_KERNEL_CHECK),
    43: Xid("gpu_stopped_processing", "The program's channel was stopped after an error of its "
        "own.", RESTART, "warning",
            own_code=True, check="The program's own log has the CUDA error.", follows=True),
    45: Xid("preemptive_removal", "The driver removed a program's channels: it was killed, or another fault came "
            "first.",
            "Look for the Xid before it, also of other GPUs.", "note", own_code=True, check="Earlier lines of dmesg",
            follows=True),
    46: Xid("gpu_stopped", "The GPU stopped processing.", RESET),
    48: Xid("ecc_double_bit", "An uncorrectable (double-bit) memory error.", DRAIN, check=_REMAP),
    61: Xid("microcontroller_breakpoint", "The GPU's microcontroller stopped.", RESET),
    62: Xid("microcontroller_halt", "The GPU's microcontroller halted.", RESET),
    63: Xid("row_remap_recorded", "A memory row was marked for remapping; it happens at the next "
        "reset.", WATCH, "warning",
            check=_REMAP),
    64: Xid("row_remap_failure", "A memory row could not be remapped.", DRAIN, check=_REMAP),
    69: Xid("graphics_class_error", "A kernel raised an exception.", RESTART, own_code=True, check=_KERNEL_CHECK),
    74: _NVLINK,
    79: Xid("fallen_off_bus", "The GPU has fallen off the PCIe bus: power, heat, or the slot.", REBOOT,
            check="BMC log for power and temperature; lspci -vv for the link's errors"),
    92: Xid("high_single_bit_rate", "Many corrected memory errors.", WATCH, "warning", check=_REMAP),
    94: Xid("contained_ecc", "An uncorrectable memory error, contained to one program.", RESTART + " " + WATCH,
            check=_REMAP),
    95: Xid("uncontained_ecc", "An uncorrectable memory error that was not contained.", DRAIN, check=_REMAP),
    109: Xid("context_switch_timeout", "The GPU did not switch contexts in time.", RESET),
    119: _GSP, 120: _GSP,
    140: Xid("ecc_unrecovered", "An unrecovered memory error.", DRAIN, check=_REMAP),
    143: Xid("gpu_init_error", "The GPU could not be initialised.", RESET),
    154: Xid("recovery_action", "The driver announces the recovery that the GPU needs.", "Do what the line names.",
             "warning", check="Earlier lines of dmesg", follows=True),
    158: Xid("gpu_fatal_timeout", "The GPU timed out fatally.", RESET),
    **dict.fromkeys(range(144, 151), _NVLINK),
}  # fmt: skip
UNKNOWN_XID = Xid("xid", "The driver reported an error of the GPU.", "Look it up in NVIDIA's Xid catalogue.", "warning")


def judge_kernel_log(log: LogText) -> list[Finding]:
    """A finding for each Xid code, the most telling first, and for GPUs that are lost without one."""
    events: dict[int, list[re.Match[str]]] = {}
    for match in _XID.finditer(log.text):
        events.setdefault(int(match["code"]), []).append(match)
    findings = [_judge_code(log, code, matches, alone=len(events) == 1) for code, matches in events.items()]
    lost = _LOST.search(log.text)
    if lost and 79 not in events:
        findings.append(_judge_code(log, 79, [lost], alone=True))
    return findings


def _judge_code(log: LogText, code: int, matches: list[re.Match[str]], alone: bool) -> Finding:
    xid = XIDS.get(code, UNKNOWN_XID)
    groups = matches[0].re.groupindex
    buses = Counter(match["bus"] or "?" for match in matches)
    bus = buses.most_common(1)[0][0]
    evidence = place_evidence(log, matches[0].start()) | {"xid": code, "gpus": dict(buses)}
    if "detail" in groups and (name := re.search(r"name=(\S+?),", matches[0]["detail"] or "")):
        evidence["process"] = name[1]
    confidence = 0.9 if alone or not xid.follows else 0.6
    causes = [Cause(xid.name, xid.text, confidence, xid.check.replace("BUS", bus), xid.action.replace("BUS", bus))]
    if xid.own_code and code in (13, 31):
        several = len(matches) >= 3 and len(buses) == 1
        causes.append(
            Cause("gpu_hardware", "The GPU itself: it fails with programs that run "
                  "elsewhere.", 0.35 if several else 0.1,
                  "Does the same step pass on another GPU?", DRAIN.replace("BUS", bus))
        )  # fmt: skip
    times = f", {len(matches)} times" if len(matches) > 1 else ""
    where = f"GPU {bus}" if len(buses) == 1 else f"{len(buses)} GPUs"
    return Finding.of_causes(f"Xid {code} on {where}{times}", causes, evidence=evidence, severity=xid.severity)
