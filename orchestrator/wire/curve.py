"""Keys of the mesh (CurveZMQ, RFC 26), and which peers a worker lets in (ZAP, RFC 27). Opens no connection.

Each process makes its own key pair when it starts; the secret half never leaves the process. The public halves are in
the registry: from it frontends know the key of each worker, and workers know which frontends may connect, and their
ids. So a process can join the fleet only if it may write the fleet's Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

log = logging.getLogger("pd.transport")

# Returns the ids of the frontends that are registered with these public keys, by key. It looks up the keys that ask:
# when many frontends start, each worker would otherwise read all of them for each of them.
FindFrontends = Callable[[Sequence[str]], Awaitable[Mapping[str, str]]]

# Whoever reaches the port may ask with as many keys as he likes: that is at most twenty look-ups a second, however many
# they are, and a key that was refused is looked up once a second.
_LOOK_EVERY_S, _KEYS_A_LOOK = 0.05, 256
_MOST_WAITING = 1024  # keys; others are refused and may try again
_REFUSED_S = 1.0
_VERSION, _KEY_BYTES = b"1.0", 32


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


class Gate:
    """Admits registered frontends to every server socket of a context. Their id becomes the `User-Id` of messages.

    A frontend that is known gets its answer at once, whatever others ask meanwhile.
    """

    def __init__(self, context: zmq.asyncio.Context, find: FindFrontends, connected: Container[str]) -> None:
        """`find` may raise ConnectionError. `connected`: frontends that stay admitted without a registry entry."""
        self._find, self._connected = find, connected
        self._names: dict[str, str] = {}  # by public key
        self._refused: dict[str, float] = {}  # public key -> when it may be looked up again; the oldest first
        self._waiting: dict[str, list[list[bytes]]] = {}  # public key -> where the answers go; the oldest first
        self._asked = asyncio.Event()
        self._zap = context.socket(zmq.ROUTER)  # REP would take the next question after an answer only
        self._zap.bind("inproc://zeromq.zap.01")
        self._tasks = [
            asyncio.create_task(self._listen(), name="mesh-gate"),
            asyncio.create_task(self._look_up(), name="mesh-gate-look-up"),
        ]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._zap.close(linger=0)

    async def _listen(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            # What a reply begins with, then the question (https://rfc.zeromq.org/spec/27/).
            route, empty, version, request_id, *_, key = await self._zap.recv_multipart()
            reply_to = [route, empty, version, request_id]
            public = z85.encode(key).decode() if version == _VERSION and len(key) == _KEY_BYTES else ""
            if not public or public in self._names or self._refused.get(public, 0.0) > now():
                await self._answer(public, reply_to)
            elif public in self._waiting or len(self._waiting) < _MOST_WAITING:
                self._waiting.setdefault(public, []).append(reply_to)
                self._asked.set()
            else:
                await self._answer("", reply_to)

    async def _answer(self, public: str, reply_to: list[bytes]) -> None:
        name = self._names.get(public)
        said = [b"400", b"NO ACCESS", b""] if name is None else [b"200", b"OK", name.encode()]
        await self._zap.send_multipart([*reply_to, *said, b""])

    async def _look_up(self) -> None:
        """Frontends register before they connect, so an unknown key does not belong to the fleet."""
        now = asyncio.get_running_loop().time
        while True:
            await self._asked.wait()
            keys = list(itertools.islice(self._waiting, _KEYS_A_LOOK))
            try:
                found = await self._find(keys)
            except Exception as error:
                log.log(
                    logging.DEBUG if isinstance(error, ConnectionError) else logging.ERROR, "keys not found: %s", error
                )
            else:
                self._names = {known: name for known, name in self._names.items() if name in self._connected}
                self._names |= found
                self._refused = {key: until for key, until in self._refused.items() if until > now()}
                self._refused |= {key: now() + _REFUSED_S for key in keys if key not in found}
            for key in keys:
                for reply_to in self._waiting.pop(key):
                    await self._answer(key, reply_to)
            if not self._waiting:
                self._asked.clear()
            await asyncio.sleep(_LOOK_EVERY_S)
