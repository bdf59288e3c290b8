"""The largest model that one GPU trains: layers of a 70B model are added until the card is full.

    python benchmarks/gpu/largest.py              # without and with the optimizer's state in the host's memory
    python benchmarks/gpu/largest.py --ways card

One row of 4,096 tokens, bf16 weights rounded stochastically, 8-bit moments, whole layers computed again, each weight
updated as soon as its gradient is known (which gives up the guard's veto). Rates are of the steps after the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from child import Results, options_for
from fit import LEAN, add_search, largest

CARD = [*LEAN, "memory.update=in_backward"]
WAYS = {"card": CARD, "offload": [*CARD, "memory.offload_optimizer=true"]}


def main() -> None:
    parser = options_for("largest", __doc__)
    parser.add_argument("--model", default="70b", help="whose layers are added")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all of them")
    add_search(parser, [6, 12], "layers")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    results = Results(options)

    def measure(way: str, layers: int) -> dict[str, Any]:
        return results.measure(
            {"way": way, "layers": layers}, system="bessemer", model=options.model, layers=layers, warmup=1,
            steps=options.steps, set=[*WAYS[way], *options.set],
        )  # fmt: skip

    for way in options.ways:
        print(f"{way}: {options.model} with {options.probes} layers, then as many as should fit", flush=True)
        most = largest(partial(measure, way), 1, options)
        best = next((found for found in results.found if (found["way"], found["layers"]) == (way, most)), {})
        results.head[way] = {
            "layers": most,
            **{key: best.get(key) for key in ("parameters", "tokens_per_s", "peak_gib")},
        }
        results.write()
        print(f"{way}: {results.head[way]}", flush=True)


if __name__ == "__main__":
    main()
