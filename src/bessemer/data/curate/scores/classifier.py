"""A linear classifier of hashed word n-grams: the model behind the steps `quality` and `domain` (both here) and
`toxicity`. Logistic regression for two classes, softmax for more.

N-grams are hashed in numpy for whole batches of text, by differences of a running polynomial hash over UTF-8: 19,000
texts of 3.6 KB per second, where a regular expression with memoised hashes reaches 4,200. Weights are integers, and
everything after them is integer addition and single float64 operations, so a score is the same bits on any machine and
in any batch.

Trained scorers are stored in one safetensors file, mapped into memory and shared by all workers. No pickle is read or
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.dedup.near import powers
from bessemer.data.curate.scores.threshold import Floats, Ints, ScoredStep, Threshold, Words
from bessemer.data.curate.step import Drop, Outcome, file_identity
from bessemer.data.read.entry import Document
from bessemer.data.stream.order import mix
from bessemer.errors import UserError
from bessemer.spec.curate.scores import DomainSpec, QualitySpec
from bessemer.storage import atomic_path

# Longer documents are hashed in pieces of this size: a word across a cut counts as two. Short documents are hashed
# together up to the same size, so that a piece cut inside a character is always alone. (36 MB/s with 16 KiB, 44 with
# 64 KiB, 45 with 128 KiB.)
PIECE_BYTES = 1 << 16

_RATIO = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_PAIR = np.uint64(0xD6E8FEB86659FD93)
_SPACE, _WORD, _MARK, _ALONE = 0, 1, 2, 128


_POWERS, _INVERSES = powers(_RATIO, PIECE_BYTES + 2)


def _tables() -> tuple[Words, npt.NDArray[np.uint8]]:
    """For each byte, its value in the hash and its kind. Letters lose their case (ASCII only) and digits their value.
    Marks are single words, and so is every Chinese, Japanese and Korean character, since these scripts do not separate
    words (lead bytes E3 to ED)."""
    values = mix(np.arange(256, dtype=np.uint64) + np.uint64(1 << 32))
    kinds = np.full(256, _WORD, dtype=np.uint8)
    for byte in range(128):
        letter = chr(byte)
        if letter.isupper():
            values[byte] = values[ord(letter.lower())]
        elif letter.isdigit():
            values[byte] = values[ord("0")]
        elif byte <= 32 or byte == 127:
            kinds[byte] = _SPACE
        elif not letter.islower() and letter != "_":
            kinds[byte] = _MARK | _ALONE
    kinds[0xE3:0xEE] = _WORD | _ALONE
    return values, kinds


_VALUES, _KINDS = _tables()
_FIRST_WIDE, _LAST_WIDE = 0xE3, 0xED


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Hashes of some pieces of documents. Piece i belongs to document `owners[i]`; its hashes of one kind are
    `hashes[starts[i]:stops[i]]`, where `kinds` lists (hashes, starts, stops)."""

    owners: Ints
    kinds: list[tuple[Words, Ints, Ints]]


def hash_texts(texts: Sequence[str], words: int, chars: int) -> Iterator[TextChunk]:
    """The n-grams of all texts: words, pairs of neighbours where `words` is 2, and every run of `chars` bytes unless 0.
    The result does not depend on the batch."""
    for buffer, owners, starts, stops in join_texts(texts, PIECE_BYTES, b" "):
        yield TextChunk(owners, _hash_kinds(np.frombuffer(buffer, np.uint8), starts, stops, words, chars))


def join_texts(
    texts: Sequence[str], piece_bytes: int, before: bytes, context: int = 0
) -> Iterator[tuple[bytes, Ints, Ints, Ints]]:
    """Joins texts, or pieces of long ones, up to `piece_bytes`: a buffer, and the owner, start and stop of each piece.
    `before` precedes each start, followed by `context` bytes of the previous piece."""
    parts: list[bytes] = []
    spans: list[tuple[int, int, int]] = []
    size = 0
    for owner, text in enumerate(texts):
        data = text.encode()
        for at in range(0, len(data), piece_bytes):
            piece = data[at : at + piece_bytes]
            if size and size + len(piece) > piece_bytes:
                yield b"".join(parts), *np.array(spans, dtype=np.int64).T
                parts, spans, size = [], [], 0
            head = before + data[max(at - context, 0) : at]
            parts += [head, piece]
            spans.append((owner, size + len(head), size + len(head) + len(piece)))
            size = spans[-1][2]
    if spans:
        yield b"".join(parts), *np.array(spans, dtype=np.int64).T


