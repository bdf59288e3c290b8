"""The needle: what is asked, how it is scored, and what the command prints."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.evaluate.needle import COPIED, Cell, Grid, held_out_text, make_question, needle
from bessemer.model.transformer import build_model
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape

TEXT = "A furnace makes steel of iron, and the blower reads the flame. Nothing else is written here, 12 times over. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 300)


class Finder(torch.nn.Module):
    """Expects what followed the last time its token was read, if that was within `reach` tokens: a perfect copier."""

    lockstep = False

    def __init__(self, vocab: int, reach: int) -> None:
        super().__init__()
        self.shape = ModelShape(vocab, 8, 1, 1, 1, 8, 0, wrapped="{}")  # no native layers
        self.reach, self.head_weight = reach, torch.eye(vocab)

    def new_caches(self) -> list[Any]:
        return [[]]

    def forward(self, tokens_BT: Tensor, sight: object = None, caches: list[Any] | None = None) -> Tensor:
        if caches is not None:
            caches[0] += tokens_BT[0].tolist()
        seen: list[int] = caches[0] if caches is not None else tokens_BT[0].tolist()
        expected = [self._next(seen[: end + 1]) for end in range(len(seen) - tokens_BT.shape[1], len(seen))]
        return torch.nn.functional.one_hot(torch.tensor([expected]), self.shape.vocab).float() * 50

    def _next(self, seen: list[int]) -> int:
        for size in (8, 4, 2, 1):  # the longest match, as a model would
            for back in range(1, min(self.reach, len(seen) - size) + 1):
                if seen[-size - back : -back] == seen[-size:]:
                    return seen[len(seen) - back]
        return 0

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("kind", ["copy", "key"])
@pytest.mark.parametrize(("length", "depth"), [(64, 0.0), (100, 0.3), (128, 1.0)])
def test_a_question_has_its_needle_once_at_its_depth(
    tokenizer: Tokenizer, kind: Any, length: int, depth: float
) -> None:
    hay = tokenizer.encode(TEXT)
    length += 100 if kind == "key" else 0  # a tokenizer as small as this one spells the question out
    asked = make_question(kind, tokenizer, hay, length, depth, random.Random(0))
    assert len(asked.prompt) + len(asked.answer) == length
    whole = tokenizer.decode([*asked.prompt[1:], *asked.answer])
    if kind == "key":
        assert whole.count(asked.text) == 3  # twice in the needle, once in the answer
        at = whole.index("The pass key is")
        assert at / (len(whole) - whole[::-1].index("?")) == pytest.approx(depth * 0.6, abs=0.4)
    else:
        hidden = [asked.prompt[-1], *asked.answer]
        places = [i for i in range(length - COPIED) if asked.prompt[i : i + COPIED] == hidden]
        assert places == [1 + round(depth * (length - 1 - 2 * COPIED))]
        assert len(set(hidden)) == COPIED
        assert all(asked.prompt.count(token) <= 2 for token in hidden)  # the filler does not answer by chance


def test_a_model_that_looks_back_finds_it_as_far_as_it_looks(tokenizer: Tokenizer) -> None:
    grid = needle(
        Finder(tokenizer.vocab_size, reach=80), tokenizer, [64, 200], depths=(0.0, 0.5, 1.0), trials=4,
        filler=tokenizer.encode(TEXT * 9),
    )  # fmt: skip
    assert [grid.cells[64, depth].score for depth in grid.depths] == [1.0, 1.0, 1.0]
    assert [grid.cells[200, depth].score for depth in grid.depths] == [0.0, 0.0, 1.0]
    assert grid.cells[64, 0.0].probability == pytest.approx(1.0) and grid.cells[64, 0.0].rank == 1.0
    assert grid.cells[200, 0.0].rank > 1.5
    assert (grid.mean(64), grid.mean(200)) == (1.0, pytest.approx(1 / 3))


def test_a_key_is_read_out_of_generated_text(tokenizer: Tokenizer) -> None:
    """With the cache of generation; the copier goes on where the needle's own sentence went on."""
    grid = needle(Finder(tokenizer.vocab_size, reach=1000), tokenizer, [300], (0.0, 1.0), 2, kind="key")
    assert grid.mean(300) == 1.0
    grid = needle(Finder(tokenizer.vocab_size, reach=20), tokenizer, [300], (0.0,), 2, kind="key")
    assert grid.mean(300) == 0.0


