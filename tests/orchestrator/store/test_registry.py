"""Membership, orders, the desired ratio and their events, against a real server."""

import asyncio
import contextlib
import itertools
import os
import signal
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_redis import claim_head, fresh_namespace, job, worker
from support_steering import claim_ids, order_drain, order_role, set_desired
from support_wait import until

from orchestrator.process.tasks import cancelled
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import Departed, Launcher, WorkerOrders, worker_from_fields, worker_to_fields
from orchestrator.store.operator.events import EventLog
from orchestrator.store.planned import Holder, Seen
from orchestrator.store.queue import PrefillQueue, read_cached
from orchestrator.store.registry import STAYS, Frontend, IncompatibleWorker, Registry
from orchestrator.types import ALWAYS_EQUAL, DesiredRatio, EngineIdentity, EngineSpeed, Role, WorkerState

TTL_S = 60.0


@pytest.fixture
def registry(redis):
    return Registry(redis, fresh_namespace())


class Watcher:
    """Counts in the background how often it is told."""

    def __init__(self, registry):
        self.told = 0
        self._task = asyncio.create_task(self._watch(registry))

    async def _watch(self, registry):
        async for _ in registry.watch():
            self.told += 1

    async def until(self, times):
        async def seen():
            assert not self._task.done(), f"watching ended: {self._task}"
            return self.told >= times

        await until(seen, f"{times} times, not {self.told}")

    async def close(self):
        await cancelled(self._task)


@pytest.fixture
async def watcher(registry):
    watcher = Watcher(registry)
    await watcher.until(1)  # it listens
    yield watcher
    await watcher.close()


# ---- workers ---------------------------------------------------------------------------------------------------


def test_fields_survive_round_trip():
    info = worker("w1", Role.DECODE)
    fields = worker_to_fields(info)
    assert all(isinstance(value, str) for value in fields.values())
    assert fields["role"] == "decode" and fields["block_size"] == "16" and fields["kv_port"] == "5002"
    assert worker_from_fields("w1", fields) == info
    assert worker_from_fields("w1", fields | {"order_role": "prefill", "of_a_later_version": "x"}) == info


HAVE_DEFAULTS = {
    "labels",
    "lends",
    "lockstep",
    "ranks",
    "drained",
    "supported_tasks",
    "process",
    "mesh_key",
    "generation",
    "domain",
    "pairs_within",
    "kv_key",
    "kv_tp_size",
    "kv_pp_size",
    "kv_shards",
    "kv_copies",
    "messages",
    "revision",
    "weights",
    "quantization",
    "adapter_slots",
    "attention_backend",
    "speculation",
    "kv_settings",
    *(f"speed_{name}" for name in EngineSpeed.__struct_fields__),
}


@pytest.mark.parametrize("field", sorted(set(worker_to_fields(worker("w"))) - HAVE_DEFAULTS))
def test_a_missing_field_is_an_error(field):
    fields = worker_to_fields(worker("w"))
    del fields[field]
    with pytest.raises(ValueError, match=field.removeprefix("kv_")):
        worker_from_fields("w", fields)


@pytest.mark.parametrize("field", sorted(HAVE_DEFAULTS - {"supported_tasks"}))
def test_a_missing_field_may_have_a_default(field):
    fields = worker_to_fields(worker("w"))
    del fields[field]
    read = worker_to_fields(worker_from_fields("w", fields))
    assert read.pop(field) in ("", "0", "1", "0.0", "False") and read == fields


@given(
    st.dictionaries(
        st.sampled_from(sorted(worker_to_fields(worker("w")))), st.text(max_size=20), min_size=1, max_size=4
    )
)
def test_arbitrary_fields_are_read_or_refused(damage):
    with contextlib.suppress(ValueError):
        worker_from_fields("w", worker_to_fields(worker("w")) | damage)


async def test_refreshing_keeps_a_worker_and_updates_it(registry, redis):
    await registry.join(worker("a"), 0.5)
    draining = worker("a", state=WorkerState.DRAINING, role=Role.DECODE)
    assert (await registry.refresh(draining, TTL_S)).orders == WorkerOrders()
    assert await redis.pttl(registry.keys.worker("a")) > 30_000
    assert await registry.workers() == {"a": draining}


IDENTITY_CHANGES = {
    "model": "other",
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "block_size": 32,
    "max_model_len": 8192,
    "engine": "vllm",
    "engine_version": "2",
    "protocol": 2,
    "revision": "abc123",
    "weights": "0123abcd",
    "quantization": "awq",
    "attention_backend": "FLASHINFER",
    "speculation": '{"method":"eagle"}',
    "kv_settings": '{"hf_overrides":{"rope_theta":5.0}}',
    "kv_copies": 2,
    "messages": "others",
}


@pytest.mark.parametrize("field", EngineIdentity.__struct_fields__)
async def test_a_different_engine_is_refused(registry, field):
    await registry.join(worker("a"), TTL_S)
    other = worker("b", **{field: IDENTITY_CHANGES[field]})
    with pytest.raises(IncompatibleWorker) as caught:
        await registry.join(other, TTL_S)
    line = str(caught.value)
    assert "\n" not in line and f"worker b: {field} is '{IDENTITY_CHANGES[field]}'" in line and "worker a" in line
    assert repr(str(getattr(worker("a").identity, field))) in line and f"same {field}" in line
    with pytest.raises(IncompatibleWorker):
        await registry.refresh(other, TTL_S)
    assert set(await registry.workers()) == {"a"}
    await registry.leave("a")
    await registry.join(other, TTL_S)


