"""Supervised fine-tuning beside TRL on the same GPU, each in a process of its own, in one command; a dated file.

    python benchmarks/gpu/fine_tune.py --cases full-1b lora-8b --systems bessemer trl trl-packed
    python benchmarks/gpu/fine_tune.py --cases tiny --systems bessemer trl --steps 4    # to try it without a GPU

Prompts and completions of 64 to 2,048 tokens together, log-uniform. `trl` is its default: padded batches of 16
conversations, activations computed again; `trl-packed` packs and has Liger's kernels; `trl-wrapped` packs by cutting
the text anywhere, so that torch's own attention kernel is fast without flash-attn; a name that ends in `-keep` also
keeps the activations. `bessemer-lean` recomputes all of them, `bessemer-profile` says where the time of its steps goes.
A batch holds about 16,384 tokens everywhere. tokens/s
counts the tokens of conversations, no padding.
LoRA is of rank 16 on all linear layers; qlora holds the base in NF4 with double quantization (bitsandbytes for TRL).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from child import Results, options_for
from models import MODELS, Model

EOS, ROWS, CONTEXT = "<|endoftext|>", 8, 2048
SHORTEST, LONGEST, CONVERSATIONS = 64, 2048, 1024
RANK = 16
CASES = {  # kind, model
    "tiny": ("full", Model(64, 2, 4, 2, 256, 512, False, CONTEXT, ROWS)),
    "tiny-lora": ("lora", Model(64, 2, 4, 2, 256, 512, False, CONTEXT, ROWS)),
    "full-1b": ("full", MODELS["1b"]),
    "lora-8b": ("lora", MODELS["8b"]),
    "qlora-32b": ("qlora", Model(5120, 64, 40, 8, 27_648, 128_256, False, CONTEXT, ROWS)),
}
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "liger_kernel", "liger-kernel", "bitsandbytes")


def write_model(model: Model, folder: Path) -> Path:
    """Random weights as a Hugging Face folder with a tokenizer of one word per token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = folder / f"model-{model.width}-{model.layers}-{model.vocab}"
    if (place / "done").exists():
        return place
    words = {EOS: 0, "<pad>": 1} | {f"w{i}": i for i in range(2, model.vocab)}
    inner = Tokenizer(models.WordLevel(words, unk_token=EOS))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, pad_token="<pad>").save_pretrained(place)
    config = LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.width, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, intermediate_size=model.ffn,
        tie_word_embeddings=model.tied, max_position_embeddings=4096, eos_token_id=0, bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        LlamaForCausalLM(config).save_pretrained(place, max_shard_size="4GB")
    torch.set_default_dtype(torch.float32)
    (place / "done").touch()
    return place


