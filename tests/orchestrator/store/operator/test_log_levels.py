"""Log levels set while a fleet runs, against a real server."""

import asyncio
import logging

import pytest
from support_redis import fresh_namespace
from support_wait import until

from orchestrator.store.operator.log_levels import LogLevels, follow_log_level


@pytest.fixture
def levels(redis):
    return LogLevels(redis, fresh_namespace())


async def test_level_for_all_replaces_single_levels(levels):
    assert await levels.of("decode-0") is None
    await levels.set("WARNING")
    await levels.set("DEBUG", "decode-0")
    assert [await levels.of(name) for name in ("decode-0", "decode-1")] == ["DEBUG", "WARNING"]
    await levels.set(None, "decode-0")
    assert [await levels.of(name) for name in ("decode-0", "decode-1")] == [None, "WARNING"], "as configured, alone"
    await levels.set("DEBUG", "decode-0")
    await levels.set(None)
    assert await levels.of("decode-0") is None


async def test_a_logger_follows_and_gets_its_own_level_back(levels, monkeypatch):
    monkeypatch.setattr("orchestrator.store.operator.log_levels._EVERY_S", 0.01)
    logger = logging.Logger("test", logging.INFO)
    following = asyncio.create_task(follow_log_level([levels], "decode-0", logger))
    try:
        for wanted, level in (("DEBUG", logging.DEBUG), ("NONSENSE", logging.DEBUG), ("ERROR", logging.ERROR)):
            await levels.set(wanted, "decode-0")
            await until(lambda level=level: logger.level == level)
        await levels.set(None)
        await until(lambda: logger.level == logging.INFO)
        assert not following.done()
    finally:
        following.cancel()
