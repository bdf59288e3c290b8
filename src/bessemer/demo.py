"""`bessemer demo`: trains a small model on this machine's Python library, with a poisoned file and a kill on the way.

Nothing is faked: it writes a spec that a user could have written, runs `bessemer train` on it in a process, kills that
process, runs the same command again, and reads everything it prints from the run's records.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bessemer.data.read import list_files
from bessemer.data.stream.order import MixturePhase, StreamOrder
from bessemer.errors import UserError
from bessemer.model.generate import Sampling
from bessemer.observe.format import veto_line
from bessemer.parent import child_environment
from bessemer.plan.decide import faster_precision
from bessemer.plan.hardware import Machine
from bessemer.run.directory import Run
from bessemer.run.journal import last_record
from bessemer.spec.data import SourceSpec
from bessemer.spec.load import dump_spec
from bessemer.spec.mixture import quantise
from bessemer.spec.quantity import human_bytes, human_count, human_time
from bessemer.spec.schema import ParallelSpec, RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import measure_machine, pick_device
from bessemer.train.speed import training_rate
from bessemer.train.trained import load_model

PROMPTS = (
    "def read_lines(self, path):\n",
    "class Queue:\n    def __init__(self",
    "    for name in names:\n        if ",
)
POISON_NAME = "zz_noise.py"
POISON_CHARS = 2000
SPEC_NAME = "demo.yaml"
# (width, layers, heads, ffn, vocabulary, measured bytes of this corpus in a token), smallest first. A small vocabulary
# learns to spell sooner.
SIZES = (
    (128, 4, 4, 384, 512, 2.13), (192, 6, 6, 512, 768, 2.46), (256, 6, 8, 704, 1024, 2.69),
    (384, 8, 6, 1024, 2048, 3.20), (512, 12, 8, 1408, 4096, 3.66), (768, 12, 12, 2048, 8192, 4.05),
)  # fmt: skip
TOKENS_PER_PARAMETER = 0.75
MAX_EPOCHS = 4
MIN_STEPS = 1200  # with 600 steps the poison is only 1 nat above the rest, with 1200 it is 4
TRAINING_SHARE = 0.85  # of the time; the rest are evaluations, saves and two starts


@dataclass(frozen=True)
class Batching:
    """Sequences of a step. Small batches learn most in a short run on a CPU (docs/decisions.md has the losses); a GPU
    needs more work per step. Few long rows rather than many short ones, so that one bad row shows in the loss (of
    16 x 512 tokens on a GPU it was 4.6 deviations out, under the limit)."""

    context: int
    rows: int


def choose_batching(device: torch.device) -> Batching:
    return Batching(256, 4) if device.type == "cpu" else Batching(1024, 8)


@dataclass(frozen=True)
class SizeChoice:
    """A shape and how many tokens it trains on in the time."""

    shape: ModelShape
    precision: str
    rate: float
    tokens: int


def corpus_source(device: torch.device) -> SourceSpec:
    """The standard library's source; on a CPU without its tests, which three minutes would not reach."""
    tests = ["test/*", "*/test/*", "*/tests/*", "idlelib/*", "lib2to3/*"] if device.type == "cpu" else []
    excluded = [*tests, "pydoc_data/*", "encodings/*", "this.py"]  # the last is rot13
    return SourceSpec(path=[sysconfig.get_paths()["stdlib"]], format="source", include=["*.py"], exclude=excluded)


