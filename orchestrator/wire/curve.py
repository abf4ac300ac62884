"""Keys of the mesh (CurveZMQ, RFC 26), and which peers a worker lets in (ZAP, RFC 27). Opens no connection.

Each process makes its own key pair when it starts; the secret half never leaves the process. The public halves are in
the registry: from it frontends know the key of each worker, and workers know which frontends may connect, and their
ids. So a process can join the fleet only if it may write the fleet's Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container

import msgspec
import zmq
import zmq.asyncio
from zmq.auth import Authenticator
from zmq.utils import z85

log = logging.getLogger("pd.transport")

# Returns the id of the frontend that is registered with this public key, or None. It looks up one key at a time: when
# many frontends start, each worker would otherwise read all of them for each of them.
FindFrontend = Callable[[str], Awaitable[str | None]]


class KeyPair(msgspec.Struct, frozen=True):
    """Both halves as Z85 text of 40 characters (RFC 32)."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


def use_as_client(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Encrypt the socket's later connections. `zmq.CURVE_SERVERKEY` sets the key expected of the server."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def use_as_server(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Let the socket accept encrypted connections only. Call it before the socket is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


class Gate(Authenticator):
    """Admits registered frontends to every server socket of a context. Their id becomes the `User-Id` of messages."""

    def __init__(self, context: zmq.asyncio.Context, find: FindFrontend, connected: Container[str]) -> None:
        """`find` may raise ConnectionError. `connected`: frontends that stay admitted without a registry entry."""
        super().__init__(context)
        self._find, self._connected = find, connected
        self._names: dict[str, str] = {}  # by public key
        self.configure_curve_callback("*", self)
        self.zap_socket = context.socket(zmq.REP)
        self.zap_socket.bind("inproc://zeromq.zap.01")
        self._task = asyncio.create_task(self._answer(self.zap_socket), name="mesh-gate")

    async def _answer(self, asked: zmq.asyncio.Socket) -> None:
        while True:
            await self.handle_zap_message(await asked.recv_multipart())

    def close(self) -> None:
        self._task.cancel()
        self.zap_socket.close(linger=0)

    async def callback(self, domain: str, key: bytes) -> bool:
        """zmq.auth's hook: whether this key may connect. It must not raise, since that would end the gate."""
        public = key.decode()
        if public not in self._names:
            await self._look(public)
        return public in self._names

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self._names.get(z85.encode(client_public_key).decode(), "")

    async def _look(self, public: str) -> None:
        """Look the key up. Frontends register before they connect, so an unknown key does not belong to the fleet."""
        try:
            name = await self._find(public)
        except Exception as error:
            log.log(logging.DEBUG if isinstance(error, ConnectionError) else logging.ERROR, "key not found: %s", error)
            return
        self._names = {known: name for known, name in self._names.items() if name in self._connected}
        if name is not None:
            self._names[public] = name
