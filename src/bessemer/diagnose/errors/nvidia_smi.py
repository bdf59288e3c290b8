"""`nvidia-smi` output: its table, and the long form of `nvidia-smi -q`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bessemer.diagnose.errors.log_text import LogText
from bessemer.run.finding import Cause, Finding

_DEVICE = re.compile(r"^\| +(?P<index>\d+) +(?P<name>\S.*?) +(?:On|Off|N/A) +\|.*\| *(?P<ecc>\d+\*?|N/A|Off) *\|$")
_LOAD = re.compile(
    r"^\|\s*(?:N/A|\d+%|ERR!)\s+(?P<temperature>\d+)C\s+P\d+\s+(?P<power>\d+)W\s*/\s*(?P<limit>\d+)W\s*\|\s*"
    r"(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB\s*\|\s*(?P<utilization>\d+)%"
)
_PROCESS = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?:N/A\s+N/A\s+)?(?P<pid>\d+)\s+C(?:\+G)?\s+(?P<name>\S+).*?(?P<used>\d+)MiB\s*\|$"
)
_SECTION = re.compile(r"^GPU (?P<bus>[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$", re.MULTILINE)
LOW_UTILIZATION = 50  # percent, with memory in use
BUSY_SHARE = 0.1  # of the memory in use, above which a device counts as part of a run
HOT_C = 84


@dataclass(frozen=True)
class SmiDevice:
    """A GPU of the table."""

    index: int
    name: str
    ecc: str
    temperature: int
    power: int
    limit: int
    used: int
    total: int
    utilization: int

    @property
    def busy(self) -> bool:
        return self.used > BUSY_SHARE * self.total


def judge_smi(log: LogText) -> list[Finding]:
    """Findings of every table and long form in a text; none if it has neither."""
    devices, processes = _read_table(log.lines)
    findings = [*_judge_table(devices), *_judge_processes(processes)] if devices else []
    sections = list(_SECTION.finditer(log.text))
    ends = [*(section.start() for section in sections[1:]), len(log.text)]
    for section, end in zip(sections, ends if sections else [], strict=True):
        findings += _judge_section(section["bus"], log.text[section.start() : end])
    return findings


def _read_table(lines: list[str]) -> tuple[list[SmiDevice], list[tuple[int, int, str, int]]]:
    devices, processes = [], []
    head = None
    for line in lines:
        if match := _DEVICE.match(line):
            head = match
        elif head and (load := _LOAD.match(line)):
            numbers = {name: int(value) for name, value in load.groupdict().items()}
            devices.append(SmiDevice(int(head["index"]), head["name"], head["ecc"], **numbers))
            head = None
        elif process := _PROCESS.match(line):
            processes.append((int(process["index"]), int(process["pid"]), process["name"], int(process["used"])))
    return devices, processes


def _judge_table(devices: list[SmiDevice]) -> list[Finding]:
    findings = []
    busy = [device for device in devices if device.busy]
    if failing := [device for device in devices if device.ecc.rstrip("*").isdigit() and int(device.ecc.rstrip("*"))]:
        findings.append(_ecc(", ".join(str(device.index) for device in failing), {d.index: d.ecc for d in failing}))
    if slow := [device for device in busy if device.utilization < LOW_UTILIZATION]:
        mean = sum(device.utilization for device in slow) / len(slow)
        causes = [
            Cause("gpu_waits", "The GPUs wait for the host: data loading, a small batch, or host work between "
                  "steps.", 0.6,
                  "A torch profiler trace of ten steps: give its JSON to bessemer diagnose.",
                  "`dataloader_num_workers=8`, `dataloader_pin_memory=True`, data tokenized beforehand, a larger "
                  "micro-batch."),
            Cause("waits_for_rank", "It waits for a slower rank or for a save.", 0.25,
                  "Is one GPU at 100 % while others are low? Repeat nvidia-smi dmon for a minute.", "")]  # fmt: skip
        unknown = "One sample of utilisation may have hit a pause; it says whether a kernel ran, not how well."
        findings.append(
            Finding.of_causes(f"low utilisation: {mean:.0f} % on {len(slow)} of {len(busy)} GPUs in use", causes,
                              evidence={"utilization": {d.index: d.utilization for d in busy}}, severity="warning",
                              unknown=unknown)
        )  # fmt: skip
    if idle := [device.index for device in devices if not device.busy] if busy else []:
        cause = Cause(
            "idle_gpus",
            "The run does not use them: fewer processes than GPUs, or CUDA_VISIBLE_DEVICES.",
            0.7,
            "`echo $CUDA_VISIBLE_DEVICES`; `--nproc_per_node`.",
            f"torchrun --nproc_per_node={len(devices)} ...",
        )
        findings.append(
            Finding.of_causes(f"{len(idle)} of {len(devices)} GPUs are not in use", [cause], evidence={"gpus": idle},
                              severity="note")
        )  # fmt: skip
    if hot := [device for device in busy if device.temperature >= HOT_C]:
        cause = Cause(
            "heat",
            "Cooling does not keep up; the clocks fall above about 85 °C.",
            0.8,
            "`nvidia-smi -q -d PERFORMANCE`: HW or SW Thermal Slowdown active?",
            "Fans, air flow, power limit.",
        )
        findings.append(
            Finding.of_causes(f"GPU {hot[0].index} is at {hot[0].temperature} °C", [cause],
                              evidence={"temperature": {d.index: d.temperature for d in hot}}, severity="warning")
        )  # fmt: skip
    limits = {device.limit for device in devices}
    if len(limits) > 1 and len({device.name for device in devices}) == 1:
        low = [device.index for device in devices if device.limit == min(limits)]
        cause = Cause(
            "power_limit",
            f"GPU {low[0]} is limited to {min(limits)} W, others to {max(limits)} W: the "
            f"slowest rank sets the pace of all.",
            0.85,
            "`nvidia-smi -q -d POWER`.",
            f"nvidia-smi -i {low[0]} -pl {max(limits)}",
        )
        findings.append(
            Finding.of_causes("the GPUs have different power limits", [cause], evidence={"limits_w": sorted(limits)},
                              severity="warning")
        )  # fmt: skip
    return findings


def _judge_processes(processes: list[tuple[int, int, str, int]]) -> list[Finding]:
    by_device: dict[int, list[tuple[int, int, str, int]]] = {}
    for process in processes:
        by_device.setdefault(process[0], []).append(process)
    shared = {index: rows for index, rows in by_device.items() if len([row for row in rows if row[3] > 500]) > 1}
    if not shared:
        return []
    index, rows = next(iter(shared.items()))
    names = ", ".join(f"{name} (PID {pid}, {used:,} MiB)" for _, pid, name, used in rows)
    cause = Cause("other_process", f"GPU {index} is shared by {names}: they share its compute and its memory.", 0.75,
                  "`ps -o user,lstart,cmd -p PIDS`: a former run that did not end? (A trainer with its own vLLM is "
                  "meant.)",
                  "kill " + str(min(rows, key=lambda row: row[3])[1]))  # fmt: skip
    symptom = f"{len(rows)} processes compute on GPU {index}"
    return [Finding.of_causes(symptom, [cause], evidence={"pids": [row[1] for row in rows]}, severity="warning")]


def _ecc(where: str, evidence: dict[Any, Any]) -> Finding:
    cause = Cause("ecc_uncorrectable", "GPU memory had uncorrectable errors since the last reset.", 0.9,
                  "`nvidia-smi -q -d ECC,ROW_REMAPPER`; `dmesg | grep -i xid`.",
                  "Drain the node and reset the GPU; replace it after a remapping failure.")  # fmt: skip
    return Finding.of_causes(f"uncorrectable ECC errors on GPU {where}", [cause], evidence={"errors": evidence},
                             severity="critical")  # fmt: skip


_REASONS = {
    "HW Thermal Slowdown": ("heat", "The GPU is too hot and halves its clocks.", "critical", "Fans, air flow, dust."),
    "SW Thermal Slowdown": ("heat", "The driver lowers the clocks to keep the "
    "temperature.", "warning", "Fans, air flow."),
    "HW Power Brake Slowdown": ("power_brake", "The server's power supply asks the GPU to slow down.", "critical",
                                "Check the power supplies and the rack's budget."),
    "SW Power Cap": ("power_cap", "The power limit holds the clocks down; near the limit this is normal under full "
                     "load.",
                     "note", "`nvidia-smi -pl WATTS`, if the limit is below the default."),
}  # fmt: skip


def _value(part: str, name: str, section: str = "") -> str:
    scope = part[part.find(section) :] if section and section in part else part if not section else ""
    match = re.search(rf"^\s*{re.escape(name)}\s*:\s*(.+?)\s*$", scope, re.MULTILINE)
    return match[1] if match else ""


def _watts(text: str) -> float:
    match = re.match(r"[\d.]+", text)
    return float(match[0]) if match else 0.0


def _judge_section(bus: str, part: str) -> list[Finding]:
    findings = []
    for reason, (name, text, severity, fix) in _REASONS.items():
        if _value(part, reason) == "Active":
            cause = Cause(name, text, 0.85, "`nvidia-smi dmon -s pcv` during the run.", fix)
            findings.append(Finding.of_causes(f"GPU {bus}: {reason} is active", [cause], severity=severity,
                                              evidence={"gpu": bus, "reason": reason}))  # fmt: skip
    limit = _watts(_value(part, "Current Power Limit") or _value(part, "Power Limit"))
    default = _watts(_value(part, "Default Power Limit"))
    if 0 < limit < 0.95 * default:
        cause = Cause("power_limit", f"Its power limit is {limit:.0f} W, the default {default:.0f} W.", 0.9,
                      "Was it lowered on purpose?", f"nvidia-smi -i {bus} -pl {default:.0f}")  # fmt: skip
        findings.append(Finding.of_causes(f"GPU {bus}: power is limited to {limit:.0f} W", [cause], severity="warning",
                                          evidence={"gpu": bus, "limit_w": limit, "default_w": default}))  # fmt: skip
    volatile = part[part.find("Volatile") : part.find("Aggregate")] if "Volatile" in part else ""
    errors = {name: int(value) for name, value in re.findall(r"^\s*(\w+ Uncorrectable\w*(?: "
        r"\w+)?)\s*:\s*(\d+)", volatile,
                                                             re.MULTILINE)}  # fmt: skip
    if sum(errors.values()):
        findings.append(_ecc(bus, errors))
    if _value(part, "Pending", "Remapped Rows") == "Yes" or _value(part, "Remapping Failure Occurred") == "Yes":
        failed = _value(part, "Remapping Failure Occurred") == "Yes"
        cause = Cause(
            "row_remap_failure" if failed else "row_remap_pending",
            "A memory row could not be remapped." if failed else "A memory row waits for its remapping.",
            0.9,
            "`nvidia-smi -q -d ROW_REMAPPER`.",
            "Replace the GPU." if failed else f"nvidia-smi --gpu-reset -i {bus}, with no process on it.",
        )
        findings.append(Finding.of_causes(f"GPU {bus}: {cause.text[:-1].lower()}", [cause], evidence={"gpu": bus},
                                          severity="critical" if failed else "warning"))  # fmt: skip
    return findings
