"""Compressed models: what is written is what was measured, opens elsewhere and here; a worse model is refused."""

import json
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.compress import QualityTooLow, _check_logits, compress, text_rows
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.registry import read_shape
from bessemer.model.transformer import Decoder
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import find_model, load_model

Make = Callable[..., Path]
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def random_rows(rows: int = 12, length: int = 24) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(0))


def native(folder: HfFolder) -> Decoder:
    family, shape = read_shape(folder.config)
    model = Decoder(shape)
    load_weights(model, folder, family)
    return model.eval()


@torch.no_grad()
def perplexity(model: Decoder, rows_RT: Tensor) -> float:
    logits = model.logits(model(rows_RT))[:, :-1].flatten(0, 1)
    return math.exp(F.cross_entropy(logits, rows_RT[:, 1:].flatten()))


@pytest.mark.parametrize(("to", "method"), [("int4", "auto"), ("int4", "awq"), ("int8", "gptq"), ("fp8", "auto")])
def test_what_is_written_is_what_was_measured(folder: Make, tmp_path: Path, to: str, method: str) -> None:
    """The folder, dequantized, has the perplexity that was computed block by block."""
    source, tokens_RT = HfFolder(folder("Llama", **SIZES)), random_rows()
    result = compress(source, tokens_RT, tmp_path / "out", to, method, 32, limit=1.0, check=False)
    test_RT = tokens_RT[3::4]
    assert result.quality.perplexity_before == pytest.approx(perplexity(native(source), test_RT), rel=1e-5)
    written = find_model(tmp_path / "out").hf_folder
    if to != "fp8":  # whose inputs are rounded too
        assert result.quality.perplexity == pytest.approx(perplexity(native(written), test_RT), rel=1e-5)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {"int4": torch.int32, "int8": torch.int32, "fp8": torch.float8_e4m3fn}
    down = stored[f"model.layers.0.mlp.down_proj.weight{'' if to == 'fp8' else '_packed'}"]
    assert down.dtype == kinds[to] and tuple(down.shape) == (64, {"int4": 12, "int8": 24, "fp8": 96}[to])
    assert result.bytes[1] == sum(tensor.nbytes for tensor in stored.values()) < 0.8 * result.bytes[0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    assert len(result.choices) == 4 * 3 and sorted(p.name for p in tmp_path.iterdir()) == ["out", "theirs"]


def test_fewer_bits_lose_more(folder: Make, tmp_path: Path) -> None:
    source = HfFolder(folder("Qwen3", **SIZES))
    kl = {
        to: compress(source, random_rows(), tmp_path / to, to, "rtn", 32, limit=1.0, check=False).quality.kl
        for to in ("int8", "int4")
    }
    assert 0 < 50 * kl["int8"] < kl["int4"]


def test_beyond_the_limit_nothing_is_written(folder: Make, tmp_path: Path) -> None:
    source = HfFolder(folder("Llama", **SIZES))
    with pytest.raises(QualityTooLow, match=r"perplexity rises by .* the limit is -50.0%"):
        compress(source, random_rows(), tmp_path / "out", "int4", "rtn", 32, limit=-0.5, check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_damaged_writer_is_caught(folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.model.families import compressed_tensors

    def damaged(codes_OI: Tensor, bits: int) -> Tensor:
        return genuine(codes_OI, bits).flip(0)

    genuine = compressed_tensors.pack
    monkeypatch.setattr(compressed_tensors, "pack", damaged)
    with pytest.raises(QualityTooLow, match="reads back with other values"):
        compress(HfFolder(folder("Llama", **SIZES)), random_rows(), tmp_path / "out", "int4", "rtn", 32, limit=1.0,
                 check=False)  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_compressed_is_refused(folder: Make, tmp_path: Path) -> None:
    def refused(kind: str, message: str, head: str = "ForCausalLM", **keys: Any) -> None:
        with pytest.raises(UserError, match=message):
            compress(HfFolder(folder(kind, head, **keys)), random_rows(), tmp_path / "out", "int4")

    refused(
        "GPT2",
        "stores matrices transposed",
        "LMHeadModel",
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        vocab_size=96,
    )
    refused("Mixtral", "only dense models", num_local_experts=2)
    refused("Llama", "--group 128: must divide the inputs of every layer", hidden_size=36, intermediate_size=40,
            head_dim=8)  # fmt: skip
    again = folder("Llama", **SIZES)
    compress(HfFolder(again), random_rows(), tmp_path / "once", "int8", "rtn", 0, limit=1.0, check=False)
    with pytest.raises(UserError, match="is quantized already"):
        compress(HfFolder(tmp_path / "once"), random_rows(), tmp_path / "twice", "int4")


def test_formats_that_cannot_be_read_are_named(folder: Make, tmp_path: Path) -> None:
    compress(HfFolder(folder("Llama", **SIZES)), random_rows(), tmp_path / "out", "int8", "rtn", 32, limit=1.0,
             check=False)  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="compressed-tensors as pack-quantized of 1 groups, 8 bits int, group"):
        native(find_model(tmp_path / "out").hf_folder)


def test_a_run_by_the_command(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("steel iron blast flame ore coke slag heat pour mould " * 60)
    command = ["compress", str(run), "--to", "int8", "--text", str(text), "--out", str(tmp_path / "out"), "--group"]
    command += ["32", "--length", "16", "--skip-check", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "int8  groups of 32" in result.output and "perplexity" in result.output and "x smaller" in result.output
    original, loaded = load_model(run, device="cpu"), load_model(tmp_path / "out", device="cpu")
    prompt = original.prompt("steel iron")
    with torch.no_grad():
        logits = [m.model.logits(m.model(torch.tensor([prompt]))) for m in (original, loaded)]
    assert loaded.prompt("steel iron") == prompt and 0 < (logits[0] - logits[1]).abs().max() < 0.05
    refused = CliRunner().invoke(app, [*command, "--overwrite", "--limit", "0%"])
    assert refused.exit_code in (0, 1)  # on so small a model 8 bits may even be better
    short = CliRunner().invoke(app, [*command, "--overwrite", "--length", "32", "--rows", "8", "--to", "int3"])
    assert isinstance(short.exception, UserError) and "--to int3" in str(short.exception)


def test_rows_are_spread_over_the_text(run: Path) -> None:
    tokenizer = Tokenizer.load(run / "tokenizer.json", "<|endoftext|>")
    rows_RT = text_rows((f"steel {i}" for i in range(10_000)), tokenizer, 16, 8)
    again = text_rows((f"steel {i}" for i in range(10_000)), tokenizer, 16, 8)
    assert rows_RT.shape == (16, 8) and torch.equal(rows_RT, again)
    assert len(text_rows(["steel " * 150], tokenizer, 99, 8)) < 40
    with pytest.raises(UserError, match=r"tokens are too few: give 8 rows of 64"):
        text_rows(["steel"], tokenizer, 16, 64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A run on the standard library's code, and held-out modules of it."""
    place = tmp_path_factory.mktemp("code")
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    spec = {
        "name": "code", "runs": str(place / "runs"), "precision": "fp32",
        "model": {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 192}, "tokenizer": {"vocab": 512},
        "data": {"sources": {"code": [str(path) for path in modules[:60:2]]}, "context": 64, "validation": 0.02},
        "budget": {"steps": 200, "batch": 2048}, "parallel": {"device": "cpu", "threads": 1},
        "optimizer": {"lr": 0.01}, "checkpoint": {"every": 200},
    }  # fmt: skip
    assert train(RunSpec.model_validate(spec)).kind == "finished"
    return place / "runs" / "code", modules[1:60:2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gptq_and_awq_of_a_trained_model(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """int4: perplexity within 3 % of the original, and nearer to it than rounding to the nearest, in KL for each method
    and in perplexity for GPTQ (that of AWQ differs by less than the noise); transformers agrees."""
    pytest.importorskip("compressed_tensors")
    from bessemer.export.compress import source_folder

    run, modules = trained
    tokenizer = Tokenizer.load(run / "tokenizer.json", "<|endoftext|>")
    tokens_RT = text_rows((path.read_text() for path in modules), tokenizer, 512, 64)
    with source_folder(run, "last", tmp_path) as source:
        results = {
            method: compress(source, tokens_RT, tmp_path / method, "int4", method, 64, limit=0.5)
            for method in ("rtn", "awq", "gptq", "auto")
        }
    assert all(result.opened is not None and result.opened < 1e-5 for result in results.values())
    plain = results.pop("rtn")
    for method, result in results.items():
        assert abs(result.quality.increase) < 0.03 and result.quality.kl < 0.85 * plain.quality.kl, method
    for method in ("gptq", "auto"):
        assert results[method].quality.perplexity < plain.quality.perplexity
        assert results[method].quality.kl < 0.5 * plain.quality.kl
    assert results["auto"].quality.kl < 1.1 * min(results["awq"].quality.kl, results["gptq"].quality.kl)


def test_logits_of_the_written_folder_are_compared() -> None:
    expected_TV = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    near_TV, far_TV = ((expected_TV + by * torch.arange(11)).log_softmax(-1) for by in (1e-5, 0.1))
    gap = float((near_TV - expected_TV).abs().max() / expected_TV.abs().max())
    assert _check_logits(near_TV, expected_TV, 1e-3, 0.0) == pytest.approx(gap)
    with pytest.raises(QualityTooLow, match="they differ by"):
        _check_logits(far_TV, expected_TV, 1e-3, 1.0)
    between = float((expected_TV.exp() * (expected_TV - far_TV)).sum(-1).mean())
    assert _check_logits(far_TV, expected_TV, None, between) > 1e-3  # fp8: within what compression itself changed
    with pytest.raises(QualityTooLow, match="their divergence is"):
        _check_logits(far_TV, expected_TV, None, between / 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2", "GPTNeoX", "Phi3", "Olmo2"])
def test_transformers_opens_every_format(folder: Make, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    keys = SIZES | {"Phi3": {"pad_token_id": 0}, "Gemma2": {"head_dim": 16}}.get(kind, {})
    source = HfFolder(folder(kind, **keys))
    for to in ("int4", "int8", "fp8"):
        result = compress(source, random_rows(), tmp_path / to, to, "auto", 32, limit=1.0)
        assert result.opened is not None and result.opened < (2e-2 if to == "fp8" else 1e-5)


@pytest.mark.slow
def test_a_family_that_transformers_does_not_open_is_named(folder: Make, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = HfFolder(folder("Falcon", **SIZES))
    with pytest.raises(QualityTooLow, match="transformers cannot open the compressed folder"):
        compress(source, random_rows(), tmp_path / "out", "int8", "rtn", 32, limit=1.0)
    assert not (tmp_path / "out").exists()
    assert compress(source, random_rows(), tmp_path / "out", "int8", "rtn", 32, limit=1.0, check=False).opened is None
