"""The worker half: one thread owns NIXL and carries out the actions of `Inbound` and `Outbound`.

The engine's thread passes each step's metadata to it and collects results. A small pool of threads makes handshakes.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.platforms import current_platform

from connectors.push import actions as do
from connectors.push import writer
from connectors.push.blocks.chunks import LayoutError, StepLayers, is_whole
from connectors.push.connections import Connections
from connectors.push.metadata import Computed, PushMetadata, PushStats, RankReports
from connectors.wake import WakeEvent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.pd.push")

_TICK_S, _SOON_S, _CUT_AT_ONCE = 0.1, 0.005, 4
_LENT_BYTES = 8 << 20  # of a prefix that is lent, so many at a time beside pushes: a push waits for no more


class PushWorker(Connections):
    """Replaces the threads and bookkeeping of vLLM's push worker; uses its memory registration and transfer plans."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = PushStats()
        self.drafts = vllm_config.speculative_config is not None
        self.wake_event = WakeEvent()
        self._results: queue.SimpleQueue[do.Finish | do.Release] = queue.SimpleQueue()
        self.reports = RankReports()
        self._writes: dict[int, tuple[str, str, Any]] = {}  # handle number -> (engine, stream, NIXL handle)
        self._handle_count = 0
        self._failed: set[int] = set()  # handle numbers of WRITEs that have failed, and may still be in flight
        self._layers = StepLayers(one_by_one=self.options.transfer == "layer")
        self._stepped = False  # since the writer looked last
        self._cutters = ThreadPoolExecutor(_CUT_AT_ONCE, "pd-kv-cut")
        self._cutting: set[str] = set()  # engines

    # ---- the engine's thread -----------------------------------------------------------------------------------

    def start_load_kv(self, metadata: PushMetadata) -> None:
        self._stepped = True
        self.handle_preemptions(metadata)
        for engine in metadata.dead_engines:
            self._submit(functools.partial(self._on_dead, engine))
        for met in metadata.met:
            self._submit(functools.partial(self._meet, met.peer, met.here))
        for key in metadata.arrived:
            self._submit(functools.partial(self._outbound.arrived, key))
        self._begin(metadata)
        self._ship_earlier(metadata)
        for reserved in metadata.reserved:
            self._submit(functools.partial(self._inbound.register, reserved.order, reserved.source))
        for unused in metadata.unused:
            self._submit(functools.partial(self._inbound.release_unused, unused.order, unused.source))
        for request, why in metadata.withdrawn.items():
            self._submit(functools.partial(self._inbound.withdraw, request, why))
        for finished in metadata.finished:
            end = functools.partial(self._outbound.finish, finished.key)
            if not finished.ok:
                end = functools.partial(self._outbound.abort, finished.key, finished.held, "the prefill was aborted")
            self._submit(end)
        for key in metadata.unwanted:
            self._submit(functools.partial(self._outbound.failed, key, "nobody wants it any more"))

    def handle_preemptions(self, metadata: PushMetadata) -> None:
        """Called before the step that may give the blocks of preempted prefills to other requests."""
        for preempted in metadata.preempted:
            self._submit(functools.partial(self._outbound.preempted, preempted.key, preempted.epoch))
        metadata.preempted.clear()

    def _begin(self, metadata: PushMetadata) -> None:
        """Announce started prefills, before anything of them: `start_load_kv` may come after the forward pass."""
        for it in metadata.started:
            start = functools.partial(self._outbound.start, it.key, it.total_blocks, it.prompt_tokens, lent=it.lent)
            self._submit(start)
        metadata.started.clear()

    def _ship_earlier(self, metadata: PushMetadata) -> None:
        """Send what earlier steps computed, before this step's work is queued on the device.

        The last token of a whole prompt is known, so the device has computed it; a drafter may still be running. A
        prefix that is lent may be of a step that is queued.
        """
        for it in metadata.earlier:
            ready = self.device_event() if self.drafts or not it.whole else None
            chunk = do.Chunk(it.start, it.blocks, None, ready, whole=it.whole)
            chunks = chunk.pieces(self._lent_blocks) if it.lent else [chunk]
            self._submit(functools.partial(self._outbound.computed, it.key, chunks, it.epoch, True))

    def on_layer(self, layer_name: str, metadata: PushMetadata, forward: object) -> None:
        """A forward pass has written a layer's KV, or queued it on the device: send what is due of each last chunk."""
        closing = {it.key: len(it.blocks[0]) for it in metadata.computed if it.closed}
        if closing and (due := self._layers.report(layer_name, closing, forward)):
            self._begin(metadata)
            ready = self.device_event()
            for computed in metadata.computed:
                if computed.key in due:
                    self._submit_chunk(computed, due[computed.key], ready, closed=False)

    def on_computed(self, metadata: PushMetadata) -> None:
        """Called after the forward pass was launched (CUDA) or has run (CPU), perhaps twice: send what has not gone."""
        news, metadata.computed = metadata.computed, []
        self._begin(metadata)
        ready = self.device_event() if news else None
        for computed in news:
            self._submit_chunk(computed, self._layers.rest(computed.key), ready, computed.closed)
        self._layers.end()

    def _submit_chunk(self, computed: Computed, regions: tuple[int, ...] | None, ready: Any, closed: bool) -> None:
        """Of these regions; of all where it is None, and of none where it is empty."""
        chunks = [] if regions == () else [do.Chunk(computed.start, computed.blocks, regions, ready)]
        self._submit(functools.partial(self._outbound.computed, computed.key, chunks, computed.epoch, closed))

    def device_event(self) -> Any:
        """A CUDA event after the work queued so far; None on CPUs."""
        if self.device_type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._outbound.regions = self.num_regions
        block_bytes = self._physical_blocks_per_logical_kv_block * sum(self.block_len_per_layer)
        self._lent_blocks = max(1, _LENT_BYTES // block_bytes)
        if self.options.transfer in ("auto", "layer"):
            built = self.vllm_config.compilation_config.static_forward_context
            self._layers.know(self.region_names, [name for name in built if name in kv_caches], block_bytes)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """What has ended since the last call. vLLM's method would look the other engine up, which may be disconnected
        by now, to convert what has arrived. There is nothing to convert: other block sizes and layouts are refused."""
        while not self._records.empty():
            self._records.get()(self.xfer_stats)
        sent, received, failed = set[str](), set[str](), set[str]()
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, do.Release):
                sent.add(result.stream)
            elif result.ok:
                received.add(result.request)
            else:
                logger.warning("KV of %s will be computed here: %s", result.request, result.why)
                failed.add(result.request)
                self.reports.unreceived.put(result.request)
        self._sync_device_after_direct_recv(received)
        return KVConnectorTransferResults(sent, received | failed, failed)

    # ---- the writer thread -------------------------------------------------------------------------------------

    def _push_writer_loop(self) -> None:
        if self.device_type == "cuda":
            # Not torch's own: it makes no context current on a fresh thread.
            current_platform.set_device(torch.device(self.device_type, self.device_id))
        self.take_cores()
        tick_at, poll_s = 0.0, _TICK_S
        while not self._push_writer_stop.is_set():
            try:
                self._push_writer_wake.looked(self._receive())  # first: a withdrawal counts before more is posted
                while not self._events.empty():
                    self._run(self._events.get())
                self._poll_writes()
                self._finish_checks()
                self._run(self._outbound.device_worked)
                if (now := time.monotonic()) >= tick_at:
                    tick_at = now + _TICK_S
                    if self._stepped:
                        self._stepped = False
                        self._run(self._outbound.stepped)
                    self._run(self._inbound.tick)
                    self._run(self._ping)
                    self.reports.withdrawing_blocks = self._inbound.withdrawing_blocks
                    self._run(self._outbound.tick)
                    self._reconnect_lost()
                    self._forget_dead()
                poll_s = self._poll_s()
                if poll_s > _SOON_S and self._receive():  # it came while NIXL was used: no socket tells of it any more
                    self._push_writer_wake.set()
            except Exception:
                logger.exception("KV transfer: unexpected error; the writer goes on")
            self._push_writer_wake.wait(poll_s)
            self._push_writer_wake.clear()

    def take_cores(self) -> None:
        """Moves this thread to `writer_cores`. Where that fails it runs on its process's cores."""
        if cores := self.options.writer_cores:
            try:
                os.sched_setaffinity(threading.get_native_id(), cores)
            except OSError as error:
                logger.warning("KV is copied on the computing cores: cores %s cannot be used (%s)", cores, error)

    def _poll_s(self) -> float:
        """Seconds to the next turn. Transfers progress only when polled, but each turn costs CPU time of the model."""
        if self._outbound.awaits_writes or self._checks:
            return 0.0005
        if self._outbound.awaits_device or self._outbound.is_writing:
            return 0.001
        if self._inbound.busy or self._outbound.busy or self._writes or self._is_connecting:
            waited_s = time.monotonic() - self._inbound.registered_at if self._inbound.busy else 1.0
            return self._push_writer_wake.look_s(waited_s, self._is_connecting)
        return 0.25  # such a message waits up to this long; this costs 0.2 % of a core

    def _carry_out(self, action: Any) -> None:
        match action:
            case do.Finish() | do.Release():
                if isinstance(action, do.Finish) and not action.ok:
                    self._records.put(lambda s: s.record(PushStats.RECEIVES_FAILED))
                    self.reports.withdrawing_blocks = self._inbound.withdrawing_blocks  # this may be the last step
                self._report(action)
            case do.Post():
                self._post(action)
            case do.Ended():
                self._account(action)
            case do.Cut():
                self._cut(action)
            case _:
                super()._carry_out(action)

    def _report(self, result: do.Finish | do.Release) -> None:
        self._results.put(result)
        self.wake_event.set()

    def _account(self, ended: do.Ended) -> None:
        if self._shipments is not None:
            self._shipments.end(ended.stream)
        if ended.ok:
            self._records.put(lambda s: s.record(PushStats.STREAM_SECONDS, ended.seconds))
            self._records.put(lambda s: s.record(PushStats.EXPOSED_SECONDS, ended.exposed))
        else:
            logger.warning("KV of %s was not pushed: %s", ended.stream, ended.why)
            self._records.put(lambda s: s.record(PushStats.STREAMS_FAILED))
            self.reports.unpushed.put(ended.stream)
            self.wake_event.set()

    def _cut(self, cut: do.Cut) -> None:
        if cut.engine not in self._cutting:
            self._cutting.add(cut.engine)
            done = self._cutters.submit(self.peer_addresses.cut_off, cut.engine, cut.settled, cut.answered)
            done.add_done_callback(lambda done: self._submit(functools.partial(self._on_cut, cut, done)))

    def _on_cut(self, cut: do.Cut, done: Future[bool], now: float) -> Iterable[Any]:
        self._cutting.discard(cut.engine)
        if not done.result():
            logger.warning_once("KV blocks stay reserved until engine %s has answered or ended", cut.engine)
            return ()
        self._receive()  # what another thread was reading has been read by now
        if cut.engine not in self._to_forget:
            self._lose(cut.engine, "it was cut off from here, since what it wrote or writes may land in other blocks")
        return self._inbound.cut_off(cut, now)

    # ---- WRITEs ------------------------------------------------------------------------------------------------

    def _post(self, post: do.Post) -> None:
        engine = post.order.decode.engine_id
        self._engine_last_active[engine] = time.perf_counter()
        posted, why = self._handle_count, ""
        try:
            if (unwritable := self._unwritable.get(engine)) is not None:
                if unwritable.is_over(time.monotonic()):
                    self._lose(engine, unwritable.why)
                raise LayoutError(unwritable.why)
            if writer.takes_chunks(self, engine) and not is_whole(post):
                writer.post_chunks(self, post, functools.partial(self._record, engine, post.stream))
            else:
                writer.post_whole(self, post)
            if self._shipments is not None:
                self._shipments.add(self, post)
        except Exception as error:
            why = f"the WRITE could not be posted: {error}"
            if not isinstance(error, writer.MISFITS):
                self._lose(engine, why)
        if why:
            self._run(functools.partial(self._outbound.failed, post.stream, why))
        elif self._handle_count == posted:  # not at once: it may post the next of many pieces, from here
            self._submit(functools.partial(self._outbound.settle, post.stream))

    def _record(self, engine: str, stream: str, handle: Any) -> None:
        """From now on this WRITE counts as in flight, whatever fails after it."""
        self._handle_count += 1
        self._writes[self._handle_count] = (engine, stream, handle)
        self._outbound.posted(stream, self._handle_count, time.monotonic())

    def _xfer_blocks(self, read_spec: Any, dst_engine_id: str, request_id: str, *args: Any, **named: Any) -> Any:
        """The WRITE to one rank in vLLM's plan, which may raise at the next rank."""
        handle = super()._xfer_blocks(read_spec, dst_engine_id, request_id, *args, **named)
        if handle is not None:
            self._record(dst_engine_id, request_id, handle)
        return handle

    def _handle_failed_transfer(self, req_id: str, handle: Any, *args: Any, **named: Any) -> bool:
        """vLLM could not post it and would release it; parts may be in flight. False: it is kept, and recorded."""
        return handle is None

    def _poll_writes(self) -> None:
        for number, (engine, stream, handle) in list(self._writes.items()):
            try:
                state = self.nixl_wrapper.check_xfer_state(handle)
            except Exception as error:
                state = f"ERR: {error}"
            if state == "PROC":
                continue
            if state != "DONE" and number not in self._failed:
                self._failed.add(number)
                self._lose(engine, f"a WRITE of {stream} ended as {state}")
            telemetry = writer.telemetry(self, handle) if state == "DONE" else None
            if not writer.let_go(self, handle):
                continue  # not proven to have ended: until then it counts as in flight
            del self._writes[number]
            self._failed.discard(number)
            ok = state == "DONE"
            if telemetry is not None:
                self._layers.link.observe(telemetry.totalBytes, telemetry.xferDuration / 1e6)
            done = functools.partial(PushStats.record_transfer, res=telemetry)
            self._records.put(done if ok else PushStats.record_failed_transfer)
            # Behind a preemption that came in first: what it has read since may be another request's.
            self._submit(functools.partial(self._outbound.written, stream, number, ok))

    def shutdown(self) -> None:
        self._push_writer_stop.set()
        self._push_writer_wake.set()
        if self._push_writer_thread is not None:
            self._push_writer_thread.join(timeout=2)
        if (cutters := getattr(self, "_cutters", None)) is not None:
            cutters.shutdown(wait=False, cancel_futures=True)
        for _, _, handle in getattr(self, "_writes", {}).values():
            writer.let_go(self, handle)
        super().shutdown()
