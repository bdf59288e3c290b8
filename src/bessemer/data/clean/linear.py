"""A linear classifier of hashed n-grams: the model behind the steps `quality`, `domain` and `toxicity`. Logistic
regression for two classes, softmax for more. Weights are integers, and all that follows is integer addition and
single float64 operations, so that a document's score from a given file is the same bits on any machine, in any batch
and beside any other documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.clean.features import hashed
from bessemer.data.clean.model_file import load_model, save_model
from bessemer.data.clean.selection import Floats, Ints
from bessemer.errors import UserError

KIND, VERSION = "classifier", 1
ONE = 1 << 16  # a weight of 1.0
LARGEST = 30_000.0  # a weight that still fits into 32 bits


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model counts: words and pairs of them (`words` 1 or 2), runs of `chars` bytes (or 0); 2^bits buckets."""

    words: int = 2
    chars: int = 0
    bits: int = 20


@dataclass
class LinearModel:
    """`weights` has a row for each class, or a single one (for the first) where there are two."""

    labels: tuple[str, ...]
    shape: Shape
    weights: npt.NDArray[np.int32]
    bias: Ints
    report: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.weights.shape == (self.bias.size, 1 << self.shape.bits)
        assert self.bias.size == (1 if len(self.labels) == 2 else len(self.labels))

    def scores(self, texts: Sequence[str]) -> Floats:
        """The probability that each text is of the first class, with all classes equally frequent beforehand. A text
        without a single word gets what the model thinks before it has read anything, near 1 / classes."""
        return self.probabilities(texts)[:, 0]

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """A row for each text, a column for each class. Some 13,000 texts of 3.6 KB a second on one core, with two
        classes."""
        return probabilities(self.logits(texts))

    def logits(self, texts: Sequence[str]) -> Floats:
        """The bias and the mean weight of the text's n-grams, so that a long text does not count for more."""
        sums = np.zeros((len(texts), self.bias.size), dtype=np.int64)
        counts = np.zeros(len(texts), dtype=np.int64)
        shift = np.uint64(64 - self.shape.bits)
        for chunk in hashed(texts, self.shape.words, self.shape.chars):
            for hashes, starts, stops in chunk.kinds:
                buckets = (hashes >> shift).view(np.int64)
                np.add.at(counts, chunk.owners, stops - starts)
                running = np.zeros(hashes.size + 1, dtype=np.int64)
                for column, weights in enumerate(self.weights):
                    np.cumsum(weights.take(buckets), out=running[1:])
                    np.add.at(sums[:, column], chunk.owners, running[stops] - running[starts])
        return (sums / np.maximum(counts, 1)[:, None] + self.bias) / ONE

    def save(self, path: Path) -> None:
        about = {"labels": list(self.labels), **asdict(self.shape), "report": self.report}
        save_model(path, KIND, VERSION, about, {"weights": self.weights, "bias": self.bias})


def load(path: str | Path) -> LinearModel:
    """A model that `train_classifier` wrote. Its weights stay in the file, shared by all processes."""
    about, arrays = load_model(path, KIND, VERSION, "`bessemer data classifier`")
    try:
        shape = Shape(about["words"], about["chars"], about["bits"])
        return LinearModel(tuple(about["labels"]), shape, arrays["weights"], arrays["bias"], about["report"])
    except (KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path}: the classifier is damaged ({error!r}); train it again") from error


def probabilities(logits: Floats) -> Floats:
    """Of each class, from one logit (the first of two classes) or one for each."""
    if logits.shape[1] == 1:
        small = exp(-np.abs(logits[:, 0]))
        likely, unlikely = 1.0 / (1.0 + small), small / (1.0 + small)
        first = logits[:, 0] >= 0
        return np.stack([np.where(first, likely, unlikely), np.where(first, unlikely, likely)], axis=1)
    powers = exp(logits - logits.max(axis=1, keepdims=True))
    total = np.zeros(len(powers))
    for column in powers.T:  # one after another: the order inside np.sum is not promised
        total += column
    return powers / total[:, None]


_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
_TERMS = [1.0]
for _n in range(1, 14):
    _TERMS.append(_TERMS[-1] / _n)


def exp(x: Floats) -> Floats:
    """e to the power of x <= 0, within two units of the last place. Made of additions and multiplications alone, which
    every machine rounds alike; np.exp does not promise that."""
    x = np.maximum(x, -700.0)
    halvings = np.rint(x / _LN2_HIGH)
    rest = (x - halvings * _LN2_HIGH) - halvings * _LN2_LOW
    power = np.full_like(rest, _TERMS[-1])
    for term in _TERMS[-2::-1]:
        power = power * rest + term
    return np.ldexp(power, halvings.astype(np.int32))
