"""DPO and GRPO beside TRL on the same GPU, each measurement in a process of its own, in one command; a dated file.

    python benchmarks/gpu/preferences.py --parts dpo grpo
    python benchmarks/gpu/preferences.py --parts dpo grpo --size tiny --steps 3    # to try it without a GPU

dpo: 8 pairs a step, prompts of 512 tokens, answers of 512. A name that ends in `-stored` reads the reference's
log-probabilities, computed before the first step, which is not timed; the others compute them in each step. `trl` is
its default (activations are computed again); `trl-keep` keeps them; `trl-liger` also has Liger's layers, and its fused
loss where that is possible.
grpo: rounds of 8 prompts of 256 tokens, 8 answers of up to 256 tokens to each, and one step on them. `trl` generates
with transformers and keeps the activations; `-bf16` holds its weights in bf16, in which it generates faster.
The peak is that of the measured steps, in bytes that torch has allocated.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from child import Results, options_for
from fine_tune import PACKAGES, write_model
from models import Model

SIZES = {
    "1b": Model(2048, 16, 32, 8, 8192, 128_256, True, 4096, 8),
    "tiny": Model(64, 2, 4, 2, 256, 512, True, 4096, 8),
}
PAIRS, PROMPT, ANSWER = 8, 512, 512  # of dpo
PROMPTS, SAMPLES, QUESTION, NEW = 8, 8, 256, 256  # of grpo
CONTEXT, MICRO_ROWS = 1024, 16  # of grpo: two answers with their prompts fill a row
SYSTEMS = {
    "dpo": ["bessemer", "bessemer-stored", "trl", "trl-liger", "trl-liger-stored"],
    "grpo": ["bessemer", "trl-bf16"],
}
REWARD = '''def spread(completions, **columns):
    """Between 0 and 1, and different for different answers."""
    return [sum(map(ord, text)) % 97 / 96 for text in completions]
'''
PARTS_OF_ROUND = ("generate_s", "sync_s", "reward_s", "score_s", "step_s")


def write_pairs(vocab: int, count: int) -> list[dict[str, str]]:
    import numpy as np

    draw = np.random.default_rng(0)

    def words(size: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(2, vocab, size))

    # an end token follows each answer
    return [
        {"prompt": words(PROMPT) + " ", "chosen": words(ANSWER - 1), "rejected": words(ANSWER - 1)}
        for _ in range(count)
    ]


def write_prompts(vocab: int, count: int) -> list[dict[str, str]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return [{"prompt": " ".join(f"w{i}" for i in draw.integers(2, vocab, QUESTION))} for _ in range(count)]


def write_rows(rows: list[dict[str, str]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Clock:
    """When steps ended, and the peak of those after the warm-up."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.steps, self.marks, self.peak = warmup, steps, list[float](), 0

    def mark(self) -> bool:
        """After a step; whether it was the last."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.marks) + 1 == self.warmup:
                torch.cuda.reset_peak_memory_stats()
            self.peak = torch.cuda.max_memory_allocated()
        self.marks.append(time.perf_counter())
        print(f"step {len(self.marks)}", flush=True)
        return len(self.marks) == self.warmup + self.steps

    def result(self) -> dict[str, Any]:
        times = [b - a for a, b in zip(self.marks[self.warmup - 1 :], self.marks[self.warmup :], strict=False)]
        return {
            "seconds_per_step": round((self.marks[-1] - self.marks[self.warmup - 1]) / self.steps, 4),
            "median_s": round(statistics.median(times), 4), "peak_gib": round(self.peak / 2**30, 2),
        }  # fmt: skip


def run_spec(spec: dict[str, Any], folder: Path, clock: Clock) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records of the steps and the plan's decisions."""
    from bessemer.observe.view import RunView
    from bessemer.session.session import Session, run_folder
    from bessemer.spec.load import load_spec

    path = folder / f"{spec['name']}.yaml"
    path.write_text(json.dumps(spec))
    loaded, records = load_spec(path, []), list[dict[str, Any]]()

    class Watch(RunView):
        def step(self, record: dict[str, Any]) -> None:
            super().step(record)
            records.append(record)
            if clock.mark():
                raise KeyboardInterrupt

    try:
        outcome = Session(loaded, Watch()).train()
        raise RuntimeError(f"the run {outcome.kind} after {len(records)} steps: {outcome.reason}")
    except KeyboardInterrupt:
        pass
    plan = json.loads((run_folder(loaded) / "plan.json").read_text())["decisions"]
    print(json.dumps(plan, indent=1), flush=True)
    return records, {item["key"]: item["value"] for item in plan}


