"""A worker as its frontends see it: submissions, aborts, loads, role changes, drains, and all that can vanish."""

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from support_steering import order_drain, order_role
from support_wait import DEADLINE_S, until
from support_workers import Workers, expected, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.parent import PARENT, exit_reason_in
from orchestrator.store.client import RedisAway
from orchestrator.store.fields import Departed
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import FinishReason, Role, WorkerInfo
from orchestrator.wire import sockets
from orchestrator.wire.curve import KeyPair, use_as_client
from orchestrator.wire.messages import Abort, Call, Claimed, Hello, Prefilled, Rejected, Submit
from workers import serving as serving_module
from workers.agent import EXIT_LEFT, Agent
from workers.attempts import Attempt
from workers.engine import EngineDead, EngineRequest, EngineStep, Phase
from workers.peers import IdInUse
from workers.sim.codec import WireOutput, WirePrefillStats
from workers.unit.link import GroupLink

PROMPT = list(range(100, 400))


async def test_load_says_which_submissions_it_includes(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE, speed=1.0)
    request = frontend.submit(worker.id, PROMPT, max_tokens=2000)
    seen = await until(
        lambda: (load := frontend.loads[worker.id]).seen.get(frontend.id) == 1 and load, "the submission in the load"
    )
    assert seen.running == 1 and seen.blocks_free < seen.blocks_total
    await until(lambda: frontend.loads[worker.id].prefill_tokens_per_s > 0)
    frontend.abort(worker.id, request)


