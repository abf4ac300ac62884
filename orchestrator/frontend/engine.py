"""A fleet that looks like one engine: vLLM's AsyncLLM whose engine core is our router.

Rendering, tokenizing, detokenizing and parallel sampling stay vLLM's (`AsyncLLM`); this file gives it another engine
core and translates refusals. See vllm/v1/engine/async_llm.py, 0.32.0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from orchestrator.fleet.control_calls import ControlCalls
from orchestrator.fleet.view import Fleet
from orchestrator.frontend import edge
from orchestrator.router.request import Overloaded, State
from orchestrator.router.router import Router

STATS_INTERVAL_S = 0.5
_REASONS = {
    "decode_full": "every decode worker is full",
    "no_decode_worker": "no decode worker is ready",
    "slo_ttft": "the first token would come later than slo.ttft_s allows",
}


class FleetRefused(GracefulHTTPError):
    """429 or 503, with Retry-After set on the HTTP response."""

    def __init__(self, error: Overloaded) -> None:
        message = f"{_REASONS.get(error.reason, error.reason)}; try again in {error.retry_after_s:.1f} s"
        super().__init__(message, HTTPStatus(error.status))
        if (context := edge.current.get()) is not None:
            context.refusal = edge.Refusal(error.status, message, error.retry_after_s)


class FleetCore:
    """Stands where AsyncLLM has its EngineCoreClient. Control calls go to every worker."""

    def __init__(self, router: Router, fleet: Fleet, calls: ControlCalls, tasks: tuple[str, ...]) -> None:
        self._router = router
        self._fleet = fleet
        self._calls = calls
        self._tasks = tasks
        self._stats_at = 0.0
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    async def get_output_async(self) -> EngineCoreOutputs:
        batch = await self._router.batches.get()
        now = time.monotonic()
        stats = None
        if now - self._stats_at > STATS_INTERVAL_S:
            self._stats_at, stats = now, self._fleet_stats()
        return EngineCoreOutputs(outputs=batch.outputs, timestamp=batch.timestamp, scheduler_stats=stats)

    def check_admission(self) -> None:
        """Raises FleetRefused when no request can be taken now."""
        try:
            self._router.check_admission()
        except Overloaded as error:
            raise FleetRefused(error) from None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        try:
            await self._router.submit(request)
        except Overloaded as error:
            raise FleetRefused(error) from None

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Called by AsyncLLM for requests that met a stop string; those that clients left go by `cancel`."""
        self._router.abort(request_ids, to=State.FINISHED)

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._router.abort(request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """The fleet outlives its frontends."""

    def dp_engines_running(self) -> bool:
        return bool(self._router.requests)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """`<method>_async(*args)`: the same call on every worker; workers refuse what they do not offer."""
        if not name.endswith("_async"):
            raise AttributeError(name)
        method = name.removesuffix("_async")

        async def call(*args: Any) -> Any:
            return _combine(await self._calls.call(method, list(args)))

        return call

    def _fleet_stats(self) -> SchedulerStats:
        loads = [view.load for view in self._fleet.workers.values() if view.load is not None]
        total = sum(load.blocks_total for load in loads) or 1
        return SchedulerStats(
            num_running_reqs=sum(load.running for load in loads),
            num_waiting_reqs=sum(load.waiting for load in loads),
            kv_cache_usage=1 - sum(load.blocks_free for load in loads) / total if loads else 0.0,
        )


def _combine(results: list[Any]) -> Any:
    """One answer for the fleet: true if true everywhere, what all have in common, else the first."""
    if results and all(isinstance(result, bool) for result in results):
        return all(results)
    if results and all(isinstance(result, (list, set)) for result in results):
        return set.intersection(*(set(result) for result in results))
    return results[0] if results else None


@contextlib.contextmanager
def _engine_core(core: FleetCore) -> Iterator[None]:
    """AsyncLLM's constructor makes its engine core by this one call: here it gets ours."""
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original


class FleetLLM(AsyncLLM):
    """AsyncLLM without an engine of its own."""

    def __init__(self, vllm_config: VllmConfig, core: FleetCore, frontends: int) -> None:
        with _engine_core(core):
            super().__init__(
                vllm_config,
                executor_class=Executor,  # of the engine that is not started
                # Prometheus alone: what a log line would say of one engine is said in `pd.request`, per request.
                log_stats=False,
                stat_loggers=[PrometheusStatLogger],
                log_requests=False,
                client_count=frontends,
            )

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        super().check_admission(n, request_id)
        if request_id is None:  # before a response has begun; the placement itself refuses after that
            self.engine_core.check_admission()

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        try:
            await super()._add_request(request, *args)
        except BaseException:
            # AsyncLLM has registered the request for outputs that will never come.
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        request_ids = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        self.engine_core.cancel(self.output_processor.abort_requests(request_ids, internal))

    def shutdown(self, timeout: float | None = None) -> None:
        if (renderer := getattr(self, "renderer", None)) is not None:
            renderer.shutdown()
        if (handler := getattr(self, "output_handler", None)) is not None:
            cancel_task_threadsafe(handler)
