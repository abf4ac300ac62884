"""A role says which new work a worker takes: it changes at once, and what runs of the old role goes on to its end."""

import pytest
from support_steering import order_role
from support_wait import until
from support_workers import Frontend, LocalWorker, Request, Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.types import Role
from orchestrator.wire.messages import Claimed, Prefilled, PrefillFailed, Rejected

PROMPT = list(range(100, 400))
LONG = 1500  # tokens: an answer of seconds, which a test ends as soon as it need not run any more


async def claims_beside(
    workers: Workers, prompt: list[int], tokens: int
) -> tuple[LocalWorker, Frontend, Request, Request]:
    """A worker that streams so many tokens when it becomes a prefill worker, with a job in the queue."""
    moved, other = await workers.start(Role.DECODE, speed=1.0), await workers.start(Role.DECODE)
    frontend = await workers.frontend(moved, other, binds_to=other)
    stream, remote = frontend.new(prompt, tokens), frontend.new(PROMPT)
    frontend.submit_to(moved.id, stream)
    await until(lambda: stream.tokens, "it streams")
    await order_role(workers.registry, moved.id, Role.PREFILL)
    await workers.registered(moved.id, Role.PREFILL)
    await frontend.enqueue(remote)
    return moved, frontend, stream, remote


async def test_a_decode_worker_claims_while_its_answers_still_stream(workers: Workers) -> None:
    moved, frontend, stream, remote = await claims_beside(workers, PROMPT[:20], LONG)
    await frontend.finished(remote)
    assert remote.claimed_by == [moved.id] and remote.got(Prefilled)
    seen = len(stream.tokens)
    await until(lambda: len(stream.tokens) > seen, "it streams on")
    assert stream.finish is None and not stream.got(Rejected)
    assert (await moved.engine.load()).running == 1
    frontend.submit_to(moved.id, remote)  # by a frontend that does not know that it was prefilled
    refused = await until(lambda: remote.got(Rejected), "its engine may still have that key")
    assert refused.leaving and refused.why == "this worker prefilled it"
    frontend.abort(moved.id, stream)
    await workers.assert_no_leaks()


async def test_a_prompt_is_computed_in_steps_that_leave_room_for_the_answers_beside_it(
    redis_server: EmbeddedRedis,
) -> None:
    """All of it fits into one step, and is computed in one where nothing decodes beside it."""
    async with running_workers(redis_server, slo={"tpot_s": 0.005}) as workers:
        moved, frontend, stream, remote = await claims_beside(workers, PROMPT[:20], LONG)
        await frontend.finished(remote)
        assert stream.finish is None and len(remote.got(Prefilled).chunk_ends_s) > 0
        frontend.abort(moved.id, stream)

        async def idle() -> bool:
            return not (await moved.engine.load()).running

        await until(idle, "nothing decodes")
        alone = frontend.new([token + 1 for token in PROMPT])
        await frontend.enqueue(alone)
        await frontend.finished(alone)
        assert alone.got(Prefilled).chunk_ends_s == []


async def test_a_prefill_worker_decodes_while_what_it_claimed_is_computed_and_pushed(workers: Workers) -> None:
    moved = await workers.start(Role.PREFILL, speed=1.0, prefill_us_per_token=2000.0, max_num_batched_tokens=32)
    decode = await workers.start(Role.DECODE)
    frontend = await workers.frontend(moved, decode, binds_to=decode)
    remote, here = frontend.new(PROMPT, 4), frontend.new(PROMPT[:8], 2)
    await frontend.claimed(remote)
    await order_role(workers.registry, moved.id, Role.DECODE)
    await workers.registered(moved.id, Role.DECODE)
    frontend.submit_to(moved.id, here)
    await frontend.finished(here, remote)
    assert remote.claimed_by == [moved.id] and remote.got(Prefilled) and not remote.got(PrefillFailed)
    assert (await decode.engine.load()).kv.failures == 0
    late = frontend.new(PROMPT)
    await frontend.enqueue(late)
    third = await workers.start(Role.PREFILL)
    await frontend.meet(third.info)
    await frontend.finished(late)
    assert late.claimed_by == [third.id], "a decode worker claims nothing"
    await workers.assert_no_leaks()


async def test_a_prompt_that_it_prefilled_is_cached_when_it_decodes_it_after_all(workers: Workers) -> None:
    """As a stand-in for the last decode worker does: only what fills no block is computed again."""
    moved, other = await workers.start(Role.PREFILL, speed=1.0), await workers.start(Role.DECODE)
    frontend = await workers.frontend(moved, other, binds_to=other)
    remote, again = frontend.new(PROMPT), frontend.new(PROMPT, LONG)
    await frontend.enqueue(remote)
    await frontend.finished(remote)
    await order_role(workers.registry, moved.id, Role.DECODE)
    await workers.registered(moved.id, Role.DECODE)
    frontend.submit_to(moved.id, again)
    await until(lambda: again.tokens, "it streams")
    (request,) = moved.engine._scheduler.requests.values()
    assert len(PROMPT) - request.stay.hit_tokens < moved.info.identity.block_size
    frontend.abort(moved.id, again)
    await workers.assert_no_leaks()


async def test_a_change_back_at_once_disturbs_nothing(workers: Workers) -> None:
    moved, frontend = await workers.served(Role.DECODE, speed=1.0)
    stream = frontend.submit(moved.id, PROMPT[:20], 60)
    await until(lambda: stream.tokens, "it streams")
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE):
        await order_role(workers.registry, moved.id, role)
    again = frontend.submit(moved.id, PROMPT[:20])
    await frontend.finished(stream, again)
    assert not stream.got(Rejected) and not again.got(Rejected)

    async def settled() -> bool:
        reading = await workers.registry.read()
        return not reading.orders and reading.workers[moved.id].role is Role.DECODE

    await until(settled, "no order is left")
    await workers.assert_no_leaks()


async def test_it_claims_no_more_than_its_answers_leave_room_for(redis_server: EmbeddedRedis) -> None:
    """A prompt that does not fit beside them waits in the queue, not in the engine."""
    small = {"num_gpu_blocks_override": 32, "max_model_len": 512}
    async with running_workers(redis_server, workers={"engine_args": small}) as workers:
        moved, frontend, stream, remote = await claims_beside(workers, PROMPT, 150)
        claimed_before_it_ended = False

        def claimed() -> bool:
            nonlocal claimed_before_it_ended
            claimed_before_it_ended |= bool(remote.got(Claimed)) and stream.finish is None
            return bool(remote.got(Claimed))

        await until(claimed, "a claim")
        assert not claimed_before_it_ended
        await frontend.finished(stream, remote)


async def test_it_claims_a_prompt_that_fits_beside_its_answers_however_tight_the_objective(
    redis_server: EmbeddedRedis,
) -> None:
    """A busy worker would claim a few tokens, and the longest prompt of the model would not fit."""
    sizes = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
    slo = {"ttft_s": 0.01}
    async with running_workers(redis_server, workers={"engine_args": sizes}, slo=slo) as workers:
        moved, frontend, stream, remote = await claims_beside(workers, PROMPT, 700)
        await frontend.finished(remote)
        assert remote.claimed_by == [moved.id] and stream.finish is None
        frontend.abort(moved.id, stream)


@pytest.mark.parametrize("role", list(Role))
async def test_a_frontend_that_has_not_heard_of_a_role_is_served(workers: Workers, role: Role) -> None:
    worker, frontend = await workers.served(role)
    request = frontend.submit(worker.id, PROMPT)
    await frontend.finished(request)
