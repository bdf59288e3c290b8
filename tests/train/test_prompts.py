"""`generate` reads a prompt and ends an answer as transformers does with the same folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bessemer.cli import main
from bessemer.data.tokenizer.tokenizer import Tokenizer as OurTokenizer
from bessemer.data.tokenizer.tokenizer import native_prompt_format
from bessemer.export.hf import to_native
from bessemer.model.generate import Sampling, generate
from bessemer.train.trained import load_model, prompt_format

transformers = pytest.importorskip("transformers")

PROMPTS = ["The steel", "def f(x):\n    return", " iron  ore", "heat and\n\nslag", "a<|im_end|>b", "été 日本"]
TEXTS = ["the steel and the iron ore heat in a blast", "def f(x):\n    return x + 1\n", "slag été"] * 20
SPECIAL = ["<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "[CLS]", "[SEP]", "<unk>"]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def byte_level() -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    return inner


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's and Gemma's: spaces are a sign, unknown characters become bytes."""
    vocab = {name: i for i, name in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for character in sorted({*"▁", *"".join(TEXTS).replace(" ", "▁")} - {"\n"}):
        vocab.setdefault(character, len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return inner


def begins_with(inner: Tokenizer, bos: str) -> Any:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])


def no_template(inner: Tokenizer) -> None:
    pass


def llama3(inner: Tokenizer) -> None:
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begins_with(inner, "<s>")])


def gemma(inner: Tokenizer) -> None:
    inner.post_processor = begins_with(inner, "<bos>")


def byte_offsets(inner: Tokenizer) -> None:
    inner.post_processor = processors.ByteLevel(trim_offsets=True)


def t5(inner: Tokenizer) -> None:
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", inner.token_to_id("</s>"))]
    )


END, IM_END = "<|endoftext|>", "<|im_end|>"
S = {"eos_token": "</s>", "bos_token": "<s>"}
OBJECT = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "special": True}
# family, tokenizer, what it adds, tokenizer_config, ends of generation_config (names)
CASES: dict[str, tuple[str, Callable[[], Tokenizer], Callable[[Tokenizer], None], dict[str, Any], Any]] = {
    "SmolLM2": ("Llama", byte_level, byte_offsets, {"eos_token": IM_END, "bos_token": "<|im_start|>"}, IM_END),
    "Llama 3": ("Llama", byte_level, llama3, S, ["</s>", IM_END]),
    "Qwen": ("Qwen3", byte_level, byte_offsets, {"eos_token": IM_END, "add_bos_token": False}, [IM_END, END]),
    "Llama 2": ("Llama", sentencepiece_like, llama3, S | {"eos_token": OBJECT}, "</s>"),
    "Gemma": ("Gemma2", sentencepiece_like, gemma, {"eos_token": "<eos>", "bos_token": "<bos>"}, ["<eos>", IM_END]),
    "GPT-2": ("GPT2", byte_level, no_template, {"eos_token": END, "bos_token": END}, None),
    "GPT-NeoX": ("GPTNeoX", byte_level, byte_offsets, {"eos_token": END}, END),
    "a flag against the file": ("Llama", byte_level, llama3, S | {"add_bos_token": False}, "</s>"),
    "an end after the prompt": ("Mistral", byte_level, t5, S, "</s>"),
}


def make(folder: Path, name: str) -> Path:
    kind, tokenizer, add, about, ends = CASES[name]
    inner = tokenizer()
    add(inner)
    keys: dict[str, Any] = {"vocab_size": inner.get_vocab_size()}
    keys |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128} if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(**keys)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = inner.token_to_id("<|endoftext|>"), None, None
    torch.manual_seed(1)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if ends is not None:
        ids = [inner.token_to_id(end) for end in ends] if isinstance(ends, list) else inner.token_to_id(ends)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | about))
    return folder


FAST = ("SmolLM2", "Gemma", "a flag against the file", "an end after the prompt")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_ids_and_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    loaded = load_model(folder, device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    written = prompt_format(folder, tokenizer)
    for prompt in PROMPTS:
        ids = their_tokenizer(prompt, return_tensors="pt").input_ids
        assert written.encode(tokenizer, prompt, parse_special=True) == ids[0].tolist()
        plain = their_tokenizer(prompt, split_special_tokens=True).input_ids
        assert written.encode(tokenizer, prompt) == plain
        mask = torch.ones_like(ids)
        answer = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        found = list(generate(model, ids[0].tolist(), 12, written.ends, Sampling(0.0)))
        expected = answer[ids.shape[1] :].tolist()
        assert found == (expected[:-1] if expected[-1] in written.ends else expected)
    stops = theirs.generation_config.eos_token_id
    assert set(stops if isinstance(stops, list) else [stops]) <= written.ends


def test_an_answer_ends_with_any_of_the_end_tokens(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", "Llama 3")
    loaded = load_model(folder, device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    free = list(generate(model, [7, 8], 12, (), Sampling(0.0)))
    stop = free[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, stop]}))
    written = prompt_format(folder, tokenizer)
    assert written.ends >= {1, stop}
    assert list(generate(model, [7, 8], 12, written.ends, Sampling(0.0))) == free[: free.index(stop)]


def test_an_import_has_the_conventions_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "theirs", "Llama 3")
    to_native(folder, tmp_path / "ours", mode="skip")
    ours, hf = load_model(tmp_path / "ours", device="cpu"), load_model(folder, device="cpu")
    model, tokenizer, there, theirs = ours.model, ours.tokenizer, hf.model, hf.tokenizer
    assert prompt_format(tmp_path / "ours", tokenizer) == prompt_format(folder, theirs)
    assert tokenizer.encode("The steel") == theirs.encode("The steel")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), there.parameters(), strict=True))
    printed = []
    for place in (tmp_path / "ours", folder):
        monkeypatch.setattr("sys.argv", ["bessemer", "generate", str(place), "-p", "steel", "--temperature", "0",
                                         "--max-tokens", "8", "--device", "cpu"])  # fmt: skip
        with pytest.raises(SystemExit) as left:
            main.run()
        assert not left.value.code
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].startswith("steel")


def test_flags_count_where_there_is_only_a_sentencepiece_model(tmp_path: Path) -> None:
    tokenizer = OurTokenizer(sentencepiece_like(), "</s>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 4], "bos_token_id": 1}))

    def written(**about: Any) -> Any:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | about))
        return prompt_format(tmp_path, tokenizer)

    assert written(tokenizer_class="LlamaTokenizer").prefix == (1,)
    assert written(tokenizer_class="LlamaTokenizer", add_bos_token=False).prefix == ()
    assert written(add_bos_token=True, add_eos_token=True).suffix == (2,)
    assert written().ends == {2, 4}
    assert written().encode(tokenizer, "") == [1]  # an empty prompt begins with BOS


def test_a_run_of_our_own_begins_with_the_end_of_a_document(tmp_path: Path) -> None:
    tokenizer = OurTokenizer.train(["steel and iron"], 257)
    (tmp_path / "events.jsonl").touch()
    assert prompt_format(tmp_path, tokenizer) == native_prompt_format(tokenizer)
    written = prompt_format(tmp_path, tokenizer)
    assert written.encode(tokenizer, "ab")[0] == tokenizer.eos_id and written.ends == {tokenizer.eos_id}
    assert written.encode(tokenizer, tokenizer.eos, parse_special=True) == [tokenizer.eos_id] * 2
    assert len(written.encode(tokenizer, tokenizer.eos)) > 2
