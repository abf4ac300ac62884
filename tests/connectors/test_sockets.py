"""What this process knows of its TCP connections, and that one which was torn down brings nothing more."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from connectors import sockets
from connectors.sockets import PeerAddresses, connections, listening, refuses, tear_down

LOOPBACK = bytes((127, 0, 0, 1))
ELSEWHERE = socket.inet_aton("10.9.8.7")
SOMEWHERE = socket.inet_aton("10.9.8.6")
OTHER_INTERFACE = socket.inet_aton("10.9.7.6")  # of the same machine
ANSWERS = ("10.9.8.7", 9)  # handshakes


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The end that connected, and the end that accepted."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((request.param, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listening.listen()
        with closing(socket.create_connection(listening.getsockname()[:2])) as one:
            other, _ = listening.accept()
            with other:
                other.settimeout(5)
                one.settimeout(5)
                yield one, other


def test_tear_down_discards_unread_data(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    one.sendall(b"late")
    (mine,) = [found for found in connections() if found.fd == other.fileno()]
    assert (mine.unread, mine.listens, mine.there[1]) == (4, False, one.getsockname()[1])
    tear_down(mine)
    with pytest.raises(OSError):
        other.recv(4)
    with pytest.raises(ConnectionError):
        for _ in range(100):
            one.sendall(b"later")


def test_only_a_closed_port_of_a_machine_that_answers_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not refuses("127.0.0.1", port) and not refuses(LOOPBACK, port)
    assert refuses("127.0.0.1", port) and refuses(LOOPBACK, port)
    assert not refuses("no such host", port)


def connection(fd: int, there: bytes, *, here: int = 1000, unread: int = 0) -> sockets.Connection:
    return sockets.Connection(fd, (SOMEWHERE, here), (there, 7), False, unread)


INODE = 1 << 40  # larger than any
LISTENING = sockets.Connection(3, (SOMEWHERE, 1000), (bytes(4), 0), True, 0)


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """File descriptors of connections that were torn down."""
    torn: list[int] = []
    monkeypatch.setattr(sockets, "tear_down", lambda one: torn.append(one.fd))
    monkeypatch.setattr(sockets, "_FABRICS", sockets.Path("/none"))
    monkeypatch.setattr(sockets, "_own_addresses", lambda: {SOMEWHERE, OTHER_INTERFACE})
    return torn


def know(peer_addresses: PeerAddresses, engine: str, *addresses: bytes) -> None:
    peer_addresses.connecting(engine, b"port".join((b"", *addresses, b"")), ANSWERS)
    peer_addresses.listens(engine, [(address, 7, INODE) for address in addresses])


def test_tear_down_ends_connections_of_machine_and_unknown_ones(
    monkeypatch: pytest.MonkeyPatch, torn: list[int]
) -> None:
    peer_addresses, third = PeerAddresses(), socket.inet_aton("10.9.8.5")
    know(peer_addresses, "P", ELSEWHERE)
    know(peer_addresses, "another", third)
    unknown = socket.inet_aton("10.9.8.4")
    mine = [
        LISTENING,
        connection(4, ELSEWHERE),
        connection(5, third),
        connection(6, unknown),
        connection(7, unknown, here=2000),  # not accepted: it was made from here, and not to an engine
        connection(8, LOOPBACK, unread=9),
        connection(9, SOMEWHERE, unread=9),
    ]
    monkeypatch.setattr(sockets, "connections", lambda: mine)
    monkeypatch.setattr(sockets, "refuses", lambda host, port: False)
    assert peer_addresses.cut_off("P", settled=False)
    assert torn == [4, 6]


def test_an_engine_that_is_cut_off_takes_no_connection_between_the_ranks_of_a_group_with_it(
    monkeypatch: pytest.MonkeyPatch, torn: list[int]
) -> None:
    """They meet before UCX does: one on the machine of that engine, one elsewhere, one here. Without these the engine
    could not go on, nor the other ranks' engines."""
    ranks = [
        sockets.Connection(10, (SOMEWHERE, 1001), (bytes(4), 0), True, 0, 110),
        connection(11, socket.inet_aton("10.9.8.4"), here=1001)._replace(inode=111),
        connection(12, ELSEWHERE, here=1001)._replace(inode=112),
        connection(13, LOOPBACK, here=1001, unread=9)._replace(inode=113),
    ]
    monkeypatch.setattr(sockets, "refuses", lambda host, port: True)
    for of_engine in (ELSEWHERE, SOMEWHERE):
        peer_addresses = PeerAddresses({one.inode for one in ranks})
        know(peer_addresses, "P", of_engine)
        its = [LISTENING, connection(4, of_engine, unread=9)]
        monkeypatch.setattr(sockets, "connections", lambda its=its: [*ranks, *its])
        assert peer_addresses.cut_off("P", settled=False)
    assert torn == [4, 4]


