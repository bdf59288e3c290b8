"""GGUF files, opened by llama.cpp: the same logits at every position and the same greedy tokens as ours."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.data.tokenizer.chat import special_tokens
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export import gguf, gguf_model, llama_cpp
from bessemer.export.gate import Mismatch
from bessemer.export.gguf_tokenizer import vocabulary
from bessemer.export.outputs import ReferenceOutputs, compare
from bessemer.export.source import ExportSource, open_source

pytest.importorskip("transformers")
package: Any = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

Make = Callable[..., Path]
Open = Callable[..., ExportSource]
LINES = ["steel iron blast flame ore coke slag heat 123 ingot forge\n", "if x == 3:\n    pour()\n"] * 20


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 300, special=special_tokens("chatml"))


@pytest.fixture
def source(folder: Make, tokenizer: Tokenizer) -> Open:
    """A tiny model of a family with random weights, and a tokenizer."""

    def make(kind: str, head: str = "ForCausalLM", **keys: Any) -> ExportSource:
        usual = {"vocab_size": 300, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
        path = folder(kind, head, **(usual | keys))
        tokenizer.save(path / "tokenizer.json")
        return open_source(path)

    return make


SHORT: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama", "ForCausalLM", {"tie_word_embeddings": True}),
    ("Gemma3Text", "Model", {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 7}),
    ("Qwen3", "ForCausalLM", {"head_dim": 16}),
]
_ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_PHI = {"sliding_window": None}
_FALCON = {"alibi": False, "bias": False, "new_decoder_architecture": True, "num_kv_heads": 2}
LONG: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama", "ForCausalLM", {"attention_bias": True, "mlp_bias": True,
                              "rope_scaling": _ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0,
                                                       "high_freq_factor": 4.0}}),
    ("Llama", "ForCausalLM", {"rope_scaling": _ROPE | {"rope_type": "yarn"}}),
    ("Llama", "ForCausalLM", {"rope_scaling": {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}}),
    ("Mistral", "ForCausalLM", {"sliding_window": None}),
    ("Mixtral", "ForCausalLM", {"num_local_experts": 4}),
    ("Qwen2", "ForCausalLM", {}),
    ("Qwen3Moe", "ForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                 "norm_topk_prob": True, "head_dim": 8}),
    ("Olmo2", "ForCausalLM", {}),
    ("Phi3", "ForCausalLM", _PHI),
    ("Phi3", "ForCausalLM", _PHI | {"original_max_position_embeddings": 256, "max_position_embeddings": 1024,
                                    "rope_scaling": {"rope_type": "longrope", "rope_theta": 10_000.0,
                                                     "short_factor": [1.0, 1.1, 1.2, 1.3],
                                                     "long_factor": [2.0, 2.1, 2.2, 2.3]}}),
    ("Gemma2", "ForCausalLM", {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}),
    ("GPTNeoX", "ForCausalLM", {}),
    ("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 128}),
    ("Falcon", "ForCausalLM", _FALCON),
    ("Falcon", "ForCausalLM", _FALCON | {"new_decoder_architecture": False, "multi_query": True}),
    ("Bloom", "ForCausalLM", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "head", "keys", "dtype"),
    [
        *(pytest.param(*case, "fp16", id=case[0]) for case in SHORT[:2]),
        pytest.param(*SHORT[2], "fp16", id=SHORT[2][0], marks=pytest.mark.slow),
        *(pytest.param(*case, "fp32", id=f"{i}-{case[0]}", marks=pytest.mark.slow) for i, case in enumerate(LONG)),
        *(pytest.param(*case, "bf16", id=f"bf16-{case[0]}", marks=pytest.mark.slow) for case in SHORT),
    ],
)
def test_llama_cpp_computes_the_same(
    source: Open, tmp_path: Path, kind: str, head: str, keys: dict[str, Any], dtype: str
) -> None:
    done = gguf.to_gguf(source(kind, head, **keys), tmp_path / "model.gguf", dtype)
    (agreement,) = done.agreements.values()
    assert agreement.tokens == 50 and agreement.clear_tokens > 25
    assert agreement.gap <= (1e-2 if dtype != "bf16" else 2e-2) and abs(agreement.change) < 0.01
    assert done.file.exists() and [path.name for path in tmp_path.glob(".*")] == []


def test_metadata_is_what_llama_cpp_reads(run: Path, tmp_path: Path) -> None:
    opened = open_source(run)
    gguf.to_gguf(opened, tmp_path / "model.gguf", check=False)
    fields = package.GGUFReader(tmp_path / "model.gguf").fields
    read = {name: field.contents() for name, field in fields.items()}
    end = opened.tokenizer.eos_id
    assert read["general.architecture"] == "llama" and read["llama.context_length"] == 32
    assert read["tokenizer.ggml.pre"] == "llama-bpe" and len(read["tokenizer.ggml.tokens"]) == 300
    assert read["tokenizer.ggml.bos_token_id"] == read["tokenizer.ggml.eos_token_id"] == end
    assert read["tokenizer.ggml.add_bos_token"] is True
    assert read["tokenizer.ggml.token_type"][end] == 3 and "<|im_start|>" in read["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    "damage",
    ["one tensor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("not interleaved", "no token order"))],
)
def test_a_damaged_writer_is_caught(source: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    opened, numbers = source("Llama"), gguf._numbers

    def damaged(tensor: Any, read: Any, kind: str) -> Any:
        values = numbers(tensor, read, kind)
        return values[::-1].copy() if tensor.name == "blk.1.attn_v.weight" else values

    if damage == "one tensor":
        monkeypatch.setattr(gguf, "_numbers", damaged)
    elif damage == "not interleaved":
        monkeypatch.setattr(gguf_model, "interleave", lambda rows, heads: rows)
    else:
        monkeypatch.setattr(gguf, "vocabulary", lambda *given: _swapped(vocabulary(*given)))
    with pytest.raises(Mismatch, match="tokenizer is not the same" if "token" in damage else "model is not the same"):
        gguf.to_gguf(opened, tmp_path / "model.gguf", "fp16")
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


def _swapped(words: Any) -> Any:
    """The vocabulary with two pieces of text exchanged."""
    first, second = (words.tokens.index(token) for token in ("i", "t"))
    words.tokens[first], words.tokens[second] = words.tokens[second], words.tokens[first]
    return words


def test_a_quantized_file_has_a_limit(source: Open, tmp_path: Path) -> None:
    opened = source("Llama", hidden_size=64)
    done = gguf.to_gguf(opened, tmp_path / "model.gguf", quantization="q8_0")
    assert list(done.agreements) == ["f16", "q8_0"] and done.agreements["q8_0"].tolerance is None
    kinds = {tensor.name: tensor.tensor_type.name for tensor in package.GGUFReader(done.file).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    with pytest.raises(Mismatch, match="perplexity rises by"):
        gguf.to_gguf(source("Llama", hidden_size=64), tmp_path / "other.gguf", quantization="q4_0", limit=-0.9)
    assert not (tmp_path / "other.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q5_1", "q4_0", "q4_k_m", "q6_k"])
def test_every_type_opens(source: Open, tmp_path: Path, kind: str) -> None:
    if kind in llama_cpp.K_QUANTS and llama_cpp.find_library(quantizer=True) is None:
        pytest.skip(f"no library with a quantizer: set {llama_cpp.VARIABLE}")
    opened = source("Llama", hidden_size=256, intermediate_size=512)
    done = gguf.to_gguf(opened, tmp_path / "model.gguf", quantization=kind, limit=0.5)
    assert done.agreements[kind].divergence < (0.5 if "4" in kind else 0.2)  # of random weights


def test_k_quants_need_a_library_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "_candidates", list)
    with pytest.raises(UserError, match=f"set {llama_cpp.VARIABLE} to a libllama.so"):
        gguf.check_request("q4_k_m", check=True)
    with pytest.raises(UserError, match=r"pip install 'bessemer\[gguf\]'"):
        gguf.check_request(None, check=True)
    monkeypatch.undo()
    monkeypatch.setenv(llama_cpp.VARIABLE, "nowhere")
    with pytest.raises(UserError, match=r"holds no libllama\.so"):
        gguf.check_request(None, check=True)


def test_a_file_that_llama_cpp_does_not_open_is_a_mismatch(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + os.urandom(200))
    rows = torch.zeros(1, 4, dtype=torch.long).numpy()
    with pytest.raises(llama_cpp.OpenerError, match="does not open the file"):
        llama_cpp.open_gguf(tmp_path / "broken.gguf", rows, [0], [])


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("Mistral", {"sliding_window": 16}, r"does not compute windows \(16,\)"),
        ("Qwen3", {"rope_scaling": _ROPE | {"rope_type": "dynamic"}}, "does not compute rope scaling dynamic"),
        ("Mixtral", {"num_local_experts": 4, "hidden_act": "gelu"}, "does not compute activation gelu"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    source: Open, tmp_path: Path, kind: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        gguf.to_gguf(source(kind, **keys), tmp_path / "model.gguf", check=False)


def test_unknown_tokenizers_are_refused_by_name(tokenizer: Tokenizer) -> None:
    from tokenizers import Regex, pre_tokenizers

    changed = Tokenizer(type(tokenizer.inner).from_str(tokenizer.inner.to_str()), tokenizer.eos)
    changed.inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    with pytest.raises(UserError, match=r"no name .* for this tokenizer's rule .*\\\\w\+"):
        vocabulary(changed, 300)
    for kind in ("wordpiece", "char"):
        with pytest.raises(UserError, match="no exact form in GGUF"):
            vocabulary(Tokenizer.train(LINES, 400, kind=kind), 400)


def test_interleaving_brings_pairs_together() -> None:
    rows = torch.arange(12.0)[:, None]  # two heads of six numbers: pairs (0, 3), (1, 4), (2, 5)
    assert gguf_model.interleave(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_the_comparison_against_formulas() -> None:
    torch.manual_seed(0)
    rows = torch.randint(0, 7, (2, 5))
    logits, steps = torch.randn(2, 5, 7), torch.randn(4, 7)
    ours = ReferenceOutputs(rows, logits, [1], [int(x) for x in steps[:3].argmax(-1)], steps)
    same = compare(ours, logits + 3.0, steps, "itself", 1e-5)  # a constant changes no probability
    assert same.gap < 1e-6 and same.equal_tokens == same.tokens == 3 and abs(same.divergence) < 1e-6
    exact = -sum(float(logits[r, t].log_softmax(-1)[rows[r, t + 1]]) for r in range(2) for t in range(4)) / 8
    assert math.isclose(same.perplexity, math.exp(exact), rel_tol=1e-5) and abs(same.change) < 1e-5
    other = logits.clone()
    other[1, 2, 3] += 1.0
    with pytest.raises(Mismatch, match="position 7 differs most"):
        compare(ours, other, steps, "another", 1e-3)
    with pytest.raises(Mismatch, match="not the same"):
        compare(ours, logits * math.nan, steps, "nothing", 1e-3)
    with pytest.raises(Mismatch, match="perplexity rises by"):
        compare(ours, -logits, steps, "another", None, limit=-0.99)
    swapped = steps.clone()
    swapped[0] = -swapped[0]
    with pytest.raises(Mismatch, match="not the same"):
        compare(ours, logits, swapped, "another", 1e-3)
