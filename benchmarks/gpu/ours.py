"""Bessemer's side: a run as `bessemer train` makes it, guard and metrics on, that is left with Ctrl-C's own exception
at the report of its last step but one, before the final save. There is no evaluation and no other save; looks into the
model and copies of the state in memory come as often as the defaults say (every 50 and every 32 steps, the first at
step 0).
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from models import Case, Model

EOS = "<|endoftext|>"


def corpus(model: Model, steps: int, folder: Path) -> tuple[Path, Path]:
    """Random words, each one a token, in documents as long as the context; and the tokenizer that has these words."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers

    count = 1 + min(steps * model.rows, max(2 * model.rows, 2**21 // model.context))
    folder.mkdir(parents=True, exist_ok=True)
    words, text = folder / f"words-{model.vocab}.json", folder / f"{model.vocab}-{model.context}-{count}.jsonl"
    if not words.exists():
        inner = Tokenizer(models.WordLevel({EOS: 0} | {f"w{i}": i for i in range(1, model.vocab)}, unk_token=EOS))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.add_special_tokens([EOS])
        inner.save(str(words))
    if not text.exists():
        random = np.random.default_rng(0)
        with text.with_suffix(".part").open("w") as file:
            for _ in range(count):
                ids = random.integers(1, model.vocab, model.context - 1).tolist()
                file.write(json.dumps({"text": " ".join(f"w{i}" for i in ids)}) + "\n")
        text.with_suffix(".part").rename(text)
    return text, words


def write_spec(case: Case) -> Path:
    """The run's file. `--set` goes over it as it does on the command line."""
    model, folder = case.model, Path(case.folder)
    steps = case.warmup + case.steps + bool(case.warmup)  # the last one is not timed, see `measure`
    text, words = corpus(model, steps, folder / "corpus")
    spec = {
        "name": f"{case.name}-{int(time.time())}-{os.getpid()}", "runs": str(folder),
        "model": {key: getattr(model, key) for key in ("width", "layers", "heads", "kv_heads", "ffn", "tied")},
        "tokenizer": {"path": str(words), "eos": EOS},
        "data": {
            "sources": {"random": str(text)}, "context": model.context, "validation": 0.0,
            "cross_documents": True,  # attention over whole rows, as the peers have it
        },
        "budget": {"steps": steps, "batch": model.context * model.rows, "micro_batch": model.rows},
        "optimizer": {"lr": 3e-4}, "precision": case.precision,
        "checkpoint": {"every": 1_000_000}, "evaluate": {"every": 1_000_000},
    }  # fmt: skip
    path = folder / f"{spec['name']}.yaml"
    path.write_text(json.dumps(spec, indent=1))
    return path


def measure(case: Case, started_s: float) -> dict[str, Any]:
    """The rate is over the wall clock between two steps' reports. A step is reported while the next one runs, when the
    host has given that to the device: later, if the device's queue is full or the host has to wait. So one more step
    follows, and both reports are late by the same. Without a warm-up it is the rate of the first step, compilation
    included."""
    from bessemer.observe.view import RunView
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data
    from bessemer.session.session import Session, run_folder
    from bessemer.spec.load import load_spec

    timeline = [(round(time.time() - started_s, 1), "imported")]  # seconds from the command to what a user sees
    began = time.perf_counter()
    spec = load_spec(write_spec(case), case.settings)
    prepare_data(spec, Plan())  # what the peers do not have to do, and a second run finds done
    prepare_s = time.perf_counter() - began
    times: list[float] = []
    records: list[dict[str, Any]] = []
    host: list[int] = []  # memory in use on the machine, pages locked for the GPU among it

    class Watch(RunView):
        def show(self, text: str) -> None:
            print(text, flush=True)
            if not times:
                timeline.append((round(time.time() - started_s, 1), text[:100]))

        def step(self, record: dict[str, Any]) -> None:
            super().step(record)
            times.append(time.time())
            records.append(record)
            memory = psutil.virtual_memory()
            host.append(memory.total - memory.available)
            if len(times) == case.warmup + case.steps:
                raise KeyboardInterrupt

    try:
        outcome = Session(spec, Watch()).train()
    except KeyboardInterrupt:
        folder = run_folder(spec)
    else:
        raise RuntimeError(f"the run {outcome.kind} after {len(times)} steps: {outcome.reason}")
    timed = records[case.warmup :]
    seconds = times[-1] - times[case.warmup - 1] if case.warmup else sum(record["step_s"] for record in records)
    plan = {item["key"]: item["value"] for item in json.loads((folder / "plan.json").read_text())["decisions"]}
    return case.result(
        seconds / case.steps, max(record["memory_bytes"] for record in records), times[0] - started_s - prepare_s,
        median_tokens_per_s=statistics.median(record["tokens_per_s"] for record in timed),
        data_wait_share=round(sum(record["data_wait_s"] for record in timed) / seconds, 5),
        host_gib=round(max(host) / 2**30, 1), prepare_s=round(prepare_s, 1), run=str(folder), plan=plan,
        losses=[round(records[i]["loss"], 4) for i in (0, -1)], vetoes=sum(bool(record["veto"]) for record in records),
        timeline=timeline, micro_rows=json.loads((folder / "settings.json").read_text())["micro_rows"],
    )  # fmt: skip
