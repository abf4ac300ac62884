"""A fleet under faults: finds victims, kills or stops them, and decides when the fleet has healed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
from support_client import FleetClient, FleetFailed
from support_fleet import RunningFleet, descendants

from benchmarks.chaos.load import Load, Questions, Seen
from benchmarks.chaos.reports import Reports
from orchestrator.types import Role, WorkerInfo

CATCH_TIMEOUT_S = 30.0
HEAL_TIMEOUT_S = 300.0  # a real engine of two ranks loads for minutes while its fleet serves on two cores
GONE_TIMEOUT_S = 15.0
BURST = 4  # more requests at once than one engine step takes, so that some wait


@dataclass(frozen=True)
class Fault:
    """A row: a fault, and what clients may see of it. `make` returns when the fault is over."""

    name: str
    make: Callable[[World], Awaitable[None]]
    gap_s: float | None  # the longest silence that an answer may have; None: no limit
    fleet: str = "plain"  # which of `fleets.FLEETS`
    gone_s: float | None = None  # until the work of a process that died is gone everywhere
    streams: int = 8
    once: bool = False  # whether each stream asks only one question
    engines: tuple[str, ...] = ("sim", "real")  # with which it can be made


class World:
    """One fleet for many faults, one after the other."""

    def __init__(
        self,
        fleet: FleetClient,
        redis_url: str,
        questions: Questions,
        seed: int,
        start: Callable[[str], RunningFleet] | None,
    ) -> None:
        """`start(namespace)` starts another fleet like this one; None if that is not possible."""
        self.fleet, self.redis_url, self.questions, self._start = fleet, redis_url, questions, start
        self.random = random.Random(seed)
        self.reports = Reports(redis_url, fleet.namespace)
        self.shape = fleet.shape()
        self.frontends = 1
        self.starve_s = 60.0  # how long `host_faults.starved` lasts
        self.spared: set[int] = set()  # pids of workers that are not hit
        self._victims: set[int] = set()  # pids that this fault has killed
        self._load: Load | None = None
        self._seen: Seen | None = None

    @property
    def launched(self) -> RunningFleet:
        """The fleet, of a kind that a launcher runs."""
        assert isinstance(self.fleet, RunningFleet)
        return self.fleet

    @property
    def load(self) -> Load:
        assert self._load is not None, "no fault is being made"
        return self._load

    @property
    def seen(self) -> Seen:
        assert self._seen is not None, "no fault is being made"
        return self._seen

    async def run(self, fault: Fault, seen: Seen) -> None:
        """Make the fault under load, and add what clients saw to `seen`. Raises NotSeen, FleetFailed."""
        self._seen = seen
        asked_at = time.time()
        self._victims.clear()  # earlier victims are gone, and other processes may have their pids now
        async with Load(self.fleet, self.questions, fault.streams, seen, fault.once) as self._load:
            await asyncio.sleep(self.random.uniform(0.3, 0.8))
            began = time.monotonic()
            await fault.make(self)
            await asyncio.to_thread(self.fleet.until, self.healed, fault.name, HEAL_TIMEOUT_S)
            seen.heal_s.append(time.monotonic() - began)
        seen.runs += 1
        seen.queued_s.append(self._queued_s(asked_at))
        try:
            await asyncio.to_thread(self.fleet.assert_no_leaks)
        except FleetFailed as error:
            seen.leaks += 1
            print(error)

    def _queued_s(self, since: float) -> float:
        """The longest wait in the prefill queue of a request that came later, seconds; 0 where no launcher logs it."""
        lines = self.fleet.request_lines() if isinstance(self.fleet, RunningFleet) else []
        waits = [line["queued_ms"] for line in lines if "queued_ms" in line and line["arrived_at"] >= since]
        return max(waits, default=0.0) / 1e3

    def healed(self) -> bool:
        """Whether there are as many workers of each role as at first, none of them a victim, and the queue answers."""
        seen = self.fleet.fleet()
        alive = self._victims.isdisjoint(worker["pid"] for worker in seen["workers"])
        return alive and seen["queue"] is not None and self.fleet.shape() == self.shape

    def take_over(self) -> None:
        """Start the same fleet again after its launcher has died."""
        assert self._start is not None, "nobody can start this fleet again"
        fleet = self._start(self.fleet.namespace)
        self.fleet, self.redis_url = fleet, fleet.redis_url()
        self.reports = Reports(self.redis_url, fleet.namespace)

    def close(self) -> None:
        if isinstance(self.fleet, RunningFleet):
            self.fleet.end()

    # ---- victims -----------------------------------------------------------------------------------------------

    async def caught(self, role: Role, phase: str) -> WorkerInfo:
        """Wait for a worker of that role in that phase, and return it. Raises NotSeen.

        For an idle one clients ask less and less, for the other phases more.
        """
        stir = self.load.ease if phase == "idle" else (lambda: self.load.burst(BURST))
        stir()
        try:
            return await self.reports.caught(role, phase, CATCH_TIMEOUT_S, stir, self.spared)
        finally:
            self.load.resume()

    def pids(self, role: Role) -> list[int]:
        """The pids of this role's workers that take requests."""
        return [int(worker["pid"]) for worker in self.fleet.workers(role.value)]

    def kill(self, *pids: int) -> None:
        """Kill each process and its children."""
        for pid in pids:
            self._victims.add(pid)
            for member in (pid, *descendants(pid)):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)

    def note_victim(self, pid: int) -> None:
        """Record a process that will end because another one was killed."""
        self._victims.add(pid)

    async def stop(self, seconds: float, *pids: int) -> None:
        """Freeze these processes and their children for that long. They may be replaced meanwhile, and be gone."""
        family = [member for pid in pids for member in (pid, *descendants(pid))]
        for member in family:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            for member in family:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGCONT)

    def client_ports(self, pid: int) -> set[int]:
        """The remote ports of a process's TCP connections, its clients' among them."""
        with suppress(psutil.NoSuchProcess):
            return {link.raddr.port for link in psutil.Process(pid).net_connections("tcp") if link.raddr}
        return set()
