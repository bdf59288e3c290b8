"""The HTTP application: routes, the OpenAPI schema, errors in OpenAI's shape, keys and limits of every request."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bessemer import __version__
from bessemer.errors import UserError
from bessemer.listener import LOCAL_HOSTS, host_name
from bessemer.serve.errors import ApiError, ErrorBody
from bessemer.serve.metrics import ServerMetrics
from bessemer.serve.models import ModelRegistry, RunWatcher
from bessemer.serve.protocol import (
    ChatCompletion,
    ChatRequest,
    ClassificationList,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingList,
    EmbeddingRequest,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
)
from bessemer.serve.routes import Endpoints
from bessemer.serve.scheduler import Scheduler

_log = logging.getLogger(__name__)
OPEN_PATHS = ("/", "/health", "/ready")  # need no key
Paths = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Access:
    """Who may call the server."""

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # web pages that may call it (CORS)
    local_only: bool = True  # no keys and a loopback address: other names of it are refused (DNS rebinding)


class RequestGuard:
    """Reads the body up to its limit, checks host and key, and counts responses. Works below the routes, so that no
    path is left out."""

    def __init__(self, app: ASGIApp, access: Access, body_bytes: int, metrics: ServerMetrics, paths: Paths) -> None:
        self.app, self.access, self.body_bytes, self.metrics = app, access, body_bytes, metrics
        self.paths = paths  # that metrics are counted by, with their methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        headers = {key.lower(): value for key, value in scope["headers"]}
        try:
            scope.setdefault("state", {})["client"] = self.identify(scope, headers)
            if scope["method"] == "POST" and "POST" in self.paths.get(scope["path"], ()):  # else 404 or 405 follows
                check_content_type(headers)
            receive = await self.read_body(headers, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, counted)
            return
        await self.app(scope, receive, counted)

    def identify(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """The client, for fair queues: its key, else its address."""
        address = (scope.get("client") or ("local", 0))[0]
        if self.access.local_only:
            name = host_name(headers.get(b"host", b"localhost"))
            if name not in LOCAL_HOSTS:
                raise ApiError(403, f"the host {name!r} is not this machine: BESSEMER_API_KEYS allows others")
        if not self.access.keys or (scope["path"] in OPEN_PATHS):
            return address
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        for i, known in enumerate(self.access.keys):
            if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), known.encode()):
                return f"key {i}"
        raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")

    async def read_body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The body read to its end, as one message before those that follow."""
        parts: list[bytes] = []
        size, more = 0, True
        declared = headers.get(b"content-length", b"0")
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return receive
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if max(size, int(declared) if declared.isdigit() else 0) > self.body_bytes:
                raise ApiError(413, f"the body exceeds {self.body_bytes:,} bytes", code="body_too_large")
        complete: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return complete.pop() if complete else await receive()

        return replay


def check_content_type(headers: dict[bytes, bytes]) -> None:
    """JSON alone is read: a web page of another origin can send the other types without asking this server first."""
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        given = f"is {kind!r}" if kind else "is missing"
        message = f"the header Content-Type {given}: send Content-Type: application/json"
        raise ApiError(400, message, code="unsupported_media_type")


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    texts = {400: "Invalid request", 401: "No valid API key", 403: "Unknown host name", 404: "No such model",
             413: "Body too large", 429: "Queue full", 500: "Server fault", 503: "No slot became free"}  # fmt: skip
    return {status: {"model": ErrorBody, "description": texts[status]} for status in (*statuses, 401, 403)}


def make_app(
    registry: ModelRegistry, scheduler: Scheduler, access: Access | None = None, watcher: RunWatcher | None = None
) -> FastAPI:
    """The application. Its lifespan starts and stops the scheduler's thread."""

    access = access or Access()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        if watcher is not None:
            watcher.start()
        yield
        if watcher is not None:
            watcher.stop()
        scheduler.stop()

    app = FastAPI(
        title="Bessemer", version=__version__, summary="Models behind OpenAI's HTTP API.", lifespan=lifespan,
        docs_url=None, redoc_url=None,  # their pages load scripts from the network
    )  # fmt: skip
    _add_error_handlers(app)
    _add_information(app, registry, scheduler)
    _add_endpoints(app, Endpoints(registry, scheduler))
    guard: dict[str, Any] = {"access": access, "body_bytes": scheduler.limits.body_bytes, "metrics": scheduler.metrics}
    paths: dict[str, set[str]] = {}
    for route in app.routes:
        paths.setdefault(str(getattr(route, "path", "")), set()).update(getattr(route, "methods", None) or ())
    guard["paths"] = paths
    app.add_middleware(RequestGuard, **guard)
    if access.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(access.origins), allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )  # fmt: skip
    make_schema = app.openapi

    def schema() -> dict[str, Any]:
        """Without the 422 that FastAPI adds: invalid requests get 400."""
        document = make_schema()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = schema  # type: ignore[method-assign]
    return app


