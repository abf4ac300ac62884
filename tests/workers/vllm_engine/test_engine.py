"""Two real engines, a tiny float32 model: whatever happens to a transfer, tokens are right and blocks come back."""

import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support_vllm import Driver, engine_pid, frames, tiny_model
from support_wait import until
from vllm.v1.engine import EngineCoreRequestType

from orchestrator.config.settings import KVConfig
from orchestrator.process.parent import started_ticks
from orchestrator.types import KVEndpoint, KVSource
from workers.engine import EngineDead, InvalidEngineRequest

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 3.0
COUNT = itertools.count()
# What has nothing to do with when KV is sent, and what finds some of it sent and some not.
in_one_mode = pytest.mark.parametrize("pair", ["auto"], indirect=True)
in_parts = pytest.mark.parametrize("pair", ["auto", "layer"], indirect=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(length * 1000 + seed).choices(range(3, 500), k=length)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "layer", "whole"])
async def pair(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Driver, Driver]]:
    """A prefill and a decode engine. Every test leaves both with all blocks free."""
    kv = KVConfig(transfer=request.param, transfer_timeout_s=TIMEOUT_S, verify=True)
    prefill = await Driver.start(model, name="prefill", kv=kv)
    decode = await Driver.start(model, name="decode", kv=kv)
    yield prefill, decode
    await prefill.stop()
    await decode.stop()


async def transfer(prefill: Driver, decode: Driver, key: str, body: list[bytes], decode_first: bool = False) -> None:
    steps = [prefill.prefill(key, body), decode.decode(key, body, prefill.source(key))]
    for step in reversed(steps) if decode_first else steps:
        await step


async def assert_no_leaks(*drivers: Driver) -> None:
    for driver in drivers:
        await driver.idle()
        assert not driver.engine.kv_totals["pd_corrupt"]


@in_one_mode
async def test_steps_report_remaining_prompt_tokens(pair) -> None:
    """In chunks of 256 tokens, also of an answer that goes on here; what is cached is not left, and a prompt of one
    chunk ends with its first step."""
    prefill, _ = pair
    tokens = prompt(1000, next(COUNT) + 500)
    first, again, short = (f"{name}-{next(COUNT)}#1" for name in ("first", "again", "short"))
    await prefill.decode(first, frames(tokens, 4))
    await prefill.done(first)
    assert prefill.tokens_left[first] == [1000 - 256, 1000 - 512, 1000 - 768]
    await prefill.decode(again, frames([*tokens[:640], *prompt(300)], 4))
    await prefill.done(again)
    assert prefill.tokens_left[again] == [300 - 256]
    goes_on, sent = f"goes-on-{next(COUNT)}#2", prompt(100, 6)
    await prefill.decode(goes_on, frames(prompt(700, next(COUNT) + 500), 104), resume_tokens=sent)
    await prefill.done(goes_on)
    assert prefill.tokens_left[goes_on] == [800 - 256, 800 - 512, 800 - 768]
    await prefill.decode(short, frames(prompt(100, next(COUNT)), 4))
    await prefill.done(short)
    assert short not in prefill.tokens_left
    await assert_no_leaks(prefill)


async def test_a_prompt_for_another_engine_is_computed_in_smaller_steps_beside_those_that_decode(model: Path) -> None:
    """With an objective that no step meets a prompt takes at most twice as long as by itself."""
    engine = await Driver.start(model, name="paced", max_num_batched_tokens=2048, tpot_s=1e-6)
    try:
        await engine.prefill("alone", frames(prompt(1900), 4))
        await engine.done("alone")
        await engine.decode("stream", frames(prompt(20), 1900))
        await until(lambda: len(engine.tokens.get("stream", ())) > 20, "it streams")
        await engine.decode("local", frames(prompt(1900, 1), 4))
        await engine.done("local")
        await engine.prefill("beside", frames(prompt(1900, 2), 4))
        await engine.done("beside")
        assert "stream" not in engine.finished
        assert "alone" not in engine.tokens_left and "local" not in engine.tokens_left, "one step each"
        assert engine.tokens_left["beside"]
        await engine.engine.abort(["stream", "alone", "beside"])
    finally:
        await engine.stop()


