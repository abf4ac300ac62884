"""The processes of a unit's ranks: they start together, and once one has ended, all end."""

import asyncio
import os
import signal
import sys
from unittest.mock import AsyncMock

import pytest
from support_wait import DEADLINE_S, until

from orchestrator.launch.host.process import LocalProcess, ProcessGroup, ProcessSpec, group_alive
from orchestrator.process.parent import EXIT_AGAIN

WAITS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('up', flush=True); signal.pause()"


def group(*programs: str) -> tuple[ProcessGroup, list[str]]:
    lines: list[str] = []
    parts = [
        LocalProcess(ProcessSpec(f"d.{rank}", [sys.executable, "-c", program]), lambda name, line: lines.append(name))
        for rank, program in enumerate(programs)
    ]
    return ProcessGroup(parts), lines


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_killed_rank_ends_all(victim: int) -> None:
    ranks, lines = group(WAITS, WAITS, WAITS)
    await ranks.start()
    await until(lambda: len(lines) == 3, "all are up")
    os.kill(ranks.parts[victim].pid, signal.SIGKILL)
    assert await ranks.wait() == -signal.SIGKILL
    assert not ranks.running and not any(group_alive(part.pid) for part in ranks.parts)


@pytest.mark.parametrize("code", [0, EXIT_AGAIN, 3])
async def test_rank_that_ends_first_says_how(code: int) -> None:
    ranks, _ = group(WAITS, f"print('because'); exit({code})")
    await ranks.start()
    assert await ranks.wait() == code
    assert list(ranks.told.last_lines) == ["because"] and not ranks.running


async def test_all_are_stopped_together() -> None:
    ranks, lines = group(WAITS, WAITS)
    await ranks.start()
    await until(lambda: len(lines) == 2, "both are up")
    waiting = asyncio.create_task(ranks.wait())
    await ranks.stop(DEADLINE_S)
    assert await waiting == 0


@pytest.mark.parametrize("error", [OSError("cannot be run"), RuntimeError("cannot be run")])
async def test_none_is_left_when_one_cannot_start(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = group(WAITS, WAITS)
    monkeypatch.setattr(both.parts[1], "start", AsyncMock(side_effect=error))
    with pytest.raises(type(error), match="cannot be run"):
        await both.start()
    assert not both.running
