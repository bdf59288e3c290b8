"""Chat templates in Jinja, as Hugging Face models bring them, run in a sandbox.

What is learned stands in `{% generation %}` blocks. A template without them is rendered turn by turn, and what a turn
of the assistant adds is learned; that works if a conversation begins with the rendering of its beginning.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from bessemer.data.chat import Layout, Message, Part
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError

# Private characters, which no rule of a template looks for: around what is learned, and for a special token's name
# that somebody wrote, which is only text.
_BEGIN, _END, _NAME = "\ue0b0", "\ue0b1", "\ue0b2"


def read_template(template: str, others: Sequence[str]) -> str:
    """The source of a template: itself, or what a file holds (tokenizer_config.json has it under chat_template)."""
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
        return json.loads(source)["chat_template"] if path.endswith(".json") else source
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: holds no chat template ({error}); give a Jinja file") from error


@lru_cache(maxsize=8)
def jinja_template(source: str) -> Layout:
    """The layout of a template; an error in it, or raised by it, is a UserError."""
    run = _compile(source)
    marked = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def layout(messages: Sequence[Message], learned: Sequence[bool], tokenizer: Tokenizer) -> Iterable[Part]:
        names = sorted(tokenizer.special, key=len, reverse=True)
        safe = [_protect(message, names) for message in messages]
        if marked:
            text = run(safe, tokenizer, False)
            turns = [learn for message, learn in zip(messages, learned, strict=True) if message["role"] == "assistant"]
            return _parts(text, names, turns, tokenizer)
        text = _mark_turns(safe, learned, names, lambda some, prompt: run(some, tokenizer, prompt))
        return _parts(text, names, [True] * sum(learned), tokenizer)

    return layout


def _compile(source: str) -> Callable[[list[Any], Tokenizer, bool], str]:
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

    def run(messages: list[Any], tokenizer: Tokenizer, prompt: bool) -> str:
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=prompt,
                tools=None,
                documents=None,
                eos_token=tokenizer.eos,
                bos_token=next((name for name in _BOS if name in tokenizer.special), ""),
            )
        except TemplateError as error:
            raise UserError(f"chat template: {error}; correct the template or the conversation") from error

    return run


_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")


def _protect(value: Any, names: Sequence[str]) -> Any:
    """A copy of a message in which text that spells a special token no longer does, and has none of our marks."""
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
    messages: list[Any], learned: Sequence[bool], names: Sequence[str], run: Callable[[list[Any], bool], str]
) -> str:
    """The rendering, with marks around what each learned turn adds to the one that asks for it."""
    text = run(messages, False)
    special = re.compile("|".join(map(re.escape, names)))
    pieces, done = [], 0
    for place, learn in enumerate(learned):
        if not learn:
            continue
        before, after = run(messages[:place], True), run(messages[: place + 1], False)
        if not (after.startswith(before) and text.startswith(after) and len(before) >= done):
            raise UserError(
                f"chat template: message {place + 1} is rendered otherwise with what follows than without, so what to "
                "learn cannot be told; put {% generation %} and {% endgeneration %} around it in the template"
            )
        end = len(after)
        closing = [match.end() for match in special.finditer(text, len(before), end)]
        if closing and not text[closing[-1] : end].strip():
            end = closing[-1]  # white space behind the end of the turn is the template's
        pieces += [text[done : len(before)], _BEGIN, text[len(before) : end], _END]
        done = end
    return "".join([*pieces, text[done:]])


def _parts(text: str, names: Sequence[str], turns: Sequence[bool], tokenizer: Tokenizer) -> list[Part]:
    """Divides a rendering at marks and special tokens. `turns`: whether each marked stretch is learned."""
    if text.count(_BEGIN) != len(turns):
        if not all(turns):
            raise UserError(
                f"chat template: {text.count(_BEGIN)} generation blocks for {len(turns)} turns of the assistant, so "
                "a single turn cannot be chosen; write one block a turn or learn from all"
            )
        turns = [True] * text.count(_BEGIN)
    borders = re.compile("|".join([_BEGIN, _END, *map(re.escape, names)]))
    parts: list[Part] = []
    learned = iter(turns)
    learn, done = False, 0
    for border in [*borders.finditer(text), None]:
        stretch = text[done : border.start() if border else None]
        written = re.sub(f"{_NAME}(\\d+){_NAME}", lambda found: names[int(found[1])], stretch)
        parts.append(Part(written, learn))
        if border is None:
            break
        done = border.end()
        if border.group() in (_BEGIN, _END):
            learn = border.group() == _BEGIN and next(learned)
        else:
            parts.append(Part(border.group(), learn, special=True))
    return _swallow_spaces(parts, tokenizer)


def _swallow_spaces(parts: list[Part], tokenizer: Tokenizer) -> list[Part]:
    """Some special tokens take the white space around them (lstrip and rstrip in their definition)."""
    added = tokenizer.inner.get_added_tokens_decoder()
    for place, part in enumerate(parts):
        if not part.special:
            continue
        token = added[tokenizer.special[part.text]]
        if token.lstrip:
            for i in range(place - 1, -1, -1):
                if parts[i].special or parts[i].text.strip():
                    parts[i] = parts[i] if parts[i].special else replace(parts[i], text=parts[i].text.rstrip())
                    break
                parts[i] = replace(parts[i], text="")
        if token.rstrip:
            for i in range(place + 1, len(parts)):
                if parts[i].special or parts[i].text.strip():
                    parts[i] = parts[i] if parts[i].special else replace(parts[i], text=parts[i].text.lstrip())
                    break
                parts[i] = replace(parts[i], text="")
    return parts
