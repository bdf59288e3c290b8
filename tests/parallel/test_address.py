"""Which of a node's addresses the others are given."""

import socket

import pytest

from bessemer.parallel import address
from bessemer.parallel.address import ELSEWHERE, interface, main, own_address, source_address, usable

PRINTED = pytest.CaptureFixture[str]


def ways(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    """From where this machine sends, by target."""
    table = {name.replace("_", "-"): where for name, where in known.items()}
    table = {ELSEWHERE if name == "elsewhere" else name: where for name, where in table.items()}
    monkeypatch.setattr(address, "source_address", lambda target: table.get(target))


def test_the_way_to_a_peer_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ways(monkeypatch, gpu2="10.0.0.1", elsewhere="192.168.1.5")
    assert own_address(["alias", "gpu2"], "100.64.0.1") == "10.0.0.1"


def test_peers_by_unknown_names_leave_where_the_node_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    ways(monkeypatch, elsewhere="192.168.1.5")
    assert own_address(["alias"], "10.1.1.1") == "10.1.1.1"
    # Reached from the same machine: useless to others.
    assert own_address(["alias"], "127.0.0.1") == own_address(["alias"], "") == "192.168.1.5"


def test_a_hostname_that_means_loopback_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ways(monkeypatch, **{socket.gethostname().replace("-", "_"): "127.0.1.1"})
    assert own_address(["alias"]) == "127.0.0.1"  # for all on one machine; there is nothing better


def test_it_is_printed_as_an_endpoint_takes_it(monkeypatch: pytest.MonkeyPatch, capsys: PRINTED) -> None:
    ways(monkeypatch)
    main(["--seen", "10.0.0.9 50412 10.0.0.1 22", "alias"])
    main(["--seen", "2001:db8::9 50412 2001:db8::1 22"])
    main(["--seen", ""])
    assert capsys.readouterr().out.split() == ["10.0.0.1", "[2001:db8::1]", "127.0.0.1"]


def test_the_way_is_asked_of_the_system() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no-such-host.invalid") is None
    assert usable("10.0.0.1") and usable("2001:db8::1")
    assert not any(usable(text) for text in ("127.0.1.1", "169.254.3.4", "fe80::1", "", "alias", None))


def test_the_interface_of_an_address() -> None:
    assert interface("127.0.0.1") in socket.if_nameindex()[0] + ("lo0",)
    assert interface("203.0.113.77") is None
