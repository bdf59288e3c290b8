"""How often to save: Young's and Daly's optimum between time lost to saves and work lost to failures.

`auto` starts from published failure rates and moves to what the run itself meets: the measured stall of its saves and
its own interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

DAY_S = 86_400.0
# Published clusters report 4 to 6.5 failures in 1,000 node-days; this is the middle, held as one failure's worth.
PRIOR_FAILURES = 1.0
PRIOR_NODE_DAYS = 1000 / 5.25
FIRST_S = 600.0  # until a save was measured
SHORTEST_S = 30.0
LONGEST_S = 1800.0  # machines under desks fail more often than those of the reports
LARGEST_SHARE = 0.005  # of the time, where LONGEST_S would ask for more than the optimum does


def young_daly(stall_s: float, mtti_s: float) -> float:
    """Seconds of work between saves that lose the least time in all: Daly's higher-order form (2006, eq. 37).

    `stall_s` is how long a save holds up the run, `mtti_s` the mean time to an interruption of the whole job.
    """
    if stall_s >= 2 * mtti_s:
        return mtti_s
    ratio = stall_s / (2 * mtti_s)
    return math.sqrt(2 * stall_s * mtti_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def mean_time_to_interruption(nodes: int, failures: int, observed_s: float) -> float:
    """Seconds, for a job of `nodes` nodes that met `failures` in `observed_s`: the prior weighed with what was seen."""
    node_days = PRIOR_NODE_DAYS + nodes * observed_s / DAY_S
    return node_days / (PRIOR_FAILURES + failures) * DAY_S / nodes


def interruptions(events: Iterable[Mapping[str, Any]]) -> int:
    """Starts of a run that ended in a kill or a fault, from its events. The present start is not one of them."""
    count, running = 0, False
    for event in events:
        kind = event.get("kind")
        if kind == "started":
            count += running  # the start before has left no last word
            running = True
        elif kind in ("finished", "interrupted", "failed"):
            count += kind == "failed"
            running = False
    return count


def save_interval(stall_s: float | None, save_s: float, mtti_s: float) -> float:
    """Seconds between saves. `stall_s` is None before the first; `save_s` is how long a save takes in all."""
    if stall_s is None:
        return FIRST_S
    longest = max(LONGEST_S, stall_s / LARGEST_SHARE)
    # A save must be over well before the next begins, however little of it is a stall.
    return max(SHORTEST_S, 2 * save_s, min(longest, young_daly(stall_s, mtti_s)))
