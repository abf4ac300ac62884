"""The files of the function libraries: each is Lua by itself, so that an editor or a linter can read it."""

from importlib import resources
from pathlib import Path

import pytest

from orchestrator.store.client import Redis

LUA = Path(str(resources.files("orchestrator.store"))) / "lua"


@pytest.mark.parametrize("file", sorted(LUA.rglob("*.lua")), ids=lambda file: f"{file.parent.name}/{file.name}")
async def test_each_file_is_valid_by_itself(redis: Redis, file: Path) -> None:
    text = "".join(line for line in file.read_text().splitlines(keepends=True) if not line.startswith("#!"))
    why = await redis.execute_command("EVAL", "local _, why = loadstring(ARGV[1]) return why or 'sound'", 0, text)
    assert why == b"sound"
