"""Log levels set while a fleet runs, against a real server."""

import asyncio
import logging

import pytest
from support_redis import fresh_namespace
from support_wait import until

from orchestrator.store.keys import LEVELS_S
from orchestrator.store.operator.log_levels import CONFIGURED, LogLevels, follow_log_level


@pytest.fixture
def levels(redis):
    return LogLevels(redis, fresh_namespace())


async def test_level_for_all_replaces_single_levels(levels):
    assert await levels.of("decode-0") == [None, None]
    await levels.set("WARNING")
    await levels.set("DEBUG", "decode-0")
    assert [await levels.of(name) for name in ("decode-0", "decode-1")] == [["DEBUG", "WARNING"], [None, "WARNING"]]
    await levels.set(None, "decode-0")
    assert await levels.of("decode-0") == [CONFIGURED, "WARNING"], "alone"
    await levels.set("DEBUG", "decode-0")
    await levels.set(None)
    assert await levels.of("decode-0") == [None, None]


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


@pytest.mark.parametrize("model", [0, 1])
async def test_a_process_of_several_models_logs_as_configured_once_that_is_set_for_it(redis, monkeypatch, model):
    """Whichever model's name was given, with a level of all processes of the other."""
    monkeypatch.setattr("orchestrator.store.operator.log_levels._EVERY_S", 0.01)
    logger, models = logging.Logger("test", logging.INFO), [LogLevels(redis, fresh_namespace()) for _ in range(2)]
    following = asyncio.create_task(follow_log_level(models, "frontend-0", logger))
    try:
        await models[1 - model].set("DEBUG")
        await until(lambda: logger.level == logging.DEBUG)
        await models[model].set(None, "frontend-0")
        await until(lambda: logger.level == logging.INFO, timeout_s=LEVELS_S / 4)  # before that of all expires
    finally:
        following.cancel()
