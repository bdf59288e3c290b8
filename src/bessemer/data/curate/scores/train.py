"""Trains the scorers from folders of text: the classifier and perplexity model of `bessemer data`. The linear
classifier is fitted with Adagrad over small batches, stopped on held-out texts and evaluated on others. All arithmetic
is float64, one operation at a time, with sums in a fixed order and without BLAS: the same texts and seed give the same
bits on any IEEE 754 machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.scores.classifier import LARGEST, ONE, FeatureShape, LinearModel, hash_texts, probabilities
from bessemer.data.curate.scores.perplexity import count_and_smooth
from bessemer.data.curate.scores.threshold import Floats, Ints
from bessemer.data.read import list_files, read_documents
from bessemer.data.stream.order import chain, permute
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

LEAST_TEXTS = 20  # per class: fewer make the held-out figures meaningless
_HELD_OUT = 0.1  # of each class for early stopping, and as much again for evaluation
_BATCH = 32
_PATIENCE = 2
_EPS = 1e-12
_BIAS_RATE = 0.1


@dataclass(frozen=True)
class FeatureRows:
    """Texts as counted buckets: row i has `buckets[starts[i]:starts[i + 1]]`, counted as shares of all its n-grams."""

    starts: Ints
    buckets: npt.NDArray[np.int32]
    shares: Floats
    classes: Ints

    def __len__(self) -> int:
        return self.classes.size

    def owners(self) -> Ints:
        """The row of each entry."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def select(self, rows: Ints) -> FeatureRows:
        sizes = np.diff(self.starts)[rows]
        ends = np.cumsum(sizes)
        entries = np.arange(sizes.sum()) + np.repeat(self.starts[rows] - (ends - sizes), sizes)
        starts = np.concatenate([[0], ends])
        return FeatureRows(starts, self.buckets[entries], self.shares[entries], self.classes[rows])

    def only(self, mask: npt.NDArray[np.bool_]) -> FeatureRows:
        """The same rows with some of their entries."""
        before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        return FeatureRows(before[self.starts], self.buckets[mask], self.shares[mask], self.classes)


@dataclass(frozen=True)
class DataSplit:
    train: dict[str, list[str]]
    stop: dict[str, list[str]]
    judge: dict[str, list[str]]


def split_texts(texts: Mapping[str, Sequence[str]]) -> DataSplit:
    """The texts of each class arrive in random order; the first ones are held out."""
    parts: list[dict[str, list[str]]] = [{}, {}, {}]
    for label, class_texts in texts.items():
        if len(class_texts) < LEAST_TEXTS:
            raise UserError(f"class {label!r} has {len(class_texts)} different texts; give at least {LEAST_TEXTS}")
        held_out = max(2, round(_HELD_OUT * len(class_texts)))
        parts[2][label] = list(class_texts[:held_out])
        parts[1][label] = list(class_texts[held_out : 2 * held_out])
        parts[0][label] = list(class_texts[2 * held_out :])
    return DataSplit(*parts)


def make_rows(texts: Mapping[str, Sequence[str]], shape: FeatureShape) -> FeatureRows:
    buckets: list[npt.NDArray[np.int32]] = []
    shares: list[Floats] = []
    classes: list[int] = []
    for number, class_texts in enumerate(texts.values()):
        for text in class_texts:  # one at a time: counting dominates, and it is per document
            text_kinds = [kind for chunk in hash_texts([text], shape.words, shape.chars) for kind in chunk.kinds]
            kinds = [hashes[starts[0] : stops[0]] for hashes, starts, stops in text_kinds]
            hashes = np.concatenate(kinds) if kinds else np.empty(0, np.uint64)
            which, counts = np.unique(hashes >> np.uint64(64 - shape.bits), return_counts=True)
            buckets.append(which.astype(np.int32))
            shares.append(counts / max(hashes.size, 1))
            classes.append(number)
    starts = np.cumsum([0, *(row.size for row in buckets)], dtype=np.int64)
    numbers = np.array(classes, dtype=np.int64)
    return FeatureRows(starts, np.concatenate(buckets), np.concatenate(shares), numbers)


def fit(
    parts: DataSplit, shape: FeatureShape, seed: int, rate: float = 5.0, most_epochs: int = 20
) -> tuple[LinearModel, int]:
    """The model after the epoch with the lowest loss on the texts in `stop`, and the number of epochs. Classes have
    equal weight, however many texts each has. Memory: 12 bytes per distinct n-gram of each text."""
    labels = tuple(parts.train)
    train, stop = make_rows(parts.train, shape), make_rows(parts.stop, shape)
    seen = np.bincount(train.buckets, minlength=1 << shape.bits)
    train = train.only(seen[train.buckets] > 1)  # features of a single text do not generalise
    columns = 1 if len(labels) == 2 else len(labels)
    descent = _Descent(np.zeros((columns, 1 << shape.bits)), np.zeros(columns), rate)
    importance = _importance(train.classes)
    best, best_loss, waited, epoch = (descent.weights, descent.bias), np.inf, 0, 0
    while epoch < most_epochs and waited < _PATIENCE:
        epoch += 1
        order = permute(np.arange(len(train)), len(train), chain(seed, epoch))
        for at in range(0, len(order), _BATCH):
            chosen = order[at : at + _BATCH]
            descent.step(train.select(chosen), importance[chosen] / chosen.size)
        loss = _loss(stop, descent.weights, descent.bias)
        if loss < best_loss:
            best, best_loss, waited = (descent.weights.copy(), descent.bias.copy()), loss, 0
        else:
            waited += 1
    weights, bias = (np.rint(np.clip(part, -LARGEST, LARGEST) * ONE) for part in best)
    return LinearModel(labels, shape, weights.astype(np.int32), bias.astype(np.int64), {}), epoch


