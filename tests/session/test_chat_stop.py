"""A model that was trained on conversations ends its answer where the turn ends: alone, in a batch, and exported."""

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli import main
from bessemer.data.read.chat_formats import recognise_row
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.generate import Sampling
from bessemer.session.session import Session
from bessemer.spec.schema import RunSpec
from bessemer.train.answers import AnswerSettings, answer_all, converse, read_prompts
from bessemer.train.trained import LoadedModel, load_model

from .conftest import spec_data

transformers = pytest.importorskip("transformers")
COLORS = {"sky": "blue", "grass": "green", "milk": "white", "coal": "black", "blood": "red"}
GREEDY = AnswerSettings(max_tokens=24, sampling=Sampling(0.0))


@pytest.fixture(scope="module", params=["chatml", pytest.param("llama3", marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    home, draw = tmp_path_factory.mktemp(request.param), random.Random(0)
    with (home / "talks.jsonl").open("w") as file:
        for _ in range(300):
            thing = draw.choice(list(COLORS))
            turns = [{"role": "user", "content": f"color of {thing}?"}, {"role": "assistant", "content": COLORS[thing]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    parts = spec_data(
        "chat", home / "talks.jsonl", home / "runs", tokenizer={"vocab": 300, "chat": request.param},
        budget={"steps": 140, "batch": 768}, evaluate={"every": 140, "tokens": 256}, optimizer={"lr": 1e-2},
        model={"width": 48, "layers": 2, "heads": 2},
    )  # fmt: skip
    sources = {"talks": {"path": [str(home / "talks.jsonl")], "messages_field": "messages"}}
    parts |= {"data": {"packing": "pad", "context": 64, "validation": 0, "sources": sources}}
    assert Session(RunSpec.model_validate(parts)).train().kind == "finished"
    run = home / "runs" / "chat"
    return run, load_model(run, device="cpu")


def question(thing: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"color of {thing}?"}]


def test_answers_end_at_the_end_of_the_turn(trained: tuple[Path, LoadedModel]) -> None:
    _, loaded = trained
    for thing, color in COLORS.items():
        ids = loaded.chat_prompt(question(thing))
        assert "".join(loaded.stream(ids, 24, Sampling(0.0))) == color
    answers = list(answer_all(loaded, [question(thing) for thing in COLORS], GREEDY))
    assert [answer["samples"][0]["text"] for answer in answers] == list(COLORS.values())
    assert {answer["samples"][0]["finish_reason"] for answer in answers} == {"stop"}


def test_the_export_stops_there_too(trained: tuple[Path, LoadedModel], tmp_path: Path) -> None:
    run, loaded = trained
    to_hf(open_native(run), tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for thing, color in COLORS.items():
        text = tokenizer.apply_chat_template(question(thing), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        ids = torch.tensor([loaded.chat_prompt(question(thing))[: -ids.shape[1]] + ids[0].tolist()])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        answer = out[0, ids.shape[1] :].tolist()
        assert answer[-1] in loaded.stop_ids and tokenizer.decode(answer[:-1]).strip() == color
    again = load_model(tmp_path / "hf", device="cpu")
    assert again.stop_ids == loaded.stop_ids and again.template is not None
    (answer,) = answer_all(again, [question("sky")], GREEDY)
    assert answer["samples"][0] == {"text": "blue", "tokens": answer["samples"][0]["tokens"], "finish_reason": "stop"}


def test_a_conversation(trained: tuple[Path, LoadedModel]) -> None:
    _, loaded = trained
    lines, written = iter(["color of sky?", "/reset", "", "color of coal?"]), io.StringIO()
    converse(loaded, GREEDY, "", lambda: next(lines, None), lambda piece: print(piece, end="", file=written))
    assert written.getvalue() == "blue\nblack\n"


def test_the_command(
    trained: tuple[Path, LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _ = trained
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": question(t)}) + "\n" for t in ("sky", "milk"))
    )

    def call(*options: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["bessemer", "generate", *options, "--temperature", "0", "--device", "cpu"])
        with pytest.raises(SystemExit) as left:
            main.run()
        return left.value.code, capsys.readouterr().out

    last = sorted((run / "checkpoints").iterdir())[-1]
    code, out = call(str(last), "--prompts", str(tmp_path / "prompts.jsonl"), "--json", "--n", "2")
    answers = [json.loads(line) for line in out.splitlines()]
    assert not code and [[s["text"] for s in a["samples"]] for a in answers] == [["blue"] * 2, ["white"] * 2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("color of blood?\n"))
    code, out = call(str(run), "--chat")
    assert not code and "red\n" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("color of blood?\n"))
    code, out = call(str(run), "--chat", "--prompt", "color of sky?")
    assert not code and out.startswith("> color of sky?\nblue\n") and out.index("blue") < out.index("red\n")
    assert call(str(run), "--chat", "--n", "2")[0] == 2


def test_answers_become_rows_to_train_on(
    trained: tuple[Path, LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sequence distillation: a model's answers, without those that have no end."""
    run, _ = trained

    def call(*options: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["bessemer", "generate", str(run), "--device", "cpu", *options])
        with pytest.raises(SystemExit) as left:
            main.run()
        return left.value.code, "".join(capsys.readouterr())

    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    lines = [{"messages": question("sky")}, {"messages": question("coal")}, {"prompt": "color"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["--prompts", str(prompts), "--temperature", "0", "--write", str(rows)]
    code, out = call(*command, "--max-tokens", "1")
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    left_out = 3 - len(written)
    assert code == 0 and f"{len(written)} rows, {left_out} left out" in out and left_out
    rows.unlink()
    assert call(*command, "--max-tokens", "24", "--n", "2")[0] == 0
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    answers = [(row["messages"][-1]["content"], row["model"], row["sample"]) for row in written if "messages" in row]
    assert answers == [(color, str(run), i) for color in ("blue", "black") for i in (0, 1)]
    assert recognise_row(written[0]) == {"chat_format": "messages", "messages_field": "messages"}
    for wrong, message in (
        (command, "exists already"),
        (["--write", "rows.txt"], "ends in .jsonl"),
        (["--write", "rows.jsonl"], "add --prompts"),
    ):
        code, out = call(*wrong)
        assert code == 2 and message in out


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"]
    for text, message in {
        "{": "a.jsonl:1: is not JSON",
        '{"x": 1}': "neither",
        '{"messages": [{"role": "me"}]}': "a.jsonl:1",
    }.items():
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(UserError, match=message):
            read_prompts(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
