"""Throughput and latency of `bessemer serve` beside `transformers serve`, on the same GPU and weights, in one command.

    python benchmarks/gpu/serve.py --size 1b --compile --system-seconds 190

Each server runs alone in processes of its own, for at most `--system-seconds`, and gets the same greedy loads: 4, 16
and 64 requests at once for throughput, then a Poisson process at `--rate` for latency. A load at once that is expected
to take longer than the time left (twice the time of the one before) is not sent, and one that does is cut: its numbers
are those of the requests that completed. Every load is written to the file when it ends.
The first two requests warm a server up and are not counted. The random weights are written once, as a Hugging Face
folder with a tokenizer of words.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from generate import SIZES
from tokenizers import Tokenizer, models, pre_tokenizers

from bessemer.bench.serve import WORDS, Load, measure_load, parse_lengths
from bessemer.errors import UserError

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


@contextmanager
def running(system: str, folder: Path, options: argparse.Namespace, end: float) -> Iterator[None]:
    """The server in a session of its own, ended with all its processes."""
    program = command(system, folder, options)
    process = subprocess.Popen(program, env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True)
    try:
        while True:
            try:
                urllib.request.urlopen("http://127.0.0.1:8123/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise TimeoutError(f"did not answer /health: {program}") from None
                time.sleep(0.5)
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # one that still answers does not stop at the first
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(8)
                except subprocess.TimeoutExpired:
                    continue


def measure(
    system: str, folder: Path, options: argparse.Namespace, numbers: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill `numbers` with one load after the other, as far as the time allows."""
    begin = time.monotonic()
    end = begin + options.system_seconds
    with running(system, folder, options, end):
        numbers["start_s"] = time.monotonic() - begin
        load = Load("http://127.0.0.1:8123/v1", str(folder) if system != "bessemer" else None, 2, 0.0,
                    parse_lengths(options.lengths), chat=True, ignore_eos=system == "bessemer")  # fmt: skip

        def send(name: str, expected_s: float, **changes: Any) -> float:
            """The seconds of a load; those that are expected if it was not sent, failed or was cut."""
            left = end - time.monotonic()
            if expected_s > left or left < 2:
                numbers[name] = f"not sent: it may take {expected_s:.0f} s, and {max(0.0, left):.0f} s are left"
                save()
                return expected_s
            report = measure_load(replace(load, seconds=left, **changes))
            numbers[name] = report.summary()
            errors = [times.error for times in report.times if times.error and not times.unfinished]
            numbers[name] |= {"first_error": errors[0]} if errors else {}
            save()
            return report.seconds if len(report.completed) == len(report.times) else max(expected_s, report.seconds)

        send("warm_up", 0.0)
        seconds = 0.0
        for count in (4, 16, options.concurrent):
            seconds = send(f"at_once_{count}", 2 * seconds, requests=count, seed=count)
        send("poisson", 0.0, requests=options.requests, rate=options.rate, seed=2)


def compare(systems: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the largest load at once, and of the Poisson load, that both servers completed in part."""
    if not {"bessemer", "transformers"} <= systems.keys():
        return {}
    ours, theirs = systems["bessemer"], systems["transformers"]

    def measured(name: str) -> bool:
        return all(isinstance(side.get(name), dict) and "ttft_s" in side[name] for side in (ours, theirs))

    both = [name for name in ours if name.startswith("at_once_") and measured(name)]
    ratios: dict[str, Any] = {}
    if both:
        name = both[-1]
        rates = [side[name]["output_tokens_per_s"] for side in (ours, theirs)]
        ratios |= {"load": name, "tokens_per_s": rates, "times_faster": rates[0] / rates[1]}
    if measured("poisson"):
        ratios["ttft_p95_s"] = [side["poisson"]["ttft_s"]["p95"] for side in (ours, theirs)]
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--systems", nargs="+", default=["bessemer", "transformers"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--lengths", default="512x256")
    parser.add_argument("--system-seconds", type=float, default=190.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_model(folder, options.size)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        report: dict[str, Any] = {"date": str(date.today()), "command": sys.argv, "device": device}
        report |= {"torch": torch.__version__, "transformers": version("transformers"), "commit": options.commit}
        report["systems"] = {}
        out = options.out or Path(f"benchmarks/results/{date.today()}-gpu-serve.json")

        def save() -> None:
            report["ratios"] = compare(report["systems"])
            out.write_text(json.dumps(report, indent=1) + "\n")

        for system in options.systems:
            numbers = report["systems"][system] = {}
            try:
                measure(system, folder, options, numbers, save)
            except (OSError, UserError) as error:
                numbers["failed"] = str(error)
            save()
            for name, row in numbers.items():
                if isinstance(row, dict):
                    rate, ttft_s = row["output_tokens_per_s"], row.get("ttft_s", {}).get("p95", float("nan"))
                    row = f"{rate:10,.0f} tokens/s, TTFT p95 {ttft_s:.3f} s, {row['unfinished']} not ended"
                print(f"{system:14} {name:12} {row}", flush=True)
        print(json.dumps(report["ratios"]))


if __name__ == "__main__":
    main()
