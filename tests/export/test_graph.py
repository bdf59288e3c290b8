"""Graphs with their cache as inputs, run by torch.export and ONNX Runtime: the same logits and greedy tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.errors import UserError
from bessemer.export import graph
from bessemer.export.gate import Mismatch
from bessemer.export.outputs import reference
from bessemer.export.source import open_source
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape, Moe

pytest.importorskip("transformers")

SMALL = ModelShape(96, 32, 2, 4, 2, 8, 48, max_positions=128)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {
        "windows": (16, 0),
        "attention_cap": 20.0,
        "logit_cap": 10.0,
        "norm_place": "sandwich",
        "norm_offset": 1.0,
    },
    "bloom": {"positions": "alibi", "kv_heads": 4, "embedding_norm": True, "gated": False, "activation": "gelu_tanh"},
    "gpt2": {"positions": "learned", "kv_heads": 4, "norm": "layer", "qkv_bias": True, "gated": False},
    "experts": {"moe": Moe(4, 2, 32)},
}


def small(**changes: Any) -> Decoder:
    from dataclasses import replace

    model = build_model(replace(SMALL, **changes), "cpu", seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


ROWS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name != "llama")]
)
def test_one_program_serves_prompt_and_tokens(tmp_path: Path, name: str) -> None:
    model = small(**SHAPES[name])
    ours = reference(model, ROWS)
    graph.write_program(graph.trace(model), model.shape, tmp_path / "model.pt2")
    agreement = graph.check_outputs(ours, model.shape, graph._open_program(tmp_path / "model.pt2"), "torch.export")
    assert agreement.gap < 1e-5 and agreement.equal_tokens == agreement.tokens == 50
    damaged = small(**SHAPES[name])
    with torch.no_grad():
        damaged.blocks[1].attention.key.weight[3] *= 1.5  # type: ignore[index, union-attr]
    run = graph._open_program(tmp_path / "model.pt2")
    with pytest.raises(Mismatch, match="model is not the same"):
        graph.check_outputs(reference(damaged, ROWS, 5), model.shape, run, "torch.export")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_onnx_runtime_computes_the_same(tmp_path: Path, name: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = small(**SHAPES[name])
    ours = reference(model, ROWS)
    graph.write_onnx(graph.trace(model), model.shape, tmp_path / "model.onnx")
    agreement = graph.check_outputs(ours, model.shape, graph._open_onnx(tmp_path / "model.onnx"), "ONNX Runtime")
    assert agreement.gap < 1e-4 and agreement.equal_tokens == agreement.tokens == 50
    inputs = [entry.name for entry in onnxruntime.InferenceSession(tmp_path / "model.onnx").get_inputs()]
    assert inputs[:3] == ["input_ids", "attention_mask", "position_ids"] and inputs[3] == "past_key_values.0.key"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"labels": 3, "tied": False}, {"causal": False, "positions": "learned"}])
def test_models_that_write_no_text_have_no_cache(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = small(**changes)
    ours = reference(model, ROWS)
    graph.write_program(graph.trace(model), model.shape, tmp_path / "model.pt2")
    run = graph._open_program(tmp_path / "model.pt2")
    assert graph.cache_names(model.shape, "past") == [] and len(run(*graph._inputs(model.shape, ROWS, 0, []))) == 1
    agreement = graph.check_outputs(ours, model.shape, run, "torch.export")
    assert agreement.gap < 1e-5 and agreement.tokens == 0


def test_padding_on_the_left_changes_nothing(tmp_path: Path) -> None:
    model = small(windows=(16, 0))
    module = graph.TracedModel(model)
    row = ROWS[:1]
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), row), 1)
    mask = torch.cat((torch.zeros(1, 3, dtype=torch.long), torch.ones_like(row)), 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    empty = [torch.zeros(1, 2, 0, 8) for _ in range(4)]
    with torch.no_grad():
        logits = module(padded, mask, positions, empty)[0][:, 3:]
        torch.testing.assert_close(logits, model.logits(model(row)), rtol=0, atol=1e-5)
        assert module(padded, mask, positions, empty)[0].isfinite().all()


@pytest.mark.slow
def test_a_damaged_graph_is_not_written(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bessemer.data.tokenizer.tokenizer import Tokenizer

    path = folder(vocab_size=300, num_hidden_layers=2)
    Tokenizer.train(["steel iron 12\n"] * 9, 300).save(path / "tokenizer.json")
    opened = open_source(path)
    real = graph.trace

    def damaged(model: Decoder) -> Any:
        with torch.no_grad():
            model.blocks[1].attention.key.weight[3] *= 1.5  # type: ignore[index, union-attr]
        return real(model)

    monkeypatch.setattr(graph, "trace", damaged)
    with pytest.raises(Mismatch, match="model is not the same"):
        graph.to_graph(opened, tmp_path / "out", "pt")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    done = graph.to_graph(open_source(path), tmp_path / "out", "pt")
    assert done.agreement is not None and done.agreement.gap < 1e-5
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"model.pt2", "tokenizer.json", "config.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"decoder_layers": 2}, "do not trace encoder-decoders"), ({"mixers": ("mamba",)}, "do not trace state spaces")],
)
def test_what_has_no_graph_is_refused(changes: dict[str, Any], message: str) -> None:
    from dataclasses import replace

    with pytest.raises(UserError, match=message):
        graph.check_graph(replace(SMALL, **changes))
