"""Decides the data mixtures of a run: `mix: auto` shares by domain, and epoch caps, which become phases.

All arithmetic is exact. Phases that a cap depends on consist of whole blocks, so their consumption is known without
dealing a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.spec.mixture import LLAMA_3, Mixture, apportion, domain_of, pool_domain, quantise, target_shares
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec

if TYPE_CHECKING:
    from bessemer.spec.data import Domain

_SHOWN_PHASES = 12  # epoch caps can make many
AUTO_EPOCHS = 4.0  # "negligible changes to loss compared to having unique data" up to here
Key = TypeVar("Key")
MUENNIGHOFF = "Muennighoff et al. 2023, scaling data-constrained models"


@dataclass(frozen=True)
class SourceSize:
    """Counted size of a source: training tokens, sequences and documents."""

    tokens: int
    sequences: int
    formats: tuple[str, ...] = ()
    documents: int = 0  # 0: not counted
    bytes_per_token: float = 0.0  # of an estimate; 0: counted


def sources_used(spec: RunSpec) -> list[str]:
    """Sources that the run reads in some phase."""
    data = spec.data
    later = {name for phase in data.phases for name, weight in phase.weights.items() if weight > 0}
    return [name for name, source in data.sources.items() if source.weight > 0 or name in later]


def decide_mixtures(
    spec: RunSpec, context: int, sources: Mapping[str, SourceSize], budget_tokens: int, plan: Plan,
    previous: Plan | None = None,
) -> tuple[tuple[int, Mixture], ...]:  # fmt: skip
    """Mixtures by start position: integer counts per block that approximate the weights. Epoch caps become phases."""
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
                f"data.phases.{i}.start: {phase.start:,} tokens are in the same sequence of {context} as the start of "
                f"the previous mixture: write at least {least}"
            )
        phases.append((start, {name: weight for name, weight in phase.weights.items() if weight > 0}))
    used = {name for _, weights in phases for name in weights}
    caps = {name: cap for name in used if (cap := data.sources[name].max_epochs) is not None}
    sequences = {name: size.sequences for name, size in sources.items()}
    total = -(-budget_tokens // context)
    capped = cap_epochs(phases, sequences, caps, total)
    for name, position in capped.spent.items():
        if position < total:
            reason = f"from position {position:,} of {total:,} on the others share its part"
            plan.add(f"data.sources.{name}.max_epochs", caps[name], reason, "asked")
    for start, mixture in capped.phases[:_SHOWN_PHASES]:
        shares = {name: f"{count}/{mixture.block}" for name, count in zip(mixture.names, mixture.counts, strict=True)}
        weights = next(weights for at, weights in reversed(phases) if at <= start)
        total_weight = sum(weights[name] for name in mixture.names)
        worst = max(abs(share * total_weight / weights[name] - 1) for name, share in mixture.shares.items())
        reason = f"sequences per block; shares within {worst:.2%} of the weights asked"
        plan.add(f"data.mixture@{start * context}", shares, reason, "rule")
    return capped.phases


def _auto_weights(
    spec: RunSpec, sources: Mapping[str, SourceSize], budget_tokens: int, plan: Plan, previous: Plan | None
) -> dict[str, float]:
    """Shares by domain. They depend on the budget, so a resumed run keeps its first ones."""
    key = "data.mix"
    previous_shares = plan.keep(key, spec.data.mix, previous)
    if previous_shares is not None:
        return {str(name): float(share) for name, share in previous_shares.items()}
    domains = {}
    for name, source in spec.data.sources.items():
        domain, why = domain_of(name, source, sources[name].formats)
        domains[name] = SourceDomain(sources[name].tokens, domain, why, source.weight, source.max_epochs)
    shares = auto_shares(domains, budget_tokens)
    for name, share in shares.items():
        plan.add(f"data.sources.{name}.weight", round(share.share, 4), share.reason, share.source)
    weights = {name: share.share for name, share in shares.items()}
    targets = ", ".join(f"{name} {share.share:.1%} (target {share.target:.1%})" for name, share in shares.items())
    plan.add(key, weights, f"by domain: {targets}", LLAMA_3)
    return weights


@dataclass(frozen=True)
class SourceDomain:
    """A source and its domain, before the mixture is decided."""

    tokens: int
    domain: Domain
    why: str = "written in the spec"  # of the domain
    weight: float = 1.0  # multiplies its tokens inside the domain
    max_epochs: float | None = None  # the user's setting


@dataclass(frozen=True)
class Share:
    """A source in an automatic mixture: its `share` of the run's tokens, and the `target` share."""

    domain: Domain
    share: float
    target: float
    epochs: float
    reason: str
    source: str = LLAMA_3


