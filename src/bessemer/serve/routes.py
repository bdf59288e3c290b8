"""What the endpoints do: from a validated request to jobs, and from their results to a response."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from torch import Tensor

from bessemer.data.tokenizer.tokenizer import added_tokens
from bessemer.model.generate import Request as Prompt
from bessemer.model.generate import Sampling
from bessemer.serve.answers import Answer, ChatAnswer, EchoAnswer
from bessemer.serve.encoders import classification
from bessemer.serve.errors import ApiError
from bessemer.serve.grammar import GrammarConstraint
from bessemer.serve.models import ModelRegistry, ServedModel
from bessemer.serve.prompts import answer_constraint, chat_messages, check_encodable, tool_format
from bessemer.serve.protocol import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    SamplingOptions,
    refuse_unsupported,
)
from bessemer.serve.scheduler import InferenceJob, Scheduler

_COMPLETION_TOKENS = 16  # max_tokens of /v1/completions where the request has none, as in OpenAI's API


class Endpoints:
    """The endpoints that compute something."""

    def __init__(self, registry: ModelRegistry, scheduler: Scheduler) -> None:
        self.registry, self.scheduler, self.limits = registry, scheduler, scheduler.limits

    async def chat(self, http: Request, request: ChatRequest) -> Response:
        refuse_unsupported(request)
        model = self.registry.get(request.model, "generate")
        format = tool_format(model.loaded.template)
        check_encodable([message.model_dump() for message in request.messages], "messages")
        check_encodable([tool.model_dump() for tool in request.tools or []], "tools")

        def prepare() -> tuple[list[int], GrammarConstraint | None]:
            constraint = answer_constraint(request, model.grammar, format)
            return model.loaded.chat_prompt(chat_messages(request)), constraint

        prompt, constraint = await asyncio.to_thread(prepare)
        max_tokens = request.max_completion_tokens or request.max_tokens
        top = (request.top_logprobs or 0) if request.logprobs else None
        jobs = self._jobs(http, model, request, [prompt], max_tokens or self._room(model, prompt), top, constraint)
        tools = [] if request.tool_choice == "none" else [tool.function.name for tool in request.tools or []]
        answer = ChatAnswer(
            model, jobs, bool(request.logprobs), _include_usage(request), tools=tools, format=format,
            one_call=request.parallel_tool_calls is False, constraint=constraint,
        )  # fmt: skip
        return await self._answer(http, answer, bool(request.stream))

    async def complete(self, http: Request, request: CompletionRequest) -> Response:
        refuse_unsupported(request)
        model = self.registry.get(request.model, "generate")
        most = min(self.limits.prompts, self.limits.client_queue)  # each waits for itself
        prompts = await asyncio.to_thread(self._encode, request.prompt, model.loaded.prompt, "prompt", most)
        max_tokens = request.max_tokens or _COMPLETION_TOKENS
        jobs = self._jobs(http, model, request, prompts, max_tokens, request.logprobs, None)
        shown: dict[str, Any] = {"logprobs": request.logprobs is not None, "include_usage": _include_usage(request)}
        answer = Answer(model, jobs, **shown)
        if request.echo:
            texts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
            are_texts = all(isinstance(text, str) for text in texts)
            echoes = [str(text) for text in texts] if are_texts else [model.loaded.decode(ids) for ids in prompts]
            answer = EchoAnswer(model, jobs, **shown, echoes=echoes)
        return await self._answer(http, answer, bool(request.stream))

    async def embed(self, http: Request, request: EmbeddingRequest) -> Response:
        model = self.registry.get(request.model, "embed")
        width = model.loaded.model.shape.width
        if request.dimensions not in (None, width):
            raise ApiError(400, f"the model has {width} dimensions: leave out dimensions", "dimensions")
        texts, vectors = await self._run_encoder(http, model, request.input)
        as_text = request.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i,
             "embedding": base64.b64encode(np.asarray(vector, np.float32).tobytes()).decode() if as_text
             else vector.tolist()}
            for i, vector in enumerate(vectors)
        ]  # fmt: skip
        return JSONResponse(_list_body(model, texts, data))

    async def classify(self, http: Request, request: ClassifyRequest) -> Response:
        model = self.registry.get(request.model, "classify")
        assert model.classes is not None
        texts, logits = await self._run_encoder(http, model, request.input)
        inputs = [request.input] if isinstance(request.input, str) else request.input
        prefix, suffix = added_tokens(model.loaded.tokenizer)
        data = []
        for i, (text, values) in enumerate(zip(inputs, logits, strict=True)):
            spans = []
            if model.classes.kind == "token":
                offsets = model.loaded.tokenizer.encode_with_offsets([text])[0][1]
                spans = [*[(0, 0)] * len(prefix), *offsets, *[(0, 0)] * len(suffix)]
            data.append(classification(i, values, model.classes, spans))
        return JSONResponse(_list_body(model, texts, data))

    async def _run_encoder(self, http: Request, model: ServedModel, value: Any) -> tuple[list[list[int]], list[Tensor]]:
        tokenizer = model.loaded.tokenizer
        prefix, suffix = added_tokens(tokenizer)

        def encode(text: str) -> list[int]:
            check_encodable(text, "input")
            return [*prefix, *tokenizer.encode(text), *suffix]

        texts = await asyncio.to_thread(self._encode, value, encode, "input", self.limits.inputs)
        vocab = model.loaded.model.shape.vocab
        for ids in texts:
            if not ids or max(ids) >= vocab:
                message = "an empty input: give text" if not ids else f"an input with ids above {vocab - 1}"
                raise ApiError(400, message, "input")
            if len(ids) > model.context:
                raise _too_long(len(ids), model, "input")
        job = InferenceJob(model.name, model.backend, http.state.client, texts)
        self.scheduler.submit([job])
        await self._finish(http, [job], self.scheduler.updates([job]))
        return texts, job.results

    def _encode(self, value: Any, encode: Callable[[str], list[int]], name: str, most: int) -> list[list[int]]:
        """Ids of a text, of ids, or of each of several."""
        entries = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
        if not entries:
            raise ApiError(400, f"{name} is empty", name)
        if len(entries) > most:
            raise ApiError(400, f"{len(entries)} entries; at most {most} are accepted", name)
        return [encode(entry) if isinstance(entry, str) else list(entry) for entry in entries]

    def _room(self, model: ServedModel, prompt: Sequence[int]) -> int:
        return max(1, min(model.context - len(prompt), self.limits.max_tokens))

    def _jobs(
        self, http: Request, model: ServedModel, request: SamplingOptions, prompts: Sequence[list[int]],
        max_tokens: int, top_logprobs: int | None, constraint: GrammarConstraint | None,
    ) -> list[InferenceJob]:  # fmt: skip
        """Submit one job for each prompt."""
        n, most = request.n or 1, min(self.limits.samples, model.backend.slots)
        if n > most:
            raise ApiError(400, f"n is {n}; at most {most} is accepted", "n")
        if max_tokens > self.limits.max_tokens:
            message = f"max_tokens is {max_tokens}; at most {self.limits.max_tokens} is accepted"
            raise ApiError(400, message, "max_tokens")
        for prompt in prompts:
            if len(prompt) >= model.context:
                raise _too_long(len(prompt), model, "messages" if isinstance(request, ChatRequest) else "prompt")
            if max(prompt, default=0) >= model.loaded.model.shape.vocab:
                raise ApiError(400, f"a prompt with ids above {model.loaded.model.shape.vocab - 1}", "prompt")
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        stop_ids = frozenset() if request.ignore_eos and constraint is None else model.loaded.stop_ids
        sampling = Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k or 0, top_p=request.top_p or 1.0, min_p=request.min_p or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0, presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            seed=secrets.randbits(62) if request.seed is None else request.seed,
        )  # fmt: skip
        jobs = [
            InferenceJob(
                model.name, model.backend, http.state.client, samples=n,
                work=Prompt(
                    prompt, max_tokens, sampling, stop_ids, stops, n, top_logprobs,
                    max_seconds=self.limits.request_s, constraint=constraint,
                ),
            )
            for prompt in prompts
        ]  # fmt: skip
        self.scheduler.submit(jobs)
        return jobs

    async def _answer(self, http: Request, answer: Answer, stream: bool) -> Response:
        updates = self.scheduler.updates(answer.jobs)
        if stream:
            async with self._watch(http, answer.jobs):
                await anext(updates)  # the first result: errors until then have an HTTP status of their own
            return EventStream(answer.stream(updates), partial(self.scheduler.cancel, answer.jobs))
        await self._finish(http, answer.jobs, updates)
        return JSONResponse(answer.body())

    async def _finish(self, http: Request, jobs: Sequence[InferenceJob], updates: AsyncIterator[None]) -> None:
        async with self._watch(http, jobs):
            async for _ in updates:
                pass

    @asynccontextmanager
    async def _watch(self, http: Request, jobs: Sequence[InferenceJob]) -> AsyncIterator[None]:
        """Cancel the jobs if the client disconnects meanwhile."""

        async def cancel_on_disconnect() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self.scheduler.cancel(jobs)

        watcher = asyncio.create_task(cancel_on_disconnect())
        try:
            yield
        finally:
            watcher.cancel()


class EventStream(StreamingResponse):
    """Server-sent events. `close` is called when the response ends in any way, also by a client that left."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold events back
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


def _include_usage(request: SamplingOptions) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _too_long(length: int, model: ServedModel, param: str) -> ApiError:
    message = f"{length:,} tokens, and the model's context is {model.context:,}: shorten the {param}"
    return ApiError(400, message, param, "context_length_exceeded")


def _list_body(model: ServedModel, texts: list[list[int]], data: list[Any]) -> dict[str, Any]:
    tokens = sum(map(len, texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model.name, "usage": usage}
