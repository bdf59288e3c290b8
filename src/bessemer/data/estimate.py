"""Estimates the tokens and rows of sources from the sizes of their files, and the vocabulary, for plans of data that is
not prepared yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    if spec.data.store is not None or any(source.path == ["python"] for source in spec.data.sources.values()):
        return {}
    texts = {name: _text_size(source) for name, source in spec.data.sources.items()}
    ratio = _bytes_per_token(spec, sum(text_bytes for text_bytes, _ in texts.values()))
    answers = spec.rl.samples * spec.rl.epochs if spec.objective in RL_OBJECTIVES else 1
    padded = spec.objective in RL_OBJECTIVES or (
        spec.objective in ANSWER_OBJECTIVES and spec.data.packing != "best_fit"
    )
    sizes = {}
    for name, (text_bytes, documents) in texts.items():
        tokens = sequences = max(1, round(text_bytes / ratio))
        if padded and isinstance(spec.data.context, int):  # a row for each pair or answer
            tokens, sequences = documents * spec.data.context * answers, documents
        sizes[name] = SourceSize(tokens, sequences, documents=documents, bytes_per_token=ratio)
    return sizes


def _bytes_per_token(spec: RunSpec, text_bytes: int) -> float:
    """Measured with the tokenizer's file on a sample, or by the size of the vocabulary that a run would train: BPE on
    this project's documentation and code had 1.3, 2.2, 3.3 and 4.0 bytes a token with 300, 800, 3,200 and 12,800."""
    if spec.tokenizer.path is None:
        vocab = decide_vocab(spec, text_bytes, Plan()) if spec.model.preset is None else 0
        return min(BYTES_PER_TOKEN, 1 + 0.62 * math.log2(max(257, vocab) / 256)) if vocab else BYTES_PER_TOKEN
    try:
        tokenizer = Tokenizer.load(Path(spec.tokenizer.path), spec.tokenizer.eos)
        file = next(file for source in spec.data.sources.values() for file in list_files(source))
        with open_decompressed(file, next(iter(spec.data.sources.values())).storage, None) as opened:
            text = opened.read(SAMPLE_BYTES // 4).decode(errors="ignore")
    except (UserError, OSError, StopIteration, *READ_ERRORS):  # the run may be for another machine
        return BYTES_PER_TOKEN
    if file.format in PACKED_FORMATS or not text:
        return BYTES_PER_TOKEN
    return len(text.encode()) / max(1, len(tokenizer.encode(text)))


def estimate_vocab(spec: RunSpec, sources: Mapping[str, SourceSize]) -> int | None:
    """Tokens of the spec's tokenizer file, or of the one that a run would train; None if neither is known."""
    if spec.tokenizer.path is not None:
        try:
            return Tokenizer.load(Path(spec.tokenizer.path), spec.tokenizer.eos).vocab_size
        except (UserError, OSError):  # the run may be for another machine
            return None
    if spec.tokenizer.vocab != "auto" or spec.model.preset is not None or not sources:
        return None
    text_bytes = sum(size.sequences * size.bytes_per_token for size in sources.values())
    return decide_vocab(spec, round(text_bytes), Plan())


def _text_size(source: SourceSpec) -> tuple[int, int]:
    """Bytes of text, and rows."""
    files = list_files(source)
    text_bytes = sum(file.size_bytes for file in files)
    row_bytes = 0.0
    if files:
        factor, row_bytes = _sample(files[0], source)
        text_bytes = round(text_bytes * factor)
    return text_bytes, round(text_bytes / row_bytes) if row_bytes else 0


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
