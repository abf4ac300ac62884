"""Faults of frontends and of the launcher: their own clients lose their connections, and nobody else loses anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from datetime import datetime

import psutil
from support_fleet import RunningFleet, descendants

from benchmarks.chaos.load import judge
from benchmarks.chaos.reports import NotSeen
from benchmarks.chaos.world import GONE_TIMEOUT_S, HEAL_TIMEOUT_S, World
from orchestrator.process.parent import local_pid, started_ticks
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.registry import Frontend, Registry

STOPPED_S = 5.5
LONG_ANSWERS, LONG_TOKENS, LONG_RUNNING_S = 12, 1500, 1.0
SETTLED_S = 4.0  # by then workers have ended what a dead frontend had there, or do not
_POLL_S = 0.05


async def killed(world: World, *beside: int) -> None:
    """One of several, in the middle of long answers, and the processes `beside` it. Over when another serves in its
    place."""
    victim = await _one_that_works(world)
    async with _long_answers(world):
        world.load.forgive(world.client_ports(_pid(victim)))
        began = datetime.now()
        world.kill(_pid(victim), *beside)
        await asyncio.sleep(SETTLED_S)
    deadline = time.monotonic() + HEAL_TIMEOUT_S
    while len([seen for seen in await _serving(world) if _pid(seen) != _pid(victim)]) < world.frontends:
        if time.monotonic() > deadline:
            raise NotSeen(f"no frontend came in place of {victim.id} within {HEAL_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)
    world.seen.gone_s.append(_last_aborted_s(world.launched, victim.id, began))


@contextlib.asynccontextmanager
async def _long_answers(world: World) -> AsyncIterator[None]:
    """Answers that last longer than the load's, which end before a frontend counts as gone. Outcomes are ignored."""
    async with world.fleet.client() as client:
        asked = [
            asyncio.create_task(world.fleet.ask(client, prompt, LONG_TOKENS))
            for prompt in world.questions.prompts[:LONG_ANSWERS]
        ]
        try:
            await asyncio.sleep(LONG_RUNNING_S)
            yield
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def _last_aborted_s(fleet: RunningFleet, frontend_id: str, began: datetime) -> float:
    """Seconds from `began` until the last worker ended that frontend's requests, by the workers' logs. Raises NotSeen.

    A worker's reports do not show it: they name a frontend without requests there for up to ten seconds more.
    """
    line = re.compile(rf"(\d{{4}}-\d\d-\d\d \S+) .* frontend {re.escape(frontend_id)}(, which is gone| .* gave up \d+)")
    said = [datetime.fromisoformat(found[1]) for text in fleet.process_lines() if (found := line.search(text))]
    if not said:
        raise NotSeen(f"no worker had work of frontend {frontend_id}, which was killed")
    return max((at - began).total_seconds() for at in said)


async def stopped(world: World) -> None:
    """Stop a frontend for a while: its own clients wait, and get the rest of their answers."""
    await world.stop(STOPPED_S, _pid(await _one_that_works(world)))


def _pid(frontend: Frontend) -> int:
    pid = local_pid(frontend.process)
    assert pid is not None, f"{frontend.id} runs on another machine"
    return pid


async def _serving(world: World) -> list[Frontend]:
    redis = await connect(world.redis_url, 5.0)
    try:
        return [seen for seen in (await Registry(redis, world.fleet.namespace).frontends()).values() if seen.url]
    except RedisAway:
        return []
    finally:
        await redis.aclose()


async def _one_that_works(world: World) -> Frontend:
    """One that clients are connected to."""
    serving = await _serving(world)
    return max(serving, key=lambda seen: (len(world.client_ports(_pid(seen))), world.random.random()))


async def launcher_killed(world: World, *beside: int) -> None:
    """Everything that it started ends with it, and another `up` of the same name takes over. `beside`: processes of its
    that are killed with it."""
    fleet = world.launched
    family = [psutil.Process(pid) for pid in descendants(fleet.process.pid)]
    ports = set().union(*(world.client_ports(process.pid) for process in family))
    world.load.forgive(ports)
    world.load.stop()
    engines = [process for process in family if "workers.main" in " ".join(process.cmdline())]
    world.kill(*beside)
    os.kill(fleet.process.pid, signal.SIGKILL)
    fleet.process.wait()
    began = time.monotonic()
    # Not by psutil, for which a process also runs after its end, until somebody has asked how it ended.
    while any(started_ticks(engine.pid) is not None for engine in engines):
        if time.monotonic() - began > GONE_TIMEOUT_S:
            raise NotSeen(f"workers of the launcher that was killed run on after {GONE_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)
    world.seen.gone_s.append(time.monotonic() - began)
    await world.load.end()  # their connections are gone
    fleet.http.close()
    await asyncio.to_thread(world.take_over)
    async with world.fleet.client() as client:
        for prompt, truth in zip(world.questions.prompts, world.questions.truth, strict=True):
            answer = await world.fleet.ask(client, prompt, len(truth))
            world.seen.answers += 1
            judge(world.seen, answer, truth)
