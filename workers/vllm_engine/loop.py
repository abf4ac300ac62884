"""The loop of an engine: its statistics, what it waits for with nothing to compute, and what waits for its copies.

It waits until it is woken, instead of asking a thousand times a second. An input wakes it, and KV that has come or
gone: a rank in this process sets an event, one in another process sends a datagram (`connectors/wake.py`) to a socket
in the folder of the engine's sockets, its user's alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import RequestStatus

try:
    from vllm.utils.watch_dog import get_watch_dog
except ImportError:  # vLLM 0.32
    get_watch_dog = None

from workers.engine import PrefixChanges
from workers.vllm_engine.codec.messages import PREFIX_STATS, TOKENS_LEFT_STATS, PrefixCollector
from workers.vllm_engine.steps import STARTS, computed_tokens, steps_of

# The longest wait, in case something does not wake the engine. Each step that finds nothing costs a rank in another
# process, and the engine, a millisecond of CPU time.
_WOKEN_S = 0.25
# Where nobody wakes it: the first wait, the longest, and the steps between them.
_FIRST_POLL_S, _POLL_S, _POLL_STEPS = 0.001, 0.02, 150
_SOCKET = "PD_WAKE_SOCKET"  # read by connectors/wake.py in the processes of ranks
_vllm_reset = EngineCore.reset_prefix_cache


def process_engine_step(engine: Any) -> bool:
    """vLLM's method with our statistics and two changes: a step that only polls for KV sends no message unless the load
    has changed, and an engine with nothing to compute sleeps until it is woken.

    vLLM's loop runs about a thousand times a second while requests wait for remote KV. A message for each turn would
    cost the agent more than its work, and the turns slow the worker on the next core by a tenth.

    In a group a step that waits holds up all ranks, which meet after each one, also after those that compute nothing.
    """
    if get_watch_dog is not None:
        get_watch_dog().feed()
    waker = waker_of(engine)
    waker.step()
    steps = steps_of(engine)
    prefix = _prefix_changes(engine)
    began = time.monotonic()
    outputs, executed = engine.step_fn()
    elapsed_ms = (time.monotonic() - began) * 1000.0
    details = None
    for client, output in outputs.items() if outputs else ():
        if (stats := output.scheduler_stats) is not None:
            if (details := stats.iteration_details or details) is not None:
                # vLLM's own figure excludes the time of an executor in this process.
                details.elapsed_ms = elapsed_ms
            if prefix:
                stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), PREFIX_STATS: prefix.take()}
            if executed and (tokens_left := _tokens_left(engine, stats)):
                stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), TOKENS_LEFT_STATS: tokens_left}
        if executed or _is_worth_sending(engine, output):
            engine.output_queue.put_nowait((client, output))
    engine.post_step(executed)
    _finish_resets(engine)
    if steps is not None:
        steps.ended(executed, elapsed_ms, details)
    if executed:
        waker.worked()
    elif engine.scheduler.has_requests() and not _is_awaited(engine):
        waker.wait(engine)
    return bool(executed)


def _is_awaited(engine: Any) -> bool:
    """Whether other engines of its group wait for its next step: all take steps while one has a request."""
    grouped = hasattr(engine, "dp_group")
    return grouped and (engine.engines_running or engine.scheduler.has_unfinished_requests())


def _tokens_left(engine: Any, stats: Any) -> dict[str, int]:
    """Tokens not scheduled yet, by key, of running requests whose prompts, or answers so far, are being computed; empty
    if none has changed."""
    details, scheduler = stats.iteration_details, engine.scheduler
    if details is not None and not computed_tokens(details, scheduler.num_spec_tokens):
        return {}  # a step of decodes only
    return {
        request.request_id: max(0, request.num_tokens - request.num_computed_tokens)
        for request in scheduler.running
        if request.is_prefill_chunk or not request.num_output_tokens
    }


def _prefix_changes(engine: Any) -> PrefixChanges | None:
    """Changes of the prefix cache that were not reported yet; None if the engine has no KV cache events."""
    if not hasattr(engine, "_pd_prefix"):
        engine._pd_prefix = None
        scheduler = engine.scheduler
        if getattr(scheduler, "enable_kv_cache_events", False):
            block_size = engine.vllm_config.cache_config.block_size
            engine._pd_prefix = scheduler.kv_event_publisher = PrefixCollector(block_size, scheduler.kv_event_publisher)
    collector: PrefixCollector | None = engine._pd_prefix
    return collector.changes if collector is not None else None


def _is_worth_sending(engine: Any, output: EngineCoreOutputs) -> bool:
    stats = output.scheduler_stats
    if output.outputs or output.finished_requests or stats is None or stats.kv_connector_stats:
        return True
    seen = (
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        stats.num_skipped_waiting_reqs,
        stats.kv_cache_usage,
    )
    if getattr(engine, "_pd_last_sent", None) == seen:
        return False
    engine._pd_last_sent = seen
    return True


# ---- what it waits for ---------------------------------------------------------------------------------------------


def name_socket(folder: str, executor: type, config: Any) -> None:
    """Before the ranks start: where they wake this process. Those on other hosts cannot."""
    os.environ.pop(_SOCKET, None)
    if issubclass(executor, MultiprocExecutor) and config.parallel_config.nnodes_within_dp == 1:
        os.environ[_SOCKET] = os.path.join(folder, f"pd-wake-{uuid.uuid4().hex[:8]}")


def _kv_worker() -> Any:
    """Our connector's worker, where its rank is in this process."""
    return getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None


