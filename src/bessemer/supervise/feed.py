"""From prepared data to the run's batches: rows as the spec packs them, in the order and with the noise it asks for."""

from __future__ import annotations

from bessemer.data.best_fit import BestFitRows, best_fit_rows
from bessemer.data.concat import ConcatRows
from bessemer.data.curriculum import by_score, document_lengths, epoch_note, rank_rows
from bessemer.data.lazy import LazyRows, choose_block, cost_note
from bessemer.data.noise import make_noise
from bessemer.data.on_the_fly import Indexed
from bessemer.data.order import Order, Phase, Ranking
from bessemer.data.own import OwnRows, is_map_style
from bessemer.data.own_stream import ForwardStream
from bessemer.data.pad import PadRows, Trim
from bessemer.data.prepare import Prepared
from bessemer.data.read import list_files
from bessemer.data.rows import Rows, Transform
from bessemer.data.shards import ShardedStore
from bessemer.data.steps import BatchPhase, Segment, Steps
from bessemer.data.stream import BatchStream
from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.plan.mixtures import SourceSize, sources_used
from bessemer.spec.schema import RunSpec
from bessemer.supervise.data import Data, Own
from bessemer.train.evaluate import HeldOut

_ENDLESS = 10**15


def make_rows(spec: RunSpec, data: Data, context: int, plan: Plan, previous: Plan | None = None) -> dict[str, Rows]:
    """The rows of every source that the run draws from. Best-fit packing is computed once and kept with the data; how
    much text a row is on the fly is measured once and kept in the plan."""
    if isinstance(data, Own):
        return {
            name: OwnRows(found, data.tokenizer, context) for name, found in data.train.items() if is_map_style(found)
        }
    if isinstance(data, Indexed):
        return {name: _lazy_rows(data, name, context, plan, previous) for name in sources_used(spec)}
    return {name: _rows(spec, data, name, context) for name in sources_used(spec)}


def _lazy_rows(data: Indexed, name: str, context: int, plan: Plan, previous: Plan | None) -> LazyRows:
    if name not in data.train:
        raise UserError(f"source {name!r}: all its documents are held out; lower data.validation or add some")
    index, key = data.train[name], f"data.sources.{name}.row_bytes"
    block_bytes = plan.keep(key, "auto", previous)
    if block_bytes is None:
        chosen = choose_block(index, data.tokenizer, context)
        block_bytes = plan.add(key, chosen.block_bytes, cost_note(index, chosen, context), "measured")
    return LazyRows(index, data.tokenizer, context, block_bytes)


def held_out_rows(data: Data, rows: dict[str, Rows], context: int) -> dict[str, HeldOut]:
    """What the run is validated on."""
    found = {}
    if isinstance(data, Prepared):
        return {name: HeldOut.of_store(store, context) for name, store in data.validation.items()}
    if isinstance(data, Own):
        for name, dataset in data.validation.items():
            own = OwnRows(dataset, data.tokenizer, context)
            found[name] = HeldOut(own, own.count * context, 1.0)  # bits per byte are then bits per token
        return found
    for name, index in data.validation.items():
        source = rows.get(name)
        if isinstance(source, LazyRows):
            held = LazyRows(index, data.tokenizer, context, source.block_bytes)
            found[name] = HeldOut(held, held.count * context, source.block_bytes / context)
    return found


def _rows(spec: RunSpec, prepared: Prepared, name: str, context: int) -> Rows:
    store = prepared.train[name]
    if spec.data.packing == "best_fit":
        return best_fit_rows(store, context, prepared.folder / f"{name}.best-fit-{context}")
    if spec.data.packing == "pad":
        return PadRows(store, context, spec.data.padding.long, spec.data.padding.side)
    return ConcatRows(store, context)