def _add_error_handlers(app: FastAPI) -> None:
    def respond(convert: Callable[[Any], ApiError]) -> Any:
        async def handle(request: Request, error: Exception) -> Response:
            return error_response(convert(error))

        return handle

    def invalid(error: RequestValidationError) -> ApiError:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
        return ApiError(400, f"{place}: {first['msg']}" if place else first["msg"], place or None)

    def http(error: HTTPException) -> ApiError:
        return ApiError(error.status_code, str(error.detail), headers=error.headers)

    def fault(error: Exception) -> ApiError:
        return ApiError(500, f"a fault of the server: {type(error).__name__}", code="internal_error")

    app.add_exception_handler(ApiError, respond(lambda error: error))
    app.add_exception_handler(UserError, respond(lambda error: ApiError(400, str(error))))
    app.add_exception_handler(RequestValidationError, respond(invalid))
    app.add_exception_handler(HTTPException, respond(http))
    app.add_exception_handler(Exception, respond(fault))


def _add_information(app: FastAPI, registry: ModelRegistry, scheduler: Scheduler) -> None:
    page = resources.files("bessemer.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = content_policy(page)

    @app.get("/", response_class=HTMLResponse, summary="A chat page", include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    @app.get("/health", response_model=Health, summary="The process answers", responses=_errors())
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=Health, summary="The models answer", responses=_errors(503))
    async def ready() -> Response:
        if not scheduler.alive:
            raise ApiError(503, "the scheduler does not run", code="not_ready")
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", summary="Prometheus metrics", responses=_errors(), response_class=Response)
    async def metrics() -> Response:
        return Response(scheduler.metrics.render(scheduler.load()), media_type="text/plain; version=0.0.4")

    def card(name: str) -> dict[str, Any]:
        model = registry.models[name]
        return {
            "id": name, "object": "model", "created": model.created, "owned_by": "bessemer", "root": model.source,
            "task": model.task, "max_model_len": model.context,
        }  # fmt: skip

    @app.get("/v1/models", response_model=ModelList, summary="The served models", responses=_errors())
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in registry.models]})

    @app.get("/v1/models/{name:path}", response_model=ModelCard, summary="One model", responses=_errors(404))
    async def model(name: str) -> Response:
        if name not in registry.models:
            raise ApiError(404, f"no model {name!r}", "model", "model_not_found")
        return JSONResponse(card(name))


def _add_endpoints(app: FastAPI, endpoints: Endpoints) -> None:
    errors = _errors(400, 404, 413, 429, 500, 503)
    streams: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {}}}}}

    @app.post("/v1/chat/completions", response_model=ChatCompletion, summary="Chat", responses={**errors, **streams})
    async def chat(http: Request, request: ChatRequest) -> Response:
        return await endpoints.chat(http, request)

    @app.post("/v1/completions", response_model=TextCompletion, summary="Complete", responses={**errors, **streams})
    async def completions(http: Request, request: CompletionRequest) -> Response:
        return await endpoints.complete(http, request)

    @app.post("/v1/embeddings", response_model=EmbeddingList, summary="Embeddings of an encoder", responses=errors)
    async def embeddings(http: Request, request: EmbeddingRequest) -> Response:
        return await endpoints.embed(http, request)

    @app.post("/v1/classify", response_model=ClassificationList, summary="Labels of a classifier", responses=errors)
    async def classify(http: Request, request: ClassifyRequest) -> Response:
        return await endpoints.classify(http, request)


def content_policy(page: str) -> str:
    """Only the page's own script and style run, and they connect to this server alone."""

    def digest(tag: str) -> str:
        text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def parse_keys(text: str) -> Sequence[str]:
    """Keys of BESSEMER_API_KEYS: separated by commas."""
    keys = [key.strip() for key in text.split(",")]
    if text.strip() and not all(keys):
        raise UserError("BESSEMER_API_KEYS has an empty key: separate keys with one comma")
    return [key for key in keys if key]