def spare_sockets(_: Any = None) -> None:
    """The engine has been made, and is not registered yet: cutting off another one must not end its own connections, as
    with its group's coordinator, which it makes after its ranks."""
    if (addresses := getattr(_kv_worker(), "peer_addresses", None)) is not None:
        addresses.spare_connections()


def waker_of(engine: Any) -> Waker:
    if not hasattr(engine, "_pd_waker"):
        engine._pd_waker = Waker(engine.input_queue)
    waker: Waker = engine._pd_waker
    return waker


class Waker:
    """Of one engine. `step` before each step, then `worked` or `wait`."""

    def __init__(self, input_queue: Any) -> None:
        event: threading.Event | None = getattr(_kv_worker(), "wake_event", None)
        self._event = event or threading.Event()
        self._by_all_ranks = event is not None or self._listen()  # none of them has to be asked
        self._empty_steps = 0  # since something happened
        put = input_queue.put_nowait

        def put_and_wake(item: Any) -> None:
            put(item)
            self._event.set()

        input_queue.put_nowait = put_and_wake

    def step(self) -> None:
        if self._event.is_set():
            self._empty_steps = 0
            self._event.clear()  # before the step collects: a later event ends the wait at once

    def worked(self) -> None:
        self._empty_steps = 0

    def wait(self, engine: Any) -> None:
        """After a step in which there was nothing to compute."""
        self._empty_steps += 1
        if not self._by_all_ranks or _compiles_grammar(engine.scheduler):
            self._event.wait(min(_POLL_S, _FIRST_POLL_S + _POLL_S * self._empty_steps / _POLL_STEPS))
        elif self._has_settled(engine) and engine.input_queue.empty():
            self._event.wait(_WOKEN_S)

    def _has_settled(self, engine: Any) -> bool:
        """Whether another step would find nothing. The scheduler notes what a step has collected when it gets that
        step's output: at once, or where batches are queued so many steps later. What follows, the next step does."""
        queued = max(1, int(engine.batch_queue_size))
        return self._empty_steps >= (2 + max(2, queued) if _has_news(engine.scheduler) else queued)

    def _listen(self) -> bool:
        if not (path := os.environ.get(_SOCKET, "")):
            return False
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.bind(path)
        except OSError:  # the folder's name is too long for a socket
            listening.close()
            return False
        threading.Thread(target=self._relay, args=(listening,), name="pd-wake", daemon=True).start()
        return True

    def _relay(self, listening: socket.socket) -> None:
        while True:
            listening.recv(1)
            self._event.set()


def _has_news(scheduler: Any) -> bool:
    """Whether the next step may begin a request, for which blocks may just have become free, or tell the ranks
    something. Some of it stays: a prompt for which there is no room, a prefix that is being lent."""
    if scheduler.running or scheduler.finished_req_ids or scheduler.finished_recving_kv_req_ids:
        return True
    connector = scheduler.get_kv_connector()
    if connector is not None and connector.has_pending_push_work():
        return True
    return any(request.status in STARTS for request in scheduler.requests.values())


def _compiles_grammar(scheduler: Any) -> bool:
    """Whether a request waits for its grammar, which a thread of vLLM's compiles that wakes nobody."""
    waiting = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return any(request.status is waiting for request in scheduler.requests.values())


# ---- resets --------------------------------------------------------------------------------------------------------


def reset_prefix_cache(
    engine: Any, reset_running_requests: bool = False, reset_connector: bool = False
) -> bool | Future[bool]:
    """vLLM's, and always of the host tier too, from which the engine would load what it is to forget. Blocks that are
    being copied there cannot be dropped: where nothing else is done, this waits for them."""
    if (tier := _host_tier(engine)) is None:
        return _vllm_reset(engine, reset_running_requests, reset_connector)
    if not tier.has_pending_stores() or engine.scheduler.has_unfinished_requests():
        return _reset_both(engine, reset_running_requests)
    done: Future[bool] = Future()
    engine._pd_resets = [*getattr(engine, "_pd_resets", ()), done]
    return done


def _reset_both(engine: Any, reset_running_requests: bool = False) -> bool:
    """The device's cache first: where it keeps its blocks the tier keeps its own, and the copies that it has begun."""
    return bool(_vllm_reset(engine, reset_running_requests, False)) and bool(engine.scheduler.reset_connector_cache())


def _finish_resets(engine: Any) -> None:
    """Those that waited for copies: none runs any more, or there is work whose copies nobody should wait for."""
    if not (resets := getattr(engine, "_pd_resets", ())):
        return
    if not _host_tier(engine).has_pending_stores() or engine.scheduler.has_unfinished_requests():
        engine._pd_resets = ()
        for done in resets:
            done.set_result(_reset_both(engine))


def _host_tier(engine: Any) -> Any:
    return getattr(engine.scheduler.get_kv_connector(), "host_tier", None)