def test_the_seed_decides_the_questions(tokenizer: Tokenizer) -> None:
    model = build_model(replace(PRESETS["1M"], vocab=tokenizer.vocab_size, layers=1), "cpu", 0).eval()

    def cells(seed: int) -> dict[tuple[int, float], Cell]:
        return needle(model, tokenizer, [48], (0.5,), 3, seed).cells

    assert cells(1) == cells(1) != cells(2)


def test_an_untrained_model_is_at_chance(tokenizer: Tokenizer) -> None:
    model = build_model(replace(PRESETS["1M"], vocab=tokenizer.vocab_size, layers=1), "cpu", 0).eval()
    cell = needle(model, tokenizer, [64], (0.5,), 8).cells[64, 0.5]
    assert cell.score < 0.1
    assert cell.probability == pytest.approx(1 / tokenizer.vocab_size, rel=0.5)
    assert 0.2 < cell.rank / tokenizer.vocab_size < 0.8


def test_bad_requests_are_told(tokenizer: Tokenizer) -> None:
    model = Finder(tokenizer.vocab_size, 10)
    with pytest.raises(UserError, match=r"--lengths 5: too short for the needle; give at least 9"):
        needle(model, tokenizer, [5])
    with pytest.raises(UserError, match="more than 4 different tokens"):
        needle(model, tokenizer, [64], filler=[1, 2, 3, 4] * 9)
    for other in ({"causal": False}, {"labels": 2}):
        reader = build_model(ModelShape(300, 32, 1, 2, 2, 16, 0, **other), "cpu", 0)
        with pytest.raises(UserError, match="needs a causal model"):
            needle(reader, tokenizer, [64])
    with pytest.raises(UserError, match="depths from 0 to 1"):
        needle(model, tokenizer, [64], depths=(1.5,))
    learned = build_model(ModelShape(300, 32, 1, 2, 2, 16, 0, positions="learned", max_positions=64), "cpu", 0)
    with pytest.raises(UserError, match="the model has 64 positions"):
        needle(learned, tokenizer, [128])


def test_the_table_has_a_mark_for_every_share() -> None:
    cells = {(64, 0.0): Cell(1.0, 0.9, 1.0), (64, 1.0): Cell(0.5, 0.5, 3.0)}
    cells |= {(1024, 0.0): Cell(0.49, 0.1, 40.0), (1024, 1.0): Cell(0.9, 0.7, 2.0)}
    lines = Grid("copy", 4, [64, 1024], [0.0, 1.0], cells).lines()
    assert [line.split() for line in lines] == [
        ["depth", "64", "1,024"],
        ["0%", "1.00", "#", "0.49", "."],
        ["100%", "0.50", "+", "0.90", "#"],
        ["prob", "0.7", "0.4"],
        ["rank", "2", "21"],
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needle")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{TEXT}{i}"}) + "\n" for i in range(200)))
    spec = {
        "name": "small", "runs": str(folder), "model": {"width": 32, "layers": 1, "heads": 2},
        "tokenizer": {"vocab": 300}, "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
        "data": {"sources": {"text": str(folder / "text.jsonl")}, "context": 64, "validation": "10%"},
        "budget": {"steps": 2, "batch": 256}, "evaluate": {"tokens": 256},
    }  # fmt: skip
    train(RunSpec.model_validate(spec))
    return folder / "small"


def test_the_command_asks_on_the_run_s_own_held_out_text(run: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(run), "--needle", "--trials", "2", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1].split() == ["depth", "16", "32", "64", "128"]
    text = held_out_text(run, 400)
    assert text is not None and "furnace makes" in Tokenizer.load(run / "tokenizer.json").decode(text)
    arguments = ["evaluate", str(run), "--needle", "--trials", "2", "--lengths", "32,1Ki", "--json", "--device", "cpu"]
    found = json.loads(CliRunner().invoke(app, arguments).output)
    assert found["kind"] == "copy" and len(found["cells"]) == 10
    assert {cell["length"] for cell in found["cells"]} == {32, 1024}


def test_the_command_says_what_is_missing(run: Path) -> None:
    for arguments, message in (
        ([], "name what to measure: --tasks, --suite"),
        (["--needle", "--lengths", "x"], "write for example 512,4Ki"),
    ):
        with pytest.raises(UserError, match=message):
            CliRunner().invoke(app, ["evaluate", str(run), *arguments], catch_exceptions=False)