class _Descent:
    """Adagrad. A rare n-gram keeps a large rate, so it counts from its first texts on. Prose against shuffled prose,
    area under the curve after one epoch: 0.986, against 0.77 for plain descent at the best of three rates."""

    def __init__(self, weights: Floats, bias: Floats, rate: float) -> None:
        self.weights, self.bias, self.rate = weights, bias, rate
        self._squares, self._bias_squares = np.zeros_like(weights), np.zeros_like(bias)
        self._gradient = np.zeros(weights.shape[1])

    def step(self, rows: FeatureRows, importance: Floats) -> None:
        owners, buckets = rows.owners(), rows.buckets
        slopes = probabilities(_logits(rows, self.weights, self.bias))
        slopes[np.arange(len(rows)), rows.classes] -= 1.0
        slopes *= importance[:, None]
        for column in range(self.bias.size):
            np.add.at(self._gradient, buckets, rows.shares * slopes[owners, column])
            # A bucket of several rows is read and written repeatedly, each time with the same value.
            gradient = self._gradient[buckets]
            squares = self._squares[column, buckets] + gradient * gradient
            self._squares[column, buckets] = squares
            self.weights[column, buckets] -= self.rate * gradient / (np.sqrt(squares) + _EPS)
            self._gradient[buckets] = 0.0
            total = np.bincount(np.zeros(len(rows), np.int64), slopes[:, column])[0]
            self._bias_squares[column] += total * total
            self.bias[column] -= _BIAS_RATE * total / (np.sqrt(self._bias_squares[column]) + _EPS)


def _logits(rows: FeatureRows, weights: Floats, bias: Floats) -> Floats:
    owners = rows.owners()
    sums = [np.bincount(owners, rows.shares * row[rows.buckets], len(rows)) for row in weights]
    return np.stack(sums, axis=1) + bias


def _loss(rows: FeatureRows, weights: Floats, bias: Floats) -> float:
    """The mean squared error of the probabilities (Brier score), with equal weight per class. Machines round a
    logarithm differently."""
    errors = probabilities(_logits(rows, weights, bias))
    errors[np.arange(len(rows)), rows.classes] -= 1.0
    importance = _importance(rows.classes)
    total = 0.0
    for column in errors.T:
        total += float(np.bincount(np.zeros(len(rows), np.int64), column * column * importance)[0])
    return total / len(rows)


def _importance(classes: Ints) -> Floats:
    counts = np.bincount(classes)
    return classes.size / (counts.size * counts[classes])


_WORD = re.compile(r"[^\W\d_]{2,30}")
_TEXTS_SEARCHED, _CHARS_SEARCHED = 2000, 10_000  # per class, in the search for words
_MOST_WORDS, _LEAST_TEXTS = 20_000, 3
_WORDS_SHOWN = 20
_BINS = 10


