"""The loss that recipes reach on the same text, model and hardware, and the seconds that they take for it.

    python benchmarks/gpu/time_to_loss.py --text FOLDER --recipes adamw muon --tokens 40M
    python benchmarks/gpu/time_to_loss.py --text FOLDER --recipes adamw --recipes-half compatible --seeds 0 1 2

Each run has a process of its own and its schedule decays to its own end. `--at-once` runs several beside each other:
their losses count, their seconds do not. `--recipes-half` get half the tokens. Seconds are those of the steps, data
included, without the first ten steps (compilation), evaluations and saves, times the steps over those counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BETTER = {"schedule.kind": "linear", "schedule.floor": 0.0}
MUON = BETTER | {
    "optimizer.name": "muon", "optimizer.muon": {"cautious": True}, "model.qk_norm": "head", "model.init": "zero",
    "model.tied": False, "optimizer.lr": 4e-3,
}  # fmt: skip
ADAMW = {"optimizer.name": "adamw", "optimizer.lr": 7.8e-4, "schedule.kind": "cosine", "schedule.floor": 0.1}
RECIPES: dict[str, dict[str, Any]] = {
    "standard": {},
    "compatible": {"recipe": "compatible"},
    "adamw": ADAMW,
    # torchtitan 0.2.2 as shipped, but for its embedding of N(0, 1)
    "torchtitan": BETTER
    | {"optimizer.name": "adamw", "optimizer.lr": 8e-4, "schedule.warmup": 200, "model.tied": False},
    "adamw-3e-3": BETTER | {"optimizer.name": "adamw", "optimizer.lr": 3e-3, "optimizer.betas": [0.9, 0.98]},
    "muon": MUON,
    "muon-2e-3": MUON | {"optimizer.lr": 2e-3},
    "muon-8e-3": MUON | {"optimizer.lr": 8e-3},
    "muon-tied": MUON | {"model.tied": True},
    "muon-gpt-init": MUON | {"model.init": "gpt"},
    "muon-no-qk-norm": MUON | {"model.qk_norm": "none"},
    "muon-cosine": MUON | {"schedule.kind": "cosine", "schedule.floor": 0.1},
    "muon-plain": ADAMW | {"optimizer.name": "muon"},
    "muon-embedding-x3": MUON | {"optimizer.groups": {"embedding": {"lr_factor": 3.0}}},
    "muon-head-x0.3": MUON | {"optimizer.groups": {"head": {"lr_factor": 0.3}}},
    "muon-decay-0": MUON | {"optimizer.weight_decay": 0.0},
    "muon-decay-0.3": MUON | {"optimizer.weight_decay": 0.3},
    "muon-softcap": MUON | {"model.logit_cap": 15.0},
}  # fmt: skip
SKIPPED = 10  # steps before the seconds count


def make_spec(options: argparse.Namespace, recipe: str, seed: int, share: float, name: str) -> Any:
    from bessemer.spec.load import load_spec
    from bessemer.spec.quantity import parse_count

    source = {"path": [str(Path(options.text).resolve())], "format": "source"}
    rows = options.batch // options.context
    spec = {
        "name": name, "runs": str(options.folder), "model": options.model, "seed": seed,
        "tokenizer": {"vocab": options.vocab}, "data": {"sources": {"text": source}, "context": options.context,
                                                        "validation": 0.03},
        "budget": {"tokens": round(parse_count(options.tokens) * share), "batch": options.batch,
                   "micro_batch": min(rows, options.micro)},
        "evaluate": {"every": "1000000 steps"}, "checkpoint": {"every": 1_000_000, "keep_best": False},
        "guard": {"copies": "off"}, "parallel": {"device": options.device},
    }  # fmt: skip
    path = Path(options.folder) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    return load_spec(path, [f"{key}={json.dumps(value)}" for key, value in RECIPES[recipe].items()])


def run_one(options: argparse.Namespace, recipe: str, seed: int, share: float, name: str) -> dict[str, Any]:
    from bessemer.run.directory import Run
    from bessemer.session.session import Session, run_folder

    spec = make_spec(options, recipe, seed, share, name)
    outcome = Session(spec).train()
    run = Run.existing(run_folder(spec))
    shutil.rmtree(run.checkpoints)
    records, validations = list(run.metrics()), list(run.validations())
    counted = [record["step_s"] for record in records[SKIPPED:]]
    norms = [record["grad_norm"] for record in records]
    calm = [norms[i] / statistics.median(norms[max(0, i - 50) : i]) for i in range(SKIPPED, min(200, len(norms)))]
    plan = {item["key"]: item["value"] for item in json.loads((run.folder / "plan.json").read_text())["decisions"]}
    return {
        "recipe": recipe, "seed": seed, "share": share, "outcome": outcome.kind, "steps": len(records),
        "tokens": records[-1]["tokens"], "validation_loss": round(validations[-1]["loss"], 5),
        "train_loss": round(statistics.mean(record["loss"] for record in records[-10:]), 5),
        "seconds": round(sum(counted) * len(records) / len(counted), 2),
        "tokens_per_s": round(statistics.median(record["tokens_per_s"] for record in records[SKIPPED:])),
        "vetoes": sum(record["veto"] is not None for record in records),
        "largest_norm_over_median": round(max(calm, default=0.0), 2),
        "lr": plan.get("optimizer.lr"),
        "losses": [round(record["loss"], 4) for record in records[:: len(records) // 50 or 1]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=[])
    parser.add_argument("--recipes-half", nargs="*", choices=RECIPES, default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="125M")
    parser.add_argument("--tokens", default="40M")
    parser.add_argument("--batch", type=int, default=131_072)
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab", default="16K")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--folder", default="runs/time-to-loss")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which no further run starts")
    parser.add_argument("--commit", default="")
    parser.add_argument(
        "--out", type=Path, default=Path(f"benchmarks/results/{time.strftime('%Y-%m-%d')}-gpu-time-to-loss.json")
    )
    parser.add_argument("--only", nargs=4, metavar=("RECIPE", "SEED", "SHARE", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        recipe, seed, share, name = options.only
        result = run_one(options, recipe, int(seed), float(share), name)
        (Path(options.folder) / f"{name}.json").write_text(json.dumps(result))
        return
    import torch

    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data

    began = time.monotonic()
    prepare_data(make_spec(options, "adamw", 0, 1.0, "data"), Plan())
    print(f"prepared after {time.monotonic() - began:.0f} s", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {"date": time.strftime("%Y-%m-%d"), "command": ["python", *sys.argv], "commit": options.commit,
              "device": device, "torch": torch.__version__, "runs": []}  # fmt: skip
    shares = ((1.0, options.recipes), (0.5, options.recipes_half))
    wanted = [(name, seed, share) for seed in options.seeds for share, names in shares for name in names]
    active: list[tuple[str, subprocess.Popen[bytes]]] = []
    while wanted or active:
        while wanted and len(active) < options.at_once and time.monotonic() - began < options.limit:
            recipe, seed, share = wanted.pop(0)
            name = f"{recipe}-{seed}-{share:g}-{time.time_ns() // 1_000_000}"
            only = ["--only", recipe, str(seed), str(share), name]
            log = (Path(options.folder) / f"{name}.log").open("wb")
            active.append((name, subprocess.Popen([sys.executable, *sys.argv, *only], stdout=log, stderr=log)))
        if not active:
            print("not started:", *wanted, flush=True)
            break
        time.sleep(0.5)
        for name, process in [pair for pair in active if pair[1].poll() is not None]:
            active.remove((name, process))
            answer = Path(options.folder) / f"{name}.json"
            if not answer.exists():
                tail = (Path(options.folder) / f"{name}.log").read_text(errors="replace")[-600:]
                print(f"{name} failed:\n{tail}", flush=True)
                continue
            found = json.loads(answer.read_text())
            report["runs"].append(found)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(
                f"{found['recipe']:20} seed {found['seed']} {found['tokens']:,} tokens: "
                f"{found['validation_loss']:.4f}, {found['seconds']:.1f} s, {found['tokens_per_s']:,} tokens/s, norm "
                f"x{found['largest_norm_over_median']}, lr {found['lr']}, {found['outcome']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