def common(part: str, folder: Path, place: Path, clock: Clock) -> dict[str, Any]:
    return {
        "name": f"{part}-{os.getpid()}", "runs": str(folder), "model": {"hf": str(place)},
        "tokenizer": {"chat": "none"},
        "checkpoint": {"every": 1_000_000}, "evaluate": {"every": 1_000_000}, "guard": {"copies": "off"},
        "budget": {"steps": clock.warmup + clock.steps + 1},
    }  # fmt: skip


def bessemer_dpo(system: str, model: Model, place: Path, folder: Path, clock: Clock) -> dict[str, Any]:
    rows = write_rows(write_pairs(model.vocab, PAIRS * (clock.warmup + clock.steps + 1)), folder / "pairs.jsonl")
    spec = common("dpo", folder, place, clock)
    context = PROMPT + 2 * ANSWER
    spec |= {"objective": "dpo", "dpo": {"reference": "stored" if system.endswith("-stored") else "live"}}
    spec["data"] = {"sources": {"pairs": str(rows)}, "context": context, "validation": 0.0}
    spec["budget"] |= {"batch": PAIRS * context, "micro_batch": PAIRS}
    records, plan = run_spec(spec, folder, clock)
    return {"losses": [round(records[i]["loss"], 5) for i in (0, -1)], "plan": plan}


def bessemer_grpo(system: str, model: Model, place: Path, folder: Path, clock: Clock) -> dict[str, Any]:
    rows = write_rows(write_prompts(model.vocab, PROMPTS * (clock.warmup + clock.steps + 1)), folder / "prompts.jsonl")
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    spec = common("grpo", folder, place, clock)
    spec |= {"objective": "grpo", "optimizer": {"lr": 1e-6}}
    spec["rl"] = {
        "prompts": PROMPTS, "samples": SAMPLES, "max_tokens": NEW, "slots": PROMPTS * SAMPLES,
        "rewards": {"spread": {"function": f"{reward}:spread"}},
    }  # fmt: skip
    spec["data"] = {"sources": {"prompts": str(rows)}, "context": CONTEXT, "validation": 0.0}
    spec["budget"] |= {"micro_batch": MICRO_ROWS}
    records, plan = run_spec(spec, folder, clock)
    measured = records[clock.warmup :]
    split = {name: round(statistics.median(record.get(name, 0.0) for record in measured), 4) for name in PARTS_OF_ROUND}
    split["other_s"] = round(clock.result()["median_s"] - sum(split.values()) + split["sync_s"], 4)
    numbers = {name: records[-1].get(name) for name in ("mismatch", "entropy", "importance", "grad_norm")}
    return {"split": split, "last_step": numbers, "plan": plan}


def trl_settings(system: str, folder: Path, clock: Clock) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "output_dir": str(folder / system), "max_steps": clock.warmup + clock.steps, "bf16": cuda, "use_cpu": not cuda,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "optim": "adamw_torch_fused",
        "learning_rate": 1e-6,
    }  # fmt: skip


def load_peer(place: Path, system: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if "liger" in system and torch.cuda.is_available():
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=False)
    kind = torch.bfloat16 if "bf16" in system and torch.cuda.is_available() else torch.float32
    return AutoModelForCausalLM.from_pretrained(place, dtype=kind), AutoTokenizer.from_pretrained(place)


