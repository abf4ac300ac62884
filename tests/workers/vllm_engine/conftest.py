"""One tiny model for all tests of this folder that start a plain engine, and such an engine for the tests of a file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support_vllm import Driver, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(model: Path) -> AsyncIterator[Driver]:
    """An engine without prefix caching, which always computes everything itself."""
    engine = await Driver.start(model, name="reference", enable_prefix_caching=False)
    yield engine
    await engine.stop()
