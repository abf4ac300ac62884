"""Every key in Redis has a time to live: what a fleet leaves behind goes, and nothing of it is in the next one."""

import asyncio
import re
from pathlib import Path

import pytest
from support_redis import claim_head, fresh_namespace, job, keys_of, worker
from support_steering import claim_ids, order_drain, set_desired
from support_wait import until

from orchestrator.process.tasks import cancelled
from orchestrator.store import keys
from orchestrator.store.client import Redis
from orchestrator.store.configuration import Adapter, AdapterList, Rollout, Version
from orchestrator.store.keys import Keys
from orchestrator.store.operator.events import EventLog
from orchestrator.store.operator.log_levels import LogLevels
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import PrefillJob, Role

DOCS = Path(__file__).parents[3] / "docs" / "redis.md"
STEERED = ("desired", "config", "rollout", "noted", "log_levels", "adapters")


async def fleet_begins(redis: Redis, namespace: str) -> None:
    """Everybody who writes to Redis does."""
    registry = Registry(redis, namespace)
    await registry.configuration.write(Version(0, {}))
    assert await registry.rollout.change(None, Rollout(Version(0, {}), Version(1, {})), by_operator=True)
    await claim_ids(registry, "launcher", Role.DECODE)
    assert await registry.claim_id("by-hand:h/1/1", Role.PREFILL, 60, "hand")
    await registry.refresh_frontend(Frontend("f1", "http://h", "1", mesh_key="k"), 60)
    await registry.join(worker("decode-0", Role.DECODE), 60)
    await registry.join(worker("hand"), 60)
    await set_desired(registry, 1, 1)
    await order_drain(registry, "hand")
    await registry.lead("f1", 60)
    await registry._call("prune")
    await LogLevels(redis, namespace).set("DEBUG")
    await EventLog(redis, namespace).note("retried", why="test")
    assert await registry.adapters.change(None, AdapterList(1, {"x": Adapter("x", "/x", 1)}))


async def fleet_works(redis: Redis, namespace: str) -> None:
    queue = PrefillQueue(redis, namespace, max_deliveries=1)
    affine = PrefillJob("affine", 1, 500, 100, 0.0, "f1", b"b", cached={"hand": 400})
    for waiting in (job("done"), job("dropped"), job("cancelled"), job("left", reply_to="nobody"), affine):
        await queue.enqueue(waiting)
    claims = await claim_head(queue, "hand", 10_000, 2)
    assert claims
    await queue.ack("hand", claims[0].job.request_id, 1)
    for claim in claims[1:]:
        await queue.release("hand", claim.job.request_id, 1)
    await queue.cancel("cancelled", 1)
    await queue.sweep()


async def fleet_ends(redis: Redis, namespace: str) -> None:
    registry = Registry(redis, namespace)
    for worker_id in ("decode-0", "hand"):
        await registry.leave(worker_id)
    await registry.leave_frontend("f1")
    for launcher in ("launcher", "by-hand:h/1/1"):
        await registry.leave_launcher(launcher)


async def lives(redis: Redis, namespace: str) -> dict[str, int]:
    """Seconds to live of every key; -1 for one that stays for ever."""
    prefix = Keys(namespace).prefix
    return {name: await redis.ttl(prefix + name) for name in await keys_of(redis, namespace)}


async def test_every_key_has_a_time_to_live_while_a_fleet_runs_and_when_it_has_ended(redis: Redis) -> None:
    namespace, seen = fresh_namespace(), dict[str, int]()
    for step in (fleet_begins, fleet_works, fleet_ends):
        await step(redis, namespace)
        found = await lives(redis, namespace)
        assert {name: life for name, life in found.items() if not 0 <= life <= keys.KEPT_S} == {}, step.__name__
        seen |= found
    told = set(re.findall(r"[a-z_]+", DOCS.read_text().partition("## Keys")[2].partition("\n## ")[0]))
    assert {name.partition(":")[0] for name in seen} <= told, "the list of keys is complete"
    assert {*STEERED} <= seen.keys()
    left = await lives(redis, namespace)
    assert not {name for name in left if name.startswith(("worker:", "frontend:", "launcher:", "claims:"))}


async def test_what_operators_set_stays_while_any_member_lives(redis: Redis) -> None:
    namespace = fresh_namespace()
    registry, prefix = Registry(redis, namespace), Keys(namespace).prefix
    await fleet_begins(redis, namespace)
    for name in STEERED:
        await redis.expire(prefix + name, 5)
    await redis.delete(prefix + "pruned")
    await registry.refresh(worker("decode-0", Role.DECODE), 60)  # a heartbeat
    found = await lives(redis, namespace)
    assert all(found[name] > 5 for name in STEERED), found
    assert found["log_levels"] <= keys.LEVELS_S, "a level of this fleet is not in effect in the next"


SOON_S = 10


@pytest.mark.parametrize(
    ("verb", "kept"),
    [
        ("enqueue", {"job:a", "queue", "queued_tokens"}),
        ("claim", {"leases", "claims:w"}),
        ("renew", {"job:b", "leases", "claims:w"}),
        ("release", {"job:b", "queue", "queued_tokens"}),
        ("sweep", {"leases"}),
        ("sweep of a queue", {"queue", "queued_tokens"}),
        ("wait", {"waiters", "waits_until"}),
        ("told", {"told"}),
    ],
)
async def test_what_a_verb_of_the_queue_holds_lives_on_by_it(redis: Redis, verb: str, kept: set[str]) -> None:
    """A fleet under load calls them over and over. Else its queue would run out under it, an hour after it began."""
    namespace = fresh_namespace()
    await Registry(redis, namespace).refresh_frontend(Frontend("f1", "http://h", "1"), 60)
    queue, prefix = PrefillQueue(redis, namespace, "w"), Keys(namespace).prefix
    if verb in ("renew", "release", "sweep"):
        await queue.enqueue(job("b"))
        assert len(await claim_head(queue, "w", 10_000, 1)) == 1
    elif verb in ("claim", "sweep of a queue"):
        await queue.enqueue(job("b"))
        await queue.enqueue(job("c"))
    waiter = PrefillQueue(redis, namespace, "idle")
    for name in await keys_of(redis, namespace):
        await redis.expire(prefix + name, SOON_S)
    if verb == "enqueue":
        await queue.enqueue(job("a"))
    elif verb == "claim":
        assert len(await claim_head(queue, "w", 10_000, 1)) == 1
    elif verb == "renew":
        assert await queue.renew("w", ["b"]) == []
    elif verb == "release":
        assert await queue.release("w", "b", 1)
    elif verb.startswith("sweep"):
        await queue.sweep()
    else:
        waiting = asyncio.create_task(waiter.wait_for_work(5.0, "idle"))
        await until(lambda: redis.zcard(f"{prefix}waiters"), "it waits")
        if verb == "told":
            await queue.enqueue(job("a"))
        found = await lives(redis, namespace)
        await cancelled(waiting)
        await waiter.aclose()
    found = found if verb in ("wait", "told") else await lives(redis, namespace)
    assert {name for name in kept if found.get(name, 0) <= SOON_S} == set(), found
