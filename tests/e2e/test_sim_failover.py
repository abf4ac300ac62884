"""A whole fleet whose Redis fails over: a primary, its replica and a Sentinel, and streaming load meanwhile."""

import asyncio
from pathlib import Path

import pytest
from support_client import LONG_STEPS
from support_fleet import RunningFleet, running_fleet, token_prompt
from support_servers import SERVICE, Node, Start, nodes, watched_pair
from support_wait import until

from orchestrator.store.client import RedisAway, connect
from orchestrator.store.keys import Keys

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(40)]
MAX_TOKENS = 30


async def keys_left(replica: Node, namespace: str) -> list[bytes]:
    """Jobs and claims that nobody has."""
    async with await connect(f"redis://{replica.address}", 5.0) as redis:
        prefix = Keys(namespace).prefix
        found = [await redis.execute_command("KEYS", f"{prefix}{kind}:*") for kind in ("job", "claims")]
        return [key for part in found for key in part]


async def test_no_request_fails_and_no_job_with_a_client_is_lost(tmp_path: Path) -> None:
    with nodes(tmp_path) as start:
        await served_through_a_fail_over(start)


async def served_through_a_fail_over(start: Start) -> None:
    primary, replica, sentinel = await watched_pair(start)
    url = f"redis+sentinel://{sentinel.address}/{SERVICE}"
    sets = (f"redis.url={url}", "redis.timeout_s=1", "routing.remote_prefill_min_tokens=100")
    with running_fleet("sim-2p2d.yaml", *sets, LONG_STEPS, "workers.engine_args.enable_prefix_caching=false") as fleet:
        truth = [answer.tokens for answer in await fleet.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS)]
        async with fleet.under_load(PROMPTS, concurrency=16, max_tokens=MAX_TOKENS) as answers:
            await more(fleet, answers, 40)
            primary.kill()
            await until(lambda: is_primary(replica), "the Sentinel has promoted the replica")
            await fleet.soon(lambda: fleet.metric("pd_queue_reachable") == 1, "the replica serves the fleet")
            remote = fleet.metric("pd_placements_total", decision="remote")
            await fleet.soon(lambda: fleet.metric("pd_placements_total", decision="remote") > remote, "prefills queue")
            await more(fleet, answers, 40)
        assert [(a.status, a.error) for a in answers if not a.ok] == []
        assert all(answer.tokens == truth[PROMPTS.index(answer.prompt)] for answer in answers), (
            "an answer is another, or not whole"
        )
        fleet.assert_no_leaks()
        await asyncio.to_thread(fleet.cli, "scale", "prefill=1", "decode=3")
        await fleet.soon(lambda: fleet.shape() == (1, 3), "orders reach the workers")
        assert await keys_left(replica, fleet.namespace) == []


async def is_primary(node: Node) -> bool:
    redis = await node.client()
    try:
        return bool((await redis.info("replication"))["role"] == "master")
    except RedisAway:
        return False  # it ends its connections when it is promoted
    finally:
        await redis.aclose()


async def more(fleet: RunningFleet, answers: list[object], count: int) -> None:
    wanted = len(answers) + count
    await fleet.soon(lambda: len(answers) >= wanted, f"{count} more answers")
