"""Conversations as token ids with a mask: the loss counts on the assistant's words and the end of its turns.

A template lays the messages out as segments: text, or a special token. Messages are always text, so that nothing in a
message can end a turn. Templates are built in or in Jinja, as in Hugging Face models, run in a sandbox. In Jinja the
learned text is in `{% generation %}` blocks; a template without them is rendered turn by turn, and the text that a turn
of the assistant adds is learned.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bessemer.data.read.chat_turns import REASONING_TURN, TOOLS
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
Learn = Literal["all", "last", "completion", "everything"]
Rendered = tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ChatSegment:
    """A part of a conversation; with `special`, `text` is the name of a special token. `learn` is its weight in the
    loss."""

    text: str
    learn: float = 0
    special: bool = False


Layout = Callable[[Sequence[Message], Sequence[float], Tokenizer], Iterable[ChatSegment]]


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, template: str = "chatml", learn: Learn = "all"
) -> Rendered:
    """Ids of the conversation and the weights of their loss, a mask of 0 and 1 unless messages have other weights.

    `template` is chatml, llama3, plain, none, a Jinja file or its source; `learn` selects all turns of the assistant,
    the last, those after the last message of the user (completion), or every token. A message with weight 0 is not
    learned.
    """
    return render_batch([messages], tokenizer, template, learn)[0]


def render_batch(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, template: str = "chatml", learn: Learn = "all"
) -> list[Rendered]:
    """`render` for many conversations, encoded together on all cores."""
    layout = find_template(template, tokenizer)
    if template in _TEMPLATES:
        conversations = [write_tools(messages) for messages in conversations]
    stretches = [_join(layout(messages, learned_turns(messages, learn), tokenizer)) for messages in conversations]
    continues = not tokenizer.prefixes_after_special
    texts = [
        (part.text, continues and place > 0)
        for some in stretches
        for place, part in enumerate(some)
        if not part.special
    ]
    encoded = iter(tokenizer.encode_with_offsets([text for text, _ in texts], [later for _, later in texts]))
    rendered = []
    for some in stretches:
        ids: list[int] = []
        mask: list[float] = []
        for part in some:
            if part.special:
                ids.append(tokenizer.special[part.text])
                mask.append(part.spans[0][2] if part.spans else 0)
            else:
                text_ids, offsets = next(encoded)
                ids += text_ids
                mask += _mask(offsets, part.spans)
        weights = np.array(mask, np.float32)
        weights = 1 - weights if learn == "everything" else weights
        is_mask = np.isin(weights, (0, 1)).all()
        rendered.append((np.array(ids, np.uint32), weights.astype(np.uint8) if is_mask else weights))
    return rendered


def prompt_ids(messages: Sequence[Message], tokenizer: Tokenizer, template: str) -> list[int]:
    """Ids of a conversation and of the beginning of the assistant's next turn: what a model reads before it answers."""
    ids, mask = render([*messages, {"role": "assistant", "content": "x"}], tokenizer, template, "last")
    return [int(i) for i in ids[: int(mask.argmax())]]


