"""Does a refactoring change a number? The same runs with the sources before and after it, compared as stored.

    git worktree add /tmp/before COMMIT --detach
    python benchmarks/identity.py --before /tmp/before/src --after src --folder /tmp/identity

Each spec is trained once with each source tree, in a fresh folder and with one thread. Compared byte for byte are every
column of the steps and evaluations but the clock's, the planner's decisions, the prepared data, the stream's
fingerprint, and the weights and moments of the last checkpoint. Runs that the old code began are finished by the new
code; data that one prepared is read by the other; the order of the data is compared on random streams. 36 minutes on
two busy cores. The exit code is 1 if anything differs. What the planner measures (`source: measured` in plan.json, such
as the precision of `planned`) may also differ with the load of the machine: repeat such a check with --only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

CLOCK = (
    "time", "seconds", "tokens_per_s", "mfu", "step_s", "data_wait_s", "memory_bytes", "rank_step_s", "balance",
    "bubble",
)  # fmt: skip
EVENTS = ("started", "saved", "veto", "rollback", "trial", "exclude", "metrics_cut", "interrupted", "finished")
MODULES = (
    "argparse ast calendar configparser csv dataclasses difflib doctest fractions heapq inspect optparse pathlib "
    "random shlex shutil statistics string tarfile textwrap threading typing unittest.mock zipfile"
)
SENTINELS = 48
TRAIN = ("train", "spec.json", "--plain")
CHAOS = (
    "chaos", "spec.json", "--folder", "runs", "--faults", "poison-random,sigkill", "--count", "2", "--per-run", "2",
    "--learn", "100", "--seeds", "2",
)  # fmt: skip
CONTINUED = ("dense", "moe", "packed", "phases", "variants", "fsdp")
# What a reader sees and no run reads: its wording may change. prepared.json has its digest.
PAGES = ("report.html", "prepared.json")


def write_corpus(folder: Path) -> dict[str, Path]:
    """JSONL of this Python's own library: its code in pieces, its docstrings, and questions answered by these."""
    code: list[dict[str, Any]] = []
    prose: list[dict[str, Any]] = []
    chats: list[dict[str, Any]] = []
    for module in MODULES.split():
        origin = (importlib.util.find_spec(module) or sys.exit(f"no module {module}")).origin
        text = Path(str(origin)).read_text(encoding="utf-8")
        code += [{"text": piece} for piece in text.split("\n\n\n") if len(piece) > 80]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (words := ast.get_docstring(node)):
                prose.append({"text": words + f"\nWrite to {node.name}{len(prose) % 7}@example.org."})
                question = {"role": "user", "content": f"What is {module}.{node.name}?"}
                chats.append({"messages": [question, {"role": "assistant", "content": words}]})
    folder.mkdir(parents=True)
    paths = {name: folder / f"{name}.jsonl" for name in ("code", "prose", "chats")}
    rows = {"code": code, "prose": prose + prose[:50], "chats": chats}  # with copies, which deduplication removes
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return paths


