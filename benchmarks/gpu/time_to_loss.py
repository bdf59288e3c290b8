"""The loss that recipes reach on the same text, model and hardware, and the seconds that they take for it.

    python benchmarks/gpu/time_to_loss.py --text FOLDER --recipes auto compatible torchtitan adamw-tuned modded
    python benchmarks/gpu/time_to_loss.py --text FOLDER --speeds FIRST.json --seeds 0 1 2 \\
        --timed compatible:0.35:torchtitan compatible:0.6:adamw-tuned compatible:1.05:modded

Each run has a process of its own and its schedule decays to its own end. A recipe is a name of the table below, with
settings behind it if needed: `adamw-tuned+optimizer.lr=2e-3+budget.batch=65536`. `--timed RECIPE:SHARE:BASELINE` gives
a recipe the tokens that it trains on in that share of the baseline's seconds, by the speeds of an earlier file: it then
has to end below the baseline. No crossing points inside longer runs count, since only the end of a decay does.
`--at-once` runs several beside each other: their losses count, their seconds do not. Seconds are those of the steps,
data included, without the first ten steps (compilation), evaluations and saves, times the steps over those counted.
Attention is over whole rows on every side.
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

MODDED = "modded"  # the loop of nanogpt.py, which is no run
BETTER = {"schedule.kind": "linear", "schedule.floor": 0.0}
MUON = BETTER | {
    "optimizer.name": "muon", "optimizer.muon": {"cautious": True}, "model.qk_norm": "head", "model.init": "zero",
    "model.tied": False, "optimizer.lr": 4e-3,
}  # fmt: skip
ADAMW = {"optimizer.name": "adamw", "optimizer.lr": 7.8e-4, "schedule.kind": "cosine", "schedule.floor": 0.1}
# torchtitan 0.2.2 as shipped, with its batch; but the decay is on matrices only, and the embedding is not N(0, 1).
TORCHTITAN = BETTER | {
    "optimizer.name": "adamw", "optimizer.lr": 8e-4, "optimizer.betas": [0.9, 0.95], "schedule.warmup": "200 steps",
    "model.tied": False, "budget.batch": 16_384,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "auto": {},
    "compatible": {"recipe": "compatible"},
    "adamw": ADAMW,
    "torchtitan": TORCHTITAN,
    "adamw-tuned": TORCHTITAN | {"optimizer.lr": 3e-3, "optimizer.betas": [0.9, 0.98], "budget.batch": 65_536},
    MODDED: {"model.tied": False},
    "muon": MUON,
    "muon-plain": ADAMW | {"optimizer.name": "muon"},
    # Ablations: one change each.
    "muon-tied": MUON | {"model.tied": True},
    "muon-gpt-init": MUON | {"model.init": "gpt"},
    "muon-no-qk-norm": MUON | {"model.qk_norm": "none"},
    "muon-cosine": MUON | {"schedule.kind": "cosine", "schedule.floor": 0.1},
    "muon-embedding-x3": MUON | {"optimizer.groups": {"embedding": {"lr_factor": 3.0}}},
    "muon-head-x0.3": MUON | {"optimizer.groups": {"head": {"lr_factor": 0.3}}},
    "muon-decay-0": MUON | {"optimizer.weight_decay": 0.0},
    "muon-decay-0.3": MUON | {"optimizer.weight_decay": 0.3},
    "muon-softcap": MUON | {"model.logit_cap": 15.0},
}  # fmt: skip
SKIPPED = 10  # steps before the seconds count


def settings_of(recipe: str) -> list[str]:
    """`NAME+KEY=VALUE+KEY=VALUE` as `--set` takes it."""
    name, *more = recipe.split("+")
    if name not in RECIPES:
        raise SystemExit(f"{name} is no recipe: write one of {', '.join(RECIPES)}")
    return [*(f"{key}={json.dumps(value)}" for key, value in RECIPES[name].items()), *more]


def make_spec(options: argparse.Namespace, recipe: str, seed: int, share: float, name: str) -> Any:
    from bessemer.spec.load import load_spec
    from bessemer.spec.quantity import parse_count

    source = {"path": [str(Path(options.text).resolve())], "format": "source"}
    spec = {
        "name": name, "runs": str(options.folder), "model": options.model, "seed": seed,
        "tokenizer": {"vocab": options.vocab},
        "data": {"sources": {"text": source}, "context": options.context, "validation": 0.03, "cross_documents": True},
        "budget": {"tokens": round(parse_count(options.tokens) * share), "batch": options.batch},
        "evaluate": {"every": "1000000 steps"}, "checkpoint": {"every": 1_000_000, "keep_best": False},
        "guard": {"copies": "off"}, "parallel": {"device": options.device},
    }  # fmt: skip
    path = Path(options.folder) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    batch = load_spec(path, settings_of(recipe)).budget.batch
    assert isinstance(batch, int)
    micro = min(batch // options.context, options.micro)
    return load_spec(path, [*settings_of(recipe), f"budget.micro_batch={micro}"])


def run_one(options: argparse.Namespace, recipe: str, seed: int, share: float, name: str) -> dict[str, Any]:
    from bessemer.run.directory import Run
    from bessemer.session.session import Session, run_folder

    spec = make_spec(options, recipe, seed, share, name)
    head = {"recipe": recipe, "seed": seed, "share": round(share, 4)}
    if recipe.split("+")[0] == MODDED:
        from nanogpt import train

        return head | train(spec, SKIPPED)
    outcome = Session(spec).train()
    run = Run.existing(run_folder(spec))
    shutil.rmtree(run.checkpoints)
    records, validations = list(run.metrics()), list(run.validations())
    counted = [record["step_s"] for record in records[SKIPPED:]]
    norms = [record["grad_norm"] for record in records]
    calm = [norms[i] / statistics.median(norms[max(0, i - 50) : i]) for i in range(SKIPPED, min(200, len(norms)))]
    plan = {item["key"]: item["value"] for item in json.loads((run.folder / "plan.json").read_text())["decisions"]}
    return head | {
        "outcome": outcome.kind, "steps": len(records),
        "tokens": records[-1]["tokens"], "validation_loss": round(validations[-1]["loss"], 5),
        "train_loss": round(statistics.mean(record["loss"] for record in records[-10:]), 5),
        "seconds": round(sum(counted) * len(records) / len(counted), 2),
        "tokens_per_s": round(statistics.median(record["tokens_per_s"] for record in records[SKIPPED:])),
        "vetoes": sum(record["veto"] is not None for record in records),
        "largest_norm_over_median": round(max(calm, default=0.0), 2),
        "lr": plan.get("optimizer.lr"),
        "losses": [round(record["loss"], 4) for record in records[:: len(records) // 50 or 1]],
    }  # fmt: skip


def timed_share(options: argparse.Namespace, timed: str) -> tuple[str, float]:
    """A recipe, and its tokens as a share of `--tokens`: what it trains on in a share of the baseline's seconds."""
    try:
        recipe, share, baseline = timed.split(":")
        runs = json.loads(options.speeds.read_text())["runs"]
    except (ValueError, AttributeError, OSError):
        raise SystemExit(f"--timed {timed}: write RECIPE:SHARE:BASELINE, and --speeds with a file of both") from None
    try:
        seconds = statistics.median(r["seconds"] / r["tokens"] for r in runs if r["recipe"] == baseline)
        speed = statistics.median(r["tokens"] / r["seconds"] for r in runs if r["recipe"] == recipe)
    except statistics.StatisticsError:
        raise SystemExit(f"--speeds {options.speeds}: has no run of {recipe} or of {baseline}") from None
    return recipe, float(share) * seconds * speed


