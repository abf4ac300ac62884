"""The list of a fleet's models, and that nothing of one stays that is gone: a real server."""

import msgspec
from support_redis import claim_head, fresh_namespace, job, keys_of, worker
from support_steering import set_desired

from orchestrator.store.configuration import Rollout, Version
from orchestrator.store.operator.events import EventLog
from orchestrator.store.operator.log_levels import LogLevels
from orchestrator.store.operator.models import ListedModel, ModelList, ModelState, ModelStore, forget_namespace
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import Role


async def test_of_two_that_change_the_list_at_once_one_has_to_read_again(redis):
    store = ModelStore(redis, fresh_namespace())
    assert await store.read() is None
    first = ModelList(1, {"a": ListedModel({"model": "demo"})})
    assert await store.change(None, first) and not await store.change(None, first)
    seen = await store.read()
    assert seen == first
    added = seen.with_model("b", ListedModel({"model": "other", "sim": {"speed": 1.5}}, ModelState.ADDING))
    assert await store.change(seen, added) and not await store.change(seen, seen.without("a"))
    now = await store.read()
    assert now == added and now.revision == 2 and list(now.present) == ["a", "b"]
    leaving = now.with_model("a", ListedModel({}, ModelState.REMOVING))
    assert await store.change(now, leaving) and list(leaving.present) == ["b"]
    assert not await store.delete(now) and await store.delete(await store.read())
    assert await store.read() is None


def test_a_list_put_over_another_keeps_removals_that_were_ordered_there():
    ours, its = ListedModel({"model": "demo"}), ListedModel({"model": "other"})
    leaving = ListedModel({"model": "demo"}, ModelState.REMOVING)
    known = ModelList(7, {"a": ours, "b": ours, "c": leaving}, begun="b0")
    joined = known.over(ModelList(2, {"d": its, "a": its, "b": leaving, "c": ours}, begun="b1"))
    assert joined == ModelList(3, {"d": its, "a": ours, "b": leaving, "c": leaving}, begun="b1")
    assert known.over(joined) is joined


async def test_everything_of_a_namespace_goes_once_its_last_member_has(redis):
    namespace, other = fresh_namespace(), fresh_namespace()
    registry, queue = Registry(redis, namespace), PrefillQueue(redis, namespace)
    await registry.configuration.write(Version(0, {}))
    assert await registry.rollout.change(None, Rollout(Version(0, {}), Version(3, {})))
    await registry.refresh_frontend(Frontend("f1", "http://h", "1", mesh_key="k"), 60)
    await registry.join(worker("decode-0", Role.DECODE), 60)
    await set_desired(registry, 1, 1)
    await registry._call("prune")
    await queue.enqueue(job("waits"))
    await LogLevels(redis, namespace).set("DEBUG")
    await EventLog(redis, namespace).note("retried", why="test")
    await Registry(redis, other).configuration.write(Version(0, {}))
    there = await keys_of(redis, other)
    for leave in (registry.leave("decode-0"), registry.leave_frontend("f1")):
        assert not await forget_namespace(redis, namespace)
        await leave
    assert await forget_namespace(redis, namespace) and await forget_namespace(redis, namespace)
    assert await keys_of(redis, namespace) == set()
    assert await keys_of(redis, other) == there != set()


async def test_nothing_stays_of_a_worker_that_moved_to_another_domain_with_a_claim(redis):
    namespace = fresh_namespace()
    registry, queue = Registry(redis, namespace), PrefillQueue(redis, namespace)
    moves = worker("worker-0", Role.PREFILL)
    await registry.join(moves, 60)
    await registry.refresh_frontend(Frontend("f1", "http://h", "1", mesh_key="k"), 60)
    await queue.enqueue(job("claimed"))
    assert await claim_head(queue, "worker-0", 1000, 1)
    await registry.refresh(msgspec.structs.replace(moves, generation=3), 60)
    domains = {name for name in await keys_of(redis, namespace) if name.startswith(("domain:", "claims:"))}
    assert domains == {"domain:3", "claims:worker-0"}, "it counts in one domain"
    await registry.leave_frontend("f1")
    await registry.leave("worker-0")
    assert await forget_namespace(redis, namespace)
    assert await keys_of(redis, namespace) == set()


async def test_nothing_stays_of_a_worker_that_nobody_saw_leave(redis):
    namespace = fresh_namespace()
    registry = Registry(redis, namespace)
    await registry.join(worker("decode-0", Role.DECODE), 60)
    await redis.delete(registry.keys.worker("decode-0"), registry.keys.workers, registry.keys.prefix + "endpoints")
    assert await forget_namespace(redis, namespace)
    assert await keys_of(redis, namespace) == set()
