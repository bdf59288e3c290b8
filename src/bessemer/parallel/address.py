"""Prints the address at which other nodes reach this one: `python -m bessemer.parallel.address [--seen A] PEER...`.

A node's name for a user or scheduler (an ssh alias, Slurm's NodeName) need not resolve on other nodes, and its own
hostname often resolves to a loopback address. So the node looks up its source address for packets to its peers. Nothing
is sent, and torch is not imported.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Iterator, Sequence

ELSEWHERE = "192.0.2.1"  # reserved for documentation: reached through the default route


def source_address(target: str) -> str | None:
    """This machine's source address for packets to a name or address; None if there is no route or the name is
    unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: only selects the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def usable(address: str | None) -> bool:
    """Whether other machines can reach it."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def interface(address: str) -> str | None:
    """The network interface that has an address."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def own_address(peers: Sequence[str] = (), seen: str = "") -> str:
    """`seen` is an address at which this node was already reached. Falls back to a loopback address."""
    return next((address for address in _candidates(peers, seen) if address and usable(address)), "127.0.0.1")


def _candidates(peers: Sequence[str], seen: str) -> Iterator[str | None]:
    yield from (source_address(peer) for peer in peers)
    yield seen
    yield source_address(ELSEWHERE)
    yield source_address(socket.gethostname())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the address as an endpoint expects it: IPv6 in brackets."""
    parser = argparse.ArgumentParser(description="Print the address by which other nodes reach this one.")
    parser.add_argument("--seen", default="", help="where this node was reached, or the value of SSH_CONNECTION")
    parser.add_argument("peers", nargs="*", help="names or addresses of other nodes")
    options = parser.parse_args(arguments)
    words = options.seen.split()
    address = own_address(options.peers, words[2] if len(words) > 2 else options.seen)
    print(f"[{address}]" if ":" in address else address)


if __name__ == "__main__":
    main()
