"""`bessemer bench optimise` from a deliberately slow spec, beside the same spec tuned by hand, on one GPU.

    python benchmarks/gpu/optimise.py --model 124m --minutes 6

The slow spec runs in fp32 without compilation, recomputes all activations, has micro-batches of one row and assembles
batches when a step starts. The tuned one has bf16, compiled layers, no recomputation and the largest micro-batch of
models.py. Both are timed by the trials' own worker, the tuned one before and after the search, for the drift of the
clocks. The file has the predicted and the measured gain of every change.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from child import Results, options_for
from models import MODELS
from ours import EOS, corpus

SLOW: dict[str, Any] = {
    "precision": "fp32", "compile": "off", "memory.activations": "full", "budget.micro_batch": 1, "data.workers": 0,
}  # fmt: skip


def write_slow_spec(name: str, folder: Path) -> Path:
    model = MODELS[name]
    text, words = corpus(model, 40, folder / "corpus")
    spec = {
        "name": f"optimise-{name}", "runs": str(folder),
        "model": {key: getattr(model, key) for key in ("width", "layers", "heads", "kv_heads", "ffn", "tied")},
        "tokenizer": {"path": str(words), "eos": EOS},
        "data": {
            "sources": {"random": str(text)}, "context": model.context, "validation": 0.0, "cross_documents": True,
            "workers": SLOW["data.workers"],
        },
        "budget": {"steps": 1000, "batch": model.context * model.rows, "micro_batch": SLOW["budget.micro_batch"]},
        "optimizer": {"lr": 3e-4}, "precision": SLOW["precision"], "compile": SLOW["compile"],
        "memory": {"activations": SLOW["memory.activations"]},
    }  # fmt: skip
    path = folder / f"optimise-{name}.yaml"
    path.write_text(json.dumps(spec, indent=1))
    return path


def tuned_settings(name: str, mode: str) -> dict[str, Any]:
    return {
        "precision": "bf16", "compile": mode, "memory.activations": "none", "budget.micro_batch": MODELS[name].rows,
        "data.workers": 1,
    }  # fmt: skip


def main() -> None:
    parser = options_for("optimise", __doc__)
    parser.add_argument("--model", choices=MODELS, default="124m")
    parser.add_argument("--minutes", type=float, default=6.0, help="for the search, without the tuned spec")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="timed in each trial")
    parser.add_argument("--tuned-compile", default="chain", help="how the tuned spec is compiled")
    options = parser.parse_args()
    results, began = Results(options), time.monotonic()

    from bessemer.bench.optimise import Optimiser, table

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {line}", file=sys.stderr, flush=True)

    spec = write_slow_spec(options.model, options.folder)
    search = Optimiser(spec, [], ("precision",), 60 * options.minutes, options.trials, options.seconds, say)

    def measure_tuned() -> float:
        say("measuring the tuned spec")
        timing = search.measure(tuned_settings(options.model, options.tuned_compile))
        if isinstance(timing, str):
            raise SystemExit(f"the tuned spec does not train: {timing}")
        say(f"  {timing.tokens_per_s:,.0f} tokens/s")
        return timing.tokens_per_s

    tuned = [measure_tuned()]
    result = search.run()
    print("\n".join(table(result)), flush=True)
    tuned.append(measure_tuned())
    reached = result.tokens_per_s / statistics.mean(tuned)
    entry: dict[str, Any] = result.to_json()
    entry |= {"model": options.model, "slow": SLOW, "tuned": tuned_settings(options.model, options.tuned_compile)}
    entry |= {"tuned_tokens_per_s": tuned, "reached": reached, "total_s": time.monotonic() - began}
    results.found.append(entry)
    rows = []
    for trial in result.trials:
        predicted = "-" if trial.predicted_gain is None else f"{trial.predicted_gain:+.1%}"
        gain = "-" if trial.gain is None else f"{trial.gain:+.1%}"
        off = ""
        if trial.predicted_gain is not None and trial.gain is not None:
            off = f"{(1 + trial.predicted_gain) / (1 + trial.gain) - 1:+.1%}"
        rate = "-" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}"
        rows.append([trial.change, predicted, gain, off, rate, trial.verdict])
    rows.append(["tuned by hand, before and after", "", "", "", " ".join(f"{rate:,.0f}" for rate in tuned)])
    rows.append(["the search reached", f"{reached:.1%} of it"])
    results.conclude(["change", "predicted", "measured", "predicted against measured", "tokens/s", ""], rows)


if __name__ == "__main__":
    main()