@pytest.mark.parametrize("length", [5, 31, 32, 33, 64, 255, 256, 257, 700, 1500])
async def test_remote_prefill_gives_the_tokens_of_a_local_one(pair, reference, length: int) -> None:
    prefill, decode = pair
    body = frames(prompt(length), 8)
    await transfer(prefill, decode, f"one-{length}", body, decode_first=length % 2 == 0)
    assert await decode.done(f"one-{length}") == await reference.alone(body)
    assert len(await prefill.done(f"one-{length}")) == 1
    assert str(prefill.finished[f"one-{length}"]) == "length"
    await assert_no_leaks(prefill, decode)


async def test_transferred_kv_is_not_reported_as_cached(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair
    monkeypatch.setattr("workers.engine._MIN_RATE_BYTES", 1)  # the WRITEs of a tiny model are small
    sent = (await prefill.engine.load()).kv.bytes_sent
    await transfer(prefill, decode, "counted", frames(prompt(320, 1)))
    await decode.done("counted")
    stats = decode.stats["counted"]
    assert (stats.num_cached_tokens, stats.num_external_cached_tokens) == (0, 320)
    all_bytes = sent + 320 * prefill.info.kv_bytes_per_token
    await until(lambda: prefill.loads[-1].kv.bytes_sent >= all_bytes, what="the count of all bytes")
    assert prefill.loads[-1].kv.bytes_sent == all_bytes
    assert prefill.loads[-1].kv.transfers > 0 and prefill.loads[-1].kv.transfer_s > 0
    assert prefill.loads[-1].kv.link_bytes_per_s > 0
    assert (await prefill.engine.load()).kv.link_bytes_per_s > 0, "an idle engine tells it too"
    await assert_no_leaks(prefill, decode)


async def test_prefix_hits_on_either_side_are_used_and_counted(pair, reference) -> None:
    prefill, decode = pair
    shared = prompt(192, 2)
    for index, (warm_prefill, warm_decode) in enumerate([(True, False), (False, True), (True, True)]):
        base = [index + 3, *shared]
        for driver, warm in ((prefill, warm_prefill), (decode, warm_decode)):
            if warm:
                await driver.decode(f"warm-{index}", frames(base, 1))
                await driver.done(f"warm-{index}")
        body = frames([*base, *prompt(150, index)])
        await transfer(prefill, decode, f"hit-{index}", body)
        assert await decode.done(f"hit-{index}") == await reference.alone(body)
        assert decode.stats[f"hit-{index}"].num_cached_tokens == (192 if warm_decode else 0)
    await assert_no_leaks(prefill, decode)


async def test_many_at_once_in_both_directions(pair, reference) -> None:
    first, second = pair
    bodies = {f"many-{index}": frames(prompt(40 + 37 * index, 3), 12) for index in range(16)}
    for index, (key, body) in enumerate(bodies.items()):
        source, target = (first, second) if index % 2 else (second, first)
        await transfer(source, target, key, body, decode_first=index % 3 == 0)
    for index, (key, body) in enumerate(bodies.items()):
        target = second if index % 2 else first
        # Both engines know the key; the decode side gives twelve tokens, the prefill side one.
        assert await target.done(key) == await reference.alone(body)
    await assert_no_leaks(first, second)


@in_one_mode
async def test_a_decode_aborted_while_it_waits_gives_its_blocks_back(pair) -> None:
    prefill, decode = pair
    # Prefill knows nothing of the request, so decode waits.
    await decode.decode("waits", frames(prompt(500, 4)), prefill.source("waits"))
    await until(lambda: any(load.blocks_free < decode.info.blocks_total for load in decode.loads[-1:]))
    await decode.engine.abort(["waits"])
    await assert_no_leaks(decode)
    # The withdrawal overtook the prefill: nothing is kept there either.
    await prefill.prefill("waits", frames(prompt(500, 4)))
    await prefill.done("waits")
    await assert_no_leaks(prefill)


@in_one_mode
async def test_blocks_waiting_for_stopped_engine_are_counted(pair) -> None:
    prefill, decode = pair
    await transfer(prefill, decode, "before", frames(prompt(100)))  # they are connected
    await decode.done("before")
    os.kill(engine_pid(prefill), signal.SIGSTOP)
    try:
        await decode.decode("stuck", frames(prompt(500, 5)), prefill.source("stuck"))
        await until(lambda: any(load.blocks_free < decode.info.blocks_total for load in decode.loads[-1:]))
        await decode.engine.abort(["stuck"])
        await until(lambda: decode.loads[-1].kv.withdrawing_blocks == -(-500 // 32), what="16 blocks are said to wait")
    finally:
        os.kill(engine_pid(prefill), signal.SIGCONT)
    await assert_no_leaks(prefill, decode)
    assert decode.loads[-1].kv.withdrawing_blocks == 0


async def test_a_decode_aborted_at_any_moment_frees_both_sides(pair) -> None:
    prefill, decode = pair
    for index in range(20):
        key = f"abort-{index}"
        await transfer(prefill, decode, key, frames(prompt(900, 100 + index)), decode_first=index % 2 == 0)
        await asyncio.sleep(index * 0.003)
        await decode.engine.abort([key])
    await assert_no_leaks(prefill, decode)


async def test_an_aborted_prefill_is_recomputed_by_decode(pair, reference) -> None:
    prefill, decode = pair
    came = []
    for index in range(12):
        key, body = f"lost-{index}", frames(prompt(1200, 200 + index), 4)
        await transfer(prefill, decode, key, body)
        await asyncio.sleep(index * 0.004)
        await prefill.engine.abort([key])
        assert await decode.done(key) == await reference.alone(body)
        said = decode.stats[key]
        came.append((said.num_external_cached_tokens, said.num_computed_tokens))
    assert came[0] == (0, 1200) and {*came} <= {(0, 1200), (1200, 0)}, "the router learns of it"
    await assert_no_leaks(prefill, decode)


@in_parts
async def test_a_preempted_prefill_pushes_the_right_kv(pair, reference) -> None:
    prefill, decode = pair

    async def preempts(key: str, seed: int, chunks: int) -> bool:
        """False if all was computed before it could, and only the sending was left, which vLLM does not preempt."""
        body = frames(prompt(1800, seed), 4)
        await transfer(prefill, decode, key, body)
        while len(prefill.tokens_left.get(key, ())) < chunks:
            await asyncio.sleep(0.001)
        in_time = True
        try:
            await prefill.engine.call("reset_prefix_cache", [True], {})
        except RuntimeError:
            in_time = False
        # What vLLM preempts begins again in other blocks.
        assert await decode.done(key) == await reference.alone(body)
        return in_time

    for chunks in range(1, 6):  # of 8
        for again in range(10):
            if await preempts(f"preempt-{chunks}-{again}", 500 + 10 * chunks + again, chunks):
                break
        else:
            pytest.fail(f"no prompt could be preempted after {chunks} chunks")
    await assert_no_leaks(prefill, decode)
    assert prefill.preempted


@pytest.mark.parametrize("pair", ["layer", "whole"], indirect=True)
async def test_many_requests_with_aborts_on_both_sides(pair, reference) -> None:
    """No wrong token, no leaked block, and the bytes of every completed transfer are the same at both ends. In the mode
    `auto` test_thousand.py asks for this."""
    prefill, decode = pair
    chance = random.Random(11)
    verified = decode.engine.kv_totals["pd_verified"]
    aborted = set()

    async def one(number: int) -> None:
        key, body = f"soak-{number}", frames(prompt(chance.randrange(40, 700), 1000 + number), 4)
        await transfer(prefill, decode, key, body, decode_first=chance.random() < 0.5)
        fate = chance.random()
        if fate < 0.15:
            await asyncio.sleep(chance.random() * 0.05)
            if fate < 0.1:
                aborted.add(key)
                await decode.engine.abort([key])
            if fate >= 0.1 or chance.random() < 0.5:
                await prefill.engine.abort([key])
        if key not in aborted:
            assert await decode.done(key) == await reference.alone(body), key

    for start in range(0, 60, 12):
        await asyncio.gather(*(one(number) for number in range(start, start + 12)))
    await assert_no_leaks(prefill, decode)
    assert len(aborted) > 2
    assert decode.engine.kv_totals["pd_verified"] - verified > 25


@in_one_mode
async def test_a_prefill_that_never_runs_ends_in_recompute_after_the_timeout(pair, reference) -> None:
    prefill, decode = pair
    body = frames(prompt(300, 5))
    await decode.decode("never", body, prefill.source("never"))
    began = time.monotonic()
    assert await decode.done("never") == await reference.alone(body)
    assert time.monotonic() - began >= TIMEOUT_S * 0.5
    await assert_no_leaks(prefill, decode)


@in_one_mode
async def test_unclaimed_blocks_are_freed_after_lease(pair) -> None:
    prefill, _ = pair
    await prefill.prefill("unwanted", frames(prompt(300, 6)))
    await prefill.done("unwanted")
    assert (await prefill.engine.load()).blocks_free < prefill.info.blocks_total
    await assert_no_leaks(prefill)


@in_one_mode
async def test_prefilled_blocks_are_freed_at_once_when_their_request_is_aborted(pair) -> None:
    prefill, _ = pair
    await prefill.prefill("dropped", frames(prompt(300, 6)))
    await prefill.done("dropped")
    began = time.monotonic()
    await prefill.engine.abort(["dropped"])
    await assert_no_leaks(prefill)
    assert time.monotonic() - began < TIMEOUT_S / 2


@in_one_mode
async def test_an_unreachable_prefill_engine_ends_in_recompute(pair, reference) -> None:
    _, decode = pair
    body = frames(prompt(200, 7))
    nowhere = KVSource(KVEndpoint("no-such-engine", "127.0.0.1", 9), "nowhere")
    await decode.decode("nowhere", body, nowhere)
    assert await decode.done("nowhere") == await reference.alone(body)
    await assert_no_leaks(decode)


@in_one_mode
async def test_a_silent_peer_does_not_delay_handshakes_with_others(model: Path, pair, reference) -> None:
    _, decode = pair
    fresh = await Driver.start(model, name="fresh")
    body = frames(prompt(200, 10))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never says a word
        nowhere = KVSource(KVEndpoint("silent-engine", "127.0.0.1", silent.getsockname()[1]), "silent")
        await decode.decode("silent", body, nowhere)
        await transfer(fresh, decode, "prompt-answer", body)
        right = await reference.alone(body)
        assert await decode.done("prompt-answer") == right
        assert "silent" not in decode.finished
        assert await decode.done("silent") == right
    await assert_no_leaks(fresh, decode)
    await fresh.stop()


@in_one_mode
async def test_waiting_requests_follow_frontend_order(pair, reference) -> None:
    _, decode = pair
    for number in range(16):  # as many as it runs
        await decode.decode(f"runs-{number}", frames(prompt(10, number), 60))
    await until(lambda: all(f"runs-{number}" in decode.tokens for number in range(16)), what="a full engine")
    places = {"in 5 s": 5.0, "now": 0.0, "5 s ago": -5.0}
    for number, (key, behind_s) in enumerate(places.items()):
        await decode.decode(key, frames(prompt(250, 90 + number), 1), behind_s=behind_s)  # each a step of its own
    for key in places:
        await decode.done(key)
    assert [key for key in decode.finished if key in places] == ["5 s ago", "now", "in 5 s"]
    await assert_no_leaks(decode)


@in_one_mode
async def test_unsupported_request_is_refused_by_name(pair) -> None:
    _, decode = pair
    with pytest.raises(InvalidEngineRequest, match="broken: undecodable"):
        await decode.decode("broken", [b"\x93junk"])
    with pytest.raises(InvalidEngineRequest, match="over: 9 tokens are out already, of at most 8"):
        await decode.decode("over", frames(prompt(20), 8), resume_tokens=list(range(9)))
    # vLLM's engine core would not refuse these: it would die of them.
    longest = decode.info.identity.max_model_len - 1
    with pytest.raises(InvalidEngineRequest, match=f"long: expected a prompt of 1 to {longest} tokens, got 9000"):
        await decode.decode("long", frames([1] * 9000))
    with pytest.raises(InvalidEngineRequest, match="foreign: expected token ids of 0 to"):
        await decode.decode("foreign", frames([1, 2, 10**6]))
    with pytest.raises(InvalidEngineRequest, match="empty: expected a prompt of 1"):
        await decode.decode("empty", frames([]))
    with pytest.raises(ValueError, match="shutdown: not an engine's method"):
        await decode.engine.call("shutdown", [], {})
    assert await decode.engine.call("reset_prefix_cache", [], {}) is True
    await decode.engine.abort(["never heard of"])
    await assert_no_leaks(decode)


@in_one_mode
async def test_outputs_decode_as_vllms_own(pair) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    _, decode = pair
    encoded = decode.engine.encode_outputs([EngineCoreOutput("r", [1, 2])], 12.5)
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(encoded)
    assert (decoded.outputs[0].request_id, decoded.outputs[0].new_token_ids, decoded.timestamp) == ("r", [1, 2], 12.5)


def _cpu_seconds(pid: int) -> float:
    """Time on a core, of all threads; exact, unlike the tick-sampled times of /proc/PID/stat."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


@in_one_mode
async def test_an_idle_engine_uses_little_of_a_core(pair) -> None:
    pids = [engine_pid(driver) for driver in pair]
    seen = []
    # The best of a few looks: an engine that spins does so in each, while leases of earlier tests end in time.
    for _ in range(8):
        before, began = [_cpu_seconds(pid) for pid in pids], time.monotonic()
        await asyncio.sleep(2.0)
        elapsed = time.monotonic() - began
        seen.append(max((_cpu_seconds(pid) - start) / elapsed for pid, start in zip(pids, before, strict=True)))
        if seen[-1] < 0.02:
            return
    pytest.fail(f"shares of a core used while idle: {seen}")


@in_parts
async def test_a_killed_engine_costs_no_request_and_no_block_on_either_side(model: Path, pair, reference) -> None:
    prefill, decode = pair
    doomed = await Driver.start(model, name="doomed")
    bodies = {f"orphan-{index}": frames(prompt(1400, 300 + index), 4) for index in range(4)}
    for index, (key, body) in enumerate(bodies.items()):
        await transfer(doomed, decode, key, body)
        await transfer(prefill, doomed, f"half-{index}", frames(prompt(1400, 400 + index)))
    os.kill(engine_pid(doomed), signal.SIGKILL)
    await until(lambda: isinstance(doomed.error, EngineDead), what="EngineDead from next_step")
    with pytest.raises(EngineDead):
        await doomed.engine.load()
    for driver in pair:
        await driver.engine.fail_peer(doomed.info.kv.engine_id)
    for key, body in bodies.items():
        assert await decode.done(key) == await reference.alone(body)
    for index in range(4):
        await prefill.done(f"half-{index}")
    # A request that names it afterwards does not even try.
    await decode.decode("later", bodies["orphan-0"], doomed.source("later"))
    assert await decode.done("later") == await decode.done("orphan-0")
    await doomed.stop()
    await assert_no_leaks(*pair)


def orphan(model: Path, backend: str, told: Any) -> None:
    """Runs in a process that is forked from this one: it starts an engine, and says which process that is."""
    asyncio.events._set_running_loop(None)

    async def main() -> None:
        args = {"distributed_executor_backend": backend} if backend else {}
        driver = await Driver.start(model, name="orphan", **args)
        told.send(engine_pid(driver))
        await asyncio.Event().wait()

    asyncio.run(main())


def _descendants(pid: int) -> set[int]:
    children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children |= {int(child) for child in (thread / "children").read_text().split()}
    return children.union(*(_descendants(child) for child in children))


@pytest.mark.parametrize("backend", ["", "mp"], ids=["computes-itself", "has-a-rank"])
async def test_no_engine_process_outlives_its_parent(model: Path, backend: str) -> None:
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe(duplex=False)
    parent = forking.Process(target=orphan, args=(model, backend, theirs))
    parent.start()
    theirs.close()
    try:
        await until(ours.poll, "its engine has started")
        engine, family = ours.recv(), _descendants(parent.pid or 0)
        assert engine in family
    finally:
        parent.kill()
    await until(lambda: not any(started_ticks(pid) for pid in family), what="the end of every process")
    parent.join()


@in_one_mode
async def test_engines_that_differ_still_answer(model: Path, tmp_path: Path, pair, reference) -> None:
    """KV of another block size or of another model is not taken: decode computes it without waiting."""
    first, second = pair
    bodies = {f"differ-{length}": frames(prompt(length, 9), 6) for length in (40, 300, 1100)}
    coarse = await Driver.start(model, name="coarse", block_size=64)
    for key, body in bodies.items():
        right = await reference.alone(body)
        await transfer(coarse, first, f"fine-{key}", body)
        assert await first.done(f"fine-{key}", timeout_s=10.0) == right
        await transfer(second, coarse, f"coarse-{key}", body)
        assert await coarse.done(f"coarse-{key}", timeout_s=10.0) == right
    assert coarse.engine.kv_totals["pd_receives_failed"] == len(bodies)
    await assert_no_leaks(first, second, coarse)
    await coarse.stop()

    stranger = await Driver.start(tiny_model(tmp_path / "other", layers=3), name="stranger")
    for key, body in bodies.items():
        await transfer(first, stranger, f"strange-{key}", body)
        assert len(await stranger.done(f"strange-{key}", timeout_s=10.0)) == 6
    assert stranger.engine.kv_totals["pd_receives_failed"] == len(bodies)
    await assert_no_leaks(first, stranger)
    await stranger.stop()


async def test_a_false_alarm_about_a_living_engine_corrupts_nothing(pair, reference) -> None:
    """Last of the tests with this pair: for a while decode does not ask this prefill engine for KV."""
    prefill, decode = pair
    for index in range(4):
        key, body = f"alarm-{index}", frames(prompt(1500, 600 + index), 4)
        await transfer(prefill, decode, key, body)
        await asyncio.sleep(0.01 * index)
        await decode.engine.fail_peer(prefill.info.kv.engine_id)
        await prefill.engine.fail_peer(decode.info.kv.engine_id)
        assert await decode.done(key) == await reference.alone(body)
    await assert_no_leaks(prefill, decode)


async def test_a_taken_kv_port_is_an_error_and_not_a_wait(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineDead, match="did not start"):
            await Driver.start(model, name="late", kv_port=taken.getsockname()[1])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_that_does_not_start_says_why(tmp_path: Path, ranks: int) -> None:
    """vLLM says it in the log of the process that failed: the engine's, or a rank's."""
    empty = tiny_model(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    with pytest.raises(EngineDead, match="did not start: RuntimeError: Cannot find any model weights"):
        await Driver.start(empty, name="empty", tensor_parallel_size=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_whose_ranks_make_no_connector_does_not_start(model: Path, ranks: int) -> None:
    """It would serve, and each prompt would be computed again where it is decoded, or wait for KV in vain."""
    name = "support_unconnected.UnconnectedWorker"
    with pytest.raises(ValueError, match=f"workers.engine_args.worker_cls: {name} makes no KV connector.*; remove it"):
        await Driver.start(model, name="unconnected", worker_cls=name, tensor_parallel_size=ranks)


@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), ("a rank killed", 2), ("tells", 1), ("tells", 2)])
async def test_an_engine_that_is_killed_ends_suddenly_and_one_that_tells_does_not(
    model: Path, how: str, ranks: int
) -> None:
    """Of a group's engines the one that was killed is the first to have died, whatever the others say of theirs."""
    doomed = await Driver.start(model, name="doomed", tensor_parallel_size=ranks)
    assert not await doomed.engine.ended_suddenly()
    if how == "tells":
        await doomed.engine._client._send_input(EngineCoreRequestType.EXECUTOR_FAILED, 0)
    else:
        facts = await doomed.engine.call_engine("pd_describe")
        os.kill(facts["rank_pids"][0] if ranks > 1 else engine_pid(doomed), signal.SIGKILL)
    await until(lambda: isinstance(doomed.error, EngineDead), what="EngineDead from next_step")
    assert await doomed.engine.ended_suddenly() == (how != "tells")
    await doomed.stop()
