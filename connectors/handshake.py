"""vLLM's KV handshakes, encrypted: the sockets on which an engine tells others how to WRITE into its KV memory.

An engine that has a secret key answers only who knows the public half. That is told in the registry and in the messages
that name an engine, so it is known to members of the fleet alone, and no list of clients is needed: in CurveZMQ nobody
can say the first word without the server's public key. What NIXL and UCX send afterwards is not encrypted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker, utils

# In the environment of an engine's processes, as Z85 text (RFC 32). None: nothing is encrypted.
SECRET_KEY = "PD_KV_SECRET_KEY"
_MAX_QUESTION_BYTES = 4096
_TIMEOUT_MS = 5000  # a peer that does not complete its handshake in time loses its connection
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


@contextlib.contextmanager
def _opened(kind: Any, address: str) -> Iterator[Any]:
    secret, expected = os.environ.get(SECRET_KEY, ""), _expected.get()
    if not (secret if kind == zmq.ROUTER else expected):
        with utils.zmq_ctx(kind, address) as socket:
            yield socket
        return
    context = zmq.Context()
    try:
        socket = context.socket(kind)
        socket.setsockopt(zmq.IPV6, "[" in address)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
            socket.setsockopt(zmq.HANDSHAKE_IVL, _TIMEOUT_MS)
            socket.bind(address)
        else:
            public, own = zmq.curve_keypair()  # for this one question
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own)
            socket.setsockopt(zmq.CURVE_SERVERKEY, expected.encode())
            socket.connect(address)
        yield socket
    finally:
        context.destroy(linger=0)
