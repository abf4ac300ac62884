"""The worker process around the real engine: its end with the engine, and exit codes. Fleets of them: `tests/e2e`."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support_here import as_main, run_here
from support_redis import fresh_namespace
from support_workers import WorkerProcess, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

START_S = 120.0


def engine_pids(worker: WorkerProcess) -> list[int]:
    path = Path(f"/proc/{worker.process.pid}/task")
    children: list[int] = []
    for task in path.iterdir():
        children += [int(pid) for pid in (task / "children").read_text().split()]
    return children


async def test_a_worker_whose_engine_dies_asks_to_be_restarted_and_leaves_nothing(
    redis_server: EmbeddedRedis, model: Path
) -> None:
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
        redis_server,
        workers={"engine_args": engine_args, "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, **times},
    ) as workers:
        workers.tree |= {"model": str(model), "engine": "vllm"}
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


def test_bad_engine_arguments_are_one_line(redis_server: EmbeddedRedis, model: Path) -> None:
    where = ("--redis", redis_server.url, "--namespace", fresh_namespace(), "--model", str(model))
    wrong = run_here(as_main("workers.main", "decode", *where, "--max-model-len", "1000000"))
    last = wrong.stderr.splitlines()[-1]
    assert wrong.returncode == 2 and last.startswith("decode-worker: ") and "max_model_len" in last, wrong.stderr
