"""How a frontend starts: it does not wait for what cannot come, and may hold many connections."""

import asyncio
import os
import resource
import sys
import time
from functools import partial
from itertools import pairwise
from operator import attrgetter
from unittest.mock import Mock

import pytest
from support_info import connects, worker_info
from support_router import SimRouterCodec
from support_wait import until

from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.fleet.control_calls import CALL_TIMEOUT_S, Unanswered
from orchestrator.frontend.wiring import FRONTEND_TTL_S, FleetConnection, unless_ended
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import RedisAway
from orchestrator.store.keys import Keys
from orchestrator.types import WorkerLoad
from orchestrator.wire.messages import CallReply, Rejected, Welcome
from orchestrator.wire.sockets import Sent
from orchestrator.wire.transport import Disconnected, Unreadable


class DamagedRedis:
    """Answers what nobody can read."""

    async def call(self, *args):
        raise ValueError("damaged")

    execute_command = info = call

    async def listen(self, channel):
        yield None
        await asyncio.Event().wait()


async def test_impossible_start_fails_at_once_with_cause():
    config = parse_config({"model": "demo", "namespace": "t"})
    connection = FleetConnection("f", config, DamagedRedis(), SimRouterCodec())
    running = asyncio.create_task(connection.run())
    with pytest.raises(ValueError, match="damaged"):
        await unless_ended(running, connection.synced())
    connection.transport.close()


async def test_frontend_that_starts_slowly_stays_registered(redis):
    config, key = parse_config({"model": "demo", "namespace": "t"}), Keys("t").frontend("f")
    connection = FleetConnection("f", config, redis, SimRouterCodec())
    running = asyncio.create_task(connection.run())
    await connection.synced()
    assert await redis.execute_command("PTTL", key) > FRONTEND_TTL_S * 1000
    await connection.announce("http://h:1")
    assert 0 < await redis.execute_command("PTTL", key) <= FRONTEND_TTL_S * 1000
    await cancelled(running)
    await connection.close()


async def test_a_frontend_whose_clients_have_all_descriptors_stays_registered(redis, monkeypatch):
    monkeypatch.setattr("orchestrator.frontend.wiring.HEARTBEAT_S", 0.05)
    key = Keys("t").frontend("f")
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), redis, SimRouterCodec())
    running = asyncio.create_task(connection.run())
    await connection.synced()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        await redis.delete(key)
        await until(partial(redis.exists, key))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await cancelled(running)
    await connection.close()


async def test_a_worker_that_is_reached_is_told_of_before_the_next_heartbeat(redis, monkeypatch):
    """A launcher says that its fleet is ready once the frontends reach all workers."""
    monkeypatch.setattr("orchestrator.frontend.wiring.HEARTBEAT_S", 3600.0)
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), redis, SimRouterCodec())
    running = asyncio.create_task(connection.run())
    await connection.synced()
    connection.fleet.upsert(worker_info("w"), time.monotonic())
    connection.membership.on_welcome("w")
    connection.membership._take(WorkerLoad("w", 1, 100, 50, 0, 0, 0, 1.0), time.monotonic())

    async def reaches_one():
        return (await connection.registry.frontends())["f"].reaches == 1

    await until(reaches_one)
    await cancelled(running)
    await connection.close()


class Away(DamagedRedis):
    async def call(self, *args):
        raise RedisAway("its connection is cut")

    execute_command = info = call


async def test_while_workers_are_reached_it_rests_for_longer_than_its_heartbeats_take(monkeypatch):
    monkeypatch.setattr("orchestrator.frontend.wiring.HEARTBEAT_S", 3600.0)
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    beats = []

    async def beat():
        began = time.monotonic()
        await asyncio.sleep(0.05)
        beats.append((began, time.monotonic()))
        connection.membership.reached.set()

    monkeypatch.setattr(connection, "_send_heartbeat", beat)
    beating = asyncio.create_task(connection._heartbeat())
    await until(lambda: len(beats) == 3)
    await cancelled(beating)
    assert all(begins - ended >= 3 * (ended - began) for (began, ended), (begins, _) in pairwise(beats))
    connection.transport.close()


