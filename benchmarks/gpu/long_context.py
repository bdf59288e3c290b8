"""Long rows on one GPU: 1B at 32,768 and 131,072 tokens; with --search the longest row that an 8B model is trained on.

    python benchmarks/gpu/long_context.py
    python benchmarks/gpu/long_context.py --contexts --search

One row a step. The 8B model is trained in full: bf16 weights rounded stochastically, 8-bit moments, whole layers
computed again in the backward pass. Its rate is that of one step, compilation included.
"""

from __future__ import annotations

from child import Results, options_for
from fit import LEAN, add_search, estimated_gib, largest


def main() -> None:
    parser = options_for("long-context", __doc__)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--contexts", nargs="*", type=int, default=[32_768, 131_072])
    parser.add_argument("--activations", nargs="+", default=["full"], help="memory.activations to try: full auto ...")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all of them")
    parser.add_argument("--search", nargs="?", const="8b", metavar="MODEL", help="the longest row of a model (8b)")
    add_search(parser, "tokens")
    parser.add_argument("--unit", type=int, default=8192)
    options = parser.parse_args()
    results = Results(options)
    print(
        f"{options.model} at {options.contexts}, activations {options.activations}; search: {options.search}",
        flush=True,
    )
    for context in options.contexts:
        for kept in options.activations:
            results.measure(
                {"context": context}, system="bessemer", model=options.model, context=context, rows=1, warmup=1,
                steps=4 if context < 100_000 else 2, set=[f"memory.activations={kept}", *options.set],
            )  # fmt: skip
    if options.search:
        settings = [*LEAN, *options.set]
        longest = largest(
            lambda context: results.measure(
                {"context": context}, system="bessemer", model=options.search, context=context, rows=1, warmup=0,
                steps=1, set=settings,
            ),
            lambda context: estimated_gib(options.search, settings, context=context, rows=1), options.unit, options,
        )  # fmt: skip
        results.head["longest"] = {"model": options.search, "context": longest, "settings": settings}
        results.write()
        print(results.head["longest"])


if __name__ == "__main__":
    main()
