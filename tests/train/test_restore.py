"""A trained model out of a run's folder: the right weights, and an error that says what to do."""

import json
from dataclasses import asdict

import pytest
import torch

from bessemer.checkpoint.manifest import Manifest
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.generate import Sampling
from bessemer.model.generate.text import StreamDecoder
from bessemer.model.transformer import build_model
from bessemer.spec.shape import ModelShape
from bessemer.train.trained import load_model


@pytest.fixture
def tokenizer():
    return Tokenizer.train(["steel and iron"], 257)


@pytest.fixture
def shape(tokenizer):
    return ModelShape(tokenizer.vocab_size, 16, 1, 2, 1, 8, 24)


@pytest.fixture
def run(tmp_path, shape, tokenizer):
    """A run's folder without a checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("")
    (folder / "model.json").write_text(json.dumps({"shape": asdict(shape), "eos": tokenizer.eos}))
    tokenizer.save(folder / "tokenizer.json")
    return folder


def save(run, shape, step, loss=None):
    model = build_model(shape, "cpu", seed=step)
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state["optimizer.something"] = torch.zeros(3)
    manifest = Manifest(step, 0, "f", {}, "s", [], [], {}, 1, "cpu", {}, 0.0, validation_loss=loss)
    return CheckpointStore(run / "checkpoints").save(state, manifest), model


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_last_best_and_by_name(run, shape, tokenizer):
    saved = {step: save(run, shape, step, loss) for step, loss in {1: 3.0, 2: 1.0, 3: 2.0}.items()}
    for which, step in (("last", 3), ("best", 2), ("step-00000001.a1", 1)):
        loaded = load_model(run, which, "cpu")
        model, found = loaded.model, loaded.tokenizer
        assert same(model, saved[step][1]), which
        assert not model.training
        assert found.eos == tokenizer.eos and found.encode("steel") == tokenizer.encode("steel")


def message_of(*arguments):
    with pytest.raises(UserError) as error:
        load_model(*arguments)
    return str(error.value)


def test_a_folder_that_is_no_run(tmp_path):
    assert "no such folder; give a run" in message_of(tmp_path / "nothing")


def test_a_run_without_a_checkpoint(run):
    assert "no checkpoint yet; train it first" in message_of(run)


def test_a_name_that_is_not_there_lists_those_that_are(run, shape):
    save(run, shape, 4)
    assert "no checkpoint 'step-9'; there are last, best, step-00000004.a1" in message_of(run, "step-9")


def test_best_without_a_validation(run, shape):
    save(run, shape, 4)
    assert "no checkpoint has a validation loss; use last" in message_of(run, "best")


def test_a_damaged_checkpoint_names_the_file_and_the_way_out(run, shape):
    folder, _ = save(run, shape, 4)
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    message = message_of(run, "last", "cpu")
    assert str(shard) in message and "choose another with --checkpoint" in message


def test_a_model_of_another_shape_names_the_tensor(run, shape):
    save(run, shape, 4)
    about = json.loads((run / "model.json").read_text())
    about["shape"]["ffn"] = 32
    (run / "model.json").write_text(json.dumps(about))
    message = message_of(run, "last", "cpu")
    assert "blocks.0.ffn.gate.weight has shape (24, 16), the model asks for (32, 16)" in message


def test_a_device_that_does_not_exist(run, shape, monkeypatch):
    save(run, shape, 4)
    assert "device 'gpu': write auto, cpu, cuda or mps" in message_of(run, "last", "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda is not available" in message_of(run, "last", "cuda")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語テキスト", "🙂🙂", "ends in half \xe6"])
def test_text_streams_in_complete_characters(text):
    """One byte a token: a piece never ends inside a character, and the pieces join to the text."""
    decoder, lengths = StreamDecoder(lambda ids: bytes(ids).decode("utf-8", "replace")), []
    for token in text.encode():
        assert decoder.push(token) is None
        assert text.startswith(decoder.text)
        lengths.append(len(decoder.text))
    assert decoder.finish() == text and lengths == sorted(lengths) and lengths[-1] >= len(text) - 1


def test_text_that_ends_inside_a_character_is_still_returned():
    decoder = StreamDecoder(lambda ids: bytes(ids).decode("utf-8", "replace"))
    for token in b"ab\xe6\x97":
        decoder.push(token)
    assert decoder.text == "ab" and decoder.finish() == "ab\N{REPLACEMENT CHARACTER}"


def test_stop_strings_span_tokens_and_are_held_back():
    decoder = StreamDecoder(lambda ids: bytes(ids).decode("utf-8", "replace"), ["</s>", "END"])
    stops = [decoder.push(token) for token in b"a < b EN</s"]
    assert not any(stops) and decoder.text == "a < b EN"
    assert decoder.push(ord(">")) == "</s>" and decoder.text == "a < b EN"


def test_a_restored_model_writes(run, shape):
    save(run, shape, 4)
    loaded = load_model(run, device="cpu")
    sampling = Sampling(temperature=1.0, seed=3)
    one, again = ("".join(loaded.stream(loaded.tokenizer.encode("steel"), 20, sampling)) for _ in range(2))
    assert one == again != ""
