"""How good a trained classifier is, measured on texts that it has never seen, and which words it goes by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.clean.features import Ints
from bessemer.data.clean.linear import ONE, Floats, LinearModel

_WORD = re.compile(r"[^\W\d_]{2,30}")
_TEXTS_SEARCHED, _CHARS_SEARCHED = 2000, 10_000  # of each class, for words
_MOST_WORDS, _LEAST_TEXTS = 20_000, 3
_WORDS_SHOWN = 20
_BINS = 10


def judge(model: LinearModel, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Accuracy, area under the curve, confusion and calibration; `texts` by class, in the model's order."""
    asked = [text for found in texts.values() for text in found]
    classes = np.repeat(np.arange(len(texts)), [len(found) for found in texts.values()])
    chances = model.probabilities(asked)
    found = chances.argmax(axis=1)
    confusion = np.zeros((len(texts), len(texts)), dtype=np.int64)
    np.add.at(confusion, (classes, found), 1)
    # With two classes the second's figures are the first's, mirrored.
    first = range(1) if len(texts) == 2 else range(len(texts))
    return {
        "texts": len(asked),
        "accuracy": round(float((found == classes).mean()), 4),
        "auc": {model.labels[k]: round(area_under_curve(chances[:, k], classes == k), 4) for k in first},
        "confusion": {
            label: dict(zip(model.labels, row.tolist(), strict=True))
            for label, row in zip(model.labels, confusion, strict=True)
        },
        "calibration": calibration(chances[:, 0], classes == 0),
    }


def area_under_curve(scores: Floats, right: npt.NDArray[np.bool_]) -> float:
    """The chance that a right one has a higher score than a wrong one; a tie counts half."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    positive, negative = int(right.sum()), int((~right).sum())
    if not positive or not negative:
        return float("nan")
    return float((ranks[which][right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def calibration(scores: Floats, right: npt.NDArray[np.bool_]) -> list[dict[str, float]]:
    """Of the texts that got a probability between two tenths, how many really were of the class."""
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
    """For each class, the words that speak most for it: weight times frequency. A hash cannot be read back, so
    the words of the training texts are looked up; one that shares its bucket can be listed wrongly."""
    counts: Counter[str] = Counter()
    for found in texts.values():
        for text in found[:_TEXTS_SEARCHED]:
            counts.update(set(_WORD.findall(text[:_CHARS_SEARCHED].lower())))
    words = sorted(word for word, count in counts.most_common(_MOST_WORDS) if count >= _LEAST_TEXTS)
    if not words:
        return {label: [] for label in model.labels}
    pull = _pull(model, words) * np.sqrt([counts[word] for word in words])
    strongest = {}
    for k, label in enumerate(model.labels):
        order: Ints = np.argsort(-pull[k], kind="stable")[:_WORDS_SHOWN]
        strongest[label] = [words[i] for i in order.tolist() if pull[k, i] > 0]
    return strongest


def _pull(model: LinearModel, words: Sequence[str]) -> Floats:
    """How much each word moves towards each class: its own weight, against the mean over classes."""
    single = LinearModel(model.labels, model.shape, model.weights, np.zeros_like(model.bias), {})
    logits = single.logits(words) * ONE
    if logits.shape[1] == 1:
        return np.stack([logits[:, 0], -logits[:, 0]])
    return (logits - logits.mean(axis=1, keepdims=True)).T
