"""One tiny model for all tests of this folder that start a plain engine."""

from pathlib import Path

import pytest
from support_vllm import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")
