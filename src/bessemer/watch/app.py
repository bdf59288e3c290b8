"""The page's HTTP application. Everything is read; only `POST .../control` writes, and only if it is allowed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from bessemer import __version__
from bessemer.errors import UserError
from bessemer.observe.figure import LineChart, svg_file
from bessemer.run.control import ACTIONS, ControlRequest, write_request
from bessemer.watch import facts
from bessemer.watch.access import REPORT_POLICY, PageAccess, PageGuard
from bessemer.watch.library import LAYER_QUANTITIES, MAX_BINS, MAX_NAMES, POLL_S, X_AXES, Library, WatchedRun

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".txt": "text/plain"}
CHARTS = ("uPlot.iife.min.js", "uPlot.min.css")  # fetched when the package is built, see setup.py
MODULES = ("dom.js", "charts.js", "parallel.js", "panels.js", "app.js")  # in the order in which they use each other
PAGE_FILES = ("index.html", "style.css", *MODULES)


def page_file(name: str) -> str | None:
    """A file of the page; empty for a chart library that was not fetched, None for other names."""
    page = resources.files("bessemer.watch").joinpath("page")
    if name in CHARTS:
        chart = page.joinpath("charts", name)
        return chart.read_text(encoding="utf-8") if chart.is_file() else ""
    return page.joinpath(name).read_text(encoding="utf-8") if name in PAGE_FILES else None


class Json(Response):
    """NaN and infinity become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Pages:
    """The endpoints. Those that read files run in threads."""

    def __init__(self, library: Library, control: bool, first: str = "") -> None:
        self.library, self.control, self.first = library, control, first

    def routes(self) -> list[Route]:
        def reading(path: str, answer: Callable[[Request], Any]) -> Route:
            async def endpoint(request: Request) -> Response:
                result = await run_in_threadpool(answer, request)
                return result if isinstance(result, Response) else Json(result)

            return Route(path, endpoint, methods=["GET"])

        run = "/api/runs/{name}"
        return [
            reading("/", lambda _: HTMLResponse(page_file("index.html"))),
            reading("/static/{file}", self.static),
            reading("/api/runs", lambda _: self.overview()),
            reading(run, lambda request: facts.describe_run(self.run(request).run)),
            reading(f"{run}/names", self.names),
            reading(f"{run}/series", self.series),
            reading(f"{run}/layers", self.layers),
            reading(f"{run}/chart.svg", self.chart),
            reading(f"{run}/events", lambda request: self.run(request).described_events(self.axis(request))),
            reading(f"{run}/samples", self.samples),
            reading(f"{run}/checkpoints", lambda request: facts.list_checkpoints(self.run(request).run)),
            reading(f"{run}/checkpoints/{{checkpoint}}", self.verify),
            reading(f"{run}/reports/{{report}}", self.report),
            reading(f"{run}/profiles/{{trace}}", self.trace),
            reading(f"{run}/profiles/{{trace}}/parts", self.profile_parts),
            reading("/api/compare", self.compare),
            Route("/api/stream", self.stream, methods=["GET"]),
            Route(f"{run}/control", self.request_control, methods=["POST"]),
        ]

    def run(self, request: Request) -> WatchedRun:
        return self.run_named(request.path_params["name"])

    def run_named(self, name: str) -> WatchedRun:
        try:
            return self.library.run(name)
        except (KeyError, OSError, ValueError):
            raise HTTPException(404, "no such run") from None

    def overview(self) -> dict[str, Any]:
        runs = self.library.summaries()
        return {"runs": runs, "control": self.control, "first": self.first, "version": __version__,
                "actions": list(ACTIONS)}  # fmt: skip

    def static(self, request: Request) -> Response:
        name = request.path_params["file"]
        if (text := page_file(name)) is None:
            raise HTTPException(404, "no such file")
        return Response(text, media_type=TYPES[name[name.rindex(".") :]], headers={"cache-control": "no-cache"})

    def names(self, request: Request) -> dict[str, Any]:
        run = self.run(request)
        complete = run.refresh()
        names = run.names()
        if not complete and not names["steps"]:
            names["steps"] = list(dict.fromkeys(key for record in run.rollup("steps").sample(20) for key in record))
        return {"names": names, "complete": complete}

    def series(self, request: Request) -> dict[str, Any]:
        names = [name for name in request.query_params.get("names", "loss").split("|") if name][:MAX_NAMES]
        low, high, axis = place(request, "from"), place(request, "to"), self.axis(request)
        bins = min(MAX_BINS, max(2, number(request, "bins", 800)))
        return self.run(request).series(names, axis, low, high, bins)

    def layers(self, request: Request) -> dict[str, Any]:
        wanted = request.query_params.get("quantities", "").split("|")[:MAX_NAMES]
        quantities = [name for name in wanted if name] or LAYER_QUANTITIES
        axis, low, high = self.axis(request), place(request, "from"), place(request, "to")
        return self.run(request).layers(axis, low, high, quantities)

    def axis(self, request: Request) -> str:
        axis = request.query_params.get("x", "step")
        if axis not in X_AXES:
            raise HTTPException(400, f"x is one of {', '.join(X_AXES)}")
        return axis

    def chart(self, request: Request) -> Response:
        """A chart drawn here, for a page without the chart library."""
        name, axis = request.query_params.get("name", "loss")[:200], self.axis(request)
        answer = self.run(request).series([name], axis, place(request, "from"), place(request, "to"), 400)
        nothing: dict[str, Any] = {"x": [], "series": {name: {"mean": []}}}
        group = answer["groups"][0] if answer["groups"] else nothing
        log = request.query_params.get("log") == "1"
        curves = {name: group["series"][name]["mean"]}
        svg = LineChart(name, group["x"], curves, axis, log_y=log).svg()
        return Response(svg_file(svg), media_type="image/svg+xml")

    def samples(self, request: Request) -> list[dict[str, Any]]:
        run = self.run(request)
        return run.shared.get("samples", None, lambda: facts.newest_samples(run.run), POLL_S * 0.9)

    def verify(self, request: Request) -> dict[str, Any]:
        run, name = self.run(request), request.path_params["checkpoint"]
        try:
            return run.shared.get(("verify", name), None, lambda: facts.verify_checkpoint(run.run, name), 60.0)
        except KeyError:
            raise HTTPException(404, "no such checkpoint") from None

    def report(self, request: Request) -> Response:
        text = facts.report_file(self.run(request).run, request.path_params["report"])
        if text is None:
            raise HTTPException(404, "no such report")
        return HTMLResponse(text, headers={"content-security-policy": REPORT_POLICY})

    def trace(self, request: Request) -> Response:
        path = self.trace_path(request)
        return FileResponse(path, media_type="application/gzip", filename=path.name)

    def profile_parts(self, request: Request) -> dict[str, Any]:
        path, run = self.trace_path(request), self.run(request)
        version = path.stat().st_mtime_ns
        return run.shared.get(("profile", path.name), version, lambda: facts.profile_parts(path))

    def trace_path(self, request: Request) -> Path:
        try:
            return facts.profile_file(self.run(request).run, request.path_params["trace"])
        except KeyError:
            raise HTTPException(404, "no such trace") from None

    def compare(self, request: Request) -> dict[str, Any]:
        names = request.query_params.get("runs", "").split("|")[:32]
        runs = [self.run_named(name).run for name in names]
        return {"runs": names, "rows": facts.compare_settings(runs), "results": facts.compare_results(runs)}

    async def stream(self, request: Request) -> Response:
        """Server-sent events: `run` when the run has moved on, `runs` when the list has changed. The id is
        `generation:row`; a client that comes back with another generation asks for everything again."""
        name = request.query_params.get("run", "")
        run = await run_in_threadpool(self.run_named, name) if name else None

        async def messages() -> AsyncIterator[bytes]:
            last_pulse: Any = None
            last_list: Any = None
            yield b"retry: 1000\n\n"
            while not await request.is_disconnected():
                sent = False
                if run is not None:
                    pulse = await run_in_threadpool(run.pulse)
                    if pulse != last_pulse:
                        last_pulse, sent = pulse, True
                        yield message("run", pulse, f"{pulse['generation']}:{pulse['rows']}")
                runs = await run_in_threadpool(self.library.summaries)
                listed = [(one["name"], one["state"], one["step"]) for one in runs]
                if listed != last_list:
                    last_list, sent = listed, True
                    yield message("runs", runs)
                if not sent:
                    yield b": alive\n\n"
                await asyncio.sleep(POLL_S)

        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(messages(), media_type="text/event-stream", headers=headers)

    async def request_control(self, request: Request) -> Response:
        if not self.control:
            raise HTTPException(403, "this page only reads: start `bessemer watch` with --control")
        run = await run_in_threadpool(self.run, request)
        try:
            body = json.loads(await request.body())
            wanted = ControlRequest.make(body["action"], body.get("value"), f"page, {client(request)}")
            await run_in_threadpool(write_request, run.run, wanted)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise HTTPException(400, "send {action, value}") from None
        except UserError as error:
            raise HTTPException(409, str(error)) from None
        return Json({"id": wanted.id})


