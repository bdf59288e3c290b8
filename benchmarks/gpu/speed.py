"""Tokens/s, MFU, peak memory and time to the first step of one system on one model, in this process.

    python benchmarks/gpu/speed.py --system bessemer --model 1b --set memory.activations=selective --json out.json
    python benchmarks/gpu/speed.py --system torchtitan --model 1b --precision fp8

Random tokens, bf16 compute with fp32 weights (unless said otherwise), fused AdamW, gradient clipping; `--set` is for
the system: a key of the spec, an option of torchtitan's. 124m has its embeddings tied, which torchtitan cannot do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

from models import MODELS, Case

STARTED_S = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("bessemer", "torchtitan", "liger", "hf", "native"), required=True)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--precision", default="bf16")
    for name in ("rows", "context", "layers"):
        parser.add_argument(f"--{name}", type=int, help="instead of the model's")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", default="runs/bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--started", type=float, default=STARTED_S, help="when the command was given, in seconds")
    options = parser.parse_args()
    case = Case.of(options)
    if case.system == "bessemer":
        from ours import measure
    else:
        from peers import measure
    try:
        found = measure(case, options.started)
    except Exception as error:
        traceback.print_exc()
        told = f"{type(error).__name__}: {str(error)[:300]}".splitlines()[0]
        found = {"system": case.system, "model": case.name, "settings": list(case.settings), "error": told}
    text = json.dumps(found, indent=1)
    print(text, flush=True)
    if options.json:
        options.json.write_text(text + "\n")
    sys.stderr.flush()
    os._exit("error" in found)  # some of them leave threads and process groups behind


if __name__ == "__main__":
    main()