def verdicts(runs: list[dict[str, Any]], earlier: list[dict[str, Any]], timed: list[str]) -> list[dict[str, Any]]:
    """For each `--timed`: the losses of both sides, and whether the recipe is below by more than chance allows."""
    found = []
    for one in timed:
        recipe, share, baseline = one.split(":")
        ours = [r["validation_loss"] for r in runs if r.get("timed") == one]
        theirs = [r["validation_loss"] for r in (*runs, *earlier) if r["recipe"] == baseline and "timed" not in r]
        if not ours or not theirs:
            continue
        spread = max((statistics.stdev(values) for values in (ours, theirs) if len(values) > 1), default=None)
        error = None if spread is None else 2.6 * spread * (1 / len(ours) + 1 / len(theirs)) ** 0.5
        margin = statistics.fmean(theirs) - statistics.fmean(ours)
        found.append({
            "recipe": recipe, "seconds_share": float(share), "baseline": baseline, "losses": ours,
            "baseline_losses": theirs, "margin": round(margin, 5), "chance": error and round(error, 5),
            "passed": error is not None and margin > error,
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--recipes", nargs="*", default=[])
    parser.add_argument("--timed", nargs="*", default=[], metavar="RECIPE:SHARE:BASELINE")
    parser.add_argument("--speeds", type=Path, help="a file of this script, for --timed")
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
    prepare_data(make_spec(options, "auto", 0, 1.0, "data"), Plan())
    print(f"prepared after {time.monotonic() - began:.0f} s", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {"date": time.strftime("%Y-%m-%d"), "command": ["python", *sys.argv], "commit": options.commit,
              "device": device, "torch": torch.__version__, "runs": []}  # fmt: skip
    earlier = json.loads(options.speeds.read_text())["runs"] if options.speeds else []
    chosen = [(recipe, 1.0, "") for recipe in options.recipes]
    chosen += [(*timed_share(options, timed), timed) for timed in options.timed]
    for recipe, _, _ in chosen:
        settings_of(recipe)
    wanted = [(name, seed, share, timed) for seed in options.seeds for name, share, timed in chosen]
    active: list[tuple[str, str, subprocess.Popen[bytes]]] = []
    while wanted or active:
        while wanted and len(active) < options.at_once and time.monotonic() - began < options.limit:
            recipe, seed, share, timed = wanted.pop(0)
            name = f"{recipe.split('+')[0]}-{seed}-{time.time_ns() // 1_000_000}"
            only = ["--only", recipe, str(seed), str(share), name]
            log = (Path(options.folder) / f"{name}.log").open("wb")
            active.append((name, timed, subprocess.Popen([sys.executable, *sys.argv, *only], stdout=log, stderr=log)))
        if not active:
            print("not started:", *wanted, flush=True)
            break
        time.sleep(0.5)
        for name, timed, process in [entry for entry in active if entry[2].poll() is not None]:
            active.remove((name, timed, process))
            answer = Path(options.folder) / f"{name}.json"
            if not answer.exists():
                tail = (Path(options.folder) / f"{name}.log").read_text(errors="replace")[-600:]
                print(f"{name} failed:\n{tail}", flush=True)
                continue
            found = json.loads(answer.read_text()) | ({"timed": timed} if timed else {})
            report["runs"].append(found)
            report["verdicts"] = verdicts(report["runs"], earlier, options.timed)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(
                f"[{time.monotonic() - began:.0f} s] {timed or found['recipe']:20} seed {found['seed']} "
                f"{found['tokens']:,} tokens: "
                f"{found['validation_loss']:.4f}, {found['seconds']:.1f} s, {found['tokens_per_s']:,} tokens/s, norm "
                f"x{found.get('largest_norm_over_median', '-')}, lr {found['lr']}, {found['outcome']}",
                flush=True,
            )
    for verdict in report.get("verdicts", []):
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
