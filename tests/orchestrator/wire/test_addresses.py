"""Ports that are free, and stay so until a server listens there."""

import errno
import socket
from collections.abc import Iterator

import pytest
import zmq

from orchestrator.wire.addresses import Listening, hold_port
from orchestrator.wire.sockets import bind

HERE = "127.0.0.1"


@pytest.fixture
def left() -> Iterator[range]:
    """The only port that may be taken: a server there has ended before its client, as one does that is killed."""
    held, port = hold_port(HERE)
    held.close()
    with socket.create_server((HERE, port)) as server, socket.create_connection((HERE, port)) as client:
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
    with socket.socket() as probe, pytest.raises(OSError, match="Address already in use"):
        probe.bind((HERE, port))
    yield range(port, port + 1)


def test_a_port_with_ended_connections_is_held_once(left: range) -> None:
    held, port = hold_port(HERE, left)
    with held, socket.create_server((HERE, port)):
        pass
    held, port = hold_port(HERE, left)
    with held:
        with pytest.raises(OSError, match="no free port") as taken:
            hold_port(HERE, left)
        assert taken.value.errno == errno.EADDRINUSE
    with socket.create_server((HERE, port)), pytest.raises(OSError, match="no free port"):
        hold_port(HERE, left)


def test_a_socket_listens_where_connections_have_ended_and_not_where_a_port_is_held(left: range) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        held, _ = hold_port(HERE, left)
        with held, pytest.raises(OSError, match="no free port"):
            bind(listener, Listening(HERE, ports=left))
        assert bind(listener, Listening(HERE, ports=left)) == left[0]
