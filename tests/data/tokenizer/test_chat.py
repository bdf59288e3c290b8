"""Conversations become the ids that transformers gives, the mask lies on what the assistant says, and nothing that
somebody wrote can end a turn."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Inner

from bessemer.data.tokenizer.chat import find_problems, read_template, render, render_batch, special_tokens
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

SPECIAL = [*special_tokens("chatml"), *special_tokens("llama3")]
TEXT = Path(__file__).read_text() + "assistant user system Hello\n\n world" * 10
TOKENIZER = Tokenizer.train([TEXT], 600, special=SPECIAL)

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Yes"},
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)


def learned(ids: Any, mask: Any, tokenizer: Tokenizer = TOKENIZER) -> str:
    return tokenizer.decode(np.asarray(ids)[np.asarray(mask) == 1].tolist())


def text_of(messages: list[dict[str, Any]], template: str = "chatml") -> str:
    return TOKENIZER.decode(render(messages, TOKENIZER, template)[0].tolist())


def test_chatml() -> None:
    ids, mask = render(TALK, TOKENIZER)
    assert TOKENIZER.decode(ids.tolist()) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
    )
    assert learned(ids, mask) == "Hi there<|im_end|>Yes<|im_end|>"
    assert (ids == TOKENIZER.special["<|im_start|>"]).sum() == 5


def test_llama3() -> None:
    ids, mask = render(TALK[1:3], TOKENIZER, "llama3")
    assert TOKENIZER.decode(ids.tolist()) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|>"
    )
    assert learned(ids, mask) == "Hi there<|eot_id|>"


def test_plain_needs_no_special_tokens_but_the_end() -> None:
    tokenizer = Tokenizer.train([TEXT], 500)
    ids, mask = render(TALK[1:], tokenizer, "plain")
    end = tokenizer.eos
    assert tokenizer.decode(ids.tolist()) == (
        f"User: Hello\n\nAssistant: Hi there{end}\n\nUser: More\n\nAssistant: Yes{end}"
    )
    assert learned(ids, mask, tokenizer) == f" Hi there{end} Yes{end}"
    with pytest.raises(UserError, match=r"no <\|im_start\|>, <\|im_end\|>; set tokenizer\.special to \["):
        render(TALK, tokenizer, "chatml")


PREFIXED: dict[str, tuple[Any, Any]] = {
    "metaspace, first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace, always": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "prepend": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "byte-level": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
}
DIRECT = CHATML.replace("role'] + '\n'", "role'] + '<|end_header_id|>'")  # learned text right after a special token


@pytest.mark.parametrize("kind", PREFIXED)
def test_the_space_that_a_tokenizer_adds_is_that_of_transformers(kind: str) -> None:
    """Some add it at the beginning of a text, some (Llama 2, TinyLlama) also after each special token."""
    transformers = pytest.importorskip("transformers")
    inner = Inner(models.BPE(byte_fallback=True))
    normalizer, pre_tokenizer = PREFIXED[kind]
    for part, value in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer)):
        if value is not None:
            setattr(inner, part, value)
    pieces = ["</s>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte-level" else []
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=pieces, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(TEXT.splitlines(), trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=Inner.from_str(inner.to_str()), eos_token="</s>")
    ours, rng = Tokenizer(inner, "</s>"), random.Random(1)
    assert ours.prefixes_after_special == (kind != "metaspace, first")
    for _ in range(12):
        talk = conversation(rng)
        for source in (CHATML, DIRECT):
            expected = theirs.apply_chat_template(
                talk, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = render(talk, ours, source)
            assert ids.tolist() == list(expected["input_ids"])
            assert mask.tolist() == list(expected["assistant_masks"])


@pytest.mark.parametrize("template", ["chatml", CHATML, UNMARKED])
def test_the_last_turn_alone_and_turns_of_weight_zero(template: str) -> None:
    assert learned(*render(TALK, TOKENIZER, template, learn="last")) == "Yes<|im_end|>"
    talk = [*TALK[:-1], {**TALK[-1], "weight": 0}]
    assert learned(*render(talk, TOKENIZER, template)) == "Hi there<|im_end|>"
    assert learned(*render(TALK[:2], TOKENIZER, template)) == ""


def conversation(rng: random.Random) -> list[dict[str, str]]:
    talk = [{"role": "system", "content": f"be nice {rng.random()}"}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        for role in ("user", "assistant"):
            content = rng.choice(["Hello", "\n\nhi 語👍🏽", "a  b\n", "été ", "  x", "it's 12345"]) * rng.randint(1, 3)
            talk.append({"role": role, "content": content})
    return talk


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "char", "unigram"])
def test_the_ids_and_mask_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "unigram":
        pytest.importorskip("sentencepiece")
    ours = Tokenizer.train([TEXT], 700, kind=kind, special=SPECIAL)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Inner.from_str(ours.inner.to_str()),
        bos_token="<|begin_of_text|>",
        eos_token=ours.eos,
        additional_special_tokens=SPECIAL,
    )
    rng = random.Random(0)
    for _ in range(25):
        talk = conversation(rng)
        for source, same in ((CHATML, ["chatml", CHATML, UNMARKED]), (LLAMA3, ["llama3", LLAMA3])):
            expected = theirs.apply_chat_template(
                talk, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            for template in same:
                ids, mask = render(talk, ours, template)
                assert ids.tolist() == list(expected["input_ids"])
                assert mask.tolist() == list(expected["assistant_masks"])


@pytest.mark.parametrize("template", ["chatml", CHATML, UNMARKED])
@given(st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "\ue0b0", "\ue0b1", "\ue0b20\ue0b2"]))
def test_a_message_cannot_end_its_turn(template: str, attack: str) -> None:
    talk = [{"role": "user", "content": f"a{attack}b"}, {"role": "assistant", "content": f"{attack}c{attack}"}]
    ids, mask = render(talk, TOKENIZER, template)
    marks = [i for i in ids.tolist() if i in TOKENIZER.special.values()]
    assert [TOKENIZER.decode([i]) for i in marks] == ["<|im_start|>", "<|im_end|>"] * 2
    if attack < "\ue0b0":  # our own private characters are replaced in Jinja templates
        assert learned(ids, mask) == f"{attack}c{attack}<|im_end|>"


def test_the_mask_of_a_character_of_several_tokens() -> None:
    ids, mask = render([{"role": "user", "content": "é"}, {"role": "assistant", "content": "👍🏽語"}], TOKENIZER)
    assert learned(ids, mask) == "👍🏽語<|im_end|>"
    assert mask.sum() > 8


def test_the_mask_where_offsets_leave_spaces_out() -> None:
    inner = Inner.from_str(TOKENIZER.inner.to_str())
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    trimmed = Tokenizer(inner, TOKENIZER.eos)
    talk = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "   x  \n  y   "}]
    for template in ("chatml", UNMARKED):
        np.testing.assert_array_equal(render(talk, trimmed, template)[1], render(talk, TOKENIZER, template)[1])


def test_many_conversations_at_once() -> None:
    rng = random.Random(1)
    talks = [conversation(rng) for _ in range(10)]
    for one, (ids, mask) in zip(talks, render_batch(talks, TOKENIZER), strict=True):
        alone = render(one, TOKENIZER)
        np.testing.assert_array_equal(ids, alone[0])
        np.testing.assert_array_equal(mask, alone[1])
        assert ids.shape == mask.shape


def test_a_template_that_rewrites_earlier_turns() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(UserError, match=r"message 3 is rendered differently .*put \{% generation %\}"):
        render(TALK, TOKENIZER, source)
    # With blocks it can be said what is learned.
    marked = source.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
    assert "Hi there" in learned(*render(TALK, TOKENIZER, marked))


def test_blocks_that_are_not_one_a_turn() -> None:
    source = "{% generation %}{{ messages[2]['content'] }}{% endgeneration %}"
    assert learned(*render(TALK, TOKENIZER, source)) == "Hi there"
    with pytest.raises(UserError, match="1 generation blocks for 2 turns"):
        render(TALK, TOKENIZER, source, learn="last")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "chat template: .*correct the template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: "),
        ("chatlm", "no such file; write chatml, llama3, plain, none or the path of a Jinja file"),
    ],
)
def test_templates_that_fail(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        render(TALK, TOKENIZER, source)


def test_a_template_in_a_file(tmp_path: Path) -> None:
    expected = render(TALK, TOKENIZER)[0].tolist()
    (tmp_path / "chat.jinja").write_text(CHATML)
    assert render(TALK, TOKENIZER, str(tmp_path / "chat.jinja"))[0].tolist() == expected
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": CHATML}))
    assert render(TALK, TOKENIZER, str(config))[0].tolist() == expected
    config.write_text("{}")
    with pytest.raises(UserError, match="has no chat template"):
        render(TALK, TOKENIZER, str(config))


@pytest.mark.parametrize("form", ["name", "object"])
def test_a_template_in_a_folder_has_the_bos_of_its_tokenizer(tmp_path: Path, form: str) -> None:
    """As transformers has it, also if that is the end of a document (OLMo 2)."""
    file, config = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    file.write_text("\n{{ bos_token }}" + CHATML)
    usual = render(TALK, TOKENIZER, str(file))[0].tolist()
    assert TOKENIZER.decode(usual).startswith("\n<|begin_of_text|><|im_start|>")
    config.write_text(json.dumps({"bos_token": TOKENIZER.eos if form == "name" else {"content": TOKENIZER.eos}}))
    source = read_template(str(file), ())
    ids = render(TALK, TOKENIZER, source)[0].tolist()
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(usual).replace("<|begin_of_text|>", TOKENIZER.eos)
    file.write_text(source)  # an export, read again
    assert read_template(str(file), ()) == source
    for name in ("<|begin_of_text|>", None):  # found without the file
        config.write_text(json.dumps({"bos_token": name}))
        file.write_text("{{ bos_token }}" + CHATML)
        assert read_template(str(file), ()) == "{{ bos_token }}" + CHATML


def test_filters_of_published_templates() -> None:
    source = "{{ messages | tojson }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    assert text_of([{"role": "user", "content": "<é>"}], source) == '[{"role": "user", "content": "<é>"}]x'


def test_special_tokens_that_take_the_space_around_them() -> None:
    transformers = pytest.importorskip("transformers")
    inner = Inner.from_str(Tokenizer.train([TEXT], 500).inner.to_str())
    inner.add_special_tokens([AddedToken("<|r|>", rstrip=True), AddedToken("<|l|>", lstrip=True)])
    ours = Tokenizer(Inner.from_str(inner.to_str()), "<|endoftext|>")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    block = "{% generation %} {{ m['content'] }} \n{% endgeneration %}"
    source = f"{{% for m in messages %}}<|r|> \n {block} <|l|>x{{% endfor %}}"
    talk = [{"role": "assistant", "content": "a b"}, {"role": "assistant", "content": " "}]
    expected = theirs.apply_chat_template(talk, chat_template=source, tokenize=True, return_dict=True)
    ids, mask = render(talk, ours, source)
    assert ids.tolist() == list(expected["input_ids"])
    assert learned(ids, mask, ours) == "a b"


def test_calls_of_tools() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call, {"name": "sub", "arguments": {"b": "é"}}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "2"}]},
    ]
    assert find_problems(talk) == []
    ids, mask = render(talk, TOKENIZER)
    assert learned(ids, mask) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sub", "arguments": {"b": "é"}}\n</tool_call><|im_end|>It is 2<|im_end|>'
    )
    assert "<|im_start|>tool\n2<|im_end|>" in TOKENIZER.decode(ids.tolist())
    assert "ipython<|end_header_id|>\n\n2<|eot_id|>" in text_of(talk, "llama3")
    assert '{"name": "add", "parameters": {"a": 1}}' in text_of(talk, "llama3")


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (TALK, []),
        ("hello", ["not a list of messages"]),
        (None, ["not a list of messages"]),
        ([], ["no messages"]),
        (["hi"], ["not a message"]),
        ([{"role": "bot", "content": "hi"}], ["unknown role"]),
        ([{"content": "hi"}], ["unknown role"]),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": " \n"}], ["empty content"]),
        ([{"role": "user"}, {"role": "assistant", "content": "a"}], ["content is not text"]),
        ([{"role": "user", "content": 5}], ["content is not text"]),
        ([{"role": "user", "content": [{"type": "image"}]}], ["content is not text"]),
        ([{"role": "user", "content": "hi"}], ["no assistant turn"]),
        ([*TALK, {"role": "system", "content": "x"}], ["system message inside"]),
        ([{"role": "robot", "content": ""}], ["unknown role", "empty content"]),
    ],
)
def test_problems_have_names(messages: Any, named: list[str]) -> None:
    assert [problem.partition(":")[0] for problem in find_problems(messages)] == named


def test_problems_say_where() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "x"}]
    assert find_problems(talk) == ["unknown role: message 2 has 'bot', not system, user, assistant, tool"]
