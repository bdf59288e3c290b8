"""The API through the real openai client: answers, streams, tools, schemas, errors."""

import asyncio
import json

import httpx
import openai
import pytest

from bessemer.model.generate import Sampling
from bessemer.serve.grammar import GrammarConstraint
from bessemer.serve.prompts import HERMES, LLAMA, MISTRAL, parse_tool_calls, text_before_calls
from bessemer.train.answers import AnswerSettings, answer_all
from bessemer.train.trained import load_model

CHAT = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"], "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def offline(folder):
    """`bessemer generate` of the same model."""
    loaded = load_model(folder, device="cpu")

    def answers(prompts, **settings):
        greedy = AnswerSettings(**({"max_tokens": 24, "sampling": Sampling(temperature=0)} | settings))
        return [answer["samples"] for answer in answer_all(loaded, prompts, greedy)]

    return answers


def test_chat_equals_generate(client, offline):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, max_tokens=24)
    ((expected,),) = offline([CHAT])
    assert answer.choices[0].message.content == expected["text"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected["finish_reason"]
    assert answer.usage.completion_tokens == expected["tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + expected["tokens"]
    assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"


def test_a_stream_is_the_same_text(client, offline):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, max_tokens=24, stream=True, n=2,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    ((expected,),) = offline([CHAT])
    for index in (0, 1):
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in deltas) == expected["text"]
        assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [expected["finish_reason"]]
    assert len(chunks) > 10
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 2 * expected["tokens"]


def test_completions_of_several_prompts(client, offline):
    prompts = ["one", "two words", "a third prompt"]
    answer = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=24, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [samples[0]["text"] for samples in offline(prompts) for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    echoed = client.completions.create(model="tiny", prompt="one", temperature=0, max_tokens=24, echo=True)
    assert echoed.choices[0].text == "one" + expected[0]
    pieces = client.completions.create(model="tiny", prompt="one", temperature=0, max_tokens=24, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected[0]
    assert (
        client.completions.create(model="tiny", prompt=list(b"one")).usage.completion_tokens == 16
    )  # OpenAI's default


def test_stop_and_seed(client, offline):
    ((expected,),) = offline([CHAT])
    stop = expected["text"][6:8]
    cut = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, max_tokens=24, stop=[stop, "\0\0"])
    assert cut.choices[0].message.content == expected["text"].partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"

    def sample(seed):
        return client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=24, seed=seed).choices[0].message

    assert sample(5).content == sample(5).content != sample(6).content


def test_logprobs(client):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **options)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens == 12
    assert (
        bytes(b for token in tokens for b in token.bytes).decode(errors="replace") == answer.choices[0].message.content
    )
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob  # greedy
    chunks = list(client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **options))
    streamed = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in tokens], abs=1e-5)
    completion = client.completions.create(prompt="one", logprobs=2, **options)
    scored, count = completion.choices[0].logprobs, completion.usage.completion_tokens
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.text_offset) == count > 2
    assert all(len(top) == 2 and max(top.values()) == pytest.approx(value)
               for top, value in zip(scored.top_logprobs, scored.token_logprobs, strict=True))  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_always_met(client, stream):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]},
            "sizes": {"type": "array", "items": {"enum": [1, 5, 9]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "sizes"], "additionalProperties": False,
    }  # fmt: skip
    for seed in range(1, 2):
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, seed=seed, max_tokens=300, stream=stream,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        )  # fmt: skip
        text = (
            "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
        )
        value = json.loads(text)
        assert value["name"] in "ab" and 1 <= len(value["sizes"]) <= 3 and all(0 <= i <= 9 for i in value["sizes"])


def schema_format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


class FailingMatcher:
    """A grammar that becomes too complex at its second token."""

    def __init__(self):
        self.tokens = 0

    def deep_copy(self):
        return FailingMatcher()

    def is_error(self):
        return self.tokens > 0

    def get_error(self):
        return "too many states"

    def compute_bitmask(self):
        return b"\xff" * 40

    def is_stopped(self):
        return False

    def consume_token(self, token):
        self.tokens += 1


def test_a_grammar_that_fails_while_it_is_used(client, server, monkeypatch):
    """The answer ends, and the client learns why; requests beside it go on."""
    model = server.registry.models["tiny"]
    failing = GrammarConstraint(FailingMatcher(), model.loaded.stop_ids, [])
    monkeypatch.setattr(type(model.grammar), "json_schema", lambda self, schema: failing)
    with pytest.raises(openai.BadRequestError, match="too many states"):
        client.chat.completions.create(model="tiny", messages=CHAT, **schema_format({}))
    with pytest.raises(openai.APIError, match="too many states"):
        list(client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **schema_format({})))


