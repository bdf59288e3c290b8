"""Needle in a haystack: does the model recall something that occurred once, anywhere in a long text?

`key` hides a sentence with a number and asks for it in words, which needs a model that can read. `copy` hides a few
random tokens, repeats the first and checks whether the others are predicted: the smallest model with induction can do
that, and chance is one in the vocabulary.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bessemer.data.prepare import open_prepared
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.generate import Sampling, generate
from bessemer.model.transformer import Decoder

Kind = Literal["key", "copy"]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
READER = 100_000_000  # parameters from which `key` is the default
COPIED = 4  # tokens of a copied needle
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    "The furnace was lit before dawn, and by noon the iron ran white into the sand. "
)


@dataclass(frozen=True)
class Question:
    """Token ids of the prompt and of the right answer."""

    prompt: list[int]
    answer: list[int]
    text: str = ""  # what a generated answer must contain


@dataclass(frozen=True)
class Cell:
    """Means over the trials of one length and depth: `score` is the share of generated answers with the key (key) or of
    right tokens that were the most likely (copy); `probability` and `rank` (1 is best) are those of the right tokens,
    each given the right ones before it."""

    score: float
    probability: float
    rank: float


@dataclass(frozen=True)
class Grid:
    """Lengths in tokens, depths from 0 (the beginning) to 1 (just before the question)."""

    kind: Kind
    trials: int
    lengths: list[int]
    depths: list[float]
    cells: dict[tuple[int, float], Cell]

    def mean(self, length: int, name: str = "score") -> float:
        """The mean of a cell's number over the depths."""
        return sum(getattr(self.cells[length, depth], name) for depth in self.depths) / len(self.depths)

    def to_dict(self) -> dict[str, Any]:
        cells = [{"length": length, "depth": depth, **vars(cell)} for (length, depth), cell in self.cells.items()]
        return {"kind": self.kind, "trials": self.trials, "cells": cells}

    def lines(self) -> list[str]:
        """A table with a column for each length; `#` from 0.9, `+` from 0.5, `.` below."""
        rows = [f"{'depth':>6}" + "".join(f"{length:>10,}" for length in self.lengths)]
        for depth in self.depths:
            scores = [self.cells[length, depth].score for length in self.lengths]
            marks = ["#" if score >= 0.9 else "+" if score >= 0.5 else "." for score in scores]
            rows.append(f"{depth:>6.0%}" + "".join(f"{s:>8.2f} {mark}" for s, mark in zip(scores, marks, strict=True)))
        for name in ("probability", "rank"):
            means = [self.mean(length, name) for length in self.lengths]
            rows.append(f"{name[:4]:>6}" + "".join(f"{mean:>8.3g}  " for mean in means))
        return [row.rstrip() for row in rows]


def needle(
    model: Decoder,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    seed: int = 0,
    kind: Kind | None = None,
    filler: Sequence[int] | None = None,
) -> Grid:
    """Evaluate the model; the same questions for the same seed. `filler` are token ids to hide the needle in, repeated
    if too short. Without a kind, the size of the model decides.

    A trial of `copy` is one forward pass over the length without a cache, a trial of `key` two, the second with one.
    """
    if not model.shape.causal or model.shape.decoder_layers or model.shape.labels:
        raise UserError("needle: needs a causal model, which predicts what comes next")
    kind = kind or ("key" if model.shape.parameters >= READER else "copy")
    special = set(tokenizer.special.values())
    hay = [i for i in (filler or tokenizer.encode(FILLER)) if i not in special]
    if min(lengths, default=0) < 1 or trials < 1 or not all(0 <= depth <= 1 for depth in depths):
        raise UserError("needle: give lengths and trials of at least 1, and depths from 0 to 1")
    if len(set(hay)) <= COPIED:
        raise UserError(f"needle: the text to hide it in needs more than {COPIED} different tokens; give another")
    most = model.shape.position_limit
    if most and max(lengths) > most:
        raise UserError(f"--lengths {max(lengths)}: the model has {most} positions; ask for at most {most}")
    cells = {}
    for length in lengths:
        for depth in depths:
            questions = [
                make_question(kind, tokenizer, hay, length, depth, random.Random(f"{seed} {length} {depth} {trial}"))
                for trial in range(trials)
            ]
            cells[length, depth] = _score(model, tokenizer, questions)
    return Grid(kind, trials, sorted(set(lengths)), sorted(set(depths)), cells)


def make_question(
    kind: Kind, tokenizer: Tokenizer, hay: Sequence[int], length: int, depth: float, draw: random.Random
) -> Question:
    """A question whose prompt and answer together have `length` tokens."""
    if kind == "key":
        number = str(draw.randrange(10_000, 100_000))
        needle_text = f" The pass key is {number}. Remember it: {number} is the pass key. "
        hidden, question = tokenizer.encode(needle_text), tokenizer.encode(" What is the pass key? The pass key is")
        answer, avoided = tokenizer.encode(f" {number}"), set()
        if number not in tokenizer.decode(hidden):
            raise UserError("this tokenizer cannot encode a number: use --kind copy")
    else:
        hidden = draw.sample(sorted(set(hay)), COPIED)
        question, answer, avoided = hidden[:1], hidden[1:], set(hidden)
    space = length - 1 - len(hidden) - len(question) - len(answer)
    if space < 0:
        raise UserError(f"--lengths {length}: too short for the needle; give at least {length - space}")
    straw = list(_straw(hay, space, avoided, draw.randrange(len(hay))))
    at = round(depth * space)
    return Question(
        [tokenizer.eos_id, *straw[:at], *hidden, *straw[at:], *question], answer, number if kind == "key" else ""
    )


def _straw(hay: Sequence[int], count: int, avoided: set[int], start: int) -> Iterator[int]:
    """`count` tokens of the text from `start` on, cyclically, without those that would answer by chance."""
    while count:
        if hay[start] not in avoided:
            yield hay[start]
            count -= 1
        start = (start + 1) % len(hay)


@torch.inference_mode()
def _score(model: Decoder, tokenizer: Tokenizer, questions: Sequence[Question]) -> Cell:
    right, probabilities, ranks = [], [], []
    for question in questions:
        ids = torch.tensor([[*question.prompt, *question.answer]], device=model.head_weight.device)
        answer_A1 = ids[0, -len(question.answer) :, None]
        hidden_AW = model(ids[:, :-1])[0, -len(answer_A1) :]  # the head only runs on the end of the text
        shares_AV = torch.softmax(model.logits(hidden_AW).float(), dim=-1)
        right_A1 = shares_AV.gather(1, answer_A1)
        rank_A = (shares_AV > right_A1).sum(1) + 1
        probabilities.append(float(right_A1.mean()))
        ranks.append(float(rank_A.float().mean()))
        if question.text:
            generated = generate(model, question.prompt, len(question.answer) + 4, {tokenizer.eos_id}, Sampling(0.0))
            right.append(float(question.text in tokenizer.decode(list(generated), continues=True)))
        else:
            right.append(float((rank_A == 1).float().mean()))
    return Cell(*(sum(values) / len(values) for values in (right, probabilities, ranks)))


def held_out_text(run: Path, count: int) -> list[int] | None:
    """Up to `count` tokens of the run's held-out data; None if it cannot be read any more."""
    data_file = run / "data.json"
    folder = Path(json.loads(data_file.read_text())["folder"]) if data_file.exists() else None
    if folder is None or not (folder / "prepared.json").exists():  # a user's dataset, or moved
        return None
    stores = list(open_prepared(folder).validation.values())
    tokens = [int(i) for store in stores for i in store.slice(0, min(count, store.tokens))]
    return tokens or None
