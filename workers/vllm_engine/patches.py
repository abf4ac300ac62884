"""Defects of what an engine's processes run (vLLM 0.32.0, PyTorch), mended in those processes, its ranks included.

One gloo device serves all process groups of a single rank: each device polls a hundred times a second. vLLM makes a
dozen such groups per engine, which together cost an idle engine 1.3% of a core and talk to nobody.

Seeded requests do not draw before their prompt is complete. On a CPU a step with chunked prefills samples for them too,
throws the token away and rewinds the request's generator; CPU generators cannot be rewound, and the engine ends ("CPU
Generator does not use offset").

Ranks that share cores sleep while they wait for a message. vLLM's spin for a second after each message, which starves
the ranks that compute, the agents, and the other engines of a CPU.

Later pipeline stages have buffers for what the stage before sends. On a CPU vLLM makes them when it warms up, which it
skips where nothing is compiled, and the first step fails.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from vllm.platforms import current_platform

_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", object)
_device: Any = None
_AWAKE_S = 1.0  # after a message, a rank looks for the next ...
_LOOK_AGAIN_MS = 1  # ... this often, since ZMQ may drop a notice that closely follows another


class SharedDeviceGloo(_Gloo):
    """PyTorch's, made as vLLM and `new_group` make it; groups of several ranks keep a device of their own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> None:
        global _device
        if size > 1:
            super().__init__(store, rank, size, timeout=timeout)
            return
        if _device is None:
            _device = _Gloo.create_device(hostname="127.0.0.1")
        options = _Gloo._Options()
        options._devices, options._threads, options._timeout = [_device], 1, timeout
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """For groups made from now on. Nothing where PyTorch has no gloo."""
    if _Gloo is not object:
        distributed_c10d.ProcessGroupGloo = SharedDeviceGloo


def mend_cpu_engines() -> None:
    """For engines of this process. Nothing where it is not a CPU that computes."""
    if current_platform.is_cpu():
        _spare_generators()
        _make_stage_buffers()
        _sleep_between_messages()


def _sleep_between_messages() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait_for_notice = SpinCondition.wait

    def wait(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = 0
        awake = time.monotonic() < condition.last_read + _AWAKE_S
        wait_for_notice(condition, _LOOK_AGAIN_MS if awake else timeout_ms)

    SpinCondition.wait = wait


def _make_stage_buffers() -> None:
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load_model = CPUModelRunner.load_model

    def load(runner: Any, *args: Any, **kwargs: Any) -> None:
        load_model(runner, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    CPUModelRunner.load_model = load


def _spare_generators() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample(runner: Any, *args: Any) -> Any:
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        runner.spared = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        return GPUModelRunner._sample(runner, *args)

    def bookkeeping(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = GPUModelRunner._bookkeeping_sync(runner, *args, **kwargs)
        runner.input_batch.generators.update(runner.spared)  # rows move only between steps
        return result

    CPUModelRunner._sample = sample
    CPUModelRunner._bookkeeping_sync = bookkeeping