@pytest.mark.parametrize("field", EngineIdentity.__struct_fields__)
async def test_other_generation_may_differ_except_for_frontends(registry, field):
    await registry.join(worker("a"), TTL_S)
    other = worker("b", **{field: IDENTITY_CHANGES[field]}, generation=1)
    if field not in ALWAYS_EQUAL:
        await registry.join(other, TTL_S)
        other = worker("c", generation=1)
    with pytest.raises(IncompatibleWorker, match=field):
        await registry.join(other, TTL_S)


async def test_rollout_changes_by_compare_and_set(registry):
    rollout = registry.rollout
    assert await rollout.read() is None
    first = Rollout(Version(0, {"a": 1}), Version(1, {"a": 2}))
    assert await rollout.change(None, first)
    assert not await rollout.change(None, first.to(Phase.BACK, "late")), "there is one"
    assert await rollout.read() == first and first.target.generation == 1
    back = first.to(Phase.BACK, "it cannot start")
    assert await rollout.change(first, back)
    assert not await rollout.change(first, first.to(Phase.DONE))
    assert (await rollout.read()).target == Version(0, {"a": 1}) and back.why == "it cannot start"
    assert await rollout.delete(await rollout.read())
    assert await rollout.read() is None


async def test_a_frontend_is_told_to_drain(registry):
    assert not (await registry.refresh_frontend(Frontend("f1", "http://h", "1"), TTL_S)).drain
    await registry.order_frontend_drain("f1")
    assert (await registry.refresh_frontend(Frontend("f1", "http://h", "1", generation=2), TTL_S)).drain
    assert (await registry.frontends())["f1"].generation == 2
    await registry.order_frontend_drain("gone")


async def test_engines_with_other_ranks_and_stages_join(registry):
    await registry.join(worker("a"), TTL_S)
    b = worker("b")
    await registry.join(msgspec.structs.replace(b, kv=msgspec.structs.replace(b.kv, tp_size=4, pp_size=2)), TTL_S)
    assert set(await registry.workers()) == {"a", "b"}


def of_ranks(worker_id, tp_size):
    info = worker(worker_id)
    return msgspec.structs.replace(info, kv=msgspec.structs.replace(info.kv, tp_size=tp_size))


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (4, 6)])
async def test_indivisible_rank_counts_are_refused(registry, first, second):
    await registry.join(of_ranks("a", first), TTL_S)
    with pytest.raises(IncompatibleWorker) as caught:
        await registry.join(of_ranks("b", second), TTL_S)
    line = str(caught.value)
    assert f"worker b: kv_tp_size is '{second}', but the fleet's is '{first}' (worker a)" in line
    assert "let one of them divide the other" in line and "\n" not in line
    assert set(await registry.workers()) == {"a"}
    await registry.join(of_ranks("a", second), TTL_S)  # in its own place
    await registry.join(of_ranks("b", second), TTL_S)


def shared_out(worker_id, **kv):
    info = worker(worker_id)
    return msgspec.structs.replace(info, kv=msgspec.structs.replace(info.kv, **kv))


@pytest.mark.parametrize("first", [{"pp_size": 2}, {"shards": 2}])
async def test_stages_do_not_send_to_ranks_that_share_prompts(registry, first):
    """A whole prompt goes to them, or nothing could."""
    second = {"shards": 2} if "pp_size" in first else {"pp_size": 2}
    await registry.join(shared_out("whole"), TTL_S)
    await registry.join(shared_out("a", **first), TTL_S)
    with pytest.raises(IncompatibleWorker) as caught:
        await registry.join(shared_out("b", **second), TTL_S)
    line = str(caught.value)
    assert "worker b: kv_pp_size is" in line and "(worker a)" in line and "\n" not in line
    assert "set decode_context_parallel_size or pipeline_parallel_size to 1" in line
    await registry.join(shared_out("b", **first), TTL_S)
    await registry.join(msgspec.structs.replace(shared_out("c", **second), generation=1), TTL_S)


