"""What a pause that drops the caches waits for."""

import msgspec
import pytest

from orchestrator.frontend.pause import moves_kv
from orchestrator.types import Role, WorkerLoad

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
