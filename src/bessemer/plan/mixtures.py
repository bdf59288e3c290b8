"""Which source gives how much of the stream, and when that changes: the mixtures of a run as decisions of its plan.

From sources to the mixtures of a run: `mix: auto` by domain, and epoch caps that become phases.

Counts in, counts out, in exact arithmetic: what a phase consumes is known here without dealing one sequence, because
every phase that a cap depends on is made of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.spec.mixture import LLAMA_3, Mixture, domain_of, pooled, quantise, share_out, target_shares
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec

_SHOWN_PHASES = 12  # of the mixture; epoch caps can make many


@dataclass(frozen=True)
class SourceSize:
    """A source as it was counted: training tokens, and the sequences they make."""

    tokens: int
    sequences: int
    formats: tuple[str, ...] = ()


def sources_used(spec: RunSpec) -> list[str]:
    """Sources that some part of the run draws from."""
    data = spec.data
    later = {name for phase in data.phases for name, weight in phase.weights.items() if weight > 0}
    return [name for name, source in data.sources.items() if source.weight > 0 or name in later]


def decide_mixtures(
    spec: RunSpec,
    context: int,
    sources: Mapping[str, SourceSize],
    budget_tokens: int,
    plan: Plan,
    previous: Plan | None = None,
) -> tuple[tuple[int, Mixture], ...]:
    """Weights to integer counts per block, with the shares that are really given; epoch caps become phases."""
    data = spec.data
    first = {name: source.weight for name, source in data.sources.items() if source.weight > 0}
    if data.mix == "auto":
        first = _auto_weights(spec, sources, budget_tokens, plan, previous)
    phases = [(0, first)]
    for i, phase in enumerate(data.phases):
        start = phase.start // context
        if start <= phases[-1][0]:
            least = (phases[-1][0] + 1) * context
            raise UserError(
                f"data.phases.{i}.start: {phase.start:,} tokens lie in the same sequence of {context} as the start of "
                f"the mixture before: write at least {least}"
            )
        phases.append((start, {name: weight for name, weight in phase.weights.items() if weight > 0}))
    used = {name for _, weights in phases for name in weights}
    caps = {name: cap for name in used if (cap := data.sources[name].max_epochs) is not None}
    sequences = {name: size.sequences for name, size in sources.items()}
    total = -(-budget_tokens // context)
    dealt = cap_epochs(phases, sequences, caps, total)
    for name, position in dealt.spent.items():
        if position < total:
            reason = f"from position {position:,} of {total:,} on the others share its part"
            plan.add(f"data.sources.{name}.max_epochs", caps[name], reason, "asked")
    for start, mixture in dealt.phases[:_SHOWN_PHASES]:
        shares = {name: f"{count}/{mixture.block}" for name, count in zip(mixture.names, mixture.counts, strict=True)}
        weights = next(weights for at, weights in reversed(phases) if at <= start)
        whole = sum(weights[name] for name in mixture.names)
        worst = max(abs(share * whole / weights[name] - 1) for name, share in mixture.shares.items())
        reason = f"sequences per block; shares within {worst:.2%} of the weights asked"
        plan.add(f"data.mixture@{start * context}", shares, reason, "rule")
    return dealt.phases


def _auto_weights(
    spec: RunSpec, sources: Mapping[str, SourceSize], budget_tokens: int, plan: Plan, previous: Plan | None
) -> dict[str, float]:
    """Shares by domain. A resumed run keeps those it began with: they depend on its budget."""
    key = "data.mix"
    before = plan.keep(key, spec.data.mix, previous)
    if before is not None:
        return {str(name): float(share) for name, share in before.items()}
    found = {}
    for name, source in spec.data.sources.items():
        domain, why = domain_of(name, source, sources[name].formats)
        found[name] = DomainShare(sources[name].tokens, domain, why, source.weight, source.max_epochs)
    shares = auto_shares(found, budget_tokens)
    for name, share in shares.items():
        plan.add(f"data.sources.{name}.weight", round(share.share, 4), share.reason, share.source)
    given = {name: share.share for name, share in shares.items()}
    targets = ", ".join(f"{name} {share.share:.1%} (target {share.target:.1%})" for name, share in shares.items())
    plan.add(key, given, f"by domain: {targets}", LLAMA_3)
    return given


if TYPE_CHECKING:
    from bessemer.spec.data import Domain

AUTO_EPOCHS = 4.0  # "negligible changes to loss compared to having unique data" up to here
Key = TypeVar("Key")
MUENNIGHOFF = "Muennighoff et al. 2023, scaling data-constrained models"


@dataclass(frozen=True)
class DomainShare:
    """What is known of a source when the mixture is decided."""

    tokens: int
    domain: Domain
    why: str = "written in the spec"  # of the domain
    weight: float = 1.0  # under `mix: auto` its tokens count so many times inside the domain
    max_epochs: float | None = None  # what the user wrote


@dataclass(frozen=True)
class Share:
    """A source's place in an automatic mixture. `share` of the run's tokens, where `target` was aimed at."""

    domain: Domain
    share: float
    target: float
    epochs: float
    reason: str
    source: str = LLAMA_3


def auto_shares(sources: Mapping[str, DomainShare], budget_tokens: int) -> dict[str, Share]:
    """Shares by domain for a run of `budget_tokens`, which add up to 1; each with the reason for a Decision.

    A domain's share is divided by tokens. No source is passed over more often than its `max_epochs`, or 4 times where
    the user set none; what that leaves goes to the rest of the domain, then to the other domains in proportion. If
    even so there is too little text, the limit of 4 is raised evenly (the user's own limits are not). The shares
    depend on the budget: a resumed run keeps those of its first plan.
    """
    used = {name: found for name, found in sources.items() if found.weight > 0 and found.tokens > 0}
    if not used:
        raise UserError("mix: auto finds no source with tokens and a weight above 0: add data or raise a weight")
    default = _default_cap(used, budget_tokens)
    room = {
        name: found.tokens * (default if found.max_epochs is None else found.max_epochs) for name, found in used.items()
    }
    members: dict[Domain, list[str]] = {}
    for name, found in used.items():
        members.setdefault(pooled(found.domain), []).append(name)
    targets = target_shares([*members])
    domain_room = {domain: sum(room[name] for name in names) for domain, names in members.items()}
    domains = _fill({domain: targets[domain] for domain in members}, domain_room, budget_tokens)
    shares: dict[str, Share] = {}
    for domain, names in members.items():
        inside = {name: used[name].tokens * used[name].weight for name in names}
        taken = _fill(inside, {name: room[name] for name in names}, domains[domain])
        for name in names:
            target = targets[domain] * inside[name] / sum(inside.values())
            shares[name] = _explained(used[name], domain, taken[name], budget_tokens, target, targets[domain])
    return {name: shares[name] for name in used}


def compare(shares: Mapping[str, Share], read: Mapping[str, int]) -> list[tuple[str, float, float, float]]:
    """(source, target, planned, actual share) for the report; `read` counts sequences, as `StreamOrder.consumed`
    does."""
    total = max(1, sum(read.values()))
    return [(name, share.target, share.share, read.get(name, 0) / total) for name, share in shares.items()]


def _default_cap(used: Mapping[str, DomainShare], budget_tokens: int) -> float:
    """4 epochs, or what the budget needs if that is more."""
    bounded = sum(found.tokens * found.max_epochs for found in used.values() if found.max_epochs is not None)
    unbounded = sum(found.tokens for found in used.values() if found.max_epochs is None)
    if unbounded:
        return max(AUTO_EPOCHS, (budget_tokens - bounded) / unbounded)
    if bounded < budget_tokens:
        raise UserError(
            f"data.sources: with their max_epochs all sources together give {human_count(bounded)} tokens and the run "
            f"asks for {human_count(budget_tokens)}: raise max_epochs, add data or lower budget.tokens"
        )
    return AUTO_EPOCHS


def _fill(wanted: Mapping[Key, float], room: Mapping[Key, float], amount: float) -> dict[Key, float]:
    """`amount` in proportion to `wanted`, none above its room: what one cannot hold the others share."""
    taken: dict[Key, float] = {}
    rest = dict(wanted)
    while rest:
        left, whole = amount - math.fsum(taken.values()), math.fsum(rest.values())
        full = [key for key, weight in rest.items() if left * weight / whole >= room[key]]
        if not full:
            return taken | {key: left * weight / whole for key, weight in rest.items()}
        for key in full:
            taken[key] = room[key]
            del rest[key]
    return taken


def _explained(
    found: DomainShare, domain: Domain, taken: float, budget_tokens: int, target: float, domain_target: float
) -> Share:
    share, epochs = taken / budget_tokens, taken / found.tokens
    reason = f"{found.domain} ({found.why}): target {domain_target:.1%}"
    if target < 0.9995 * domain_target:
        reason += f", of which {target:.1%} for {human_count(found.tokens)} tokens"
    reason += f"; given {share:.1%}, {epochs:.2f} epochs"
    source = LLAMA_3
    if abs(share - target) > 0.0005:
        source = f"{LLAMA_3}; {MUENNIGHOFF}"
        reason += "; what others cannot fill is added" if share > target else "; limited so that repeats still teach"
    if found.max_epochs is None and epochs > AUTO_EPOCHS * 1.0005:
        reason += f", though past {AUTO_EPOCHS:g} repeats teach less and less: there is too little text"
    return Share(found.domain, share, target, epochs, reason, source)


@dataclass(frozen=True)
class Dealt:
    """The phases of a run under epoch caps, as `TrainPlan.mixtures` holds them.

    They do not depend on the length of the run, so that a longer budget continues the same stream; those that start
    past its end are never reached. `spent` tells at which position a source meets its cap; at `end` nothing is left.
    """

    phases: tuple[tuple[int, Mixture], ...]
    spent: dict[str, int] = field(default_factory=dict)
    end: int | None = None


def cap_epochs(
    phases: Sequence[tuple[int, Mapping[str, float]]],
    sequences: Mapping[str, int],
    max_epochs: Mapping[str, float],
    total: int,
) -> Dealt:
    """Mixtures in which no source passes its cap, to the sequence: from where it is spent, the others share its part.

    `phases` are (start position, weights), rising from 0; `sequences` counts each source's; `total` positions will be
    read. A source without an entry in `max_epochs` has no limit; without any entry the phases are just quantised.
    Raises UserError where a phase has nothing left to deal before `total`.
    """
    left = {name: _allowed(name, sequences[name], epochs) for name, epochs in max_epochs.items()}
    out: list[tuple[int, Mixture]] = []
    spent: dict[str, int] = {}
    for k, (start, weights) in enumerate(phases):
        stop = phases[k + 1][0] if k + 1 < len(phases) else None
        at: int = start
        while stop is None or at < stop:
            live = {name: weight for name, weight in weights.items() if left.get(name, 1) > 0}
            if not live:
                if at < total:
                    raise _nothing_left(k, at, total, weights, sequences, max_epochs)
                return Dealt(tuple(out), spent, at)
            mixture = quantise(live)
            limits = {name: left[name] for name in live if name in left}
            if not limits:
                out.append((at, mixture))
                break
            counts, length = _next(mixture, limits, None if stop is None else stop - at)
            out.append((at, counts))
            at += length
            for name in limits:
                blocks, dealt = length // counts.block, dict(zip(counts.names, counts.counts, strict=True))
                left[name] -= blocks * dealt.get(name, 0)
                if left[name] == 0:
                    spent[name] = at
    return Dealt(tuple(out), spent)


def _next(mixture: Mixture, limits: Mapping[str, int], room: int | None) -> tuple[Mixture, int]:
    """How to deal on, and for how many positions: whole blocks while every limit allows, then one short block that
    takes the nearest limit exactly, or fills the phase exactly."""
    counts = dict(zip(mixture.names, mixture.counts, strict=True))
    blocks = min(limit // counts[name] for name, limit in limits.items())
    if room is not None:
        blocks = min(blocks, room // mixture.block)
    if blocks:
        return mixture, blocks * mixture.block
    nearest = min(limits, key=lambda name: (Fraction(limits[name], counts[name]), name))
    # Rounded up, so that the nearest source's quota reaches its limit; shorter than a block in any case.
    length = min(mixture.block, -(-limits[nearest] * mixture.block // counts[nearest]))
    if room is not None:
        length = min(length, room)
    dealt = share_out(counts, length, limits)
    length = sum(dealt.values())
    return Mixture(tuple(dealt), tuple(dealt.values()), length), length


def _allowed(name: str, sequences: int, epochs: float) -> int:
    allowed = math.floor(Fraction(epochs) * sequences)
    if allowed < 1:
        raise UserError(
            f"data.sources.{name}.max_epochs: {epochs:g} of {sequences:,} sequences is less than one: "
            f"write at least {math.ceil(1e4 / max(1, sequences)) / 1e4:g} or set its weight to 0"
        )
    return allowed


def _nothing_left(
    phase: int,
    at: int,
    total: int,
    weights: Mapping[str, float],
    sequences: Mapping[str, int],
    max_epochs: Mapping[str, float],
) -> UserError:
    listed = ", ".join(f"{name} {max_epochs[name]:g} x {sequences[name]:,}" for name in sorted(weights))
    where = f"data.phases.{phase - 1}" if phase else "data.sources"
    need = max(max_epochs[name] for name in weights) * total / max(1, at)
    return UserError(
        f"{where}: every source is at its max_epochs after {at:,} of {total:,} sequences ({listed}): raise max_epochs "
        f"(about {math.ceil(need * 10) / 10:g} would do), add data, or lower the budget"
    )