def write_t5(folder: Path, text: Path) -> Path:
    """A small encoder-decoder as a Hugging Face folder, with a tokenizer of its own."""
    import tokenizers
    import torch
    import transformers

    special = ["<pad>", "</s>", *(f"<extra_id_{i}>" for i in range(SENTINELS))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=512, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    return folder


def make_specs(files: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The specs by name. Precision is measured and thus written; rates, micro-batch and the rest are the planner's."""
    small = {"width": 48, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 96}
    code, prose = {"path": str(files["code"])}, {"path": str(files["prose"])}
    both = {"code": {**code, "weight": 2}, "prose": prose}

    def spec(**more: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "name": "run", "model": small, "tokenizer": {"vocab": 400}, "precision": "fp32",
            "data": {"sources": both, "context": 64, "validation": 0.05}, "budget": {"steps": 32, "batch": 512},
            "parallel": {"device": "cpu"}, "evaluate": {"every": 8, "tokens": 2048}, "checkpoint": {"every": 8},
            "guard": {"warmup": 8, "window": 16},
        }  # fmt: skip
        for key, value in more.items():
            settings[key] = {**settings[key], **value} if key in ("data", "guard") else value
        return settings

    phases = [{"start": 4096, "weights": {"prose": 1}}, {"start": 10240, "weights": {"code": 1, "prose": 3}}]
    masked = {"vocab": 400, "special": ["<mask>"]}
    infill = {"vocab": 400, "special": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]}
    tasks = ["causal", {"kind": "infill", "share": 0.5}, {"kind": "prefix", "share": 0.5}]
    clean = ["unicode", "whitespace", {"length": {"min_chars": 60}}, "dedup_exact", "dedup_minhash", "pii"]
    mamba = {"mixers": ["mamba", "attention"], "mamba": {"heads": 4, "head_dim": 16, "state": 16, "chunk": 16}}
    moe = {"experts": 4, "top_k": 2, "ffn": 64, "shared": 1, "dense_layers": [0]}
    chaos = {"model": {**small, "width": 64}, "budget": {"batch": 1024}, "optimizer": {"lr": 3e-3}}
    return {
        "dense": spec(),
        "moe": spec(model={**small, "moe": moe}),
        "mamba": spec(model={**small, **mamba}),
        "denoise": spec(model={"hf": str(files["t5"])}, tokenizer={}, tasks=["denoise"]),
        "packed": spec(data={"packing": "best_fit"}),
        "masked": spec(model={**small, "causal": False}, tokenizer=masked, tasks=["masked"]),
        "phases": spec(data={"phases": phases}),
        "fsdp": spec(parallel={"device": "cpu", "dp_shard": 2}),
        "pipeline": spec(parallel={"device": "cpu", "pp": 2}),  # more layers are cut by measured times
        "chaos": spec(**chaos, guard={"trial": {"budget": "600s", "share": "100%"}}),
        "planned": {"name": "run", "model": small, "data": {"sources": both}, "budget": {"steps": 20}},
        "chat": spec(
            data={"sources": {"chats": {"path": str(files["chats"]), "messages_field": "messages"}}},
            tokenizer={"vocab": 400, "learn": "last"},
        ),
        "variants": spec(
            tokenizer=infill, tasks=tasks, dropout={"embedding": 0.1, "attention": 0.1, "residual": 0.1},
            loss={"smoothing": 0.1, "z": 1e-4}, optimizer={"name": "muon", "ema": 0.98},
        ),
        "padded": spec(
            data={"packing": "pad", "padding": {"buckets": 4}, "noise": {"replace": 0.05}},
            budget={"micro_batch": 2, "steps": 32, "batch": 512, "batch_changes": [{"from_step": 16, "batch": 1024}]},
        ),
        "tensor": spec(parallel={"device": "cpu", "tp": 2}, model={**small, "kv_heads": 2}),
        "curated": spec(data={"clean": clean, "packing": "best_fit", "curriculum": {"by": "length", "groups": 2}}),
    }  # fmt: skip


# --- One start of a source tree


def start(tree: Path, place: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start `bessemer` of a source tree, or a file with its modules, in a folder with a cache of its own."""
    environment = os.environ | {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
        "XDG_CACHE_HOME": str(place / "cache"),
    }  # fmt: skip
    program = [] if command[0].endswith(".py") else ["-m", "bessemer"]
    with (place / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *program, *command], cwd=place, env=environment, stdout=log, stderr=log
        )


def finish(tree: Path, place: Path, *command: str) -> None:
    if code := start(tree, place, *command).wait(1200):
        tail = "\n".join((place / "log").read_text().splitlines()[-15:])
        raise RuntimeError(f"{place}: exit code {code} of {' '.join(command)} with {tree}\n{tail}")


def new_place(folder: Path, spec: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))
    return folder


def stop_half_way(tree: Path, place: Path, steps: int) -> int:
    """Train until half of the steps are recorded, then ask the run to end; the number of its steps."""
    process = start(tree, place, *TRAIN)
    record = place / "runs" / "run" / "metrics" / "steps.jsonl"
    while process.poll() is None and (not record.exists() or len(record.read_bytes().splitlines()) < steps // 2):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    process.wait(300)
    done = len(read_records(record))
    if not 0 < done < steps:
        sys.exit(f"{place}: stopped at step {done} of {steps}")
    return done


# --- What was stored


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records, with their numbers as they are written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line, parse_float=str, parse_int=str) for line in lines]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def data_contents(place: Path) -> dict[str, Any]:
    """The prepared data of a folder: the digest of each file, by name."""
    paths = [path for path in sorted(place.glob("runs/.data/**/*")) if path.is_file()]
    contents: dict[str, Any] = {
        f"data {path.relative_to(place)}": digest(path) for path in paths if path.name not in PAGES
    }
    for path in (path for path in paths if path.name == "prepared.json"):
        prepared = json.loads(path.read_text())
        prepared["digests"] = {name: value for name, value in prepared["digests"].items() if name not in PAGES}
        contents |= {f"data {path.relative_to(place)} {key}": prepared[key] for key in prepared if key != "digest"}
    return contents


def run_contents(run: Path) -> dict[str, Any]:
    """Every number of a run that does not depend on the clock, by name."""
    contents: dict[str, Any] = {}
    for name in ("steps", "validation"):
        records = read_records(run / "metrics" / f"{name}.jsonl")
        columns = {key for record in records for key in record if key not in CLOCK}
        contents |= {f"{name} {key}": [record.get(key) for record in records] for key in sorted(columns)}
    events = [event for event in read_records(run / "events.jsonl") if event["kind"] in EVENTS]
    contents["events"] = [[event["kind"], event.get("step"), event.get("verdict")] for event in events]
    decisions = json.loads((run / "plan.json").read_text())["decisions"]
    contents |= {f"plan {one['key']}": one["value"] for one in decisions if not one["key"].startswith("expected.")}
    contents |= {f"settings {key}": value for key, value in json.loads((run / "settings.json").read_text()).items()}
    checkpoint = sorted(path.parent for path in run.glob("checkpoints/*/manifest.json"))[-1]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    contents |= {f"checkpoint {key}": manifest[key] for key in ("step", "stream_fingerprint", "stream", "segments")}
    contents |= {f"weights {checkpoint.name}/{path.name}": digest(path) for path in checkpoint.glob("*.distcp")}
    return contents


def all_contents(place: Path) -> dict[str, Any]:
    """The contents of all runs of a folder, and of their data."""
    runs = sorted(path.parent for path in place.glob("runs/**/plan.json"))
    contents = {f"{run.name}: {key}": value for run in runs for key, value in run_contents(run).items()}
    return contents | data_contents(place)


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What of both is equal; of values that differ the first entries that do."""
    differences = {}
    for name in (name for name in before if name in after and before[name] != after[name]):
        pair = (before[name], after[name])
        if all(isinstance(values, list) for values in pair):
            rows = max(map(len, pair))
            old, new = (values + [None] * (rows - len(values)) for values in pair)
            at = next(i for i in range(rows) if old[i] != new[i])
            differences[name] = {"row": at, "before": old[at], "after": new[at]}
        else:
            differences[name] = {"before": pair[0], "after": pair[1]}
    steps = sum(len(values) for name, values in after.items() if name.endswith(": steps loss"))
    names = [name for name in before if name in after]
    one = before.keys() ^ after.keys()
    complete = not [name for name in one if name.startswith("data ") or ": weights " in name]
    return {
        "equal": not differences and complete and len(names) > 0, "steps": steps,
        "compared": len(names), "columns": sorted({name.split(" ", 2)[2] for name in names if ": steps " in name}),
        "weight_files": sum(": weights " in name for name in names),
        "data_files": sum(name.startswith("data ") for name in names), "differences": differences,
        "only_before": sorted(one & before.keys()), "only_after": sorted(one & after.keys()),
    }  # fmt: skip


# --- The checks


def check_spec(name: str, spec: dict[str, Any], trees: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Train a spec with each tree."""
    command = CHAOS if name == "chaos" else TRAIN
    for side in trees:
        new_place(folder / name / side, spec)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda side: finish(trees[side], folder / name / side, *command), trees))
    before, after = (all_contents(folder / name / side) for side in trees)
    return compare(before, after)


def check_continued(name: str, spec: dict[str, Any], trees: dict[str, Path], folder: Path) -> dict[str, Any]:
    """A run that the old code leaves half-way is finished by the new code, as the old code finishes it unstopped."""
    steps = int(spec["budget"]["steps"])
    if not (folder / name / "before").exists():  # with --only
        finish(trees["before"], new_place(folder / name / "before", spec), *TRAIN)
    place = new_place(folder / name / "continued", spec)
    stopped_at = stop_half_way(trees["before"], place, steps)
    finish(trees["after"], place, *TRAIN)
    # A run in two parts has other events, and its checkpoint of the stop.
    contents = [all_contents(folder / name / side) for side in ("before", "continued")]
    for one in contents:
        one.pop("run: events")
    return {"stopped_at": stopped_at, **compare(contents[0], contents[1])}


def check_prepared(spec: dict[str, Any], trees: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Prepare data with each tree; then each trains on what the other prepared, which it must not write again."""
    places = {side: new_place(folder / "prepared" / side, spec) for side in trees}
    for side, tree in trees.items():
        finish(tree, places[side], "data", "prepare", "spec.json")
    prepared = compare(data_contents(places["before"]), data_contents(places["after"]))
    if not prepared["equal"]:
        return prepared
    written = {path: time_ns for place in places.values() for path, time_ns in write_times(place).items()}
    finish(trees["after"], places["before"], *TRAIN)
    finish(trees["before"], places["after"], *TRAIN)
    results = compare(all_contents(places["before"]), all_contents(places["after"]))
    # Training adds packings and rankings to the prepared data; it must not prepare again.
    later = {path: time_ns for place in places.values() for path, time_ns in write_times(place).items()}
    again = [path for path in later if path.endswith("prepared.json") and path not in written]
    again += [path for path, time_ns in written.items() if later.get(path) != time_ns]
    return {**results, "equal": results["equal"] and not again, "prepared_again": again}


def write_times(place: Path) -> dict[str, int]:
    """Nanoseconds, as of the file system, of each file of the prepared data."""
    return {str(path): path.stat().st_mtime_ns for path in place.glob("runs/.data/**/*") if path.is_file()}


def check_order(trees: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Positions of random streams, as each tree resolves them."""
    results = {}
    for side, tree in trees.items():
        place = new_place(folder / "order" / side, {})
        finish(tree, place, str(Path(__file__).resolve()), "--order", str(place / "order.json"))
        results[side] = json.loads((place / "order.json").read_text())
    return {"positions": results["after"]["positions"], **compare(results["before"], results["after"])}


def write_order(target: Path, streams: int = 300) -> None:
    """Digests of the order of random streams, by the tree on the path, whatever its modules and classes are called."""
    import numpy as np

    def first(*places: str) -> Any:
        for module, name in (place.rsplit(".", 1) for place in places):
            with suppress(ImportError, AttributeError):
                return getattr(importlib.import_module(module), name)
        raise LookupError(f"none of {places}")

    new, old = "bessemer.data.stream.order", "bessemer.data"
    order_of = first(f"{new}.StreamOrder", f"{old}.order.Order")
    phase_of = first(f"{new}.MixturePhase", f"{old}.order.Phase")
    ranking_of = first(f"{new}.CurriculumRanking", f"{old}.order.Ranking")
    steps_of = first(f"{new}.StepPositions", f"{old}.steps.Steps")
    batch_of, segment_of = (first(f"{new}.{name}", f"{old}.steps.{name}") for name in ("BatchPhase", "Segment"))
    quantise = first("bessemer.spec.mixture.quantise")
    draw, results, positions = random.Random(0), {}, 0
    for number in range(streams):
        names = draw.sample(["web", "code", "books", "math", "zh", "a", "b" * 20], draw.randint(1, 6))
        starts = [0, *sorted(draw.sample(range(1, 50_000), draw.randint(0, 3)))]
        chosen = [draw.sample(names, draw.randint(1, len(names))) for _ in starts]
        weights = [{name: draw.uniform(0.01, 1) for name in some} for some in chosen]
        phases = [phase_of(at, quantise(some)) for at, some in zip(starts, weights, strict=True)]
        lengths = {name: int(10 ** draw.uniform(0, 6)) for name in names}
        rankings = {}
        for name in (name for name in names if draw.random() < 0.3):
            sequences = np.random.default_rng(draw.getrandbits(32)).permutation(lengths[name])
            rankings[name] = ranking_of(sequences, draw.randint(1, 9), "f" * 8, draw.choice([0, 0, 1, 7, 64]))
        order = order_of(phases, lengths, draw.getrandbits(draw.choice([8, 32, 70])), rankings)
        high = draw.choice([100, 10**5, 10**9])
        at = np.array([draw.randrange(high) for _ in range(2000)], dtype=np.int64)
        resolved = b"".join(part.astype(np.int64).tobytes() for part in order.resolve(at))
        changes = [0, *sorted(draw.sample(range(1, 1000), 2))]
        steps = steps_of([batch_of(k, draw.randint(1, 64)) for k in changes], [segment_of(0, 0)])
        steps = steps.skip(draw.randint(1, 400), draw.randint(0, 9000)).skip(
            draw.randint(1, 900), draw.randint(0, 9000)
        )
        ranges = [steps.range(step) for step in draw.sample(range(2000), 50)]
        results[str(number)] = [
            hashlib.sha256(resolved).hexdigest(), order.identity, order.consumed(draw.randrange(high)), ranges,
        ]  # fmt: skip
        positions += at.size
    target.write_text(json.dumps({"positions": positions, **results}))


def source_of(tree: Path) -> dict[str, Any]:
    """The commit of a source tree, and the files that are not as in it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True).stdout.strip()

    return {"commit": git("rev-parse", "HEAD"), "changed_files": git("status", "--porcelain", ".").splitlines()}


def check_all(trees: dict[str, Path], folder: Path, only: str) -> dict[str, dict[str, Any]]:
    """The result of each check whose name matches, in the order of the report."""
    files = write_corpus(folder / "corpus")
    files["t5"] = write_t5(folder / "t5", files["prose"])
    specs = make_specs(files)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(check_spec, name, spec, trees, folder) for name, spec in specs.items()
    }
    checks |= {f"{name} continued": partial(check_continued, name, specs[name], trees, folder) for name in CONTINUED}
    checks["prepared data"] = partial(check_prepared, specs["curated"], trees, folder)
    checks["order"] = partial(check_order, trees, folder)
    results = {}
    for name in (name for name in checks if re.search(only, name)):
        try:
            results[name] = checks[name]()
        except RuntimeError as error:  # a run that one of the trees cannot do is a difference too
            results[name] = {"equal": False, "steps": 0, "error": str(error)}
        one = results[name]
        print(f"{name:<22} {'equal' if one['equal'] else 'DIFFERS':<8} {one['steps']:>5} steps", flush=True)
        for key in () if one["equal"] else ("error", "differences"):
            print(json.dumps(one.get(key), indent=1)[:3000], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the folder src of the former commit")
    parser.add_argument("--after", type=Path, help="the folder src of the later one")
    parser.add_argument("--folder", type=Path, help="work folder; its content is deleted first")
    parser.add_argument("--only", default="", help="a regular expression of checks")
    parser.add_argument("--write", type=Path, help="write the result here (benchmarks/results)")
    parser.add_argument("--order", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        write_order(options.order)
        return
    trees = {side: getattr(options, side).resolve() for side in ("before", "after")}
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    results = check_all(trees, folder, options.only)
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "tokenizers")}
    report = {
        "date": time.strftime("%Y-%m-%d"), "command": f"python {' '.join(sys.argv)}",
        **{side: source_of(tree) for side, tree in trees.items()},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": versions, "seconds": round(time.monotonic() - began),
        "equal": all(one["equal"] for one in results.values()), "checks": results,
    }  # fmt: skip
    if options.write:
        options.write.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not report["equal"])


if __name__ == "__main__":
    main()