async def test_two_heartbeats_that_follow_each_other_closely_tell_the_same_use_of_the_cpu(monkeypatch):
    clock = Mock(monotonic=Mock(return_value=10.0), process_time=Mock(return_value=3.0))
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    monkeypatch.setattr("orchestrator.frontend.wiring.time", clock)
    connection._cpu_at = clock.process_time(), clock.monotonic()
    told = []
    for at, used_s in ((11.0, 3.25), (11.05, 3.3), (12.0, 3.75)):
        clock.monotonic.return_value, clock.process_time.return_value = at, used_s
        told.append(connection._cpu_used())
    assert told == [0.25, 0.25, 0.5]
    connection.transport.close()


async def test_frontend_that_cannot_reach_redis_tells_its_launcher_that_it_lives(monkeypatch):
    told = asyncio.Event()
    monkeypatch.setattr("orchestrator.frontend.wiring.tell_alive", told.set)
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    running = asyncio.create_task(connection.run())
    await connection._beaten.wait()
    assert not told.is_set(), "while it loads, which has a deadline"
    connection._url = "http://127.0.0.1:1"
    for _ in range(2):  # at each heartbeat
        await told.wait()
        told.clear()
    await cancelled(running)
    connection.transport.close()


async def test_a_message_that_cannot_be_read_leaves_no_gap_in_an_answer(monkeypatch):
    """It may have had the next tokens of any request there: each goes on from those before."""
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    lost, messages = asyncio.Queue[str](), asyncio.Queue[object]()
    monkeypatch.setattr(connection.router.lost, "outputs_lost", lost.put_nowait)
    monkeypatch.setattr(connection.transport, "receive", messages.get)
    messages.put_nowait(("w", Unreadable("w"), []))
    receiving = asyncio.create_task(connection._receive())
    assert await lost.get() == "w"
    receiving.cancel()
    connection.transport.close()


@pytest.mark.parametrize("told", [[Disconnected("w"), Welcome()], [Unreadable("w")]], ids=["reset", "unreadable"])
@pytest.mark.parametrize(
    ("method", "again"),
    [("set_pause", True), ("fingerprint_lora", True), ("remove_lora", False), ("reset_prefix_cache", False)],
)
async def test_an_answer_that_may_be_lost_is_not_waited_for(method, again, told, monkeypatch):
    """While Redis is away nobody says that the worker was killed, and its successor may have its address by now. Or the
    connection only blinked: the worker, which may not have heard the call, does not count as one that is gone. It is
    asked again where it may carry the call out twice."""
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    messages, asked = asyncio.Queue[object](), asyncio.Queue[tuple[str, object]]()
    for worker_id in ("w", "answers"):
        connects(connection.fleet, worker_info(worker_id))
        connection.fleet.workers[worker_id].greeted = True
    monkeypatch.setattr(connection.transport, "receive", messages.get)
    monkeypatch.setattr(connection.transport, "send", lambda *sent: asked.put_nowait(sent) or Sent.YES)
    receiving = asyncio.create_task(connection._receive())
    calling = asyncio.create_task(connection.calls.call(method, []))
    (_, call), _ = await asked.get(), await asked.get()
    answer = CallReply(1, result=True)
    for worker_id, message in [("answers", answer), *(("w", message) for message in told)]:
        messages.put_nowait((worker_id, message, []))
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S / 2):
            if again:
                assert await asked.get() == ("w", call)
                messages.put_nowait(("w", answer, []))
                assert await calling is True
            else:
                with pytest.raises(Unanswered, match="worker w: its answer may be lost"):
                    await calling
                assert asked.empty()
    finally:
        receiving.cancel()
        connection.transport.close()


