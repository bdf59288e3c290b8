"""The address behind a URL: two spellings that lead to one page become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

_DEFAULT_PORT = {"http": 80, "https": 443, "ftp": 21}
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def normal_url(url: str, tracking: Sequence[str] = (), ignore_query: bool = False) -> str:
    """Without http or https, default port, fragment, tracking parameters and closing slash; the host in lower case,
    escapes spelled one way. What cannot be read as a URL stays as it is."""
    url = url.strip()
    if url.startswith("//"):
        url = "http:" + url
    elif "://" not in url:
        url = "http://" + url
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # such as a port that is no number
        return url
    scheme = parts.scheme.lower()
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    place = f"[{host}]" if ":" in host else host
    shown_port = "" if port is None or port == _DEFAULT_PORT.get(scheme) else f":{port}"
    query = "" if ignore_query else _without(parts.query, tracking)
    page = _ESCAPE.sub(_one_spelling, parts.path).rstrip("/")
    prefix = "" if scheme in ("http", "https") else f"{scheme}:"
    return f"{prefix}//{user}{place}{shown_port}{page}" + (f"?{query}" if query else "")


def _without(query: str, tracking: Sequence[str]) -> str:
    kept = []
    for pair in query.split("&"):
        name = pair.partition("=")[0].lower()
        known = any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in tracking)
        if pair and not known:
            kept.append(_ESCAPE.sub(_one_spelling, pair))
    return "&".join(kept)


def _one_spelling(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if character in _UNRESERVED else escape[0].upper()