async def test_simultaneous_joins_admit_one_identity(server, registry):
    clients = [await connect(server.url, 5.0) for _ in range(8)]
    registries = [Registry(client, registry.keys.prefix[4:-2]) for client in clients]
    results = await asyncio.gather(
        *(
            mine.join(worker(f"w{number}", block_size=16 if number % 2 else 32), TTL_S)
            for number, mine in enumerate(registries)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(result, IncompatibleWorker) for result in results) == 4
    assert len({info.identity for info in (await registry.workers()).values()}) == 1
    for client in clients:
        await client.aclose()


@pytest.mark.parametrize(
    "damage", [{"role": "boss"}, {"block_size": "many"}, {"id": "b"}, {"kv_port": ""}, {"state": b"\xff"}]
)
async def test_a_corrupt_hash_is_left_out_and_mends_itself(registry, redis, caplog, damage):
    await registry.join(worker("a"), TTL_S)
    await registry.join(worker("ok"), TTL_S)
    await redis.hset(registry.keys.worker("a"), mapping=damage)
    assert set(await registry.workers()) == {"ok"}
    assert set(await registry.workers()) == {"ok"}
    assert caplog.text.count("left out a, its Redis hash cannot be read") == 1, "once, not at every reading"
    await registry.refresh(worker("a"), TTL_S)
    assert set(await registry.workers()) == {"a", "ok"}


async def test_taken_id_is_not_taken_back(registry):
    stopped, moved = worker("a"), worker("a", request_address="tcp://10.0.0.9:1")
    successor = msgspec.structs.replace(moved, kv=msgspec.structs.replace(moved.kv, engine_id="successor"))
    asked = []

    async def lives(other):
        asked.append(other)
        raise LookupError("it lives")

    await registry.join(stopped, TTL_S)
    await registry.refresh(stopped, TTL_S, refuse=lives)
    await registry.join(successor, TTL_S)
    for _ in range(2):
        with pytest.raises(LookupError):
            await registry.refresh(stopped, TTL_S, refuse=lives)
    await registry.leave("a", stopped.kv.engine_id)
    assert await registry.workers() == {"a": successor} and asked == [successor] * 2
    # It is dead after all.
    await registry.refresh(stopped, TTL_S)
    assert await registry.workers() == {"a": stopped}


async def test_damaged_engine_id_is_repaired(registry, redis):
    await registry.join(worker("a"), TTL_S)
    await redis.hset(registry.keys.worker("a"), "kv_engine_id", "damaged")

    async def lives(other):
        raise LookupError("it lives")

    await registry.refresh(worker("a"), TTL_S, refuse=lives)
    assert await registry.workers() == {"a": worker("a")}


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000, "-1", ""], ids=["superscript", "long", "negative", "empty"])
async def test_invalid_counts_break_no_heartbeat(registry, redis, number):
    await registry.join(worker("a"), TTL_S)
    await redis.hset(registry.keys.worker("a"), mapping={"order_role": "prefill", "order_sequence": number})
    assert (await registry.refresh(worker("a"), TTL_S)).orders == WorkerOrders(Role.PREFILL)
    assert (await registry.read()).orders["a"].sequence == 0
    await registry.refresh_launcher("l", Launcher({"a": Role.DECODE}), TTL_S)
    await redis.hset(f"{registry.keys.prefix}launcher:l", "generation", number)
    assert await registry.launchers() == {"l": Launcher({"a": Role.DECODE})}
    assert read_cached(f"a={number} b=7") == {"b": 7}


async def test_a_key_of_the_wrong_type_is_left_out_and_replaced(registry, redis):
    await registry.join(worker("a"), TTL_S)
    await redis.set(registry.keys.worker("a"), "garbage")
    assert await registry.workers() == {}
    await registry.join(worker("b"), TTL_S)  # the garbage does not keep it out
    await registry.refresh(worker("a"), TTL_S)
    assert set(await registry.workers()) == {"a", "b"}


async def test_keys_of_another_type_are_removed_within_a_second(registry, redis):
    """Those of the queue too. Else every call on them fails."""
    namespace = registry.keys.prefix[4:-2]
    queue, events = PrefillQueue(redis, namespace), EventLog(redis, namespace)
    await registry.join(worker("a"), TTL_S)
    strings = ("queued_tokens", "affine", "sweep_cursor", "version", "ratio_leader", "config", "rollout", "pruned")
    others = ("queue", "leases", "waiters", "waits_until", "told", "dropped", "claims:a", "workers", "frontends")
    others += ("launchers", "endpoints", "kinds", "changed", "departed", "noted", "log_levels", "desired")
    for name in (*strings, *others):
        await redis.delete(registry.keys.prefix + name)
        await (redis.rpush if name in strings else redis.set)(registry.keys.prefix + name, "x")
    with pytest.raises(RedisAway, match="WRONGTYPE"):
        await events.read()
    await registry.refresh(worker("a"), TTL_S)
    await registry._call("prune")
    await registry.refresh(worker("a"), TTL_S)
    assert set(await registry.workers()) == {"a"}
    assert await registry.desired() is None and await registry.frontends() == await registry.launchers() == {}
    await redis.set(registry.keys.queued_tokens, 2233)  # of a queue that is gone
    await queue.sweep()
    assert (await queue.depth()).tokens == 0
    await queue.enqueue(job("r"))
    assert [claim.job.request_id for claim in await claim_head(queue, "a", 10**9, 1)] == ["r"]
    await queue.sweep()
    repaired = {event.fields["id"] for event in await events.read() if event.type == "repaired"}
    assert {"queue", "desired", "leases", "claims:a"} <= repaired


# ---- what a large fleet costs ------------------------------------------------------------------------------------


async def commands(redis):
    """Executed so far by this server, those of functions included, by name."""
    return {name: stats["calls"] for name, stats in (await redis.info("commandstats")).items()}


async def executed_by(redis, call):
    before = await commands(redis)
    await call
    return {name: calls - before.get(name, 0) for name, calls in (await commands(redis)).items()}


async def test_join_and_heartbeat_cost_is_independent_of_fleet_size(registry, redis):
    async def cost(number):
        me = worker(f"w{number}")
        return [
            await executed_by(redis, registry.join(me, TTL_S)),
            await executed_by(redis, registry.refresh(me, TTL_S)),
        ]

    await registry.join(worker("first"), TTL_S)
    await redis.set(f"{registry.keys.prefix}pruned", 1)  # who fell silent is looked for once a second, whoever comes
    small = await cost(0)
    await asyncio.gather(*(registry.join(worker(f"w{number}"), TTL_S) for number in range(1, 150)))
    assert await cost(150) == small
    assert sum(sum(commands.values()) for commands in small) > 20, "counted at all"


