"""A real Redis for the files of this folder, each with its own; every test has a namespace of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support_redis import Server, running_server

from orchestrator.store.client import Redis, connect


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, which it may stop."""
    with running_server(tmp_path) as server:
        yield server


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    redis = await connect(server.url, 5.0)
    yield redis
    await redis.aclose()
