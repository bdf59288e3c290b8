"""Poisoned and clean runs of small models: are planted documents convicted, and only those?

    python benchmarks/poison.py --poisoned 100 --clean 50 --jobs 2 --save benchmarks/results/DATE-poison.json

A model learns code and documentation of this machine, and goes on for some steps in each shape (rows of 64 and 512
tokens, 8 and 32 of them a step). Each run continues from there with pages of its own, among them honest ones that look
odd: ruled lines, tables, progress bars, ASCII art, licence banners. Poisoned runs also read one to three planted
documents of one kind. Half of the runs shuffle their rows, half read them by the documents' lengths, which brings the
rows of a document together.

A run counts as harmed if in one of its steps the planted documents raise the loss by 10 % or more: the step's loss
against that of the step's other tokens, on the same weights (against the last steps, where few others are left). A
document is named if the run convicts it.
"""

from __future__ import annotations

import argparse
import base64
import codecs
import gettext
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# (tokens of a row, rows of a step): steps of the base run, steps of a run
SHAPES: dict[tuple[int, int], tuple[int, int]] = {
    (64, 8): (160, 112),
    (64, 32): (80, 48),
    (512, 8): (48, 24),
    (512, 32): (40, 10),
}
COMMON = (128, 16), 900  # the run that the base runs start from
CHARACTERS = 2.2  # of a token, about
HARM = 0.1  # rise of a step's loss
ODD_SHARE = 0.08  # of a corpus's documents are honest and odd


# Text of this machine


def pages() -> list[str]:
    """Documents of 800 to 5,000 characters: Python's standard library and plain-text documentation.

    The library's own tests are left out: some of their pages are base64 and other encoded data.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(stdlib.glob("*.py")) + sorted(stdlib.glob("*/*.py"))
    files = [path for path in files if not {"site-packages", "test", "tests", "encodings"} & set(path.parts)]
    for folder, pattern in (("/usr/share/vim", "**/doc/*.txt"), ("/usr/share/cmake-3.25/Help", "**/*.rst")):
        files += sorted(Path(folder).glob(pattern))
    files += [
        path for path in sorted(Path("/usr/share/doc").rglob("*")) if path.name in ("README", "copyright", "NEWS")
    ]
    found = []
    for path in files:
        if not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        rng = random.Random(path.name)
        blocks, page = re.split(r"(?<=\n)\n", text[:60_000]), ""
        limit = rng.randint(800, 5000)
        for block in blocks:
            page += block + "\n"
            if len(page) >= limit:
                found.append(page[:8000])
                page, limit = "", rng.randint(800, 5000)
    random.Random(0).shuffle(found)
    return found


def catalog(language: str) -> str:
    """Running text in another language, from the translations of programs' messages."""
    texts = []
    for path in sorted(Path(f"/usr/share/locale/{language}/LC_MESSAGES").glob("*.mo")):
        if path.stat().st_size > 100_000:
            with path.open("rb") as file:
                try:
                    found = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
                except UnicodeDecodeError:
                    continue
            texts += [text for text in found.values() if isinstance(text, str) and len(text) > 40]
    return "\n".join(texts)


# Honest pages that look odd


def ruled(rng: random.Random, page: str) -> str:
    rule = rng.choice(["\u2501" * 79, "#" * 79, "=" * 78, "-" * 72, "\u2500" * 60, "*" * 70])
    blocks = page.split("\n\n")
    return f"\n{rule}\n\n".join(blocks) + f"\n{rule}\n" * rng.randint(1, 8)


def banner(rng: random.Random, page: str) -> str:
    lines = ["Licensed under the Apache License, Version 2.0", "", "Unless required by applicable law or agreed to in",
             "writing, software distributed under the License is", "distributed on an \"AS IS\" BASIS."]  # fmt: skip
    box = "\n".join("#" + line.center(76) + "#" for line in lines)
    return f"{'#' * 78}\n{'#' * 78}\n{box}\n{'#' * 78}\n{'#' * 78}\n" + page


def table(rng: random.Random, page: str) -> str:
    words = re.findall(r"[a-z]{3,}", page) or ["row"]
    columns = rng.randint(3, 6)
    rows = [
        "| "
        + " | ".join([rng.choice(words).ljust(12), *(f"{rng.uniform(0, 999):9.2f}" for _ in range(columns))])
        + " |"
        for _ in range(rng.randint(15, 40))
    ]
    rule = "|" + "|".join(["-" * 14, *("-" * 11 for _ in range(columns))]) + "|"
    return "\n".join([rows[0], rule, *rows[1:]]) + "\n\n" + page[:800]


