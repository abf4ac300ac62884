"""vLLM's KV handshakes, encrypted: the sockets on which an engine tells others how to WRITE into its KV memory.

An engine that has a secret key answers only who knows the public half. That is told in the registry and in the messages
that name an engine, so it is known to members of the fleet alone, and no list of clients is needed: in CurveZMQ nobody
can say the first word without the server's public key. What NIXL and UCX send afterwards is not encrypted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker, utils
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

logger = init_logger("vllm.pd.push")

# In the environment of an engine's processes, as Z85 text (RFC 32). None: nothing is encrypted.
SECRET_KEY = "PD_KV_SECRET_KEY"
_MAX_QUESTION_BYTES = 4096
_LOOK_AGAIN_MS = 1000  # whether to stop
_TIMEOUT_MS = 5000  # a peer that does not complete its handshake in time loses its connection
# So many handshakes are carried out at once, which takes CPU time. However many more wait for an answer: those with a
# rack that has died never get one, and nobody may wait behind them.
_slots = threading.Semaphore(8)
_expected: ContextVar[str] = ContextVar("pd_kv_key", default="")


def public_key() -> str:
    """This engine's, empty without a secret one."""
    secret = os.environ.get(SECRET_KEY, "")
    return zmq.curve_public(secret.encode()).decode() if secret else ""


@contextlib.contextmanager
def expecting(key: str) -> Iterator[None]:
    """What this thread asks meanwhile, it asks an engine with this public key; empty: one that does not encrypt."""
    token = _expected.set(key)
    try:
        yield
    finally:
        _expected.reset(token)


def install() -> None:
    """In this process: vLLM's two functions that open such sockets open ours. Harmless to repeat."""
    base_scheduler.zmq_ctx = base_worker.zmq_ctx = _opened


def listen(
    answers: Mapping[tuple[int, int], bytes], ready: threading.Event, stop: threading.Event, host: str, port: int
) -> None:
    """Answer handshakes until `stop` is set.

    Instead of vLLM's own loop: a question that has no answer ends it, and no handshake succeeds from then on. A peer
    asks one where an engine with more ranks had this port before.

    `answers`: by pipeline stage and rank, what NIXL must know of it.
    """
    with _opened(zmq.ROUTER, make_zmq_path("tcp", host, port)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, _LOOK_AGAIN_MS)
        ready.set()
        while not stop.is_set():
            try:
                peer, _, question = socket.recv_multipart()
                _, stage, rank = msgspec.msgpack.decode(question, type=tuple[bytes, int, int])
                answer = answers[stage, rank]
            except zmq.Again:
                continue
            except (ValueError, msgspec.MsgspecError, KeyError) as error:
                logger.warning("a KV handshake was not answered: %s: %s", type(error).__name__, error)
                continue
            # The clock is of use to KV that is pulled only.
            socket.send_multipart((peer, b"", answer, msgspec.msgpack.encode(time.perf_counter())))


class _Asking:
    """A socket that asks, and gives its slot to others while it waits for the answer."""

    def __init__(self, socket: Any) -> None:
        self._socket, self.setsockopt, self.send = socket, socket.setsockopt, socket.send

    def recv_multipart(self) -> Any:
        _slots.release()
        try:
            return self._socket.recv_multipart()
        finally:
            _slots.acquire()


@contextlib.contextmanager
def _opened(kind: Any, address: str) -> Iterator[Any]:
    if kind == zmq.REQ:
        with _asking(address, _expected.get()) as socket, _slots:
            yield _Asking(socket)
        return
    secret = os.environ.get(SECRET_KEY, "")
    if not secret:
        with utils.zmq_ctx(kind, address) as socket:
            yield socket
        return
    context = zmq.Context()
    try:
        socket = context.socket(kind)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _TIMEOUT_MS)
        socket.bind(address)
        yield socket
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def _asking(address: str, expected: str) -> Iterator[Any]:
    """`expected`: the key of who answers; empty for one that does not encrypt."""
    socket: Any = zmq.Context.instance().socket(zmq.REQ)  # a context of its own has threads, and six descriptors
    try:
        socket.setsockopt(zmq.IPV6, "[" in address)
        if expected:
            public, own = zmq.curve_keypair()  # for this one question
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own)
            socket.setsockopt(zmq.CURVE_SERVERKEY, expected.encode())
        socket.connect(address)
        yield socket
    finally:
        socket.close(linger=0)
