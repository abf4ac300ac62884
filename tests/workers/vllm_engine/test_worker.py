"""The worker process around the real engine: hand-over, death, role change, exit codes. Small random model, CPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support_steering import order_role
from support_wait import until
from support_workers import Frontend, Request, WorkerProcess, Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.parent import started_ticks
from orchestrator.types import Role
from orchestrator.wire.messages import Claimed, Prefilled, Rejected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

START_S = 120.0
PROMPT = list(range(3, 203))


@contextlib.asynccontextmanager
async def real_workers(server: EmbeddedRedis, model: Path) -> AsyncIterator[Workers]:
    engine_args = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
        "block_size": 32,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
    }
    times = {"timeout_s": 2.0, "start_timeout_s": START_S}
    async with running_workers(
        server,
        workers={"engine_args": engine_args, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, **times},
    ) as workers:
        workers.tree |= {"model": str(model), "engine": "vllm"}
        yield workers


def engine_pids(worker: WorkerProcess) -> list[int]:
    path = Path(f"/proc/{worker.process.pid}/task")
    children: list[int] = []
    for task in path.iterdir():
        children += [int(pid) for pid in (task / "children").read_text().split()]
    return children


async def local_tokens(frontend: Frontend, worker_id: str, prompts: list[list[int]]) -> list[list[int]]:
    """What the decode worker answers when it prefills by itself."""
    requests = [frontend.new(prompt) for prompt in prompts]
    for request in requests:
        frontend.submit_to(worker_id, request)
    await frontend.ended(*requests)
    return [request.tokens for request in requests]


async def remote(frontend: Frontend, prompts: list[list[int]]) -> list[Request]:
    requests = [frontend.new(prompt) for prompt in prompts]
    for request in requests:
        await frontend.enqueue(request)
    return requests


async def test_a_pair_of_real_workers(redis_server: EmbeddedRedis, model: Path) -> None:
    async with real_workers(redis_server, model) as workers:
        prefill = await workers.spawn(Role.PREFILL, wait=False)
        decode = await workers.spawn(Role.DECODE, "--max-num-seqs", "8", wait=False)
        await workers.registered(prefill.id, timeout_s=START_S)
        info = await workers.registered(decode.id, timeout_s=START_S)
        assert info.identity.engine == "vllm" and info.max_num_seqs == 8  # the command line wins
        frontend = await workers.frontend(prefill, decode, binds_to=decode)

        # Hand-over gives the tokens of a local prefill. Different prompts, so that no prefix cache helps.
        prompts = [[i + 3, *PROMPT[: 20 + 17 * i]] for i in range(8)]
        requests = await remote(frontend, prompts)
        await frontend.ended(*requests)
        assert [r.tokens for r in requests] == await local_tokens(frontend, decode.id, prompts)
        assert all(r.got(Claimed) for r in requests)
        await until(lambda: all(r.got(Prefilled) for r in requests))
        await workers.assert_no_leaks()
        assert frontend.loads[prefill.id].kv.transfers == len(prompts)
        assert frontend.loads[prefill.id].prefill_tokens_per_s > 0

        # What cannot be run is refused, not fatal; an abort frees both sides.
        long = frontend.new(list(range(3, 300)) * 10)
        frontend.submit_to(decode.id, long)
        rejected = await until(lambda: long.got(Rejected))
        assert rejected.why.startswith("invalid: ")
        aborted = frontend.new([99, *PROMPT], max_tokens=1000)
        await frontend.enqueue(aborted)
        await until(lambda: aborted.tokens)
        frontend.abort(prefill.id, aborted)
        frontend.abort(decode.id, aborted)
        await workers.assert_no_leaks()

        # Roles change in place, there and back, and each serves the other's role.
        before = (await workers.registered(prefill.id)).kv.engine_id
        await order_role(workers.registry, prefill.id, Role.DECODE)
        await order_role(workers.registry, decode.id, Role.PREFILL)
        await workers.registered(prefill.id, Role.DECODE)
        await workers.registered(decode.id, Role.PREFILL)
        frontend.decode = prefill.id
        (swapped,) = await remote(frontend, [[77, *PROMPT]])
        await frontend.ended(swapped)
        claimed_by = swapped.got(Claimed).kv_source.endpoint.engine_id
        assert claimed_by == (await workers.registered(decode.id)).kv.engine_id
        await workers.assert_no_leaks()
        assert (await workers.registered(prefill.id)).kv.engine_id == before

        # kill -9 of the one that prefills: the other answers by itself, and no engine process is left behind.
        engines = engine_pids(decode)
        assert engines
        (orphaned,) = await remote(frontend, [[3 + i % 500 for i in range(1800)]])
        await until(lambda: orphaned.got(Claimed))
        decode.kill()
        await frontend.ended(orphaned)
        await until(lambda: all(started_ticks(pid) is None for pid in engines), "the engine of a killed worker")

        # An engine that dies takes its worker with it, with an exit code that asks for a restart.
        for pid in engine_pids(prefill):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert await prefill.stopped() == 1
        left = {path.name for path in prefill.folder.iterdir() if not path.name.startswith("torchinductor_")}  # a cache
        assert left == {"fleet.yaml"}, "no socket, nothing of its engine"
        assert prefill.id not in await workers.registry.workers()


async def test_bad_engine_arguments_are_one_line(redis_server: EmbeddedRedis, model: Path) -> None:
    async with real_workers(redis_server, model) as workers:
        wrong = await workers.spawn(Role.DECODE, "--max-model-len", "1000000", wait=False)
        code, _ = await asyncio.gather(wrong.process.wait(), asyncio.sleep(0))
        await wrong.stopped()
        assert (code, wrong.log[-5:]) == (2, wrong.log[-5:])
        assert wrong.log[-1].startswith("decode-worker: ") and "max_model_len" in wrong.log[-1]