def sizes(spec: RunSpec, rows: dict[str, Rows], data: Data, context: int) -> dict[str, SourceSize]:
    """What the planner counts with."""
    found = {}
    for name, source in data.train.items():
        count = rows[name].count if name in rows else 0
        tokens = source.tokens if isinstance(source, ShardedStore) else count * context
        if isinstance(data, Own) and name not in rows:  # an iterable tells nothing of its length
            count = tokens = _ENDLESS
        formats: tuple[str, ...] = ()
        if spec.data.mix == "auto" and not isinstance(data, Own):  # they tell what a source holds
            formats = tuple(sorted({entry.format for entry in list_files(spec.data.sources[name])}))
        found[name] = SourceSize(tokens, count, formats)
    return found


def explain(spec: RunSpec, rows: dict[str, Rows], training: TrainPlan, plan: Plan) -> None:
    """What the packing and the curriculum cost, in the plan."""
    packed = [(name, source.index.padding_share) for name, source in rows.items() if isinstance(source, BestFitRows)]
    if packed:
        shares = {name: f"{share:.2%} padding" for name, share in packed}
        plan.add("data.packing", shares, "whole documents where they fit, none truncated", "computed")
    curriculum = spec.data.curriculum
    if curriculum.by != "none":
        read = training.total_steps * training.batch_rows[0][1]
        by = curriculum.label or curriculum.by
        total = sum(source.count for source in rows.values())
        note = epoch_note(total, read, by, curriculum.descending)
        plan.add("data.curriculum", by, note or f"{curriculum.groups} groups of rising {by}", "asked")


def build_stream(
    spec: RunSpec, data: Data, rows: dict[str, Rows], plan: TrainPlan, segments: list[Segment]
) -> BatchStream | ForwardStream:
    """The run's batches."""
    steps = Steps([BatchPhase(start, size) for start, size in plan.batch_rows], segments)
    if isinstance(data, Own) and len(rows) < len(data.train):
        if len(data.train) > 1:
            raise UserError("data.sources: an iterable dataset cannot be mixed with others; make one of them")
        return ForwardStream(next(iter(data.train.values())), data.tokenizer, plan.context, steps)
    used = {name for _, mixture in plan.mixtures for name in mixture.names}
    lengths = {name: source.count for name, source in rows.items() if name in used}
    rankings = {name: found for name in used if (found := _ranking(spec, data, rows[name], name, plan))}
    order = Order([Phase(start, mixture) for start, mixture in plan.mixtures], lengths, spec.seed, rankings)
    return BatchStream(rows, order, plan.context, steps, transforms=_transforms(spec, data))


def _ranking(spec: RunSpec, data: Data, rows: Rows, name: str, plan: TrainPlan) -> Ranking | None:
    if not isinstance(data, Prepared):
        return None
    curriculum, padding = spec.data.curriculum, spec.data.padding
    store, folder = data.train[name], data.folder
    if curriculum.by == "length":
        measure = by_score(rows, document_lengths(store))
        return rank_rows(rows, "length", measure, folder, curriculum.groups, curriculum.descending)
    if curriculum.by == "label":
        assert curriculum.label is not None
        measure = by_score(rows, store.scores)
        return rank_rows(rows, curriculum.label, measure, folder, curriculum.groups, curriculum.descending)
    if isinstance(rows, PadRows) and padding.buckets > 1:
        # Rows of one bucket stay together for a whole step, so that no micro-batch mixes long and short ones.
        run = plan.batch_rows[0][1]
        return rank_rows(rows, "row length", rows.row_lengths, folder, padding.buckets, run=run)
    return None


def _transforms(spec: RunSpec, data: Data) -> list[Transform]:
    """Noise first: it may shorten rows, and what is then padding can be cut off."""
    found: list[Transform] = []
    tokenizer = data.tokenizer
    noise = make_noise(spec.data.noise, spec.seed, tokenizer.vocab_size, tokenizer.special)
    if noise is not None:
        found.append(noise)
    if spec.data.packing == "pad" and spec.data.padding.to == "longest":
        found.append(Trim(spec.data.padding.multiple_of, spec.data.padding.side))
    return found