def auto_shares(sources: Mapping[str, SourceDomain], budget_tokens: int) -> dict[str, Share]:
    """Shares by domain for a run of `budget_tokens`, which add up to 1, with their reasons.

    The share of a domain is divided by tokens. No source is read more than `max_epochs` times, by default 4. The
    remainder goes to the rest of the domain, then to the other domains in proportion. If there is still too little
    text, the default limit rises evenly; limits of the user do not.
    """
    used = {name: source for name, source in sources.items() if source.weight > 0 and source.tokens > 0}
    if not used:
        raise UserError("mix: auto finds no source with tokens and a weight above 0: add data or raise a weight")
    default = _default_cap(used, budget_tokens)
    limits = {
        name: source.tokens * (default if source.max_epochs is None else source.max_epochs)
        for name, source in used.items()
    }
    members: dict[Domain, list[str]] = {}
    for name, source in used.items():
        members.setdefault(pool_domain(source.domain), []).append(name)
    targets = target_shares([*members])
    domain_limits = {domain: sum(limits[name] for name in names) for domain, names in members.items()}
    domains = _fill({domain: targets[domain] for domain in members}, domain_limits, budget_tokens)
    shares: dict[str, Share] = {}
    for domain, names in members.items():
        inside = {name: used[name].tokens * used[name].weight for name in names}
        amounts = _fill(inside, {name: limits[name] for name in names}, domains[domain])
        for name in names:
            target = targets[domain] * inside[name] / sum(inside.values())
            shares[name] = _explain_share(used[name], amounts[name], budget_tokens, target, targets[domain])
    return {name: shares[name] for name in used}


def _default_cap(used: Mapping[str, SourceDomain], budget_tokens: int) -> float:
    """4 epochs, or what the budget needs if that is more."""
    bounded = sum(source.tokens * source.max_epochs for source in used.values() if source.max_epochs is not None)
    unbounded = sum(source.tokens for source in used.values() if source.max_epochs is None)
    if unbounded:
        return max(AUTO_EPOCHS, (budget_tokens - bounded) / unbounded)
    if bounded < budget_tokens:
        raise UserError(
            f"data.sources: with their max_epochs all sources together give {human_count(bounded)} tokens and the run "
            f"asks for {human_count(budget_tokens)}: raise max_epochs, add data or lower budget.tokens"
        )
    return AUTO_EPOCHS


def _fill(wanted: Mapping[Key, float], limits: Mapping[Key, float], amount: float) -> dict[Key, float]:
    """`amount` divided in proportion to `wanted`, none above its limit: the others share what one cannot hold."""
    taken: dict[Key, float] = {}
    rest = dict(wanted)
    while rest:
        left, total = amount - math.fsum(taken.values()), math.fsum(rest.values())
        full = [key for key, weight in rest.items() if left * weight / total >= limits[key]]
        if not full:
            return taken | {key: left * weight / total for key, weight in rest.items()}
        for key in full:
            taken[key] = limits[key]
            del rest[key]
    return taken


def _explain_share(
    source: SourceDomain, tokens: float, budget_tokens: int, target: float, domain_target: float
) -> Share:
    share, epochs = tokens / budget_tokens, tokens / source.tokens
    reason = f"{source.domain} ({source.why}): target {domain_target:.1%}"
    if target < 0.9995 * domain_target:
        reason += f", of which {target:.1%} for {human_count(source.tokens)} tokens"
    reason += f"; given {share:.1%}, {epochs:.2f} epochs"
    paper = LLAMA_3
    if abs(share - target) > 0.0005:
        paper = f"{LLAMA_3}; {MUENNIGHOFF}"
        reason += "; includes what others cannot fill" if share > target else "; limited, since repeats teach less"
    if source.max_epochs is None and epochs > AUTO_EPOCHS * 1.0005:
        reason += f", though past {AUTO_EPOCHS:g} repeats teach less and less: there is too little text"
    return Share(source.domain, share, target, epochs, reason, paper)


