"""LoRA on a model that transformers runs: equal to PEFT's, resumed exactly, exported and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.checkpoint.tensors import SavedTensors
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.export.peft import to_peft
from bessemer.model.adapters import adapters_off, add_adapters, clear_adapters, init_adapters
from bessemer.model.families.adapter import read_adapter, with_folder
from bessemer.model.wrapped import WrappedModel, load_wrapped, read_wrapped
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.adapter import AdapterSpec
from bessemer.spec.checks import check_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import load_model

from .conftest import spec_data, train_until
from .test_adapters import columns, last

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
SETTINGS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
TOKENS = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    path = tmp_path_factory.mktemp("stablelm")
    tokenizer = Tokenizer.train([json.loads(line)["text"] for line in corpus.read_text().splitlines()], 300)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("stablelm", vocab_size=tokenizer.vocab_size, **SETTINGS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save(path / "tokenizer.json")
    return path


def spec_of(folder: Path, corpus: Path, runs: Path, name: str, adapter: Any = None, **parts: Any) -> RunSpec:
    parts = {"budget": {"steps": 8, "batch": 128}, "checkpoint": {"every": 4}, "guard": {"copies": "off"}} | parts
    adapter = adapter or {"kind": "lora", "rank": 4, "alpha": 8}
    data = spec_data(name, corpus, runs, adapter=adapter, optimizer={"lr": 0.02}, **parts)
    return RunSpec.model_validate(data | {"model": {"hf": str(folder), "wrap": True}, "tokenizer": {}})


def logits(model: Any) -> torch.Tensor:
    return model.logits(model(TOKENS))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_function_and_gradients_are_pefts(folder: Path, kind: str, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = {"r": 4, "lora_alpha": 8, "use_dora": kind == "dora", "target_modules": ["q_proj", "down_proj"]}
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(tmp_path)
    shape = read_wrapped(folder)
    spec = with_folder(AdapterSpec(path=str(tmp_path)), shape)
    assert spec.kind == kind and len(spec.targets) == 4
    with torch.device("cpu"):
        model = WrappedModel(shape)
    add_adapters(model, spec, 4, 8.0)
    clear_adapters(model)
    load_wrapped(model, folder)
    init_adapters(model, spec, 2.0, 0, read_adapter(tmp_path, shape))
    expected, actual = theirs(TOKENS).logits, logits(model)
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max() + 1e-6
    for out in (expected, actual):
        out.square().mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    own = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(own) == len(gradients)
    for name, gradient in own.items():
        layer, _, part = name.removeprefix("inner.").rpartition(".")
        suffix = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_magnitude_vector"}[part]
        (other,) = (g for key, g in gradients.items() if f"{layer}.{suffix}" in key)
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-8)
    with adapters_off(model), torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
        assert (logits(model) - plain).abs().max() < 1e-5


@pytest.mark.slow
def test_a_run_resumes_exactly_and_is_exported(folder: Path, corpus: Path, tmp_path: Path) -> None:
    whole, broken = (spec_of(folder, corpus, tmp_path / "runs", name) for name in ("whole", "broken"))
    assert Session(whole).train().kind == "finished"
    assert train_until(broken, 5).kind == "interrupted" and Session(broken).train().kind == "finished"
    assert columns(broken) == columns(whole) and columns(whole)[-1][1] < columns(whole)[0][1]
    saved = SavedTensors(last(whole), "model.")
    assert {name.rpartition(".")[2] for name in saved._entries} == {"lora_a", "lora_b", "lora_scale"}
    assert len({name.rpartition(".")[0] for name in saved._entries}) == 14
    run = run_folder(whole)
    merged = load_model(run, device="cpu").model
    to_peft(open_native(run, merged=False), tmp_path / "peft")
    to_hf(open_native(run), tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = logits(merged)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()(TOKENS).logits
        for other in (theirs, logits(load_model(tmp_path / "peft", device="cpu").model),
                      transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(TOKENS).logits):  # fmt: skip
            assert (other - expected).abs().max() < 1e-5 * expected.abs().max()
    further = spec_of(folder, corpus, tmp_path / "runs", "further", {"path": str(tmp_path / "peft")})
    assert Session(further).train().kind == "finished"
    assert next(Run(run_folder(further)).metrics())["loss"] < next(Run(run).metrics())["loss"]


def test_what_only_native_models_have_is_refused(folder: Path, corpus: Path, tmp_path: Path) -> None:
    for adapter, key in (
        ({"kind": "qlora"}, "base"), ({"kind": "prefix"}, "kind"), ({"modules_to_save": ["head"]}, "modules_to_save"),
    ):  # fmt: skip
        problems = check_spec(spec_of(folder, corpus, tmp_path, "no", adapter))
        assert (("adapter", key), "is for native models, and this one is run by transformers: remove it") in problems
    with torch.device("meta"):
        model = WrappedModel(read_wrapped(folder))
    with pytest.raises(UserError, match=r"matches no linear layer: .* q_proj"):
        add_adapters(model, AdapterSpec(targets=["query_key"]), 4, 8.0)
