"""A conversation as token ids, and which of them to learn from: what the assistant says and the end of its turn.

A template lays the messages out as parts: text, or a special token. Messages are always text, so that nothing
somebody wrote can end a turn. Templates of our own are here; Jinja templates are in chat_template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
Learn = Literal["all", "last"]
Rendered = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a conversation; the text of special parts is a special token's name."""

    text: str
    learn: bool = False
    special: bool = False


Layout = Callable[[Sequence[Message], Sequence[bool], Tokenizer], Iterable[Part]]


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, template: str = "chatml", learn: Learn = "all"
) -> Rendered:
    """Ids of the conversation and a mask of the same length: 1 where the loss counts.

    `template` is chatml, llama3, plain, a Jinja file or its source; `learn` takes all turns of the assistant or only
    the last. A message with weight 0 is not learned from.
    """
    return render_batch([messages], tokenizer, template, learn)[0]


def render_batch(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, template: str = "chatml", learn: Learn = "all"
) -> list[Rendered]:
    """As `render`, with the text of all conversations encoded at once, on all cores."""
    layout = find_template(template, tokenizer)
    stretches = [_join(layout(messages, learned_turns(messages, learn), tokenizer)) for messages in conversations]
    texts = [(part.text, place > 0) for some in stretches for place, part in enumerate(some) if not part.special]
    encoded = iter(tokenizer.encode_with_offsets([text for text, _ in texts], [later for _, later in texts]))
    rendered = []
    for some in stretches:
        ids: list[int] = []
        mask: list[int] = []
        for part in some:
            if part.special:
                ids.append(tokenizer.special[part.text])
                mask.append(int(bool(part.spans)))
            else:
                found, offsets = next(encoded)
                ids += found
                mask += _mask(offsets, part.spans)
        rendered.append((np.array(ids, np.uint32), np.array(mask, np.uint8)))
    return rendered


def learned_turns(messages: Sequence[Message], learn: Learn) -> list[bool]:
    """For each message, whether it is learned from."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if learn == "last":
        turns = turns[-1:]
    return [i in set(turns) and message.get("weight", 1) != 0 for i, message in enumerate(messages)]


def problems(messages: Any) -> list[str]:
    """What is wrong with a conversation: each problem by name, then a colon and where. None: it can be rendered."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return [f"not a list of messages: {type(messages).__name__}"]
    if not messages:
        return ["no messages: the list is empty"]
    found = []
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            found.append(f"not a message: {where} is a {type(message).__name__}, not an object")
            continue
        role = message.get("role")
        if role not in ROLES:
            found.append(f"unknown role: {where} has {role!r}, not {', '.join(ROLES)}")
        elif role == "system" and number > 1:
            found.append(f"system message inside: {where}; it comes first or not at all")
        try:
            content = content_of(message)
        except (TypeError, KeyError):
            found.append(f"content is not text: {where} has a {type(message.get('content')).__name__}")
            continue
        if not content.strip() and not message.get("tool_calls"):
            found.append(f"empty content: {where}")
    if not found and not any(message["role"] == "assistant" for message in messages):
        found.append("no assistant turn: there is nothing to learn from")
    return found


def content_of(message: Message) -> str:
    """The text of a message, given as a string or as a list of text parts; raises TypeError for anything else."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part["text"] for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise TypeError("content is not text")


def special_tokens(template: str) -> tuple[str, ...]:
    """The special tokens that one of our own templates needs, beside the end of a document; a Jinja template's are
    those it spells."""
    return _TEMPLATES[template][1] if template in _TEMPLATES else ()


def find_template(template: str, tokenizer: Tokenizer) -> Layout:
    """The layout of one of our own templates, of a Jinja file or of Jinja source; UserError if it cannot be used."""
    if template not in _TEMPLATES:
        from bessemer.data.chat_template import jinja_template, read_template

        return jinja_template(read_template(template, tuple(_TEMPLATES)))
    layout, needed = _TEMPLATES[template]
    missing = [name for name in needed if name not in tokenizer.special]
    if missing:
        raise UserError(
            f"chat template {template}: the tokenizer has no {', '.join(missing)}; "
            f"set tokenizer.special to {json.dumps(missing)}"
        )
    return layout


def _chatml(messages: Sequence[Message], learned: Sequence[bool], tokenizer: Tokenizer) -> Iterable[Part]:
    for message, learn in zip(messages, learned, strict=True):
        yield Part("<|im_start|>", special=True)
        yield Part(f"{message['role']}\n")
        yield Part(content_of(message) + _calls(message, "arguments"), learn)
        yield Part("<|im_end|>", learn, special=True)
        yield Part("\n")


def _llama3(messages: Sequence[Message], learned: Sequence[bool], tokenizer: Tokenizer) -> Iterable[Part]:
    yield Part("<|begin_of_text|>", special=True)
    for message, learn in zip(messages, learned, strict=True):
        yield Part("<|start_header_id|>", special=True)
        yield Part("ipython" if message["role"] == "tool" else message["role"])
        yield Part("<|end_header_id|>", special=True)
        yield Part("\n\n")
        yield Part(content_of(message).strip() + _calls(message, "parameters"), learn)
        yield Part("<|eot_id|>", learn, special=True)


def _plain(messages: Sequence[Message], learned: Sequence[bool], tokenizer: Tokenizer) -> Iterable[Part]:
    """Names and blank lines; the end of a document ends each turn of the assistant."""
    for place, (message, learn) in enumerate(zip(messages, learned, strict=True)):
        yield Part("\n\n" * (place > 0) + f"{message['role'].capitalize()}:")
        yield Part(" " + content_of(message) + _calls(message, "arguments"), learn)
        if message["role"] == "assistant":
            yield Part(tokenizer.eos, learn, special=True)


def _calls(message: Message, arguments_name: str) -> str:
    """Calls of tools, one JSON object a line, as models are taught to write them."""
    lines = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        given = function["arguments"]
        given = json.loads(given) if isinstance(given, str) else given
        body = json.dumps({"name": function["name"], arguments_name: given}, ensure_ascii=False)
        lines.append(f"\n<tool_call>\n{body}\n</tool_call>" if arguments_name == "arguments" else body)
    return "".join(lines).removeprefix("\n" if not content_of(message) else "")


_TEMPLATES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "chatml": (_chatml, ("<|im_start|>", "<|im_end|>")),
    "llama3": (_llama3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "plain": (_plain, ()),
}


@dataclass
class _Stretch:
    """Text between special tokens, encoded as one, or a special token; learned in the given spans of characters."""

    text: str
    spans: list[tuple[int, int]]
    special: bool


def _join(parts: Iterable[Part]) -> list[_Stretch]:
    joined: list[_Stretch] = []
    for part in parts:
        if part.special or not joined or joined[-1].special:
            joined.append(_Stretch("", [], part.special))
        last = joined[-1]
        start = len(last.text)
        last.text += part.text
        if part.learn and part.text:
            last.spans.append((start, len(last.text)))
    return [stretch for stretch in joined if stretch.text]


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that has a character of a span. A token begins where the one before ended: some tokenizers
    leave the space of a word out of its offsets."""
    mask, end, span = [], 0, 0
    for start, stop in offsets:
        first, end = min(start, end), max(stop, end)
        while span < len(spans) and spans[span][1] <= first:
            span += 1
        mask.append(int(span < len(spans) and spans[span][0] < max(end, first + 1)))
    return mask