async def test_workers_receive_no_join_events(registry, redis):
    """Not by a message. What each needs to know it is told with its heartbeat."""
    listening = asyncio.create_task(anext(registry.ordered("a")))
    await listening
    heard = await redis.pubsub_channels(f"{registry.keys.prefix}*")
    assert heard == [registry.keys.orders("a").encode()]
    listening = await redis.pubsub_numsub(registry.keys.events)
    assert listening == [(registry.keys.events.encode(), 0)]


async def test_only_workers_that_changed_are_read_again(registry, redis):
    for number in range(20):
        await registry.join(worker(f"w{number}"), TTL_S)
    assert len(await registry.workers()) == 20

    async def rows():
        return (await executed_by(redis, registry.workers())).get("cmdstat_hgetall", 0)

    assert await rows() == 0
    await registry.refresh(worker("w3", Role.DECODE), TTL_S)
    await registry.join(worker("new"), TTL_S)
    await order_drain(registry, "w7")
    assert await rows() == 3
    reading = await registry.read()
    assert reading.workers["w3"].role is Role.DECODE and set(reading.orders) == {"w7"}
    await registry.clear_orders("w7", reading.orders["w7"].sequence)
    await registry.leave("w5")
    reading = await registry.read()
    assert not reading.orders and len(reading.workers) == 20
    await redis.flushall()
    await registry.join(worker("w1", Role.DECODE), TTL_S)
    assert {name: info.role for name, info in (await registry.workers()).items()} == {"w1": Role.DECODE}


# ---- heartbeats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    [
        lambda redis, keys: redis.delete(keys.worker("a")),
        lambda redis, keys: redis.set(keys.worker("a"), "garbage"),
        lambda redis, keys: redis.hset(keys.worker("a"), "kv_engine_id", "another process's"),
        lambda redis, keys: redis.srem(keys.workers, "a"),
        lambda redis, keys: redis.flushall(),
    ],
    ids=["entry", "type", "engine", "index", "everything"],
)
async def test_heartbeat_rewrites_damaged_entry(registry, redis, lost):
    await registry.join(worker("a"), TTL_S)
    for _ in range(2):
        await registry.refresh(worker("a"), TTL_S)
    await lost(redis, registry.keys)
    await registry.refresh(worker("a"), TTL_S)
    assert await registry.workers() == {"a": worker("a")} and await redis.pttl(registry.keys.worker("a")) > 0


async def test_most_heartbeats_write_only_expiry(registry, redis):
    me = worker("a")
    await registry.join(me, TTL_S)
    await redis.set(f"{registry.keys.prefix}pruned", 1)
    writes = [
        (await executed_by(redis, registry.refresh(me, TTL_S))).get("cmdstat_hset", 0) for _ in range(2 * STAYS + 2)
    ]
    assert writes == [1, *[0] * STAYS] * 2, "now and then all is written: whatever was damaged is mended"
    await redis.pexpire(registry.keys.worker("a"), 1000)
    await registry.refresh(me, TTL_S)
    assert await redis.pttl(registry.keys.worker("a")) > 1000
    draining = msgspec.structs.replace(me, state=WorkerState.DRAINING)
    await registry.refresh(draining, TTL_S)
    assert (await registry.workers())["a"] == draining, "what has changed is written at once"


def departed(info, claims=False):
    return Departed(info.id, info.kv.engine_id, info.request_address, info.kv.host, info.kv.port, claims)


async def test_heartbeat_returns_departed_workers(registry, redis):
    me, left, lost, restarted = (worker(name) for name in ("me", "left", "lost", "restarted"))
    for info in (me, left, restarted):
        await registry.join(info, TTL_S)
    told = await registry.refresh(me, TTL_S)
    assert told.workers == 3 and told.departed == []
    await registry.join(lost, 0.05)
    await redis.zadd(f"{registry.keys.prefix}claims:left", {"r": 1})
    await registry.leave("left")
    await registry.leave("left")
    again = msgspec.structs.replace(restarted, kv=msgspec.structs.replace(restarted.kv, engine_id="another"))
    await registry.join(again, TTL_S)
    await registry.join(again, TTL_S)  # the answer was lost
    heard = [departed(left, claims=True), departed(restarted)]
    assert (await registry.refresh(me, TTL_S, told.last_departure)).departed[:2] == heard

    async def is_told():
        return (await registry.refresh(me, TTL_S, told.last_departure)).departed == [*heard, departed(lost)]

    await until(is_told, "the silent one departed")
    now = await registry.refresh(me, TTL_S)
    assert now.departed == [] and now.workers == 2, "it does not ask"
    assert (await registry.refresh(me, TTL_S, now.last_departure)).departed == []


