"""vLLM's app as a frontend serves it, made once: vLLM's metrics are registered once in a process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from support_served import Served

_ENVIRONMENT: dict[str, str] = {}  # what making it has set


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    from support_served import serving

    before = dict(os.environ)
    async with serving() as server:
        for name, value in os.environ.items() - before.items():
            _ENVIRONMENT[name] = value
            del os.environ[name]
        os.environ |= before
        yield server


@pytest.fixture(autouse=True)
def environment_of_the_frontend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts as long as the process, and files that are tested after these must not have its variables."""
    if "served" in request.fixturenames:
        request.getfixturevalue("served")
        for name, value in _ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
