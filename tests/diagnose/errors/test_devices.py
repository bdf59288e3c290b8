"""nvidia-smi output, kernel logs and profiler traces."""

from typing import Any

import pytest

from bessemer.diagnose.errors.device_trace import judge_trace, measure_trace
from bessemer.diagnose.errors.kernel_log import XIDS
from bessemer.diagnose.errors.read import judge_text

HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
"""


def smi(*devices: dict[str, Any], processes: tuple[tuple[int, int, str, int], ...] = ()) -> str:
    text = HEAD
    for index, device in enumerate(devices):
        d = {"ecc": "0", "used": 71035, "util": 97, "limit": 700, "temperature": 54} | device
        text += f"|   {index}  NVIDIA H100 80GB HBM3          On  |   00000000:1{index}:00.0 Off | {d['ecc']:>20} |\n"
        text += (
            f"| N/A   {d['temperature']}C    P0            525W / {d['limit']:>4}W | {d['used']:>7}MiB /  81559MiB | "
        )
        text += f"{d['util']:>6}%      Default |\n|                                         |                        |"
        text += "             Disabled |\n+-----------------------------------------+------------------------+------+\n"
    text += "| Processes:                                                                              |\n"
    for index, pid, name, used in processes:
        text += f"|    {index}   N/A  N/A {pid:>9}      C   {name:<42} {used:>8}MiB |\n"
    return text


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("gpu_waits", smi({"util": 12}, {"util": 9})),
        ("idle_gpus", smi({}, {"used": 4, "util": 0})),
        ("ecc_uncorrectable", smi({}, {"ecc": "2"})),
        ("heat", smi({"temperature": 88}, {})),
        ("power_limit", smi({"limit": 500}, {})),
        ("other_process", smi({}, processes=((0, 12345, "python", 40000), (0, 12399, "/usr/bin/python3", 31000)))),
    ],
)
def test_table(cause: str, text: str) -> None:
    assert judge_text(text)[0].rule == cause


def test_a_healthy_table_has_no_finding() -> None:
    assert judge_text(smi({}, {}, processes=((0, 1, "python", 71020), (1, 2, "python", 71020)))) == []


LONG = """\
==============NVSMI LOG==============
GPU 00000000:18:00.0
    Clocks Event Reasons
        Idle                              : Not Active
        Applications Clocks Setting       : Not Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : {slow}
            HW Thermal Slowdown           : {slow}
            HW Power Brake Slowdown       : Not Active
        Sync Boost                        : Not Active
        SW Thermal Slowdown               : Not Active
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : {ecc}
        Aggregate
            DRAM Uncorrectable            : 4
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : {pending}
        Remapping Failure Occurred        : No
    GPU Power Readings
        Power Draw                        : 340.11 W
        Current Power Limit               : {limit}.00 W
        Default Power Limit               : 400.00 W
"""


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("heat", {"slow": "Active"}),
        ("ecc_uncorrectable", {"ecc": "2"}),
        ("row_remap_pending", {"pending": "Yes"}),
        ("power_limit", {"limit": "250"}),
        ("", {}),
    ],
)
def test_long_form(cause: str, change: dict[str, str]) -> None:
    values = {"slow": "Not Active", "ecc": "0", "pending": "No", "limit": "400"} | change
    assert [finding.rule for finding in judge_text(LONG.format(**values))] == ([cause] if cause else [])


@pytest.mark.parametrize("code", [13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119])
def test_xid_codes(code: int) -> None:
    text = f"[Wed Nov 12 10:00:00 2025] NVRM: Xid (PCI:0000:9b:00): {code}, pid=1234, name=python3, text of the event\n"
    finding = judge_text(text * 2)[0]
    assert finding.rule == XIDS[code].name and finding.evidence["gpus"] == {"0000:9b:00": 2}
    assert finding.severity == XIDS[code].severity and "BUS" not in finding.fix + finding.check


def test_an_unknown_xid_is_a_warning() -> None:
    assert judge_text("NVRM: Xid (PCI:0000:9b:00): 999, pid=1, what\n")[0].severity == "warning"


def test_many_page_faults_of_one_gpu_suspect_it() -> None:
    text = "NVRM: Xid (PCI:0000:9b:00): 31, pid=1, name=python, MMU Fault\n"
    once, often = judge_text(text)[0], judge_text(text * 4)[0]
    assert often.alternatives[0].name == "gpu_hardware"
    assert often.alternatives[0].confidence > once.alternatives[0].confidence


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": 7}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_shares_of_a_trace_by_hand() -> None:
    shares = measure_trace(
        trace(
            event("gemm", 0, 400), event("ncclDevKernel_AllReduce_Sum_bf16", 300, 300), event("gemm", 900, 100),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 600, 250, "user_annotation"),
            event("Memcpy HtoD (Pageable -> Device)", 850, 50, "gpu_memcpy"),
        )
    )  # fmt: skip
    assert shares["idle"] == pytest.approx(0.25)
    assert shares["communication"] == pytest.approx(0.3)
    assert shares["exposed_communication"] == pytest.approx(0.2)
    assert shares["data_loading"] == pytest.approx(0.25)
    assert shares["copies"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("cause", "events"),
    [
        ("slow_data", [event("gemm", 0, 500), event("enumerate(DataLoader)#x.__next__", 500, 450, "user_annotation"),
                       event("gemm", 950, 50)]),
        ("host_bound", [event("gemm", 0, 500), event("gemm", 950, 50)]),
        ("small_kernels", [event("add", 10.0 * i, 4) for i in range(1500)]),
        ("slow_communication", [event("gemm", 0, 500), event("ncclKernel_AllGather", 500, 500)]),
        ("host_copies", [event("gemm", 0, 800), event("Memcpy HtoD", 800, 200, "gpu_memcpy")]),
    ],
)  # fmt: skip
def test_where_a_traces_time_is_lost(cause: str, events: list[dict[str, Any]]) -> None:
    assert judge_trace(trace(*events))[0].rule == cause


def test_a_busy_trace_has_no_finding() -> None:
    overlapped = [event("gemm", 100 * i, 99) for i in range(50)] + [event("ncclKernel_AllGather", 100, 3000)]
    assert judge_trace(trace(*overlapped)) == []


def test_a_trace_without_a_gpu_says_so() -> None:
    (finding,) = judge_trace(trace(event("aten::mm", 0, 10, "cpu_op")))
    assert finding.rule == "no_gpu_events" and finding.severity == "note"


@pytest.mark.parametrize("events", [[{"ph": "X", "ts": "1", "dur": None}], [None, 3, "x"], []])
def test_malformed_events_are_left_out(events: list[Any]) -> None:
    assert judge_trace({"traceEvents": events})[0].rule == "no_gpu_events"