@dataclass(frozen=True)
class CappedPhases:
    """The phases of a run under epoch caps, as in `TrainPlan.mixtures`.

    They do not depend on the length of the run, so a longer budget continues the same stream. `spent` has the position
    at which a source reaches its cap; at `end` no source is left.
    """

    phases: tuple[tuple[int, Mixture], ...]
    spent: dict[str, int] = field(default_factory=dict)
    end: int | None = None


def cap_epochs(
    phases: Sequence[tuple[int, Mapping[str, float]]], sequences: Mapping[str, int], max_epochs: Mapping[str, float],
    total: int,
) -> CappedPhases:  # fmt: skip
    """Mixtures in which no source exceeds its cap by a single sequence. Once a source is spent, the others share its
    part.

    `phases` are (start position, weights), rising from 0; `sequences` has the size of each source; the run reads
    `total` positions. A source without an entry in `max_epochs` has no limit. Raises UserError if a phase runs out of
    data before `total`.
    """
    left = {name: _allowed_sequences(name, sequences[name], epochs) for name, epochs in max_epochs.items()}
    out: list[tuple[int, Mixture]] = []
    spent: dict[str, int] = {}
    for k, (start, weights) in enumerate(phases):
        stop = phases[k + 1][0] if k + 1 < len(phases) else None
        at: int = start
        while stop is None or at < stop:
            live = {name: weight for name, weight in weights.items() if left.get(name, 1) > 0}
            if not live:
                if at < total:
                    raise _out_of_data(k, at, total, weights, sequences, max_epochs)
                return CappedPhases(tuple(out), spent, at)
            mixture = quantise(live)
            limits = {name: left[name] for name in live if name in left}
            if not limits:
                out.append((at, mixture))
                break
            counts, length = _next_mixture(mixture, limits, None if stop is None else stop - at)
            out.append((at, counts))
            at += length
            for name in limits:
                blocks, dealt = length // counts.block, dict(zip(counts.names, counts.counts, strict=True))
                left[name] -= blocks * dealt.get(name, 0)
                if left[name] == 0:
                    spent[name] = at
    return CappedPhases(tuple(out), spent)


def _next_mixture(mixture: Mixture, limits: Mapping[str, int], room: int | None) -> tuple[Mixture, int]:
    """The next mixture and its number of positions: whole blocks while every limit allows them, then a short block that
    reaches the nearest limit or the end of the phase exactly."""
    counts = dict(zip(mixture.names, mixture.counts, strict=True))
    blocks = min(limit // counts[name] for name, limit in limits.items())
    if room is not None:
        blocks = min(blocks, room // mixture.block)
    if blocks:
        return mixture, blocks * mixture.block
    nearest = min(limits, key=lambda name: (Fraction(limits[name], counts[name]), name))
    # Rounded up, so that the source with the nearest limit reaches it; always shorter than a block.
    length = min(mixture.block, -(-limits[nearest] * mixture.block // counts[nearest]))
    if room is not None:
        length = min(length, room)
    dealt = apportion(counts, length, limits)
    length = sum(dealt.values())
    return Mixture(tuple(dealt), tuple(dealt.values()), length), length


def _allowed_sequences(name: str, sequences: int, epochs: float) -> int:
    allowed = math.floor(Fraction(epochs) * sequences)
    if allowed < 1:
        raise UserError(
            f"data.sources.{name}.max_epochs: {epochs:g} of {sequences:,} sequences is less than one: "
            f"write at least {math.ceil(1e4 / max(1, sequences)) / 1e4:g} or set its weight to 0"
        )
    return allowed


def _out_of_data(
    phase: int, at: int, total: int, weights: Mapping[str, float], sequences: Mapping[str, int],
    max_epochs: Mapping[str, float],
) -> UserError:  # fmt: skip
    listed = ", ".join(f"{name} {max_epochs[name]:g} x {sequences[name]:,}" for name in sorted(weights))
    key = f"data.phases.{phase - 1}" if phase else "data.sources"
    need = max(max_epochs[name] for name in weights) * total / max(1, at)
    return UserError(
        f"{key}: every source is at its max_epochs after {at:,} of {total:,} sequences ({listed}): raise max_epochs "
        f"(about {math.ceil(need * 10) / 10:g} would do), add data, or lower the budget"
    )