async def test_workers_whose_entries_run_out_together_may_come_back(registry, redis):
    """Redis stood still, or has moved: each would look whether all others are dead, and operators see all lost."""
    *others, me, dead = (worker(f"w{number}") for number in range(40))
    for info in (*others, me, dead):
        await registry.join(info, TTL_S)
    told = await registry.refresh(me, TTL_S)
    for info in (*others, me, dead):  # as their times to live do
        await redis.delete(registry.keys.worker(info.id))
    for info in (*others, me):
        told = await registry.refresh(info, TTL_S, told.last_departure)
        assert told.departed == []
    assert len(await registry.workers()) == 39, "those that are back"
    assert not await registry.claim_id("launcher", Role.DECODE, TTL_S, "w39"), "it may come back"
    [standing] = await redis.keys(f"{registry.keys.prefix}stood_still:*")
    await redis.set(standing, float(await redis.get(standing)) - 60)  # as time does
    told = await registry.refresh(me, TTL_S, told.last_departure)
    await redis.delete(f"{registry.keys.prefix}pruned")
    told = await registry.refresh(me, TTL_S, told.last_departure)
    assert told.departed == [departed(dead)]
    events = await EventLog(redis, registry.keys.prefix[4:-2]).read(limit=1000)
    assert [event.fields["id"] for event in events if event.type == "lost"] == ["w39"]
    assert sum(event.type == "joined" for event in events) == 40, "who came back has not joined again"
    assert await redis.exists(standing) == 0


async def test_departures_and_events_are_told_by_a_host_whose_clock_is_behind_that_of_the_one_that_lost_them(
    registry, redis
):
    for name in ("me", "left"):
        await registry.join(worker(name), TTL_S)
    await registry.leave("left")
    ahead = f"{round(time.time() * 1000) + 3_600_000}-0"
    told = await registry.refresh(worker("me"), TTL_S, ahead)
    assert told.departed == [departed(worker("left"))]
    assert (await registry.refresh(worker("me"), TTL_S, told.last_departure)).departed == []
    events = await (log := EventLog(redis, registry.keys.prefix[4:-2])).read(ahead)
    assert [event.type for event in events] == ["joined", "joined", "left"]
    assert await log.read(events[-1].id) == []


@pytest.mark.slow
async def test_many_departures_take_several_heartbeats(registry):
    await registry.join(worker("me"), TTL_S)
    told = await registry.refresh(worker("me"), TTL_S)
    for number in range(1200):
        await registry.join(worker(f"w{number}"), TTL_S)
        await registry.leave(f"w{number}")
    heard = []
    for _ in range(3):
        told = await registry.refresh(worker("me"), TTL_S, told.last_departure)
        heard += [departed.worker_id for departed in told.departed]
    assert heard == [f"w{number}" for number in range(1200)]


async def test_heartbeat_reports_decode_of_generation(registry):
    async def decodes(info):
        return (await registry.refresh(info, TTL_S)).decodes

    new = worker("p1", generation=1)
    assert await decodes(worker("p0")), "there is one generation: who is not known here may be there"
    assert not await decodes(new) and not await decodes(worker("p0"))
    await registry.join(worker("d0", Role.DECODE), TTL_S)
    assert await decodes(worker("p0")) and not await decodes(new)
    other = worker("d1", Role.DECODE, generation=1)
    await registry.join(other, TTL_S)
    assert await decodes(new)
    for changed in ({"role": Role.PREFILL}, {"state": WorkerState.DRAINING}):
        await registry.refresh(msgspec.structs.replace(other, **changed), TTL_S)
        assert not await decodes(new) and await decodes(worker("p0")), changed
    await registry.refresh(other, TTL_S)
    assert await decodes(new)
    await registry.leave("d1")
    assert not await decodes(new)
    again = worker("d0", Role.DECODE)
    again = msgspec.structs.replace(again, generation=1, kv=msgspec.structs.replace(again.kv, engine_id="another"))
    await registry.join(again, TTL_S)
    assert await decodes(new) and not await decodes(worker("p0"))


async def test_of_a_generation_that_has_gone_nothing_is_kept(registry, redis):
    """Each rollout, and each restart, makes another one."""
    for generation in range(3):
        await registry.join(worker("w", generation=generation), TTL_S)
        assert await redis.smembers(f"{registry.keys.prefix}domains") == {b"%d" % generation}
    await registry.leave("w")
    assert not await redis.exists(f"{registry.keys.prefix}domains")


async def test_a_departure_is_told_also_where_redis_had_lost_where_the_worker_was(registry, redis):
    me, other = worker("p"), worker("d", Role.DECODE)
    for info in (me, other, worker("of-another", generation=1)):
        await registry.join(info, TTL_S)
    await redis.delete(f"{registry.keys.prefix}endpoints")
    again = Registry(redis, registry.keys.prefix[4:-2])  # in each process the next full heartbeat writes all
    await again.refresh(other, TTL_S)
    heard = (await registry.refresh(me, TTL_S)).last_departure
    await registry.leave("d")
    told = await registry.refresh(me, TTL_S, heard)
    assert told.departed == [departed(other)] and not told.decodes
    await registry.join(other, TTL_S)
    await redis.delete(f"{registry.keys.prefix}endpoints")
    await registry.leave("d")
    assert not (await registry.refresh(me, TTL_S)).decodes, "it left before it had written all again"


async def test_a_heartbeat_tells_whether_a_worker_of_its_place_decodes(registry):
    async def decodes(name):
        return (await registry.refresh(placed[name], TTL_S)).decodes

    placed = {name: worker(name, pairs_within=name[1:]) for name in ("pr1", "pr2")}
    placed |= {name: worker(name, Role.DECODE, pairs_within=name[1:]) for name in ("dr1", "dr2")}
    for info in placed.values():
        await registry.join(info, TTL_S)
    assert await decodes("pr1") and await decodes("pr2")
    await registry.leave("dr2")
    assert await decodes("pr1") and not await decodes("pr2")
    placed["pr2"] = msgspec.structs.replace(placed["pr2"], role=Role.DECODE)
    assert await decodes("pr2"), "it has become one"