async def test_refuses_what_it_cannot_decode_or_run(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    garbage, long = frontend.new(PROMPT), frontend.new(list(range(40_000)))
    frontend.transport.send(worker.id, Submit(garbage.id, 1, 1, 10), [b"\xc1\xc1"])
    frontend.submit_to(worker.id, long)
    await until(lambda: garbage.got(Rejected) and long.got(Rejected))
    assert garbage.got(Rejected).why.startswith("invalid: not an engine request")
    assert long.got(Rejected).why.startswith("invalid: the prompt has 40000 tokens, the longest sequence is 32768")
    assert long.got(Rejected).final


async def test_messages_go_on_while_the_engine_takes_a_request(workers: Workers) -> None:
    """As for the seconds in which it loads the request's LoRA adapter."""
    worker, frontend = await workers.served(Role.DECODE)
    submit, loaded, began = worker.engine.submit, asyncio.Event(), list[str]()
    slow = [frontend.new([i, *PROMPT]) for i in range(2)]

    async def load_first(request: EngineRequest) -> None:
        if request.key.startswith(tuple(it.id for it in slow)):
            began.append(request.key)
            await loaded.wait()
        await submit(request)

    worker.engine.submit = load_first  # type: ignore[method-assign]
    for request in slow:
        frontend.submit_to(worker.id, request)
    await until(lambda: len(began) == len(slow), "both wait")
    other = frontend.submit(worker.id, [9, *PROMPT])
    await frontend.finished(other)
    frontend.abort(worker.id, slow[0])
    await until(lambda: len(worker.agent._attempts.all()) == 1, "the abort is heard")
    loaded.set()
    await frontend.finished(slow[1])
    await workers.assert_no_leaks()
    assert not slow[0].tokens and not slow[0].got(Rejected)


async def test_of_frontends_that_are_gone_nothing_is_kept(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that have sent no request."""
    monkeypatch.setattr(serving_module, "IDLE_FRONTENDS_CHECK_S", 0.2)
    worker = await workers.start(Role.DECODE)
    stays, *leave = [await workers.frontend(worker) for _ in range(4)]
    routes = worker.agent._transport._routes
    assert len(routes) == 4
    for frontend in leave:
        await frontend.close()
    await until(lambda: [*routes] == [stays.id], "the connections are forgotten")
    await until(lambda: worker.agent._frontends.greeted == {stays.id})
    request = stays.new(PROMPT)
    await stays.decoded_by(worker.id, request)


async def test_an_abort_by_another_frontend_ends_nothing(workers: Workers) -> None:
    worker = await workers.start(Role.DECODE, speed=1.0)
    owner, other = await workers.frontend(worker), await workers.frontend(worker)
    request = owner.new(PROMPT, max_tokens=100)
    owner.submit_to(worker.id, request)
    await until(lambda: len(request.tokens) > 2)
    other.abort(worker.id, request)
    await owner.finished(request)


async def test_outputs_that_are_too_large_are_their_own_requests_failure(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, frontend = await workers.served(Role.DECODE, speed=1.0)
    large, good = frontend.new(PROMPT, max_tokens=50), frontend.new([7, *PROMPT], max_tokens=50)
    encode = worker.engine.encode_outputs
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", sockets.MAX_FRAME_BYTES)

    def padded(outputs: list[Any], timestamp: float) -> list[bytes]:
        is_large = any(output.request_id == large.id for output in outputs)
        return [*encode(outputs, timestamp), *([bytes(sockets.MAX_FRAME_BYTES)] if is_large else [])]

    monkeypatch.setattr(worker.engine, "encode_outputs", padded)
    for request in (large, good):
        frontend.submit_to(worker.id, request)
    await frontend.finished(good)
    rejected = await until(lambda: large.got(Rejected))
    assert rejected.final and rejected.why.startswith("its answer is larger than") and not good.got(Rejected)


async def test_what_the_engine_itself_refuses_goes_to_no_other_worker(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    engine, bad = worker.engine, frontend.new(PROMPT)
    next_step = engine.next_step

    async def refuse() -> EngineStep:
        step = await next_step()
        step.refused = {o.request_id: "no such grammar" for o in step.outputs if o.request_id.startswith(bad.id)}
        return step

    engine.next_step = refuse
    good = frontend.new(PROMPT)
    for request in (bad, good):
        frontend.submit_to(worker.id, request)
    await frontend.finished(good)
    rejected = await until(lambda: bad.got(Rejected))
    assert rejected.final and rejected.why == "invalid: no such grammar" and bad.finish is None


async def test_corrupt_messages_disturb_nobody(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    context = zmq.asyncio.Context()
    vandal = context.socket(zmq.DEALER)
    keys = KeyPair.new()
    await frontend.registry.refresh_frontend(Frontend("vandal", "", "1", mesh_key=keys.public), 60)
    use_as_client(vandal, keys)
    vandal.setsockopt(zmq.CURVE_SERVERKEY, worker.info.mesh_key.encode())
    vandal.connect(worker.info.request_address)
    try:
        for frames in ([b""], [b"\xff" * 100], [msgspec.msgpack.encode({"type": "submit"})], [b"", b"", b""]):
            await vandal.send_multipart(frames)
        request = frontend.submit(worker.id, PROMPT)
        await frontend.finished(request)
        await until(lambda: caplog.text.count("dropped a corrupt message") == 4)
        await until(lambda: frontend.loads[worker.id].corrupt_messages == 4)
    finally:
        context.destroy(linger=0)


async def test_a_duplicate_submission_is_answered_once(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    request = frontend.submit(worker.id, PROMPT, max_tokens=30)
    await frontend.decoded_by(worker.id, request)
    await workers.assert_no_leaks()
    assert frontend.late_outputs == 0


async def test_a_higher_attempt_replaces_the_older(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE, speed=1.0)
    request = frontend.submit(worker.id, PROMPT, max_tokens=60)
    await until(lambda: len(request.tokens) >= 5)
    request.attempt = 2
    frontend.submit_to(worker.id, request)  # resumes after the tokens it has
    await frontend.finished(request)


async def test_a_stale_abort_leaves_the_newer_attempt_alone(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE, speed=1.0)
    request = frontend.new(PROMPT, max_tokens=40)
    request.attempt = 3
    frontend.submit_to(worker.id, request)
    frontend.transport.send(worker.id, Abort(request.id, 2))
    await frontend.finished(request)


async def test_requests_of_dead_frontend_end_before_worker_timeout(
    redis_server: EmbeddedRedis,
) -> None:
    async with running_workers(redis_server, workers={"timeout_s": 600.0}) as workers:
        worker = await workers.start(Role.DECODE, speed=1.0)
        gone, stays = await workers.frontend(worker), await workers.frontend(worker)
        gone.submit_to(worker.id, gone.new(PROMPT, max_tokens=20_000))
        await until(lambda: stays.loads[worker.id].running == 1)
        gone.transport.close()
        await until(lambda: stays.loads[worker.id].running == 0, "its request to be gone")
        workers.frontends.remove(gone)
        await gone.close()


async def test_departed_frontend_leaves_load_reports(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "IDLE_FRONTENDS_CHECK_S", 0.2)
    worker = await workers.start(Role.DECODE)
    stays, leaves = await workers.frontend(worker), await workers.frontend(worker)
    requests = [(frontend, frontend.new(PROMPT)) for frontend in (stays, leaves)]
    for frontend, request in requests:
        await frontend.decoded_by(worker.id, request)
    await until(lambda: stays.loads[worker.id].seen.keys() == {stays.id, leaves.id})
    await leaves.registry.leave_frontend(leaves.id)  # first, as frontends do
    await leaves.close()
    await until(lambda: stays.loads[worker.id].seen.keys() == {stays.id})


async def test_idle_frontend_is_not_probed(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large fleet all workers would ask after every frontend that ever sent them something."""
    worker, frontend = await workers.served(Role.DECODE)
    request = frontend.submit(worker.id, PROMPT)
    await frontend.finished(request)
    await workers.assert_no_leaks()
    welcomes, sequence = frontend.welcomes, frontend.loads[worker.id].sequence
    await until(lambda: frontend.loads[worker.id].sequence > sequence + 10, "two and a half seconds of idle reports")
    assert frontend.welcomes <= welcomes + 1


async def test_what_cannot_be_delivered_is_given_up(workers: Workers) -> None:
    worker = await workers.start(Role.DECODE, speed=1.0)
    frontend, another = await workers.frontend(worker), await workers.frontend(worker)
    request = frontend.submit(worker.id, PROMPT, max_tokens=300)
    await until(lambda: len(request.tokens) > 3 and another.loads[worker.id].running)
    frontend.transport.disconnect(worker.id)
    await until(lambda: not another.loads[worker.id].running)
    info = worker.info
    frontend.transport.connect(worker.id, info.request_address, info.load_address, info.mesh_key)
    frontend.welcomed.clear()
    await until(lambda: frontend.welcomed)
    request.attempt = 2
    await frontend.decoded_by(worker.id, request)


async def test_control_calls_are_answered(workers: Workers) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    frontend.transport.send(worker.id, Call(7, "reset_prefix_cache"))
    frontend.transport.send(worker.id, Call(8, "pin_lora", [1]))
    await until(lambda: len(frontend.replies) == 2)
    by_id = {reply.call_id: reply for reply in frontend.replies}
    assert by_id[7].result is True and by_id[7].error is None
    assert by_id[8].error == "pin_lora: the simulated engine cannot pin_lora; use --engine vllm"


async def test_other_protocol_version_is_refused(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    worker, frontend = await workers.served(Role.DECODE)
    frontend.welcomed.clear()
    with caplog.at_level("ERROR", "pd.worker"):
        frontend.transport.send(worker.id, Hello(protocol=99))
        await until(lambda: "speaks protocol 99" in caplog.text)
    assert not frontend.welcomed


# ---- roles -----------------------------------------------------------------------------------------------------


async def test_request_prefilled_before_role_change_is_recomputed(
    workers: Workers,
) -> None:
    """Its engine holds the KV still, under the same key: it would refuse a second request, or end of it."""
    worker, frontend = await workers.served(Role.PREFILL)
    request = frontend.new(PROMPT)
    await frontend.enqueue(request)
    await until(lambda: request.got(Prefilled))
    await order_role(workers.registry, worker.id, Role.DECODE)
    await workers.registered(worker.id, Role.DECODE)
    frontend.submit_to(worker.id, request, request.got(Claimed).kv_source)
    rejected = await until(lambda: request.got(Rejected))
    assert rejected.leaving and not rejected.final
    frontend.abort(worker.id, request)
    request.attempt += 1
    await frontend.decoded_by(worker.id, request)


async def test_lost_join_answer_is_no_duplicate_id(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has carried it out, and a worker that asks again finds itself."""
    join, calls = Registry.join, 0

    async def lost_once(self: Registry, info: WorkerInfo, ttl_s: float) -> None:
        nonlocal calls
        calls += 1
        await join(self, info, ttl_s)
        if calls == 1:
            raise RedisAway("the answer did not come")

    monkeypatch.setattr(Registry, "join", lost_once)
    worker = await workers.start(Role.DECODE)
    await until(lambda: worker.agent.joined)
    assert calls == 2 and not worker.task.done()


@pytest.mark.parametrize("alive", [True, False])
async def test_stopped_worker_leaves_its_taken_id(workers: Workers, alive: bool) -> None:
    stopped, other = await workers.start(Role.DECODE), await workers.start(Role.DECODE)
    successor = msgspec.structs.replace(other.info, id=stopped.id)
    if not alive:
        successor = msgspec.structs.replace(successor, request_address="tcp://127.0.0.1:1")
    await workers.registry.join(successor, 60.0)
    if alive:
        with pytest.raises(IdInUse, match=f"{stopped.id!r} is in use"):
            await asyncio.wait_for(asyncio.shield(stopped.task), DEADLINE_S)
        assert (await workers.registry.workers())[stopped.id] == successor
    else:

        async def is_registered():
            there = await workers.registry.endpoints(stopped.id)
            return there is not None and there.engine_id == stopped.info.kv.engine_id

        await until(is_registered)
        assert not stopped.task.done()


async def test_requests_left_at_drain_deadline_are_given_back(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, workers={"drain_timeout_s": 0.2}) as workers:
        worker, other = await workers.start(Role.DECODE, speed=1.0), await workers.start(Role.DECODE)
        frontend = await workers.frontend(worker, other)
        request = frontend.submit(worker.id, PROMPT, max_tokens=1000)
        await until(lambda: len(request.tokens) > 3)
        await order_drain(workers.registry, worker.id)
        rejected = await until(lambda: request.got(Rejected))
        assert rejected.why == "drained"
        request.attempt = 2
        await frontend.decoded_by(other.id, request)
        assert await worker.stopped() == 0


# ---- what can go away --------------------------------------------------------------------------------------------


async def test_a_dead_engine_ends_the_worker_which_says_why(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launcher would take the last line of its output for the reason, which a process of the engine may write."""
    monkeypatch.setenv(PARENT, "1")
    worker = await workers.start(Role.DECODE)
    await worker.engine.stop()
    assert await worker.stopped() == 1
    assert worker.id not in await workers.registry.workers()
    for made, name in ("x", "claims"), ("1", "report"):
        ended = asyncio.create_task(asyncio.to_thread(int, made), name=name)
        await asyncio.wait({ended})
        worker.agent._exit_code = EXIT_LEFT
        worker.agent._set_exit_code(ended)
    lines = capsys.readouterr().err.splitlines()
    assert [told for line in lines if (told := exit_reason_in(line)) is not None] == [
        ("the simulated engine ended: stopped", False),
        ("claims ended unexpectedly: ValueError(\"invalid literal for int() with base 10: 'x'\")", False),
        ("report ended unexpectedly, without an error", False),
    ]


async def test_of_loops_that_end_together_the_engines_says_why_and_not_that_of_the_other_ranks(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PARENT, "1")
    together = asyncio.Event()

    async def ends(why: str) -> None:
        await together.wait()
        raise EngineDead(why)

    monkeypatch.setattr(GroupLink, "watch", lambda *_: ends("cannot go on: d.1 has ended"))
    monkeypatch.setattr(Agent, "_pump", lambda _: ends("a kernel failed"))
    worker = await workers.start(Role.DECODE)
    together.set()
    assert await worker.stopped() == 1
    lines = capsys.readouterr().err.splitlines()
    assert [told.text for line in lines if (told := exit_reason_in(line))] == ["a kernel failed"]
    assert worker.agent._died_of == "a kernel failed", "frontends are told the same"


async def test_an_engine_that_ends_with_the_other_ranks_that_have_drained_is_no_failure(workers: Workers) -> None:
    """They leave as soon as this one has drained too, which it may hear of later than its engine."""
    worker = await workers.start(Role.DECODE)
    worker.agent._moves.drained = True
    await worker.engine.stop()
    assert await worker.stopped() == 0


async def test_ended_key_can_be_submitted_again(workers: Workers) -> None:
    """A request that moved away and comes back with a later attempt starts fresh."""
    worker, frontend = await workers.served(Role.DECODE)
    request = frontend.new(PROMPT, max_tokens=4)
    for attempt in (1, 2, 3):
        request.attempt, request.tokens, request.finish = attempt, [], None
        await frontend.decoded_by(worker.id, request)
    assert request.tokens == expected(PROMPT, 4)


async def test_dead_peer_frees_claims_despite_engine_error(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, dead = await workers.start(Role.DECODE), await workers.start(Role.PREFILL)
    heard = []

    async def fail(engine_id: str) -> None:
        raise RuntimeError("no answer")

    async def hear(peer: str) -> None:
        heard.append(peer)

    monkeypatch.setattr(worker.engine, "fail_peer", fail)
    monkeypatch.setattr(worker.agent._claims, "peer_died", hear)
    at = ("an-engine", "tcp://127.0.0.1:1", "127.0.0.1", 1)
    await worker.agent._peer_died(Departed(dead.id, *at, claims=True))
    assert heard == [dead.id]


SAYS_MORE = WirePrefillStats(num_prompt_tokens=4000, num_computed_tokens=4000)


@pytest.mark.parametrize(
    ("tokens", "stats", "counts"), [([], None, 0), ([7], SAYS_MORE, 4000), ([7], None, 80)], ids=["error", "says", "-"]
)
async def test_what_an_engine_has_computed_of_a_prompt_is_what_it_says(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tokens: list[int], stats: WirePrefillStats | None, counts: int
) -> None:
    """Its rate, which placement reads, would rise with each prompt that it gives up at once, and fall with each that it
    was believed to have cached."""
    agent, counted = (await workers.start(Role.DECODE)).agent, list[int]()
    monkeypatch.setattr(agent._load, "prefilled", counted.append)
    agent._attempts.add(Attempt("r#1", "r", 1, "f", Phase.DECODE, 80, 0.0, blocks=5))
    output = WireOutput("r#1", tokens, finish_reason=FinishReason.ERROR, prefill_stats=stats)
    await agent._serving.deliver(EngineStep([output], None, 0.0, refused={"r#1": "no such grammar"}))
    assert counted == [counts] and not agent._attempts.waiting_tokens


async def test_outputs_that_come_without_a_step_count_for_none(workers: Workers) -> None:
    """Those of requests that an engine refuses: its figures are not newer than before."""
    worker = await workers.start(Role.DECODE)
    load, attempts = worker.agent._load, worker.agent._attempts
    attempt, steps = Attempt("r#1", "r", 1, "f", Phase.DECODE, 80, 0.0, blocks=5), load.steps
    attempts.add(attempt)
    load.given(attempt)
    load.dirty.clear()
    for _ in range(2):  # without a pause, in which the engine would be asked
        await worker.agent._serving.deliver(EngineStep([], None, 0.0))
    assert (load.unsettled, load.steps) == ([attempt], steps) and load.dirty.is_set()
    attempts.remove(attempt)
