"""Objectives from a spec: one for all rows, or several among which a row's source and a hash of its position decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bessemer.data.order import Ints
from bessemer.data.stream import Batch
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.objectives import ObjectiveSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.objectives.denoise import Denoise
from bessemer.train.objectives.in_place import Causal, Infill, Masked, Prefix
from bessemer.train.objectives.rewritten import Objective, Rewritten, row_keys

_PURPOSE = 0x6D6978


@dataclass(frozen=True)
class Mix:
    """One objective for each row, by the shares and sources of its spec. `names` are those of the batches' stream, to
    which their source numbers refer: a stream of validation has its own, so it takes `replace(mix, names=...)`."""

    seed: int
    specs: tuple[ObjectiveSpec, ...]
    objectives: tuple[Objective, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in [name for name in self.names if not any(self._shares(name))]:
            raise UserError(f"no objective is left for source {name!r}: name it in one, or add one without sources")

    def rewrite(self, batch: Batch) -> Rewritten:
        """Where rows that see both sides meet causal ones, all their columns are a prefix."""
        choice, shape = self._choose(batch), batch.tokens.shape
        kinds = (np.int64, np.int64, np.float32, np.int32, np.int64, np.bool_)
        whole = Rewritten(*[np.empty(shape, kind) for kind in kinds])  # type: ignore[arg-type]
        for k in np.unique(choice).tolist():
            at = np.flatnonzero(choice == k)
            part = self.objectives[k].rewrite(Batch(**{name: array[at] for name, array in vars(batch).items()}))
            if part.prefix is None:
                part.prefix = np.full(part.tokens.shape, not part.causal)
            for name in ("tokens", "targets", "weights", "documents", "origin", "prefix"):
                getattr(whole, name)[at] = getattr(part, name)
        return whole

    def _choose(self, batch: Batch) -> Ints:
        """The number of each row's objective; rows that only fill up a batch have that of some source."""
        draws = row_keys(batch, self.seed, _PURPOSE) >> np.uint64(32)
        edges = np.array([np.cumsum(self._shares(name)) for name in self.names])
        edges = np.round(edges / edges[:, -1:] * 2**32)[np.maximum(batch.sources, 0)]
        return np.asarray((draws[:, None] >= edges).sum(axis=1))

    def _shares(self, name: str) -> list[float]:
        named = any(name in spec.sources for spec in self.specs)
        return [spec.share * (name in spec.sources if named else not spec.sources) for spec in self.specs]


def make_objective(
    specs: list[ObjectiveSpec], names: Sequence[str], seed: int, tokenizer: Tokenizer, model: ModelShape, context: int
) -> Objective:
    """What the specs ask for, for that model. `names` are the stream's."""
    encoder, kinds = model.decoder_layers > 0, [spec.kind for spec in specs]
    only = "denoise" if encoder else "" if model.causal else "masked"  # by others it would see what it is to say
    if only and (kinds != [only] or specs[0].sources):
        which = "with an encoder and a decoder" if encoder else "that sees both sides"
        raise UserError(f"a model {which} learns all sources by {only}, not by {', '.join(kinds)}: write kind: {only}")
    for name in sorted({name for spec in specs for name in spec.sources} - set(names)):
        raise UserError(f"an objective names the source {name!r}, but there are only {', '.join(names)}: correct it")
    found = tuple(_make(spec, seed, tokenizer, context, encoder) for spec in specs)
    return Mix(seed, tuple(specs), found, tuple(names)) if len(specs) > 1 or specs[0].sources else found[0]


def _make(spec: ObjectiveSpec, seed: int, tokenizer: Tokenizer, context: int, encoder: bool) -> Objective:
    names, settings, eos_id = spec.special_tokens(context), spec.settings(), tokenizer.eos_id
    for name in [name for name in names if name not in tokenizer.special]:
        where = "add it to tokenizer.special, or name others in the objective's tokens"
        raise UserError(f"{spec.kind} needs the special token {name!r}, which the tokenizer has not: {where}")
    ids = tuple(tokenizer.special[name] for name in names)
    if spec.kind == "masked":
        return Masked(seed, tokenizer.vocab_size, ids[0], tuple(tokenizer.special.values()), **settings)
    if spec.kind == "denoise":
        return Denoise(seed, eos_id, ids, context, settings["rate"], settings["span"], encoder)
    if spec.kind == "infill":
        return Infill(seed, eos_id, (ids[0], ids[1], ids[2]), **settings)
    return Prefix(seed) if spec.kind == "prefix" else Causal()
