"""The peak of a CUDA memory snapshot and its holders, by hand."""

from typing import Any

from bessemer.observe.memory_snapshot import BEFORE, NO_PYTHON, holder, peak_holders, peak_text


def frame(filename: str, line: int = 1, name: str = "f") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


MODEL = [frame("??"), frame("/x/torch/nn/functional.py"), frame("/x/bessemer/model/attention.py", 7, "forward")]


def entry(action: str, addr: int, size: int, frames: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": frames or []}


def test_the_peak_and_who_holds_it() -> None:
    trace = [
        entry("alloc", 1, 400, MODEL), entry("free_requested", 9, 50), entry("free_completed", 9, 50),
        entry("alloc", 2, 300), entry("segment_alloc", 5, 1 << 20), entry("alloc", 3, 100, MODEL),  # the peak
        entry("free_completed", 1, 400), entry("alloc", 1, 200, MODEL), entry("free_completed", 1, 200),
        entry("free_completed", 2, 300), entry("free_completed", 3, 100),
    ]  # fmt: skip
    blocks = [
        {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
        {"size": 512, "requested_size": 0, "state": "inactive"},
    ]
    snapshot = {"segments": [{"device": 0, "blocks": blocks}], "device_traces": [trace]}
    peak = peak_holders(snapshot)
    assert peak["peak_bytes"] == 1050 - 50 + 800
    assert peak["held"] == [
        {"by": BEFORE, "bytes": 1000}, {"by": "model/attention.py:7 forward", "bytes": 500},
        {"by": NO_PYTHON, "bytes": 300},
    ]  # fmt: skip
    assert sum(each["bytes"] for each in peak["held"]) == peak["peak_bytes"]
    assert "1.8 kB" in peak_text(peak) and "model/attention.py:7" in peak_text(peak)


def test_a_snapshot_without_a_trace_is_all_state() -> None:
    segments = [{"device": 1, "blocks": [{"size": 8, "state": "active_allocated"}]}, {"device": 0, "blocks": []}]
    assert peak_holders({"segments": segments, "device_traces": [[], []]}, device=1) == {
        "peak_bytes": 8, "held": [{"by": BEFORE, "bytes": 8}],
    }  # fmt: skip


def test_the_holder_is_the_innermost_frame_of_ours() -> None:
    assert holder(MODEL) == "model/attention.py:7 forward"
    assert holder(MODEL[:2]) == "functional.py:1 f" and holder([frame("??")]) == NO_PYTHON
