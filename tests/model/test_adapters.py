"""Adapters beside linear layers: equal to PEFT's in function and gradients, exchanged with it in both directions, and
exactly the base model where they are off."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bessemer.checkpoint.base import FolderWeights
from bessemer.errors import UserError
from bessemer.model.adapters import (
    BaseModel,
    MergedWeights,
    adapted_modules,
    adapters_off,
    add_adapters,
    init_adapters,
    matching_layers,
    merge,
    using_adapter,
)
from bessemer.model.families.adapter import PREFIX, PeftAdapter, read_adapter, with_folder
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.registry import read_shape
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.adapter import AdapterSpec, read_peft
from bessemer.spec.shape import ModelShape

transformers = pytest.importorskip("transformers")
KINDS = ("lora", "rslora", "dora", "pissa")
RANK, ALPHA = 4, 6.0
SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(3))


def load(folder: Path) -> Decoder:
    family, shape = read_shape(HfFolder(folder).config)
    model = build_model(shape, "cpu", 0)
    load_weights(model, HfFolder(folder), family)
    return model


def adapted(folder: Path, seed: int | None = 1, **parts: Any) -> Decoder:
    """The folder's model with adapters; with a seed their parts are as after some training."""
    model, spec = load(folder), AdapterSpec(**parts)
    add_adapters(model, spec, RANK, ALPHA)
    init_adapters(model, spec, spec.scale(RANK, ALPHA), 0)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: Any, tokens: Tensor) -> Tensor:
    out: Tensor = model.logits(model(tokens))
    return out


def parts_of(model: Decoder) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] in adapted_modules(model) and not name.endswith((".weight", ".bias"))
    }


def write_peft(model: Decoder, base: Path, out: Path, kind: str) -> Path:
    family, shape = read_shape(HfFolder(base).config)
    config, tensors = PeftAdapter(parts_of(model), shape, family, kind == "rslora").files(str(base), 0.0)
    out.mkdir()
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_computes_as_the_base(folder: Path, tokens: Tensor, kind: str) -> None:
    expected = logits(load(folder), tokens)
    actual = logits(adapted(folder, seed=None, kind=kind, modules_to_save=["embedding", "head"]), tokens)
    if kind == "dora":  # rows are divided by their lengths and multiplied by them again
        assert (actual - expected).abs().max() < 1e-6
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_off_is_the_base_bit_for_bit(folder: Path, tokens: Tensor, kind: str) -> None:
    base = load(folder)
    model = adapted(folder, kind=kind, modules_to_save=["embedding", "head"])
    assert (logits(model, tokens) - logits(base, tokens)).abs().max() > 0.01
    with adapters_off(model):
        assert torch.equal(logits(model, tokens), logits(base, tokens))
    reference = BaseModel(model)
    hidden = reference(tokens)
    assert torch.equal(reference.logits(hidden), logits(base, tokens)) and not hidden.requires_grad
    assert torch.equal(reference.head_weight, base.head_weight)
    assert all(module.active for module in adapted_modules(model).values())


