"""Asynchronous scheduling on CPUs, where vLLM turns it off: a step is begun before the one before it has ended.

Engines that are forked from the process that calls `install` have it too. The model computes when it is told, as
ever, but its tokens are given back later, as a device's are: the scheduler has begun the next step by then.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

LATE_S = 0.02  # after which a step's tokens are given back


class Event:
    """A CPU has computed what it was told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """`put` sets an attribute, as `setattr` does: a test's takes it back."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner

    check, wrapper = CpuPlatform.check_and_update_config, cpu_model_runner._torch_cuda_wrapper

    def check_and_update_config(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    @contextlib.contextmanager
    def without_device() -> Iterator[None]:
        event, torch.cuda.Event = torch.cuda.Event, Event
        try:
            with wrapper():
                yield
        finally:
            torch.cuda.Event = event

    class Late(AsyncModelRunnerOutput):
        def __init__(
            self,
            *,
            model_runner_output: Any,
            sampled_token_ids: torch.Tensor,
            logprobs_tensors: Any,
            invalid_req_indices: list[int],
            **_: Any,
        ) -> None:
            self._output, self._invalid, self._logprobs = model_runner_output, invalid_req_indices, logprobs_tensors
            self.sampled_token_ids_cpu, self.async_copy_ready_event = sampled_token_ids, Event()

        def get_output(self) -> Any:
            time.sleep(LATE_S)
            tokens = self.sampled_token_ids_cpu.tolist()
            for index in self._invalid:
                tokens[index].clear()
            self._output.sampled_token_ids = tokens
            self._output.logprobs = self._logprobs.tolists() if self._logprobs else None
            return self._output

    put(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
    put(cpu_model_runner, "_torch_cuda_wrapper", without_device)
    put(gpu_model_runner, "AsyncGPUModelRunnerOutput", Late)
