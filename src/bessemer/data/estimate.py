"""Estimates the tokens and rows of sources from the sizes of their files, and the vocabulary, for plans of data that is
not prepared yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bessemer.data.read.compression import READ_ERRORS, detect_compression, open_bytes, open_decompressed
from bessemer.data.read.entry import FileEntry
from bessemer.data.read.files import list_files
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import BYTES_PER_TOKEN
from bessemer.plan.decide import decide_vocab
from bessemer.plan.decision import Plan
from bessemer.plan.mixtures import SourceSize
from bessemer.spec.data import SourceSpec
from bessemer.spec.preference import ANSWER_OBJECTIVES
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import RunSpec

SAMPLE_BYTES = 1 << 18  # of the first file of each source
COMPRESSED = 3.0  # bytes of text in a byte of gz, zst or Parquet
PACKED_FORMATS = ("parquet", "mds")
ROW_FORMATS = ("jsonl", "csv")  # one row a line


def estimate_sizes(spec: RunSpec) -> dict[str, SourceSize]:
    """By source name. UserError if files are missing; empty if the caller passes datasets or the spec a store."""
    if spec.data.store is not None:
        return {}
    sizes = {name: estimate_size(source) for name, source in spec.data.sources.items() if source.path != ["python"]}
    rl = spec.objective in RL_OBJECTIVES
    answers = spec.rl.samples * spec.rl.epochs if rl else 1
    padded = rl or (spec.objective in ANSWER_OBJECTIVES and spec.data.packing != "best_fit")
    if padded and isinstance(spec.data.context, int):  # a row for each pair or answer
        sizes = {
            name: replace(size, tokens=size.documents * spec.data.context * answers, sequences=size.documents)
            for name, size in sizes.items()
        }
    return sizes if len(sizes) == len(spec.data.sources) else {}


def estimate_vocab(spec: RunSpec, sources: Mapping[str, SourceSize]) -> int | None:
    """Tokens of the spec's tokenizer file, or of the one that a run would train; None if neither is known."""
    if spec.tokenizer.path is not None:
        try:
            return Tokenizer.load(Path(spec.tokenizer.path), spec.tokenizer.eos).vocab_size
        except (UserError, OSError):  # the run may be for another machine
            return None
    if spec.tokenizer.vocab != "auto" or spec.model.preset is not None or not sources:
        return None
    return decide_vocab(spec, round(sum(size.tokens for size in sources.values()) * BYTES_PER_TOKEN), Plan())


def estimate_size(source: SourceSpec) -> SourceSize:
    files = list_files(source)
    text_bytes = sum(file.size_bytes for file in files)
    row_bytes = 0.0
    if files:
        factor, row_bytes = _sample(files[0], source)
        text_bytes = round(text_bytes * factor)
    tokens = max(1, round(text_bytes / BYTES_PER_TOKEN))
    return SourceSize(tokens, tokens, documents=round(text_bytes / row_bytes) if row_bytes else 0)


def _sample(file: FileEntry, source: SourceSpec) -> tuple[float, float]:
    """Bytes of text in a stored byte, and bytes of a row, 0 if a line is no row."""
    try:
        with open_bytes(file, source.storage, None) as opened:
            compressed = file.format in PACKED_FORMATS or bool(detect_compression(opened))
        if file.format not in ROW_FORMATS:
            return COMPRESSED if compressed else 1.0, 0.0
        with open_decompressed(file, source.storage, None) as opened:
            text = opened.read(SAMPLE_BYTES)
    except READ_ERRORS:  # reading the source reports it, with its place
        return 1.0, 0.0
    return COMPRESSED if compressed else 1.0, len(text) / max(1, text.count(b"\n"))
