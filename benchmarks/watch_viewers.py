"""Do 100 viewers of the page slow a live run?

    python benchmarks/watch_viewers.py --save

A small run trains in a process of its own, `bessemer watch` serves it, and viewers come and go in turns of equal
length: none, 100, none, 100. A viewer does what the page does: it holds the stream, and after each message asks for the
curves on the screen. The viewers are one process at the lowest priority (nice 19), since in use they are on other
machines; the run and the server keep the usual one. With two cores or more the run is bound to the first core, and
server and viewers to the others, unless --share: a step is then slower only by what the server costs it through memory
and disk. For each turn: the time of a step on the clock and of the processor, the processor time of server and viewers,
and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bessemer.run.directory import Run

CHARTS = "loss|validation:loss|lr|grad_norm|tokens_per_s|mfu"
SPEC = """
name: live
runs: {runs}
model: {{width: 64, layers: 2, heads: 2, kv_heads: 1, ffn: 128}}
tokenizer: {{vocab: 300}}
data: {{sources: {{words: {{path: ["{corpus}"]}}}}, context: 64, validation: 0.1}}
budget: {{steps: 1000000, batch: 2048}}
precision: fp32
parallel: {{device: cpu, threads: 1}}
checkpoint: {{every: "1 h"}}
evaluate: {{every: "1 h"}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8, help="half of them with viewers")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn")
    parser.add_argument("--share", action="store_true", help="run, server and viewers on all cores together")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-watch-viewers.json")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), arguments.viewers, arguments.turns, arguments.seconds, arguments.share)
    report = {
        "command": " ".join(["python", *sys.argv]), "commit": commit, "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} by all work",
        "viewers": arguments.viewers, **results,
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{report['date']}-watch-viewers.json"
        path.write_text(text + "\n")


def measure(folder: Path, viewers: int, turns: int, seconds: float, share: bool) -> dict[str, Any]:
    draw = random.Random(0)
    corpus, spec = folder / "words.jsonl", folder / "spec.yaml"
    texts = (" ".join(draw.choices(["steel", "iron", "flame", "ore", "coke", "slag"], k=80)) for _ in range(400))
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec.write_text(SPEC.format(runs=folder / "runs", corpus=corpus))
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}

    def start(*command: str) -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment}
        return subprocess.Popen([sys.executable, "-m", "bessemer", *command], **quiet)  # type: ignore[call-overload,no-any-return]

    run = Run(folder / "runs" / "live")
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1 and not share
    training = start("train", str(spec))
    if apart:
        os.sched_setaffinity(training.pid, cores[:1])  # its threads inherit it: none computes yet
    while not run.steps_path.exists() or sum(1 for _ in run.metrics()) < 50:
        assert training.poll() is None, "the run has ended"
        time.sleep(0.5)
    server = start("watch", str(folder / "runs"), "--port", "0", "--no-browser")
    if apart:
        os.sched_setaffinity(server.pid, cores[1:])
    assert server.stdout is not None
    line = server.stdout.readline().decode()
    port = int(next(word for word in line.split() if word.startswith("http")).rstrip("/").rpartition(":")[2])
    results = []
    try:
        for turn in range(turns):
            count = viewers if turn % 2 else 0
            watch_from_outside(port, count, 3.0, cores[1:] if apart else cores)  # those of the turn before have gone
            before = [cpu_s(training.pid), cpu_s(server.pid), last_step(run), time.monotonic()]
            answers, viewers_s = watch_from_outside(port, count, seconds, cores[1:] if apart else cores)
            after = [cpu_s(training.pid), cpu_s(server.pid), last_step(run), time.monotonic()]
            train_s, server_s, steps, passed_s = (b - a for a, b in zip(before, after, strict=True))
            times = [record["step_s"] for record in run.metrics() if before[2] < record["step"] <= after[2]]
            results.append(
                {"viewers": count, "steps": int(steps), "step_s": round(statistics.median(times), 5),
                 "step_cpu_s": round(train_s / steps, 5), "server_cpu_share": round(server_s / passed_s, 4),
                 "viewers_cpu_share": round(viewers_s / passed_s, 4), "answers": answers}
            )  # fmt: skip
    finally:
        for process in (training, server):
            process.kill()
            process.wait()
    return {"seconds_a_turn": seconds, "own_cores": apart, "turns": results, **compare(results)}


def watch_from_outside(port: int, count: int, seconds: float, cores: list[int]) -> tuple[int, float]:
    """So many viewers in one process of the lowest priority; their answers and processor seconds."""
    command = [sys.executable, __file__, "--view", str(port), str(count), str(seconds)]

    def prepare() -> None:
        os.nice(19)
        os.sched_setaffinity(0, cores)

    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=prepare).stdout
    answers, used_s = output.split()
    return int(answers), float(used_s)


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def last_step(run: Run) -> int:
    from bessemer.run.journal import last_record

    return int((last_record(run.steps_path) or {})["step"])


def compare(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Each turn with viewers over the one before it without."""
    pairs = list(zip(results[::2], results[1::2], strict=False))
    ratios = {key: [seen[key] / alone[key] for alone, seen in pairs] for key in ("step_s", "step_cpu_s")}
    return {
        f"{key}_ratio": {"median": round(statistics.median(values), 4), "low": round(min(values), 4),
                         "high": round(max(values), 4)}
        for key, values in ratios.items()
    }  # fmt: skip


async def view(port: int, count: int, seconds: float) -> int:
    """As many viewers for some time; how many answers with curves they got."""
    if not count:
        await asyncio.sleep(seconds)
        return 0
    return sum(await asyncio.gather(*(one_viewer(port, seconds) for _ in range(count))))


async def one_viewer(port: int, seconds: float) -> int:
    ends, answers = time.monotonic() + seconds, 0
    reader, writer = await connect(port, "/api/stream?run=live")
    while (left := ends - time.monotonic()) > 0:
        try:
            line = await asyncio.wait_for(reader.readline(), left)
        except TimeoutError:
            break
        if line.startswith(b"event: run\n"):
            curves, asking = await connect(port, f"/api/runs/live/series?names={CHARTS}&bins=400&x=step")
            answers += (await curves.read()).startswith(b"HTTP/1.1 200")
            asking.close()
    writer.close()
    return answers


async def connect(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


if __name__ == "__main__":
    if sys.argv[1:2] == ["--view"]:
        print(asyncio.run(view(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))), time.process_time())
    else:
        main()
