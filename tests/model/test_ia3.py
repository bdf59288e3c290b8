"""IA3: equal to PEFT's in function and gradients, exchanged with it in both directions, and merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bessemer.checkpoint.base import FolderWeights
from bessemer.errors import UserError
from bessemer.model.adapters import MergedWeights, adapters_off, add_adapters, clear_adapters, init_adapters, is_part
from bessemer.model.families.adapter import ia3_files, read_adapter, with_folder
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.registry import Family, read_shape
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.adapter import AdapterSpec

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
TARGETS = ["k_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2, whose keys and values have biases."""
    path = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return path


def native(folder: Path) -> tuple[Decoder, Family]:
    family, shape = read_shape(HfFolder(folder).config)
    model = build_model(shape, "cpu", 0)
    load_weights(model, HfFolder(folder), family)
    add_adapters(model, AdapterSpec(kind="ia3"), 1, 1.0)
    clear_adapters(model)
    init_adapters(model, AdapterSpec(kind="ia3"), 1.0, 0)
    return model, family


def trained(folder: Path) -> tuple[Decoder, Family]:
    model, family = native(folder)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model, family


def parts_of(model: Decoder) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if is_part(name)}


def write(model: Decoder, family: Family, base: Path, path: Path) -> Path:
    config, weights = ia3_files(parts_of(model), model.shape, family, str(base))
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, path / "adapter_model.safetensors")
    return path


TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> Tensor:
    out: Tensor = model.logits(model(TOKENS))
    return out


def test_it_starts_as_the_base_and_trains_three_vectors_a_layer(folder: Path) -> None:
    model, _ = native(folder)
    expected = transformers.Qwen2ForCausalLM.from_pretrained(folder)(TOKENS).logits
    assert torch.allclose(logits(model), expected, atol=1e-5)
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert len(sizes) == 6 and sum(sizes.values()) == 2 * (16 + 16 + 80)
    changed, _ = trained(folder)
    with adapters_off(changed):
        assert torch.equal(logits(changed), logits(model))


def test_function_and_gradients_are_pefts(folder: Path, tmp_path: Path) -> None:
    model, family = trained(folder)
    path = write(model, family, folder, tmp_path / "ia3")
    base = transformers.Qwen2ForCausalLM.from_pretrained(folder)
    other = peft.PeftModel.from_pretrained(base, path, is_trainable=True)
    expected, actual = other(TOKENS).logits, logits(model)
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max() + 1e-6
    for out in (expected, actual):
        out.square().mean().backward()
    gradients = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    key = next(g for name, g in gradients.items() if "layers.0.self_attn.v_proj" in name)
    down = next(g for name, g in gradients.items() if "layers.1.mlp.down_proj" in name)
    value = model.blocks[0].attention.value.ia3_out.grad  # type: ignore[union-attr]
    unit = model.blocks[1].ffn.down.ia3_in.grad  # type: ignore[union-attr]
    assert torch.allclose(value, key.flatten(), rtol=1e-4, atol=1e-8)  # type: ignore[arg-type]
    assert torch.allclose(unit, down.flatten(), rtol=1e-4, atol=1e-8)  # type: ignore[arg-type]


def test_what_peft_saves_is_read_and_what_we_write_merges(folder: Path, tmp_path: Path) -> None:
    base = transformers.Qwen2ForCausalLM.from_pretrained(folder)
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=TARGETS, feedforward_modules=["down_proj"])
    other = peft.get_peft_model(base, config)
    for name, parameter in other.named_parameters():
        if "ia3_l" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    other.peft_config["default"].base_model_name_or_path = str(folder)
    other.save_pretrained(tmp_path / "theirs")
    model, family = native(folder)
    spec = with_folder(AdapterSpec(path=str(tmp_path / "theirs")), model.shape)
    assert spec.kind == "ia3" and len(spec.targets) == 6
    given = read_adapter(tmp_path / "theirs", model.shape)
    init_adapters(model, spec, 1.0, 0, given)
    expected = other(TOKENS).logits
    assert torch.allclose(logits(model), expected, atol=1e-5)
    path = write(model, family, folder, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    merged, read = MergedWeights(model.state_dict()), FolderWeights(path, body=False)
    for name in read:
        assert torch.allclose(merged[name], read[name], atol=1e-6), name
    plain = build_model(model.shape, "cpu", 0)
    plain.load_state_dict({name: merged[name] for name in merged})
    assert torch.allclose(logits(plain), expected, atol=1e-5)


def test_settings_of_matrices_are_refused(tmp_path: Path) -> None:
    for key, value in (("rank", 8), ("alpha", 16.0), ("dropout", 0.1), ("lr_ratio", 4.0)):
        with pytest.raises(ValueError, match=f"remove {key}"):
            AdapterSpec(kind="ia3", **{key: value})  # type: ignore[arg-type]
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    with pytest.raises(UserError, match="peft_type 'LOHA': only LORA"):
        with_folder(AdapterSpec(path=str(tmp_path)), native_shape())


def native_shape() -> Any:
    from bessemer.spec.shape import PRESETS

    return PRESETS["1M"]
