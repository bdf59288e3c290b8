"""What `objective: sft` adds to a start: the formats of its sources, whole conversations in a row, the template of the
model's folder, and the checks for mistakes before the first step."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from bessemer.data.chat_checks import Mistake, RowSource, TokenizerConfig, check_rows, read_tokenizer_config
from bessemer.data.chat_rows import (
    FIRST_CONVERSATIONS,
    DatasetReader,
    RowCounts,
    RowReader,
    StoreReader,
    count_store,
    has_system,
    sample_numbers,
    shared_rows,
)
from bessemer.data.prepare import chat_template
from bessemer.data.read import Document, divide_source, list_files, read_part
from bessemer.data.read.chat_formats import describe_format, recognise_source
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.user_dataset import UserDatasetRows, is_map_style
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder
from bessemer.plan.decision import Plan
from bessemer.plan.mixtures import sources_used
from bessemer.session.data import PYTHON_SOURCE, Data
from bessemer.spec.data import SourceSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import folder_template_file


def with_sft_defaults(spec: RunSpec) -> RunSpec:
    """The spec with what fine-tuning implies where it is silent. Reads the first rows of each source."""
    if spec.objective != "sft":
        return spec
    data: dict[str, Any] = {"sources": {name: _recognise(name, source) for name, source in spec.data.sources.items()}}
    if "packing" not in spec.data.model_fields_set:
        data["packing"] = "best_fit"
    changes: dict[str, Any] = {"data": spec.data.model_copy(update=data)}
    if "chat" not in spec.tokenizer.model_fields_set:
        template = folder_template_file(HfFolder(spec.model.hf).path) if spec.model.hf else None
        changes["tokenizer"] = spec.tokenizer.model_copy(update={"chat": str(template or spec.tokenizer.chat)})
    return spec.model_copy(update=changes)


def _recognise(name: str, source: SourceSpec) -> SourceSpec:
    if not source.path or source.path == [PYTHON_SOURCE]:
        return source
    try:
        return recognise_source(name, source)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith("data.sources") else f"data.sources.{name}: {text}") from error


def log_sft(spec: RunSpec, plan: Plan) -> None:
    """Adds the formats, the template and the packing to the plan."""
    if spec.objective != "sft":
        return
    for name, source in spec.data.sources.items():
        if source.chat_format:
            plan.add(f"data.sources.{name}", describe_format(source), "format of its rows", "found")
    if any(source.is_chat for source in spec.data.sources.values()):
        own = spec.model.hf and Path(spec.tokenizer.chat).parent == HfFolder(spec.model.hf).path
        reason = (
            f"the folder's own template; learnt: {spec.tokenizer.learn}" if own else f"learnt: {spec.tokenizer.learn}"
        )
        plan.add("tokenizer.chat", spec.tokenizer.chat, reason, "found" if own else "asked")
    attention = "crosses conversations" if spec.data.cross_documents else "stays inside a conversation"
    plan.add("data.layout", spec.data.packing, f"attention {attention}", "rule", "established")


def check_sources(spec: RunSpec, data: Data, context: int) -> dict[str, list[Mistake]]:
    """The mistakes in the rows of each source, without those that the spec silences. Reads a sample of the rows."""
    config = _tokenizer_config(spec, data.tokenizer)
    template = chat_template(spec.tokenizer)
    mistakes = {}
    for name in sources_used(spec):
        source, training = spec.data.sources[name], data.train[name]
        reader = open_rows(training, data.tokenizer, context)
        if reader is None:  # an iterable only goes forward
            continue
        held_out = open_rows(data.validation[name], data.tokenizer, context) if name in data.validation else None
        rows = RowSource(
            data.tokenizer, [reader.row(number) for number in sample_numbers(reader.count)], reader.count, RowCounts(),
            context, config=config, system_places=_system_places(source),
        )  # fmt: skip
        if isinstance(training, TokenStore):
            rows.documents, rows.masked = training.documents, training.masked
            rows.counts = count_store(training, context)
            rows.template = template if rows.masked else None
        else:
            rows.caller_masks = True
            for row in rows.rows:
                rows.counts.add(row, context)
        if held_out and "leaked_validation" not in spec.lints.silence:
            rows.shared = shared_rows(held_out, reader, data.tokenizer)
        if some := check_rows(rows, spec.lints.silence):
            mistakes[name] = some
    return mistakes


def refuse_mistakes(mistakes: dict[str, list[Mistake]]) -> list[str]:
    """The warnings as lines. UserError if a mistake makes the run worthless."""
    lines = [
        (one.refuses, f"data.sources.{name}: {one.line()}", one) for name, some in mistakes.items() for one in some
    ]
    if refused := [(line, one.name) for refuses, line, one in lines if refuses]:
        others = ", ".join(dict.fromkeys(name for _, name in refused[1:] if name != refused[0][1]))
        more = f"; also refused: {others}" if others else ""
        raise UserError(f"{refused[0][0]}; to train anyway, write lints: {{silence: [{refused[0][1]}]}}{more}")
    return [line for _, line, _ in lines]


def open_rows(rows: Any, tokenizer: Tokenizer, context: int) -> RowReader | None:
    """A reader of a token store or of a caller's dataset; None for an iterable."""
    if isinstance(rows, TokenStore):
        return StoreReader(rows)
    return DatasetReader(UserDatasetRows(rows, tokenizer, 4 * context)) if is_map_style(rows) else None


def _tokenizer_config(spec: RunSpec, tokenizer: Tokenizer) -> TokenizerConfig:
    path = spec.model.hf or spec.tokenizer.path
    if path is None:
        return TokenizerConfig()
    folder = Path(os.path.expanduser(path))
    return read_tokenizer_config(folder if folder.is_dir() else folder.parent, tokenizer)


def _system_places(source: SourceSpec) -> list[str]:
    """Those of the source's first conversations that have a system message."""
    if not source.is_chat or not source.path or source.path == [PYTHON_SOURCE]:
        return []
    parts = divide_source("", list_files(source), source)
    rows = itertools.islice((row for part in parts for row in read_part(part, source)), FIRST_CONVERSATIONS)
    return [row.place for row in rows if isinstance(row, Document) and has_system(row.messages)]
