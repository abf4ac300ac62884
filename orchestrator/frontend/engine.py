"""A fleet that looks like one engine: vLLM's AsyncLLM, with our router as its engine core.

AsyncLLM renders, tokenizes, detokenizes and does parallel sampling. This file replaces its engine core, and translates
refusals. See vllm/v1/engine/async_llm.py, 0.32.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, PauseMode, async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from orchestrator.fleet.adapters import AdapterView
from orchestrator.fleet.control_calls import Unanswered
from orchestrator.frontend import edge
from orchestrator.frontend.plain import streaming
from orchestrator.frontend.vllm_codec import aborted, join
from orchestrator.frontend.wiring import FleetConnection
from orchestrator.process.tasks import left_s
from orchestrator.router.request import Batch, Failure, Overloaded, State
from orchestrator.wire.control import METHODS, REFUSED

T = TypeVar("T")
STATS_INTERVAL_S = 0.5
_REASONS = {
    "decode_full": "every decode worker is full",
    "no_decode_worker": "no decode worker is ready",
    "no_prefill_worker": "no prefill worker is ready, and routing.fallback refuses to prefill elsewhere",
    "queue_full": "the prefill queue is full, and routing.fallback refuses to prefill elsewhere",
    "queue_unavailable": "the prefill queue is out of reach, and routing.fallback refuses to prefill elsewhere",
    "claim_timeout": "no prefill worker took it in time, and routing.fallback refuses to prefill elsewhere",
    "over_share": "its tenant has asked for more than its share, and others want theirs (limits.shares)",
    "slo_ttft": "the first token would come later than slo.ttft_s allows",
    "paused": "the fleet was paused",
}
_PAUSED = Failure.of_fleet("paused")


class FleetRefused(GracefulHTTPError):
    """429 or 503, with Retry-After set on the HTTP response."""

    def __init__(self, error: Overloaded) -> None:
        message = f"{_REASONS.get(error.reason, error.reason)}; try again in {error.retry_after_s:.1f} s"
        super().__init__(message, HTTPStatus(error.status))
        if (context := edge.current.get()) is not None:
            context.refusal = edge.Refusal(error.status, message, error.retry_after_s)


def _failed(failure: Failure) -> Exception:
    """The exception that the server answers with 500, with 400 if no worker can serve the request, or with 503 if it
    was refused after all. An event stream that has not begun gets the last two too."""
    if failure.rejected is not None:
        return FleetRefused(Overloaded(failure.rejected))
    return _bad_request(failure.why) if failure.by_client else GenerationError(failure.why)


async def _carried_out(calling: Awaitable[T]) -> T:
    """What the workers say to a control call. Raises FleetRefused, 503, where they do not answer."""
    try:
        return await calling
    except Unanswered as error:
        raise unavailable(str(error)) from error


def unavailable(why: str) -> Exception:
    """503: the client may ask again."""
    return _failed(Failure.of_fleet(why))


def _bad_request(why: str) -> VLLMValidationError:
    """400, also of an event stream that has not begun."""
    if (context := edge.current.get()) is not None:
        context.refusal = edge.Refusal(HTTPStatus.BAD_REQUEST, why)
    return VLLMValidationError(why)


@contextlib.asynccontextmanager
async def _counted(completions: int) -> AsyncIterator[None]:
    """Count these completions of the current HTTP request against its key's limits. Raises GracefulHTTPError."""
    context = edge.current.get()
    admission = context.admission if context is not None else None
    if context is None or admission is None or not admission.limited:
        yield
        return
    admission.making += completions
    try:
        await asyncio.sleep(0)  # the request's other prompts come in this turn of the loop: all are made, or none
        if context.refusal is None:
            context.refusal = admission.count(time.monotonic())
        if (refusal := context.refusal) is not None:
            raise GracefulHTTPError(refusal.message, HTTPStatus(refusal.status))
        yield
    finally:
        admission.made(completions)


