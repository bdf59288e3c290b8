"""Files in, token stores out, once: every source's documents are split, tokenized and kept in a cache folder.

The folder's name is a fingerprint of all that its content depends on, and it gets that name only when complete.
The text is streamed three times (to measure and split it, to train the tokenizer, to tokenize it), so memory
depends on the largest document and the tokenizer's sample, not on the corpus.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.read import Document, FileEntry, list_files, read_documents
from bessemer.data.store import FORMAT_VERSION, StoreWriter, TokenStore, sync, token_dtype
from bessemer.data.tokenizer import DEFAULT_EOS, Tokenizer, cut
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.spec.data import DataSpec, SourceSpec, TokenizerSpec

_RULES_VERSION = 1  # raise it when the same files and settings would give other tokens
# Encoding takes some 50 times the memory of the text: batches are as large as the cores need and no larger, and a
# long document is encoded in pieces (peak 105 MB on two cores; with 2 MB batches and 1 MB pieces 210 MB).
_BATCH_CHARS = min((os.cpu_count() or 1) << 19, 8 << 20)
_PIECE_CHARS = 1 << 17
_SAMPLE_PIECE_CHARS = 1 << 14  # the tokenizer's sample takes such pieces of long documents

Say = Callable[[str], None]
Ids = npt.NDArray[Any]  # of the store's type


@dataclass(frozen=True)
class Prepared:
    """The tokenizer and the open stores. A source with a single document has no validation store."""

    tokenizer: Tokenizer
    train: dict[str, TokenStore]
    validation: dict[str, TokenStore]
    folder: Path


@dataclass(frozen=True)
class _Split:
    """What the first reading of a source found. Documents whose hash lies below `limit` are held out."""

    text_bytes: int
    documents: int
    held_out: int
    limit: int


def prepare(
    data: DataSpec, tokenizer: TokenizerSpec, cache: Path, vocab: int, seed: int, progress: Say | None = None
) -> Prepared:
    """The stores of all sources, from the cache when nothing they depend on has changed.

    `vocab` is the size of the tokenizer to train when `tokenizer.path` is not set. A kill at any moment leaves
    nothing that a later call takes for good; processes that prepare the same data at once wait for the first.
    """
    say = progress or (lambda line: None)
    cache = Path(cache).absolute()
    files = _list_sources(data)
    loaded = Tokenizer.load(tokenizer.path, tokenizer.eos) if tokenizer.path else None
    eos = loaded.eos if loaded else tokenizer.eos or DEFAULT_EOS
    definition = loaded.fingerprint if loaded else [vocab, eos, tokenizer.sample]
    folder = cache / _fingerprint(data, files, definition, seed)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, folder.name, say) as alone:
            if alone:
                _sweep(cache, folder.name)
            if not folder.exists():
                _build(folder, data, files, loaded, eos, tokenizer.sample, vocab, seed, say)
    return open_prepared(folder)


def open_prepared(folder: Path) -> Prepared:
    """What an earlier call prepared. The tokenizer is the one saved there, also where it was loaded from elsewhere."""
    try:
        about = json.loads((folder / "prepared.json").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder}: the prepared data is gone; `bessemer train` on the same spec makes it again"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}/prepared.json: {error}; delete the folder {folder} and run again"
        ) from error
    return Prepared(
        tokenizer=Tokenizer.load(folder / "tokenizer.json", about["eos"]),
        train={name: TokenStore(folder / f"{name}.train") for name in about["train"]},
        validation={name: TokenStore(folder / f"{name}.validation") for name in about["validation"]},
        folder=folder,
    )


def _list_sources(data: DataSpec) -> dict[str, list[FileEntry]]:
    files = {}
    for name, source in data.sources.items():
        with _naming(name):
            files[name] = list_files(source)
    return files


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"source {source!r}: {error}") from error


def _fingerprint(data: DataSpec, files: dict[str, list[FileEntry]], tokenizer: object, seed: int) -> str:
    """Weights are left out: another mixture needs no other tokens."""
    sources = {
        name: [source.text_field, [dataclasses.astuple(entry) for entry in files[name]]]
        for name, source in data.sources.items()
    }
    what = [FORMAT_VERSION, _RULES_VERSION, sources, tokenizer, seed, data.validation]
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


def _build(
    folder: Path,
    data: DataSpec,
    files: dict[str, list[FileEntry]],
    tokenizer: Tokenizer | None,
    eos: str,
    sample_bytes: int,
    vocab: int,
    seed: int,
    say: Say,
) -> None:
    work = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    work.mkdir()
    try:
        meter = _Meter(say)
        splits = {
            name: _split(name, files[name], source, data.validation, seed, meter)
            for name, source in data.sources.items()
        }
        if data.validation > 0 and not any(split.held_out for split in splits.values()):
            raise UserError(
                "data.validation: no source has two different documents, so none can be held out; "
                "set data.validation to 0 or split the text into several files or rows"
            )
        if tokenizer is None:
            say(f"training a tokenizer of {vocab:,} tokens on at most {sample_bytes / 1e6:.0f} MB of text")
            tokenizer = Tokenizer.train(_sample(data, files, splits, sample_bytes, seed), vocab, eos)
        tokenizer.save(work / "tokenizer.json")
        for name, source in data.sources.items():
            _tokenize(name, files[name], source, splits[name], seed, tokenizer, work, meter)
        if _list_sources(data) != files:
            raise UserError("files changed while they were read; run again when they are complete")
        about = {
            "eos": eos,
            "train": list(splits),
            "validation": [name for name in splits if splits[name].held_out],
        }
        (work / "prepared.json").write_text(json.dumps(about, indent=1))
        for path in (work / "tokenizer.json", work / "prepared.json", work):
            sync(path)
        try:
            os.replace(work, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else a process that the lock could not hold back was faster, with the same content
        sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _split(
    name: str, files: list[FileEntry], source: SourceSpec, share: float, seed: int, meter: _Meter
) -> _Split:
    """Where to cut between held-out and training documents, so that both sides get some where possible."""
    limit = int(share * 2**64)
    lowest, highest = 2**64, -1
    documents = held_out = text_bytes = 0
    with _naming(name):
        meter.start(f"reading {name}")
        for document in read_documents(files, source):
            key, size_bytes = _hash(document.text, seed)
            lowest, highest = min(lowest, key), max(highest, key)
            documents += 1
            held_out += key < limit
            text_bytes += size_bytes
            meter.update(text_bytes)
        if not documents:
            raise UserError(f"no text in {len(files)} files, the first being {files[0].path}")
    if share <= 0 or lowest == highest:  # equal documents stay on one side
        return _Split(text_bytes, documents, 0, 0)
    if held_out == 0:
        return _Split(text_bytes, documents, 1, lowest + 1)
    return _Split(text_bytes, documents, held_out, min(limit, highest))


def _sample(
    data: DataSpec, files: dict[str, list[FileEntry]], splits: dict[str, _Split], sample_bytes: int, seed: int
) -> Iterator[str]:
    """Training text spread evenly over the corpus: a piece is taken whenever less than the share has been."""
    share = min(1.0, sample_bytes / sum(split.text_bytes for split in splits.values()))
    seen = taken = 0
    for name, source in data.sources.items():
        for document in read_documents(files[name], source):
            if _hash(document.text, seed)[0] < splits[name].limit:
                continue
            for piece in cut(document.text, _SAMPLE_PIECE_CHARS):
                if taken <= share * seen:
                    yield piece
                    taken += len(piece)
                seen += len(piece)


def _tokenize(
    name: str,
    files: list[FileEntry],
    source: SourceSpec,
    split: _Split,
    seed: int,
    tokenizer: Tokenizer,
    folder: Path,
    meter: _Meter,
) -> None:
    with contextlib.ExitStack() as stack, _naming(name):
        sides = ["train", "validation"] if split.held_out else ["train"]
        train, *validation = (
            stack.enter_context(
                StoreWriter(folder / f"{name}.{side}", tokenizer.vocab_size, tokenizer.fingerprint)
            )
            for side in sides
        )
        done_bytes = 0
        meter.start(f"tokenizing {name}", split.text_bytes)
        for document, tokens in _encode(read_documents(files, source), tokenizer):
            writer = validation[0] if _hash(document.text, seed)[0] < split.limit else train
            text_hash, text_bytes = _hash(document.text, 0)
            writer.add(tokens, document.file, document.row, text_hash, text_bytes)
            done_bytes += text_bytes
            meter.update(done_bytes)


def _hash(text: str, seed: int) -> tuple[int, int]:
    """Hash of the text in UTF-8, and its bytes; by pieces, so that a long document is not copied whole."""
    state = xxhash.xxh3_64(seed=seed)
    size_bytes = 0
    for piece in cut(text, _PIECE_CHARS):
        data = piece.encode()
        state.update(data)
        size_bytes += len(data)
    return state.intdigest(), size_bytes


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Ids]]:
    """Each document with its ids and the end of document, encoded in batches that keep all cores busy."""
    waiting: list[tuple[Document, str, bool]] = []
    waiting_chars = 0
    begun: list[Ids] = []  # ids of a document whose last piece is still to come
    dtype = token_dtype(tokenizer.vocab_size)

    def encode_waiting() -> Iterator[tuple[Document, Ids]]:
        nonlocal begun
        encoded = tokenizer.encode_batch([piece for _, piece, _ in waiting])
        for (document, _, last), ids in zip(waiting, encoded, strict=True):
            # By way of array it takes about half the time of np.array(ids).
            begun.append(np.frombuffer(array.array("I", ids), dtype=np.uint32).astype(dtype))
            if last:
                tokens = np.concatenate([*begun, np.array([tokenizer.eos_id], dtype)])
                begun = []
                yield document, tokens

    for document in documents:
        left_chars = len(document.text)
        for piece in cut(document.text, _PIECE_CHARS):
            left_chars -= len(piece)
            waiting.append((document, piece, left_chars == 0))
            waiting_chars += len(piece)
            if waiting_chars >= _BATCH_CHARS:
                yield from encode_waiting()
                waiting, waiting_chars = [], 0
    yield from encode_waiting()


@contextlib.contextmanager
def _locked(cache: Path, name: str, say: Say, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of one cache folder, which the system frees when its holder dies. False: not held.

    Lock files stay, since deleting one that another process has just opened would let two hold it.
    """
    import fcntl

    with open(cache / f".{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait:
                say("waiting for another process that prepares the same data")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield wait
        except OSError:  # a file system without locks: both may work, the first to finish wins
            yield False
        else:
            yield True


def _sweep(cache: Path, held: str) -> None:
    """Deletes what killed processes left; `held` names the folder whose lock this process holds."""
    for leftover in cache.glob("*.partial-*"):
        name = leftover.name.partition(".")[0]
        if name == held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with _locked(cache, name, say=lambda line: None, wait=False) as dead:
            if dead:
                shutil.rmtree(leftover, ignore_errors=True)


class _Meter:
    """Progress lines, at most one a second."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._last_s = time.monotonic()

    def start(self, what: str, total_bytes: int | None = None) -> None:
        self._what, self._total_bytes = what, total_bytes
        self._start_s = self._last_s = time.monotonic()

    def update(self, done_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < 1:
            return
        self._last_s = now_s
        rate = done_bytes / (now_s - self._start_s)
        if self._total_bytes is None:
            self._say(f"{self._what} {done_bytes / 1e6:.0f} MB {rate / 1e6:.1f} MB/s")
        else:
            left_s = (self._total_bytes - done_bytes) / rate
            share = done_bytes / self._total_bytes
            self._say(f"{self._what} {share:.0%} {rate / 1e6:.1f} MB/s eta {left_s:.0f} s".replace("%", " %"))