# ---- orders ----------------------------------------------------------------------------------------------------


async def test_orders_stay_until_cleared(registry):
    await registry.join(worker("a"), TTL_S)
    await order_role(registry, "a", Role.DECODE)
    orders = (await registry.refresh(worker("a"), TTL_S)).orders
    assert orders.role is Role.DECODE and not orders.drain and orders.sequence > 0
    assert (await registry.refresh(worker("a"), TTL_S)).orders == orders
    await registry.clear_orders("a", orders.sequence)
    assert (await registry.refresh(worker("a"), TTL_S)).orders == WorkerOrders(sequence=orders.sequence)


async def test_a_newer_order_survives_the_clearing_of_an_older_one(registry):
    await registry.join(worker("a"), TTL_S)
    await order_role(registry, "a", Role.DECODE)
    old = (await registry.refresh(worker("a"), TTL_S)).orders
    await order_drain(registry, "a")
    await registry.clear_orders("a", old.sequence)
    new = (await registry.refresh(worker("a"), TTL_S)).orders
    assert new.drain and new.role is Role.DECODE and new.sequence > old.sequence


async def test_the_sequence_grows_also_after_redis_lost_it(registry, redis):
    await registry.join(worker("a"), TTL_S)
    await order_drain(registry, "a")
    before = (await registry.refresh(worker("a"), TTL_S)).orders.sequence
    await redis.flushall()
    await registry.refresh(worker("a"), TTL_S)
    await asyncio.sleep(0.002)  # the sequence follows the clock in milliseconds
    await order_drain(registry, "a")
    assert (await registry.refresh(worker("a"), TTL_S)).orders.sequence > before


async def test_a_joining_worker_has_no_orders(registry):
    await registry.join(worker("a"), TTL_S)
    await order_drain(registry, "a")
    await registry.join(worker("a"), TTL_S)
    assert not (await registry.refresh(worker("a"), TTL_S)).orders.drain


async def test_corrupt_orders_are_no_orders(registry, redis):
    await registry.join(worker("a"), TTL_S)
    await redis.hset(registry.keys.worker("a"), mapping={"order_role": "boss", "order_sequence": "x"})
    assert (await registry.refresh(worker("a"), TTL_S)).orders == WorkerOrders()


async def test_orders_for_unknown_worker_are_refused(registry, redis):
    await registry.join(worker("a"), TTL_S)
    for order in (WorkerOrders(role=Role.DECODE), WorkerOrders(drain=True), WorkerOrders(restart=True)):
        assert await registry.steer(Seen(), {"a": order, "ghost": order}, DesiredRatio(1, 1)) is None
    reading = await registry.read()
    assert reading.orders == {} and reading.desired is None, "all, or nothing"
    await redis.set(registry.keys.worker("ghost"), "no entry of a worker")
    orders = {"a": WorkerOrders(drain=True), "ghost": WorkerOrders(drain=True)}
    assert await registry.steer(Seen(), orders) is None and (await registry.read()).orders == {}
    await redis.delete(registry.keys.worker("ghost"))
    await registry.clear_orders("ghost", 3)
    assert set(await registry.workers()) == {"a"}


async def test_orders_require_current_reading(registry):
    """All of them, or none: whoever comes, goes or changes meanwhile may be why they would be others."""
    other = {"a": WorkerOrders(role=Role.DECODE), "b": WorkerOrders(drain=True)}
    begun = Rollout(Version(0, {}), Version(1, {}))

    async def told() -> dict[str, WorkerOrders]:
        return (await registry.read()).orders

    for name in ("a", "b"):
        await registry.join(worker(name), TTL_S)
    leaves = worker("a", state=WorkerState.DRAINING)
    changes = {
        "one comes": lambda: registry.join(worker("c"), TTL_S),
        "one changes": lambda: registry.refresh(leaves, TTL_S),
        "one is told something": lambda: order_role(registry, "b", Role.DECODE),
        "one goes": lambda: registry.leave("c"),
        "the ratio is set": lambda: set_desired(registry, 1, 1, "test"),
        "a launcher claims an id": lambda: claim_ids(registry, "launcher", Role.PREFILL),
        "a launcher has other workers": lambda: registry.refresh_launcher("launcher", Launcher(), TTL_S),
        "a launcher goes": lambda: registry.leave_launcher("launcher"),
        "one by hand claims its id": lambda: registry.claim_id("by-hand:x", Role.DECODE, TTL_S, "x"),
        "a rollout begins": lambda: registry.rollout.change(None, begun),
    }
    for what, change in changes.items():
        seen = await registry.read()
        before = seen.orders
        await change()
        assert await registry.steer(seen.seen, other) is None, what
        if what != "one is told something":
            assert await told() == before, what
    seen = await registry.read()
    assert await registry.refresh(leaves, TTL_S), "a heartbeat is no change"
    assert await registry.steer(seen.seen, other) is not None
    orders = await told()
    assert orders["a"].role is Role.DECODE and orders["b"].drain
    assert await registry.steer((await registry.read()).seen, {"b": WorkerOrders(restart=True)}) is not None
    assert (await told())["b"].restart


