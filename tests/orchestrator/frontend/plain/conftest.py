"""vLLM's app as a frontend serves it, made once: vLLM's metrics are registered once in a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest_asyncio

if TYPE_CHECKING:
    from support_served import Served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    from support_served import serving

    async with serving() as server:
        yield server
