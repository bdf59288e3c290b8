"""Serves the assistant over standard input and output, or over HTTP with a token."""

from __future__ import annotations

import hmac
import secrets
import sys
from typing import Any

import anyio
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.stdio import stdio_server

from bessemer.assist.jobs import TOKEN_VARIABLE
from bessemer.assist.server import Assistant
from bessemer.errors import UserError
from bessemer.listener import is_loopback, listen, shown_host

SHORTEST_TOKEN = 16
PATH = "/mcp"


def serve_stdio(assistant: Assistant) -> None:
    """Serve one client until it closes our standard input."""

    async def serve() -> None:
        server = assistant.server()
        async with stdio_server() as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())

    try:
        anyio.run(serve)
    finally:
        assistant.close()


class OneToken:
    """Accepts the server's token and no other."""

    def __init__(self, token: str) -> None:
        self.token = token

    async def verify_token(self, token: str) -> AccessToken | None:
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return None
        return AccessToken(token=token, client_id="assistant", scopes=[])


def check_token(host: str, token: str) -> str:
    """The token to ask for: the given one, or on this machine's own address a new one."""
    if not token and not is_loopback(host):
        raise UserError(
            f"--host {host}: others can reach this address: set a token of at least {SHORTEST_TOKEN} characters in "
            f"{TOKEN_VARIABLE}, or leave --host out"
        )
    if token and len(token) < SHORTEST_TOKEN:
        raise UserError(f"{TOKEN_VARIABLE}: is too short: use at least {SHORTEST_TOKEN} characters")
    return token or secrets.token_urlsafe(24)


def serve_http(assistant: Assistant, host: str, port: int, token: str) -> None:
    """Serve any number of clients that send the token, until Ctrl-C."""
    import uvicorn

    is_given, token = bool(token), check_token(host, token)
    listener = listen(host, port)
    address = f"http://{shown_host(host)}:{listener.getsockname()[1]}"
    # The issuer is required by the SDK; without a resource URL it is not advertised.
    auth: Any = AuthSettings(issuer_url=address, resource_server_url=None)  # type: ignore[arg-type]
    app = assistant.server().streamable_http_app(
        streamable_http_path=PATH, host=host, auth=auth, token_verifier=OneToken(token)
    )
    listener.listen(128)
    shown = f"the one in {TOKEN_VARIABLE}" if is_given else token
    print(f"serving {assistant.root}  {address}{PATH}  token: {shown}  Ctrl-C stops", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False,
                            timeout_graceful_shutdown=1)  # fmt: skip
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        assistant.close()
