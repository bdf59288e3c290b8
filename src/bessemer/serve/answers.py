"""Completions of the engine as the API's objects: complete bodies and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.model.generate import Completion
from bessemer.serve.errors import ApiError
from bessemer.serve.grammar import GrammarConstraint
from bessemer.serve.models import ServedModel
from bessemer.serve.prompts import ToolFormat, parse_tool_calls, text_before_calls
from bessemer.serve.scheduler import InferenceJob

_REASONS = {"stop": "stop", "length": "length", "time": "length", "cancelled": "stop"}
_LOWEST = -9999.0  # JSON has no infinity


def event(value: Any) -> str:
    """A server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"


@dataclass
class Answer:
    """The answer of one request: its jobs and how they are shown. `tools` are the functions that the client knows."""

    model: ServedModel
    jobs: Sequence[InferenceJob]
    logprobs: bool = False
    include_usage: bool = False
    constraint: GrammarConstraint | None = None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")  # `object` of a body and of a chunk

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    @property
    def samples(self) -> list[Completion]:
        return [completion for job in self.jobs for completion in job.completions]

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(job.completions[0].prompt_tokens for job in self.jobs if job.completions)
        cached = sum(job.completions[0].cached_tokens for job in self.jobs if job.completions)
        new = sum(len(sample.tokens) for sample in self.samples)
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model.name,
            "system_fingerprint": self.model.source, "choices": choices,
        }  # fmt: skip

    def check(self) -> None:
        """ApiError if the constraint failed while it was used, which ended the answer."""
        if self.constraint is not None and self.constraint.errors:
            message = f"the schema is too complex: {self.constraint.errors[0]}"
            raise ApiError(400, message, "response_format", "invalid_schema")

    def body(self) -> dict[str, Any]:
        self.check()
        choices = [self.choice(i, sample) for i, sample in enumerate(self.samples)]
        return self.envelope(self.kinds[0], choices) | {"usage": self.usage}

    async def stream(self, updates: AsyncIterator[None]) -> AsyncIterator[str]:
        """Events of a streamed answer. Errors become an event."""
        usage = {"usage": None} if self.include_usage else {}
        read: dict[int, tuple[int, int]] = {}  # by sample: characters and tokens that were sent
        try:
            for choice in self.opening():
                yield event(self.envelope(self.kinds[1], [choice]) | usage)
            more = True
            while more:  # the first update was read before the response began
                for choice in self._deltas(read):
                    yield event(self.envelope(self.kinds[1], [choice]) | usage)
                more = await anext(updates, updates) is not updates
            self.check()
            if self.include_usage:
                yield event(self.envelope(self.kinds[1], []) | {"usage": self.usage})
        except ApiError as error:
            yield event(error.body)
        yield event("[DONE]")

    def _deltas(self, read: dict[int, tuple[int, int]]) -> Iterator[dict[str, Any]]:
        number = 0
        for job in self.jobs:
            for sample, progress in zip(job.completions, job.progress, strict=False):
                sent_text, sent_tokens = read.get(number, (0, 0))
                if sent_text >= 0:
                    ended = progress.reason is not None
                    text = progress.text if ended else self.visible(progress.text)
                    tokens = range(sent_tokens, progress.tokens)
                    if len(text) > sent_text or ended or (self.logprobs and tokens):
                        yield from self.delta(number, sample, text, sent_text, tokens, ended)
                        read[number] = -1 if ended else len(text), progress.tokens
                number += 1

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def visible(self, text: str) -> str:
        """The part of an unfinished text that may be sent."""
        return text

    def choice(self, index: int, sample: Completion) -> dict[str, Any]:
        logprobs = self.token_logprobs(sample, range(len(sample.tokens)), 0) if self.logprobs else None
        return {"index": index, "text": sample.text, "logprobs": logprobs, "finish_reason": _reason(sample)}

    def delta(
        self, index: int, sample: Completion, text: str, start: int, tokens: range, ended: bool
    ) -> Iterator[dict[str, Any]]:
        """Chunks of the characters from `start` on, with the log-probabilities of new tokens."""
        logprobs = self.token_logprobs(sample, tokens, start) if self.logprobs else None
        reason = _reason(sample) if ended else None
        yield {"index": index, "text": text[start:], "logprobs": logprobs, "finish_reason": reason}

    def token_logprobs(self, sample: Completion, tokens: range, start: int) -> dict[str, Any]:
        offsets, names = [start], [self.token_name(sample.tokens[i]) for i in tokens]
        for i in tokens:
            offsets.append(offsets[-1] + len(self.token_text(sample.tokens[i])))
        return {
            "tokens": names,
            "token_logprobs": [max(sample.logprobs[i], _LOWEST) for i in tokens],
            "top_logprobs": [
                {self.token_name(id): max(value, _LOWEST) for id, value in sample.top[i].items()} for i in tokens
            ],
            "text_offset": offsets[:-1],
        }

    def token_text(self, id: int) -> str:
        return self.model.loaded.decode([id])

    def token_bytes(self, id: int) -> bytes:
        if id in self.model.loaded.tokenizer.special.values():
            return self.token_text(id).encode()
        return bytes(self.model.grammar.vocabulary.decode_bytes([id]))

    def token_name(self, id: int) -> str:
        """The text of a token; its bytes if they are only a part of a character, as OpenAI writes them."""
        text = self.token_text(id)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(id))


