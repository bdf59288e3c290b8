"""From a chat request to the prompt, the constraint of the answer, and back from its text to tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.data.read.chat_turns import normalise_turns, with_tools
from bessemer.errors import UserError
from bessemer.serve.errors import ApiError
from bessemer.serve.grammar import GrammarCompiler, GrammarConstraint
from bessemer.serve.protocol import ChatMessage, ChatRequest, SchemaFormat, TextFormat, ToolChoice


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a tool call: JSON between two markers. Without a marker the complete answer is the call."""

    before: str
    after: str
    arguments_key: str = "arguments"
    is_list: bool = False

    @property
    def marker(self) -> str:
        """What a call begins with."""
        return self.before.strip() if not self.is_list else self.before.removesuffix("[")


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>")
MISTRAL = ToolFormat("[TOOL_CALLS][", "]", is_list=True)
LLAMA = ToolFormat("", "", "parameters")


def tool_format(template: str | None) -> ToolFormat:
    """The format of a chat template: that of Hermes and Qwen, Mistral or Llama 3."""
    if template == "llama3":
        return LLAMA
    if template is None or "{" not in template or "<tool_call>" in template:  # built-in templates have no braces
        return HERMES
    return MISTRAL if "[TOOL_CALLS]" in template else LLAMA


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages as chat templates read them, the tools in the first one."""
    turns = normalise_turns([_message(message, i) for i, message in enumerate(request.messages)], "messages")
    tools = None if request.tool_choice == "none" else request.tools
    return with_tools(turns, [tool.model_dump(exclude_none=True) for tool in tools or []])


def _message(message: ChatMessage, number: int) -> dict[str, Any]:
    place = f"messages[{number}]"
    turn = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        turn["content"] = "".join(part.text for part in message.content)
    if message.role != "assistant":
        turn.pop("tool_calls", None)
        if message.content is None:
            raise ApiError(400, f"{place}: content is missing", f"{place}.content")
    turn.setdefault("content", "")
    for call in turn.get("tool_calls", ()):
        try:  # templates print objects
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            raise ApiError(400, f"{place}: the arguments of a tool call are not JSON", f"{place}.tool_calls") from None
    return turn


def answer_constraint(request: ChatRequest, compiler: GrammarCompiler, format: ToolFormat) -> GrammarConstraint | None:
    """What `response_format` and `tool_choice` demand of the answer; None for any text."""
    choice, functions = request.tool_choice, [tool.function.model_dump() for tool in request.tools or []]
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function["name"] == choice.function.name]
        if not functions:
            raise ApiError(400, f"tool_choice: tools has no function {choice.function.name!r}", "tool_choice")
    if isinstance(choice, ToolChoice) or choice == "required":
        if not functions:
            raise ApiError(400, "tool_choice: required needs tools", "tool_choice")
        constraint: GrammarConstraint = compiler.tool_call(format.before, format.after, format.arguments_key, functions)
        return constraint
    if isinstance(request.response_format, SchemaFormat):
        return compiler.json_schema(request.response_format.json_schema.schema_)
    if isinstance(request.response_format, TextFormat) and request.response_format.type == "json_object":
        return compiler.json_schema({"type": "object"})
    return None


def parse_tool_calls(text: str, format: ToolFormat, names: Sequence[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """The text before the calls, and the calls; text that is no call of these functions stays text."""
    calls: list[dict[str, Any]] = []
    if not format.before:
        calls = _read_calls(text, format, names)
        return (None, calls) if calls else (text, [])
    marker, rest, content = format.marker, text, ""
    end = "" if format.is_list else format.after.strip()
    while (at := rest.find(marker)) >= 0:
        body, after = rest[at + len(marker) :], ""
        if end:
            body, closing, after = body.partition(end)
            body = body if closing else ""
        if not (new := _read_calls(body, format, names)):
            return (content + rest) or None, calls
        content, rest, calls = content + rest[:at], after, calls + new
    return (content + rest if not calls else (content + rest).strip()) or None, calls


def _read_calls(body: str, format: ToolFormat, names: Sequence[str]) -> list[dict[str, Any]]:
    """The calls that a JSON text holds; none if it is something else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    calls = []
    for item in value if format.is_list and isinstance(value, list) else [value]:
        if not isinstance(item, dict) or item.get("name") not in names:
            return []
        arguments = item.get(format.arguments_key, item.get("arguments", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": item["name"], "arguments": text}
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls


def text_before_calls(text: str, format: ToolFormat) -> str:
    """The part of an unfinished answer that cannot belong to a tool call."""
    marker = format.marker
    if not marker:
        return "" if text.lstrip().startswith("{") or not text.strip() else text
    if (at := text.find(marker)) >= 0:
        return text[:at]
    held = max((n for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)
    return text[: len(text) - held]


def check_encodable(value: Any, name: str) -> None:
    """Refuse lone surrogates anywhere in a value, which no tokenizer can encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} is not valid Unicode: it has a lone surrogate") from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
