"""Collectives of several ranks against hand-computed times, and what gloo costs the loop."""

import gzip
import json
from pathlib import Path

import pytest

from bessemer.observe.collectives import Collective, collective_name, collectives, compare_ranks, ranks_text
from bessemer.observe.profile import COMMUNICATION, GUARD, IDLE, MEMORY, TraceEvent, read_trace, step_time


def host(name: str, start: float, end: float, thread: str = "main") -> TraceEvent:
    return TraceEvent("host", name, start, end, thread)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl reduce_scatter"),
        ("ncclKernel_SendRecv(ncclDevComm*)", "nccl send_recv"), ("gloo:all_gather", "gloo all_gather"),
    ],
)  # fmt: skip
def test_names(kernel: str, name: str) -> None:
    assert collective_name(kernel) == name


def test_the_shortest_call_is_the_transfer_and_the_rest_is_waiting() -> None:
    first = [Collective("a", 10e3, 4000), Collective("b", 6e3), Collective("a", 30e3, 4000)]
    second = [Collective("a", 2e3, 4000), Collective("b", 6e3), Collective("a", 5e3, 4000)]
    a, b = compare_ranks([first, second], steps=2)
    assert (a.name, a.calls, a.bytes, a.last_rank) == ("a", 1.0, 4000.0, 1)
    assert a.ms == pytest.approx((10 + 30 + 2 + 5) / 4) and a.wait_ms == pytest.approx((8 + 25) / 4)
    assert a.rate == pytest.approx(4000 / 3.5e-3)  # 2 and 5 ms
    assert b.wait_ms == 0 and b.rate is None
    (uneven,) = compare_ranks([first[:1], []], steps=1)  # a stage of a pipeline that sends less
    assert uneven.wait_ms is None and uneven.last_rank is None and uneven.calls == 0.5
    assert compare_ranks([first], 1)[0].wait_ms is None  # one rank says nothing about waiting


def test_gloo_costs_what_the_loop_is_idle_for() -> None:
    events = [
        host("bessemer.steps", 0, 100), host("bessemer.backward", 0, 50), host("aten::mul", 0, 30),
        host("gloo:all_reduce", 20, 45, "gloo"),  # 10 beside an operation, 15 while the loop waits
        host("bessemer.judge", 50, 90), host("aten::mul", 50, 60), host("gloo:all_reduce", 55, 80, "gloo"),
        host("gloo:broadcast", 120, 130, "gloo"),  # after the profiled steps
    ]  # fmt: skip
    time = step_time(events)
    assert {part: us for part, us in time.parts.items() if us} == {
        MEMORY: 30, COMMUNICATION: 15 + 20, GUARD: 10 + 10, IDLE: 15,
    }  # fmt: skip
    assert collectives(events) == [Collective("gloo all_reduce", 25), Collective("gloo all_reduce", 25)]


def test_the_bytes_of_nccl_are_read(tmp_path: Path) -> None:
    args = {"dtype": "BFloat16", "In msg nelems": 100, "Out msg nelems": 800, "Collective name": "_allgather_base"}
    kernel = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    common = {"ph": "X", "pid": 0, "tid": 7}
    events = [
        {**common, "cat": "user_annotation", "name": "bessemer.steps", "ts": 0, "dur": 100},
        {**common, "cat": "kernel", "name": kernel, "ts": 10, "dur": 5, "args": args},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert collectives(read_trace(tmp_path / "trace.json.gz")) == [Collective("nccl all_gather", 5.0, 1600)]


def test_the_text_names_the_rank_that_the_others_wait_for() -> None:
    ranks = [{"rank": rank, "parts_ms": {"matmul": 5.0, "copies": 0.0}, "memory_bytes": 10**9} for rank in (0, 1)]
    rows = [{"name": "nccl all_gather", "ms": 3.5, "wait_ms": 1.25, "last_rank": 1, "calls": 2.0, "bytes": 2e6,
             "bytes_per_s": 9e9}]  # fmt: skip
    text = ranks_text(ranks, rows)
    assert "nccl all_gather, the others wait for rank 1" in text and "9.0" in text and "copies" not in text
    assert ranks_text(ranks[:1], rows) == ""