def _hash_kinds(
    text: npt.NDArray[np.uint8], starts: Ints, stops: Ints, words: int, chars: int
) -> list[tuple[Words, Ints, Ints]]:
    sums = np.zeros(text.size + 1, dtype=np.uint64)
    values = _VALUES.take(text)
    values *= _POWERS[: text.size]
    np.cumsum(values, out=sums[1:])
    begin, end = _word_bounds(text)
    single = _hash_spans(sums, begin, end)
    first, last = np.searchsorted(begin, starts), np.searchsorted(begin, stops)
    kinds = [(single, first, last)]
    if words > 1:
        # The pair that begins with a piece's last word is outside its range, so no pair spans two pieces.
        pairs = mix(single[:-1] * _PAIR + single[1:])
        kinds.append((pairs, *_range(first, last - 1, pairs.size)))
    if chars:
        at = np.arange(max(text.size - chars + 1, 0))
        # Mixed again, so that a run differs from a word of the same bytes.
        runs = mix(_hash_spans(sums, at, at + chars))
        kinds.append((runs, *_range(starts, stops - chars + 1, runs.size)))
    return kinds


def _range(starts: Ints, stops: Ints, size: int) -> tuple[Ints, Ints]:
    """Ranges below `size`, empty where a piece is too short."""
    starts = np.minimum(starts, size)
    return starts, np.maximum(stops, starts)


def _word_bounds(text: npt.NDArray[np.uint8]) -> tuple[Ints, Ints]:
    """The starts and ends of words."""
    codes = _KINDS.take(text)
    kinds = codes & np.uint8(3)
    new = codes >= _ALONE
    new[0] = True
    new[1:] |= kinds[1:] != kinds[:-1]
    # A word may directly follow a wide character, which has three bytes.
    new[3:] |= (text[:-3] >= _FIRST_WIDE) & (text[:-3] <= _LAST_WIDE)
    begin = np.flatnonzero(new)
    end = np.append(begin[1:], text.size)
    is_word = kinds.take(begin) != _SPACE
    return begin[is_word], end[is_word]


def _hash_spans(sums: Words, begin: Ints, end: Ints) -> Words:
    """Hashes of text[begin:end], independent of the position in the text."""
    difference = sums.take(end) - sums.take(begin)
    difference *= _INVERSES.take(begin)
    return mix(difference)


_DTYPES = {"U64": "<u8", "I64": "<i8", "I32": "<i4", "U8": "u1"}
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors


