"""The dialects of conversations made one: names of roles, tool calls, reasoning, and which messages are learnt. Applied
to sources with a `chat_format`."""

from __future__ import annotations

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


def normalise_turns(messages: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """One dialect: roles of OpenAI, `tool_calls`, the reasoning under one key, and `train` as a weight of 0 or 1."""
    return [_normalise(message, f"{place}: message {number}") for number, message in enumerate(messages, start=1)]


def _normalise(message: dict[str, Any], place: str) -> dict[str, Any]:
    turn = {**message, "role": _ROLES.get(message["role"], message["role"])}
    if isinstance(call := turn.pop("function_call", None), Mapping):
        turn.setdefault("tool_calls", [{"type": "function", "function": dict(call)}])
    for key in _REASONING:
        if isinstance(text := turn.get(key), str) and text.strip():
            turn |= {"reasoning_content": text, REASONING_TURN: text}
            break
    weight = turn.get("weight", 1)
    if turn.pop("train", True) in (False, 0):
        weight = 0
    if weight not in (0, 1):
        raise UserError(
            f"{place}: weight {weight!r}: a message is learnt or not: write 0 or 1, or put its rows into a source of "
            "their own with a smaller weight in the mixture"
        )
    return {**turn, "weight": 0} if weight == 0 else {key: value for key, value in turn.items() if key != "weight"}


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
