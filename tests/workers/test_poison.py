"""A request that crashes every engine it meets fails alone; what ran beside it is answered right."""

import asyncio

import pytest
from support_wait import until
from support_workers import Workers

from orchestrator.config.simulated import CRASH_TOKEN
from orchestrator.types import FinishReason, Role
from orchestrator.wire.messages import Rejected

POISON = 666_666
SECTIONS = {
    "sim": {"speed": 2.0},
    "routing": {"remote_prefill_min_tokens": 10_000},
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CRASH_TOKEN, str(POISON))


@pytest.mark.parametrize("beside", [0, 10])
async def test_a_poison_request_takes_two_engines_down_and_no_third(workers: Workers, beside: int) -> None:
    started = [await workers.start(Role.DECODE) for _ in range(4)]
    client = await workers.router(decode=4)
    streams = [asyncio.create_task(client.ask([number, 1, 2, 3], 400)) for number in range(beside)]
    await until(lambda: len(client.connection.router.requests) == beside, "streams")
    with pytest.raises(AssertionError, match=str(FinishReason.ERROR.name)):
        await client.ask([POISON, 1, 2, 3], 8)
    await asyncio.gather(*streams)
    await until(lambda: sum(worker.task.done() for worker in started) == 2, "that two engines are dead")
    await client.ask([5, 6, 7], 8)
    assert sum(worker.task.done() for worker in started) == 2, "no third one died"


async def test_requests_beside_poison_request_continue(workers: Workers) -> None:
    """Each frontend knows its own requests only: both try their suspects, and there is one engine for both."""
    started = [await workers.start(Role.DECODE)]
    clients = [await workers.router(decode=1) for _ in range(2)]
    streams = [asyncio.create_task(client.ask([number, 1], 400)) for client in clients for number in range(3)]
    await until(lambda: all(len(client.connection.router.requests) == 3 for client in clients), "streams")
    poison = asyncio.create_task(clients[0].ask([POISON, 1, 2, 3], 8))
    while not poison.done():  # one engine at a time, so that the suspects of both frontends meet
        if started[-1].task.done():
            started.append(await workers.start(Role.DECODE))
        await asyncio.sleep(0.02)
    with pytest.raises(AssertionError, match=str(FinishReason.ERROR.name)):
        await poison
    await until(started[-1].task.done, "that the last engine is dead")
    assert len(started) == 2, "no third one died"
    started.append(await workers.start(Role.DECODE))
    await asyncio.gather(*streams)


async def test_worker_tries_one_suspect_and_names_culprit(workers: Workers) -> None:
    worker = await workers.start(Role.DECODE, prefill_us_per_token=1000.0)
    one, two = await workers.frontend(worker), await workers.frontend(worker)
    streaming, tried = two.new([1, 2, 3], 10_000), one.new(list(range(5000)))  # 5 s until its first token
    two.submit_to(worker.id, streaming)
    one.submit_to(worker.id, tried, trial_s=10.0, suspect=True)
    suspect, other = two.new([4, 5, 6]), two.new([7, 8, 9])
    await until(lambda: one.loads[worker.id].seen.get(one.id) == 1, "the suspect in the load")
    two.submit_to(worker.id, suspect, trial_s=10.0, suspect=True)
    two.submit_to(worker.id, other)
    refused = await until(lambda: suspect.got(Rejected), "the refusal")
    assert refused.leaving and refused.why == "another is on trial here"
    await worker.engine.stop()
    await until(lambda: one.crashes and two.crashes, "that both hear of the crash")
    assert one.crashes[0].suspect == two.crashes[0].suspect == tried.id
    assert other.got(Rejected) is None


async def test_suspect_waits_for_requests_on_trial(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE, prefill_us_per_token=1000.0)
    slow, other, suspect = frontend.new(list(range(500))), frontend.new([4, 5, 6]), frontend.new([7, 8, 9])
    frontend.submit_to(worker.id, slow, trial_s=10.0)
    frontend.submit_to(worker.id, other, trial_s=10.0)
    frontend.submit_to(worker.id, suspect, trial_s=10.0, suspect=True)
    refused = await until(lambda: suspect.got(Rejected), "the refusal")
    assert refused.leaving
    await frontend.finished(slow, other)
    suspect.attempt += 1
    frontend.submit_to(worker.id, suspect, trial_s=10.0, suspect=True)
    await frontend.finished(suspect)


async def test_slow_suspect_does_not_block_worker(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE, prefill_us_per_token=1000.0)
    slow, suspect, other = frontend.new(list(range(5000))), frontend.new([4, 5, 6]), frontend.new([7, 8, 9])
    frontend.submit_to(worker.id, slow, trial_s=0.2, suspect=True)
    await until(lambda: frontend.loads[worker.id].seen.get(frontend.id) == 1, "the suspect in the load")
    await asyncio.sleep(0.2)
    frontend.submit_to(worker.id, suspect, trial_s=10.0, suspect=True)
    frontend.submit_to(worker.id, other)
    await until(lambda: frontend.loads[worker.id].seen.get(frontend.id) == 3, "all of them in the load")
    assert suspect.got(Rejected) is None
    await worker.engine.stop()
    await until(lambda: frontend.crashes, "the crash")
    assert frontend.crashes[0].suspect is None, "either may be the cause"