@pytest.mark.parametrize("of_engine", [ELSEWHERE, SOMEWHERE], ids=["elsewhere", "here"])
def test_what_its_engine_connected_before_others_knew_it_is_spared(
    monkeypatch: pytest.MonkeyPatch, torn: list[int], of_engine: bytes
) -> None:
    """As the socket to its group's coordinator, on the machine of the engine that is cut off. UCX listens before that,
    and what it accepts is ended."""
    ucx, unknown = LISTENING._replace(inode=100), socket.inet_aton("10.9.8.4")
    coordinator = connection(4, of_engine, here=2000, unread=9)._replace(inode=101)
    monkeypatch.setattr(sockets, "connections", lambda: [ucx, coordinator])
    monkeypatch.setattr(sockets, "refuses", lambda host, port: True)
    peer_addresses = PeerAddresses({99})
    peer_addresses.spare_connections()
    know(peer_addresses, "P", of_engine)
    accepted = connection(5, of_engine, unread=9)._replace(inode=102), connection(6, unknown)._replace(inode=103)
    earlier = connection(7, of_engine, unread=9)._replace(inode=99)
    monkeypatch.setattr(sockets, "connections", lambda: [ucx, coordinator, *accepted, earlier])
    assert peer_addresses.cut_off("P", settled=False)
    assert torn == [5, 6]


def test_fabric_may_carry_posted_writes(monkeypatch: pytest.MonkeyPatch, torn: list[int], tmp_path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(sockets, "_FABRICS", tmp_path)
    peer_addresses = PeerAddresses()
    know(peer_addresses, "P", ELSEWHERE)
    monkeypatch.setattr(sockets, "connections", lambda: [LISTENING, connection(4, ELSEWHERE)])
    assert not peer_addresses.cut_off("P", settled=False)
    assert peer_addresses.cut_off("P", settled=True)
    assert torn == [4, 4]


@pytest.mark.parametrize("at", [SOMEWHERE, OTHER_INTERFACE, LOOPBACK], ids=["same", "other interface", "loopback"])
def test_an_engine_of_this_machine_is_waited_for_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, torn: list[int], at: bytes
) -> None:
    """Whatever other connections this process has: ranks meet over an interface of their own choice."""
    peer_addresses = PeerAddresses()
    mine = [LISTENING, connection(5, at, here=2000, unread=3), connection(6, at, here=2001)]
    monkeypatch.setattr(sockets, "connections", lambda: mine)
    know(peer_addresses, "P", at)
    its = sockets.Connection(-1, (at, 7), (bytes(4), 0), True, 0, INODE)
    there = [its]
    monkeypatch.setattr(sockets, "_of_all_processes", lambda wanted: there)
    assert not peer_addresses.cut_off("P", settled=True)
    assert torn == []
    there[:] = [its._replace(inode=INODE + 1)]  # another process has its port by now
    assert peer_addresses.cut_off("P", settled=False)
    assert torn == [5]  # it brings what the dead one has sent


def test_an_engine_of_this_machine_that_has_answered_runs_on_and_copies_nothing_more(
    monkeypatch: pytest.MonkeyPatch, torn: list[int]
) -> None:
    peer_addresses, waited = PeerAddresses(), list[float]()
    mine = [LISTENING, connection(5, SOMEWHERE, here=2000, unread=3), connection(6, SOMEWHERE, here=2001)]
    know(peer_addresses, "P", SOMEWHERE)
    monkeypatch.setattr(sockets, "connections", lambda: mine)
    monkeypatch.setattr(sockets, "refuses", lambda host, port: False)
    monkeypatch.setattr(sockets.time, "sleep", waited.append)
    assert peer_addresses.cut_off("P", settled=False, answered=True)
    assert torn == [5] and sum(waited) > 0