async def test_silent_worker_changes_version(registry, redis):
    for name in ("a", "b"):
        await registry.join(worker(name), TTL_S)
    seen = (await registry.read()).seen
    await redis.delete(registry.keys.worker("b"))  # as its time to live does
    assert await registry.steer(seen, {"a": WorkerOrders(role=Role.DECODE)}) is None


# ---- frontends and the desired ratio ---------------------------------------------------------------------------


async def test_frontends(registry, redis):
    await registry.refresh_frontend(Frontend("f1", "http://127.0.0.1:8000", "11"), TTL_S)
    since = (await registry.frontends())["f1"].since
    await registry.refresh_frontend(Frontend("f1", "http://127.0.0.1:8000", "11"), TTL_S)
    await registry.refresh_frontend(Frontend("f2", "http://127.0.0.1:8001", "12"), TTL_S)
    found = await registry.frontends()
    assert set(found) == {"f1", "f2"} and found["f1"].since == since
    assert (found["f2"].url, found["f2"].process) == ("http://127.0.0.1:8001", "12")
    await redis.hset(registry.keys.frontend("f2"), "since", "x")
    assert set(await registry.frontends()) == {"f1"}
    await registry.leave_frontend("f1")
    assert await registry.frontends() == {}


async def test_the_desired_ratio(registry, redis):
    assert await registry.desired() is None
    await set_desired(registry, 2, 6, "cli")
    desired = await registry.desired()
    assert (desired.prefill, desired.decode, desired.set_by) == (2, 6, "cli") and desired.set_at > 1e9
    for field, value in (("prefill", "two"), ("decode", "-1"), ("set_at", "")):
        await set_desired(registry, 2, 6, "cli")
        await redis.hset(registry.keys.desired, field, value)
        assert await registry.desired() is None, field


async def test_a_person_with_redis_cli_can_read_it(registry, redis):
    await registry.join(worker("a"), TTL_S)
    await set_desired(registry, 1, 1, "me")
    fields = await redis.hgetall(registry.keys.worker("a"))
    assert fields[b"role"] == b"prefill" and fields[b"state"] == b"ready" and fields[b"model"] == b"demo"
    assert fields[b"request_address"] == b"tcp://127.0.0.1:5000" and fields[b"supported_tasks"] == b"generate,embed"
    assert set(await redis.hgetall(registry.keys.desired)) == {b"prefill", b"decode", b"set_by", b"set_at", b"why"}
    assert 0 < await redis.ttl(registry.keys.worker("a")) <= 60


# ---- events ----------------------------------------------------------------------------------------------------


async def test_every_change_is_published_once(registry, watcher):
    changes = (
        lambda: registry.join(worker("a"), TTL_S),
        lambda: registry.refresh(worker("a", Role.DECODE), TTL_S),
        lambda: order_drain(registry, "a"),
        lambda: registry.refresh_frontend(Frontend("f", "http://x", "1"), TTL_S),
        lambda: set_desired(registry, 1, 2, "me"),
        lambda: registry.leave("a"),
        lambda: registry.leave_frontend("f"),
    )
    for told, change in enumerate(changes, 2):
        await change()
        await watcher.until(told)
        if told == 2:
            await registry.refresh(worker("a"), TTL_S)  # a heartbeat is no change
    await registry.leave("a")
    await registry.refresh_frontend(Frontend("g", "http://x", "1"), TTL_S)
    await watcher.until(9)
    assert watcher.told == 9, "one that is gone does not leave again"


async def test_expiry_is_published_without_a_call(registry, redis, watcher):
    await registry.join(worker("a"), 0.05)
    await registry.refresh_frontend(Frontend("f", "http://x", "1"), 0.05)
    await watcher.until(5)
    lost = [event for event in await EventLog(redis, registry.keys.prefix[4:-2]).read() if event.type == "lost"]
    assert sorted(event.fields["id"] for event in lost) == ["a", "f"] and watcher.told == 5, "each once"


async def test_what_others_say_on_the_channel_ends_nothing(registry, redis, watcher):
    said = (b"\xff", b"{", b'{"prefill": "many", "decode": 1}', b"[]", b'{"prefill": 1}')
    for payload in said:
        await redis.publish(registry.keys.events, payload)
    await watcher.until(1 + len(said))
    assert await registry.restored(None, None) is None, "nobody was told of a ratio"


async def test_watching_survives_a_killed_server(mortal):
    redis = await connect(mortal.url, 1.0)
    registry = Registry(redis, "mortal")
    watcher = Watcher(registry)
    await watcher.until(1)
    await registry.join(worker("a"), TTL_S)
    await watcher.until(2)
    os.kill(mortal.pid, signal.SIGKILL)
    with pytest.raises(RedisAway):
        await registry.refresh(worker("a"), TTL_S)
    mortal.stop()
    mortal.start()
    await watcher.until(3)  # it listens again

    async def refreshed():
        try:
            await registry.refresh(worker("a"), TTL_S)
        except RedisAway:
            return False
        return True

    await until(refreshed, "a is back")
    await watcher.until(4)
    await watcher.close()
    await redis.aclose()


# ---- launchers -------------------------------------------------------------------------------------------------


