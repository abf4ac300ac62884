"""Addresses and ports of this host: the route to another host, free ports, and how an address is written."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

ALL_IPV4 = "0.0.0.0"  # noqa: S104 - all addresses of this host of IPv4; :: is those of both families
ANYBODY_IPV4 = "192.0.2.1"  # of no host: routed as any address that no route is known for (RFC 5737)
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _FIRST_EPHEMERAL = 10_000, 32_768  # Linux's default
_TRIES = 100
_ANY_PORT = 9  # of a datagram socket that sends nothing
_random = random.SystemRandom()  # programs that seed `random` alike must not all take the same ports


class AddressError(ValueError):
    """A worker's address that cannot be connected to. One line with the address."""


class Listening(NamedTuple):
    """Where a process listens, and the address at which others reach it."""

    bind: str
    advertise: str = ""  # empty: the same as `bind`
    ports: range | None = None  # None: any free one

    @property
    def reached_at(self) -> str:
        return self.advertise or self.bind


def in_url(host: str) -> str:
    """An address as a URL has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_unspecified(host: str) -> bool:
    """Whether it means all addresses of this host: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Raises AddressError. A name would be looked up by ZMQ's thread, which meanwhile serves no other worker."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        digits = port.isascii() and port.isdigit()  # int() takes more, at which ZMQ raises
        if not address.startswith("tcp://") or not digits or not 0 < int(port) < 65536:
            raise ValueError
    except ValueError:
        raise AddressError(f"{address!r} is not an address like tcp://127.0.0.1:5000") from None


def addresses_of(*hosts: str) -> list[str]:
    """Those of the first of these that has some, the best first. An address is its own. Raises OSError."""
    for host in hosts[:-1]:
        with contextlib.suppress(OSError):
            return addresses_of(host)
    try:
        return [str(found[0]) for *_, found in socket.getaddrinfo(hosts[-1], None, type=socket.SOCK_STREAM)]
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "a label of it is empty or too long") from None


def resolve(host: str, like: str) -> str:
    """The best address of a name, of the family of the address `like` where it has one of that. Raises OSError."""
    return _of_family(addresses_of(host), like)


def hosts_in(url: str) -> list[str]:
    """The hosts that a server's URL names: none for a socket file, several for Sentinels and the nodes of a cluster, of
    which some may have no address while they are away."""
    named = urlsplit(url).netloc.rpartition("@")[2].split(",")
    return [host for part in named if (host := urlsplit(f"//{part}").hostname)]


def is_local(url: str) -> bool:
    """Whether a server's URL leads to this host only: a socket file, or a loopback address. Raises OSError."""
    hosts = hosts_in(url)
    return not hosts or ipaddress.ip_address(addresses_of(*hosts)[0]).is_loopback


def address_towards(*hosts: str, bind: str = "") -> str:
    """This host's address on the route to the first of these that has an address, else loopback. For what listens at
    ALL_IPV4 (`bind`) it is of IPv4 if one of these addresses is. Sends nothing: a datagram socket only looks the route
    up."""
    with contextlib.suppress(OSError, IndexError):
        found = addresses_of(*hosts)
        address = _of_family(found, bind) if bind == ALL_IPV4 else found[0]
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def hold_port(host: str, ports: range | None = None) -> tuple[contextlib.ExitStack, int]:
    """A free port, reserved until what is returned with it is closed; one server may bind it and listen meanwhile.

    Raises OSError if `host` is no address of this host, or no port is free.
    """
    for port in free_ports(host, ports):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_name_of(host, port))
                socket_there = held.enter_context(socket.socket(_family(host)))
                socket_there.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers, which listen, too
                socket_there.bind((host, port))
            except OSError:
                continue
            return held.pop_all(), port
    raise OSError(errno.EADDRINUSE, "no free port" if ports is None else f"no free port of {ports[0]} to {ports[-1]}")


def free_ports(host: str, ports: range | None = None) -> Iterator[int]:
    """Unused ports in random order: of `ports`, or else outside the range for outgoing connections.

    Last come those of `ports` whose connections have all ended: a worker that was killed leaves such ones, which the
    kernel remembers for a minute, and its successor may have no other port. Raises OSError when `host` is not an
    address of this host.
    """
    own = ports if ports is not None else range(_LOWEST_PORT, _first_ephemeral())
    tried: Sequence[int] = _random.sample(own, len(own) if ports is not None else min(len(own), _TRIES))
    for port in tried:
        if _is_free(host, port):
            yield port
    if ports is None:
        with socket.socket(_family(host)) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        yield port
        return
    for port in tried:
        if _is_free(host, port, but_for_ended=True):
            yield port


def _of_family(found: list[str], like: str) -> str:
    return next((address for address in found if _family(address) is _family(like)), found[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError):
        first = _FIRST_EPHEMERAL
    return max(first, _LOWEST_PORT + 1000)


def _is_free(host: str, port: int, but_for_ended: bool = False) -> bool:
    """`but_for_ended`: connections that have ended do not count. Then a port that is held looks like one that is not,
    except for its name."""
    with contextlib.ExitStack() as probing:
        try:
            if but_for_ended:
                probing.enter_context(_name_of(host, port))
            probe = probing.enter_context(socket.socket(_family(host)))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, but_for_ended)
            probe.bind((host, port))
            if but_for_ended:
                probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _name_of(host: str, port: int) -> socket.socket:
    """Has the name of a port that is held, in the kernel's namespace of names. Raises OSError if another one has it."""
    owner = socket.socket(socket.AF_UNIX)
    try:
        owner.bind(f"\0pd-orchestrator/{host}/{port}")
    except OSError:
        owner.close()
        raise
    return owner
