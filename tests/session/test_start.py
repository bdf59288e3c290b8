"""A run that begins with a Hugging Face folder: shape, tokenizer and weights are the folder's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.transformer import build_model
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.session.start import decide_shape, fit_positions, load_source, open_source, with_folder_tokenizer
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS
from bessemer.train.trained import load_model

transformers = pytest.importorskip("transformers")
CORPUS = Path(__file__).parents[2] / "src" / "bessemer" / "spec"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    tokenizer = Tokenizer.train([file.read_text() for file in sorted(CORPUS.glob("*.py"))], 400)
    tokenizer.save(path / "tokenizer.json")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def spec_of(folder: Path, tmp_path: Path, **more: object) -> RunSpec:
    sections: dict[str, object] = {
        "name": "run", "runs": str(tmp_path), "model": {"hf": str(folder)},
        "data": {"context": 32, "sources": {"code": {"path": str(CORPUS), "format": "source"}}},
        "budget": {"steps": 4, "batch": 128}, "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
        "evaluate": {"tokens": 1024},
    }  # fmt: skip
    return RunSpec.model_validate(sections | more)


def reference(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.LlamaForCausalLM.from_pretrained(folder).state_dict())


def test_the_run_begins_with_the_folder_s_weights_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, tmp_path, optimizer={"lr": 1e-12, "weight_decay": 0.0})
    assert train(spec).kind == "finished"
    loaded = load_model(tmp_path / "run")
    model, tokenizer = loaded.model, loaded.tokenizer
    theirs = reference(folder)
    assert tokenizer.vocab_size == model.shape.vocab - 3  # rows to spare stay
    torch.testing.assert_close(model.embedding.weight, theirs["model.embed_tokens.weight"], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        model.blocks[1].ffn.down.weight, theirs["model.layers.1.mlp.down_proj.weight"], rtol=0, atol=1e-6
    )
    (event,) = Run(tmp_path / "run").events("started_from")
    assert "llama weights" in event["reason"]
    assert json.loads((tmp_path / "run" / "model.json").read_text())["shape"]["width"] == 32


def test_a_resumed_run_goes_on_with_its_own_weights(folder: Path, tmp_path: Path) -> None:
    train(spec_of(folder, tmp_path))
    again = spec_of(folder, tmp_path, budget={"steps": 6, "batch": 128})
    assert train(again).kind == "finished"
    run = Run(tmp_path / "run")
    assert len(list(run.events("started_from"))) == 1
    assert [record["step"] for record in run.metrics()] == list(range(6))


def test_new_tokens_begin_as_the_mean_of_the_others(folder: Path, tmp_path: Path) -> None:
    spec = with_folder_tokenizer(spec_of(folder, tmp_path, tokenizer={"special": [f"<|{k}|>" for k in range(5)]}))
    source = open_source(spec)
    assert source is not None
    vocab = Tokenizer.load(folder / "tokenizer.json", special=spec.tokenizer.special).vocab_size
    shape, _ = decide_shape(spec, source, vocab, Plan())
    assert shape.vocab == vocab == source.shape.vocab + 2  # three of the five fill the rows to spare
    model = build_model(shape, "cpu", 0)
    assert load_source(model, source) == 2
    theirs = reference(folder)["model.embed_tokens.weight"]
    assert torch.equal(model.embedding.weight[:-2], theirs)
    for row in model.embedding.weight[-2:]:
        torch.testing.assert_close(row, theirs.mean(dim=0))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UserError, match=r"no tokenizer\.json: write tokenizer: \{path: FILE\}"):
        with_folder_tokenizer(spec_of(bare, tmp_path))


def test_other_weights_than_the_shape_needs_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, tmp_path, model={"hf": str(folder), "layers": 3})
    with pytest.raises(UserError, match=r"model\.layers\.2\."):
        train(spec)


def test_learned_positions_bound_the_context() -> None:
    shape = replace(PRESETS["1M"], positions="learned")
    assert fit_positions(shape, 96).max_positions == 96
    with pytest.raises(UserError, match="128 tokens exceed the model's 64 learned positions"):
        fit_positions(replace(shape, max_positions=64), 128)
    assert fit_positions(PRESETS["1M"], 128) == PRESETS["1M"]
