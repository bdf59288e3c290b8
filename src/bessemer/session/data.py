"""The data of a run: prepared or published stores or the caller's datasets, their rows, and the stream of batches.

Also excludes the documents that trials convicted, in this run or in others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.align.prompts import PromptData
from bessemer.align.rollout_stream import RolloutStream
from bessemer.data.curate.engine import CurationEngine
from bessemer.data.curate.report import format_some
from bessemer.data.prepare import (
    PREPARED,
    Prepared,
    list_sources,
    load_tokenizer,
    open_prepared,
    prepare,
    prepared_folder,
)
from bessemer.data.published import check_fit, mirror, publish, read_manifest
from bessemer.data.read import list_files
from bessemer.data.store.digests import content_digest
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.curriculum import curriculum_note, length_score, measure_by_score, rank_rows
from bessemer.data.stream.exclusions import FILE_NAME, banned_documents, find_offers, read_exclusions
from bessemer.data.stream.groups import GROUP, GroupRows
from bessemer.data.stream.noise import make_noise
from bessemer.data.stream.order import BatchPhase, CurriculumRanking, MixturePhase, Segment, StepPositions, StreamOrder
from bessemer.data.stream.packing import BestFitRows, open_best_fit
from bessemer.data.stream.rows import ConcatRows, PadRows, Rows, Transform, Trim
from bessemer.data.stream.user_dataset import IterableStream, UserDatasetRows, is_map_style
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan, decide_vocab
from bessemer.plan.decision import Plan
from bessemer.plan.mixtures import SourceSize, sources_used
from bessemer.session.rl import held_out_prompts, open_prompts, prompt_rows, rollout_stream
from bessemer.spec.data import SourceSpec, StoreSpec
from bessemer.spec.preference import ANSWER_OBJECTIVES
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.train.evaluate import HeldOutSet
from bessemer.train.job import Job

PYTHON_SOURCE = "python"  # the path of a source whose dataset the caller passes
DATA_FILES = "data_files.json"  # in the run's folder: the files that its last start read
_MOST_FILES = 100_000  # longer listings are not recorded: 100 bytes per file
_SHOWN_FILES = 5


def data_cache(spec: RunSpec) -> Path:
    """The folder of a spec's prepared data; runs in one folder share it."""
    return Path(spec.runs) / ".data"


def prepare_data(
    spec: RunSpec, plan: Plan, progress: Callable[[str], None] | None = None, engine: CurationEngine | None = None
) -> Prepared:
    """The stores of the spec's sources, from the cache or prepared now."""
    if spec.objective in RL_OBJECTIVES:
        raise UserError(f"objective: {spec.objective}: prompts are read when a run starts: there is nothing to prepare")
    for name, source in spec.data.sources.items():
        if not source.path:
            raise UserError(f"data.sources.{name}.path: missing: preparing data needs its files")
    vocab = _vocab(spec, plan)
    return prepare(spec.data, spec.tokenizer, data_cache(spec), vocab, spec.seed, progress, engine, spec.classify)


@dataclass(frozen=True)
class UserData:
    """The caller's datasets by source name; `NAME.validation` is its held-out part."""

    tokenizer: Tokenizer
    train: dict[str, Any]
    validation: dict[str, Any]
    folder: Path


Data = Prepared | UserData | PromptData
Stream = BatchStream | IterableStream | RolloutStream


def open_published(spec: RunSpec) -> Prepared:
    """The data of the spec's `data.store`. Shards are fetched when they are read."""
    assert spec.data.store is not None
    prepared = open_prepared(mirror(spec.data.store, data_cache(spec)))
    check_fit(spec.data, spec.tokenizer, prepared)
    return prepared


def publish_data(
    spec: RunSpec, store: StoreSpec, context: int, progress: Callable[[str], None]
) -> tuple[Prepared, int]:
    """Prepares the spec's data, packs its rows and uploads both; returns the data and its size."""
    prepared = prepare_data(spec, Plan(), progress)
    for name, rows in make_rows(spec, prepared, context).items():
        rank_documents(spec, prepared, rows, name)
    formats = {name: sorted({entry.format for entry in entries}) for name, entries in list_sources(spec.data).items()}
    return prepared, publish(prepared, spec.data, spec.tokenizer, store, formats, progress)


