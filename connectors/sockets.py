"""The TCP connections of this process with other engines, and how to end them so that no more data arrives (Linux).

UCX, the library that owns them, writes all data that arrives on a connection to memory, however late. Bytes in a
kernel's buffers outlive a cut link, and the process that sent them. NIXL closes none of the connections it accepted.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

Listener = tuple[bytes, int, int]  # address, packed, port, and the socket's inode

_LISTEN = 0x0A  # tcp_states.h
_REMEMBERED = 4096  # engines
_REFUSAL_S = 1.0
_COPY_S = 0.5  # more than a part of a WRITE takes that is copied within this machine
_FABRICS = Path("/sys/class/infiniband")  # WRITEs over these need no TCP connection
_libc = ctypes.CDLL(None, use_errno=True)


class Connection(NamedTuple):
    """A TCP socket of this process. Addresses are packed IPs. An IPv4 address of an IPv6 socket is packed as IPv4."""

    fd: int
    here: tuple[bytes, int]
    there: tuple[bytes, int]
    listens: bool
    unread: int  # bytes that have arrived and were not read
    inode: int = 0  # the socket's, which no other on its machine has


def connections() -> list[Connection]:
    """All TCP sockets of this process, except those that are closed meanwhile."""
    fds: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
        except OSError:
            continue
        if kind == "socket":
            fds[int(inode.strip("[]"))] = int(name)
    mine = _of_all_processes(lambda inode, listens: inode in fds)
    return [one._replace(fd=fds[one.inode]) for one in mine]


def _of_all_processes(wanted: Callable[[int, bool], bool]) -> Iterator[Connection]:
    """Of the sockets of this machine, or of this container, those that are wanted by inode and whether they listen;
    without descriptors. Raises OSError where they cannot be read."""
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # without IPv6
        for row in rows:  # tens of thousands on a busy host
            _, here, there, state, queues, _, _, _, _, inode, *_ = row.split()
            listens = int(state, 16) == _LISTEN
            if wanted(int(inode), listens):
                unread = int(queues.partition(":")[2], 16)
                yield Connection(-1, _address(here), _address(there), listens, unread, int(inode))


def listening() -> set[Listener]:
    """Where this process listens."""
    return {(*one.here, one.inode) for one in connections() if one.listens}


def _listening_here() -> set[Listener]:
    """Where processes of this machine, or of this container, listen. Raises OSError."""
    return {(*one.here, one.inode) for one in _of_all_processes(lambda inode, listens: listens)}


def tear_down(connection: Connection) -> None:
    """End a connection at once. The kernel drops received and unsent data, and tells the other end if it can.

    A connect() to AF_UNSPEC does that (tcp_disconnect in Linux). After a shutdown() received data could still be read.
    """
    _libc.connect(connection.fd, bytes(struct.calcsize("=Q") * 2), struct.calcsize("=Q") * 2)  # AF_UNSPEC is 0


def refuses(host: str | bytes, port: int) -> bool:
    """Whether the machine answers that this port is closed: the process that listened there has ended."""
    try:
        name = host if isinstance(host, str) else socket.inet_ntop(_family(host), host)
        with socket.create_connection((name, port), timeout=_REFUSAL_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


@dataclass
class _Addresses:
    """Of one engine."""

    metadata: set[bytes] = field(default_factory=set)  # NIXL's, of its ranks; has their addresses
    answers: tuple[str, int] | None = None  # handshakes
    listens: set[Listener] | None = None  # where its ranks listen; None until one has said so


class PeerAddresses:
    """What this process knows about other engines: their addresses, and the ports at which their ranks listen."""

    def __init__(self, not_ucx: Collection[int] = ()) -> None:
        """`not_ucx`: inodes of sockets that this process had before UCX made any, as those to the other ranks of its
        engine or group, which may run on the machine of an engine that is cut off."""
        self._not_ucx = set(not_ucx)
        self._lock = threading.Lock()
        self._engines: OrderedDict[str, _Addresses] = OrderedDict()

    def spare_connections(self) -> None:
        """Call it before other engines know this one: what is connected by now is none of theirs, as the socket to the
        coordinator of its group. UCX listens already, and what it will accept is not spared."""
        self._not_ucx.update(one.inode for one in connections() if not one.listens)

    def connecting(self, engine: str, metadata: bytes, answers: tuple[str, int]) -> None:
        """This process is about to connect to one rank of `engine`, whose NIXL metadata is `metadata`. The engine
        answers handshakes at this host and port."""
        with self._lock:
            known = self._known(engine)
            known.metadata.add(metadata)
            known.answers = answers

    def listens(self, engine: str, endpoints: Iterable[Listener]) -> None:
        """A rank of `engine` says where it listens, before it writes here."""
        with self._lock:
            known = self._known(engine)
            known.listens = {*(known.listens or ()), *endpoints}

    def _known(self, engine: str) -> _Addresses:
        known = self._engines.setdefault(engine, _Addresses())
        self._engines.move_to_end(engine)
        while len(self._engines) > _REMEMBERED:
            self._engines.popitem(last=False)
        return known

    def forget(self, engine: str, awaited: Collection[str]) -> None:
        """Forget an engine's addresses, unless it is in `awaited`, those that may still write here. Where it listens
        stays known: it says so once for each connection of its own, which may outlast those from here."""
        with self._lock:
            if engine not in awaited and engine in self._engines:
                self._engines[engine].metadata.clear()

    def has_ended(self, engine: str) -> bool:
        """Whether every process of `engine` that said where it listens has ended, or the one that answers handshakes
        where none has said it: then nothing was written yet. May take a second.

        A port may be another process's by now. So on this machine the socket is looked for, and elsewhere the port has
        to refuse connections. Raises OSError where sockets cannot be listed."""
        known = self._engines.get(engine, _Addresses())
        if known.listens is None:
            return known.answers is not None and refuses(*known.answers)
        mine, there = _own_addresses(), {inode for _, _, inode in _listening_here()}
        return bool(known.listens) and all(
            inode not in there if _is_own(address, mine) else refuses(address, port)
            for address, port, inode in sorted(known.listens)
        )

    def is_local(self, engine: str) -> bool:
        """Whether the engine runs on this machine, and may write without a connection: one of its sockets is here, or
        it listens at addresses of this machine only. It may be another interface's than that of this process, and one
        that has gone away since."""
        known, mine = self._engines.get(engine, _Addresses()), _own_addresses()
        told = {address for address, *_ in known.listens or ()}
        told = told or (_packed(known.answers[0]) if known.answers is not None else set())
        if told and all(_is_own(address, mine) for address in told):
            return True
        return not _listening_here().isdisjoint(known.listens or ())

    def _metadata(self, engine: str) -> set[bytes]:
        with self._lock:
            return set(self._engines[engine].metadata) if engine in self._engines else set()

    def cut_off(self, engine: str, settled: bool, answered: bool = False) -> bool:
        """Try to stop `engine` from writing here. Returns whether it can write no more. May take a second.

        `settled`: it posts no more WRITEs, and a network card that repeated the last one has given up. `answered`: it
        posts no more, runs, and has dropped what its WRITEs went through.
        """
        if not self._metadata(engine):
            return settled
        if not self.is_local(engine):
            self.tear_down(engine)
            return settled or not (_FABRICS.is_dir() and any(_FABRICS.iterdir())) or self.has_ended(engine)
        if answered:
            time.sleep(_COPY_S)  # its threads, which were copying then, run
        elif not self.has_ended(engine):
            # It needs no connection: a process that was stopped during a copy may continue it. But one that never named
            # a connection writes nothing.
            return settled and self._engines.get(engine, _Addresses()).listens is None
        self.tear_down(engine)
        return True

    def tear_down(self, engine: str) -> None:
        """End every connection with the machine of `engine`, and accepted ones whose engine is not known; if the engine
        ran on this machine, also local ones that have unread data. Those are spared that were there before another
        engine could connect. One of them that ZMQ has made again since is not known as such."""
        all_mine = [one for one in connections() if one.inode not in self._not_ucx]
        mine, here = _own_addresses(), self.is_local(engine)
        accepting = {one.here[1] for one in all_mine if one.listens}
        theirs = self._metadata(engine)
        with self._lock:
            others = [one for name, known in self._engines.items() if name != engine for one in known.metadata]
        for one in all_mine:
            address = one.there[0]
            if one.listens:
                continue
            if _is_own(address, mine):
                if here and one.unread:
                    tear_down(one)
            elif any(address in metadata for metadata in theirs) or (
                one.here[1] in accepting and not any(address in metadata for metadata in others)
            ):
                tear_down(one)


def _own_addresses() -> set[bytes]:
    """Of all interfaces of this machine, or of this container."""
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return {_packed_one(it.address) for it in entries if it.family in (socket.AF_INET, socket.AF_INET6)}


def _is_own(address: bytes, mine: Collection[bytes]) -> bool:
    loopback = address[0] == 127 if len(address) == 4 else address == socket.inet_pton(socket.AF_INET6, "::1")
    return loopback or address in mine or not any(address)


def _packed(host: str) -> set[bytes]:
    """The addresses of a name, or of an address as text."""
    try:
        return {_packed_one(str(where[0])) for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):
        return set()


def _packed_one(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address.partition("%")[0])


def _family(address: bytes) -> socket.AddressFamily:
    return socket.AF_INET if len(address) == 4 else socket.AF_INET6


def _address(text: str) -> tuple[bytes, int]:
    """An address in a row of /proc/net/tcp: words of four bytes in this machine's order."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    if packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]
    return packed, int(port, 16)