@pytest.mark.parametrize("message", [Disconnected("w"), Unreadable("w"), Welcome(), Rejected("r", 1, "full")], ids=repr)
async def test_a_defect_in_the_handling_of_a_message_ends_no_frontend(message, monkeypatch, caplog):
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    handled, messages = asyncio.Queue[str](), asyncio.Queue[object]()
    for part, name in (
        (connection.membership, "disconnected"),
        (connection.membership, "on_welcome"),
        (connection.router.lost, "outputs_lost"),
        (connection.router, "handle"),
    ):
        monkeypatch.setattr(part, name, lambda *_: 1 // 0)
    monkeypatch.setattr(connection.calls, "on_reply", lambda worker_id, _: handled.put_nowait(worker_id))
    monkeypatch.setattr(connection.transport, "receive", messages.get)
    for told in (message, CallReply(1)):
        messages.put_nowait(("w", told, []))
    receiving = asyncio.create_task(connection._receive())
    assert await unless_ended(receiving, handled.get()) == "w"
    assert f"could not handle {type(message).__name__} from worker w" in caplog.text
    receiving.cancel()
    connection.transport.close()


@pytest.mark.parametrize("defective", ["prefixes.forget", "router.lost.worker_lost", "calls.worker_lost"])
async def test_all_parts_are_told_of_lost_workers_whatever_one_of_them_meets(defective, monkeypatch):
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), Away(), SimRouterCodec())
    told = []

    def tell(path, *ids):
        told.append((path, *ids))
        return 1 // 0 if path == defective else None

    for path in ("prefixes.forget", "router.lost.worker_lost", "calls.worker_lost"):
        part, _, name = path.rpartition(".")
        monkeypatch.setattr(attrgetter(part)(connection), name, partial(tell, path))
    with pytest.raises(ZeroDivisionError):
        connection._worker_lost("a", "b")
    each = {(path, name) for path in ("prefixes.forget", "calls.worker_lost") for name in "ab"}
    assert {*told} == {*each, ("router.lost.worker_lost", "a", "b")}
    connection.transport.close()


async def test_unless_ended_returns_first_result_or_error():
    running = asyncio.create_task(asyncio.sleep(60))

    async def work(error=None):
        await asyncio.sleep(0)
        if error:
            raise error
        return 7

    assert await unless_ended(running, work()) == 7
    with pytest.raises(KeyError):
        await unless_ended(running, work(KeyError("k")))
    running.cancel()


@pytest.mark.vllm
def test_a_frontend_raises_its_limit_of_open_files(monkeypatch):
    from orchestrator.frontend import server
    from orchestrator.frontend.models import served

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = []

    def load_models(path):
        limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        raise ConfigError("seen")

    monkeypatch.setattr(served, "load_models", load_models)
    monkeypatch.setattr(sys, "argv", ["server", "--redis", "redis://h", "--config", "c"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        with pytest.raises(SystemExit):
            server.main()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    hard = before[1]
    assert limits == [(65_535 if hard == resource.RLIM_INFINITY else min(65_535, hard), hard)]


# By what fails: the part that has it, its name there, and how often its loop turns.
LOOPS = {
    "heartbeat": ("registry", "refresh_frontend", "frontend.wiring.HEARTBEAT_S"),
    "registry": ("membership", "_resync", "fleet.membership.RESYNC_S"),
    "silent workers": ("fleet", "silent", "fleet.membership.TICK_S"),
    "reports": ("membership", "_take", "fleet.membership.TICK_S"),
    "reports of many": ("fleet", "apply_changes", "fleet.membership.TICK_S"),
    "prefill queue": ("queue._queue", "poll", "fleet.queue_view.EMPTY_POLL_S"),
    "adapters": ("adapters", "_sync", "fleet.adapters.POLL_S"),
    "idle model": ("rest", "_desired", "fleet.pause._LOOK_EVERY_S"),
    "deadlines": ("router", "check", "router.router.CHECK_S"),
    "jobs": ("router.lost", "check_queue", "router.router.CHECK_S"),
}


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_defect_in_one_of_its_loops_ends_no_frontend(loop, redis, monkeypatch, caplog):
    path, name, interval = LOOPS[loop]
    connection = FleetConnection("f", parse_config({"model": "demo", "namespace": "t"}), redis, SimRouterCodec())
    monkeypatch.setattr(f"orchestrator.{interval}", 0.05)
    if loop == "reports of many":
        monkeypatch.setattr(connection.membership, "_pause_s", lambda: 0.01)
    if loop.startswith("reports"):
        monkeypatch.setattr(connection.transport, "receive_published", lambda _: asyncio.sleep(0.05, ["a report"]))
    running = asyncio.create_task(connection.run())
    met = asyncio.Queue[None]()

    def defect(*_):
        met.put_nowait(None)
        raise ZeroDivisionError

    try:
        await unless_ended(running, connection.synced())
        monkeypatch.setattr(attrgetter(path)(connection), name, defect)
        for _ in range(3):
            await unless_ended(running, met.get())
    finally:
        await cancelled(running)
        monkeypatch.undo()
        await connection.close()
    assert [text for text in caplog.messages if text.endswith("failed, and is tried again")]
