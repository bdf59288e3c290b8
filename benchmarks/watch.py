"""How long does the page take to open a long run and to zoom into it?

    python benchmarks/watch.py --tensorboard .venv/bin/python --others 20000 --save

A journal of made-up steps is written. Measured: the first reading of the journal into columns; a cold open, which
shows a sample; a warm open and zooms (by the server for all charts; and in Chromium, where it and playwright are
installed, to the last visible chart); 100 new rows; a cut. With --tensorboard the first steps (--others, all by
default) also go into an event file, which the reader of TensorBoard's server loads in one process of the Python that
is named, and into a journal of their own, which is read and opened here. Server times are given as processor time as
well, since other work on a shared machine does not change it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from bessemer.run.directory import RunWriter
from bessemer.run.journal import last_record, last_records
from bessemer.watch import library as library_module
from bessemer.watch.library import WatchedRun

NAMED = ("loss", "grad_norm", "lr", "clip", "tokens_per_s", "mfu", "step_s", "data_wait_s")
STEPS, ROUNDS = 1_000_000, 5
TENSORBOARD = """
import json, sys, time
journal, folder, steps = sys.argv[1:]
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
writer, began = EventFileWriter(folder, max_queue_size=1000), time.process_time()
for line in open(journal):
    if not line.endswith("\\n"):  # the cut left it
        break
    record = json.loads(line)
    if record["step"] >= int(steps):
        break
    values = [Summary.Value(tag=key, simple_value=value) for key, value in record.items() if key != "step"]
    writer.add_event(Event(step=record["step"], wall_time=record["step"], summary=Summary(value=values)))
