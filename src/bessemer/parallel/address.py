"""The address by which other nodes of a job reach this one: `python -m bessemer.parallel.address [--seen A] PEER...`.

Names that a user or a scheduler has for a node (an ssh alias, Slurm's NodeName) need not resolve on the others, and a
node's own hostname often resolves to its loopback address. So the node is asked itself: for the address that it sends
from when it sends to its peers. Nothing is sent, and torch is not imported.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Iterator, Sequence

ELSEWHERE = "192.0.2.1"  # of a range kept for documentation: whatever leaves this network goes by the default route


def source_address(target: str) -> str | None:
    """The address of this machine on its way to a name or address; None where there is no way, or it is not known."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # a datagram socket: this only chooses the way
            return str(probe.getsockname()[0])
    except OSError:
        return None


def usable(address: str | None) -> bool:
    """Whether others can reach it."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


def interface(address: str) -> str | None:
    """The network interface that has an address."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def own_address(peers: Sequence[str] = (), seen: str = "") -> str:
    """`seen` is where somebody has reached this node already. A loopback address if there is no other."""
    return next((address for address in _candidates(peers, seen) if address and usable(address)), "127.0.0.1")


def _candidates(peers: Sequence[str], seen: str) -> Iterator[str | None]:
    yield from (source_address(peer) for peer in peers)
    yield seen
    yield source_address(ELSEWHERE)
    yield source_address(socket.gethostname())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print it as an endpoint takes it: IPv6 in brackets."""
    parser = argparse.ArgumentParser(description="Print the address by which other nodes reach this one.")
    parser.add_argument("--seen", default="", help="where this node was reached; of SSH_CONNECTION, the third word")
    parser.add_argument("peers", nargs="*", help="names or addresses of other nodes")
    given = parser.parse_args(arguments)
    words = given.seen.split()
    address = own_address(given.peers, words[2] if len(words) > 2 else given.seen)
    print(f"[{address}]" if ":" in address else address)


if __name__ == "__main__":
    main()
