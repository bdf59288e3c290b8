"""`bessemer model show`: counts that are published, and diagrams that differ where models do."""

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.export.describe import diagram
from bessemer.plan.cost_model.memory import Passes, activation_bytes
from bessemer.spec.shape import Mamba, Mla, ModelShape, Moe, Rope

# As published with mistralai/Mixtral-8x7B-v0.1.
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
BASE = ModelShape(vocab=1000, width=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=128)


def test_mixtral_has_its_published_sizes(call: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    found = json.loads(call("model", "show", ".", "--json", "--batch", "2", "--context", "4096").out)
    assert found["total"] == 46_702_792_704 and found["active"] == 12_879_925_248
    assert found["cache_bytes"] == 2 * 32 * 2 * 8 * 128 * 4096
    assert found["flops_per_token"] == 6 * (12_879_925_248 - 32000 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 4096
    assert found["memory_bytes"]["AdamW moments"] == 8 * 46_702_792_704
    said = call("model", "show", "config.json").out
    assert "46.7B" in said and "12.9B" in said and "8 experts of SwiGLU 14,336, 2 per token" in said


def test_the_context_is_the_specs_unless_another_is_asked_for(call: Any) -> None:
    Path("run.yaml").write_text("model: 1M\ndata: {sources: {a: x.jsonl}, context: 256}\n")
    Path("open.yaml").write_text("model: 1M\ndata: {sources: {a: x.jsonl}}\n")
    Path("made").mkdir()
    Path("made/model.json").write_text(json.dumps({"shape": BASE.to_dict()}))
    Path("made/spec.yaml").write_text(Path("run.yaml").read_text())
    asked = [("run.yaml",), ("open.yaml",), ("1M",), ("made",), ("run.yaml", "--context", "64")]
    found = [json.loads(call("model", "show", *given, "--json").out)["context"] for given in asked]
    assert found == [256, 2048, 2048, 256, 64]


def test_a_spec_a_preset_and_a_run_can_be_shown(call: Any, tmp_path: Path) -> None:
    spec = "model: {preset: 1M, qk_norm: head}\ntokenizer: {vocab: 512}\ndata: {sources: {a: x.jsonl}}\n"
    Path("run.yaml").write_text(spec)
    said = json.loads(call("model", "show", "run.yaml", "--json").out)
    assert said["shape"]["vocab"] == 512 and said["shape"]["qk_norm"] == "head"
    assert json.loads(call("model", "show", "run.yaml", "--vocab", "700", "--json").out)["shape"]["vocab"] == 700
    assert json.loads(call("model", "show", "llama-3-8b", "--json").out)["total"] == 8_030_261_248  # as Meta counts it
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/model.json").write_text(json.dumps({"shape": BASE.to_dict(), "eos": "</s>"}))
    assert json.loads(call("model", "show", "runs/a", "--json").out)["total"] == BASE.parameters
    wrong = call("model", "show", "9000B")
    assert wrong.code == 2 and "neither a file or folder nor a preset" in wrong.err


def test_activations_are_the_planners(call: Any) -> None:
    found = json.loads(call("model", "show", "1M", "--json", "--batch", "2", "--context", "64").out)
    shape = ModelShape.from_dict(found["shape"])
    assert found["memory_bytes"]["activations"] == activation_bytes(shape, Passes(64, 2, "fp32", "none", True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["layer 0 to 3: 4 times", "x -> RMSNorm -> attention (4 heads of 16, 2 for keys and values, RoPE 10000"]),
        ({"windows": (32, 0)}, ["layer 0, 2: 2 times", "window 32", "layer 1, 3: 2 times"]),
        ({"norm": "layer", "norm_place": "post"}, ["-> + x -> LayerNorm"]),
        ({"norm_place": "sandwich"}, ["RMSNorm -> SwiGLU 128 -> RMSNorm -> + x"]),
        ({"norm_place": "branch", "qk_norm": "full"}, ["x -> SwiGLU 128 -> RMSNorm -> + x", "normed by full"]),
        ({"parallel": "one_norm", "gated": False, "activation": "gelu"}, ["both from the same x", "GELU 128"]),
        (
            {"moe": Moe(8, 2, 32, shared=1, dense_layers=(0,))},
            ["layer 0: 1 times", "8 experts of SwiGLU 32, 2 per token + 1"],
        ),
        ({"mixers": ("mamba", "attention"), "mamba": Mamba(4)}, ["Mamba-2 (4 heads of 64, state 128)"]),
        ({"mla": Mla(8, 8, 8, 8)}, ["keys and values through 8"]),
        ({"positions": "alibi", "causal": False}, ["alibi positions, bidirectional"]),
        ({"rope": Rope(scaling="yarn", factor=4.0)}, ["yarn x 4"]),
        ({"logit_cap": 30.0, "tied": False}, ["capped at 30", "its own weights"]),
    ],
)
def test_the_diagram_shows_what_a_model_is(changes: dict[str, Any], expected: list[str]) -> None:
    from dataclasses import replace

    drawn = "\n".join(diagram(replace(BASE, **changes)))
    for words in expected:
        assert words in drawn, drawn