def test_json_mode_is_an_object_as_far_as_it_goes(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=40, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", False), ({"type": "function", "function": {"name": "weather"}}, True)]
)
def test_forced_tool_calls(client, choice, stream):
    options = {
        "model": "tiny",
        "messages": CHAT,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 300,
        "seed": 1,
    }
    if stream:
        deltas = [c.choices[0] for c in client.chat.completions.create(**options, stream=True) if c.choices]
        (call,) = [call for delta in deltas for call in delta.delta.tool_calls or []]
        assert deltas[-1].finish_reason == "tool_calls" and not any(d.delta.content for d in deltas)
    else:
        answer = client.chat.completions.create(**options).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and call.id.startswith("call_")
    assert arguments["city"] in ("Oslo", "Rome") and isinstance(arguments["days"], int)


def test_tool_calls_in_text():
    call = {"name": "f", "arguments": {"x": 1}}
    text = f"Let me see.\n<tool_call>\n{json.dumps(call)}\n</tool_call>\n<tool_call>{json.dumps(call)}</tool_call>"
    content, calls = parse_tool_calls(text, HERMES, ["f"])
    assert content == "Let me see." and [json.loads(c["function"]["arguments"]) for c in calls] == [{"x": 1}] * 2
    llama = parse_tool_calls('{"name": "f", "parameters": {"x": 1}}', LLAMA, ["f"])
    mistral = parse_tool_calls('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', MISTRAL, ["f"])
    for content, (parsed,) in (llama, mistral):
        assert content is None and parsed["function"] == {"name": "f", "arguments": '{"x": 1}'}
    for text in ("<tool_call> no", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', "plain", '{"name": 1}'):
        assert parse_tool_calls(text, HERMES, ["f"]) == (text, []) == parse_tool_calls(text, LLAMA, ["f"])
    assert text_before_calls("abc<tool", HERMES) == "abc" == text_before_calls("abc<tool_call>{", HERMES)
    assert text_before_calls("a < b", HERMES) == "a < b" and text_before_calls(' {"na', LLAMA) == ""


def test_history_with_tool_calls(client):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"}]  # fmt: skip
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError, match="not JSON"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)


def test_async_client_with_64_requests(server, offline):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(
                client.completions.create(model="tiny", prompt=f"prompt {i}", temperature=0, max_tokens=24)
                for i in range(64)
            ))  # fmt: skip

    answers = asyncio.run(ask_all())
    expected = offline([f"prompt {i}" for i in range(64)])
    assert [answer.choices[0].text for answer in answers] == [samples[0]["text"] for samples in expected]
    assert len({answer.choices[0].text for answer in answers}) > 32
    assert server.scheduler.load() == {"waiting": 0, "running": 0}


ERRORS = {
    "unknown model": ({"model": "gpt-9"}, 404, "model_not_found"),
    "huge n": ({"n": 10**6}, 400, None),
    "too long": ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "context_length_exceeded"),
    "temperature": ({"temperature": 3.5}, 400, None),
    "not finite": ({"temperature": "NaN"}, 400, None),
    "no messages": ({"messages": []}, 400, None),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    "logit bias": ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter"),
    "schema": (schema_format({"type": "strin"}), 400, "invalid_schema"),
    "remote ref": (schema_format({"$ref": "http://x/y"}), 400, "invalid_schema"),
    "unknown tool": ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, None),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
    "surrogate in a tool": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"\ud800": 1}}}]},
                            400, None),
    "max_tokens": ({"max_tokens": 10**9}, 400, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_the_shape_of_openai(server, name):
    change, status, code = ERRORS[name]
    response = httpx.post(
        f"{server.url}/v1/chat/completions", content=json.dumps({"model": "tiny", "messages": CHAT} | change),
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code and error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b"null", b'{"messages": ' + b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"],
)
def test_malformed_json(server, body):
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_other_paths_and_methods(server):
    assert httpx.get(f"{server.url}/v2").json()["error"]["type"] == "not_found_error"
    response = httpx.get(f"{server.url}/v1/chat/completions")
    assert response.status_code == 405 and response.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").status_code == 200
    wrong = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x"})
    assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "wrong_task"


def test_metrics(server, client):
    def value(name):
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = value("bessemer_generated_tokens_total"), value("bessemer_ttft_seconds_count")
    client.completions.create(model="tiny", prompt="x", max_tokens=7, temperature=0)
    assert value("bessemer_generated_tokens_total") - before[0] == 7
    assert value("bessemer_ttft_seconds_count") - before[1] == 1
    assert (
        value("bessemer_tpot_seconds_count") > 0 and value('bessemer_http_responses_total{path="/v1/completions"') > 0
    )


def test_the_page_runs_only_its_own_script(server):
    response = httpx.get(server.url)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe" not in policy
    assert "http" not in response.text.replace("http-equiv", "") and "innerHTML" not in response.text


def test_a_body_that_is_not_declared_as_json_is_refused_by_name(server):
    for kind, told in (("text/plain", "is 'text/plain'"), (None, "is missing")):
        headers = {"Content-Type": kind} if kind else {}
        answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and told in message and "send Content-Type: application/json" in message
    assert httpx.post(f"{server.url}/health").status_code == 405  # not for what it was sent with
