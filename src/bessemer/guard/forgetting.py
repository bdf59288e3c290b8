"""Whether a run that goes on from trained weights unlearns what they knew: held-out losses of the sources that the
spec names, against those of the evaluation before step 0.

Judged from the run's validation records alone: a resume and a rollback cut those and keep the first, so they judge as
an unbroken run does. What is compared is a number that must not rise; a score that must not fall would enter negated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bessemer.guard.detect.alarm import Alarm
from bessemer.run.directory import Finding
from bessemer.run.journal import number
from bessemer.spec.guard import ForgetSpec

Record = Mapping[str, Any]
REPLAY = 0.05  # share of the old data below which the mixture is the likely cause (Ibrahim et al. 2024)


@dataclass(frozen=True)
class ForgettingState:
    """A source at the last evaluation."""

    source: str
    before: float
    now: float
    in_a_row: int  # evaluations beyond the limit up to now
    since: int  # the first step of them
    remembered: int  # the last step at which it was within

    @property
    def rise(self) -> float:
        return self.now / self.before - 1


def loss_of(record: Record, source: str) -> float:
    """The held-out loss of a source; NaN where there is none."""
    found = number(record["per_source"].get(source))
    return float("nan") if found is None else found


def since_start(records: Iterable[Record]) -> list[Record]:
    """Evaluations from the one before step 0 on (the last such: a run may start twice); empty if it is not there."""
    found = list(records)
    first = max((i for i, record in enumerate(found) if record["step"] == 0), default=len(found))
    return found[first:]


def standings(spec: ForgetSpec, records: Sequence[Record]) -> list[ForgettingState]:
    """How each watched source stands; `records` as `since_start` gives them."""
    found = []
    for source in spec.sources if records else ():
        before, remembered = loss_of(records[0], source), 0
        beyond: list[int] = []
        for record in records:
            if loss_of(record, source) <= (1 + spec.limit) * before:  # not so for NaN
                beyond, remembered = [], record["step"]
            else:
                beyond.append(record["step"])
        since = beyond[0] if beyond else records[-1]["step"]
        found.append(ForgettingState(source, before, loss_of(records[-1], source), len(beyond), since, remembered))
    return found


def forgetting(spec: ForgetSpec, records: Sequence[Record], mixture: Mapping[str, float]) -> Alarm | None:
    """An alarm if a source is beyond the limit for too long: a note once, what asks to stop at every evaluation."""
    late = [standing for standing in standings(spec, records) if standing.in_a_row >= spec.patience]
    if not late or (spec.action == "note" and all(standing.in_a_row > spec.patience for standing in late)):
        return None
    worst, now = max(late, key=lambda standing: (standing.rise != standing.rise, standing.rise)), records[-1]
    share = mixture.get(worst.source, 0.0)
    losses = {name: (loss_of(records[0], name), loss_of(now, name)) for name in now["per_source"]}
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
