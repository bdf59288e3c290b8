"""What objectives with answers (`dpo`, `kto`, `reward`) add to a start: the checks of the answers, for the first two
the reference, which is the model that the run starts from, and for dpo whether the prompt of a pair is shared."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np

from bessemer.align.answers import REFERENCE
from bessemer.data.agreement import Agreement, measure_agreement
from bessemer.data.chat_checks import Mistake
from bessemer.data.chat_rows import StoreReader, sample_numbers
from bessemer.data.pair_checks import check_agreement, check_labels, check_lengths, check_pairs, make_pair
from bessemer.data.prepare import Prepared
from bessemer.data.read import Document, divide_source, list_files, read_part
from bessemer.data.read.answers import ANNOTATORS, CHOSEN, MARGIN
from bessemer.data.read.chat_formats import recognise_pairs
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.groups import GROUP, measure_groups
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.mixtures import sources_used
from bessemer.session.data import Data
from bessemer.spec.data import NoiseSpec, SourceSpec
from bessemer.spec.model import BASE, OtherModelSpec
from bessemer.spec.objective_checks import lacking_columns
from bessemer.spec.preference import ANSWER_OBJECTIVES, PREFERENCES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

_READ = 1 << 20  # labels that are read together
_VOTED_ROWS = 10_000  # rows whose votes are read


def with_preference_defaults(spec: RunSpec) -> RunSpec:
    """The spec with the columns of its pairs and the reference, where it is silent. Reads first rows of each source."""
    if spec.objective not in ANSWER_OBJECTIVES:
        return spec
    sources, more = {}, (MARGIN,) if spec.objective == "reward" else ()
    for name, source in spec.data.sources.items():
        sources[name] = source if not source.path or source.path == ["python"] else recognise_pairs(source, more)
        if source.path != ["python"] and (problem := lacking_columns(spec.objective, sources[name])):
            raise UserError(f"data.sources.{name}: {problem}")
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": sources})})
    return with_reference(spec) if spec.objective in PREFERENCES else spec


def with_reference(spec: RunSpec) -> RunSpec:
    """The spec with `models.reference`, unless it names one or the loss needs none, and whether its log-probabilities
    are stored."""
    if spec.objective == "dpo":
        if not spec.dpo.needs_reference:
            return spec
        spec = spec.model_copy(update={"dpo": spec.dpo.model_copy(update={"reference": _reference_kind(spec)})})
    if REFERENCE in spec.models:
        return spec
    stored = spec.objective == "dpo" and spec.dpo.reference == "stored"
    path = BASE if spec.adapter and not stored else spec.model.hf or spec.start_from
    if path is None:
        raise UserError(
            f"objective: {spec.objective} compares with the model that training starts from: write model: {{hf: "
            "FOLDER} or start_from"
        )
    return spec.model_copy(update={"models": {**spec.models, REFERENCE: OtherModelSpec(path=path)}})


def _reference_kind(spec: RunSpec) -> Literal["stored", "live"]:
    files = spec.data.store is None and all(source.path != ["python"] for source in spec.data.sources.values())
    own = spec.models.get(REFERENCE)
    base = own is not None and own.path == BASE
    if spec.dpo.reference == "stored" and (base or not files):
        why = "models.reference is the run's own model" if base else "the data is not prepared from files"
        raise UserError(f"dpo.reference: cannot be stored: {why}: write live")
    if spec.dpo.reference == "stored" and spec.adapter and spec.adapter.base == "nf4":
        raise UserError("dpo.reference: the weights of the base are in NF4, the reference's are not: write live")
    if spec.dpo.reference != "auto":
        return spec.dpo.reference
    plain = files and spec.adapter is None and not base and spec.data.noise == NoiseSpec()
    return "stored" if plain else "live"


def log_preferences(spec: RunSpec, plan: Plan) -> None:
    """Adds the loss and the reference to the plan."""
    if spec.objective == "reward":
        reason = "scores at the last token of an answer; a step's loss is the mean over its pairs"
        plan.add("reward.heads", spec.reward.heads, reason, "asked")
    if spec.objective not in PREFERENCES:
        return
    section = spec.dpo if spec.objective == "dpo" else spec.kto
    beta = spec.dpo.beta_value if spec.objective == "dpo" else spec.kto.beta
    plan.add(f"{spec.objective}.loss", section.loss, f"beta {beta:g}", "asked")
    if (reference := spec.models.get(REFERENCE)) and spec.dpo.reference != "stored":
        reason = "the run's model with its adapter off" if reference.path == BASE else "frozen"
        plan.add(f"models.{REFERENCE}", reference.path, reason, "rule", "established")


def decide_sharing(spec: RunSpec, shape: ModelShape, data: Data, plan: Plan) -> RunSpec:
    """The spec with `dpo.share_prefix` decided. Positions of a shared prompt are not columns, so attention must know
    them by their numbers alone: rotary or learned positions, no windows, and every layer attends."""
    if spec.objective != "dpo":
        return spec
    key, value = "dpo.share_prefix", spec.dpo.share_prefix
    reason = unshareable(shape, data) or ("pipeline stages" if spec.parallel.pp > 1 else "")
    if value is True and reason:
        raise UserError(f"{key}: not possible with {reason}: write auto or false")
    share = value is True or (value == "auto" and not reason and spec.data.noise == NoiseSpec())
    why = (
        "the prompt of a pair is computed once" if share else f"each answer has its own prompt{reason and ': '}{reason}"
    )
    plan.add(key, share, why, "rule" if value == "auto" else "asked")
    return spec.model_copy(update={"dpo": spec.dpo.model_copy(update={"share_prefix": share})})


def unshareable(shape: ModelShape, data: Data) -> str:
    """Why pairs cannot share their prompts; empty if they can."""
    reasons = {
        "a model that transformers runs": bool(shape.wrapped),
        f"{shape.positions} positions": shape.positions in ("alibi", "relative"),
        "attention windows": any(shape.windows) or shape.blocks[0] > 0 or shape.global_tokens > 0,
        "Mamba layers": "mamba" in shape.mixers,
        "experts, whose balance counts tokens": shape.moe is not None,
        "data of another kind than prepared files": not isinstance(data, Prepared) or bool(data.url),
    }
    return next((reason for reason, true in reasons.items() if true), "")


def check_pair_sources(spec: RunSpec, data: Data, context: int, lengths: bool = False) -> dict[str, list[Mistake]]:
    """The mistakes in the pairs or labelled answers of each source. A store holds the chosen answer of a pair and then
    the rejected one. With `lengths` those beyond the context too, which a run refuses when it makes its rows."""
    mistakes = {}
    for name in sources_used(spec):
        store = data.train[name]
        if not isinstance(store, TokenStore) or CHOSEN not in store.fields:
            continue
        some = check_agreement(agreement) if (agreement := source_agreement(spec.data.sources[name])) else []
        some += _check_lengths(spec, store, context) if lengths else []
        some += _check_store(spec, store, data.tokenizer)
        if listed := [one for one in some if one.name not in spec.lints.silence]:
            mistakes[name] = listed
    return mistakes


def _check_lengths(spec: RunSpec, store: TokenStore, context: int) -> list[Mistake]:
    single = spec.objective == "kto"
    groups = measure_groups(store, share=spec.dpo.share_prefix is True and not single, single=single)
    return check_lengths(store, groups, context, "answers" if single else "pairs")


def _check_store(spec: RunSpec, store: TokenStore, tokenizer: Tokenizer) -> list[Mistake]:
    reader, mistakes = StoreReader(store), list[Mistake]()
    if spec.objective == "kto":
        good = sum(
            int((store.document_field(CHOSEN, np.arange(first, min(first + _READ, store.documents))) > 0).sum())
            for first in range(0, store.documents, _READ)
        )
        numbers = np.array(sample_numbers(reader.count), np.int64)
        labels = store.document_field(CHOSEN, numbers)[:, 0] > 0
        rows = [(reader.row(int(number)), bool(label)) for number, label in zip(numbers, labels, strict=True)]
        mistakes += check_labels(rows, good, store.documents - good, spec.kto)
    if GROUP in store.fields:
        numbers_read = sample_numbers(reader.count // 2)
        pairs = [make_pair(reader.row(2 * number), reader.row(2 * number + 1)) for number in numbers_read]
        mistakes += check_pairs(pairs, store.documents // 2, spec.lints.silence, tokenizer.decode)
    return mistakes


def source_agreement(source: SourceSpec) -> Agreement | None:
    """How far the annotators of a source's first rows agree, if it names their column."""
    if ANNOTATORS not in (source.columns or {}) or not source.path or source.path == ["python"]:
        return None
    parts = divide_source("", list_files(source), source)
    rows = itertools.islice((row for part in parts for row in read_part(part, source)), _VOTED_ROWS)
    votes = [row.fields[ANNOTATORS] for row in rows if isinstance(row, Document) and ANNOTATORS in row.fields]
    return measure_agreement(votes)


def agreement_lines(spec: RunSpec) -> list[str]:
    """The agreement of each source's annotators, for the notes of a run and `bessemer data check`."""
    if spec.objective not in PREFERENCES:
        return []
    lines = []
    for name, source in spec.data.sources.items():
        agreement = source_agreement(source)
        if agreement and not check_agreement(agreement):  # which is a warning otherwise
            lines.append(f"data.sources.{name}: {agreement.line()}")
    return lines