def open_data(
    spec: RunSpec, plan: Plan, progress: Callable[[str], None] | None = None, datasets: Mapping[str, Any] | None = None
) -> Data:
    """The data that a run reads: prepared or published token stores, prompts, or the caller's datasets."""
    if spec.objective in RL_OBJECTIVES:
        return open_prompts(spec, data_cache(spec), datasets or {})
    if datasets or any(_is_python_source(source) for source in spec.data.sources.values()):
        if spec.data.store is not None:
            raise UserError("data.store: cannot be mixed with datasets from Python: remove it, or the datasets")
        return _open_user_data(spec, datasets or {})
    if spec.data.store is not None:
        prepared = open_published(spec)
        tokens = sum(source.tokens for source in prepared.train.values())
        note = f"published data: {tokens:,} tokens, {prepared.settings['validation']:.3g} of the documents held out"
        plan.add("data.store", spec.data.store.url, note, "found")
        return prepared
    return prepare_data(spec, plan, progress)


def _is_python_source(source: SourceSpec) -> bool:
    return source.path == [PYTHON_SOURCE]


def _open_user_data(spec: RunSpec, datasets: Mapping[str, Any]) -> UserData:
    sources = spec.data.sources
    for name, source in sources.items():
        if not _is_python_source(source):
            raise UserError(
                f"data.sources.{name}.path: datasets from Python and files cannot be mixed: write path: {PYTHON_SOURCE}"
            )
        if name not in datasets:
            passed = ", ".join(datasets) or "none"
            raise UserError(
                f"data.sources.{name}: its path is {PYTHON_SOURCE}: call "
                f"bessemer.train_run(spec, datasets={{{name!r}: ...}}) (passed: {passed})"
            )
    unknown = [name for name in datasets if name.removesuffix(".validation") not in sources]
    if unknown:
        raise UserError(f"dataset {unknown[0]!r}: the spec has no such source; it has {', '.join(sources)}")
    tokenizer = load_tokenizer(spec.data, spec.tokenizer)
    if tokenizer is None:
        raise UserError("tokenizer.path: datasets from Python need a tokenizer: give its file")
    train = {name: datasets[name] for name in sources}
    held_out = {name: data for name in sources if (data := datasets.get(f"{name}.validation")) is not None}
    return UserData(tokenizer, train, held_out, data_cache(spec))


def list_data_files(spec: RunSpec) -> dict[str, list[Any]]:
    """The files of the spec's sources with what tells their contents apart; empty for a caller's own datasets."""
    if spec.data.store is not None:
        return {f"{spec.data.store.url.rstrip('/')}/{PREPARED}": [content_digest(read_manifest(spec.data.store))]}
    if any(_is_python_source(source) for source in spec.data.sources.values()):
        return {}
    return {entry.name: entry.identity[1:] for entries in list_sources(spec.data).values() for entry in entries}


def record_data_files(spec: RunSpec) -> str:
    """The content of DATA_FILES."""
    files = list_data_files(spec)
    return json.dumps(files if len(files) <= _MOST_FILES else {}, indent=0)