def test_only_the_adapter_trains_and_weights_have_their_names(folder: Path, tokens: Tensor) -> None:
    base, model = load(folder), adapted(folder, targets=["q_proj", "blocks.1.ffn"], modules_to_save=["head"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = ["blocks.0.attention.query", "blocks.1.attention.query"]
    layers += [f"blocks.1.ffn.{name}" for name in ("gate", "up", "down")]
    assert trained == {f"{layer}.lora_{side}" for layer in layers for side in "ab"} | {"head.trained"}
    assert set(base.state_dict()) < set(model.state_dict())
    logits(model, tokens).square().mean().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_unknown_targets_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"adapter.targets: 'queries' matches no linear layer: .* query, up, value"):
        adapted(folder, targets=["queries"])
    with pytest.raises(UserError, match=r"adapter.rank: 40 exceeds blocks.0.attention.query"):
        add_adapters(load(folder), AdapterSpec(kind="pissa"), 40, 40.0)
    names = ["blocks.0.ffn.up", "blocks.1.ffn.up", "blocks.0.attention.out"]
    assert matching_layers(names, ["*.up"]) == names[:2] and matching_layers(names, ["blocks.0"]) == names[::2]


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_the_same(folder: Path, tokens: Tensor, kind: str) -> None:
    model = adapted(folder, kind=kind, modules_to_save=["embedding", "head"]).eval()
    weights, plain = MergedWeights(model.state_dict()), load(folder)
    assert set(weights) == set(plain.state_dict()) and len(weights.adapted) == 16
    plain.load_state_dict(dict(weights))
    assert (logits(plain, tokens) - logits(model, tokens)).abs().max() < 2e-5
    broken = {**parts_of(model), "blocks.0.ffn.up.lora_b": torch.full((80, RANK), float("nan"))}
    parts = {name.rpartition(".")[2]: tensor for name, tensor in broken.items() if name.startswith("blocks.0.ffn.up.")}
    with pytest.raises(UserError, match=r"ffn.up: the merged weight differs"):
        merge("blocks.0.ffn.up", plain.state_dict()["blocks.0.ffn.up.weight"], parts)


def test_pissa_starts_with_the_best_approximation(folder: Path) -> None:
    model = adapted(folder, seed=None, kind="pissa")
    for module in adapted_modules(model).values():
        low = module.lora_scale * (module.lora_b @ module.lora_a)
        singular = torch.linalg.svdvals(module.weight)
        error = torch.linalg.matrix_norm(module.weight - low).detach()
        assert float(error) == pytest.approx(float(singular[RANK:].square().sum().sqrt()), rel=1e-4)


def test_several_adapters_share_a_base(folder: Path, tokens: Tensor, tmp_path: Path) -> None:
    model = adapted(folder, seed=1, modules_to_save=["embedding"])
    own, others = logits(model, tokens), {}
    for name, parts in {"second": {}, "dora": {"kind": "dora"}, "few": {"targets": ["query"]}}.items():
        other = adapted(folder, seed=7, **parts)
        others[name] = parts_of(other), logits(other, tokens)
    shared = write_peft(adapted(folder, seed=7), folder, tmp_path / "second", "lora")
    others["read"] = read_adapter(shared, model.shape), others["second"][1]
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    for parts, expected in others.values():
        with using_adapter(model, parts), torch.no_grad():
            assert torch.equal(logits(model, tokens), expected)
        assert torch.equal(logits(model, tokens), own)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=r"blocks.9"), using_adapter(model, {"blocks.9.x.lora_a": own}):
        pass


@pytest.mark.parametrize("kind", ["dora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lora", "pissa"))])
def test_blocks_compile_as_one_graph(folder: Path, tokens: Tensor, kind: str) -> None:
    model = adapted(folder, kind=kind, dropout=0.1)
    block: Any = model.blocks[0]
    enter = torch.compile(lambda x: block.enter(x, None), backend="eager", fullgraph=True)
    x_BTW = model.embedding(tokens)
    for mode in (True, False):
        model.train(mode)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode):
            torch.manual_seed(0)
            expected = block.enter(x_BTW, None)[1]
            torch.manual_seed(0)
            assert torch.equal(enter(x_BTW)[1], expected)
    with adapters_off(model):
        assert torch.equal(enter(x_BTW)[1], load(folder).blocks[0].enter(x_BTW, None)[1])  # type: ignore[operator]


