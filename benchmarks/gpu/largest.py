"""The largest model that one GPU trains: layers of a 70B model are added until the card is full.

    python benchmarks/gpu/largest.py                     # AdamW and Lion, on the card alone and with the host's help
    python benchmarks/gpu/largest.py --ways card offload-lion

One row of 4,096 tokens, bf16 weights rounded stochastically, 8-bit moments (two of AdamW, one of Lion), whole layers
computed again, each weight updated as soon as its gradient is known (which gives up the guard's veto). With offload
moments and the inputs of layers lie in the host's memory. Rates are of the steps after the first.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from child import Results, options_for
from fit import HOST_GIB, LEAN, add_search, estimated_gib, largest
from models import MODELS

CARD = [*LEAN, "memory.update=in_backward"]
HOST = ["memory.offload_optimizer=true", "memory.offload_activations=true"]
LION = "optimizer.name=lion"
RUN_GIB = 8.0  # of the host's memory, for the process and its data
WAYS = {"card": CARD, "card-lion": [LION, *CARD], "offload": [*CARD, *HOST], "offload-lion": [LION, *CARD, *HOST]}


def _held_by_host(name: str, settings: list[str]) -> int:
    """Layers for which the host has room beside the run itself: their input, and of each weight one or two moments of a
    byte, with a scale for 256 of them."""
    if HOST[0] not in settings:
        return sys.maxsize
    model, moments = MODELS[name], 1 if LION in settings else 2
    one, two = (
        replace(model, layers=layers).parameters * moments * (1 + 4 / 256)
        + 2 * layers * model.context * model.rows * model.width
        for layers in (1, 2)
    )
    return int(((HOST_GIB - RUN_GIB) * 2**30 - one) // (two - one)) + 1


def main() -> None:
    parser = options_for("largest", __doc__)
    parser.add_argument("--model", default="70b", help="whose layers are added")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all of them")
    add_search(parser, "layers")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    results = Results(options)

    def measure(way: str, layers: int) -> dict[str, Any]:
        return results.measure(
            {"way": way, "layers": layers}, system="bessemer", model=options.model, layers=layers, warmup=1,
            steps=options.steps, set=[*WAYS[way], *options.set],
        )  # fmt: skip

    for way in options.ways:
        print(f"{way}: {options.model} with as many layers as should fit", flush=True)
        settings = [*WAYS[way], *options.set]

        def estimate(layers: int, settings: list[str] = settings) -> float:
            return estimated_gib(options.model, settings, layers=layers)

        most = largest(partial(measure, way), estimate, 1, options, _held_by_host(options.model, settings))
        best = next((found for found in results.found if (found["way"], found["layers"]) == (way, most)), {})
        results.head[way] = {
            "layers": most,
            **{key: best.get(key) for key in ("parameters", "tokens_per_s", "peak_gib")},
        }
        results.write()
        print(f"{way}: {results.head[way]}", flush=True)


if __name__ == "__main__":
    main()
