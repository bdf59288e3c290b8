"""`bessemer diagnose`: what it reads, what it prints, how it ends. Numbers of the runs are made by hand."""

import io
import json
import math
import pickle
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Call

OOM = (
    "Traceback (most recent call last):\n"
    '  File "/home/user/train.py", line 90, in main\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 79.25 "
    "GiB of which 511.06 MiB is free. Including non-PyTorch memory, this process has 78.70 GiB memory in use. Of the "
    "allocated memory 77.20 GiB is allocated by PyTorch, and 112.50 MiB is reserved by PyTorch but unallocated.\n"
)


def write_log(
    path: Path, steps: range, loss: Callable[[int], float], norm: Callable[[int], float] = lambda _: 0.8, tail: str = ""
) -> str:
    """A plain log of a run whose loss is `loss` with a little noise."""
    noise = random.Random(4)
    lines = [
        f"step {step}/{steps.stop - 1} | loss {loss(step) + noise.gauss(0, 0.02):.4f} | lr 3.00e-04 | "
        f"grad_norm {norm(step) * noise.uniform(0.9, 1.1):.3f}\n"
        for step in steps
    ]
    path.write_text("".join(lines) + tail)
    return str(path)


def fall(step: int, end: float = 2.4) -> float:
    return end + (10.8 - end) * math.exp(-math.sqrt(step / 200))


def findings(call: Call, *arguments: str) -> list[dict[str, Any]]:
    result = call("diagnose", *arguments, "--json")
    assert result.code == 0, result.err
    content = json.loads(result.out)
    assert {"read", "findings", "notes"} <= set(content)
    return list(content["findings"])


