"""Tokens/s of this loop and of the Hugging Face Trainer, side by side on this machine's CPU.

Both train the same LlamaForCausalLM shape on the same token rows in fp32: 256 tokens x 16 rows a step, one micro-batch,
gradient clipping, fused AdamW. Ours runs as `bessemer train` does, guard and per-step metrics on. Each round is a fresh
process; rounds alternate; a round's rate is over its steps after the first three; medians of the rounds are compared.

    python benchmarks/hf_trainer.py [--rounds 5] [--sizes 1.3M,10M] [--write benchmarks/results/DATE-hf-trainer.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

CONTEXT, ROWS, SKIP = 256, 16, 3
SIZES = {
    "1.3M": {"vocab": 2048, "width": 128, "layers": 4, "heads": 4, "ffn": 352, "steps": 43},
    "10M": {"vocab": 8192, "width": 320, "layers": 4, "heads": 5, "ffn": 864, "steps": 18},
}
GOALS = {"1.3M": 1.10, "10M": 0.98}


def make_spec(size: str, folder: Path):
    from bessemer.spec.schema import RunSpec

    shape = SIZES[size]
    return RunSpec.model_validate(
        {
            "name": f"bench-{size}-{os.getpid()}",
            "runs": str(folder),
            "model": {key: shape[key] for key in ("width", "layers", "heads", "ffn")} | {"tied": False},
            "tokenizer": {"vocab": shape["vocab"], "sample": "4MB"},
            "data": {
                "sources": {
                    "library": {
                        "path": [sysconfig.get_paths()["stdlib"]],
                        "include": ["*.py"],
                        "exclude": ["test/*", "*/tests/*", "*/test/*"],
                        "format": "source",
                    }
                },
                "context": CONTEXT,
                "validation": 0.0,
            },
            "budget": {"steps": shape["steps"], "batch": CONTEXT * ROWS, "micro_batch": ROWS},
            "optimizer": {"lr": 1e-3},
            "precision": "fp32",
            "parallel": {"device": "cpu"},
            "checkpoint": {"every": 100_000, "keep_best": False},
        }
    )


def run_ours(size: str, folder: Path) -> float:
    from bessemer.observe.view import RunView
    from bessemer.session.session import Session

    times: list[float] = []

    class Watch(RunView):
        def step(self, record):
            times.append(time.perf_counter())
            super().step(record)

    Session(make_spec(size, folder), Watch()).train()
    # A step is reported while the next one runs: the last two reports come together, so the last is left out.
    inner = times[SKIP:-1]
    return (len(inner) - 1) * CONTEXT * ROWS / (inner[-1] - inner[0])


def run_peer(size: str, folder: Path) -> float:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from bessemer.data.prepare import prepare

    spec, shape = make_spec(size, folder), SIZES[size]
    store = prepare(spec.data, spec.tokenizer, folder / ".data", shape["vocab"], spec.seed).train["library"]
    rows = [
        torch.from_numpy(store.slice(i * CONTEXT, (i + 1) * CONTEXT).astype("int64"))
        for i in range(shape["steps"] * ROWS)
    ]
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        intermediate_size=shape["ffn"],
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    times: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        per_device_train_batch_size=ROWS,
        max_steps=shape["steps"],
        learning_rate=1e-3,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=shape["steps"],
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Watch()],
    )
    trainer.train()
    inner = times[SKIP:-1]
    return (len(inner) - 1) * CONTEXT * ROWS / (inner[-1] - inner[0])


def one_round(side: str, size: str, folder: Path) -> float:
    command = [sys.executable, __file__, "--side", side, "--sizes", size, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRANSFORMERS_VERBOSITY": "error"})
    if done.returncode:
        sys.exit(f"{side} {size} failed:\n{done.stdout}\n{done.stderr}")
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1.3M,10M")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--side", choices=["ours", "peer"])
    parser.add_argument("--write", type=Path, help="also write the result to this JSON file")
    options = parser.parse_args()
    sizes = options.sizes.split(",")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.side:
        print((run_ours if options.side == "ours" else run_peer)(sizes[0], options.folder))
        return
    result: dict[str, object] = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "sizes": {}}
    print(f"{'size':6} {'ours tok/s':>12} {'HF Trainer':>12} {'ratio':>7} {'goal':>6}   rounds (ours / HF)")
    for size in sizes:
        rates: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(options.rounds):
            for side in rates:
                rates[side].append(one_round(side, size, options.folder))
        ours, peer = (statistics.median(rates[side]) for side in ("ours", "peer"))
        pairs = "  ".join(f"{a:,.0f}/{b:,.0f}" for a, b in zip(rates["ours"], rates["peer"], strict=True))
        print(f"{size:6} {ours:12,.0f} {peer:12,.0f} {ours / peer:7.3f} {GOALS[size]:6.2f}   {pairs}", flush=True)
        result["sizes"][size] = {"ours": rates["ours"], "hf_trainer": rates["peer"], "ratio_of_medians": ours / peer}  # type: ignore[index]
    if options.write:
        options.write.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, object]:
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
