"""Keys of the mesh (CurveZMQ, RFC 26), and which peers a worker lets in (ZAP, RFC 27). Opens no connection.

Each process makes its own pair when it starts, and its secret half never leaves it. The public halves are in the
registry: frontends learn from it whom they talk to, workers which frontends may talk to them, and under which name.
So who may write the fleet's Redis may join the fleet, and nobody else.
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

# What each worker asks for: the id of the frontend that is registered with this public key, None where there is none.
# One key at a time: a fleet of many frontends that starts would else be read by each worker for each of them.
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
    """What it connects to after this is encrypted; `zmq.CURVE_SERVERKEY` says whose key is expected there."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def use_as_server(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Call it before the socket is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


class Gate(Authenticator):
    """Lets registered frontends in on every server socket of a context. Their id becomes their messages' `User-Id`."""

    def __init__(self, context: zmq.asyncio.Context, find: FindFrontend, connected: Container[str]) -> None:
        """`find` may raise ConnectionError. `connected`: who stays known without being in the registry."""
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
        """zmq.auth's hook: whether this key may connect. Must not raise, or nobody would be let in any more."""
        public = key.decode()
        if public not in self._names:
            await self._look(public)
        return public in self._names

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self._names.get(z85.encode(client_public_key).decode(), "")

    async def _look(self, public: str) -> None:
        """Frontends register before they connect, so a key that is not found now is a stranger's."""
        try:
            name = await self._find(public)
        except Exception as error:
            log.log(logging.DEBUG if isinstance(error, ConnectionError) else logging.ERROR, "key not found: %s", error)
            return
        self._names = {known: name for known, name in self._names.items() if name in self._connected}
        if name is not None:
            self._names[public] = name