@dataclass
class EchoAnswer(Answer):
    """A completion that begins with its prompt."""

    echoes: Sequence[str] = ()  # the text of each job's prompt

    def choice(self, index: int, sample: Completion) -> dict[str, Any]:
        choice = super().choice(index, sample)
        return choice | {"text": self.echo(index) + choice["text"]}

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(sum(job.samples for job in self.jobs)):
            yield {"index": index, "text": self.echo(index), "logprobs": None, "finish_reason": None}

    def echo(self, index: int) -> str:
        return self.echoes[index // self.jobs[0].samples]


@dataclass
class ChatAnswer(Answer):
    """A turn of the assistant, with tool calls if the request has tools."""

    tools: Sequence[str] = ()
    format: ToolFormat | None = None
    one_call: bool = False

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(sum(job.samples for job in self.jobs)):
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                   "finish_reason": None}  # fmt: skip

    def visible(self, text: str) -> str:
        return text_before_calls(text, self.format) if self.tools and self.format else text

    def choice(self, index: int, sample: Completion) -> dict[str, Any]:
        content, calls = self.parse(sample.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        logprobs = self.chat_logprobs(sample, range(len(sample.tokens))) if self.logprobs else None
        reason = "tool_calls" if calls else _reason(sample)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def parse(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        if not self.tools or self.format is None:
            return text, []
        content, calls = parse_tool_calls(text, self.format, self.tools)
        return content, calls[:1] if self.one_call else calls

    def delta(
        self, index: int, sample: Completion, text: str, start: int, tokens: range, ended: bool
    ) -> Iterator[dict[str, Any]]:
        logprobs = self.chat_logprobs(sample, tokens) if self.logprobs else None
        calls: list[dict[str, Any]] = []
        if ended and self.tools:
            content, calls = self.parse(text)
            text = content or "" if calls else text
        base = {"index": index, "logprobs": logprobs, "finish_reason": None}
        if text[start:] or (logprobs and tokens):
            yield {**base, "delta": {"content": text[start:]}}
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            yield {**base, "delta": {"tool_calls": numbered}, "logprobs": None}
        if ended:
            reason = "tool_calls" if calls else _reason(sample)
            yield {**base, "delta": {}, "logprobs": None, "finish_reason": reason}

    def chat_logprobs(self, sample: Completion, tokens: range) -> dict[str, Any]:
        content = []
        for i in tokens:
            entry = self.scored(sample.tokens[i], sample.logprobs[i])
            top = [self.scored(id, value) for id, value in sample.top[i].items()]
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def scored(self, id: int, logprob: float) -> Mapping[str, Any]:
        """A token with its exact bytes, which may be a part of a character."""
        data = list(self.token_bytes(id))
        return {"token": self.token_text(id), "logprob": max(logprob, _LOWEST), "bytes": data}


def _reason(sample: Completion) -> str:
    return _REASONS[sample.reason or "stop"]
