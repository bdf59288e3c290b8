"""Models leave and come back, byte for byte; what differs is refused, and nothing of it remains."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.read.chat_turns import with_tools
from bessemer.data.tokenizer.chat import render
from bessemer.errors import UserError
from bessemer.export import hf
from bessemer.export.chat_template import TEMPLATES
from bessemer.export.gate import Mismatch, check
from bessemer.export.hf import SENTENCES, open_native, real_tokens, to_hf, to_native
from bessemer.model.families.folder import HfFolder
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape
from bessemer.train.trained import load_model

transformers = pytest.importorskip("transformers")
Make = Callable[..., Path]


def theirs(folder: Path) -> Any:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


def test_a_run_opens_in_transformers_and_says_the_same(run: Path, tmp_path: Path) -> None:
    done = to_hf(open_native(run), tmp_path / "out")
    assert done.family == "llama" and done.dtype == "float32" and done.tokens == "held-out data"
    assert done.comparison is not None and done.comparison.logits < 1e-5
    assert list(done.comparison.parts) == ["embedding", "layer 0", "layer 1"]
    loaded = load_model(run)
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode("steel iron blast")]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path / "out")(ids).logits, model.logits(model(ids)), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_id and config["max_position_embeddings"] == 32
    assert "transformers_version" not in config and config["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_tokenizer_opens_and_lays_out_conversations_as_in_training(run: Path, tmp_path: Path) -> None:
    native = open_native(run)
    to_hf(native, tmp_path / "out", mode="skip")
    assert native.tokenizer is not None
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.eos_token_id == native.tokenizer.eos_id and found.is_fast
    for text in SENTENCES:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == native.tokenizer.encode(text)
        assert found.decode(ids) == text
    messages = [{"role": "user", "content": "iron?"}, {"role": "assistant", "content": "steel"}]
    ids = found.apply_chat_template(messages, return_dict=False)
    assert ids == render(messages, native.tokenizer)[0].tolist()
    asked = found.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert asked == "<|im_start|>user\niron?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_jinja_layouts_are_those_of_training(run: Path, name: str) -> None:
    from bessemer.data.tokenizer import chat
    from bessemer.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(run / "tokenizer.json", special=chat.special_tokens("llama3"))
    call = {"function": {"name": "melt", "arguments": {"kg": 3}}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief. \n"},
        {"role": "user", "content": [{"type": "text", "text": "How hot?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1,600"},
        {"role": "assistant", "content": "Very.", "tool_calls": [call]},
    ]
    layout = chat.find_template(name, tokenizer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, eos_token=tokenizer.eos)
    tool = {"type": "function", "function": {"name": "melt", "description": "schmilzt für dich"}}
    for turns, tools in ((messages, None), (messages, [tool, tool]), (messages[1:], [tool])):
        laid_out = chat.write_tools(with_tools(turns, tools))
        text = "".join(part.text for part in layout(laid_out, chat.learned_turns(laid_out, "all"), tokenizer))
        assert text == fast.apply_chat_template(turns, tools=tools, chat_template=TEMPLATES[name], tokenize=False)
        assert ("schmilzt" in text) == bool(tools)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_smaller_type_is_the_rounded_model(run: Path, tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    native = open_native(run)
    done = to_hf(native, tmp_path / "out", dtype=dtype)
    assert done.comparison is not None and done.comparison.logits < 1e-5
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {kind}
    assert torch.equal(saved["model.embed_tokens.weight"], native.weights["embedding.weight"].to(kind))


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama", "ForCausalLM", {"tie_word_embeddings": True}),
    ("Gemma2", "ForCausalLM", {"head_dim": 8, "sliding_window": 16}),
    ("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 128}),
    ("Mixtral", "ForCausalLM", {"num_local_experts": 4}),
    ("Bert", "ForMaskedLM", {}),
    ("T5", "ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 96}),
]


@pytest.mark.parametrize(
    ("kind", "head", "keys", "mode"),
    [
        *(pytest.param(*case, "layers", id=f"layers-{case[0]}") for case in CASES),
        pytest.param(*CASES[0], "whole", id=f"whole-{CASES[0][0]}"),
        *(pytest.param(*case, "whole", id=f"whole-{case[0]}", marks=pytest.mark.slow) for case in CASES[1:]),
    ],
)
def test_there_and_back_is_the_same_bytes(
    folder: Make, tmp_path: Path, kind: str, head: str, keys: dict[str, Any], mode: str
) -> None:
    source = folder(kind, head, **keys)
    made = to_native(source, tmp_path / "ours", mode=mode)
    assert made.comparison is not None and made.comparison.logits < 1e-5
    native = open_native(tmp_path / "ours")
    assert native.checkpoint == made.folder
    done = to_hf(native, tmp_path / "back", family=made.family, mode=mode)
    assert done.comparison is not None and done.comparison.argmax_agreement == 1.0
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    again = HfFolder(tmp_path / "back")
    assert again.generation_config == HfFolder(source).generation_config
    assert again.config["dtype"] == "bfloat16"


def test_a_new_run_can_start_from_an_import(folder: Make, tmp_path: Path) -> None:
    source = folder()
    made = to_native(source, tmp_path / "ours", mode="skip")
    shape = ModelShape.from_dict(json.loads((tmp_path / "ours" / "model.json").read_text())["shape"])
    model = Decoder(shape)
    state = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    CheckpointStore(made.folder.parent).load(made.folder, state)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(ids)), theirs(source)(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["whole", "layers"])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.1.self_attn.k_proj.weight", "layer 1"),
        ("model.layers.2.post_attention_layernorm.weight", "layer 2"),
        ("lm_head.weight", "the head"),
    ],
)
def test_one_changed_tensor_is_found_where_it_is(
    folder: Make, tmp_path: Path, mode: str, name: str, where: str
) -> None:
    source = folder()
    to_native(source, tmp_path / "ours", mode="skip")
    native = open_native(tmp_path / "ours")
    tensors = load_file(source / "model.safetensors")
    tensors[name][..., 3] += 0.5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    tokens, _ = real_tokens(native.shape, None, native.place)
    with pytest.raises(Mismatch, match=f"not the same: (every layer agrees, )?{where}"):
        check(source, "LlamaForCausalLM", native.shape, native.weights.__getitem__, tokens, tmp_path, mode)


def test_a_tensor_that_transformers_does_not_find_is_told(folder: Make, tmp_path: Path) -> None:
    source = folder()
    to_native(source, tmp_path / "ours", mode="skip")
    native = open_native(tmp_path / "ours")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    tokens, _ = real_tokens(native.shape, None, native.place)
    with pytest.raises(Mismatch, match=r"model\.layers\.1\.mlp.up_proj.weight"):
        check(source, "LlamaForCausalLM", native.shape, native.weights.__getitem__, tokens, tmp_path)


def test_a_failed_check_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = open_native(run)
    real, calls = type(native.weights).__getitem__, 0

    def lies_once(self: Any, name: str) -> torch.Tensor:
        nonlocal calls
        calls += name == "blocks.1.ffn.up.weight"
        return real(self, name) * (1.5 if name == "blocks.1.ffn.up.weight" and calls == 1 else 1.0)

    monkeypatch.setattr(type(native.weights), "__getitem__", lies_once)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")
    with pytest.raises(Mismatch, match="layer 1"):
        to_hf(native, tmp_path / "old", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["config.json"]


def _killed(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["writing", "checking"])
def test_a_kill_leaves_no_folder_of_that_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    native = open_native(run)
    child = os.fork()
    if child == 0:
        if when == "writing":
            real, left = type(native.weights).__getitem__, iter(range(6))
            monkeypatch.setattr(
                type(native.weights),
                "__getitem__",
                lambda *given: _killed() if next(left, None) is None else real(*given),
            )
        else:
            monkeypatch.setattr(hf, "check", _killed)
        to_hf(native, tmp_path / "out")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    to_hf(native, tmp_path / "out", mode="skip")
    assert (tmp_path / "out" / "config.json").exists()


def test_memory_holds_one_tensor_at_a_time(folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    source = folder()
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    real = HfFolder.read

    def counted(self: HfFolder, name: str) -> torch.Tensor:
        nonlocal most
        tensor = real(self, name)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(HfFolder, "read", counted)
    to_native(source, tmp_path / "ours", mode="skip")
    assert 0 < most <= 2


def test_a_file_that_fails_on_the_way_is_told_and_nothing_remains(
    folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = folder(), HfFolder.read

    def fails(self: HfFolder, name: str) -> torch.Tensor:
        if name.startswith("model.layers.2"):
            raise UserError(f"{self.path}: ends inside {name!r}")
        return real(self, name)

    monkeypatch.setattr(HfFolder, "read", fails)
    with pytest.raises(UserError, match="ends inside"):
        to_native(source, tmp_path / "ours", mode="skip")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_no_family_can_hold_is_named(run: Path, tmp_path: Path) -> None:
    native = open_native(run)
    odd = replace(native, shape=replace(native.shape, logit_cap=20.0))
    with pytest.raises(UserError, match=r"no family of Hugging Face.*logit_cap 20\.0"):
        to_hf(odd, tmp_path / "out")
    with pytest.raises(UserError, match="--family gpt2: cannot represent this model; llama"):
        to_hf(native, tmp_path / "out", family="gpt2")
    assert not any(tmp_path.iterdir())


def test_ntk_scaling_is_written_as_its_base(run: Path, tmp_path: Path) -> None:
    about = json.loads((run / "model.json").read_text())
    about["shape"]["rope"] |= {"scaling": "ntk", "factor": 4.0}
    os.makedirs(tmp_path / "run")
    for name in ("checkpoints", "tokenizer.json", "events.jsonl", "settings.json"):
        os.symlink(run / name, tmp_path / "run" / name)
    (tmp_path / "run" / "model.json").write_text(json.dumps(about))
    native = open_native(tmp_path / "run")
    to_hf(native, tmp_path / "out")
    model = Decoder(ModelShape.from_dict(about["shape"]))
    model.load_state_dict({name: native.weights[name] for name in native.weights})
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path / "out")(ids).logits, model.logits(model(ids)), rtol=0, atol=1e-5)


def test_tokens_to_compare_on_reach_past_a_window_and_stay_in_the_vocabulary(run: Path, tmp_path: Path) -> None:
    native = open_native(run)
    wide = replace(native.shape, windows=(0, 200), max_positions=512)
    ids, origin = real_tokens(wide, native.tokenizer, tmp_path)
    assert ids.shape == (2, 232) and origin == "sentences"
    ids, origin = real_tokens(replace(wide, vocab=50), native.tokenizer, tmp_path)
    assert origin == "random tokens" and int(ids.max()) < 50
