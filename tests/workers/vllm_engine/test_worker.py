"""The worker process around the real engine: its end with the engine, and exit codes. Fleets of them: `tests/e2e`."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support_workers import WorkerProcess, Workers, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

START_S = 120.0


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


async def test_a_worker_whose_engine_dies_asks_to_be_restarted_and_leaves_nothing(
    redis_server: EmbeddedRedis, model: Path
) -> None:
    async with real_workers(redis_server, model) as workers:
        worker = await workers.spawn(Role.DECODE, "--max-num-seqs", "8", wait=False)
        info = await workers.registered(worker.id, timeout_s=START_S)
        assert info.identity.engine == "vllm" and info.max_num_seqs == 8  # the command line wins
        for pid in engine_pids(worker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert await worker.stopped() == 1
        left = {path.name for path in worker.folder.iterdir() if not path.name.startswith("torchinductor_")}  # a cache
        assert left == {"fleet.yaml"}, "no socket, nothing of its engine"
        assert worker.id not in await workers.registry.workers()


async def test_bad_engine_arguments_are_one_line(redis_server: EmbeddedRedis, model: Path) -> None:
    async with real_workers(redis_server, model) as workers:
        wrong = await workers.spawn(Role.DECODE, "--max-model-len", "1000000", wait=False)
        code, _ = await asyncio.gather(wrong.process.wait(), asyncio.sleep(0))
        await wrong.stopped()
        assert (code, wrong.log[-5:]) == (2, wrong.log[-5:])
        assert wrong.log[-1].startswith("decode-worker: ") and "max_model_len" in wrong.log[-1]