def test_an_engine_of_this_machine_that_never_named_a_connection_is_waited_for_until_it_has_settled_or_ended(
    monkeypatch: pytest.MonkeyPatch, torn: list[int]
) -> None:
    """Without one it writes nothing. Where it listens is not known, but where it answered a handshake."""
    peer_addresses, open_ports = PeerAddresses(), {9}
    monkeypatch.setattr(sockets, "connections", lambda: [LISTENING])
    monkeypatch.setattr(sockets, "refuses", lambda host, port: port not in open_ports)
    peer_addresses.connecting("P", b"..." + SOMEWHERE, ("10.9.8.6", 9))
    assert not peer_addresses.cut_off("P", settled=False)
    assert peer_addresses.cut_off("P", settled=True)
    open_ports.clear()
    assert peer_addresses.cut_off("P", settled=False)
    peer_addresses.listens("P", [])  # it has no TCP: nothing says that it has ended
    assert not peer_addresses.cut_off("P", settled=True)


def test_an_engine_that_may_still_write_here_is_not_forgotten(monkeypatch: pytest.MonkeyPatch, torn: list[int]) -> None:
    """Its connection is made anew, or it is dead: what it has sent is still on its way."""
    peer_addresses = PeerAddresses()
    know(peer_addresses, "P", ELSEWHERE)
    monkeypatch.setattr(sockets, "connections", lambda: [LISTENING, connection(4, ELSEWHERE)])
    peer_addresses.forget("P", awaited={"P"})
    assert peer_addresses.cut_off("P", settled=False)
    peer_addresses.forget("P", awaited=())
    assert not peer_addresses.cut_off("P", settled=False)


def test_unknown_engine_is_cut_off_after_settling() -> None:
    assert not PeerAddresses().cut_off("nobody", settled=False)
    assert PeerAddresses().cut_off("nobody", settled=True)


def test_an_engine_has_ended_when_all_its_sockets_are_closed_whoever_has_its_ports_now() -> None:
    peer_addresses = PeerAddresses()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [one.getsockname()[1] for one in (server, second)]
        for told in (one for one in listening() if one[:2] in [(LOOPBACK, port) for port in ports]):  # two ranks
            peer_addresses.listens("P", [told])
        assert not peer_addresses.has_ended("P")
        second.close()
        assert not peer_addresses.has_ended("P")
    with socket.create_server(("127.0.0.1", ports[0])), socket.create_server(("0.0.0.0", ports[1])):
        assert peer_addresses.has_ended("P")
        peer_addresses.forget("P", awaited=())
        assert peer_addresses.has_ended("P"), "it says where it listens once for each of its connections"
    assert not peer_addresses.has_ended("other")  # no socket of it is known


def test_an_engine_whose_interface_has_gone_away_is_of_this_machine_while_it_lives(torn: list[int]) -> None:
    """UCX listens at each interface that there is, a container's too."""
    peer_addresses = PeerAddresses()
    with socket.create_server(("127.0.0.1", 0)) as server:
        its = [one for one in listening() if one[:2] == (LOOPBACK, server.getsockname()[1])]
        peer_addresses.connecting("P", b"port", ANSWERS)
        peer_addresses.listens("P", [*its, (ELSEWHERE, 7, INODE)])
        assert peer_addresses.is_local("P") and not peer_addresses.cut_off("P", settled=False)
    assert not peer_addresses.is_local("P") and peer_addresses.cut_off("P", settled=False)


def test_an_engine_of_another_machine_has_ended_when_all_its_ports_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    peer_addresses, open_ports = PeerAddresses(), {7}
    monkeypatch.setattr(sockets, "refuses", lambda host, port: port not in open_ports)
    know(peer_addresses, "P", ELSEWHERE, LOOPBACK)
    assert not peer_addresses.is_local("P") and not peer_addresses.has_ended("P")
    open_ports.clear()
    assert peer_addresses.has_ended("P")