async def test_each_worker_id_is_claimed_once(registry, redis):
    """Whatever its role: that may change."""
    await registry.join(worker("worker-1"), TTL_S)
    for launcher in ("a", "b"):
        await registry.refresh_launcher(launcher, Launcher(), TTL_S)
    claimed = [await claim_ids(registry, "ab"[n % 2], *[Role.PREFILL] * n) for n in range(4)]
    assert claimed == [[], ["worker-0"], ["worker-2", "worker-3"], ["worker-4", "worker-5", "worker-6"]]
    assert await claim_ids(registry, "a", Role.DECODE) == ["worker-7"]
    assert not await registry.claim_id("c", Role.DECODE, TTL_S, "worker-7")
    launchers = await registry.launchers()
    assert {*launchers["a"].workers, *launchers["b"].workers} == {*itertools.chain(*claimed), "worker-7"}
    assert launchers["a"].workers["worker-7"] is Role.DECODE
    await registry.refresh_launcher("a", Launcher({"worker-0": Role.DECODE}, 3, 7), TTL_S)
    await registry.leave_launcher("b")
    assert await registry.launchers() == {"a": Launcher({"worker-0": Role.DECODE}, 3, 7)}
    assert await claim_ids(registry, "c", Role.PREFILL) == ["worker-2"], "what is held no more is free"
    for launcher in ("a", "c"):
        await redis.set(f"{registry.keys.prefix}launcher:{launcher}", "no entry of a launcher")
    assert await registry.claim_id("c", Role.DECODE, TTL_S, "worker-3")


async def test_to_claim_many_ids_costs_what_one_does(registry, redis):
    """Redis serves nobody meanwhile, and a launcher of a large fleet claims all at once."""
    for number in range(20):
        await registry.join(worker(f"worker-{number}"), TTL_S)
    one, many = (Holder("a", Launcher(), TTL_S, [Role.DECODE] * count) for count in (1, 100))
    await registry.steer(Seen(), holder=one)  # joins
    cost = await executed_by(redis, registry.steer(Seen(), holder=one))
    assert await executed_by(redis, registry.steer(Seen(), holder=many)) == cost
    assert list((await registry.launchers())["a"].workers) == [f"worker-{number}" for number in range(20, 120)]


async def test_redis_knows_the_fleet_since_the_first_came_back(redis, registry):
    assert await registry.known_for_s() == 0
    began = time.monotonic()
    await registry.join(worker("a"), TTL_S)
    joined = time.monotonic()
    await asyncio.sleep(0.3)
    await registry.join(worker("b"), TTL_S)
    least_s, known_s = time.monotonic() - joined, await registry.known_for_s()
    assert least_s - 0.1 <= known_s <= time.monotonic() - began + 0.1, "on the server's clock"
    await redis.set(registry.keys.prefix + "begun", time.time() + 3600)  # by the clock of a host before this one
    assert await registry.known_for_s() > 60
    await redis.execute_command("DEL", registry.keys.prefix + "begun")  # it has expired
    assert await registry.known_for_s() > 60
    for name in ("a", "b"):
        await registry.leave(name)
    assert await registry.known_for_s() == 0
    await registry.refresh_frontend(Frontend("f", "http://f", "p"), 60)
    await redis.execute_command("DEL", registry.keys.prefix + "begun")
    assert await registry.known_for_s() > 60, "its model is idle"


async def test_a_fleet_whose_last_member_has_left_is_known_no_more(redis, registry):
    """Whoever starts next waits for none that could come back. One whose entry has run out may."""
    await registry.refresh_launcher("l", Launcher(), 60)
    await registry.refresh_frontend(Frontend("f", "http://f", "p"), 60)
    await registry.join(worker("a"), 60)
    await registry.leave_launcher("l")
    await registry.leave("a")
    assert await registry.is_known()
    await registry.leave_frontend("f")
    assert not await registry.is_known()
    await registry.join(worker("a"), 60)
    await registry.join(worker("b"), 60)
    await redis.delete(registry.keys.worker("a"))  # as its time to live does
    await registry.leave("b")
    assert await registry.is_known()


@pytest.mark.parametrize("workers", [1, 33])
async def test_a_fleet_whose_workers_have_all_fallen_silent_is_known_anew(redis, registry, workers):
    """Of many that run out together none counts as gone yet; nor is one there."""
    await redis.set(registry.keys.prefix + "begun", time.time() - 600)
    for number in range(workers):
        await registry.join(worker(f"w{number}"), 60)
    assert await registry.known_for_s() > 60
    for number in range(workers):  # as their times to live do
        await redis.delete(registry.keys.worker(f"w{number}"))
    assert await registry.workers() == {} and await registry.known_for_s() < 60


async def test_a_fleet_whose_members_have_all_fallen_silent_is_known_anew(redis, registry):
    """Nobody could renew an entry: what is there next is a part of it."""
    await redis.set(registry.keys.prefix + "begun", time.time() - 600)
    await registry.refresh_launcher("l", Launcher(), 60)
    await registry.refresh_frontend(Frontend("f", "http://f", "p"), 60)  # back before all others
    await registry.join(worker("a"), 60)
    assert await registry.known_for_s() > 60
    await registry.refresh_launcher("l", Launcher(), 0.05)
    await asyncio.sleep(0.1)
    assert await registry.known_for_s() < 60
    await registry.leave("a")
    await redis.set(registry.keys.prefix + "begun", time.time() - 600)
    assert await registry.known_for_s() > 60, "one that leaves says so"
