"""For all tests: a run folder and environment of their own, so that a fleet of the same user is not seen or touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Nothing in the suite needs a hub; a test that would ask one fails at once instead of after retries. Here, because the
# hub's client reads this once, when the first module that imports it is collected.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder() -> Iterator[Path]:
    # Short: sockets lie in it, and a socket's whole path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pd-"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder, ignore_errors=True)
