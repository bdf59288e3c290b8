"""Access control: checks on every request below the routes, so that no path is left out.

A page of another site can reach a server on this machine through the user's browser. After DNS rebinding it is even of
the same origin, so the Host must be this machine; what changes a run also needs our Origin and a header that no form
can send.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bessemer.listener import LOCAL_HOSTS, host_name

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is HTML about training documents: no script, no form, no origin, nothing loaded.
REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)
HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store",
           "cross-origin-resource-policy": "same-origin", "content-security-policy": PAGE_POLICY}  # fmt: skip
MAX_QUERY_BYTES, MAX_BODY_BYTES, MAX_HEADER_BYTES = 16 << 10, 16 << 10, 32 << 10
MAX_STREAMS = 256
OWN_HEADER = b"x-bessemer"  # a cross-site form cannot send it


class Refused(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class PageAccess:
    """`token` is required if there is one; `local` means that the address is this machine's own."""

    token: str = ""
    local: bool = True
    port: int = 0

    @property
    def cookie(self) -> str:
        """Cookies ignore ports: two servers of one host need two names."""
        return f"bessemer-{self.port}"


def make_token() -> str:
    return secrets.token_urlsafe(24)


class PageGuard:
    """Checks host, origin, token and size of a request, and adds the headers of safety to its answer."""

    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self.app, self.access, self.streams = app, access, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
                ]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        stream = scope["path"].endswith("/stream")
        try:
            headers = self.check(scope)
            if (target := self.sign_in(scope)) is not None:
                await self.redirect(target, safe)
                return
            self.check_token(scope, headers)
            receive = await self.limited_body(headers, receive)
            if stream and self.streams >= MAX_STREAMS:
                raise Refused(503, f"{MAX_STREAMS} pages are open already")
        except Refused as refused:
            await answer(safe, refused.status, {"error": str(refused)})
            return
        self.streams += stream
        try:
            await self.app(scope, receive, safe)
        finally:
            self.streams -= stream

    def check(self, scope: Scope) -> dict[bytes, bytes]:
        """Method, size, host and origin; the headers."""
        headers: dict[bytes, bytes] = {key.lower(): value for key, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(405, "only GET, HEAD and POST")
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            raise Refused(414, "the query is too long")
        if sum(len(key) + len(value) for key, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise Refused(431, "the headers are too long")
        host = headers.get(b"host", b"")
        if self.access.local and host_name(host) not in LOCAL_HOSTS:
            raise Refused(403, "the host is not this machine: use http://127.0.0.1, or --host with a token")
        origin = headers.get(b"origin")
        own = f"{scope.get('scheme', 'http')}://".encode() + host
        if origin is not None and origin != own:
            raise Refused(403, "the request comes from another site")
        if headers.get(b"sec-fetch-site") == b"cross-site" and scope["path"].startswith("/api/"):
            raise Refused(403, "the request comes from another site")
        if scope["method"] == "POST" and (origin is None or OWN_HEADER not in headers):
            raise Refused(403, "a change needs the header X-Bessemer and the page's own Origin")
        return headers

    def sign_in(self, scope: Scope) -> str | None:
        """`?token=` becomes a cookie and goes from the address, which history and logs keep; where to go on."""
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for key, value in query if key == "token"]
        if not self.access.token or not given or scope["method"] != "GET":
            return None
        if not self._matches(given[0]):
            raise Refused(401, "the token is wrong: use the address that `bessemer watch` printed")
        rest = urlencode([(key, value) for key, value in query if key != "token"])
        path = "/" + scope["path"].lstrip("/")  # `//host` would lead elsewhere
        return f"{path}?{rest}" if rest else path

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.access.token.encode())

    def check_token(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self.access.token:
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and self._matches(bearer.strip().decode("latin-1")):
            return
        try:
            cookies: SimpleCookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            cookies = SimpleCookie()
        if self.access.cookie in cookies and self._matches(cookies[self.access.cookie].value):
            return
        raise Refused(401, "a token is needed: use the address that `bessemer watch` printed")

    async def redirect(self, target: str, send: Send) -> None:
        cookie = f"{self.access.cookie}={self.access.token}; Path=/; HttpOnly; SameSite=Lax"
        headers = [(b"location", target.encode("latin-1", "replace")), (b"set-cookie", cookie.encode())]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def limited_body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The body read to its end, within the limit."""
        declared = headers.get(b"content-length", b"0")
        body, more = b"", declared != b"0" or b"transfer-encoding" in headers
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            raise Refused(413, "the body is too large")
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > MAX_BODY_BYTES:
                raise Refused(413, "the body is too large")
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        return replay if body else receive


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
