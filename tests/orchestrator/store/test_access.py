"""A Redis user with the least rights: what it may do is what the fleet uses, and nothing else."""

import re

import pytest
from support_acl import add_user, documented_rule
from support_redis import claim_head, job
from support_steering import claim_ids, set_desired

from orchestrator.store.client import RedisAway, connect
from orchestrator.store.keys import QUEUE, REGISTRY
from orchestrator.store.operator.shown import peek, show
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import Role

# What the Python code sends by itself; the rest is called by the functions.
SENT = {"ping", "info", "fcall", "function|load", "subscribe", "hget", "hgetall", "mget"}


def test_documented_acl_allows_only_used_commands():
    functions = QUEUE.text + REGISTRY.text
    called = {name.lower() for name in re.findall(r"(?:call|try)\('([A-Z]+)'", functions)}
    allowed = {word[1:] for word in documented_rule("n", "p") if word.startswith("+")}
    assert allowed == SENT | called


@pytest.fixture
async def fleet(server):
    admin = await connect(server.url, 5.0)
    await add_user(admin, "mine", "secret")
    client = await connect(server.url.replace("redis://", "redis://fleet:secret@"), 5.0)
    yield client
    await client.aclose()
    await admin.execute_command("ACL DELUSER", "fleet")
    await admin.aclose()


async def test_queue_and_registry_work_under_acl(fleet):
    queue, registry = PrefillQueue(fleet, "mine", max_deliveries=1), Registry(fleet, "mine")
    await registry.refresh_frontend(Frontend("f1", "http://h", "1", mesh_key="k1"), 5.0)
    assert await registry.frontends_of(["k0", "k1"]) == {"k1": "f1"}
    await set_desired(registry, 1, 1, "test")
    assert await claim_ids(registry, "l", Role.PREFILL) == ["worker-0"]
    assert (await registry.desired()).prefill == 1 and list(await registry.frontends()) == ["f1"]
    for name in ("a", "b", "c"):
        await queue.enqueue(job(name))
    claims = await claim_head(queue, "w", 10_000, 2)
    assert [claim.job.request_id for claim in claims] == ["a", "b"]
    assert await queue.renew("w", ["a"]) == [] and await queue.ack("w", "a", 1) and await queue.release("w", "b", 1)
    assert await queue.cancel("c", 1) == "waiting"
    await queue.sweep()
    assert (await queue.depth()).requests == 1 and await peek(queue, 5) and await show(queue, "b")
    await registry.leave_frontend("f1")


@pytest.mark.parametrize(
    "command",
    [
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG GET", "*"),
        ("EVAL", "return 1", 0),
        ("FUNCTION DELETE", "x"),
        ("ACL LIST",),
        ("GET", "pd:{other}:queue"),
        ("PUBLISH", "pd:{other}:events", "x"),
        ("FCALL", QUEUE.function("depth"), 1, "pd:{other}:"),
    ],
    ids=lambda command: command[0],
)
async def test_acl_allows_nothing_else(fleet, command):
    await PrefillQueue(fleet, "mine").depth()  # the functions are there
    with pytest.raises(RedisAway, match="permission|NOPERM|No permissions"):
        await fleet.execute_command(*command)
