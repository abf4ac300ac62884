"""One embedded Redis for all worker tests; each test has a namespace of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support_redis import RedisOnPort
from support_workers import Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = RedisOnPort()
    folder: Path = tmp_path_factory.mktemp("redis")
    asyncio.run(server.start(folder))
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def workers(redis_server: EmbeddedRedis, request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    """With the SECTIONS of the test's file, if it has some."""
    async with running_workers(redis_server, **getattr(request.module, "SECTIONS", {})) as started:
        yield started
