"""Seeded requests beside chunked prefills on a CPU, which end vLLM's engine (0.32.0).

A step samples for prompts that are not complete yet too, throws that away and rewinds the request's generator, but
CPU generators cannot be rewound ("CPU Generator does not use offset"). Here such rows do not draw in the first place.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform


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
