"""Time from the command to the end of the first step, with empty compile caches and with those that the first run left.

    python benchmarks/gpu/first_step.py --model 1b --systems bessemer torchtitan

The tokens are prepared before: what a run finds in its cache from the second start on.
"""

from __future__ import annotations

import tempfile

from child import Results, options_for


def main() -> None:
    parser = options_for("first-step", __doc__)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--systems", nargs="+", default=["bessemer", "torchtitan"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for bessemer")
    options = parser.parse_args()
    results = Results(options)
    print(f"{options.systems} on {options.model}, each with an empty and with a filled cache", flush=True)
    for system in options.systems:
        with tempfile.TemporaryDirectory() as caches:
            names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
            for cache in ("cold", "warm"):
                results.measure(
                    {"cache": cache}, {name: f"{caches}/{name}" for name in names}, system=system, model=options.model,
                    warmup=1, steps=1, set=options.set if system == "bessemer" else [],
                )  # fmt: skip


if __name__ == "__main__":
    main()
