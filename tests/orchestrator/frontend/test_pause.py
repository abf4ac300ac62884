"""What a pause waits for: the queue as it is by then, and where it drops the caches prompts and KV."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from orchestrator.frontend.pause import PauseCalls, moves_kv
from orchestrator.types import PauseState, QueueDepth, Role, WorkerLoad

IDLE = WorkerLoad("w", 1, blocks_total=100, blocks_free=100, running=0, waiting=0, waiting_tokens=0, step_ms=1.0)


@pytest.mark.parametrize(
    ("role", "said", "waits"),
    [
        (Role.DECODE, {"running": 3, "blocks_free": 40, "decodes": 3}, False),
        (Role.DECODE, {"waiting": 1, "decodes": 1}, True),
        (Role.PREFILL, {}, False),
        (Role.PREFILL, {"running": 1, "blocks_free": 90}, True),
        (Role.PREFILL, {"blocks_free": 90}, True),
        # It was a decode worker, and its answers need not end.
        (Role.PREFILL, {"running": 3, "blocks_free": 40, "decodes": 3}, False),
        (Role.PREFILL, {"running": 4, "blocks_free": 40, "decodes": 3}, True),
        (Role.PREFILL, {"running": 3, "waiting": 1, "blocks_free": 40, "decodes": 4}, True),
    ],
)
def test_it_waits_for_prompts_and_kv_and_not_for_answers(role, said, waits):
    assert moves_kv(role, msgspec.structs.replace(IDLE, **said)) is waits


class QueueOfOthers:
    """Another frontend has enqueued a job since the last poll."""

    depth = QueueDepth(0, 0, 0)

    async def look(self):
        self.depth = QueueDepth(1, 100, 0)


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_jobs_count_that_others_have_enqueued_since_the_last_poll(mode):
    told = SimpleNamespace(state=PauseState(), active=True)
    fleet, queue = SimpleNamespace(pause=told, workers={}), QueueOfOthers()

    async def call(name, state):
        told.state = PauseState(*state)

    pause = PauseCalls(fleet, SimpleNamespace(call=call), SimpleNamespace(requests={}), queue)
    begins = asyncio.create_task(pause.begin(mode, clear_cache=True))
    await asyncio.wait({begins}, timeout=0.2)
    assert not begins.done() and not told.state.engines
    queue.depth = QueueDepth(0, 0, 0)
    await begins
    assert told.state.engines
