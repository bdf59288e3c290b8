"""DeepSpeed's ZeRO 0 to 3 and its offload to the host beside the native run, on one GPU, in one command.

    python benchmarks/gpu/deepspeed_zero.py --model 1b
    DS_ACCELERATOR=cpu python benchmarks/gpu/deepspeed_zero.py --model tiny --precision fp32 --kinds 0 2 3

With one process nothing is divided: what is measured is what the engine costs, the host's read of each verdict, the
second copy of the weights that ZeRO keeps beside fp32 ones, and what offloading saves and takes. The native run is
measured with weights in fp32, as DeepSpeed has them here, and as the planner has it. No run keeps copies of its state.
"""

from __future__ import annotations

from typing import Any

from child import Results, add_length, options_for

KINDS = ("0", "1", "2", "3", "2:cpu", "3:cpu")
TITLES = ["what", "tokens/s", "ratio", "peak GiB", "host GiB", "last loss"]
NATIVE = {"native, as planned": [], "native, fp32 weights": ["memory.weights=fp32"]}


def settings(kind: str) -> list[str]:
    """ "2:cpu" is zero 2 with offload."""
    zero, _, offload = kind.partition(":")
    asked = ["parallel.engine=deepspeed", f"parallel.deepspeed.zero={zero}"]
    return asked + ([f"parallel.deepspeed.offload={offload}"] if offload else [])


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Ratios are to the native run with weights in fp32."""
    rates = {found["asked"]: found["tokens_per_s"] for found in results if "error" not in found}
    beside = rates.get("native, fp32 weights")
    rows = []
    for found in results:
        if "error" in found:
            rows.append([found["asked"], found["error"]])
            continue
        ratio = f"{found['tokens_per_s'] / beside:.3f}" if beside else ""
        memory = [f"{found[key]:.1f}" for key in ("peak_gib", "host_gib")]
        rows.append([found["asked"], f"{found['tokens_per_s']:,}", ratio, *memory, f"{found['losses'][-1]:.4f}"])
    return rows


def main() -> None:
    parser = options_for("deepspeed-zero", __doc__)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="ZERO[:cpu]")
    parser.add_argument("--rows", type=int, help="instead of the model's")
    add_length(parser)
    options = parser.parse_args()
    results = Results(options)
    asked = NATIVE | {f"ZeRO {kind.replace(':', ', offload to ')}": settings(kind) for kind in options.kinds}
    print(f"{len(asked)} measurements of {options.warmup} + {options.steps} steps on {options.model}", flush=True)
    sizes = {"rows": options.rows} if options.rows else {}
    for words, own in asked.items():
        results.measure(
            {"asked": words}, system="bessemer", model=options.model, precision=options.precision, **sizes,
            warmup=options.warmup, steps=options.steps, set=["guard.copies=off", *own],
        )  # fmt: skip
    results.conclude(TITLES, table(results.found))


if __name__ == "__main__":
    main()
