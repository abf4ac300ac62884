"""Of a group that steps together only requests of the rank that died first may be the cause.

The ranks are processes with simulated engines in lockstep, which die of each other's ends.
"""

from __future__ import annotations

import pytest
from support_wait import until
from support_workers import Workers

from orchestrator.config.simulated import CRASH_TOKEN
from orchestrator.types import Role

pytestmark = pytest.mark.slow  # processes

POISON, RANKS = 666_666, ("d", "d.1")
SECTIONS = {"workers": {"engine_args": {"data_parallel_size": len(RANKS)}, "timeout_s": 4.0}}


@pytest.mark.parametrize("cause", RANKS)
@pytest.mark.parametrize("how", ["poison", "killed"])
async def test_requests_of_the_other_rank_are_no_suspects(
    workers: Workers, cause: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CRASH_TOKEN, str(POISON))
    ranks = {
        name: await workers.spawn(Role.DECODE, f"--ranks={','.join(RANKS)}", name=name, wait=False) for name in RANKS
    }
    for name in RANKS:
        await workers.registered(name)
    frontend, other = await workers.frontend(*ranks.values()), RANKS[cause == RANKS[0]]
    running = frontend.submit(other, [1, 2, 3], 100_000)
    await until(lambda: running.tokens, "that the group steps")
    if how == "poison":
        frontend.submit_to(cause, frontend.new([POISON, 1, 2, 3]))
    else:
        ranks[cause].kill()
    for name in RANKS:
        await ranks[name].stopped()
    said = [None, ""] if how == "poison" else [""]
    await until(lambda: len(frontend.crashes) == len(said), "what died says so")
    assert sorted([crash.suspect for crash in frontend.crashes], key=str) == sorted(said, key=str)
