"""`bessemer export`, as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.export import hf
from bessemer.export.gate import Mismatch

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    return "theirs"


def test_both_ways(call: Any, folder: str) -> None:
    said = call("export", folder, "--to", "bessemer", "--out", "ours", "--check", "layers", "--verbose")
    assert said.code == 0, said.err
    assert "llama  21 tensors" in said.out and "layer 1" in said.out and "argmax agrees at 100.00%" in said.out
    assert said.out.rstrip().endswith("written  ours/model-00000000.a1")
    said = call("export", "ours", "--to", "hf", "--out", "back", "--dtype", "bf16", "--family", "mistral")
    assert said.code == 0, said.err
    assert "mistral  21 tensors" in said.out and "bfloat16" in said.out and "worst part" in said.out
    assert Path("back/model.safetensors").exists() and Path("back/config.json").exists()
    again = call("export", "ours", "--to", "hf", "--out", "back")
    assert again.code == 2 and "is not empty" in again.err
    again = call("export", "ours", "--to", "hf", "--out", "back", "--overwrite", "--skip-check")
    assert again.code == 0 and "not checked" in again.out and "float32" in again.out


def test_mistakes_are_told_in_one_line(call: Any, folder: str) -> None:
    for arguments, expected in [
        (("nowhere", "--to", "hf"), "neither a run nor an imported model"),
        ((folder, "--to", "hf"), "neither a run nor an imported model"),
        ((folder, "--to", "tflite"), "--to tflite: write hf, gguf, onnx, pt, peft or bessemer\n"),
        ((folder, "--to", "gguf", "--quantize", "q9", "--out", "x"), "--quantize q9: write q8_0, q5_1"),
        ((folder, "--to", "hf", "--quantize", "q8_0"), "--quantize: only --to gguf quantizes, not --to hf\n"),
        ((folder, "--to", "gguf", "--limit", "0.1"), "--limit: only a quantization changes perplexity"),
        ((folder, "--to", "onnx", "--dtype", "bf16"), "--dtype bf16: --to onnx writes fp32\n"),
        ((folder, "--to", "hf", "--check", "some"), "--check some: write auto, whole or layers\n"),
        ((folder, "--to", "hf", "--dtype", "int3"), "--dtype int3: write same, fp32, bf16, fp16"),
        ((folder, "--to", "bessemer"), "needs --out FOLDER"),
        (("nowhere", "--to", "bessemer", "--out", "x"), "is not a model folder"),
    ]:
        said = call("export", *arguments)
        assert said.code == 2 and expected in said.err and said.err.count("\n") == 1, said.err
    assert not Path("x").exists()


def test_gguf_of_a_folder(call: Any, folder: str) -> None:
    from bessemer.data.tokenizer.tokenizer import Tokenizer

    pytest.importorskip("gguf")
    said = call("export", folder, "--to", "gguf", "--skip-check")
    assert said.code == 2 and "name what to write with --out" in said.err
    said = call("export", folder, "--to", "gguf", "--skip-check", "--out", "m.gguf")
    assert said.code == 2 and "tokenizer" in said.err
    Tokenizer.train(["steel\n"] * 9, 257).save(Path(folder) / "tokenizer.json")  # its ids are beyond the vocabulary
    said = call("export", folder, "--to", "gguf", "--out", "m.gguf", "--skip-check", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out) == {"file": "m.gguf", "architecture": "llama", "kind": "f16", "checks": {}}
    assert Path("m.gguf").read_bytes()[:4] == b"GGUF"
    said = call("export", folder, "--to", "gguf", "--out", "m.gguf", "--skip-check")
    assert said.code == 2 and "m.gguf: exists; choose another name, or pass --overwrite" in said.err


def test_another_model_or_a_damaged_one_exits_with_1_and_writes_nothing(
    call: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("export", folder, "--to", "bessemer", "--out", "ours").code == 0

    def differs(*_: Any) -> None:
        raise Mismatch("the converted model is not the same: layer 7 differs by 3.0e-01")

    monkeypatch.setattr(hf, "check", differs)
    said = call("export", "ours", "--to", "hf", "--out", "back")
    assert said.code == 1 and "layer 7" in said.err and not Path("back").exists()
    shard = next(Path("ours/model-00000000.a1").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    said = call("export", "ours", "--to", "hf", "--out", "back")
    assert said.code == 1 and shard.name in said.err and not Path("back").exists()


def test_without_transformers_the_extra_is_named(call: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    said = call("export", folder, "--to", "bessemer", "--out", "ours")
    assert said.code == 2 and "pip install 'bessemer[hf]'" in said.err and not Path("ours").exists()
    assert call("export", folder, "--to", "bessemer", "--out", "ours", "--skip-check").code == 0
