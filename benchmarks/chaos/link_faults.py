"""Faults of links between workers, frontends and Redis: packets are lost, or late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from benchmarks.chaos.fleets import MACHINES, NetworkFleet
from benchmarks.chaos.world import World

Make = Callable[[World], Awaitable[None]]

CUT_S = (1.0, 8.0)  # shorter and longer than any heartbeat
SLOW_S = 5.0


def _on(world: World) -> NetworkFleet:
    assert isinstance(world.fleet, NetworkFleet)
    return world.fleet


async def _mended_after(fleet: NetworkFleet, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        fleet.network.mend()


def cut(one: str, other: str, forth: bool = True, back: bool = True) -> Make:
    """Cut the link between two machines: `forth` from `one` to `other`, `back` the other way. `one` and `other` are
    "redis", "frontend", "prefill" or "decode"; of several workers a random one is taken."""

    async def make(world: World) -> None:
        fleet = _on(world)
        source, target = (world.random.choice(fleet.machines_of(kind)) for kind in (one, other))
        if forth:
            fleet.network.cut(source, target)
        if back:
            fleet.network.cut(target, source)
        await _mended_after(fleet, world.random.uniform(*CUT_S))

    return make


def requests_cut(kind: str) -> Make:
    """Cut the connections by which a frontend sends requests to a random worker of this kind, and gets its outputs; the
    worker's load reports still arrive."""

    async def make(world: World) -> None:
        fleet = _on(world)
        victim = world.random.choice(fleet.machines_of(kind))
        worker = (await world.reports.workers())[victim]
        port = urlsplit(worker.request_address).port
        assert port is not None
        fleet.network.cut("frontend", victim, ("dport", port))
        fleet.network.cut(victim, "frontend", ("sport", port))
        await _mended_after(fleet, world.random.uniform(*CUT_S))

    return make


def cut_off(kind: str) -> Make:
    """Cut all links of a random worker of this kind, to Redis too."""

    async def make(world: World) -> None:
        fleet = _on(world)
        victim = world.random.choice(fleet.machines_of(kind))
        for other in MACHINES:
            if other != victim:
                fleet.network.cut(victim, other)
                fleet.network.cut(other, victim)
        await _mended_after(fleet, world.random.uniform(*CUT_S))

    return make


def slow(kind: str) -> Make:
    """Slow all links of a random worker of this kind."""

    async def make(world: World) -> None:
        fleet = _on(world)
        fleet.network.slow(world.random.choice(fleet.machines_of(kind)))
        await _mended_after(fleet, SLOW_S)

    return make