def turn_end_ids(template: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens with which the assistant ends a turn: `<|im_end|>`, `<|eot_id|>`."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    ids, mask = render(messages, tokenizer, template, "last")
    return frozenset(int(i) for i in ids[mask == 1]) & frozenset(tokenizer.special.values())


def learned_turns(messages: Sequence[Message], learn: Learn) -> list[float]:
    """The weight of each message in the loss; with everything, one minus it."""
    if learn == "everything":
        return [1 - message.get("weight", 1) for message in messages]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if learn == "last":
        turns = turns[-1:]
    if learn == "completion":
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        turns = [i for i in turns if i > last]
    return [message.get("weight", 1) if i in set(turns) else 0 for i, message in enumerate(messages)]


def find_problems(messages: Any) -> list[str]:
    """The problems of a conversation, as `name: place`; empty if it can be rendered."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return [f"not a list of messages: {type(messages).__name__}"]
    if not messages:
        return ["no messages: the list is empty"]
    errors = []
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            errors.append(f"not a message: {where} is a {type(message).__name__}, not an object")
            continue
        role = message.get("role")
        if role not in ROLES:
            errors.append(f"unknown role: {where} has {role!r}, not {', '.join(ROLES)}")
        elif role == "system" and number > 1:
            errors.append(f"system message inside: {where}; it comes first or not at all")
        try:
            content = message_text(message)
        except (TypeError, KeyError):
            errors.append(f"content is not text: {where} has a {type(message.get('content')).__name__}")
            continue
        if not content.strip() and not message.get("tool_calls"):
            errors.append(f"empty content: {where}")
    if not errors and not any(message["role"] == "assistant" for message in messages):
        errors.append("no assistant turn: there is nothing to learn from")
    return errors


def message_text(message: Message) -> str:
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


def is_built_in(template: str) -> bool:
    return template in _TEMPLATES


def special_tokens(template: str) -> tuple[str, ...]:
    """The special tokens that a built-in template needs, besides the end of a document."""
    return _TEMPLATES[template][1] if template in _TEMPLATES else ()


def find_template(template: str, tokenizer: Tokenizer) -> Layout:
    """The layout of a built-in template, a Jinja file or Jinja source; UserError if it cannot be used."""
    if template not in _TEMPLATES:
        return jinja_template(read_template(template, tuple(_TEMPLATES)))
    layout, needed = _TEMPLATES[template]
    missing = [name for name in needed if name not in tokenizer.special]
    if missing:
        raise UserError(
            f"chat template {template}: the tokenizer has no {', '.join(missing)}; "
            f"set tokenizer.special to {json.dumps(missing)}"
        )
    return layout


def _chatml(messages: Sequence[Message], learned: Sequence[float], tokenizer: Tokenizer) -> Iterable[ChatSegment]:
    for message, learn in zip(messages, learned, strict=True):
        yield ChatSegment("<|im_start|>", special=True)
        yield ChatSegment(f"{message['role']}\n")
        yield ChatSegment(_reasoning(message) + message_text(message) + _calls(message, "arguments"), learn)
        yield ChatSegment("<|im_end|>", learn, special=True)
        yield ChatSegment("\n")


def _llama3(messages: Sequence[Message], learned: Sequence[float], tokenizer: Tokenizer) -> Iterable[ChatSegment]:
    yield ChatSegment("<|begin_of_text|>", special=True)
    for message, learn in zip(messages, learned, strict=True):
        yield ChatSegment("<|start_header_id|>", special=True)
        yield ChatSegment("ipython" if message["role"] == "tool" else message["role"])
        yield ChatSegment("<|end_header_id|>", special=True)
        yield ChatSegment("\n\n")
        text = _reasoning(message) + message_text(message).strip() + _calls(message, "parameters")
        yield ChatSegment(text, learn)
        yield ChatSegment("<|eot_id|>", learn, special=True)


def _plain(messages: Sequence[Message], learned: Sequence[float], tokenizer: Tokenizer) -> Iterable[ChatSegment]:
    """Names and blank lines; the end of a document ends each turn of the assistant."""
    for place, (message, learn) in enumerate(zip(messages, learned, strict=True)):
        yield ChatSegment("\n\n" * (place > 0) + f"{message['role'].capitalize()}:")
        yield ChatSegment(" " + _reasoning(message) + message_text(message) + _calls(message, "arguments"), learn)
        if message["role"] == "assistant":
            yield ChatSegment(tokenizer.eos, learn, special=True)


def _none(messages: Sequence[Message], learned: Sequence[float], tokenizer: Tokenizer) -> Iterable[ChatSegment]:
    """Only the texts; the end of a document ends each turn of the assistant."""
    for message, learn in zip(messages, learned, strict=True):
        yield ChatSegment(_reasoning(message) + message_text(message) + _calls(message, "arguments"), learn)
        if message["role"] == "assistant":
            yield ChatSegment(tokenizer.eos, learn, special=True)


def write_tools(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation with its tools in the system message, one JSON schema per line, as in Hermes' chatml."""
    tools = messages[0].get(TOOLS) if messages else None
    if not tools:
        return messages
    lines = "\n".join(["<tools>", *(json.dumps(tool, ensure_ascii=False) for tool in tools), "</tools>"])
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": lines}, *messages]
    return [{**messages[0], "content": f"{message_text(messages[0])}\n\n{lines}"}, *messages[1:]]


def _reasoning(message: Message) -> str:
    """The thoughts before an answer, in the tags of DeepSeek-R1 and Qwen3."""
    return f"<think>\n{message[REASONING_TURN].strip()}\n</think>\n\n" if REASONING_TURN in message else ""


def _calls(message: Message, arguments_name: str) -> str:
    """Tool calls, one JSON object per line."""
    lines = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        body = json.dumps({"name": function["name"], arguments_name: arguments}, ensure_ascii=False)
        lines.append(f"\n<tool_call>\n{body}\n</tool_call>" if arguments_name == "arguments" else body)
    return "".join(lines).removeprefix("\n" if not message_text(message) else "")


_TEMPLATES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "chatml": (_chatml, ("<|im_start|>", "<|im_end|>")),
    "llama3": (_llama3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "plain": (_plain, ()),
    "none": (_none, ()),
}


@dataclass
class _Stretch:
    """Text between special tokens, encoded together, or a special token; `format_ranks` of characters are learned."""

    text: str
    spans: list[tuple[int, int, float]]
    special: bool


def _join(parts: Iterable[ChatSegment]) -> list[_Stretch]:
    joined: list[_Stretch] = []
    for part in parts:
        if part.special or not joined or joined[-1].special:
            joined.append(_Stretch("", [], part.special))
        last = joined[-1]
        start = len(last.text)
        last.text += part.text
        if part.learn and part.text:
            last.spans.append((start, len(last.text), part.learn))
    return [stretch for stretch in joined if stretch.text]


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, float]]) -> list[float]:
    """The weight of the first span that each token has a character of, else 0. A token begins where the previous one
    ended: some tokenizers exclude the space of a word from its offsets."""
    mask: list[float] = []
    end = span = 0
    for start, stop in offsets:
        first, end = min(start, end), max(stop, end)
        while span < len(spans) and spans[span][1] <= first:
            span += 1
        mask.append(spans[span][2] if span < len(spans) and spans[span][0] < max(end, first + 1) else 0)
    return mask