def describe_file_changes(run_folder: Path, spec: RunSpec) -> str:
    """The data files that are missing, new or changed since the run's last start; empty if none is, or if the run has
    no record of its files."""
    try:
        recorded = json.loads((run_folder / DATA_FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # runs of earlier versions have none, and it only serves messages
        return ""
    if not recorded or not isinstance(recorded, dict):
        return ""
    current = list_data_files(spec)
    if spec.data.store is not None and not recorded.keys() & current.keys():  # that start read another place
        return ""
    groups = {
        "missing": [name for name in recorded if name not in current],
        "new": [name for name in current if name not in recorded],
        "changed": [name for name in recorded if name in current and recorded[name] != current[name]],
    }
    return "; ".join(
        f"{kind}: {format_some(names, len(names), _SHOWN_FILES)}" for kind, names in groups.items() if names
    )


def prepared_folder_of(spec: RunSpec, plan: Plan) -> Path:
    """Where the prepared data of a spec is, or would be."""
    if spec.data.store is not None:
        return open_published(spec).folder
    folder = prepared_folder(spec.data, spec.tokenizer, data_cache(spec), _vocab(spec, plan), spec.seed, spec.classify)
    if not (folder / "prepared.json").exists():
        raise UserError(f"{spec.name}: its data is not prepared yet; run `bessemer data prepare` on the same spec")
    return folder


def _vocab(spec: RunSpec, plan: Plan) -> int:
    if spec.tokenizer.path is not None:
        return 0
    sizes = [entry.size_bytes for entries in list_sources(spec.data).values() for entry in entries]
    return decide_vocab(spec, sum(sizes), plan)


_ENDLESS = 10**15


def make_rows(spec: RunSpec, data: Data, context: int) -> dict[str, Rows]:
    """The rows of every source that the run draws from. Best-fit packing is computed once and kept with the data."""
    if isinstance(data, PromptData):
        return prompt_rows(spec, data, context)
    if isinstance(data, UserData):
        return {
            name: UserDatasetRows(dataset, data.tokenizer, context, spec.classify)
            for name, dataset in data.train.items()
            if is_map_style(dataset)
        }
    return {name: _rows(spec, data, name, context) for name in sources_used(spec)}


def held_out_rows(spec: RunSpec, data: Data, context: int) -> dict[str, HeldOutSet]:
    """What the run is validated on. Labels are of whole documents: each has its own row."""
    if isinstance(data, PromptData):
        return held_out_prompts(spec, data, context)
    if isinstance(data, Prepared):
        if spec.objective == "classify":
            return {
                name: HeldOutSet(PadRows(store, context, "truncate"), store.documents * context, 1.0)
                for name, store in data.validation.items()
            }
        if spec.objective == "sft" and not data.url:  # whole conversations, as they are trained
            packed = {
                name: open_best_fit(store, context, data.folder / f"{name}.validation.best-fit-{context}")
                for name, store in data.validation.items()
            }
            return {
                name: HeldOutSet(rows, rows.count * context, data.validation[name].text_bytes / rows.store.tokens)
                for name, rows in packed.items()
            }
        return {
            name: HeldOutSet(rows, rows.count * context, 1.0, mismatched=_mismatched(spec))
            if (rows := _group_rows(spec, data, store, context)) is not None
            else HeldOutSet.of_store(store, context)
            for name, store in data.validation.items()
        }
    held_out = {}
    for name, dataset in data.validation.items():
        rows = UserDatasetRows(dataset, data.tokenizer, context, spec.classify)
        held_out[name] = HeldOutSet(rows, rows.count * context, 1.0)  # bits per byte are then bits per token
    return held_out


def _group_rows(spec: RunSpec, data: Prepared, store: TokenStore, context: int) -> GroupRows | None:
    """The rows of a store with pairs or labelled answers; None for others."""
    if spec.objective == "kto":
        return GroupRows(store, context, single=True)
    if GROUP not in store.fields:
        return None
    share = spec.objective == "dpo" and spec.dpo.share_prefix is True
    return GroupRows(store, context, share, pack=spec.objective == "dpo" and spec.data.packing == "best_fit")


def _mismatched(spec: RunSpec) -> bool:
    return spec.objective == "kto" and spec.kto.needs_mismatched


def _rows(spec: RunSpec, prepared: Prepared, name: str, context: int) -> Rows:
    store = prepared.train[name]
    if store.masked and store.tokens and not store.targets_before(np.array([store.tokens]))[0]:
        raise UserError(
            f"source {name!r}: nothing is learned: no turn of its conversations has the role assistant, or all have "
            "weight 0; correct the roles (user, assistant, system, tool)"
        )
    if (groups := _group_rows(spec, prepared, store, context)) is not None:
        return groups
    if spec.data.packing == "best_fit":
        index = f"{name}.best-fit-{context}"
        if prepared.url and not (prepared.folder / f"{index}.json").exists():
            packed = sorted(path.stem.rpartition("-")[2] for path in prepared.folder.glob(f"{name}.best-fit-*.json"))
            raise UserError(
                f"data.context: {context}: the published store {prepared.url} has no best_fit packing of {name!r} for "
                f"this context (it has {', '.join(packed) or 'none'}): publish it with this spec, or change the context"
            )
        if spec.objective == "classify":
            check_whole_documents(store, context)
        return open_best_fit(store, context, prepared.folder / index)
    if spec.data.packing == "pad":
        return PadRows(store, context, spec.data.padding.long, spec.data.padding.side)
    return ConcatRows(store, context)


def check_whole_documents(store: TokenStore, context: int) -> None:
    """Refuses documents that packing would divide: their labels are of the whole."""
    for first in range(0, store.documents, 1 << 20):
        lengths = np.diff(store.edges(first, min(first + (1 << 20), store.documents)))
        if (lengths > context).any():
            origin = store.origin_of_document(first + int(np.argmax(lengths > context)))
            raise UserError(
                f"{origin.file}:{origin.row}: its {origin.stop - origin.start} tokens exceed data.context {context}: "
                "raise it, or write packing: pad, which truncates"
            )


def sizes(spec: RunSpec, rows: dict[str, Rows], data: Data, context: int) -> dict[str, SourceSize]:
    """What the planner counts with."""
    sizes_by_source = {}
    for name, source in data.train.items():
        count = rows[name].count if name in rows else 0
        padded = (spec.objective, spec.data.packing) == ("classify", "pad") or spec.objective in (
            "sft",
            *ANSWER_OBJECTIVES,
        )
        tokens = source.tokens if isinstance(source, TokenStore) and not padded else count * context
        if isinstance(data, PromptData):
            tokens *= spec.rl.samples * spec.rl.epochs
        if isinstance(data, UserData) and name not in rows:  # an iterable tells nothing of its length
            count = tokens = _ENDLESS
        formats: tuple[str, ...] = ()
        if spec.data.mix == "auto" and isinstance(data, Prepared):  # they tell what a source holds
            entries = [] if data.url else list_files(spec.data.sources[name])
            formats = tuple(sorted({entry.format for entry in entries} or data.settings["formats"][name]))
        documents = source.documents if isinstance(source, TokenStore) and name in rows else 0
        sizes_by_source[name] = SourceSize(tokens, count, formats, documents)
    return sizes_by_source


def log_packing(spec: RunSpec, rows: dict[str, Rows], training: TrainPlan, plan: Plan) -> None:
    """Adds the cost of packing and curriculum to the plan."""
    packed = [(name, source.index.padding_share) for name, source in rows.items() if isinstance(source, BestFitRows)]
    if groups := {
        name: f"{1 - source.used:.1%} padding" for name, source in rows.items() if isinstance(source, GroupRows)
    }:
        held = "as many pairs as fit" if spec.data.packing == "best_fit" else "one pair or answer in a row"
        plan.add("data.packing", groups, held, "computed")
    if packed:
        shares = {name: f"{share:.2%} padding" for name, share in packed}
        plan.add("data.packing", shares, "whole documents where they fit, none truncated", "computed")
    curriculum = spec.data.curriculum
    if curriculum.by != "none":
        read = training.total_steps * training.batch_rows[0][1]
        by = curriculum.label or curriculum.by
        total = sum(source.count for source in rows.values())
        note = curriculum_note(total, read, by, curriculum.descending)
        plan.add("data.curriculum", by, note or f"{curriculum.groups} groups of rising {by}", "asked")


def build_stream(spec: RunSpec, data: Data, rows: dict[str, Rows], plan: TrainPlan, segments: list[Segment]) -> Stream:
    """The run's batches."""
    if isinstance(data, PromptData):
        folder = Path(spec.runs) / spec.name
        return rollout_stream(spec, data.tokenizer.vocab_size, rows, plan, segments, folder)
    steps = StepPositions([BatchPhase(start, size) for start, size in plan.batch_rows], segments)
    if isinstance(data, UserData) and len(rows) < len(data.train):
        if len(data.train) > 1:
            raise UserError("data.sources: an iterable dataset cannot be mixed with others; make one of them")
        if spec.objective == "classify":
            raise UserError("data.sources: an iterable dataset has no labels; give one with __len__ and __getitem__")
        return IterableStream(next(iter(data.train.values())), data.tokenizer, plan.context, steps)
    used = {name for _, mixture in plan.mixtures for name in mixture.names}
    lengths = {name: source.count for name, source in rows.items() if name in used}
    rankings = {name: ranking for name in used if (ranking := _ranking(spec, data, rows[name], name, plan))}
    order = StreamOrder(
        [MixturePhase(start, mixture) for start, mixture in plan.mixtures], lengths, spec.seed, rankings
    )
    mismatch = 0 if _mismatched(spec) else None
    if mismatch == 0 and any(size < 2 for _, size in plan.batch_rows):
        raise UserError("budget.batch: kto compares a prompt with the answers of others: write two rows a step or more")
    return BatchStream(rows, order, plan.context, steps, transforms=_transforms(spec, data), mismatch=mismatch)


def rank_documents(spec: RunSpec, data: Prepared, rows: Rows, name: str) -> CurriculumRanking | None:
    """The order that the spec's curriculum gives to a source's rows; computed once and kept with the data."""
    curriculum, store, folder = spec.data.curriculum, data.train[name], data.folder
    if curriculum.by == "length":
        measure = measure_by_score(rows, length_score(store))
        return rank_rows(rows, "length", measure, folder, curriculum.groups, curriculum.descending)
    if curriculum.by == "label":
        assert curriculum.label is not None
        measure = measure_by_score(rows, store.scores)
        return rank_rows(rows, curriculum.label, measure, folder, curriculum.groups, curriculum.descending)
    return None


def _ranking(spec: RunSpec, data: Data, rows: Rows, name: str, plan: TrainPlan) -> CurriculumRanking | None:
    if not isinstance(data, Prepared):
        return None
    buckets = spec.data.padding.buckets
    if spec.data.curriculum.by == "none" and isinstance(rows, PadRows) and buckets > 1:
        # Rows of one bucket stay together for a whole step, so that no micro-batch mixes long and short ones.
        run = plan.batch_rows[0][1]
        return rank_rows(rows, "row length", rows.row_lengths, data.folder, buckets, run=run)
    return rank_documents(spec, data, rows, name)


def _transforms(spec: RunSpec, data: Data) -> list[Transform]:
    """Noise comes first: it may shorten rows, and the padding is trimmed afterwards."""
    transforms: list[Transform] = []
    tokenizer = data.tokenizer
    noise = make_noise(spec.data.noise, spec.seed, tokenizer.vocab_size, tokenizer.special)
    if noise is not None:
        transforms.append(noise)
    if spec.data.packing == "pad" and spec.data.padding.to == "longest":
        transforms.append(Trim(spec.data.padding.multiple_of, spec.data.padding.side))
    return transforms


def exclude_documents(job: Job) -> None:
    """Bans the documents of the spec's exclusion lists: from the start in a new run, from this step on in a resumed
    one, so that past steps still replay. Entries that no longer fit their file are reported and ignored."""
    if not job.spec.data.exclude or not isinstance(job.data.stream, BatchStream):
        return
    entries = [entry for path in job.spec.data.exclude for entry in read_exclusions(path)]
    excluded, stale = banned_documents(entries, job.data.stream.sources)
    position = job.data.stream.steps.position(job.start_step)
    new = excluded - set(job.data.stream.banned)
    if new:
        job.data.stream = job.data.stream.replace(banned={**job.data.stream.banned, **dict.fromkeys(new, position)})
    lists = ", ".join(job.spec.data.exclude)
    job.recorder.event("excluded", documents=len(excluded), reason=f"{len(excluded)} documents are excluded: {lists}")
    for line in stale:
        job.recorder.event("exclusion_stale", reason=line)


def report_other_exclusions(spec: RunSpec, job: Job) -> None:
    """Reports exclusion lists of other runs that name documents of this run's files."""
    if spec.data.store is not None or any(_is_python_source(source) for source in spec.data.sources.values()):
        return
    files = {entry.name for entries in list_sources(spec.data).values() for entry in entries}
    for offer in find_offers(files, spec.runs, [*spec.data.exclude, job.recorder.run.folder / FILE_NAME]):
        job.recorder.event("exclusions_offered", reason=offer.line)
