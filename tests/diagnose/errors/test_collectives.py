"""Watchdog timeouts, flight-recorder dumps and torchrun's table: the rank that was behind."""

from typing import Any

import pytest

from bessemer.diagnose.errors.collectives import is_flight_dump, judge_flight
from bessemer.diagnose.errors.read import judge_text
from bessemer.run.finding import Finding


def timeout(rank: int, sequence: int, operation: str = "ALLREDUCE", elements: int = 466119168) -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn={elements}, NumelOut={elements}, "
        "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    )


def first(text: str) -> Finding:
    return judge_text(text)[0]


def test_the_rank_with_the_lower_sequence_is_behind() -> None:
    finding = first("step 1580 loss 2.1\n" + "".join(timeout(rank, 96120 if rank != 7 else 64088) for rank in range(8)))
    assert finding.rule == "rank_behind" and finding.cause.startswith("Rank 7 is at collective 64,088")
    assert finding.step == 1580 and "600 s" in finding.symptom and "ranks 0-7" in finding.symptom


def test_a_rank_that_does_not_wait_is_the_suspect() -> None:
    finding = first("world_size: 8\n" + "".join(timeout(rank, 1580) for rank in range(1, 8)))
    assert finding.rule == "rank_missing" and finding.cause.startswith("Rank 0 does not wait")


def test_half_of_the_ranks_are_missing() -> None:
    finding = first("WORLD_SIZE=4\n" + timeout(0, 1580) + timeout(1, 1580))
    assert finding.rule == "rank_missing" and finding.cause.startswith("Ranks 2-3 do not wait")


def test_different_collectives_at_one_place() -> None:
    finding = first(timeout(7, 80078, "BROADCAST", 5056) + timeout(3, 80078, "ALLREDUCE", 2106881))
    assert finding.rule == "collective_mismatch"
    assert "BROADCAST of 5056" in finding.cause and "ALLREDUCE of 2106881" in finding.cause


def test_all_ranks_in_one_collective() -> None:
    assert first("".join(timeout(rank, 1580) for rank in range(4))).rule == "network_or_gpu_hang"


def test_the_first_collectives() -> None:
    finding = first("".join(timeout(rank, 1, "BROADCAST") for rank in range(2)))
    assert finding.rule == "first_collective"


def test_one_rank_alone_says_what_is_unknown() -> None:
    assert "Only one rank" in first(timeout(0, 1580)).unknown


def test_older_messages_without_sizes() -> None:
    text = (
        "[E ProcessGroupNCCL.cpp:737] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.\n"
    )
    finding = first("".join(text.format(rank) for rank in range(8)))
    assert finding.rule == "network_or_gpu_hang" and "1,800 s" in finding.symptom


def test_timeouts_that_follow_a_crash_are_notes() -> None:
    crash = (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity "
        "of 79.25 GiB of which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.18 GiB memory in "
        "use.\n"
    )
    findings = judge_text(crash + "".join(timeout(rank, 1580) for rank in (0, 1, 2)))
    assert findings[0].rule == "activations" and findings[0].evidence["rank"] == 3
    assert [finding.severity for finding in findings[1:]] == ["note"]
    assert findings[1].evidence["follows"] == "activations"


def dump(rank: int, entries: list[tuple[int, str, str, list[list[int]]]]) -> dict[str, Any]:
    rows = [
        {"record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
         "p2p_seq_id": 0, "op_id": number, "profiling_name": name, "input_sizes": sizes, "state": state,
         "is_p2p": False, "frames": [{"name": "train", "filename": "/home/user/train.py", "line": 42}]}
        for number, name, state, sizes in entries
    ]  # fmt: skip
    return {"version": "2.10", "pg_config": {"0": {"name": "0", "ranks": "[0, 1, 2]"}}, "rank": rank, "entries": rows}


Row = tuple[int, str, str, list[list[int]]]
DONE: Row = (1, "nccl:all_reduce", "completed", [[8]])
OPEN: Row = (2, "nccl:all_reduce", "started", [[8]])
OTHER: Row = (2, "nccl:broadcast", "started", [[8]])
LARGER: Row = (2, "nccl:all_reduce", "started", [[9]])
WAITING: Row = (2, "nccl:all_reduce", "scheduled", [[8]])


@pytest.mark.parametrize(
    ("cause", "dumps"),
    [
        ("rank_behind", [[DONE, OPEN], [DONE, OPEN], [DONE]]),
        ("collective_mismatch", [[DONE, OPEN], [DONE, OTHER], [DONE, OPEN]]),
        ("collective_mismatch", [[DONE, OPEN], [DONE, LARGER]]),
        ("gpu_behind", [[DONE, OPEN], [DONE, WAITING]]),
        ("network_or_gpu_hang", [[DONE, OPEN]] * 3),
    ],
)
def test_flight_recorder(cause: str, dumps: list[Any]) -> None:
    contents = {rank: dump(rank, entries) for rank, entries in enumerate(dumps)}
    assert all(map(is_flight_dump, contents.values()))
    (finding,) = judge_flight(contents)
    assert finding.rule == cause and finding.evidence["sequence"] == 2
    assert finding.evidence["code"] == "/home/user/train.py:42"


def test_complete_dumps_have_no_finding() -> None:
    assert judge_flight({rank: dump(rank, [DONE]) for rank in range(3)}) == []


def test_one_dump_alone_says_what_is_unknown() -> None:
    (finding,) = judge_flight({0: dump(0, [DONE, OPEN])})
    assert "those of all ranks" in finding.unknown


def test_torchrun_table_made_by_torch() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {
        rank: ProcessFailure(local_rank=rank, pid=990 + rank, exitcode=1, error_file="<N/A>") for rank in (0, 2)
    }
    failures[2].timestamp = failures[0].timestamp - 5
    text = (
        f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: {ChildFailedError('train.py', failures)}\n"
    )
    finding = first(text)
    assert finding.rule == "first_failed_rank" and finding.evidence["rank"] == 2
    assert finding.evidence["failed_ranks"] == 2 and finding.unknown


def test_the_first_failing_ranks_traceback_is_the_origin() -> None:
    text = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/user/train.py", line 12, in collate
[rank0]:   File "/home/user/train.py", line 30, in main
[rank1]:     return table[row["id"]]
[rank0]:     loss.backward()
[rank1]: KeyError: 'doc-17'
[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited
[rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"""
    finding, lost = judge_text(text)
    assert lost.rule == "peer_died" and lost.severity == "note"
    assert finding.symptom == "KeyError: 'doc-17'" and finding.evidence["rank"] == 1
    assert "collate (/home/user/train.py:12)" in finding.check and finding.unknown


def test_the_rank_in_another_collective_is_named() -> None:
    log = timeout(0, 14523) + timeout(1, 14523) + timeout(2, 14522, "ALLGATHER", 1)
    finding = first(log)
    assert finding.rule == "rank_behind" and "Rank 2 was in ALLGATHER, the others in ALLREDUCE" in finding.cause
    assert first(timeout(0, 7) + timeout(1, 7, "BROADCAST", 1)).evidence["collectives"] == (
        "rank 0 was in ALLREDUCE, rank 1 was in BROADCAST"
    )
