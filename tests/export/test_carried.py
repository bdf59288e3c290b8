"""What a model came with is there after an export: keys of config.json that nobody reads, the tokenizer's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bessemer.export.hf import carried_keys, choose_family, open_native, to_hf, to_native
from bessemer.model.families.folder import HfFolder
from bessemer.model.families.registry import FAMILIES, family_named
from bessemer.model.generate import Sampling, generate
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import load_model, prompt_format

transformers = pytest.importorskip("transformers")
Make = Callable[..., Path]
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 96},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "t5": {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 96, "d_ff": 48},
    "mamba2": {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "num_hidden_layers": 2,
               "n_groups": 1, "vocab_size": 96},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "v_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
                    "n_shared_experts": 1},
    "phi3": {"pad_token_id": 0},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
}  # fmt: skip
SIZES["deepseek_v2"] = SIZES["deepseek_v3"] | {"topk_method": "greedy", "n_group": None, "topk_group": None}
UNKNOWN = {"initializer_range": 0.0123, "use_cache": False, "my_own_key": {"a": [1, 2]}}


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_no_family_reads_are_carried_over(name: str) -> None:
    """Of every family: a config.json as transformers writes it, through our shape and back, loses no key."""
    family = family_named(name)
    keys = SIZES.get(name, {}) if name in ("gpt2", "bloom", "t5", "mamba2") else SMALL | SIZES.get(name, {})
    keys = {key: value for key, value in keys.items() if (name, key) != ("falcon", "head_dim")}  # which it works out
    theirs = transformers.AutoConfig.for_model(name, **keys)
    theirs.architectures = [family.architectures[0]]
    original = json.loads(theirs.to_json_string(use_diff=False)) | UNKNOWN
    config = family.config(family.shape(original)) | {"dtype": "float32"}
    written = carried_keys(original, family, config) | config
    assert family.shape(written) == family.shape(config)
    assert {key: written.get(key) for key in UNKNOWN} == UNKNOWN
    lost = [key for key in original if key not in written]
    assert lost == [key for key in lost if key in ("_name_or_path", "torch_dtype")]


def test_a_key_that_the_run_has_changed_is_not_carried() -> None:
    family = family_named("llama")
    original = SMALL | {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    shape = family.shape(original)
    stretched = original | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    assert "rope_parameters" in carried_keys(original, family, family.config(shape))
    config = family.config(family.shape(stretched))
    assert "rope_parameters" not in carried_keys(original, family, config)
    assert carried_keys(original | {"model_type": "mistral"}, family, config) == {}


def test_an_import_and_its_export_lose_nothing(folder: Make, tmp_path: Path) -> None:
    source = folder("Mistral", sliding_window=None)
    config = json.loads((source / "config.json").read_text()) | UNKNOWN
    (source / "config.json").write_text(json.dumps(config))
    to_native(source, tmp_path / "ours")
    done = to_hf(open_native(tmp_path / "ours"), tmp_path / "back")
    assert done.family == "mistral"  # as it came, although a Llama could hold it
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: value for key, value in config.items() if back.get(key) != value} == {}


def test_a_model_that_transformers_runs_keeps_its_keys(tmp_path: Path) -> None:
    from bessemer.model.wrapped import WrappedModel, read_wrapped

    keys = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    model = transformers.AutoModelForCausalLM.from_config(transformers.StableLmConfig(**keys, num_key_value_heads=4))
    model.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | UNKNOWN))
    WrappedModel(read_wrapped(tmp_path / "theirs")).inner.save_pretrained(tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: back[key] for key in UNKNOWN} == UNKNOWN


def instruct(folder: Path) -> None:
    """A tokenizer with BOS, an end of turn and a chat template, as an instruct model has."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<s>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    inner.train_from_iterator(["steel and iron ore"] * 9, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))


def test_a_run_that_starts_from_a_folder_keeps_its_conventions(folder: Make, tmp_path: Path) -> None:
    source = folder("Llama", vocab_size=288)
    instruct(source)
    config = json.loads((source / "config.json").read_text()) | UNKNOWN
    (source / "config.json").write_text(json.dumps(config))
    texts = [json.dumps({"text": f"steel and iron ore, heat {i} and slag, again and again"}) for i in range(40)]
    (tmp_path / "words.jsonl").write_text("\n".join(texts))
    spec = {
        "name": "tuned", "runs": str(tmp_path / "runs"), "precision": "fp32", "model": {"hf": str(source)},
        "data": {"sources": {"words": str(tmp_path / "words.jsonl")}, "context": 16, "validation": 0.1},
        "budget": {"steps": 2, "batch": 32}, "parallel": {"device": "cpu", "threads": 1},
    }  # fmt: skip
    assert train(RunSpec.model_validate(spec)).kind == "finished"
    run = tmp_path / "runs" / "tuned"
    source.rename(tmp_path / "moved")
    to_hf(open_native(run), tmp_path / "out")
    written = HfFolder(tmp_path / "out")
    dropped = {key for key, value in config.items() if key != "dtype" and written.config.get(key) != value}
    assert dropped <= {"transformers_version"}
    assert written.generation_config == {"eos_token_id": [2, 0], "temperature": 0.6}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == "{{ messages[0].content }}<|im_end|>" and tokenizer.eos_token == "<|im_end|>"
    loaded = load_model(run, device="cpu")
    model, ours = loaded.model, loaded.tokenizer
    form = prompt_format(run, ours)
    assert form.prefix == (1,) and form.ends == {0, 2}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = tokenizer("steel and", return_tensors="pt").input_ids
    assert form.encode(ours, "steel and") == ids[0].tolist()
    answer = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    found = list(generate(model, ids[0].tolist(), 8, form.ends, Sampling(0.0)))
    assert found == [id for id in answer[0, ids.shape[1] :].tolist() if id not in form.ends]


def test_a_run_of_our_own_is_exported_with_its_beginning(run: Path, tmp_path: Path) -> None:
    to_hf(open_native(run), tmp_path / "out", mode="skip")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    loaded = load_model(run, device="cpu")
    _, ours = loaded.model, loaded.tokenizer
    form = prompt_format(run, ours)
    for prompt in ("steel iron", " blast\n", ""):
        assert tokenizer(prompt).input_ids == form.encode(ours, prompt)


def test_a_family_that_cannot_hold_the_model_any_more_is_not_kept(folder: Make) -> None:
    source = HfFolder(folder("Llama"))
    shape = family_named("llama").shape(source.config | {"sliding_window": 8, "model_type": "llama"})
    assert choose_family(shape, None, source).name == "llama"
    from dataclasses import replace

    assert choose_family(replace(shape, windows=(8,)), None, source).name == "mistral"
