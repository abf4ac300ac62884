"""Simulated engines for each test, of which nothing may be left reserved at its end."""

from collections.abc import AsyncIterator

import pytest
from support_sim import SimFixture


@pytest.fixture
async def sims() -> AsyncIterator[SimFixture]:
    fixture = SimFixture()
    yield fixture
    try:
        await fixture.assert_no_leaks()
    finally:
        await fixture.close()
