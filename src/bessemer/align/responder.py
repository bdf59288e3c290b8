"""Who answers conversations: a model on this machine, or an endpoint that speaks OpenAI's API."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bessemer.data.tokenizer.chat import Message
from bessemer.endpoint import Endpoint
from bessemer.errors import UserError
from bessemer.model.generate import Request, Sampling
from bessemer.train.answers import SLOTS, AnswerSettings, Prompt
from bessemer.train.trained import LoadedModel, find_model, load_model

Conversation = list[Message]
PLAIN = "plain"  # the chat format of a model that knows none
_NEXT_TURN = "\n\nUser:"  # a model without a chat format may go on with the next turn


@dataclass(frozen=True)
class Reply:
    """An answer, without white space around it; `finished` unless it was cut off at the maximum length. A conversation
    that does not fit into the model's context has an empty one."""

    text: str
    finished: bool
    fits: bool = True


class Responder(Protocol):
    """`identity` distinguishes models for which answers differ; `seed` makes the answers repeatable."""

    @property
    def identity(self) -> str: ...
    def reply(self, conversations: Sequence[Conversation], seed: int = 0) -> list[Reply]: ...


@dataclass(frozen=True)
class ModelResponder:
    """A loaded model. Each conversation draws its own random numbers, so answers do not depend on the batch."""

    loaded: LoadedModel
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    identity: str = ""

    def reply(self, conversations: Sequence[Conversation], seed: int = 0) -> list[Reply]:
        prompts = [self.loaded.chat_prompt(messages) for messages in conversations]
        limit = self.loaded.context or max(map(len, prompts), default=0)
        stop = (*self.settings.stop, *([_NEXT_TURN] if self.loaded.template == PLAIN else []))
        requests = {
            number: Request(
                ids, self.settings.max_tokens, replace(self.settings.sampling, seed=case_seed(seed, number)),
                self.loaded.stop_ids, stop,
            )
            for number, ids in enumerate(prompts) if len(ids) <= limit
        }  # fmt: skip
        if not requests:
            return [Reply("", False, False)] * len(prompts)
        longest = max(len(request.prompt) for request in requests.values()) + self.settings.max_tokens
        generator = self.loaded.generator(min(SLOTS, len(requests)), longest)
        answers = dict(zip(requests, generator.run(requests.values()), strict=True))
        return [
            Reply(samples[0].text.strip(), samples[0].reason != "length") if samples else Reply("", False, False)
            for samples in (answers.get(number) for number in range(len(prompts)))
        ]


def answer_prompts(responder: Responder, conversations: Sequence[Conversation], seed: int = 0) -> list[str]:
    """The answers to prompts, each of which must fit into the model's context."""
    replies = responder.reply(conversations, seed)
    for messages, reply in zip(conversations, replies, strict=True):
        if not reply.fits:
            raise UserError(f"the prompt {messages[-1]['content'][:60]!r} exceeds the model's context: shorten it")
    return [reply.text for reply in replies]


def case_seed(*parts: Any) -> int:
    """A seed for one case: neighbouring numbers give unrelated seeds."""
    return random.Random(" ".join(map(str, parts))).getrandbits(62)


def load_chat_model(
    model: str | Path, checkpoint: str = "last", device: str = "auto", template: str | None = None
) -> LoadedModel:
    """A model to hold conversations with; one without a chat format gets `plain`."""
    loaded = load_model(model, checkpoint, device)
    return replace(loaded, template=template or loaded.template or PLAIN)


@dataclass(frozen=True)
class EndpointResponder:
    """A model behind an endpoint."""

    endpoint: Endpoint

    @property
    def identity(self) -> str:
        return f"{self.endpoint.url}#{self.endpoint.model}"

    def reply(self, conversations: Sequence[Conversation], seed: int = 0) -> list[Reply]:
        return [Reply(answer.text.strip(), answer.finished) for answer in self.endpoint.complete(conversations, seed)]


def open_responder(
    model: str, settings: AnswerSettings, checkpoint: str = "last", device: str = "auto", template: str | None = None,
    key_env: str | None = None,
) -> Responder:  # fmt: skip
    """The responder of a command: `model` is a model's folder, or the URL of an endpoint and a name, URL#NAME."""
    if model.startswith(("http://", "https://")):
        url, _, name = model.partition("#")
        if not name:
            raise UserError(f"{model}: name the endpoint's model too, such as {url.rstrip('/')}#my-model")
        url = url.rstrip("/").removesuffix("/chat/completions")
        return EndpointResponder(Endpoint(url, name, key_env, settings.sampling.temperature, settings.max_tokens))
    files = find_model(model, checkpoint)
    loaded = load_chat_model(model, checkpoint, device, template)
    return ModelResponder(loaded, settings, str((files.checkpoint or files.place).resolve()))


def conversation(prompt: Prompt) -> Conversation:
    """A prompt as messages: a text is one turn of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def with_turns(messages: Conversation, *turns: str) -> Conversation:
    """The conversation with more turns; roles alternate, beginning with the assistant."""
    roles = ("assistant", "user")
    return [*messages, *({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))]


def prompt_value(messages: Conversation) -> str | Conversation:
    """A conversation as a row's prompt: the text alone where it is one turn of the user."""
    if len(messages) == 1 and messages[0]["role"] == "user" and isinstance(messages[0]["content"], str):
        return str(messages[0]["content"])
    return messages


def greedy(max_tokens: int) -> AnswerSettings:
    return AnswerSettings(max_tokens, sampling=Sampling(0.0))


def chunks(count: int, size: int) -> Iterator[range]:
    """The numbers below `count` in ranges of at most `size`."""
    for start in range(0, count, size):
        yield range(start, min(count, start + size))