def client(request: Request) -> str:
    return request.client.host if request.client else "this machine"


def message(kind: str, content: Any, identifier: str = "") -> bytes:
    head = f"event: {kind}\n" + (f"id: {identifier}\n" if identifier else "")
    return head.encode() + b"data: " + msgspec.json.encode(content) + b"\n\n"


def number(request: Request, key: str, default: int) -> int:
    text = request.query_params.get(key, "")
    if len(text) > 12 or (text and not text.isdigit()):
        raise HTTPException(400, f"{key}: a number is expected")
    return int(text) if text else default


def place(request: Request, key: str) -> float | None:
    """A place on the x axis; None if the query does not limit it."""
    try:
        value = float(request.query_params[key]) if request.query_params.get(key) else None
    except ValueError:
        raise HTTPException(400, f"{key}: a number is expected") from None
    if value is not None and not math.isfinite(value):
        raise HTTPException(400, f"{key}: a finite number is expected")
    return value


def make_app(library: Library, access: PageAccess, control: bool = False, first: str = "") -> ASGIApp:
    """The application behind its guard."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Json({"error": error.detail}, error.status_code)

    async def fault(request: Request, error: Exception) -> Response:
        return Json({"error": f"a fault of the server: {type(error).__name__}"}, 500)

    app = Starlette(
        routes=Pages(library, control, first).routes(), exception_handlers={HTTPException: refuse, Exception: fault}
    )
    app.router.redirect_slashes = False
    return PageGuard(app, access)
