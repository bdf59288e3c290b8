"""The page of `bessemer align vote --page`: one voter judges pairs of answers in a browser on this machine.

It has the guard of the API (`serve/app.py`): other host names than this machine's are refused, and so are bodies that a
page of another origin could send. Answers reach the page as JSON and are shown as text.
"""

from __future__ import annotations

import threading
from importlib import resources
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import HTMLResponse, JSONResponse, Response

from bessemer.align.vote import SKIP, TIE, Ballot, shown_prompt
from bessemer.serve.app import Access, RequestGuard, content_policy, error_response
from bessemer.serve.errors import ApiError
from bessemer.serve.metrics import ServerMetrics
from bessemer.serve.server import listen

BODY_BYTES = 10_000
PATHS = {"/": {"GET"}, "/api/row": {"GET"}, "/api/vote": {"POST"}}


class Vote(BaseModel):
    """A vote on the row that the page shows, which `number` names: a second window votes on nothing else."""

    number: int
    choice: Literal["first", "second", "tie", "skip"]


def make_vote_app(ballot: Ballot) -> FastAPI:
    """The application for one voter."""
    app = FastAPI(title="Bessemer vote", docs_url=None, redoc_url=None, openapi_url=None)
    page = resources.files("bessemer.serve").joinpath("vote.html").read_text(encoding="utf-8")
    policy, lock = content_policy(page), threading.Lock()

    def present() -> dict[str, Any]:
        row = ballot.next()
        if row is None:
            return {"left": 0, "voter": ballot.voter}
        answers = [row[side] for side in ballot.sides(row)]
        return {
            "left": len(ballot.open), "voter": ballot.voter, "number": row["number"], "position": ballot.position,
            "prompt": shown_prompt(row), "answers": answers,
        }  # fmt: skip

    @app.get("/")
    def vote_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    @app.get("/api/row")
    def row() -> Response:
        with lock:
            return JSONResponse(present(), headers={"Cache-Control": "no-store"})

    @app.post("/api/vote")
    def vote(vote: Vote) -> Response:
        with lock:
            open_row = ballot.next()
            if open_row is None or open_row["number"] != vote.number:
                error = ApiError(409, f"row {vote.number} has a vote already: another window is open")
                return error_response(error)
            sides = dict(zip(("first", "second"), ballot.sides(open_row), strict=True))
            ballot.vote({**sides, "tie": TIE, "skip": SKIP}[vote.choice])
            return JSONResponse(present())

    app.add_middleware(
        RequestGuard, access=Access(local_only=True), body_bytes=BODY_BYTES, metrics=ServerMetrics(), paths=PATHS
    )
    return app


def serve_vote(ballot: Ballot, port: int) -> None:
    """Shows the page until Ctrl-C."""
    listener = listen("127.0.0.1", port)
    config = uvicorn.Config(make_vote_app(ballot), log_level="warning", access_log=False, server_header=False)
    print(f"voting   http://127.0.0.1:{listener.getsockname()[1]}/  Ctrl-C ends", flush=True)
    listener.listen(16)
    uvicorn.Server(config).run(sockets=[listener])
