"""The listener of KV handshakes, and vLLM's own client over our sockets: who gets an answer."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from orchestrator.wire.addresses import free_ports

pytestmark = pytest.mark.vllm

METADATA = b"agent, addresses and remote keys"
QUESTION = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))


@pytest.fixture
def public_and_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A listening engine's public key and ZMQ address."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker

    from connectors import handshake
    from connectors.push.scheduler import PushScheduler

    public, secret = zmq.curve_keypair()
    for module in (base_scheduler, base_worker):
        monkeypatch.setattr(module, "zmq_ctx", module.zmq_ctx)  # put back afterwards
    monkeypatch.setenv(handshake.SECRET_KEY, secret.decode())
    handshake.install()
    assert handshake.public_key() == public.decode()
    port, ready, stop = next(free_ports("127.0.0.1")), threading.Event(), threading.Event()
    listen = PushScheduler._nixl_handshake_listener
    arguments = ({(0, 0): METADATA}, ready, stop, "127.0.0.1", port)
    listener = threading.Thread(target=listen, args=arguments, daemon=True)
    listener.start()
    assert ready.wait(5)
    yield public.decode(), f"tcp://127.0.0.1:{port}"
    stop.set()
    listener.join(5)
    assert not listener.is_alive()


def asked(address: str, key: str, timeout_ms: int, question: bytes = QUESTION) -> list[bytes]:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    from connectors import handshake

    with handshake.expecting(key), base_worker.zmq_ctx(zmq.REQ, address) as client:
        client.setsockopt(zmq.RCVTIMEO, timeout_ms)
        client.send(question)
        return client.recv_multipart()


def test_only_public_key_holders_are_answered(public_and_address: tuple[str, str]) -> None:
    public, address = public_and_address
    for key in ("", zmq.curve_keypair()[0].decode()):
        with pytest.raises(zmq.Again):
            asked(address, key, 500)
    assert asked(address, public, 5000)[0] == METADATA


def test_strangers_cannot_read_end_or_fill_listener(public_and_address: tuple[str, str]) -> None:
    public, address = public_and_address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection((host, int(port)), timeout=8) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + (b"NULL", b"CURVE")[number % 2].ljust(20, b"\0") + bytes(32)
        with contextlib.suppress(OSError):
            stranger.sendall(greeting + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(4096))
    heard = b"".join(read_until_closed(stranger) for stranger in strangers)
    assert METADATA not in heard
    deadline = time.monotonic() + 8
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert asked(address, public, 5000)[0] == METADATA


@pytest.mark.parametrize(
    "question",
    [msgspec.msgpack.encode((b"get_meta_msg", 0, 3)), msgspec.msgpack.encode(7), b"", b"\xc1"],
    ids=["of another rank", "of another kind", "empty", "garbled"],
)
def test_question_without_an_answer_ends_no_listener(public_and_address: tuple[str, str], question: bytes) -> None:
    """A peer asks for a rank of the engine that had this port before: all others are still answered."""
    public, address = public_and_address
    with pytest.raises(zmq.Again):
        asked(address, public, 500, question)
    assert asked(address, public, 5000)[0] == METADATA


def read_until_closed(stranger: socket.socket) -> bytes:
    heard: list[Any] = []
    with stranger, contextlib.suppress(ConnectionError):
        while data := stranger.recv(65536):
            heard.append(data)
    return b"".join(heard)
