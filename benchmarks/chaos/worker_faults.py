"""Faults of workers: they are killed or stopped in some phase of their work, or a request crashes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import psutil

from benchmarks.chaos.load import lost
from benchmarks.chaos.world import World
from orchestrator.types import Role

Make = Callable[[World], Awaitable[None]]

STOPPED_S = 5.5  # longer than `workers.timeout_s`: frontends give the worker up, and it comes back
POISON = 7  # a token id that is in no other prompt; `PD_SIM_CRASH_TOKEN`
POISON_TIMEOUT_S = 60.0
RANK, ENGINE = "Worker_TP", "EngineCore"  # in the command lines of vLLM's ranks and engines
ENGINE_STOPPED_S = 15.0


def killed(role: Role, phase: str) -> Make:
    async def make(world: World) -> None:
        world.kill((await world.caught(role, phase)).pid)

    return make


def stopped(role: Role, phase: str) -> Make:
    async def make(world: World) -> None:
        await world.stop(STOPPED_S, (await world.caught(role, phase)).pid)

    return make


async def all_prefill_killed(world: World) -> None:
    world.kill(*world.pids(Role.PREFILL))


async def all_prefill_stopped(world: World) -> None:
    await world.stop(STOPPED_S, *world.pids(Role.PREFILL))


async def rank_killed(world: World) -> None:
    """Kill one rank of a decode engine while it decodes. Its agent has to notice, and to leave."""
    agent = (await world.caught(Role.DECODE, "decoding")).pid
    ranks = [child for child in psutil.Process(agent).children(recursive=True) if RANK in " ".join(child.cmdline())]
    victim = world.random.choice(ranks)
    world.kill(victim.pid)
    world.note_victim(agent)


async def engine_stopped(world: World) -> None:
    """Freeze the engine of a decode worker while it decodes, and not its agent, as a GPU that hangs would. Raises
    AssertionError if the worker has no engine process."""
    agent = (await world.caught(Role.DECODE, "decoding")).pid
    engines = [child for child in psutil.Process(agent).children() if ENGINE in " ".join(child.cmdline())]
    assert engines, f"worker {agent} has no child process {ENGINE}"
    await world.stop(ENGINE_STOPPED_S, *(engine.pid for engine in engines))


async def poisoned(world: World) -> None:
    """Send a prompt that crashes its engine. The answer has to be an error, which is not counted. Raises AssertionError
    if it is answered."""
    async with world.fleet.client() as client:
        client.timeout = httpx.Timeout(POISON_TIMEOUT_S)
        answer = await world.fleet.ask(client, [POISON, *world.questions.prompts[0]], 8)
    assert not answer.ok, "the poison request was answered"
    assert not lost(answer), f"the poison request took its connection with it: {answer.error}"
    await asyncio.sleep(0)
