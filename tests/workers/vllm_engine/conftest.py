"""One tiny model for all tests of this folder that start a plain engine, such an engine for the tests of a file, and
the source of the next version of vLLM."""

import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support_vllm import Driver, tiny_model

NEXT = "0.33.0"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(model: Path) -> AsyncIterator[Driver]:
    """An engine without prefix caching, which always computes everything itself."""
    engine = await Driver.start(model, name="reference", enable_prefix_caching=False)
    yield engine
    await engine.stop()


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of the next version's wheel, which need no GPU to be read."""
    if not os.environ.get("CI") and not os.environ.get("PD_TEST_NEXT_VLLM"):
        pytest.skip("downloads a wheel of 340 MB: runs in CI, and with PD_TEST_NEXT_VLLM=1")
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), f"vllm=={NEXT}"], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    return folder