writer.close()
written = time.process_time() - began
began, wall = time.process_time(), time.perf_counter()
multiplexer = EventMultiplexer()
multiplexer.AddRunsFromDirectory(folder)
multiplexer.Reload()
tensors = multiplexer.Tensors(".", "loss")
print(json.dumps({"load_cpu_s": time.process_time() - began, "load_wall_s": time.perf_counter() - wall,
                  "points_of_a_tag": len(tensors), "write_cpu_s": written}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--numbers", type=int, default=40, help="in each record")
    parser.add_argument("--tensorboard", help="a Python that has tensorboard")
    parser.add_argument("--others", type=int, help="steps that TensorBoard gets, of which 1,000 take about 2 s")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-watch[-STEPS].json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} by other work",
        "steps": arguments.steps, "numbers": arguments.numbers,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "caches")
        journal = write_run(folder / "runs" / "long", arguments.steps, arguments.numbers)
        report |= {"journal_bytes": journal.stat().st_size, "bessemer": measure(folder, journal)}
        write(report, arguments.save)  # the rest takes many minutes
        if arguments.tensorboard:
            steps = min(arguments.others or arguments.steps, arguments.steps)
            command = [arguments.tensorboard, "-c", TENSORBOARD, str(journal), str(folder / "events"), str(steps)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            others = {
                "tensorboard": json.loads(output.splitlines()[-1]),
                "bessemer": read_first(folder, journal, steps),
            }
            report["same_steps"] = {"steps": steps, **others}
            write(report, arguments.save)


def read_first(folder: Path, journal: Path, steps: int) -> dict[str, float]:
    """The first steps as a run of their own: read into columns, and all charts opened."""
    with RunWriter(folder / "short" / "run") as run, journal.open() as lines:
        run.event("started", step=0, total_steps=steps)
        run.steps_path.write_text("".join(islice(lines, steps)))
    names = [name for name in json.loads(run.steps_path.open().readline()) if name not in ("step", "tokens")]
    short = WatchedRun(run.folder, folder / "caches" / "short")

    def load() -> None:
        short.refresh(wait=True)
        msgspec.json.encode(short.series(names, "step", None, None, 1000))

    times = timed(load, 1)
    short.close()
    return {"load_cpu_s": times["cpu_s"], "load_wall_s": times["wall_s"], "points_of_a_tag": steps}


def write(report: dict[str, Any], save: bool) -> None:
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if save:
        which = "" if report["steps"] == STEPS else f"-{report['steps']}"
        path = Path(__file__).parent / "results" / f"{report['date']}-watch{which}.json"
        path.write_text(text + "\n")


def write_run(folder: Path, steps: int, numbers: int) -> Path:
    draw = random.Random(0)
    names = [*NAMED[1:], *(f"metric_{i}" for i in range(numbers - len(NAMED) - 2))]
    # A thousand endings of lines in turn: made-up numbers, written quickly.
    endings = [", ".join(f'"{name}": {2 + draw.random():.5f}' for name in names) for _ in range(997)]
    with RunWriter(folder) as run:
        run.event("started", step=0, total_steps=steps)
        with run.steps_path.open("w") as file:
            for step in range(steps):
                loss = 2 + 8 * math.exp(-step / (0.1 * steps)) + 0.1 * draw.random()
                file.write(f'{{"step": {step}, "tokens": {512 * step}, "loss": {loss:.5f}, {endings[step % 997]}}}\n')
        run.event("finished", step=steps, reason="the budget is spent")
    return folder / "metrics" / "steps.jsonl"


def timed(act: Callable[[], Any], rounds: int = ROUNDS) -> dict[str, float]:
    """Medians of processor and wall time."""
    cpu, wall = [], []
    for _ in range(rounds):
        began = time.process_time(), time.perf_counter()
        act()
        cpu.append(time.process_time() - began[0])
        wall.append(time.perf_counter() - began[1])
    return {"cpu_s": round(statistics.median(cpu), 4), "wall_s": round(statistics.median(wall), 4)}


def measure(folder: Path, journal: Path) -> dict[str, Any]:
    run_folder, cache, results = journal.parents[1], folder / "caches" / "bessemer" / "watch", dict[str, Any]()
    names = [name for name in json.loads(journal.open().readline()) if name not in ("step", "tokens")]
    steps = int((last_record(journal) or {})["step"]) + 1

    def view(run: WatchedRun, *limits: float | None) -> bytes:
        low, high = limits or (None, None)
        return msgspec.json.encode(run.series(names, "step", low, high, 1000))

    cold = WatchedRun(run_folder, folder / "cold")
    cold._building.acquire()  # only the sample
    if cold.rollup("steps").unread_bytes > library_module.SAMPLED_BYTES:
        results["cold_open_sampled"] = timed(lambda: view(cold), 1)
    cold.close()
    first = WatchedRun(run_folder, cache)
    results["first_reading"] = timed(lambda: first.refresh(wait=True), 1)
    first.close()

    def open_warm() -> None:
        run = WatchedRun(run_folder, cache)
        view(run)
        run.close()

    results["warm_open_all_charts"] = timed(open_warm)
    run, draw = WatchedRun(run_folder, cache), random.Random(1)

    def zoom() -> None:
        low = draw.random() * 0.8 * steps
        view(run, low, low + draw.random() * 0.2 * steps)

    results["zoom_all_charts"] = timed(zoom, 20)
    lines = [json.dumps(record) + "\n" for record in last_records(journal, 100)]
    with journal.open("a") as file:
        file.writelines(lines)
    results["100_new_rows"] = timed(lambda: run.rollup("steps").refresh(), 1)
    os.truncate(journal, journal.stat().st_size - 1000 * len(lines[0]))
    results["a_cut"] = timed(lambda: run.rollup("steps").refresh(), 1)
    run.close()
    if browser := in_browser(folder):
        results["chromium"] = browser
    return results


def in_browser(folder: Path) -> dict[str, float] | None:
    """From the address to the last visible chart, and from the end of a drag to the redrawn charts."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    command = [sys.executable, "-m", "bessemer", "watch", str(folder / "runs"), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    address = next(word for word in server.stdout.readline().decode().split() if word.startswith("http"))
    charts = "[...document.querySelectorAll('.chart')].slice(0, 6)"
    drawn = f"document.body.dataset.ready && {charts}.every(chart => chart.dataset.points > 1)"
    opened, zoomed = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(ROUNDS):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(120_000)
            began = time.perf_counter()
            page.goto(f"{address}?run=long")
            while not page.evaluate(drawn):
                time.sleep(0.005)
            opened.append(time.perf_counter() - began)
            box = page.locator("[data-name='loss'] .u-over").bounding_box() or {}
            page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=3)
            page.evaluate(f"{charts}.forEach(chart => delete chart.dataset.points)")
            began = time.perf_counter()
            page.mouse.up()
            while not page.evaluate(drawn):
                time.sleep(0.005)
            zoomed.append(time.perf_counter() - began)
            page.close()
        browser.close()
    server.kill()
    return {"open_s": round(statistics.median(opened), 3), "zoom_by_drag_s": round(statistics.median(zoomed), 3)}


if __name__ == "__main__":
    main()