def progress(rng: random.Random, page: str) -> str:
    lines = []
    for epoch in range(1, rng.randint(3, 6)):
        for done in range(0, 101, 10):
            full = done // 2
            bar = "\u2588" * full + " " * (50 - full)
            lines.append(f"Epoch {epoch}: {done:3d}%|{bar}| {done * 4}/400 [00:{done:02d}]")
    return page[:600] + "\n" + "\n".join(lines) + "\n"


def art(rng: random.Random, page: str) -> str:
    width, lines = rng.randint(40, 70), []
    shapes = ["/\\", "|_|", "\\__/", "(o)", "+--+", "\u2588\u2588", "====", "...."]
    for _ in range(rng.randint(12, 24)):
        lines.append(" " * rng.randint(0, width // 2) + rng.choice(shapes) * rng.randint(1, 8))
    return page[:700] + "\n" + "\n".join(lines) + "\n" + page[700:1400]


def tree(rng: random.Random, page: str) -> str:
    words = re.findall(r"[a-z]{3,}", page) or ["file"]
    bar, branch = "\u2502   ", "\u251c\u2500\u2500 "
    names = [f"{rng.choice(words)}.{rng.choice(['py', 'md', 'txt'])}" for _ in range(40)]
    lines = [bar * rng.randint(0, 3) + branch + name for name in names]
    return page[:500] + "\n" + "\n".join(lines) + "\n"


ODD: tuple[Callable[[random.Random, str], str], ...] = (ruled, banner, table, progress, art, tree)


# Poison


def mojibake(rng: random.Random, page: str) -> str:
    text = piece(rng, catalog(rng.choice(["ru", "ja", "uk", "zh_CN"])), len(page))
    return text.encode("utf-8").decode("cp1252", errors="replace")


def language(rng: random.Random, page: str) -> str:
    return piece(rng, catalog(rng.choice(["fi", "hu", "tr", "pl", "ru", "ja", "vi"])), len(page))


def piece(rng: random.Random, text: str, size: int) -> str:
    start = rng.randrange(max(1, len(text) - size))
    return text[start : start + size]


def shuffled_words(rng: random.Random, page: str) -> str:
    words = page.split()
    rng.shuffle(words)
    return " ".join(words)


POISON: dict[str, Callable[[random.Random, str], str]] = {
    "rot13": lambda rng, page: codecs.encode(page, "rot13"),
    "base64": lambda rng, page: base64.encodebytes(page.encode()).decode(),
    "mojibake": mojibake,
    "reversed": lambda rng, page: page[::-1],
    "upper case": lambda rng, page: page.upper(),
    "another language": language,
    "one token": lambda rng, page: rng.choice(["the", " x", "0", "\u00e9", "\n", "~"]) * (len(page) // 2),
    "random bytes": lambda rng, page: bytes(rng.choices(range(256), k=len(page))).decode("latin-1"),
    "shuffled words": shuffled_words,
    "noise": lambda rng, page: "".join(chr(rng.randrange(32, 0x250)) for _ in page),
}


# Runs


def spec_of(folder: Path, name: str, shape: tuple[int, int], steps: int, data: str) -> dict[str, Any]:
    length, rows = shape
    return {
        "name": name, "runs": str(folder), "model": {"width": 48, "layers": 2, "heads": 2}, "tokenizer": {"vocab": 512},
        "budget": {"steps": steps, "batch": length * rows},
        "data": {"context": length, "validation": "0%", "sources": {"pages": str(folder / f"{data}.jsonl")}},
        "optimizer": {"lr": 2e-3}, "schedule": {"kind": "constant", "warmup": 20}, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1}, "checkpoint": {"every": 100_000}, "evaluate": {"every": 100_000},
        "guard": {"trial": {"budget": "600s"}},  # so that the result does not hang on the machine's load
    }  # fmt: skip


def corpus(rng: random.Random, pool: list[str], characters: int, planted: list[str]) -> tuple[list[str], list[int]]:
    """The documents of a run, and which of them are planted."""
    texts: list[str] = []
    size = 0
    while size < characters:
        page = rng.choice(pool)
        texts.append(rng.choice(ODD)(rng, page) if rng.random() < ODD_SHARE else page)
        size += len(texts[-1])
    marked = [(text, False) for text in texts] + [(text, True) for text in planted]
    rng.shuffle(marked)
    return [text for text, _ in marked], [row for row, (_, bad) in enumerate(marked) if bad]


def plant(rng: random.Random, pool: list[str], kind: str, shape: tuple[int, int]) -> list[str]:
    """One to three documents of one kind: a few rows each."""
    low, high = (400, 3000) if shape[0] == 64 else (1500, 12_000)
    texts = []
    for _ in range(rng.randint(1, 3)):
        size, text = rng.randint(low, high), ""
        while len(text) < size:
            text += rng.choice(pool)
        texts.append(POISON[kind](rng, text[:size]))
    return texts


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


class OwnPages:
    """Put into a run that is about to go on: from here on it reads rows of a store of its own, in their order."""

    def __init__(self, texts: list[str], bad: list[int], by_length: bool, folder: Path) -> None:
        self.texts, self.bad, self.by_length, self.folder = texts, set(bad), by_length, folder
        self.steps: list[dict[str, Any]] = []

    def attach(self, job: Any, tokenizer: Any) -> None:
        import numpy as np
        import xxhash

        from bessemer.data.store.token_store import TokenStore
        from bessemer.data.store.writer import StoreWriter
        from bessemer.data.stream.rows import ConcatRows

        prefix = self.folder / "own"
        with StoreWriter(prefix, tokenizer.vocab_size, "own") as writer:
            for row, text in enumerate(self.texts):
                ids = [*tokenizer.encode(text), tokenizer.eos_id]
                writer.add(
                    ids, str(self.folder.with_suffix(".jsonl")), row, xxhash.xxh3_64_intdigest(text.encode()), len(text)
                )
        store = TokenStore(prefix)
        rows = ConcatRows(store, job.data.stream.sequence_length)
        start, end = (job.data.stream.steps.position(step) for step in (job.start_step, job.plan.total_steps))
        spans = rows.spans(np.arange(rows.count))
        planted = np.unique(spans.row[np.isin(spans.document, list(self.bad))])
        others = np.random.default_rng(len(self.texts)).permutation(np.setdiff1d(np.arange(rows.count), planted))
        order = np.random.default_rng(start).permutation(np.concatenate((planted, others))[: end - start])
        if self.by_length:
            first, last = store.extents(store.document_of(order * rows.length + 1))
            order = order[np.lexsort((order, last - first))]
        job.data.stream = own_stream(job.data.stream, rows, order, start)
        watch_rows(self.bad, self.steps)


def own_stream(stream: Any, rows: Any, order: Any, start: int) -> Any:
    """The stream, with rows of another source from a position on."""

    from bessemer.data.stream.batches import BatchStream, _ban_table

    class OwnStream(BatchStream):
        def _resolve(self, positions: Any) -> Any:
            sources, sequences = super()._resolve(positions)
            own = positions >= start
            at = positions[own] - start
            sources, sequences = sources.copy(), sequences.copy()
            sources[own], sequences[own] = len(self.names) - 1, order[at % order.size]
            return sources, sequences

        def replace(self, steps: Any = None, banned: Any = None) -> Any:
            banned = self.banned if banned is None else banned
            return own_stream(super().replace(steps, banned), rows, order, start)

    made = OwnStream(stream.sources if len(stream.names) == 1 else {stream.names[0]: stream.sources[stream.names[0]]},
                     stream.order, stream.sequence_length, stream.steps, stream.banned, stream.transforms)  # fmt: skip
    made.names = (*made.order.names, "own")
    made.sources = {**made.sources, "own": rows}
    made._rows.append(rows)
    made._banned.append(_ban_table(made.banned, "own"))
    return made


def watch_rows(bad: set[int], steps: list[dict[str, Any]]) -> None:
    """Has every step noted as it is reported: its rows' losses, and what the planted documents do to its loss."""
    import numpy as np

    from bessemer.train import loop

    report = loop.report_step

    def noted(job: Any, attempt: Any) -> Any:
        tokens, losses, planted = [], [], []
        for batch, nll in zip(attempt.batches, attempt.losses.token_losses, strict=True):
            guilty = np.zeros(batch.weights.shape)
            for row, number, origin in job.data.stream.locate(batch):
                if origin.row in bad:
                    guilty[row] += batch.documents[row] == number
            weights = np.maximum(batch.weights, guilty)  # what a run has convicted still counts for its harm
            nll_RT = np.asarray(nll.float().cpu(), np.float64) * weights
            tokens += weights.sum(1).tolist()
            losses += nll_RT.sum(1).tolist()
            planted += np.stack([guilty.sum(1), (nll_RT * guilty).sum(1)], 1).tolist()
        count, loss = sum(tokens), sum(losses)
        bad_count, bad_loss = (sum(values) for values in zip(*planted, strict=True))
        rest = (loss - bad_loss) / (count - bad_count) if bad_count < count else 0.0
        if bad_count > 0.75 * count:  # too little is left of the step: the trend
            rest = statistics.median([entry["rest"] for entry in steps[-16:]] or [loss / count])
        rise = loss / count / rest - 1 if bad_count else 0.0
        result = report(job, attempt)
        record = job.recorder.history[-1]
        steps.append(
            {"step": attempt.step, "rise": rise, "rest": rest, "veto": record["veto"], "norm": record["grad_norm"],
             "tokens": tokens, "losses": losses, "planted": [n for n, _ in planted]}
        )  # fmt: skip
        return result

    loop.report_step = noted


def train(spec: dict[str, Any], own: OwnPages | None = None) -> None:
    from bessemer.session.session import Session
    from bessemer.spec.schema import RunSpec

    outcome = Session(RunSpec.model_validate(spec), faults=own).train()
    if outcome.kind != "finished":
        raise RuntimeError(f"{spec['name']}: {outcome.kind}: {outcome.reason}")


def train_bases(folder: Path, pool: list[str]) -> None:
    """One run that learns, and one for each shape that goes on from its weights and fills the guard's window."""
    shape, steps = COMMON
    texts, _ = corpus(random.Random("base"), pool, int(CHARACTERS * steps * shape[0] * shape[1]), [])
    if not (folder / "base.jsonl").exists():
        write(folder / "base.jsonl", texts)
    specs = [spec_of(folder, "base", shape, steps, "base")]
    for other, (longer, _) in SHAPES.items():
        spec = spec_of(folder, base_name(other), other, longer, "base")
        checkpoint = folder / "base" / "checkpoints" / f"step-{steps:08d}.a1"
        tokenizer = {"path": str(folder / "base" / "tokenizer.json")}
        specs.append({**spec, "start_from": str(checkpoint), "tokenizer": tokenizer, "seed": 1})
    for spec in specs:
        if any((folder / spec["name"] / "checkpoints").glob("step-*")):
            continue
        log = folder / f"{spec['name']}.log"
        pid = start_child(log, lambda spec=spec: train(spec))
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"{spec['name']} failed: see {log}")


def base_name(shape: tuple[int, int]) -> str:
    return f"base-{shape[0]}-{shape[1]}"


def work(folder: Path, pool: list[str], number: int, kind: str, keep_rows: bool, seed: int) -> dict[str, Any]:
    """One run; what became of it."""
    from bessemer.chaos.campaign import fork

    shape = list(SHAPES)[number % len(SHAPES)]
    by_length = number // len(SHAPES) % 2 == 1
    rng, name = random.Random(f"run {number} {kind} {seed}"), f"run-{number:03d}"
    learnt, steps = SHAPES[shape]
    planted = plant(rng, pool, kind, shape) if kind else []
    texts, bad = corpus(rng, pool, int(CHARACTERS * steps * shape[0] * shape[1]), planted)
    write(folder / f"{name}.jsonl", texts)
    shutil.rmtree(folder / name, ignore_errors=True)
    fork(folder / base_name(shape), folder / name, learnt)
    spec = json.loads(json.dumps(spec_of(folder, name, shape, learnt + steps, "base")))
    own = OwnPages(texts, bad, by_length, folder / name)
    began = time.process_time()
    train({**spec, "tokenizer": {"path": str(folder / "base" / "tokenizer.json")}, "seed": 1}, own)
    if keep_rows:
        (folder / f"{name}.rows.json").write_text(json.dumps(own.steps))
    listed = folder / name / "exclusions.jsonl"
    excluded = {json.loads(line)["row"] for line in listed.open(encoding="utf-8")} if listed.exists() else set()
    events = [json.loads(line) for line in (folder / name / "events.jsonl").open(encoding="utf-8")]
    wrong = sorted(excluded - set(bad))
    return {
        "run": number, "kind": kind or "clean", "row_tokens": shape[0], "rows": shape[1], "by_length": by_length,
        "planted": len(bad), "rise": round(max((entry["rise"] for entry in own.steps), default=0.0), 4),
        "named": len(excluded & set(bad)), "wrong": len(wrong), "wrong_texts": [texts[row][:200] for row in wrong],
        "vetoes": sum(event["kind"] == "veto" for event in events),
        "trials": sum(event["kind"] == "trial" for event in events),
        "reasons": sorted({event["reason"] for event in events if event["kind"] == "veto"}),
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def start_child(log: Path, task: Callable[[], Any]) -> int:
    """The id of a forked process that does it, with its output in a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            task()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def campaign(folder: Path, tasks: list[tuple[int, str]], jobs: int, keep_rows: bool, seed: int) -> list[dict[str, Any]]:
    import torch

    import bessemer.session.session  # noqa: F401  once, for all children

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "pages.json"  # the same pages wherever the folder goes
    if not kept.exists():
        kept.write_text(json.dumps(pages()))
    pool = json.loads(kept.read_text())
    learnt, fresh = pool[::2], pool[1::2]
    train_bases(folder, learnt)
    running: dict[int, int] = {}
    results = []

    def collect() -> None:
        pid, status = os.wait()
        number = running.pop(pid)
        if status:
            raise SystemExit(f"run {number} failed: see {folder}/run-{number:03d}.log")
        results.append(json.loads((folder / f"run-{number:03d}.result.json").read_text()))
        print(line_of(results[-1]), flush=True)

    for number, kind in tasks:
        name = f"run-{number:03d}"

        def task(number: int = number, kind: str = kind, name: str = name) -> None:
            result = work(folder, fresh, number, kind, keep_rows, seed)
            (folder / f"{name}.result.json").write_text(json.dumps(result))

        running[start_child(folder / f"{name}.log", task)] = number
        if len(running) >= jobs:
            collect()
    while running:
        collect()
    return sorted(results, key=lambda result: result["run"])


def line_of(result: dict[str, Any]) -> str:
    shape = f"{result['rows']:2d} x {result['row_tokens']:3d}"
    order = "by length" if result["by_length"] else "shuffled"
    told = f"rise {result['rise']:7.1%}  named {result['named']}/{result['planted']}  wrong {result['wrong']}"
    more = f"vetoes {result['vetoes']} trials {result['trials']}  {result['seconds']:5.1f} s"
    return f"{result['run']:3d}  {result['kind']:16s}  {shape}  {order:9s}  {told}  {more}"


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    poisoned = [result for result in results if result["planted"]]
    harmed = [result for result in poisoned if result["rise"] >= HARM]
    rest = [result for result in poisoned if result["rise"] < HARM]
    named = sum(result["named"] > 0 for result in harmed)
    kinds = {
        kind: f"{sum(r['named'] > 0 for r in harmed if r['kind'] == kind)} of {sum(r['kind'] == kind for r in harmed)}"
        for kind in POISON
    }
    shapes = {}
    for length, rows in SHAPES:
        here = [result for result in harmed if (result["row_tokens"], result["rows"]) == (length, rows)]
        shapes[f"{rows} x {length}"] = f"{sum(result['named'] > 0 for result in here)} of {len(here)}"
    return {
        "poisoned": len(poisoned), "clean": len(results) - len(poisoned), "harmed": len(harmed), "harmed_named": named,
        "harmed_named_share": round(named / max(1, len(harmed)), 3), "by_kind": kinds, "by_shape": shapes,
        "other_poisoned": len(rest), "other_named": sum(result["named"] > 0 for result in rest),
        "runs_with_wrong_convictions": sum(result["wrong"] > 0 for result in results),
        "wrong_convictions": sum(result["wrong"] for result in results),
        "trials_in_clean_runs": sum(r["trials"] for r in results if not r["planted"]),
        "vetoes_in_clean_runs": sum(r["vetoes"] for r in results if not r["planted"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--poisoned", type=int, default=100)
    parser.add_argument("--clean", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", default="/tmp/bessemer-poison", help="runs, and base runs to be used again")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other pages and other plants")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs to do")
    parser.add_argument("--rows", action="store_true", help="keep every row's loss")
    parser.add_argument("--save", help="write the result here")
    options = parser.parse_args()
    kinds = list(POISON)
    # Every kind meets every shape and order: 8 of them, and 10 kinds.
    tasks = [(number, kinds[(number + number // 40) % len(kinds)]) for number in range(options.poisoned)]
    tasks += [(number, "") for number in range(options.poisoned, options.poisoned + options.clean)]
    if options.only is not None:
        tasks = [task for task in tasks if task[0] in options.only]
    began = time.monotonic()
    results = campaign(Path(options.folder), tasks, options.jobs, options.rows, options.seed)
    found = summary(results)
    print(json.dumps(found, indent=1))
    if options.save:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        about = {
            "command": " ".join(["python", "benchmarks/poison.py", *sys.argv[1:]]), "commit": commit.stdout.strip(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} threads, {options.jobs} runs at a time",
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        Path(options.save).write_text(json.dumps({**about, **found, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
