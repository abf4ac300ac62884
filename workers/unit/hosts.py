"""The hosts of a group's ranks, and the releases: whether these can be one group, and in which order they become
engines."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping

from orchestrator.config.settings import Config
from orchestrator.wire.messages import PROTOCOL_VERSION


def release_here() -> str:
    """The same for all ranks of a group: they read what others of it write."""
    try:
        engine = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        engine = "none"
    return f"protocol {PROTOCOL_VERSION} with vLLM {engine}"


def other_release(first: str, runs: str, here: str, release: str) -> str | None:
    """Why `here` cannot be in a group whose first rank `runs` this release; None if both have one."""
    if runs == release:
        return None
    return (
        f"{first} runs {runs}, {here} {release}: start all ranks of a group with one release; after an upgrade of one "
        "host, upgrade the others and start their ranks again"
    )


def side_by_side(hosts: Mapping[str, str]) -> list[str]:
    """In this order ranks become engines: those of one host follow each other, since DeepEP takes eight engines in a
    row for those of a host. `hosts`: of all ranks in the order of their ids; the first stays so."""
    in_order = list(hosts.values())
    return sorted(hosts, key=lambda name: in_order.index(hosts[name]))


def refusal(config: Config, hosts: Collection[str]) -> str | None:
    """Why ranks at these addresses cannot be one group; None if they can."""
    hosts = sorted(set(hosts))
    if len(hosts) > 1 and any(":" in host for host in hosts):
        return f"workers.advertise: vLLM's ranks meet over IPv4 only, and these are at {', '.join(hosts)}"
    if len(hosts) > 1 and not config.security.trust_network:
        return (
            f"security.trust_network: the ranks of this group are on several hosts ({', '.join(hosts)}), and whoever "
            "reaches vLLM's ports between them can run programs there; set it to true where nobody else is on that "
            "network"
        )
    return None
