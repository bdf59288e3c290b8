"""`bessemer generate` as a user calls it: mistakes are one line and exit code 2, answers come as they are ready."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli.generate import _read_line
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.generate import Generator, Sampling
from bessemer.train.answers import AnswerSettings, answer_all, read_prompts
from bessemer.train.trained import load_model

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 48}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of transformers: of a native family, of none, and one that is no language model."""
    home, made = tmp_path_factory.mktemp("models"), {}
    tokenizer = Tokenizer.train(["the sky is blue, the grass is green"] * 9, 270)
    for name, kind, more in (
        ("llama", "LlamaForCausalLM", {"intermediate_size": 32}),
        ("opt", "OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
        ("bert", "BertForMaskedLM", {"intermediate_size": 32}),
    ):
        torch.manual_seed(0)
        model = getattr(transformers, kind)
        config = model.config_class(vocab_size=tokenizer.vocab_size, **SIZES, **more)
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
        model(config).save_pretrained(home / name)
        tokenizer.save(home / name / "tokenizer.json")
        end = next(iter(tokenizer.special))
        (home / name / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
        )
        made[name] = home / name
    return made


def mistakes(folder: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options and the message they lead to."""
    (folder / "empty.txt").write_text("\n \n")
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "long.txt").write_text("short\n" + "sky " * 60)
    (folder / "surrogate.jsonl").write_text('{"prompt": "\\ud800"}\n')
    yield ("--prompts", "none.txt"), "none.txt: cannot be read (No such file or directory); correct the path"
    yield ("--prompts", "empty.txt"), "empty.txt: has no prompts"
    yield ("--prompts", "binary.txt"), "binary.txt: is no UTF-8 text (byte 128); convert it"
    yield ("--prompts", "long.txt"), "prompt 2 has "
    yield ("--prompts", "surrogate.jsonl"), "the prompt is not valid UTF-8 at character 1: correct its encoding"
    yield ("-p", "sky\udcff"), "the prompt is not valid UTF-8 at character 4: correct its encoding"
    yield ("-p", "sky " * 60), "the model's context is 48: shorten it"
    yield ("-p", "x", "--stop", ""), "an empty stop string would end every answer at once: leave it out"
    yield ("-p", "x", "--temperature", "nan"), "temperature nan must be a finite number"
    yield ("-p", "x", "--repetition-penalty", "inf"), "repetition penalty inf must be a finite number"
    yield ("-p", "x", "--system", "Be brief."), "--system goes with --chat"
    yield ("--chat",), "the model has no chat template"


def test_mistakes_are_one_line(call: Any, folders: dict[str, Path]) -> None:
    for options, message in mistakes(Path.cwd()):
        result = call("generate", str(folders["llama"]), *options, "--device", "cpu", "--max-tokens", "3")
        assert result.code == 2 and not result.out.strip(), options
        (line,) = [line for line in result.err.splitlines() if not line.startswith("loading the model")]
        assert message in line
    for options in (("--n", "-1"), ("--n", "1000000000"), ("--max-tokens", "0")):
        result = call("generate", str(folders["llama"]), *options)
        assert result.code == 2 and f"Invalid value for '{options[0]}'" in result.err
    result = call("generate", str(folders["bert"]), "-p", "x", "--device", "cpu")
    assert result.code == 2 and "writes no text" in result.err


def test_a_line_of_a_conversation_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"sky \xff\n"), encoding="utf-8"))
    with pytest.raises(UserError, match="not valid UTF-8 at byte 5"):
        _read_line()


def test_lines_of_a_file_are_cut_at_line_feeds_alone(tmp_path: Path) -> None:
    """U+2028 may stand in a JSON string; Windows writes a byte order mark and carriage returns."""
    text = "one\N{LINE SEPARATOR}two"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(tmp_path / "a.jsonl") == [text]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"]


def test_a_folder_without_a_native_family(call: Any, folders: dict[str, Path]) -> None:
    """transformers runs it: the same greedy tokens, within its positions."""
    loaded = load_model(folders["opt"], device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders["opt"], dtype=torch.float32)
    settings = AnswerSettings(max_tokens=12, samples=2, sampling=Sampling(0.0))
    for answer in answer_all(loaded, ["the sky", "green grass is"], settings):
        ids = torch.tensor([loaded.prompt(answer["prompt"])])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        tokens = out[0, ids.shape[1] :].tolist()
        assert [sample["text"] for sample in answer["samples"]] == [loaded.decode(tokens)] * 2
    assert Generator(loaded.model, max_length=4096).max_length == 48
    result = call("evaluate", str(folders["opt"]), "--needle", "--trials", "1", "--device", "cpu", "--json")
    assert result.code == 0 and {cell["length"] for cell in json.loads(result.out)["cells"]} == {24, 48}


def test_answers_come_as_soon_as_they_are_ready(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[int] = []
    step = Generator.step
    monkeypatch.setattr(Generator, "step", lambda self: (forwards.append(1), step(self))[1])
    loaded = load_model(folders["llama"], device="cpu")
    settings = AnswerSettings(max_tokens=4, sampling=Sampling(0.0))
    seen = []
    for answer in answer_all(loaded, [f"sky {i}" for i in range(40)], settings):
        assert answer["samples"][0]["tokens"] <= 4
        seen.append(len(forwards))
    assert seen[0] <= 4 < seen[-1]


def test_a_stop_string_ends_a_single_prompt_too(call: Any, folders: dict[str, Path]) -> None:
    options = ("-p", "the sky", "--temperature", "0", "--max-tokens", "12", "--device", "cpu")
    (free,) = [call("generate", str(folders["llama"]), *options).out]
    answer = free.removeprefix("the sky").rstrip("\n")
    stop = answer[2:4]
    cut = call("generate", str(folders["llama"]), *options, "--stop", stop).out
    assert cut == "the sky" + answer[: answer.index(stop)] + "\n"