def test_dropout_is_for_training_only(folder: Path, tokens: Tensor) -> None:
    for kind in ("lora", "dora"):
        model = adapted(folder, kind=kind, dropout=0.5)
        with torch.no_grad():
            noisy, quiet = logits(model.train(), tokens), logits(model.eval(), tokens)
            assert not torch.equal(noisy, quiet)
            assert torch.equal(quiet, logits(adapted(folder, kind=kind).eval(), tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_in_pefts_format_is_read_back(folder: Path, tokens: Tensor, tmp_path: Path, kind: str) -> None:
    model = adapted(folder, kind=kind, modules_to_save=["embedding", "head"])
    out = write_peft(model, folder, tmp_path / "adapter", kind)
    read, original = read_adapter(out, model.shape), parts_of(model)
    assert all(torch.equal(read[name], original[name]) for name in read) == (kind != "pissa")
    spec = read_peft(AdapterSpec(path=str(out)))
    assert (spec.kind, spec.rank, spec.alpha) == (("lora", 8, 12.0) if kind == "pissa" else (kind, RANK, ALPHA))
    merged, weights = load(folder), FolderWeights(out, body=False)
    merged.load_state_dict({name: weights[name] for name in weights})
    assert (logits(merged, tokens) - logits(model, tokens)).abs().max() < 2e-5


FUSED = {
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 80}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
}


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fused_and_transposed_matrices(family: str, kind: str, tokens: Tensor, tmp_path: Path) -> None:
    name, more = FUSED[family]
    kinds = {k: v for k, v in SMALL.items() if family != "gpt2" or k == "vocab_size"}
    kinds |= {"num_key_value_heads": 4} if family != "gpt2" else {}
    config = getattr(transformers, name).config_class(**kinds, **more)
    base = tmp_path / "base"
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(base)
    model = adapted(base, kind=kind)
    out = write_peft(model, base, tmp_path / "adapter", kind)
    merged, weights = load(base), FolderWeights(out, body=False)
    merged.load_state_dict({name: weights[name] for name in weights}, strict=False)
    assert (logits(merged, tokens) - logits(model, tokens)).abs().max() < 5e-5


def peft_model(folder: Path, kind: str, seed: int | None, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_dora=kind == "dora", use_rslora=kind == "rslora", task_type="CAUSAL_LM",
        **{"target_modules": names, **settings},
    )  # fmt: skip
    model = peft.get_peft_model(base, config)
    if seed is not None:
        add_noise(model, seed)
    return model


def add_noise(model: Any, seed: int) -> None:
    """As after some training."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_function_and_gradients_are_pefts(folder: Path, tokens: Tensor, tmp_path: Path, kind: str) -> None:
    theirs = peft_model(folder, kind, seed=5)
    theirs.save_pretrained(tmp_path / "theirs")
    read = read_adapter(tmp_path / "theirs", load(folder).shape)
    model, spec = load(folder), read_peft(AdapterSpec(path=str(tmp_path / "theirs")))
    add_adapters(model, spec, RANK, ALPHA)
    init_adapters(model, spec, spec.scale(RANK, ALPHA), 0, read)
    ours_BTV, theirs_BTV = logits(model, tokens), theirs(tokens).logits
    assert (ours_BTV - theirs_BTV).abs().max() < 3e-6 * theirs_BTV.abs().max()  # the sum is in another order
    for output_BTV in (ours_BTV, theirs_BTV):
        torch.nn.functional.cross_entropy(output_BTV[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    names = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude"}
    modules = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    modules |= {"o_proj": "attention.out", "gate_proj": "ffn.gate", "up_proj": "ffn.up", "down_proj": "ffn.down"}
    ours, compared = dict(model.named_parameters()), 0
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.removeprefix(f"{PREFIX}model.layers.").split(".")
        gradient = ours[f"blocks.{parts[0]}.{modules[parts[2]]}.{names[parts[3]]}"].grad
        assert gradient is not None and parameter.grad is not None
        assert (gradient - parameter.grad).abs().max() < 1e-6 * max(1.0, float(parameter.grad.abs().max()))
        compared += 1
    assert compared == 14 * (3 if kind == "dora" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_what_is_written(folder: Path, tokens: Tensor, tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(folder, kind=kind, modules_to_save=["embedding", "head"])
    out = write_peft(model, folder, tmp_path / "adapter", kind)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, out).eval()
    assert (theirs(tokens).logits - logits(model, tokens)).abs().max() < 1e-5
    theirs.save_pretrained(tmp_path / "again")
    saved, again = (load_file(path / "adapter_model.safetensors") for path in (out, tmp_path / "again"))
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)


CHOICES: dict[str, dict[str, Any]] = {
    "a pattern": {"target_modules": r".*\.1\..*(q|v)_proj"},
    "some layers": {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [0]},
    "all but some": {"target_modules": "all-linear", "exclude_modules": ["gate_proj"]},
    "with the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "orthogonal": {"target_modules": ["up_proj"], "init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_peft_saves_is_read_and_written_again(folder: Path, tokens: Tensor, tmp_path: Path, name: str) -> None:
    theirs = peft_model(folder, "rslora", seed=7, **CHOICES[name])
    theirs.save_pretrained(tmp_path / "theirs")
    read = read_adapter(tmp_path / "theirs", load(folder).shape)
    spec = with_folder(AdapterSpec(path=str(tmp_path / "theirs")), load(folder).shape)
    model = load(folder)
    add_adapters(model, spec, RANK, ALPHA)
    init_adapters(model, spec, spec.scale(RANK, ALPHA), 0, read)
    with torch.no_grad():
        expected_BTV = theirs(tokens).logits
        assert (logits(model, tokens) - expected_BTV).abs().max() < 1e-6 * expected_BTV.abs().max()
    out = write_peft(model, folder, tmp_path / "ours", "rslora")
    saved, again = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "theirs", out))
    assert saved.keys() == again.keys() and all(torch.equal(saved[key], again[key]) for key in saved)
    peft = pytest.importorskip("peft")
    opened = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), out).eval()
    with torch.no_grad():
        assert (opened(tokens).logits - expected_BTV).abs().max() < 1e-6 * expected_BTV.abs().max()


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_for_a_changed_base_is_refused_until_it_is_converted(
    folder: Path, tokens: Tensor, tmp_path: Path, init: str
) -> None:
    theirs = peft_model(folder, "lora", seed=None, init_lora_weights=init)
    initial, changed, converted = (tmp_path / name for name in ("initial", "changed", "converted"))
    theirs.peft_config["default"].init_lora_weights = True  # of the factors as they begin
    theirs.save_pretrained(initial)
    theirs.peft_config["default"].init_lora_weights = init
    add_noise(theirs, seed=9)
    expected_BTV = theirs(tokens).logits
    theirs.save_pretrained(changed)
    with pytest.raises(UserError, match=f"init_lora_weights '{init}': the adapter is for a changed base"):
        read_adapter(changed, load(folder).shape)
    theirs.save_pretrained(converted, path_initial_model_for_weight_conversion=initial)
    read = read_adapter(converted, load(folder).shape)
    model, spec = load(folder), with_folder(AdapterSpec(path=str(converted)), load(folder).shape)
    assert spec.rank == 2 * RANK
    add_adapters(model, spec, 2 * RANK, 2 * ALPHA)
    init_adapters(model, spec, spec.scale(2 * RANK, 2 * ALPHA), 0, read)
    assert (logits(model, tokens) - expected_BTV).abs().max() < 1e-5 * expected_BTV.abs().max()


def test_rows_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    model = adapted(folder)
    out = write_peft(model, folder, tmp_path / "adapter", "lora")
    with pytest.raises(UserError, match="which this model does not have"):
        read_adapter(out, ModelShape.from_dict({**model.shape.to_dict(), "layers": 1, "windows": [0]}))
    with pytest.raises(UserError, match=r"adapter.rank: 8, but that of .* is 4: remove it"):
        read_peft(AdapterSpec(path=str(out), rank=8))
    (out / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    with pytest.raises(UserError, match=r"peft_type .LOHA.: only LORA"):
        read_peft(AdapterSpec(path=str(out)))