def test_a_healthy_log(call: Call, tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", range(1, 501), fall)
    result = call("diagnose", log)
    assert result.code == 0 and "Nothing is wrong in 1 run" in result.out and "!" not in result.out


def test_metrics_and_a_traceback_of_one_log(call: Call, tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", range(1, 801), lambda s: 15.0 if s == 700 else fall(s), tail=OOM)
    result = call("diagnose", log)
    assert "!! 1. out of memory of GPU 0: 896 MiB asked, 511 MiB free of 79.2 GiB at step 800" in result.out
    assert "# allocated 77.2" in result.out  # the memory's bar
    assert "step 700" in result.out and "|" in result.out  # the curve with its mark
    assert "cause " in result.out and "check " in result.out and "fix " in result.out
    oom, spike = [finding for finding in findings(call, log) if finding["severity"] != "note"]
    assert oom["rule"] == "activations" and oom["step"] == 800 and oom["evidence"]["line"] == 804
    assert spike["step"] == 700 and spike["source"] == log


def test_standard_input(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Piped:
        buffer = io.BytesIO(b"[ 9.1] NVRM: Xid (PCI:0000:9b:00): 79, pid=1234, GPU has fallen off the bus.\n")

    monkeypatch.setattr(sys, "stdin", Piped)
    result = call("diagnose", "-")
    assert result.code == 0 and "Xid 79 on GPU 0000:9b:00" in result.out and "standard input:1" in result.out


def test_plain_text_without_a_fault(call: Call, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Everything went well.\n")
    result = call("diagnose", str(tmp_path / "notes.txt"))
    assert result.code == 0 and "Nothing is wrong in the text" in result.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "is empty"),
        (bytes(range(256)) * 20, "neither a run, a log"),
        (pickle.dumps({"entries": [], "pg_config": {}}), "a pickle, which runs code"),
        (b"\x1f\x8b broken", "gzip file is damaged"),
    ],
)
def test_bad_input(call: Call, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    if content is not None:
        path.write_bytes(content)
    result = call("diagnose", str(path))
    assert result.code == 2 and message in result.err and len(result.err.strip().splitlines()) == 1


def test_the_way_to_json_that_the_refusal_of_a_pickle_gives(call: Call, tmp_path: Path) -> None:
    import subprocess

    entry = {"collective_seq_id": 2, "profiling_name": "nccl:all_reduce", "state": "started", "input_sizes": [[8]],
             "process_group": ["0", "default_pg"], "is_p2p": False, "frames": []}  # fmt: skip
    done = entry | {"collective_seq_id": 1, "state": "completed"}
    for rank, entries in enumerate(([done, entry], [done])):
        dump = {"version": "2.10", "pg_config": {}, "entries": entries}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        message = call("diagnose", str(tmp_path / f"nccl_trace_rank_{rank}")).err
        command = message.partition("write JSON: ")[2].strip().replace("python -c", f"{sys.executable} -c")
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        (tmp_path / f"nccl_trace_rank_{rank}").unlink()
    (finding,) = findings(call, *(str(path) for path in sorted(tmp_path.glob("*.json"))))
    assert finding["rule"] == "rank_behind" and "Ranks 1 never called collective 2" in finding["cause"]


def test_a_log_and_its_configuration(call: Call, tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", range(1, 401), lambda s: 8 * (fall(s) + 0.63))
    config = tmp_path / "config.yaml"
    config.write_text("gradient_accumulation_steps: 8\nvocab_size: 50257\n")
    alone, both = findings(call, log), findings(call, log, str(config))
    assert "loss_summed_over_accumulation" not in [finding.get("rule") for finding in alone]
    assert both[0]["rule"] == "loss_summed_over_accumulation"


def test_a_configuration_alone(call: Call, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1e-4\n")
    result = call("diagnose", str(tmp_path / "config.yaml"))
    assert result.code == 2 and "together with its run" in result.err


def test_a_configuration_that_is_not_valid(call: Call, tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", range(1, 101), fall)
    (tmp_path / "config.json").write_text('{"a": ')
    result = call("diagnose", log, str(tmp_path / "config.json"))
    assert result.code == 2 and "not valid JSON" in result.err


def test_a_run_folder_of_bessemer(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    (run / "metrics").mkdir(parents=True)
    noise = random.Random(1)
    steps = [
        {
            "step": s,
            "loss": fall(s) + noise.gauss(0, 0.02),
            "grad_norm": noise.uniform(0.7, 0.9),
            "lr": 3e-4,
            "tokens": 1024,
        }
        for s in range(500)
    ]
    (run / "metrics" / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    events = [
        {"kind": "started", "time": 1.0, "step": 0, "total_steps": 600},
        {"kind": "veto", "time": 2.0, "step": 300, "reason": "loss", "loss": 9.8, "grad_norm": 20.0,
         "statistics": {"loss_z": 14.0, "loss_center": 2.4}, "documents": []},
        {"kind": "alarm", "time": 3.0, "step": 400, "alarm": "router_collapse", "severity": "warning",
         "reason": "expert 3 of layer 2 gets no tokens", "cause": "the balance loss is too small", "confidence": 0.8,
         "fix": "raise model.moe.balance"},
        {"kind": "failed", "time": 4.0, "step": 500, "reason": "OutOfMemory: micro-batch 4 does not fit"},
    ]  # fmt: skip
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    by_rule = {finding["rule"]: finding for finding in findings(call, str(run))}
    assert by_rule["run_failed"]["severity"] == "critical" and "micro-batch 4" in by_rule["run_failed"]["cause"]
    assert by_rule["router_collapse"]["step"] == 400 and by_rule["router_collapse"]["fix"] == "raise model.moe.balance"
    assert by_rule["vetoed_batch"]["severity"] == "note" and by_rule["vetoed_batch"]["step"] == 300
    assert f"bessemer replay {run} --step 300" in by_rule["vetoed_batch"]["check"]


def test_the_example_of_the_page(call: Call, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    log, output = re.findall(r"```text\n(.*?)```", page, re.S)
    (tmp_path / "train.log").write_text(log)
    assert call("diagnose", "train.log").out == output


class TestConversations:
    """Questions that people bring, each with the numbers that they name."""

    def test_the_loss_spiked_from_2_5_to_15_at_step_5000(self, call: Call, tmp_path: Path) -> None:
        loss, norm = (lambda s: 15.0 if s == 5000 else fall(s, 2.5)), (lambda s: 40.0 if s == 5000 else 0.8)
        first = findings(call, write_log(tmp_path / "train.log", range(4600, 5401), loss, norm))[0]
        assert first["rule"] == "bad_batch" and first["step"] == 5000
        assert first["evidence"]["value"] == pytest.approx(15, abs=0.1)
        assert first["evidence"]["usual"] == pytest.approx(2.6, abs=0.1)

    def test_spikes_after_1000_steps(self, call: Call, tmp_path: Path) -> None:
        places = (1033, 1210, 1422, 1699, 1904)
        loss, norm = (lambda s: fall(s, 3.0) + 4.5 * (s in places)), (lambda s: 18.0 if s in places else 1.0)
        first = findings(call, write_log(tmp_path / "train.log", range(701, 2001), loss, norm))[0]
        assert first["rule"] == "bad_batch" and tuple(first["evidence"]["steps"]) == places

    def test_the_13b_run_diverged_at_step_50247(self, call: Call, tmp_path: Path) -> None:
        loss = lambda s: fall(s, 2.1) if s < 50247 else 8.3  # noqa: E731
        norm = lambda s: 0.5 if s < 50247 else 7.0  # noqa: E731
        first = findings(call, write_log(tmp_path / "train.log", range(49247, 51248, 4), loss, norm))[0]
        assert first["severity"] == "critical" and first["step"] == 50247
        assert "to 8.3 and stays up, from step 50247 on" in first["symptom"]
        assert first["evidence"]["lowest"] == pytest.approx(2.1, abs=0.05)
        assert first["evidence"]["last"] == pytest.approx(8.3, abs=0.1)
        causes = [first["rule"], *(cause["name"] for cause in first["alternatives"])]
        assert "weights_damaged" in causes and "lr_too_high" in causes  # it stays: one bad batch alone does not do that
        assert first["rule"] != "bad_batch"

    def test_the_loss_oscillates_wildly_after_10k_steps(self, call: Call, tmp_path: Path) -> None:
        noise = random.Random(9)
        loss = lambda s: fall(s, 2.6) + (abs(noise.gauss(0, 1.0)) * min(1, (s - 10000) / 500) if s > 10000 else 0)  # noqa: E731
        norm = lambda s: 0.9 if s < 10000 else noise.uniform(3, 12)  # noqa: E731
        log = write_log(tmp_path / "train.log", range(8001, 12001, 8), loss, norm)
        top = [finding for finding in findings(call, log) if finding["severity"] != "note"]
        causes = [top[0]["rule"], *(cause["name"] for cause in top[0].get("alternatives", []))]
        assert "lr_too_high" in causes[:3] and 9900 <= top[0]["step"] <= 11000

    def test_a_loss_that_oscillates_with_a_period(self, call: Call, tmp_path: Path) -> None:
        loss = lambda s: fall(s, 3.0) + 0.4 * math.sin(2 * math.pi * s / 250)  # noqa: E731
        first = findings(call, write_log(tmp_path / "train.log", range(1, 3001, 5), loss))[0]
        assert first["rule"] == "data_ordered" and first["evidence"]["period_steps"] == pytest.approx(250, rel=0.03)

    def test_the_model_agrees_with_wrong_claims_after_dpo(self, call: Call, tmp_path: Path) -> None:
        noise = random.Random(3)
        rows = []
        for step in range(5, 400, 5):
            margin = 1.2 * (1 - math.exp(-step / 150))
            rows.append({"step": step, "loss": math.log1p(math.exp(-margin)) + noise.gauss(0, 0.01),
                         "rewards/chosen": 0.4 * margin, "rewards/rejected": -0.6 * margin, "rewards/margins": margin,
                         "rewards/accuracies": min(0.74, 0.5 + margin / 4) + noise.gauss(0, 0.02),
                         "logps/chosen": -200 + noise.gauss(0, 1), "logps/rejected": -220 - step / 100,
                         "learning_rate": 5e-7, "grad_norm": noise.uniform(4, 6), "epoch": step / 400})  # fmt: skip
        state = {"log_history": rows, "global_step": 395, "max_steps": 400}
        (tmp_path / "trainer_state.json").write_text(json.dumps(state))
        result = call("diagnose", "trainer_state.json", "--json")
        content = json.loads(result.out)
        assert [finding["rule"] for finding in content["findings"] if finding["severity"] != "note"] == []
        assert any("align probe sycophancy MODEL --before SFT_MODEL" in note for note in content["notes"])

    def test_eight_a100_are_only_3_times_as_fast(self, call: Call, tmp_path: Path) -> None:
        noise = random.Random(2)
        for devices, rate in ((1, 3100), (8, 9300)):
            folder = tmp_path / f"gpus-{devices}"
            folder.mkdir()
            (folder / "config.yaml").write_text(f"world_size: {devices}\n")
            rows = [f"{s},{fall(s):.4f},{rate * noise.uniform(0.98, 1.02):.1f}" for s in range(1, 200)]
            (folder / "metrics.csv").write_text("step,loss,tokens_per_sec\n" + "\n".join(rows))
        first = findings(call, str(tmp_path / "gpus-1"), str(tmp_path / "gpus-8"))[0]
        assert first["rule"] == "poor_scaling" and first["symptom"].startswith("8 devices are 3.0 times as fast as 1")
        assert first["evidence"]["efficiency"] == pytest.approx(0.375, abs=0.01)


def test_one_unreadable_path_leaves_the_findings_of_the_others(call: Call, tmp_path: Path) -> None:
    log = write_log(tmp_path / "train.log", range(1, 801), lambda s: 15.0 if s == 700 else fall(s))
    result = call("diagnose", str(tmp_path / "absent.log"), log)
    assert result.code == 2 and "absent.log" in result.err and "no such file" in result.err
    assert "step 700" in result.out and f"{log}:700" in result.out  # the curve's finding names its line
    assert call("diagnose", str(tmp_path / "absent.log"), str(tmp_path / "other.log")).code == 2
