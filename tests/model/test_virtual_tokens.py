"""Prompt and prefix tuning: equal to PEFT's in function and gradients, exchanged with it, packed and generated with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.adapters import MergedWeights, adapters_off, add_adapters, init_adapters, is_part, using_adapter
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.adapter import AdapterFolder, read_adapter, with_folder
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.registry import read_shape
from bessemer.model.generate import Generator, Request, Sampling
from bessemer.model.transformer import Decoder, build_model
from bessemer.model.virtual_tokens import load_virtual, to_peft
from bessemer.spec.adapter import AdapterSpec
from bessemer.spec.shape import Mamba, ModelShape
from bessemer.train.trained import find_model

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
COUNT = 5
TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
}  # fmt: skip
KINDS, TENSOR = ("prompt", "prefix"), "prompt_embeddings"
CONFIGS = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        paths[name] = tmp_path_factory.mktemp(name)
        make().save_pretrained(paths[name])
    return paths


def native(folder: Path, kind: str, draw: bool = True) -> Decoder:
    family, shape = read_shape(HfFolder(folder).config)
    model, spec = build_model(shape, "cpu", 0), AdapterSpec(kind=kind, virtual_tokens=COUNT)
    load_weights(model, HfFolder(folder), family)
    add_adapters(model, spec, 1, 1.0)
    init_adapters(model, spec, 1.0, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad and draw:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def parts_of(model: Decoder) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if is_part(name)}


def write(model: Decoder, base: Path, path: Path) -> Path:
    config, weights = to_peft(parts_of(model), model.shape, str(base))
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, path / "adapter_model.safetensors")
    return path


def logits(model: Any, tokens: Tensor = TOKENS, mask: AttentionMask | None = None) -> Tensor:
    out: Tensor = model.logits(model(tokens, mask))
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_function_and_gradients_are_pefts(folders: Any, name: str, kind: str, tmp_path: Path) -> None:
    model = native(folders[name], kind)
    path = write(model, folders[name], tmp_path / kind)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    config = CONFIGS[kind](task_type="CAUSAL_LM", num_virtual_tokens=COUNT)
    other = peft.get_peft_model(base, config)  # PEFT loads these for inference only
    with torch.no_grad():
        other.prompt_encoder["default"].embedding.weight.copy_(load_file(path / "adapter_model.safetensors")[TENSOR])
        read = peft.PeftModel.from_pretrained(FAMILIES[name]().from_pretrained(folders[name]), path)
        assert torch.equal(read(TOKENS).logits, other.eval()(TOKENS).logits)
    other.train()
    expected, actual = other(TOKENS).logits[:, -TOKENS.shape[1] :], logits(model)
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max() + 1e-6
    for out in (expected, actual):
        out.square().mean().backward()
    (gradient,) = (p.grad for p in other.parameters() if p.requires_grad)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(gradients) == (1 if kind == "prompt" else 2)
    _, native_gradient = to_peft(gradients, model.shape, "")  # type: ignore[arg-type]
    torch.testing.assert_close(native_gradient[TENSOR], gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_peft_saves_is_read(folders: Any, name: str, kind: str, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    theirs = peft.get_peft_model(base, CONFIGS[kind](task_type="CAUSAL_LM", num_virtual_tokens=COUNT))
    theirs.save_pretrained(tmp_path)
    config_file = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config_file | {"base_model_name_or_path": str(folders[name])})
    )
    model = native(folders[name], kind)
    spec = with_folder(AdapterSpec(path=str(tmp_path)), model.shape)
    assert (spec.kind, spec.virtual_tokens) == (kind, COUNT)
    tensors = read_adapter(tmp_path, model.shape)
    with using_adapter(model, tensors):
        torch.testing.assert_close(logits(model), theirs(TOKENS).logits[:, -16:], rtol=1e-5, atol=1e-5)
    written, saved = to_peft(tensors, model.shape, "")[1], load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(saved[key], tensor) for key, tensor in written.items())
    with pytest.raises(UserError, match="cannot be merged into weights"):
        AdapterFolder(tmp_path)
    assert type(find_model(tmp_path).hf_folder).__name__ == "VirtualFolder"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_compute_as_each_alone(folders: Any, name: str, kind: str) -> None:
    model = native(folders[name], kind)
    documents = torch.tensor([[0] * 5 + [1] * 8 + [2] * 3, [0] * 16])
    together = logits(model, TOKENS, AttentionMask(documents))
    alone = [logits(model, part) for part in TOKENS[:1].split((5, 8, 3), dim=1)]
    torch.testing.assert_close(together[:1], torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together[1:], logits(model, TOKENS[1:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_reads_the_virtual_tokens(folders: Any, name: str, kind: str) -> None:
    trained = native(folders[name], kind).double().eval()
    model = native(folders[name], kind).double().eval()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(logits(trained, torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    answers = Generator(model, 2, 40).run([Request(prompt, 8, Sampling(0.0)) for prompt in prompts])
    assert [list(answer.tokens) for (answer,) in answers] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_starts_from_tokens_of_the_vocabulary(folders: Any, kind: str) -> None:
    model = native(folders["llama"], kind, draw=False)
    rows = model.embedding.weight
    base = native(folders["llama"], "prompt", draw=False)
    drawn = torch.cdist(base.prompt.virtual, rows).argmin(1)  # type: ignore[union-attr]
    assert torch.equal(base.prompt.virtual, rows[drawn])  # type: ignore[union-attr]
    read = torch.cat((drawn.expand(2, COUNT), TOKENS), dim=1)
    with adapters_off(model):
        plain, expected = logits(model), logits(model, read)[:, COUNT:]
    assert (logits(model) - plain).abs().max() > 1e-4
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)  # as if these tokens stood there


def test_they_are_never_merged_or_put_where_they_have_no_place(folders: Any) -> None:
    model = native(folders["llama"], "prefix")
    with pytest.raises(UserError, match=r"blocks.0.attention.prefix.virtual: virtual tokens .* cannot be merged"):
        MergedWeights(dict(model.state_dict()))
    copy = build_model(model.shape, "cpu", 0)
    load_virtual(copy, parts_of(model))
    assert copy.virtual == COUNT
    mamba = ModelShape(96, 32, 2, 4, 2, 8, 80, mamba=Mamba(4), mixers=("mamba", "attention"))
    hybrid = build_model(mamba, "meta", 0)
    with pytest.raises(UserError, match=r"adapter.kind: prefix: Mamba layers cannot be combined"):
        add_adapters(hybrid, AdapterSpec(kind="prefix"), 1, 1.0)
    for settings, fix in (({"rank": 4}, "remove rank"), ({"targets": ["query"]}, "remove targets")):
        with pytest.raises(ValueError, match=fix):
            AdapterSpec(kind="prompt", **settings)
