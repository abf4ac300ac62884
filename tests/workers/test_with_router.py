"""Worker processes under the real router: killed, flipped and asked at once, a fleet still answers everything."""

import asyncio
import random

import pytest
from support_bench import counted
from support_doors import Doors
from support_relay import Relay
from support_router import RouterClient
from support_steering import order_role
from support_wait import until
from support_workers import WorkerProcess, Workers

from orchestrator.policy.predict.estimates import LATE_IN_A_ROW
from orchestrator.types import Role
from workers.sim.connections import SimConnections

pytestmark = pytest.mark.slow

SECTIONS = {
    "sim": {"speed": 5.0},
    "workers": {"timeout_s": 2.0, "engine_args": {"num_gpu_blocks_override": 2048}},
    "routing": {"remote_prefill_min_tokens": 100, "first_token": "prefill"},
}


async def ask_many(clients: list[RouterClient], count: int, at_once: int = 128) -> None:
    random_ = random.Random(1)
    limit = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        prompt = [number, *range(random_.choice([20, 150, 300, 600]))]
        async with limit, asyncio.timeout(60):
            await clients[number % len(clients)].ask(prompt, random_.choice([1, 4, 16, 64]))

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(one(number))


@pytest.mark.parametrize("how", ["refused", "answers lost"])
async def test_a_prefill_worker_that_alone_is_cut_off_from_redis_keeps_no_prompt_waiting(
    workers: Workers, how: str
) -> None:
    """Frontends hear its reports and reach Redis themselves, but it claims no job. Where only answers are lost, or come
    later than it waits for them, Redis hears it too."""
    host, port, heard = "127.0.0.1", int(workers.url.rpartition(":")[2]), True
    relay = Relay(host, port, lambda data, forth: data if forth or heard else b"")
    async with relay.listening() as relayed:
        await workers.spawn(Role.PREFILL, "--redis", f"redis://{host}:{relayed}")
        await workers.spawn(Role.DECODE)
        client = await workers.router(prefill=1, decode=1)

        async def placed(first: int) -> tuple[str, str]:
            await client.ask([first, *range(300)], 8)
            line = client.connection.router.learning.recent.latest(1)[0]
            return line.decision, line.reason

        assert await placed(1) == ("remote", "long_prompt")
        if how == "refused":
            relay.cut()
        heard = how == "refused"
        reason = await placed(2)  # a claim may have been made, whose answer is lost
        assert reason in (("local", "no_prefill_worker"), ("local", "claimer_unheard")), "it does not wait for long"
        assert await placed(3) == ("local", "no_prefill_worker")
        relay.cut()  # no connection goes on with what comes after bytes that it has lost
        relay.target, heard = (host, port), True
        await until(lambda: client.connection.fleet.ready(Role.PREFILL), "it is registered again")
        assert await placed(4) == ("remote", "long_prompt")
        await workers.assert_no_leaks()


async def test_workers_whose_handshake_is_refused_rest_from_each_other(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets the first token from prefill, and decode computes the prompt once more, unheard."""

    async def refuse(connections: SimConnections, peer: object) -> None:
        raise ConnectionRefusedError("it speaks another version")

    monkeypatch.setattr(SimConnections, "_open", refuse)
    for role in (Role.PREFILL, Role.DECODE):
        await workers.start(role)
    client = await workers.router(prefill=1, decode=1)
    ended, retries = client.connection.router.learning.recent, []
    for number in range(LATE_IN_A_ROW + 1):
        await client.ask([number, *range(300)], 8)
        retries.append(ended.latest(1)[0].retries)
    assert retries == [[]] * LATE_IN_A_ROW + [["no_decode_worker"]]
    assert not ended.transferred


@pytest.mark.timeout(180)
async def test_kills_and_flips_lose_no_request(workers: Workers) -> None:
    for role in [Role.PREFILL] * 3 + [Role.DECODE] * 3:
        await workers.spawn(role, wait=False)
    for worker in workers.processes:
        await workers.registered(worker.id)
    clients = [await workers.router(decode=3) for _ in range(2)]
    watcher = await workers.frontend(*workers.processes)
    first, second, third, *decodes = workers.processes

    async def faults() -> None:
        await answered(250)
        first.kill()
        await flip(second, Role.DECODE)
        await answered(500)
        decodes[0].kill()
        await flip(second, Role.PREFILL)
        await answered(750)
        await flip(decodes[1], Role.PREFILL)
        await flip(decodes[1], Role.DECODE)
        await flip(decodes[1], Role.PREFILL)
        decodes[1].kill()  # while it claims prompts, and its answers stream
        third.kill()

    async def answered(count: int) -> None:
        await until(lambda: finished() - before >= count, f"{count} answers")

    async def flip(worker: WorkerProcess, role: Role) -> None:
        await order_role(workers.registry, worker.id, role)
        await workers.registered(worker.id, role)

    before = finished()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(faults())
        tasks.create_task(ask_many(clients, 1000))
    assert finished() - before == 1000
    assert sum(client.unexpected for client in clients) == 0
    for client in clients:
        assert not client.connection.router.requests
    for killed in (first, third, *decodes[:2]):
        await killed.stopped()
    await workers.assert_no_leaks()
    assert watcher.id  # keeps hearing the loads that the line above judges by


@pytest.mark.timeout(180)
async def test_connections_that_break_leave_no_gap_and_no_token_twice(workers: Workers) -> None:
    """In the middle of messages, again and again, both ways: an answer is whole, or goes on elsewhere."""
    started = [await workers.start(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    doors, client = Doors(), workers.unstarted_router()
    doors.open_all()
    ways = {worker.info.request_address: await doors.to(worker.info.request_address) for worker in started}
    transport = client.connection.transport
    connect = transport.connect
    transport.connect = lambda name, address, *more: connect(name, ways[address], *more)  # type: ignore[method-assign]
    await client.start()
    watcher = await workers.frontend(*started)
    await until(lambda: client.connection.fleet.ready(Role.DECODE) == 2, "greetings")
    breaks = 0

    async def tear() -> None:
        nonlocal breaks
        while True:
            await asyncio.sleep(random.uniform(0.1, 0.6))
            doors.break_all()
            doors.open_all()
            breaks += 1

    before, reset = finished(), counted("pd_retries", why="connection_reset")
    tearing = asyncio.create_task(tear())
    asked = 0
    while breaks < 6 or asked < 400:
        await ask_many([client], 100, at_once=16)
        asked += 100
    tearing.cancel()
    assert finished() - before == asked and client.unexpected == 0
    assert counted("pd_retries", why="connection_reset") > reset
    await workers.assert_no_leaks()
    assert watcher.id  # keeps hearing the loads that the line above judges by
    await doors.close()


def finished() -> float:
    return counted("pd_requests", outcome="finished")
