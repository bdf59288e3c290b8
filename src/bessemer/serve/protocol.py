"""Requests and responses of the API as pydantic models, from which the OpenAPI schema is made.

Requests are strict about types and ignore unknown keys. Known options of OpenAI that the engine does not have are
refused where they would change the answer (`refuse_unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bessemer.serve.errors import ApiError

INT64 = 2**63
Tokens = list[Annotated[int, Field(ge=0, lt=2**31)]]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Stops = Stop | Annotated[list[Stop], Field(max_length=16)] | None


class ApiModel(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(ApiModel):
    include_usage: bool | None = None


class SamplingOptions(ApiModel):
    """Options that chat and completions share."""

    model: str | None = Field(None, description="A name of /v1/models; the first one if absent.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    n: int | None = Field(None, ge=1)
    stop: Stops = None
    max_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool | None = Field(None, description="Go on after the end token, for measurements.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class FunctionCall(ApiModel):
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON.")


class ToolCall(ApiModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(ApiModel):
    type: Literal["text"]
    text: str


class ChatMessage(ApiModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(ApiModel):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class ToolChoice(ApiModel):
    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(ApiModel):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(ApiModel):
    type: Literal["text", "json_object"]


class SchemaFormat(ApiModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class ChatRequest(SamplingOptions):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: TextFormat | SchemaFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingOptions):
    prompt: str | Tokens | list[str] | list[Tokens] = Field(description="Text or token ids, or a list of either.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)


class EmbeddingRequest(ApiModel):
    model: str | None = None
    input: str | Tokens | list[str] | list[Tokens]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class ClassifyRequest(ApiModel):
    model: str | None = None
    input: str | list[str]


def refuse_unsupported(request: SamplingOptions) -> None:
    """ApiError for options that are not implemented and would change the answer."""
    if request.logit_bias:
        raise ApiError(400, "logit_bias is not supported: remove it", "logit_bias", "unsupported_parameter")
    if isinstance(request, CompletionRequest):
        if request.suffix:
            raise ApiError(400, "suffix is not supported: remove it", "suffix", "unsupported_parameter")
        if (request.best_of or 1) > (request.n or 1):
            raise ApiError(400, "best_of above n is not supported: remove it", "best_of", "unsupported_parameter")
        if request.echo and request.logprobs is not None:
            message = "echo with logprobs is not supported: log-probabilities are of new tokens only"
            raise ApiError(400, message, "echo", "unsupported_parameter")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    task: Literal["generate", "embed", "classify"]
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ListUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingRow(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: ListUsage


class TokenLabel(BaseModel):
    start: int
    end: int
    label: str
    probability: float


class Classification(BaseModel):
    index: int
    label: str | None = None
    labels: list[str] | None = None
    value: float | None = None
    probabilities: dict[str, float] | None = None
    tokens: list[TokenLabel] | None = None


class ClassificationList(BaseModel):
    object: Literal["list"]
    data: list[Classification]
    model: str
    usage: ListUsage


class Health(BaseModel):
    status: Literal["ok", "ready"]