def write_poison(folder: Path) -> Path:
    """A source file of random ideographs, like a wrongly decoded file in a crawl. The same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    path = folder / POISON_NAME
    path.write_text("".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(POISON_CHARS)), encoding="utf-8")
    return path


def choose_size(machine: Machine, device: torch.device, seconds: float, corpus_bytes: int) -> SizeChoice:
    """The largest size that trains on TOKENS_PER_PARAMETER tokens per parameter in the time, by timing real steps."""
    chosen: SizeChoice | None = None
    size = choose_batching(device)
    for width, layers, heads, ffn, vocab, bytes_per_token in SIZES:
        # Untied: a tied embedding learns to expect unseen tokens after unseen tokens, and the poison would look normal.
        shape = ModelShape(vocab, width, layers, heads, heads, width // heads, ffn, tied=False)
        rates = {"fp32": training_rate(shape, size.context, size.rows, "fp32", device, 0.6)}
        if machine.matmul["bf16"] > 1.3 * machine.matmul["fp32"]:
            rates["bf16"] = training_rate(shape, size.context, size.rows, "bf16", device, 0.6)
        precision = faster_precision(rates)
        tokens = int(min(TRAINING_SHARE * rates[precision] * seconds, MAX_EPOCHS * corpus_bytes / bytes_per_token))
        if chosen is not None and tokens < TOKENS_PER_PARAMETER * shape.parameters:
            break
        chosen = SizeChoice(shape, precision, rates[precision], max(tokens, MIN_STEPS * size.context * size.rows))
    assert chosen is not None
    return chosen


def choose_seed(positions: int) -> tuple[int, float]:
    """A seed with which the poisoned sequence is read once, soon after the middle. In three minutes only a part of the
    corpus is read, and the order is a pure function of the seed."""
    block = 1 << max(1, (positions - 1).bit_length())
    mixture = quantise({"library": block - 1, "poisoned": 1})
    for seed in range(10_000):
        order = StreamOrder([MixturePhase(0, mixture)], {"library": 1 << 30, "poisoned": 1}, seed)
        sources, _, _ = order.resolve(np.arange(positions))
        at = np.flatnonzero(sources == order.names.index("poisoned"))
        if len(at) == 1 and 0.55 < at[0] / positions < 0.65:
            return seed, 1 / (block - 1)
    raise AssertionError("no seed places the poisoned sequence after the middle")


def write_spec(folder: Path, runs: str, choice: SizeChoice, poison: Path, device: torch.device) -> tuple[Path, RunSpec]:
    shape = choice.shape
    size = choose_batching(device)
    steps = choice.tokens // (size.context * size.rows)
    seed, weight = choose_seed(steps * size.rows)
    library = corpus_source(device).model_dump()
    spec = RunSpec.model_validate(
        {
            "name": "demo", "runs": runs, "seed": seed,
            "model": {key: getattr(shape, key) for key in ("width", "layers", "heads", "ffn", "tied")},
            "tokenizer": {"vocab": shape.vocab, "sample": "8MB"},
            "data": {
                "context": size.context, "validation": "2%",
                "sources": {
                    "library": library,
                    "poisoned": {"path": [str(poison.resolve())], "format": "text", "weight": weight},
                },
            },
            "budget": {"steps": steps, "batch": size.context * size.rows},
            "optimizer": {"lr": learning_rate(shape)}, "schedule": {"warmup": "5%", "floor": "5%"},
            "precision": choice.precision, "parallel": {"device": device.type},
            "guard": {"loss_sigma": 8},
            "checkpoint": {"every": max(10, steps // 30), "keep_best": False},
            "evaluate": {"every": max(10, steps // 10), "tokens": "64K"},
        }
    )  # fmt: skip
    path = folder / SPEC_NAME
    path.write_text("# Written by `bessemer demo`.\n" + dump_spec(spec))
    return path, spec


def learning_rate(shape: ModelShape) -> float:
    """Tuned on this corpus for short runs: 3e-3 at a width of 128 (2.58; 6e-3 gave 2.67), falling with the width."""
    return float(f"{3e-3 * (128 / shape.width) ** 0.5:.2g}")


def _start_training(path: Path, live: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bessemer", "train", str(path), *([] if live else ["--plain"])]
    return subprocess.Popen(command, env=child_environment())


def kill_after(process: subprocess.Popen[bytes], run: Run, step: int) -> None:
    """Waits until the run has written that step, then sends SIGKILL."""
    while process.poll() is None:
        last = last_record(run.steps_path)
        if last is not None and last["step"] >= step:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.2)
    raise UserError(
        f"the demo's training ended early with exit code {process.returncode}; see {run.folder}/logs/rank-0.log"
    )


def compare_losses(before: dict[int, float], after: dict[int, float], resumed_at: int) -> str:
    """Compares the losses of the steps that were trained twice: before the kill, and after the resume."""
    gaps = {step: abs(before[step] - after[step]) for step in before if step >= resumed_at}
    if not gaps:
        return "it was killed right after a save, so no step had to be trained twice"
    largest = max(gaps.values())
    how = "identical, digit for digit, to" if largest == 0 else f"within {largest:.1e} of"
    return f"losses {min(gaps):,}-{max(gaps):,} are {how} the killed run's"


def losses(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.metrics()}


def run_demo(runs: str, minutes: float, live: bool) -> Iterator[str]:
    """Runs the demo and yields lines to print. Raises UserError if something that must happen did not."""
    started = time.monotonic()
    folder = Path(runs) / "demo"
    if (folder / "events.jsonl").exists():
        if Run(folder).state == "running":
            raise UserError(f"{folder}: a demo is running in it; wait for it, or use --runs ANOTHER_FOLDER")
        if not (folder.parent / SPEC_NAME).exists():
            raise UserError(f"{folder}: was not made by the demo; use --runs ANOTHER_FOLDER")
        shutil.rmtree(folder)
    Path(runs).mkdir(parents=True, exist_ok=True)
    device = pick_device(ParallelSpec())
    files = list_files(corpus_source(device))
    size = sum(entry.size_bytes for entry in files)
    yield f"corpus     Python standard library on this machine: {len(files):,} files, {human_bytes(size)}"
    machine = measure_machine(device)
    choice = choose_size(machine, device, minutes * 60, size)
    poison = write_poison(Path(runs) / "poisoned")
    path, spec = write_spec(Path(runs), runs, choice, poison, device)
    steps = spec.budget.steps or 0
    reach = f"{minutes:g} min is {human_count(choice.tokens)} tokens"
    in_time = TRAINING_SHARE * choice.rate * minutes * 60
    if choice.tokens < in_time - 1:  # the corpus is too small for the time
        reach = f"{MAX_EPOCHS} passes over the corpus ({human_count(choice.tokens)} tokens) fit in {minutes:g} min"
    elif choice.tokens > in_time + 1:
        took = human_time(choice.tokens / TRAINING_SHARE / choice.rate)
        reach = f"the least that shows everything ({human_count(choice.tokens)} tokens) takes {took}"
    yield (
        f"plan       {human_count(choice.shape.parameters)} parameters, {spec.data.context}-token context, "
        f"{choice.shape.vocab}-token vocabulary, {choice.precision}: this machine does about "
        f"{choice.rate:,.0f} tokens/s, so {reach}"
    )
    yield f"poison     {poison}: one file of random ideographs is mixed in on purpose"
    run = Run(folder)
    every = spec.checkpoint.every
    assert isinstance(every, int)
    kill_after(_start_training(path, live), run, round(0.7 * steps / every) * every + every // 2)  # between two saves
    if live:
        print("\x1b[?25h", end="", flush=True)  # the killed view could not restore the cursor
    before = losses(run)
    yield f"kill       process killed on purpose (SIGKILL) after step {max(before):,}; the same command again:"
    code = _start_training(path, live).wait()
    if code != 0:
        raise UserError(f"the resumed run ended with exit code {code}; see {folder}/logs/rank-0.log")
    yield from report_results(run, before, poison, steps)
    yield from generate_samples(folder)
    yield f"took       {human_time(time.monotonic() - started)} in total   run: {folder}"
    vetoed_step = _poison_veto(run, poison)["step"]
    yield f"next       bessemer runs {runs}   bessemer replay {folder} --step {vetoed_step} --show"
    yield f"           bessemer generate {folder} --prompt 'import '   bessemer spec show {path}"


def _poison_veto(run: Run, poison: Path) -> dict[str, Any]:
    named = [event for event in run.events("veto") if Path(event["documents"][0]["file"]) == poison.resolve()]
    if not named:
        raise UserError(f"no veto named {poison}: the guard missed the poisoned batch; see {run.events_path}")
    return named[-1]


def report_results(run: Run, before: dict[int, float], poison: Path, steps: int) -> Iterator[str]:
    """Lines about the veto, the resume and the loss, from the run's records."""
    yield veto_line(_poison_veto(run, poison)).replace("veto  ", "veto       ", 1)
    resumed = [event for event in run.events("started") if event["resumed_from"]][-1]
    yield f"resume     from step {resumed['step']:,}; {compare_losses(before, losses(run), resumed['step'])}"
    if [record["step"] for record in run.metrics()] != list(range(steps)):
        raise UserError(f"{run.steps_path}: a step is missing or doubled")
    first, *_, last = run.validations()
    drop = first["loss"] - last["loss"]
    yield (
        f"done       validation loss {first['loss']:.2f} -> {last['loss']:.2f}: down {drop:.2f} nats, "
        f"{drop / first['loss']:.0%} ({first['bits_per_byte']:.2f} -> {last['bits_per_byte']:.2f} bits per byte)"
    )


def generate_samples(folder: Path) -> Iterator[str]:
    """Lines that the model writes."""
    loaded = load_model(folder)
    for i, prompt in enumerate(PROMPTS):
        sampling = Sampling(temperature=0.6, top_p=0.9, seed=i)
        text = "".join(loaded.stream(loaded.prompt(prompt), 120, sampling))
        lines = (prompt + text).splitlines()[:14]
        yield "\n".join(f"  {'>>>' if n == 0 else '...'} {line}" for n, line in enumerate(lines))
