"""How UCX uses TCP: by the interface with the address at which others reach this worker, and no connection is tried for
long. And which interface the ranks of a group use.

By default UCX listens on every interface and offers all of them to its peers. Some that it takes for reachable, by
subnet or by route, may not be: a second network without a way between two hosts, or a private address that both hosts
have. One failed connection then ends the whole connection of two engines. RDMA devices have other names, and stay.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from orchestrator.wire.addresses import address_towards

_SYS = Path("/sys/class/net")


class Interface(msgspec.Struct, frozen=True):
    """`addresses` are those of IPv4 and IPv6, without link-local ones."""

    name: str
    addresses: frozenset[str]
    bridge: bool = False


def ucx_settings(hosts: Iterable[str], interfaces: Iterable[Interface], ports: str | None = None) -> dict[str, str]:
    """UCX's environment variables for this worker. They leave out all interfaces but its own, if one has any of
    `hosts`: its names and addresses, in the order of preference. `ports`: a range, `FIRST-LAST`."""
    # Behind a firewall that drops, a handshake fails after 3 s instead of 130, for which no block was given back.
    settings = {"UCX_TCP_SYN_CNT": "1"} | ({"UCX_TCP_PORT_RANGE": ports} if ports is not None else {})
    known = [interface for interface in interfaces if interface.addresses]
    for address in (address for host in hosts for address in _resolved(host)):
        for own in known:
            if address in own.addresses:
                return settings | _settings_of(own, known, address)
    return settings


def group_settings(address: str, interfaces: Iterable[Interface]) -> dict[str, str]:
    """Environment variables by which the ranks of a group whose first one is at `address` connect to each other over
    the network that has it. By default torch takes that of the host's name, which may lead nowhere, or outside; NCCL,
    and NVSHMEM under DeepEP, the first that they find."""
    towards = address_towards(address)
    own = next((each.name for each in interfaces if towards in each.addresses), None)
    if own is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": own, "NCCL_SOCKET_IFNAME": f"={own}", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": own}


def _settings_of(own: Interface, known: list[Interface], address: str) -> dict[str, str]:
    # UCX offers bridges only where one is asked for, and warns of names that it does not offer.
    others = [each.name for each in known if each is not own and (own.bridge or not each.bridge)]
    settings = {"UCX_NET_DEVICES": "^" + ",".join(others)} if others else {}
    if own.bridge:
        settings["UCX_TCP_BRIDGE_ENABLE"] = "y"
    if ":" in address:
        settings["UCX_TCP_AF_PRIO"] = "inet6,inet"
    return settings


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(ipaddress.ip_address(str(address[0]).partition("%")[0])) for *_, address in found]


def interfaces_here() -> list[Interface]:
    """This host's, or this container's. One without a carrier is among them: it may have one when UCX looks."""
    found: dict[str, set[str]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # a second address may have a label of its own, such as eth0:1
        addresses = {str(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)}
        found.setdefault(name, set()).update(address for address in addresses if "%" not in address)
    return [Interface(name, frozenset(found[name]), (_SYS / name / "bridge").is_dir()) for name in found]
