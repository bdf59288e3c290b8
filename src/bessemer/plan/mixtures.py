"""Which source gives how much of the stream, and when that changes: the mixtures of a run as decisions of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.mix import Found, auto_shares, cap_epochs
from bessemer.spec.domains import LLAMA_3, domain_of
from bessemer.spec.mixture import Mixture
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
        found[name] = Found(sources[name].tokens, domain, why, source.weight, source.max_epochs)
    shares = auto_shares(found, budget_tokens)
    for name, share in shares.items():
        plan.add(f"data.sources.{name}.weight", round(share.share, 4), share.reason, share.source)
    given = {name: share.share for name, share in shares.items()}
    targets = ", ".join(f"{name} {share.share:.1%} (target {share.target:.1%})" for name, share in shares.items())
    plan.add(key, given, f"by domain: {targets}", LLAMA_3)
    return given
