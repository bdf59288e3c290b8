"""Trains the scorers from folders of text: what `bessemer data` calls to make a classifier or a perplexity model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.clean.kneser_ney_fit import count_and_smooth
from bessemer.data.clean.linear import Shape
from bessemer.data.clean.linear_fit import fit, judge, split, strongest_words
from bessemer.data.read import list_files, read_documents
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

# Of a long document only the beginning is used to train a classifier: ten books are not a sample of a library.
_LONGEST_TEXT = 1 << 16
_PIECE_CHARS = 1 << 20  # for the perplexity model a longer text counts as several
_SMALL_CHARS = 32_000_000
_HELD_OUT = 50  # one text in so many


def train_classifier(
    folders: Mapping[str, Sequence[Path]],
    out: Path,
    seed: int = 0,
    *,
    text_field: str = "text",
    most_chars: int = 64_000_000,
    words: int = 2,
    chars: int = 0,
    bits: int = 20,
    rate: float = 5.0,
    epochs: int = 20,
) -> dict[str, Any]:
    """Writes a classifier of the classes that `folders` names, the first being the one that scores are of. At most
    `most_chars` characters of each class are used, chosen by hash. `words`: 2 counts pairs of words too; `chars`:
    runs of so many bytes besides, for languages that do not set words apart; `bits`: 2^bits buckets. The report says
    how well it does on a tenth of the texts, which are held out."""
    if len(folders) < 2:
        given = ", ".join(folders) or "none"
        raise UserError(f"a classifier tells classes apart: {given} given; name two or more")
    if words not in (1, 2) or not 0 <= chars <= 16 or not 8 <= bits <= 26:
        given = f"words {words}, chars {chars}, bits {bits}"
        raise UserError(f"{given}: use 1 or 2 words, 0 to 16 chars, 8 to 26 bits")
    texts = {}
    for label, paths in folders.items():
        beginnings = (text[:_LONGEST_TEXT] for text in read_texts(paths, text_field))
        texts[label] = sample(beginnings, most_chars, seed)
    parts = split(texts)
    model, epochs_done = fit(parts, Shape(words, chars, bits), seed, rate, epochs)
    model.report = {
        "classes": {label: len(found) for label, found in texts.items()},
        "seed": seed,
        "epochs": epochs_done,
        "held_out": judge(model, parts.judge),
        "strongest_words": strongest_words(model, parts.train),
    }
    model.save(Path(out))
    return model.report


def train_perplexity(
    paths: Sequence[Path],
    out: Path,
    seed: int = 0,
    *,
    text_field: str = "text",
    most_chars: int = 256_000_000,
    order: int = 7,
    min_count: int | None = None,
) -> dict[str, Any]:
    """Writes a model of good text for the step `perplexity`, from at most `most_chars` characters, chosen by hash. It
    counts runs of up to `order` bytes; those seen less than `min_count` times are left out (by default, of much text
    those seen once). The report has the bits per byte of texts held out: what good text scores."""
    read = read_texts(paths, text_field)
    pieces = (text[at : at + _PIECE_CHARS] for text in read for at in range(0, len(text), _PIECE_CHARS))
    texts = sample(pieces, most_chars, seed)
    if len(texts) < 2:
        where = ", ".join(map(str, paths))
        raise UserError(f"{where}: {len(texts)} different texts; a perplexity model needs two or more")
    size = sum(map(len, texts))
    if min_count is None:
        # Pruning costs 1 % more bits for 0.6 of the file with 60 MB of text, but 5 % more with 1.5 MB.
        min_count = 1 if size < _SMALL_CHARS else 2
    held_out = max(1, len(texts) // _HELD_OUT)
    model = count_and_smooth(texts[held_out:], order, min_count)
    bits = sorted(model.bits_per_byte(texts[:held_out]).tolist())
    quantiles = {f"{q}%": round(bits[(len(bits) - 1) * q // 100], 4) for q in (5, 25, 50, 75, 95)}
    model.report = {
        "texts": len(texts),
        "chars": size,
        "seed": seed,
        "min_count": min_count,
        "n_grams": {str(n): grams for n, grams in model.grams().items()},
        "held_out": {"texts": held_out, "bits_per_byte": quantiles},
    }
    model.save(Path(out))
    return model.report


def read_texts(paths: Sequence[Path], text_field: str = "text") -> Iterator[str]:
    """Every text under some paths, whatever formats they are in."""
    source = SourceSpec(path=[str(path) for path in paths], text_field=text_field)
    for document in read_documents(list_files(source), source):
        yield document.text


def sample(texts: Iterable[str], most_chars: int, seed: int) -> list[str]:
    """At most so much text, each different text once, in an order that means nothing: those of the lowest hashes, so
    that the choice does not depend on the order of the files. Holds up to twice as much."""
    kept: dict[int, str] = {}
    size = 0
    for text in texts:
        key = xxhash.xxh3_64_intdigest(text.encode(), seed % 2**64)
        if text and key not in kept:
            kept[key] = text
            size += len(text)
        if size > 2 * most_chars:
            kept = dict(_lowest(kept, most_chars))
            size = sum(map(len, kept.values()))
    return [text for _, text in _lowest(kept, most_chars)]


def _lowest(texts: Mapping[int, str], most_chars: int) -> Iterator[tuple[int, str]]:
    room = most_chars
    for key in sorted(texts):
        room -= len(texts[key])
        if room < 0:
            return
        yield key, texts[key]