def make_watch(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.mark()

    return Watch()


def trl_dpo(system: str, model: Model, place: Path, folder: Path, clock: Clock) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    stored = system.endswith("-stored")
    config = DPOConfig(
        **trl_settings(system, folder, clock), per_device_train_batch_size=PAIRS, max_length=PROMPT + ANSWER,
        gradient_checkpointing=system.removesuffix("-stored") == "trl", precompute_ref_log_probs=stored,
        use_liger_kernel="fused" in system and torch.cuda.is_available(),  # its loss multiplies in fp32: 3.7 s a step
    )  # fmt: skip
    peer, tokenizer = load_peer(place, system)
    pairs = write_pairs(model.vocab, PAIRS * (clock.warmup + clock.steps + 1))
    trainer = DPOTrainer(
        model=peer, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer,
        callbacks=[make_watch(clock)],
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": [losses[0], losses[-1]], "columns": batch["input_ids"].shape[1]}


def trl_grpo(system: str, model: Model, place: Path, folder: Path, clock: Clock) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    spread: dict[str, Any] = {}
    exec(REWARD, spread)
    config = GRPOConfig(
        **trl_settings(system, folder, clock), per_device_train_batch_size=MICRO_ROWS,
        gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO_ROWS, num_generations=SAMPLES, max_completion_length=NEW,
        gradient_checkpointing=False,
    )  # fmt: skip
    peer, tokenizer = load_peer(place, system)
    prompts = write_prompts(model.vocab, PROMPTS * (clock.warmup + clock.steps + 1))
    trainer = GRPOTrainer(
        model=peer, args=config, train_dataset=Dataset.from_list(prompts), processing_class=tokenizer,
        reward_funcs=spread["spread"], callbacks=[make_watch(clock)],
    )  # fmt: skip
    trainer.train()
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    return {"mean_length": lengths[-1] if lengths else None}


MEASURES = {
    ("bessemer", "dpo"): bessemer_dpo, ("bessemer", "grpo"): bessemer_grpo, ("trl", "dpo"): trl_dpo,
    ("trl", "grpo"): trl_grpo,
}  # fmt: skip


def measure_here(part: str, system: str, size: str, folder: Path, warmup: int, steps: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    global PROMPT, ANSWER, QUESTION, NEW, CONTEXT
    if size == "tiny":
        PROMPT, ANSWER, QUESTION, NEW, CONTEXT = 32, 32, 16, 16, 64
    model, clock = SIZES[size], Clock(warmup, steps)
    place = write_model(model, folder)
    began = time.perf_counter()
    found = MEASURES[system.partition("-")[0], part](system, model, place, folder, clock)
    found |= clock.result() | {"first_step_after_s": round(clock.marks[0] - began, 1)}
    if part == "dpo":
        return found | {"pairs_per_s": round(PAIRS / found["seconds_per_step"], 2)}
    answers = PROMPTS * SAMPLES / found["seconds_per_step"]
    return found | {"answers_per_s": round(answers, 2), "new_tokens_per_s": round(answers * NEW)}


def main() -> None:
    parser = options_for("preferences", __doc__)
    parser.add_argument("--parts", nargs="+", choices=SYSTEMS, default=["dpo", "grpo"])
    parser.add_argument("--systems", nargs="+", help="default: those of the part")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs=3, help="one measurement in this process: PART SYSTEM ANSWER.json")
    options = parser.parse_args()
    if options.only:
        part, system, answer = options.only
        try:
            result = measure_here(part, system, options.size, options.folder, options.warmup, options.steps)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}".splitlines()[0]}
        Path(answer).write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit("error" in result)
    results = Results(options)
    names = {found.metadata["Name"]: found.version for found in distributions()}
    results.head |= {"size": options.size, "versions": {name: names[name] for name in PACKAGES if name in names}}
    rows = []
    for part in options.parts:
        for system in options.systems or SYSTEMS[part]:
            began = time.perf_counter()
            result = measure_apart(part, system, options, results.log)
            results.found.append({"part": part, "system": system, **result})
            speed = result.get("pairs_per_s") or result.get("answers_per_s")
            unit = "pairs/s" if part == "dpo" else "answers/s"
            peak = f"{result.get('peak_gib', 0):.1f}"
            rows.append([part, system, *([result["error"]] if "error" in result else [f"{speed:,} {unit}", peak])])
            print(*rows[-1], result.get("split", ""), f"[{time.perf_counter() - began:.0f} s]", flush=True)
            results.write()
    results.conclude(["part", "system", "speed", "peak GiB"], rows)


def measure_apart(part: str, system: str, options: Any, log_path: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, log_path.open("a") as log:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--folder", str(options.folder), "--size", options.size]
        command += ["--warmup", str(options.warmup), "--steps", str(options.steps), "--only", part, system, str(answer)]
        print("\n$", *command, file=log, flush=True)
        try:
            subprocess.run(command, stdout=log, stderr=log, timeout=options.timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.timeout:.0f} s"}
        return json.loads(answer.read_text()) if answer.exists() else {"error": f"died, see {log_path}"}


if __name__ == "__main__":
    main()
