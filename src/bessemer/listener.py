"""What the HTTP servers of this package share: the listening socket, and which hosts are this machine."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from bessemer.errors import UserError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: bytes) -> str:
    """The name in a Host header, without the port."""
    host = header.decode("latin-1")
    return host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host


def shown_host(host: str) -> str:
    """A host as a URL writes it."""
    return host if ":" not in host else f"[{host}]"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Bound before anything slow is done, so that a wrong address is reported at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except (OSError, OverflowError):
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--host {host} --port {port}: cannot be used ({reason}); choose another") from None
    return listener
