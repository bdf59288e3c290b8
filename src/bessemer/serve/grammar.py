"""Answers limited to a JSON schema or a tool call, through llguidance: a mask of allowed tokens at every step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.serve.errors import ApiError

# Unlimited white space would let a weak model write nothing else until the token limit.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t\r]{0,32}"}


class GrammarConstraint:
    """The state of one answer. `errors` is shared with its copies: what made the grammar fail while it was used."""

    def __init__(self, matcher: Any, stop_ids: frozenset[int], errors: list[str]) -> None:
        self.matcher, self.stop_ids, self.errors = matcher, stop_ids, errors

    def fork(self) -> Self:
        return type(self)(self.matcher.deep_copy(), self.stop_ids, self.errors)

    def allowed(self, vocab: int) -> Tensor:
        allowed_V = torch.zeros(vocab, dtype=torch.bool)
        if not self.matcher.is_error():
            bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab]
            allowed_V[: len(bits)] = torch.from_numpy(bits.astype(bool))
        if self.matcher.is_error():
            self.errors.append(self.matcher.get_error())
        if not allowed_V.any():  # the answer ends here
            allowed_V[list(self.stop_ids)] = True
        return allowed_V

    def accept(self, token: int) -> None:
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token)


class GrammarCompiler:
    """Compiles constraints for one tokenizer. A grammar is compiled once for a few hundred requests that share it."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self._vocabulary: Any = None
        self._compile = lru_cache(maxsize=64)(self._compile_new)

    @property
    def vocabulary(self) -> Any:
        """llguidance's tokenizer, made at first use."""
        if self._vocabulary is None:
            from llguidance import LLTokenizer

            try:
                self._vocabulary = LLTokenizer(self.tokenizer.inner.to_str(), eos_token=sorted(self.stop_ids))
            except Exception as error:
                raise UserError(f"JSON and tool calls cannot be enforced with this tokenizer: {error}") from None
        return self._vocabulary

    def json_schema(self, schema: Mapping[str, Any] | bool) -> GrammarConstraint:
        from llguidance import LLMatcher

        try:
            source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"the JSON schema is invalid: {error}", "response_format") from None
        return self._fresh(source, "response_format")

    def tool_call(self, before: str, after: str, arguments_key: str, functions: Sequence[Mapping[str, Any]]) -> Any:
        """A call of one of the functions between two markers."""
        from llguidance import LLMatcher

        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    arguments_key: function.get("parameters") or {"type": "object"},
                },
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
            for function in functions
        ]
        schema = json.dumps({"anyOf": calls, "x-guidance": _JSON_OPTIONS})
        rule = " ".join(part for part in (self._literal(before), "call", self._literal(after)) if part)
        return self._fresh(LLMatcher.grammar_from_lark(f"start: {rule}\ncall: %json {schema}\n"), "tools")

    def _literal(self, text: str) -> str:
        """A marker in Lark. Its name may be a special token, which text cannot spell."""
        name = text.strip("\n")
        if name in self.tokenizer.special:
            rest = text.partition(name)
            return " ".join(
                [*([json.dumps(rest[0])] if rest[0] else []), f"<[{self.tokenizer.special[name]}]>"]
                + ([json.dumps(rest[2])] if rest[2] else [])
            )
        return json.dumps(text) if text else ""

    def _fresh(self, source: str, param: str) -> GrammarConstraint:
        matcher = self._compile(source)
        if isinstance(matcher, str):
            raise ApiError(400, f"the schema cannot be enforced: {matcher}", param, "invalid_schema")
        return GrammarConstraint(matcher.deep_copy(), self.stop_ids, [])

    def _compile_new(self, source: str) -> Any:
        """A matcher in its initial state, or the message of an error."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.vocabulary, source, log_level=0)
        return matcher.get_error() if matcher.is_error() else matcher
