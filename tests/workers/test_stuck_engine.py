"""An engine that does not answer, while its worker does: others take its requests until it answers again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from support_bench import counted
from support_wait import DEADLINE_S, until
from support_workers import LocalWorker, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.types import Role
from workers.engine import EngineLoad
from workers.load import reports

SECTIONS = {"sim": {"speed": 2.0}, "routing": {"remote_prefill_min_tokens": 10_000}}


class Stuck:
    """The engine of a worker takes no step and answers nothing."""

    def __init__(self, worker: LocalWorker) -> None:
        self._engine = cast(Any, worker.agent)._engine
        self._answers = asyncio.Event()

    def __enter__(self) -> None:
        self._load, self._engine._paused = self._engine.load, True
        self._engine.load = self._late

    def __exit__(self, *_: object) -> None:
        self._engine.load, self._engine._paused = self._load, False
        self._engine._wake.set()
        self._answers.set()

    async def _late(self) -> EngineLoad:
        await self._answers.wait()
        return cast(EngineLoad, await self._load())


async def test_requests_of_stuck_engine_go_on_elsewhere(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "ENGINE_STUCK_S", 0.5)
    async with running_workers(redis_server, **SECTIONS) as workers:
        first, second = [await workers.start(Role.DECODE) for _ in range(2)]
        client = await workers.router(decode=2)
        fleet, requests = client.connection.fleet, client.connection.router.requests
        streams = [asyncio.create_task(client.ask([number, 1, 2, 3], 300)) for number in range(10)]
        await until(lambda: sum(view.load.running for view in fleet.workers.values()) == 10, "streams run")
        moved = counted("pd_retries", why="decode_worker_quiet")
        with Stuck(first):
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*streams)
            assert counted("pd_retries", why="decode_worker_quiet") > moved and not requests
            # A report that this busy process was late to read ends the silence for a moment.
            await until(lambda: fleet.is_quiet(first.id) and not fleet.is_quiet(second.id), "only one is quiet")
            await client.ask([11, 1, 2, 3], 8)
        await until(lambda: not fleet.is_quiet(first.id), "it answers again")
        with Stuck(second):
            await client.ask([12, 1, 2, 3], 8)
        assert not first.task.done() and not second.task.done()
