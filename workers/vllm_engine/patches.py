"""Two defects of what an engine process runs (vLLM 0.32.0, PyTorch), mended in that process.

One gloo device serves all process groups of a single rank: each device polls a hundred times a second. vLLM makes a
dozen such groups per engine, which together cost an idle engine 1.3% of a core and talk to nobody.

Seeded requests do not draw before their prompt is complete. On a CPU a step with chunked prefills samples for them too,
throws the token away and rewinds the request's generator; CPU generators cannot be rewound, and the engine ends ("CPU
Generator does not use offset").
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from vllm.platforms import current_platform

_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", object)
_device: Any = None


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


def spare_generators() -> None:
    """For engines of this process. Nothing where it is not a CPU that computes."""
    if not current_platform.is_cpu():
        return
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