def evaluate(model: LinearModel, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Accuracy, area under the curve, confusion and calibration; `texts` by class, in the model's order."""
    all_texts = [text for predicted in texts.values() for text in predicted]
    classes = np.repeat(np.arange(len(texts)), [len(predicted) for predicted in texts.values()])
    chances = model.probabilities(all_texts)
    predicted = chances.argmax(axis=1)
    confusion = np.zeros((len(texts), len(texts)), dtype=np.int64)
    np.add.at(confusion, (classes, predicted), 1)
    # With two classes, the second's figures mirror the first's.
    first = range(1) if len(texts) == 2 else range(len(texts))
    return {
        "texts": len(all_texts),
        "accuracy": round(float((predicted == classes).mean()), 4),
        "auc": {model.labels[k]: round(area_under_curve(chances[:, k], classes == k), 4) for k in first},
        "confusion": {
            label: dict(zip(model.labels, row, strict=True))
            for label, row in zip(model.labels, confusion.tolist(), strict=True)
        },
        "calibration": calibration(chances[:, 0], classes == 0),
    }


def area_under_curve(scores: Floats, right: npt.NDArray[np.bool_]) -> float:
    """The probability that a positive scores higher than a negative; a tie counts half."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    positive, negative = int(right.sum()), int((~right).sum())
    if not positive or not negative:
        return float("nan")
    return float((ranks[which][right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def calibration(scores: Floats, right: npt.NDArray[np.bool_]) -> list[dict[str, float]]:
    """How many texts with a probability between two tenths are of the class."""
    bins = np.minimum((scores * _BINS).astype(np.int64), _BINS - 1)
    return [
        {
            "from": k / _BINS,
            "texts": int((bins == k).sum()),
            "predicted": round(float(scores[bins == k].mean()), 4),
            "found": round(float(right[bins == k].mean()), 4),
        }
        for k in range(_BINS)
        if (bins == k).any()
    ]


def strongest_words(model: LinearModel, texts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each class, the words with the highest weight times frequency. A hash cannot be inverted, so the words of the
    training texts are looked up; one that shares its bucket may be listed wrongly."""
    counts: Counter[str] = Counter()
    for class_texts in texts.values():
        for text in class_texts[:_TEXTS_SEARCHED]:
            counts.update(set(_WORD.findall(text[:_CHARS_SEARCHED].lower())))
    words = sorted(word for word, count in counts.most_common(_MOST_WORDS) if count >= _LEAST_TEXTS)
    if not words:
        return {label: [] for label in model.labels}
    pull = _class_weights(model, words) * np.sqrt([counts[word] for word in words])
    strongest = {}
    for k, label in enumerate(model.labels):
        order: Ints = np.argsort(-pull[k], kind="stable")[:_WORDS_SHOWN]
        strongest[label] = [words[i] for i in order.tolist() if pull[k, i] > 0]
    return strongest


def _class_weights(model: LinearModel, words: Sequence[str]) -> Floats:
    """How much each word favours each class: its weight minus the mean over classes."""
    single = LinearModel(model.labels, model.shape, model.weights, np.zeros_like(model.bias), {})
    logits = single.logits(words) * ONE
    if logits.shape[1] == 1:
        return np.stack([logits[:, 0], -logits[:, 0]])
    return (logits - logits.mean(axis=1, keepdims=True)).T


# A classifier uses only the beginning of a long document: ten books are no sample of a library.
_LONGEST_TEXT = 1 << 16
_PIECE_CHARS = 1 << 20  # the perplexity model splits longer texts
_SMALL_CHARS = 32_000_000
_HELD_OUT_EVERY = 50  # one text in 50


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
    """Writes a classifier of the classes in `folders`; scores refer to the first. Uses at most `most_chars` characters
    per class, chosen by hash. `words` 2 also counts pairs of words; `chars` counts runs of that many bytes, for
    languages without spaces; there are 2^bits buckets. The report evaluates it on a held-out tenth of the texts."""
    if len(folders) < 2:
        settings = ", ".join(folders) or "none"
        raise UserError(f"a classifier tells classes apart: {settings} given; name two or more")
    if words not in (1, 2) or not 0 <= chars <= 16 or not 8 <= bits <= 26:
        settings = f"words {words}, chars {chars}, bits {bits}"
        raise UserError(f"{settings}: use 1 or 2 words, 0 to 16 chars, 8 to 26 bits")
    texts = {}
    for label, paths in folders.items():
        beginnings = (text[:_LONGEST_TEXT] for text in read_texts(paths, text_field))
        texts[label] = sample(beginnings, most_chars, seed)
    parts = split_texts(texts)
    model, epochs_done = fit(parts, FeatureShape(words, chars, bits), seed, rate, epochs)
    model.report = {
        "classes": {label: len(class_texts) for label, class_texts in texts.items()},
        "seed": seed,
        "epochs": epochs_done,
        "held_out": evaluate(model, parts.judge),
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
    """Writes a model of good text for the step `perplexity`, from at most `most_chars` characters, chosen by hash.
    Counts runs of up to `order` bytes; those seen fewer than `min_count` times are pruned (by default, in large texts
    those seen once). The report has the bits per byte of held-out texts."""
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
    held_out = max(1, len(texts) // _HELD_OUT_EVERY)
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
    """Every text under some paths, in any format."""
    source = SourceSpec(path=[str(path) for path in paths], text_field=text_field)
    for document in read_documents(list_files(source), source):
        yield document.text


def sample(texts: Iterable[str], most_chars: int, seed: int) -> list[str]:
    """Distinct texts of at most `most_chars` characters in total, those with the lowest hashes, so that the choice does
    not depend on the order of the files. Holds up to twice as much."""
    chosen: dict[int, str] = {}
    size = 0
    for text in texts:
        key = xxhash.xxh3_64_intdigest(text.encode(), seed % 2**64)
        if text and key not in chosen:
            chosen[key] = text
            size += len(text)
        if size > 2 * most_chars:
            chosen = dict(_lowest_hashes(chosen, most_chars))
            size = sum(map(len, chosen.values()))
    return [text for _, text in _lowest_hashes(chosen, most_chars)]


def _lowest_hashes(texts: Mapping[int, str], most_chars: int) -> Iterator[tuple[int, str]]:
    chars_left = most_chars
    for key in sorted(texts):
        chars_left -= len(texts[key])
        if chars_left < 0:
            return
        yield key, texts[key]
