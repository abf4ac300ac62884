"""UCX uses the interface at which others reach a worker, whatever other networks the host has."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from support_namespaces import NAME, add_hosts, ip, remove_hosts
from support_two_hosts import transfers, two_hosts
from support_wait import DEADLINE_S, until

from workers.vllm_engine import interfaces
from workers.vllm_engine.interfaces import Interface, group_settings, interfaces_here, ucx_settings

LOOPBACK = Interface("lo", frozenset({"127.0.0.1", "::1"}))
DATA = Interface("eth0", frozenset({"10.0.0.5", "fd00::5"}))
OTHER = Interface("eth1", frozenset({"192.168.122.1"}))
BRIDGE = Interface("br0", frozenset({"10.1.0.5"}), bridge=True)
CONTAINERS = Interface("docker0", frozenset({"172.17.0.1"}), bridge=True)
BARE = Interface("veth1", frozenset())  # a container's end: UCX does not offer it
HOST = [LOOPBACK, OTHER, BARE, DATA, BRIDGE, CONTAINERS]
FIREWALLS = {"UCX_TCP_SYN_CNT": "1"}  # those that drop: a handshake ends soon


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [
        (["10.0.0.5"], {"UCX_NET_DEVICES": "^lo,eth1"}),
        (["127.0.0.1"], {"UCX_NET_DEVICES": "^eth1,eth0"}),
        (["fd00:0::5"], {"UCX_NET_DEVICES": "^lo,eth1", "UCX_TCP_AF_PRIO": "inet6,inet"}),
        (["203.0.113.9", "10.0.0.5"], {"UCX_NET_DEVICES": "^lo,eth1"}),  # others reach it through a gateway
        (["203.0.113.9", "0.0.0.0"], {}),
        (["no.such.host.invalid"], {}),
        (["10.1.0.5"], {"UCX_NET_DEVICES": "^lo,eth1,eth0,docker0", "UCX_TCP_BRIDGE_ENABLE": "y"}),
    ],
)
def test_other_interfaces_are_left_out(hosts: list[str], settings: dict[str, str]) -> None:
    assert ucx_settings(hosts, HOST) == {**FIREWALLS, **settings}


def test_ranks_of_a_group_use_the_interface_that_leads_to_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl, nvshmem = names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
    assert group_settings("127.0.0.1", HOST) == dict(zip(names, ("lo", "=lo", "lo"), strict=True))
    monkeypatch.setattr(interfaces, "address_towards", {"10.0.0.9": "10.0.0.5", "203.0.113.9": "203.0.113.1"}.get)
    assert group_settings("10.0.0.9", HOST) == {gloo: "eth0", nccl: "=eth0", nvshmem: "eth0"}
    assert group_settings("203.0.113.9", HOST) == {}


def test_one_interface_needs_no_setting() -> None:
    assert ucx_settings(["10.0.0.5"], [DATA]) == FIREWALLS
    assert ucx_settings(["10.0.0.5"], [DATA], "20000-20999") == {**FIREWALLS, "UCX_TCP_PORT_RANGE": "20000-20999"}


def test_loopback_is_found_here() -> None:
    here = {interface.name: interface for interface in interfaces_here()}
    assert "127.0.0.1" in here["lo"].addresses
    assert {name for _, name in socket.if_nameindex()} >= set(here)
    assert not any(address.startswith("fe80") for found in here.values() for address in found.addresses)


NO_WAY = ("10.1.0.5/24", "10.2.0.5/24")  # each host's second network ends there
SAME = ("192.168.122.1/24", "192.168.122.1/24")  # as for virtual machines


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("addresses", "others", "route"),
    [
        (("10.77.0.1", "10.77.0.2"), NO_WAY, "10.77.0.254"),
        (("10.77.0.1", "10.77.0.2"), SAME, ""),
        (("fd77::1", "fd77::2"), SAME, ""),
    ],
    ids=["no way", "same address", "IPv6"],
)
def test_hosts_with_other_networks_exchange_kv(
    addresses: tuple[str, str], others: tuple[str, str], route: str, tmp_path: Path
) -> None:
    first, second = (f"{address}/{64 if ':' in address else 24}" for address in addresses)
    with two_hosts((first, second), others, route):
        by_itself, ours = transfers(tmp_path, [("", ""), addresses])
    assert by_itself == {"nixlBackendError"}, "as UCX does"
    assert ours == {"written", "read"}


async def test_what_killed_tests_have_left_is_removed_before_hosts_are_added() -> None:
    """Their namespace, and what runs there."""
    tests = await asyncio.create_subprocess_exec("true")
    await tests.wait()
    left, host = f"pd{tests.pid}", f"{NAME}-host"
    try:
        ip(f"netns add {left}")
        orphan = await asyncio.create_subprocess_exec("ip", "netns", "exec", left, "sleep", "600")
        await until(lambda: str(orphan.pid) in ip(f"netns pids {left}").split(), "it runs there")
        add_hosts(host)
        assert await asyncio.wait_for(orphan.wait(), DEADLINE_S) == -signal.SIGKILL
        names = {line.split()[0] for line in ip("netns list").splitlines()}
        assert host in names and left not in names
    finally:
        remove_hosts([left, host])
