"""From a spec to prepared data: the size of the tokenizer is decided, everything else is in the spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.data.curate.engine import Engine
from bessemer.data.curate.report import some_of
from bessemer.data.on_the_fly import Indexed, index_sources
from bessemer.data.prepare import Prepared, list_sources, load_tokenizer, prepare, prepared_folder
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.decide import decide_vocab
from bessemer.plan.decision import Plan
from bessemer.spec.data import SourceSpec
from bessemer.spec.schema import RunSpec

OWN = "python"  # the path of a source that is given as an object
DATA_FILES = "data_files.json"  # in the run's folder: the files that its last start read
_MOST_FILES = 100_000  # longer listings are not recorded: 100 bytes a file
_SHOWN_FILES = 5


def data_cache(spec: RunSpec) -> Path:
    """Where a spec's prepared data lives; runs in one folder share it."""
    return Path(spec.runs) / ".data"


def prepare_data(
    spec: RunSpec, plan: Plan, progress: Callable[[str], None] | None = None, engine: Engine | None = None
) -> Prepared:
    """The stores of the spec's sources, made now or found in the cache."""
    vocab = _vocab(spec, plan)
    return prepare(spec.data, spec.tokenizer, data_cache(spec), vocab, spec.seed, progress, engine)


@dataclass(frozen=True)
class Own:
    """A caller's datasets, by the names that the spec has for them; `NAME.validation` is validated on."""

    tokenizer: Tokenizer
    train: dict[str, Any]
    validation: dict[str, Any]
    folder: Path


Data = Prepared | Indexed | Own


def open_data(
    spec: RunSpec, plan: Plan, progress: Callable[[str], None] | None = None, datasets: Mapping[str, Any] | None = None
) -> Data:
    """What a run reads: stores, with `tokenize: on_the_fly` an index of the files, or the caller's own datasets."""
    if datasets or any(_is_own(source) for source in spec.data.sources.values()):
        return _own(spec, datasets or {})
    if spec.data.tokenize == "on_the_fly":
        vocab = _vocab(spec, plan)
        return index_sources(spec.data, spec.tokenizer, data_cache(spec), vocab, spec.seed, progress)
    return prepare_data(spec, plan, progress)


def _is_own(source: SourceSpec) -> bool:
    return source.path == [OWN]


def _own(spec: RunSpec, datasets: Mapping[str, Any]) -> Own:
    sources = spec.data.sources
    for name, source in sources.items():
        if not _is_own(source):
            raise UserError(f"data.sources.{name}.path: own datasets and files cannot be mixed: write path: {OWN}")
        if name not in datasets:
            given = ", ".join(datasets) or "none"
            raise UserError(
                f"data.sources.{name}: its path is {OWN}: call bessemer.train_run(spec, datasets={{{name!r}: ...}}) "
                f"(given: {given})"
            )
    wrong = [name for name in datasets if name.removesuffix(".validation") not in sources]
    if wrong:
        raise UserError(f"dataset {wrong[0]!r}: the spec has no such source; it has {', '.join(sources)}")
    tokenizer = load_tokenizer(spec.data, spec.tokenizer)
    if tokenizer is None:
        raise UserError("tokenizer.path: datasets from Python need a tokenizer: give its file")
    train = {name: datasets[name] for name in sources}
    held_out = {name: data for name in sources if (data := datasets.get(f"{name}.validation")) is not None}
    return Own(tokenizer, train, held_out, data_cache(spec))


def list_data_files(spec: RunSpec) -> dict[str, list[Any]]:
    """The files of the spec's sources with what tells their contents apart; empty for a caller's own datasets."""
    if any(_is_own(source) for source in spec.data.sources.values()):
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
    groups = {
        "missing": [name for name in recorded if name not in current],
        "new": [name for name in current if name not in recorded],
        "changed": [name for name in recorded if name in current and recorded[name] != current[name]],
    }
    return "; ".join(f"{kind}: {some_of(names, len(names), _SHOWN_FILES)}" for kind, names in groups.items() if names)


def prepared_folder_of(spec: RunSpec, plan: Plan) -> Path:
    """Where the prepared data of a spec is, or would be."""
    folder = prepared_folder(spec.data, spec.tokenizer, data_cache(spec), _vocab(spec, plan), spec.seed)
    if not (folder / "prepared.json").exists():
        raise UserError(f"{spec.name}: its data is not prepared yet; run `bessemer data prepare` on the same spec")
    return folder


def _vocab(spec: RunSpec, plan: Plan) -> int:
    if spec.tokenizer.path is not None:
        return 0
    sizes = [entry.size_bytes for entries in list_sources(spec.data).values() for entry in entries]
    return decide_vocab(spec, sum(sizes), plan)
