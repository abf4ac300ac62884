"""What a launcher does while it looks for a model, which may take minutes."""

import asyncio
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from support_wait import DEADLINE_S, until

from orchestrator.config.settings import parse_config
from orchestrator.launch.host.fork_servers import ForkServers
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.launch.pools import builder
from orchestrator.launch.pools.builder import ModelBuilder


def test_a_launcher_that_ends_does_not_wait_for_a_model_that_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    looked, found = threading.Event(), threading.Event()

    def locate_model(*_: object) -> str:
        looked.set()
        found.wait()
        return "demo"

    monkeypatch.setattr(builder, "locate_model", locate_model)
    config = parse_config({"model": "demo", "engine": "sim"})

    async def main() -> None:
        made = ModelBuilder({"": config}, RunFolder("a"), Mock(), Mock(), "redis://h:1", 1, ForkServers())
        preparing = asyncio.ensure_future(made._prepare("", Mock(remote=True), config, 1))
        await until(looked.is_set)
        preparing.cancel()

    late = threading.Timer(DEADLINE_S, found.set)
    late.start()
    try:
        asyncio.run(main())
        assert not found.is_set()
    finally:
        late.cancel()
        found.set()