def save_model(path: Path, kind: str, version: int, details: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Writes the model atomically."""
    from safetensors.numpy import save_file

    metadata = {"bessemer": json.dumps({"kind": kind, "version": version, **details}, sort_keys=True)}
    with atomic_path(path, parents=True) as partial:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial, metadata)


def load_model(
    path: str | Path, kind: str, version: int, made_by: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What `save_model` was given. Costs no memory: the arrays are views of the file. `kind` and `version` say which
    code may read it."""
    path = Path(path)
    wrong = f"{path}: not a {kind} that this version reads"
    fix = f"train one with {made_by}"
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= min(size_bytes, _MAX_HEADER_BYTES) else {}
        metadata = json.loads(header["__metadata__"]["bessemer"])
        stored = (metadata["kind"], metadata["version"])
        if stored != (kind, version):
            raise UserError(f"{wrong} (it holds a {stored[0]} of version {stored[1]}); {fix}")
        del header["__metadata__"]
        arrays = {name: _map_array(path, entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {fix}, or correct the path of the model") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{wrong} ({type(error).__name__}: {error}); {fix}") from error
    return metadata, arrays


def _map_array(path: Path, entry: Mapping[str, Any], data_at: int) -> npt.NDArray[Any]:
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if stop - start != dtype.itemsize * int(np.prod(shape)):
        raise ValueError("its header contradicts itself")
    if start == stop:
        return np.empty(shape, dtype)  # an empty range cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", offset=data_at + start, shape=shape).view(np.ndarray)


KIND, VERSION = "classifier", 1
ONE = 1 << 16  # a weight of 1.0
LARGEST = 30_000.0  # a weight that fits into 32 bits


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """The features of a model: words and pairs of them (`words` 1 or 2), runs of `chars` bytes (or 0); 2^bits
    buckets."""

    words: int = 2
    chars: int = 0
    bits: int = 20


@dataclass
class LinearModel:
    """`weights` has one row per class, or a single one (for the first) where there are two."""

    labels: tuple[str, ...]
    shape: FeatureShape
    weights: npt.NDArray[np.int32]
    bias: Ints
    report: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.weights.shape == (self.bias.size, 1 << self.shape.bits)
        assert self.bias.size == (1 if len(self.labels) == 2 else len(self.labels))

    def scores(self, texts: Sequence[str]) -> Floats:
        """The probability of the first class for each text, with equal priors. A text without words gets the model's
        bias, near 1 / classes."""
        return self.probabilities(texts)[:, 0]

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """One row per text, one column per class. About 13,000 texts of 3.6 KB per second on one core with two
        classes."""
        return probabilities(self.logits(texts))

    def logits(self, texts: Sequence[str]) -> Floats:
        """The bias plus the mean weight of the text's n-grams, so that length does not matter."""
        sums = np.zeros((len(texts), self.bias.size), dtype=np.int64)
        counts = np.zeros(len(texts), dtype=np.int64)
        shift = np.uint64(64 - self.shape.bits)
        for chunk in hash_texts(texts, self.shape.words, self.shape.chars):
            for hashes, starts, stops in chunk.kinds:
                buckets = (hashes >> shift).view(np.int64)
                np.add.at(counts, chunk.owners, stops - starts)
                running = np.zeros(hashes.size + 1, dtype=np.int64)
                for column, weights in enumerate(self.weights):
                    np.cumsum(weights.take(buckets), out=running[1:])
                    np.add.at(sums[:, column], chunk.owners, running[stops] - running[starts])
        return (sums / np.maximum(counts, 1)[:, None] + self.bias) / ONE

    def save(self, path: Path) -> None:
        metadata = {"labels": list(self.labels), **asdict(self.shape), "report": self.report}
        save_model(path, KIND, VERSION, metadata, {"weights": self.weights, "bias": self.bias})


def load(path: str | Path) -> LinearModel:
    """A model that `train_classifier` wrote. Its weights stay in the file, shared by all processes."""
    metadata, arrays = load_model(path, KIND, VERSION, "`bessemer data classifier`")
    try:
        shape = FeatureShape(metadata["words"], metadata["chars"], metadata["bits"])
        return LinearModel(tuple(metadata["labels"]), shape, arrays["weights"], arrays["bias"], metadata["report"])
    except (KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path}: the classifier is damaged ({error!r}); train it again") from error


def probabilities(logits: Floats) -> Floats:
    """The probability of each class, from one logit (the first of two classes) or one per class."""
    if logits.shape[1] == 1:
        small = exp(-np.abs(logits[:, 0]))
        likely, unlikely = 1.0 / (1.0 + small), small / (1.0 + small)
        first = logits[:, 0] >= 0
        return np.stack([np.where(first, likely, unlikely), np.where(first, unlikely, likely)], axis=1)
    powers = exp(logits - logits.max(axis=1, keepdims=True))
    total = np.zeros(len(powers))
    for column in powers.T:  # in order: np.sum promises none
        total += column
    return powers / total[:, None]


_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
_TERMS = [1.0]
for _n in range(1, 14):
    _TERMS.append(_TERMS[-1] / _n)


def exp(x: Floats) -> Floats:
    """e to the power of x <= 0, within two units in the last place. Uses only additions and multiplications, which
    every machine rounds alike; np.exp does not promise that."""
    x = np.maximum(x, -700.0)
    halvings = np.rint(x / _LN2_HIGH)
    rest = (x - halvings * _LN2_HIGH) - halvings * _LN2_LOW
    power = np.full_like(rest, _TERMS[-1])
    for term in _TERMS[-2::-1]:
        power = power * rest + term
    return np.ldexp(power, halvings.astype(np.int32))


UNSURE = "unsure"


class Quality(ScoredStep):
    """Keeps documents that are probably of the classifier's first class, or the best share of them."""

    judging = ("keep", "per", "better")

    def __init__(self, spec: QualitySpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        self.threshold = Threshold("quality", spec.keep, spec.per, seed)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def scores(self, documents: Sequence[Document]) -> Floats:
        return self.model.scores([document.text for document in documents])


class Domain:
    """Labels documents with their class. A local step, since it needs no other document."""

    version = 1

    def __init__(self, spec: DomainSpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        unknown = [name for name in spec.keep or [] if name not in (*self.model.labels, UNSURE)]
        if unknown:
            has = ", ".join(self.model.labels)
            raise UserError(f"domain.keep: {spec.model} has no class {unknown[0]!r}; it has {has}")

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        probabilities = self.model.probabilities([document.text for document in documents])
        outcomes: list[Outcome] = []
        for document, row in zip(documents, probabilities, strict=True):
            most = int(row.argmax())
            sure = row[most] >= self.spec.min_probability
            domain = self.model.labels[most] if sure else UNSURE
            document.labels["domain"] = domain
            is_kept = self.spec.keep is None or domain in self.spec.keep
            outcomes.append(None if is_kept else Drop("domain not among those kept", domain))
        return outcomes
