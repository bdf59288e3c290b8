"""The dialects of conversations made one: names of roles, tools and their calls, reasoning, and which messages are
learnt. Applied to sources with a `chat_format`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bessemer.errors import UserError

# Role names of ShareGPT's and OpenAI's dialects.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool", "function_response": "tool",
    "function": "tool", "developer": "system",
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning", "thinking")
REASONING_TURN = "reasoning_turn"  # key of a message: its reasoning, which built-in templates write


MESSAGE_WEIGHT = "message_weight"  # field of tokens in the store
TOOLS = "tools"  # key of a conversation's first message: the JSON schemas of its tools


def normalise_turns(messages: list[dict[str, Any]], place: str, weighted: bool = False) -> list[dict[str, Any]]:
    """One dialect: roles of OpenAI, `tool_calls`, the reasoning under one key, and `train` as a weight of 0 or 1. Other
    weights are accepted if `weighted`, and a UserError otherwise; ValueError for values that are no weights."""
    turns = []
    for number, message in enumerate(messages, start=1):
        try:
            turns.append(_normalise(message, f"{place}: message {number}", weighted))
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
    return turns


def with_tools(messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """The conversation with its tools, given as a list of JSON schemas or as JSON. ValueError for anything else."""
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    if not tools or not messages:
        return messages
    if wrong := [item for item in (tools if isinstance(tools, list) else [tools]) if not isinstance(item, Mapping)]:
        raise ValueError(f"a {type(wrong[0]).__name__}, not a list of JSON schemas")
    return [{**messages[0], TOOLS: tools}, *messages[1:]]


def _normalise(message: dict[str, Any], place: str, weighted: bool) -> dict[str, Any]:
    turn = {**message, "role": _ROLES.get(message["role"], message["role"])}
    if isinstance(call := turn.pop("function_call", None), Mapping):
        turn.setdefault("tool_calls", [{"type": "function", "function": dict(call)}])
    for key in _REASONING:
        if isinstance(text := turn.get(key), str) and text.strip():
            turn |= {"reasoning_content": text, REASONING_TURN: text}
            break
    weight = turn.get("weight", 1)
    if (trains := turn.pop("train", True)) not in (True, False):
        raise ValueError(f"train {trains!r}: write true or false")
    if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight {weight!r}: write a number from 0 on")
    weight = weight if trains else 0
    if weight not in (0, 1) and not weighted:
        raise UserError(f"{place}: weight {weight!r}: write message_weights: true under its source")
    return {**turn, "weight": weight} if weight != 1 else {key: value for key, value in turn.items() if key != "weight"}


def join_parts(turns: Any) -> Any:
    """Messages whose content is a list of text parts, with it as one text."""
    if not isinstance(turns, list):
        return turns
    return [_join(turn) if isinstance(turn, dict) and isinstance(turn.get("content"), list) else turn for turn in turns]


def _join(turn: dict[str, Any]) -> dict[str, Any]:
    parts = turn["content"]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return turn  # images and the like: the reader refuses it with its place
    return {**turn, "content": "".join(part["text"] for part in parts)}
