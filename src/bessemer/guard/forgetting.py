"""Detects catastrophic forgetting in continued training: held-out losses of the sources that the spec names, against
the evaluation before step 0.

It reads only the run's validation records. A resume or rollback cuts those and keeps the first one, so the result is
that of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bessemer.guard.alarm import Alarm
from bessemer.run.finding import Finding
from bessemer.run.journal import to_number
from bessemer.spec.guard import ForgetSpec

Record = Mapping[str, Any]
REPLAY = 0.05  # share of the old data below which the mixture is the likely cause (Ibrahim et al. 2024)


@dataclass(frozen=True)
class ForgettingState:
    """State of a source at the last evaluation."""

    source: str
    before: float
    now: float
    in_a_row: int  # consecutive evaluations beyond the limit, up to the last
    since: int  # the first step of these
    remembered: int  # the last step within the limit

    @property
    def rise(self) -> float:
        return self.now / self.before - 1


def source_loss(record: Record, source: str) -> float:
    """The held-out loss of a source; NaN if there is none."""
    loss = to_number(record["per_source"].get(source))
    return float("nan") if loss is None else loss


def since_start(records: Iterable[Record]) -> list[Record]:
    """Evaluations from the last one before step 0 on (a run may start twice); empty if there is none."""
    evaluations = list(records)
    first = max((i for i, record in enumerate(evaluations) if record["step"] == 0), default=len(evaluations))
    return evaluations[first:]


def forgetting_states(spec: ForgetSpec, records: Sequence[Record]) -> list[ForgettingState]:
    """The state of each watched source; `records` are those of `since_start`."""
    states = []
    for source in spec.sources if records else ():
        before, remembered = source_loss(records[0], source), 0
        beyond: list[int] = []
        for record in records:
            if source_loss(record, source) <= (1 + spec.limit) * before:  # not so for NaN
                beyond, remembered = [], record["step"]
            else:
                beyond.append(record["step"])
        since = beyond[0] if beyond else records[-1]["step"]
        states.append(ForgettingState(source, before, source_loss(records[-1], source), len(beyond), since, remembered))
    return states


def check_forgetting(spec: ForgetSpec, records: Sequence[Record], mixture: Mapping[str, float]) -> Alarm | None:
    """An alarm if a source stays beyond the limit too long: once for a note, at every evaluation otherwise."""
    late = [standing for standing in forgetting_states(spec, records) if standing.in_a_row >= spec.patience]
    if not late or (spec.action == "note" and all(standing.in_a_row > spec.patience for standing in late)):
        return None
    worst, now = max(late, key=lambda standing: (standing.rise != standing.rise, standing.rise)), records[-1]
    share = mixture.get(worst.source, 0.0)
    losses = {name: (source_loss(records[0], name), source_loss(now, name)) for name in now["per_source"]}
    others = "".join(f"; {name} {a:.4g} -> {b:.4g}" for name, (a, b) in losses.items() if name != worst.source)
    symptom = (
        f"{worst.source} is being forgotten: held-out loss {worst.before:.4g} -> {worst.now:.4g} ({worst.rise:+.1%}), "
        f"beyond the limit of {spec.limit:.0%} since step {worst.since:,}{others}"
    )
    more = {"rise": worst.rise, "remembered": min(standing.remembered for standing in late)}
    evidence = asdict(worst) | more | {"losses": losses, "mixture": dict(mixture)}
    little = share < REPLAY
    why = "too little to keep it" if little else "so the learning rate may be too high, or the texts conflict"
    wanted = max(min(2 * share, 0.5), REPLAY)
    fix = (
        f"in a new run (start_from) make {worst.source} {wanted:.0%} of the mixture or more (25 to 50 % for a far "
        "domain), lower optimizer.lr, or hold layers back with optimizer.freeze or optimizer.layer_decay"
    )
    cause = f"{share:.0%} of what is read is {worst.source}, {why}"
    return Alarm("forgetting", now["step"], spec.action, Finding(symptom, evidence, cause, 0.9 if little else 0.6, fix))
