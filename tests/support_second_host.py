"""A second host, in a network namespace of its own, and workers that are started there by hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support_fleet import ROOT, RunningFleet
from support_namespaces import NAME, add_hosts, ip, remove_hosts
from support_servers import nodes
from support_wait import DEADLINE_S

from orchestrator.process.parent import EXIT_AGAIN

HERE, THERE = "10.213.7.1", "10.213.7.2"


def cut(away: bool) -> None:
    """Packets between the two hosts are dropped, or pass again. Nobody is told."""
    ip(f"-n {NAME} link set {NAME}b {'down' if away else 'up'}")


@contextlib.contextmanager
def running_second_host() -> Iterator[list[str]]:
    """The beginning of a command that runs there."""
    try:
        add_hosts(NAME)
        ip(f"link add {NAME}a type veth peer name {NAME}b netns {NAME}")
        ip(f"addr add {HERE}/24 dev {NAME}a")
        ip(f"link set {NAME}a up")
        ip(f"-n {NAME} addr add {THERE}/24 dev {NAME}b")
        ip(f"-n {NAME} link set {NAME}b up")
        ip(f"-n {NAME} link set lo up")
        yield ["ip", "netns", "exec", NAME]
    finally:
        remove_hosts([NAME])


@contextlib.contextmanager
def redis_between(folder: Path) -> Iterator[str]:
    """A server that both hosts reach."""
    with nodes(folder) as start:
        node = start("--bind", "127.0.0.1", HERE, "--requirepass", "a-secret")
        yield f"redis://:a-secret@{HERE}:{node.port}"


class HandWorker:
    """A worker as a service manager would run it, by the fleet's token; `host`: the beginning of its commands."""

    def __init__(self, fleet: RunningFleet, name: str, host: list[str], *options: str, role: str = "decode") -> None:
        told = fleet.cli("join").stdout
        assert told.startswith("PD_JOIN=") and "orchestrator worker --role decode" in told
        self.name = name
        self._environment = {**os.environ, "PD_JOIN": told.split()[0].removeprefix("PD_JOIN=")}
        self._command = [*host, sys.executable, "-m", "orchestrator.cli.main", "worker", "--role", role]
        self._command += ["--id", name, *options]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, cwd=ROOT, env=self._environment)

    def until_joined(self, fleet: RunningFleet, within_s: float = DEADLINE_S) -> None:
        def joined() -> bool:
            if self.process.poll() == EXIT_AGAIN:  # Redis was too slow for it, say
                self.start()
            return self.name in {worker["id"] for worker in fleet.workers()}

        fleet.until(joined, "it has joined", within_s)

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self, *others: HandWorker) -> None:
        """With the others of its group, for which it waits when it leaves."""
        for worker in (self, *others):
            if worker.process.poll() is None:
                worker.process.terminate()
        for worker in (self, *others):
            worker.exit_code()
