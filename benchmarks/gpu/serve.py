"""Throughput and latency of `bessemer serve` beside `transformers serve`, on the same GPU and weights, in one command.

    python benchmarks/gpu/serve.py --size 1b --requests 256 --concurrent 64 --lengths 512x256

Each server runs alone in a process of its own and gets the same greedy load twice: all requests at once, as many as
`--concurrent`, for throughput; then a Poisson process at `--rate` for latency. The first round warms the server up and
is not counted. The random weights are written once, as a Hugging Face folder with a tokenizer of words.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from generate import SIZES
from tokenizers import Tokenizer, models, pre_tokenizers

from bessemer.bench.serve import WORDS, Load, measure_load, parse_lengths

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(folder: Path, size: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=8192, bos_token_id=None, eos_token_id=SIZES[size]["vocab_size"] - 1
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = [*WORDS, *(f"w{i}" for i in range(config.vocab_size - len(WORDS) - len(SPECIAL)))]  # one token each
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def command(system: str, folder: Path, options: argparse.Namespace) -> list[str]:
    if system == "bessemer":
        flags = ["--slots", str(options.concurrent), "--context", "8192", *(["--compile"] if options.compile else [])]
        return [sys.executable, "-m", "bessemer", "serve", str(folder), "--port", "8123", *flags]
    program = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    return [*program, "serve", str(folder), "--port", "8123", "--continuous-batching", "--dtype", "bfloat16"]


def measure(system: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    url = "http://127.0.0.1:8123/v1"
    process = subprocess.Popen(command(system, folder, options), env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        end = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen("http://127.0.0.1:8123/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{system} did not start: {command(system, folder, options)}") from None
                time.sleep(1)
        load = Load(url, str(folder) if system != "bessemer" else None, options.concurrent, 0.0,
                    parse_lengths(options.lengths), chat=True, ignore_eos=system == "bessemer")  # fmt: skip
        measure_load(load)
        burst = measure_load(replace(load, requests=options.concurrent, seed=1))
        steady = measure_load(replace(load, requests=options.requests, rate=options.rate, seed=2))
        if error := next((times.error for times in (*burst.times, *steady.times) if times.error), None):
            raise SystemExit(f"{system}: {error}")
        return {"at_once": burst.summary(), "poisson": steady.summary()}
    finally:
        process.terminate()
        process.wait(120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--systems", nargs="+", default=["bessemer", "transformers"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--lengths", default="512x256")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_model(folder, options.size)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        report: dict[str, Any] = {"date": str(date.today()), "command": sys.argv, "device": device}
        report |= {"torch": torch.__version__, "commit": options.commit, "systems": {}}
        out = options.out or Path(f"benchmarks/results/{date.today()}-gpu-serve.json")
        for system in options.systems:
            numbers = report["systems"][system] = measure(system, folder, options)
            out.write_text(json.dumps(report, indent=1) + "\n")
            rate, ttft_s = numbers["at_once"]["output_tokens_per_s"], numbers["poisson"]["ttft_s"]["p95"]
            print(f"{system:14} {rate:10,.0f} tokens/s at once, TTFT p95 {ttft_s:.3f} s at {options.rate:g} a second",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