# Private characters, which no template rule matches: around learned text, and for names of special tokens in messages,
# which are plain text.
_BEGIN, _END, _NAME = "\ue0b0", "\ue0b1", "\ue0b2"


def read_template(template: str, others: Sequence[str]) -> str:
    """The source of a template: itself, or the content of a file (the key chat_template of a .json)."""
    if "{%" in template or "{{" in template:
        return template
    path = os.path.expanduser(template)
    if not os.path.isfile(path):
        raise UserError(
            f"chat template {template!r}: no such file; write {', '.join(others)} or the path of a Jinja file"
        )
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        return _name_bos(json.loads(source)["chat_template"] if path.endswith(".json") else source, path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: has no chat template ({error}); give a Jinja file") from error


def _name_bos(source: str, path: str) -> str:
    """The template, with the BOS that the tokenizer_config.json beside it names (OLMo 2, DeepSeek) if it is none of the
    usual ones."""
    config = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    if "bos_token" not in source or not os.path.isfile(config):
        return source
    with open(config, encoding="utf-8") as file:
        token = json.load(file).get("bos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if not isinstance(name, str) or name in BOS_NAMES:
        return source
    line = "{% set bos_token = " + json.dumps(name, ensure_ascii=False) + " +%}"  # "+": the line break after it stays
    return source if source.startswith(line) else line + source


@lru_cache(maxsize=8)
def jinja_template(source: str) -> Layout:
    """The layout of a Jinja template; its errors become UserErrors."""
    run = _compile(source)
    marked = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def layout(messages: Sequence[Message], learned: Sequence[float], tokenizer: Tokenizer) -> Iterable[ChatSegment]:
        names = sorted(tokenizer.special, key=len, reverse=True)
        safe = [_protect(message, names) for message in messages]
        tools = safe[0].pop(TOOLS, None) if safe else None
        if marked:
            if any(learn and message["role"] != "assistant" for message, learn in zip(messages, learned, strict=True)):
                raise UserError(
                    "chat template: learn: everything with a message of the user of weight 0: only turns of the "
                    "assistant are in {% generation %} blocks; remove the weight"
                )
            text = run(safe, tokenizer, False, tools)
            turns = [learn for message, learn in zip(messages, learned, strict=True) if message["role"] == "assistant"]
            return _parts(text, names, turns, tokenizer)
        text = _mark_turns(safe, learned, names, lambda some, prompt: run(some, tokenizer, prompt, tools))
        return _parts(text, names, [weight for weight in learned if weight], tokenizer)

    return layout


def _compile(source: str) -> Callable[[list[Any], Tokenizer, bool, Any], str]:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError("a Jinja chat template needs jinja2; pip install jinja2") from error

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (the way Jinja wants it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return _BEGIN + caller() + _END

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None, **options: json.dumps(
        value, ensure_ascii=False, indent=indent, **options
    )
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise UserError(f"chat template: {error}; correct the template") from error

    def run(messages: list[Any], tokenizer: Tokenizer, prompt: bool, tools: Any) -> str:
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=prompt,
                tools=tools,
                documents=None,
                eos_token=tokenizer.eos,
                bos_token=next((name for name in BOS_NAMES if name in tokenizer.special), ""),
            )
        except TemplateError as error:
            raise UserError(f"chat template: {error}; correct the template or the conversation") from error

    return run


BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")


def _protect(value: Any, names: Sequence[str]) -> Any:
    """A copy of a message whose text spells no special token and contains none of the private marks."""
    if isinstance(value, str):
        for mark in (_BEGIN, _END, _NAME):
            value = value.replace(mark, "\ufffd")
        for number, name in enumerate(names):
            value = value.replace(name, f"{_NAME}{number}{_NAME}")
        return value
    if isinstance(value, dict):
        return {key: _protect(item, names) if key != "role" else item for key, item in value.items()}
    if isinstance(value, list):
        return [_protect(item, names) for item in value]
    return value


def _mark_turns(
    messages: list[Any], learned: Sequence[float], names: Sequence[str], run: Callable[[list[Any], bool], str]
) -> str:
    """The rendering, with marks around the text that each learned turn adds to its prompt."""
    text = run(messages, False)
    special = re.compile("|".join(map(re.escape, names)))
    pieces, done = [], 0
    for place, learn in enumerate(learned):
        if not learn:
            continue
        before, after = run(messages[:place], True), run(messages[: place + 1], False)
        if not (after.startswith(before) and text.startswith(after) and len(before) >= done):
            raise UserError(
                f"chat template: message {place + 1} is rendered differently once other messages follow, so the text "
                "to learn is unknown; put {% generation %} and {% endgeneration %} around it in the template "
                "[template_without_marks]"
            )
        end = len(after)
        closing = [match.end() for match in special.finditer(text, len(before), end)]
        if closing and not text[closing[-1] : end].strip():
            end = closing[-1]  # white space after the end of the turn belongs to the template
        pieces += [text[done : len(before)], _BEGIN, text[len(before) : end], _END]
        done = end
    return "".join([*pieces, text[done:]])


def _parts(text: str, names: Sequence[str], turns: Sequence[float], tokenizer: Tokenizer) -> list[ChatSegment]:
    """Splits a rendering at marks and special tokens. `turns`: the weight of each marked stretch."""
    if text.count(_BEGIN) != len(turns):
        if len({*turns}) > 1:
            raise UserError(
                f"chat template: {text.count(_BEGIN)} generation blocks for {len(turns)} turns of the assistant, so "
                "a single turn cannot be chosen; write one block a turn or learn from all"
            )
        turns = [turns[0] if turns else 1] * text.count(_BEGIN)
    borders = re.compile("|".join([_BEGIN, _END, *map(re.escape, names)]))
    parts: list[ChatSegment] = []
    learned = iter(turns)
    learn: float = 0
    done = 0
    for border in [*borders.finditer(text), None]:
        stretch = text[done : border.start() if border else None]
        written = re.sub(f"{_NAME}(\\d+){_NAME}", lambda match: names[int(match[1])], stretch)
        parts.append(ChatSegment(written, learn))
        if border is None:
            break
        done = border.end()
        if border.group() in (_BEGIN, _END):
            learn = next(learned) if border.group() == _BEGIN else 0
        else:
            parts.append(ChatSegment(border.group(), learn, special=True))
    return _swallow_spaces(parts, tokenizer)


def _swallow_spaces(parts: list[ChatSegment], tokenizer: Tokenizer) -> list[ChatSegment]:
    """Some special tokens absorb the white space around them (lstrip and rstrip in their definition)."""
    added = tokenizer.inner.get_added_tokens_decoder()
    for place, part in enumerate(parts):
        token = added[tokenizer.special[part.text]] if part.special else None
        before, after = range(place - 1, -1, -1), range(place + 1, len(parts))
        for absorbs, places, strip in (
            (token and token.lstrip, before, str.rstrip),
            (token and token.rstrip, after, str.lstrip),
        ):
            for i in places if absorbs else ():
                if parts[i].special:
                    break
                parts[i] = replace(parts[i], text=strip(parts[i].text))
                if parts[i].text:
                    break
    return parts
