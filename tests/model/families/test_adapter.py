"""LoRA adapters in PEFT's format, merged while they are read."""

import json

import parity
import pytest
import test_llama
import torch
from safetensors.torch import save_file

from bessemer.errors import UserError
from bessemer.model.families.adapter import AdapterFolder
from bessemer.model.families.folder import load_weights
from bessemer.model.transformer import make_module


def write_adapter(path, base, rank=4, alpha=8, **config):
    path.mkdir()
    generator = torch.Generator().manual_seed(3)
    sizes = {"model.layers.0.self_attn.q_proj": (24, 24), "model.layers.2.mlp.down_proj": (24, 40)}
    tensors = {}
    for module, (rows, columns) in sizes.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": rank, "lora_alpha": alpha} | config
    (path / "adapter_config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture(scope="module")
def pair():
    return parity.Pair(test_llama.config_of(test_llama.LLAMA), test_llama.LLAMA)


@pytest.mark.parametrize(
    ("config", "scale"),
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 2}}, 0.5)],
    ids=["plain", "rslora", "alpha_pattern"],
)
def test_the_merged_model_is_the_base_with_its_products(pair, tmp_path, config, scale):
    tensors = write_adapter(tmp_path / "adapter", pair.path, **config)
    folder = AdapterFolder(tmp_path / "adapter")
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"] for side in "AB")
    base = pair.folder.read("model.layers.0.self_attn.q_proj.weight")
    torch.testing.assert_close(folder.read("model.layers.0.self_attn.q_proj.weight"), base + scale * b @ a)
    untouched = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(folder.read(untouched), pair.folder.read(untouched))


def test_logits_are_those_of_peft(pair, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    write_adapter(tmp_path / "adapter", pair.path, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = peft.PeftModel.from_pretrained(pair.theirs, tmp_path / "adapter").merge_and_unload()
    folder = AdapterFolder(tmp_path / "adapter")
    ours = make_module(pair.shape).eval()
    load_weights(ours, folder, pair.family)
    tokens = pair.tokens()
    with torch.no_grad():
        parity.close(ours.logits(ours(tokens)), theirs(tokens).logits, 1e-4)


def test_what_cannot_be_merged_is_refused(pair, tmp_path):
    cases = {
        "dora": ({"use_dora": True}, "describes .*magnitude"), "loha": ({"peft_type": "LOHA"}, "only LORA"),
        "bias": ({"bias": "all"}, "without trained biases"),
        "moved": ({"base_model_name_or_path": "org/model"}, "'org/model' is no folder"),
    }  # fmt: skip
    for name, (config, message) in cases.items():
        write_adapter(tmp_path / name, pair.path, **config)
        with pytest.raises(UserError, match=message):
            AdapterFolder(tmp_path / name)
    tensors = write_adapter(tmp_path / "other", pair.path)
    tensors = {name.replace("layers.2", "layers.9"): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "other" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="for another model"):
        AdapterFolder(tmp_path / "other")
