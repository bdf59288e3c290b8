"""Faults planted in realistic training scripts, and the clean scripts: recall and precision of `bessemer review`.

    python benchmarks/review.py                 find only (seconds)
    python benchmarks/review.py --run --save    also run every patched script on the CPU for a few steps (minutes)

The scripts are in benchmarks/data/review. `tuning` faults were written before the rules were settled, `held_out` ones
after. A planted fault counts if a finding names its rule and its line. Every other finding above a note is false.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data" / "review"
SETS = ("tuning", "held_out")
RUN_SECONDS = 600


@dataclass(frozen=True)
class Planted:
    """A script with one fault. `at` is a part of the faulty line; `also` names rules that the same fault breaks."""

    name: str
    base: str
    rule: str
    at: str
    text: str
    also: tuple[str, ...] = field(default=())

    def line_is(self, number: int) -> bool:
        return self.at in self.text.split("\n")[number - 1]


def clean_scripts(part: str) -> dict[str, str]:
    """The clean scripts of a set by name."""
    names = yaml.safe_load((DATA / "clean.yaml").read_text())[part]
    return {name: (DATA / f"{name}.py").read_text() for name in names}


def planted_scripts(part: str) -> list[Planted]:
    scripts = []
    for number, row in enumerate(yaml.safe_load((DATA / f"faults_{part}.yaml").read_text())):
        text = (DATA / f"{row['script']}.py").read_text()
        for old, new in row["edits"]:
            if text.count(old) != 1:
                raise SystemExit(f"{row['script']} {row['rule']}: {old!r} occurs {text.count(old)} times")
            text = text.replace(old, new)
        name = f"{row['script']}_{number:02d}_{row['rule'].replace('-', '_')}"
        also = tuple(row.get("also", ()))
        scripts.append(Planted(name, row["script"], row["rule"], row["at"], text, also))
    return scripts


def judge(part: str) -> dict[str, Any]:
    """Findings on a set: hits, misses, false findings, faults without a patch."""
    from bessemer.diagnose.review.review import review_text

    result: dict[str, Any] = {"planted": 0, "hits": 0, "missed": [], "false": [], "notes": [], "without_patch": []}
    result["patch_leaves"] = []
    for script in planted_scripts(part):
        review = review_text(script.text, f"{script.name}.py")
        result["planted"] += 1
        matching = [f for f in review.faults if f.rule == script.rule and script.line_is(f.line)]
        result["hits"] += bool(matching)
        if not matching:
            result["missed"].append(script.name)
        elif not matching[0].edits:
            result["without_patch"].append(script.name)
        extra = [f for f in review.faults if f not in matching and f.rule not in script.also]
        result["false"] += [f"{script.name}:{f.line} {f.rule}" for f in extra if f.severity != "note"]
        left = review_text(review.patched, script.name).faults
        result["patch_leaves"] += [f"{script.name}: {f.rule}" for f in left if f.severity != "note"]
    clean = clean_scripts(part)
    result["clean"] = len(clean)
    for name, text in clean.items():
        for fault in review_text(text, f"{name}.py").faults:
            key = "notes" if fault.severity == "note" else "false"
            result[key].append(f"{name}:{fault.line} {fault.rule}")
    result["kinds"] = len({script.rule for script in planted_scripts(part)})
    result["recall"] = round(result["hits"] / result["planted"], 4)
    result["precision"] = round(result["hits"] / max(1, result["hits"] + len(result["false"])), 4)
    return result


def make_model(folder: Path) -> None:
    """A tiny GPT-2 with a tokenizer that has no padding token, as the published one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    text = "sample number says hello again document about metal and fire question answer good bad film text"
    names = ["<|endoftext|>", "[UNK]", *text.split(), *map(str, range(100))]
    vocabulary = {word: index for index, word in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", unk_token="[UNK]")
    fast.save_pretrained(folder)
    config = GPT2Config(vocab_size=len(names), n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)


def run_script(name: str, text: str, model: Path, folder: Path) -> str:
    """Run a script in a fork of this process, which has imported the libraries; "" or the end of its error."""
    place = folder / name
    place.mkdir(parents=True)
    (place / "train.py").write_text(text)
    if not (child := os.fork()):
        os._exit(run_in_child(place, text, model))
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            output = (place / "output.txt").read_text(errors="replace").strip()
            return "" if code == 0 else f"exit code {code}: {output[-600:]}"
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"did not end within {RUN_SECONDS} s"


def run_in_child(place: Path, text: str, model: Path) -> int:
    os.chdir(place)
    with open("output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ["MODEL"] = str(model)
    if "init_process_group" in text or "deepspeed" in text:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(free_port())
    sys.argv = ["train.py", *shlex.split(text.split("\n")[0].partition("short run:")[2])]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def import_libraries(packages: list[str]) -> list[str]:
    """Import what the scripts use, before forking; the names of those that are missing."""
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false")
    sys.path[:0] = packages
    missing = []
    for name in ("datasets", "accelerate", "transformers", "peft", "lightning", "pytorch_lightning", "deepspeed"):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    for part in ("trainer", "data.data_collator", "models.gpt2.modeling_gpt2", "models.auto"):
        importlib.import_module(f"transformers.{part}")
    return missing


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_patched(part: str, packages: list[str], only: str = "") -> dict[str, Any]:
    """Run the clean scripts, and the patched ones of every planted fault."""
    from bessemer.diagnose.review.review import apply_patches

    texts = dict(clean_scripts(part))
    for script in planted_scripts(part):
        patched = apply_patches(script.text, script.name)
        if patched != script.text:
            texts[script.name] = patched
    texts = {name: text for name, text in texts.items() if only in name}
    missing = import_libraries(packages)
    left_out = [name for name, text in texts.items() if any(f"import {library}" in text for library in missing)]
    failed = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model")
        for name, text in texts.items():
            if name not in left_out and (error := run_script(name, text, folder / "model", folder)):
                failed[name] = error
                print(name, error, file=sys.stderr, flush=True)
    ran = len(texts) - len(left_out) - len(failed)
    return {"scripts": len(texts), "ran": ran, "failed": failed, "left_out": left_out, "missing": missing}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=[*SETS, "all"], default="all")
    parser.add_argument("--run", action="store_true", help="also run the patched scripts")
    parser.add_argument("--only", default="", help="only run the patched scripts whose name contains this")
    parser.add_argument("--packages", nargs="*", default=[], help="folders with lightning and deepspeed")
    parser.add_argument("--out", help="write the result here")
    options = parser.parse_args()
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/review.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(), "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }  # fmt: skip
    for part in SETS if options.set == "all" else [options.set]:
        result[part] = {} if options.only else judge(part)
        if options.run:
            result[part]["patched_runs"] = run_patched(part, options.packages, options.only)
    text = json.dumps(result, indent=1)
    if options.out:
        Path(options.out).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