def _pieces() -> edge.Pieces:
    """The prompts and choices of one HTTP request come in one turn of the loop: let others be served between them."""
    return context.pieces if (context := edge.current.get()) is not None else edge.Pieces()


class FleetCore:
    """Takes the place of AsyncLLM's EngineCoreClient."""

    def __init__(self, connection: FleetConnection, tasks: tuple[str, ...]) -> None:
        self._router = connection.router
        self._fleet = connection.fleet
        self._calls = connection.calls
        self._pause = connection.pause
        self._fleet.pause.on_abort = self._abort_all
        self._tasks = tasks
        self.is_wanted: Callable[[str], bool] = lambda _: True  # whether a request has not been aborted
        self._stats_at, self._stats = 0.0, SchedulerStats()  # reported last
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for outputs of the engines. When none come, return the fleet's load without outputs if it has changed,
        since it still changes after the last output."""
        while True:
            batch = await self._next_batch()
            now, stats = time.monotonic(), None
            if batch is None or now - self._stats_at > STATS_INTERVAL_S:
                self._stats_at, stats = now, self._fleet_stats()
            if batch is None and stats == self._stats:
                continue
            self._stats = stats or self._stats
            outputs, timestamp = (batch.outputs, batch.timestamp) if batch is not None else ([], now)
            return EngineCoreOutputs(outputs=outputs, timestamp=timestamp, scheduler_stats=stats)

    async def _next_batch(self) -> Batch | None:
        """All outputs that have come; None if there were none for STATS_INTERVAL_S."""
        batches, found = self._router.batches, list[Batch]()
        if batches.empty():  # else a timer for each of thousands would cost too much
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s(STATS_INTERVAL_S)):
                    found.append(await batches.get())
        while not batches.empty():
            found.append(batches.get_nowait())
        return join(found) if len(found) > 1 else found[0] if found else None

    def check_admission(self) -> None:
        """Raises FleetRefused when no request can be taken now."""
        context = edge.current.get()
        try:
            self._router.check_admission(context.objectives.name if context is not None else "")
        except Overloaded as error:
            raise FleetRefused(error) from None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await _pieces().begin()
        await self._fleet.pause.ended.wait()
        if not self.is_wanted(request.request_id):
            return  # it was aborted while it waited here, or for those of the same `n` before it
        try:
            await self._router.submit(request)
        except Overloaded as error:
            raise FleetRefused(error) from None
        except VLLMValidationError as error:
            raise _bad_request(str(error)) from None

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Called by AsyncLLM for requests that met a stop string. Requests whose clients left go to `cancel`."""
        self._router.abort(request_ids, to=State.FINISHED)

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._router.abort(request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """Does nothing: the fleet outlives its frontends."""

    def dp_engines_running(self) -> bool:
        return bool(self._router.requests)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        await _carried_out(self._pause.begin(mode, clear_cache))

    pause_generation_async = pause_scheduler_async  # from vLLM 0.33

    async def resume_scheduler_async(self) -> None:
        await _carried_out(self._pause.end())

    async def is_scheduler_paused_async(self) -> bool:
        return self._pause.active

    def _abort_all(self) -> None:
        """End every request in flight with finish reason `abort`, as an engine does that is paused with `abort`. A
        pooling request, which has no part of an answer, is refused."""
        parsed = [active.parsed for active in self._router.requests.values()]
        self._router.abort([each.info.id for each in parsed])
        self._router.batches.put_nowait(Batch([aborted(each, _PAUSED) for each in parsed], time.monotonic()))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """A method of `wire.control`: it makes the same call on the workers, or is refused with 501."""
        method = name.removesuffix("_async")
        if method not in METHODS and method not in REFUSED:
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if method in REFUSED:
                message = f"{method} is not supported over a fleet of engines: {REFUSED[method]}"
                raise GracefulHTTPError(message, HTTPStatus.NOT_IMPLEMENTED)
            return await _carried_out(self._calls.call(method, list(args), kwargs))

        return call

    def _fleet_stats(self) -> SchedulerStats:
        loads = [view.load for view in self._fleet.workers.values() if view.load is not None]
        total = sum(load.blocks_total for load in loads) or 1
        return SchedulerStats(
            num_running_reqs=sum(load.running for load in loads),
            num_waiting_reqs=sum(load.waiting for load in loads),
            kv_cache_usage=1 - sum(load.blocks_free for load in loads) / total if loads else 0.0,
        )


@contextlib.contextmanager
def _engine_core(core: FleetCore) -> Iterator[None]:
    """Inside this context AsyncLLM's constructor gets `core` when it makes its engine core."""
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original


class Choices(ParentRequest):
    """The choices of a request with `n` > 1. One that fails is told of at once, which ends the others: vLLM keeps what
    is not streamed until all have ended."""

    def get_outputs(self, child: str, output: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        outputs, finished = super().get_outputs(child, output)
        return ([output], True) if isinstance(output.stop_reason, Failure) else (outputs, finished)


class FleetLLM(AsyncLLM):
    """AsyncLLM without an engine of its own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        core: FleetCore,
        frontends: int,
        adapters: AdapterView | None = None,
        stat_logger: Any = PrometheusStatLogger,
    ) -> None:
        self.adapters = adapters
        streaming.install_detokenizer()
        async_llm.ParentRequest = Choices  # vLLM has no setting for this either
        with _engine_core(core):
            super().__init__(
                vllm_config,
                executor_class=Executor,  # not used: no engine is started
                # Prometheus only: vLLM's log line is about one engine; the `pd.request` lines are per request.
                log_stats=False,
                stat_loggers=[stat_logger],
                log_requests=False,
                client_count=frontends,
            )
        core.is_wanted = self.output_processor.has_request

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        super().check_admission(n, request_id)
        if request_id is None:  # called before a response begins; after that the placement refuses
            self.engine_core.check_admission()

    async def add_request(self, request_id: str, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        async with _pieces().few():  # vLLM makes all choices of a prompt, of which the fleet may refuse the first
            return await super().add_request(edge.plain_id(request_id), *args, **kwargs)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """AsyncLLM's `generate`. Raises an exception that the server answers with 400, 429 or 500 if the request
        failed."""
        context = edge.current.get()
        making = super().generate(prompt, sampling_params, *args, **kwargs)
        async with _counted(sampling_params.n), contextlib.aclosing(making) as outputs:
            async for output in outputs:
                for part in output.outputs:
                    if isinstance(part.stop_reason, Failure):
                        raise _failed(part.stop_reason)
                yield output
                if context is not None and context.stream is not None:
                    context.stream.begin()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Give an adapter its number, and load it on all workers. Raises CallFailed, FleetRefused."""
        assert self.adapters is not None
        found = await _carried_out(self.adapters.identify(lora_request.lora_name, lora_request.lora_path))
        # Never in place: other content has another number, and vLLM would load it again in every step.
        lora_request.lora_int_id, lora_request.load_inplace = found.number, False
        return bool(await self.engine_core.add_lora_async(lora_request))

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """AsyncLLM's `encode`. Raises as `generate` does."""
        async with _counted(1), contextlib.aclosing(super().encode(*args, **kwargs)) as outputs:
            async for output in outputs:
                if isinstance(output.outputs.data, Failure):
                    raise _failed(output.outputs.data)
                yield output

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        try:
            await super()._add_request(request, *args)
        except BaseException:
            # AsyncLLM has registered the request for outputs that will never come.
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise
        streaming.attach(self.output_processor, request.request_id)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        request_ids = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        if not internal:  # a client may send anything
            request_ids = [edge.plain_id(each) for each in request_ids if isinstance(each, str)]
        self.engine_core.cancel(self.output_processor.abort_requests(request_ids, internal))

    def shutdown(self, timeout: float | None = None) -> None:
        if (renderer := getattr(self, "renderer", None)) is not None:
            renderer.shutdown()
        if (handler := getattr(self, "output_handler", None)) is not None:
            cancel_task_threadsafe(handler)