def write_rows(model: Model, folder: Path) -> Path:
    import numpy as np

    path = folder / f"rows-{model.vocab}.jsonl"
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(math.log(SHORTEST), math.log(LONGEST), CONVERSATIONS)).astype(int)
    with path.open("w") as file:
        for size in sizes:  # an end token follows
            ids = random.integers(2, model.vocab, size - 2).tolist()
            cut = max(1, len(ids) // 4)
            parts = [" ".join(f"w{i}" for i in part) for part in (ids[:cut], ids[cut:])]
            file.write(json.dumps({"prompt": parts[0] + " ", "completion": parts[1]}) + "\n")
    return path


def bessemer(system: str, kind: str, place: Path, rows: Path, folder: Path, warmup: int, steps: int) -> dict[str, Any]:
    from bessemer.data.prepare import Prepared
    from bessemer.observe.view import RunView
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data
    from bessemer.session.inspect import ProfileSession
    from bessemer.session.session import Session, run_folder
    from bessemer.session.start import complete_spec
    from bessemer.spec.load import load_spec

    spec = {
        "name": f"{kind}-{int(time.time())}", "runs": str(folder), "objective": "sft", "model": {"hf": str(place)},
        "data": {"sources": {"rows": str(rows)}, "context": CONTEXT, "validation": 0.0},
        "tokenizer": {"chat": "none"},
        "budget": {"steps": warmup + steps + 1, "batch": ROWS * CONTEXT},
        "checkpoint": {"every": 1_000_000}, "evaluate": {"every": 1_000_000}, "guard": {"copies": "off"},
    }  # fmt: skip
    if system == "bessemer-lean":
        spec["memory"] = {"activations": "full"}
    if kind != "full":
        spec["adapter"] = {"kind": kind, "rank": RANK, "alpha": 2 * RANK}
    path = folder / f"{spec['name']}.yaml"
    path.write_text(json.dumps(spec))
    loaded = load_spec(path, [])
    prepared = prepare_data(complete_spec(loaded), Plan())
    assert isinstance(prepared, Prepared)
    store = prepared.train["rows"]
    times: list[float] = []
    records: list[dict[str, Any]] = []

    class Watch(RunView):
        def step(self, record: dict[str, Any]) -> None:
            super().step(record)
            times.append(time.time())
            records.append(record)
            if len(times) == warmup + steps:
                raise KeyboardInterrupt

    if system == "bessemer-profile":
        profiled = ProfileSession(loaded, Watch())
        profiled.train()
        profile = json.loads((profiled.folder / "profile.json").read_text())
        print(profiled.text, flush=True)
        return {
            "tokens_per_s": round(profile["tokens_per_s"]), "peak_gib": round(profile["memory_bytes"] / 2**30, 2),
            "profile": profile, "text": profiled.text.splitlines(),
        }  # fmt: skip
    session = Session(loaded, Watch())
    try:
        outcome = session.train()
        raise RuntimeError(f"the run {outcome.kind} after {len(times)} steps: {outcome.reason}")
    except KeyboardInterrupt:
        pass
    index = next(prepared.folder.glob(f"rows.best-fit-{CONTEXT}.json"))
    density = store.tokens / (json.loads(index.read_text())["rows"] * CONTEXT)
    plan = json.loads((run_folder(loaded) / "plan.json").read_text())["decisions"]
    return {
        "tokens_per_s": round(ROWS * CONTEXT * density * steps / (times[-1] - times[warmup - 1])),
        "peak_gib": round(max(record["memory_bytes"] for record in records) / 2**30, 2),
        "density": round(density, 4), "losses": [round(records[i]["loss"], 4) for i in (0, -1)],
        "plan": {item["key"]: item["value"] for item in plan},
    }  # fmt: skip


def trl(system: str, kind: str, place: Path, rows: Path, folder: Path, warmup: int, steps: int) -> dict[str, Any]:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    cuda, packed = torch.cuda.is_available(), system.startswith(("trl-packed", "trl-wrapped"))
    config = SFTConfig(
        output_dir=str(folder / system), max_steps=warmup + steps, max_length=CONTEXT, packing=packed, bf16=cuda,
        use_cpu=not cuda, use_liger_kernel=packed and cuda, gradient_checkpointing=not system.endswith("-keep"),
        packing_strategy="wrapped" if "wrapped" in system else "bfd",
        per_device_train_batch_size=ROWS if packed else 2 * ROWS, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1, optim="adamw_torch_fused",
    )  # fmt: skip
    options: dict[str, Any] = {}
    if kind == "qlora":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    kind_of_weights = torch.float32 if kind == "full" or not cuda else torch.bfloat16
    network = AutoModelForCausalLM.from_pretrained(place, dtype=kind_of_weights, **options)
    adapter = None
    if kind != "full":
        from peft import LoraConfig

        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    marks: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            marks.append(time.time())

    trainer = SFTTrainer(
        model=network, args=config, train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(place), peft_config=adapter, callbacks=[Watch()],
    )  # fmt: skip
    counts: list[int] = []
    inner, pad = trainer.data_collator, 1

    def collate(examples: list[Any]) -> Any:
        batch = inner(examples)
        counts.append(int((batch["input_ids"] != pad).sum()))
        return batch

    trainer.data_collator = collate
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_s": round(sum(counts[warmup : warmup + steps]) / (marks[-1] - marks[warmup - 1])),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0.0,
        "losses": [losses[0], losses[-1]],
    }


def measure_here(system: str, case: str, folder: Path, warmup: int, steps: int) -> dict[str, Any]:
    kind, model = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    place, rows = write_model(model, folder), write_rows(model, folder)
    if system.startswith("bessemer"):
        return bessemer(system, kind, place, rows, folder, warmup, steps)
    return trl(system, kind, place, rows, folder, warmup, steps)


def main() -> None:
    parser = options_for("fine-tune", __doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["full-1b", "lora-8b"])
    parser.add_argument("--systems", nargs="+", default=["bessemer", "trl", "trl-packed"])
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", nargs=3, help="one measurement in this process: SYSTEM CASE ANSWER.json")
    options = parser.parse_args()
    if options.only:
        system, case, answer = options.only
        try:
            result = measure_here(system, case, options.folder, options.warmup, options.steps)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}".splitlines()[0]}
        Path(answer).write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit("error" in result)
    results = Results(options)
    names = {found.metadata["Name"]: found.version for found in distributions()}
    results.head["versions"] = {name: names[name] for name in PACKAGES if name in names}
    rows = []
    for case in options.cases:
        for system in options.systems:
            with tempfile.TemporaryDirectory() as folder, results.log.open("a") as log:
                answer = Path(folder) / "answer.json"
                command = [sys.executable, __file__, "--folder", str(options.folder), "--warmup", str(options.warmup)]
                command += ["--steps", str(options.steps), "--only", system, case, str(answer)]
                try:
                    subprocess.run(command, stdout=log, stderr=log, timeout=options.timeout, check=False)
                    result = (
                        json.loads(answer.read_text()) if answer.exists() else {"error": f"died, see {results.log}"}
                    )
                except subprocess.TimeoutExpired:
                    result = {"error": f"not done after {options.timeout:.0f} s"}
            results.found.append({"case": case, "system": system, **result})
            speed = [f"{result['tokens_per_s']:,}", str(result["peak_gib"])] if "error" not in result else []
            rows.append([case, system, *(speed or [result["error"]])])
            print(*rows[-1], flush=True)
            results.write()
    results.conclude(["case", "system", "tokens/s", "peak GiB"], rows)


if __name__ == "__main__":
    main()
