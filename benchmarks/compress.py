"""What quantization costs a model: perplexity, KL divergence, agreement and size for each format and method.

    python benchmarks/compress.py MODEL --text /usr/lib/python3.11 --rows 32 --length 384

MODEL is a Hugging Face folder. The text is Python code (default: the standard library of this interpreter), of which a
quarter of the rows is measured and the others calibrate. `opened` is the largest difference between log-probabilities
that transformers computes from the written folder and those that were measured, relative to the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from bessemer.data.curate.scores.train import read_texts
from bessemer.data.tokenizer.tokenizer import Tokenizer, end_token
from bessemer.export.compress import compress, text_rows
from bessemer.model.families.folder import HfFolder

CASES = [("int4", method) for method in ("rtn", "awq", "gptq", "auto")]
CASES += [("int8", method) for method in ("rtn", "awq", "gptq")] + [("fp8", "rtn")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(sysconfig.get_paths()["stdlib"])])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--cases", nargs="+", default=[f"{to}-{method}" for to, method in CASES])
    parser.add_argument("--name", default="", help="in the report, instead of the folder's name")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-compress.json")
    arguments = parser.parse_args()
    source = HfFolder(arguments.model)
    tokenizer = Tokenizer.load(source.path, end_token(source.path))
    texts = read_texts(sorted(path for place in arguments.text for path in python_files(place)))
    tokens_RT = text_rows(texts, tokenizer, arguments.rows, arguments.length)
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/compress.py", *sys.argv[1:]]).replace(str(arguments.model), "MODEL"),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "model": arguments.name or source.path.name,
        "text": f"Python {platform.python_version()} standard library: {tokens_RT.numel():,} tokens",
        "cases": [],
    }
    for case in arguments.cases:
        to, method = case.split("-")
        began_s = time.process_time()
        with tempfile.TemporaryDirectory() as place:
            result = compress(source, tokens_RT, Path(place) / "out", to, method, arguments.group, limit=100.0)
        row = {key: value for key, value in result.to_json().items() if key != "folder"}
        report["cases"].append({"case": case, **row, "cpu_s": round(time.process_time() - began_s, 1)})
        print(json.dumps(report["cases"][-1]), flush=True)
        if arguments.save:  # after each case: the run may be long
            path = Path(__file__).parent / "results" / f"{report['date']}-compress.json"
            path.write_text(json.dumps(report, indent=1) + "\n")


def python_files(place: Path) -> list[Path]:
    """The modules of a folder, without its sub-folders."""
    return list(place.glob("*.py")) if place.is_dir() else [place]


if __name__ == "__main__":
    main()
