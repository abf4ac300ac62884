"""A simulated machine for each process of a fleet: network namespaces (Linux, root) around one that forwards packets.

So a link can be cut as by a switch or a cable: packets are lost, in one direction or both, without an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SLOW = "tbf rate 2mbit burst 16kb latency 1000ms"  # a fifth of a second for the reports of one


class Network:
    """A network of the machines `names`, all of which this process reaches. Call `close` at the end."""

    def __init__(self, names: Sequence[str], subnet: str = "10.213") -> None:
        """`subnet`: the first two bytes of all addresses. Raises OSError, subprocess.CalledProcessError if this process
        may not make namespaces."""
        self._subnet = subnet
        self._prefix = f"pd{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._cut: set[tuple[str, str, tuple[str, int] | None]] = set()
        _delete_those_of_dead_processes()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _run("ip", "netns", "exec", self._switch, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self._plug(0, None)
        # A network that was deleted just now may still have its link: the kernel ends it later, and its route with it.
        route = f"{self._subnet}.0.0/16", "via", f"{self._subnet}.0.1", "dev", f"{self._prefix}m0"
        _ip("route", "replace", *route)
        for name, number in self._numbers.items():
            _ip("netns", "add", self._machine(name))
            self._plug(number, self._machine(name))
            _ip("-n", self._machine(name), "link", "set", "lo", "up")
            _ip("-n", self._machine(name), "route", "add", "default", "via", f"{self._subnet}.{number}.1")

    def _plug(self, number: int, machine: str | None) -> None:
        """Make a link from the switch to a machine, or to this process's own namespace."""
        here, there = f"{self._prefix}s{number}", f"{self._prefix}m{number}"
        place = ["netns", machine] if machine is not None else []
        inside = ["-n", machine] if machine is not None else []
        _ip("link", "add", here, "netns", self._switch, "type", "veth", "peer", "name", there, *place)
        for where, device, last in ((["-n", self._switch], here, 1), (inside, there, 2)):
            _ip(*where, "addr", "add", f"{self._subnet}.{number}.{last}/30", "dev", device)
            _ip(*where, "link", "set", device, "up")

    def _machine(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        return f"{self._subnet}.{self._numbers[name]}.2"

    def command(self, name: str) -> list[str]:
        """The prefix of a command that runs on that machine."""
        return ["ip", "netns", "exec", self._machine(name)]

    def cut(self, source: str, target: str, at: tuple[str, int] | None = None) -> None:
        """Drop all packets from one machine to the other. `at`: only those of the connections to this port, "dport"
        where the target listens at it, "sport" where the source does."""
        self._cut.add((source, target, at))
        self._rule("add", source, target, at)

    def slow(self, name: str) -> None:
        """Slow all links of a machine, both ways."""
        number = self._numbers[name]
        for machine, device in self._ends(name, number):
            _run("tc", "-n", machine, "qdisc", "add", "dev", device, "root", *_SLOW.split())

    def mend(self) -> None:
        """Restore every link that was cut or slow."""
        for source, target, at in self._cut:
            self._rule("del", source, target, at)
        self._cut.clear()
        for name, number in self._numbers.items():
            for machine, device in self._ends(name, number):
                with contextlib.suppress(subprocess.CalledProcessError):  # it was not slow
                    _run("tc", "-n", machine, "qdisc", "del", "dev", device, "root")

    def _ends(self, name: str, number: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self._switch, f"{self._prefix}s{number}"), (self._machine(name), f"{self._prefix}m{number}")

    def _rule(self, verb: str, source: str, target: str, at: tuple[str, int] | None) -> None:
        towards = ["from", self.address(source), "to", self.address(target)]
        if at is not None:
            towards += ["ipproto", "tcp", at[0], str(at[1])]
        _ip("-n", self._switch, "rule", verb, *towards, "blackhole")

    def close(self) -> None:
        """Delete the namespaces, and with them their links."""
        for name in [*(self._machine(name) for name in self._numbers), self._switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _delete_those_of_dead_processes() -> None:
    """Delete the networks of processes that were killed: their routes would be in the way of a new one."""
    for name in _ip("netns", "list").split():
        made_by = re.match(r"pd(\d+)-", name)
        if made_by is not None and not Path(f"/proc/{made_by[1]}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another process deletes it too
                _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    """Run it, and return its standard output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
