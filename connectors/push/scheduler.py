"""The scheduler half decides which blocks are reserved for KV to come, and which computed blocks are sent and held.

It does no I/O. `PushMetadata` carries its decisions to the worker half. The answers come back as finished_sending
(blocks may be freed) and finished_recving (KV has arrived, or the transfer failed and the prompt is recomputed).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from connectors import handshake
from connectors.lending import Lending
from connectors.push.actions import NO_BLOCK
from connectors.push.blocks.positions import Positions
from connectors.push.metadata import (
    Computed,
    Finished,
    Met,
    Preempted,
    PushMetadata,
    PushOptions,
    PushStats,
    RankReport,
    Reserved,
    Started,
    Unused,
)
from connectors.push.wire import Endpoint, Register, Source, Unregister

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.pd.push")

_DEAD_S = 15.0  # a request that names the engine later than this shows that it lives


@dataclass
class _Prefill:
    """A request whose KV is to be pushed, while it is computed."""

    request: Request
    total_blocks: int
    sent_blocks: int = 0
    epoch: int = 0  # the request's preemptions so far
    closed: bool = False


class PushScheduler(NixlPushConnectorScheduler):
    """Hooks in the order vLLM calls them; see `KVConnectorBase_V1`."""

    _nixl_handshake_listener = staticmethod(handshake.listen)

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.options = PushOptions.of(vllm_config)
        host = self.options.advertise or self.side_channel_host
        parallel, key = vllm_config.parallel_config, handshake.public_key()
        ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        shards = parallel.decode_context_parallel_size
        self._endpoint = Endpoint(engine_id, host, self.side_channel_port, ranks, stages, shards, key)
        # What is known by position, and computed on one pipeline stage, is shipped as it grows. Anything else is
        # shipped whole, when vLLM hands over the final block lists. So is the KV of drafters that read several tokens
        # ahead: the last tokens of a chunk are not final. And so is that of a model whose prefill stops short of the
        # prompt's end for another reason than a state.
        self._positions = Positions(kv_cache_config, self.block_size, shards)
        final = vllm_config.num_prefill_lookahead_tokens <= 1 and self._prefill_backoff() == int(self._has_mamba)
        self.by_position = self._positions.known and final and stages == 1
        # Whether prefixes can be lent and fetched: KV that only goes whole cannot, nor can states, which are those of
        # their whole prompts only, nor what ranks share.
        self.lends = self.by_position and not self._has_mamba and shards == 1
        if not self.by_position and self.options.transfer != "whole":
            logger.info("This model or topology cannot stream its KV: each prompt is pushed whole (transfer: whole)")
        self._prefills: dict[str, _Prefill] = {}
        self._held: set[str] = set()  # prefills that have ended and prefixes lent, whose blocks are not given back yet
        self.lending = Lending()
        self._reserved: set[str] = set()  # requests whose blocks wait for KV
        self._dead: dict[str, float] = {}  # engine -> until when its KV is not asked for
        self._withdrawing_blocks = self._withdrawing_told = 0
        self._next = PushMetadata()

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Raises RuntimeError if the port is in use: vLLM's listener thread would end, and the engine wait for ever."""
        host, port = self.side_channel_host, self.side_channel_port
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZMQ binds
            try:
                probe.bind((host, port))
            except OSError as error:
                raise RuntimeError(
                    f"KV handshakes cannot be served at {host}:{port} ({error.strerror}); "
                    "free it or give another --kv-port"
                ) from error
        super().set_xfer_handshake_metadata(metadata)

    # ---- decode: before and at allocation ----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        # No heartbeats: decode registers while prefill computes, and a lease covers the rest.
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_decode"):
            self._truncate_request_for_prefill(request)
            self._next.arrived.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and self._is_dead(_source(params).endpoint.engine_id):
            params["do_remote_prefill"] = False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            if request.request_id not in self._prefills:
                self._begin(request)
        elif params.get("do_remote_prefill"):
            # Only once: after a failed transfer vLLM allocates for the request again, and prefills it here.
            params["do_remote_prefill"] = False
            if num_external_tokens > 0:
                self._reserve(request, blocks)
            else:
                self._release_unused(request)

    def _reserve(self, request: Request, blocks: KVCacheBlocks) -> None:
        params = request.kv_transfer_params
        assert params is not None
        ids = self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())
        tokens = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        if self.by_position:  # what a window drops is not sent
            ids = self._positions.reserved(ids, tokens)
        source = _source(params)
        order = Register(
            stream=source.key,
            request=request.request_id,
            decode=self._endpoint,
            blocks=[list(group) for group in ids],
            prompt_tokens=tokens,
        )
        self._reserved.add(request.request_id)
        self._next.reserved.append(Reserved(order, source.endpoint))

    def _release_unused(self, request: Request) -> None:
        params = request.kv_transfer_params
        assert params is not None
        source = _source(params)
        order = Unregister(source.key, request.request_id, self._endpoint)
        self._next.unused.append(Unused(order, source.endpoint))

    # ---- prefill: while it computes ----------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        self._next.arrived.discard(request.request_id)
        total = self._positions.count(request.num_prompt_tokens)
        self._prefills[request.request_id] = _Prefill(request, total, epoch=request.num_preemptions)
        self._next.started.append(Started(request.request_id, total, request.num_prompt_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PushMetadata:
        for key in scheduler_output.preempted_req_ids or ():
            if (prefill := self._prefills.get(key)) is not None:
                prefill.epoch, prefill.sent_blocks, prefill.closed = prefill.request.num_preemptions, 0, False
                self._next.preempted.append(Preempted(key, prefill.epoch))
        state = scheduler_output.kv_connector_block_state
        if self.by_position and self._prefills and state is not None:
            for key, tokens in scheduler_output.num_scheduled_tokens.items():
                if (prefill := self._prefills.get(key)) is not None and not prefill.closed:
                    self._ship(key, prefill, tokens, state)
        self._refuse(self.lending.forget_late())
        meta, self._next = self._next, PushMetadata()
        return meta

    def _ship(self, key: str, prefill: _Prefill, scheduled_tokens: int, state: Any) -> None:
        """Called before vLLM advances num_computed_tokens. `done`: tokens that have KV after this step."""
        request = prefill.request
        done = min(request.num_computed_tokens + scheduled_tokens, request.num_prompt_tokens)
        closed = done >= request.num_prompt_tokens
        full = prefill.total_blocks if closed else self._positions.full(done)
        if self.options.transfer == "whole" and not closed:
            return
        if full <= prefill.sent_blocks and not closed:
            return
        start, prefill.sent_blocks, prefill.closed = prefill.sent_blocks, full, closed
        blocks = self._positions.computed(state.get_block_ids(key), request.num_prompt_tokens, start, full)
        self._next.computed.append(Computed(key, prefill.epoch, start, blocks, closed))

    # ---- both: the end of a request ----------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """True keeps the blocks until the worker half reports them sent."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        key = request.request_id
        if key in self._reserved:
            # Aborted while KV may still arrive. vLLM keeps the blocks until finished_recving.
            self._next.withdrawn[key] = "aborted"
            return False, None
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            self._release_unused(request)
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        # The token sampled after a truncated prompt is a guess of a token of the prompt.
        said = {"prompt_truncated": True} if params.get("_p_side_truncated") else None
        return self._finish_prefill(request, block_ids), said

    def _finish_prefill(self, request: Request, block_ids: Any) -> bool:
        key = request.request_id
        prefill = self._prefills.pop(key, None)
        if prefill is not None and request.num_preemptions > prefill.epoch:  # between two steps, by a reset
            self._next.preempted.append(Preempted(key, request.num_preemptions))
        held = any(len(group) > 0 for group in block_ids)
        ended_well = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        ok = ended_well and prefill is not None and held
        if ok and not self.by_position:
            assert prefill is not None
            of_prompt = self._positions.of_prompt(block_ids, prefill.request.num_prompt_tokens)
            blocks = tuple(tuple(group) for group in self.get_exchange_clipped_blocks(of_prompt))
            self._next.earlier.append(Computed(key, prefill.epoch, 0, blocks, closed=True, whole=True))
        # Also when it failed: WRITEs of its blocks may be in flight, and decode must hear of it.
        self._next.finished.append(Finished(key, ok, held))
        if held:
            self._held.add(key)
        return held

    def lend(self, key: str, hashes: Sequence[BlockHash], tokens: int) -> None:
        """Send the first `tokens` of a prompt, whose blocks have these hashes, from this cache to the engine that
        registers for `key`, once the host tier has loaded what only it has. It hears `Gone` where they are not all
        cached. The next step, which this call causes, tells the worker half. Asked again for a key, it does nothing."""
        if key in self._held or key in self.lending.pinned:
            return
        whole_blocks = self.lends and len(hashes) * self.block_size == tokens
        firsts = self._positions.first_kept(tokens)
        if not (pinned := self.lending.pin(key, hashes, firsts) if whole_blocks else ()):
            self._refuse([key])
            return
        blocks = tuple((NO_BLOCK,) * first + ids for first, ids in zip(firsts, pinned, strict=True))
        lent = Started(key, len(hashes), tokens, lent=True), Computed(key, 0, 0, blocks, closed=True, lent=True)
        if not self.lending.send_later(key, lent):
            self._send_lent(*lent)

    def _send_lent(self, started: Started, computed: Computed) -> None:
        self._held.add(started.key)
        self._next.started.append(started)
        self._next.earlier.append(computed)
        self._next.finished.append(Finished(started.key, ok=True, held=True))

    def _refuse(self, keys: Iterable[str]) -> None:
        self._next.finished += [Finished(key, ok=False, held=False) for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        """Nobody wants the KV of these prefills any more: release it. vLLM itself aborts those that still run."""
        unwanted = self._held.intersection(keys)
        self._refuse(self.lending.forget(keys))
        self._held -= unwanted
        self._next.unwanted.extend(unwanted)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received = connector_output.finished_recving or set()
        self._reserved.difference_update(received)
        if loaded := self.lending.loading.keys() & received:  # vLLM has no request of these keys
            connector_output.finished_recving = received - loaded
            for lent in self.lending.loaded(loaded):
                self._send_lent(*lent)
        if sent := connector_output.finished_sending:
            self._held -= sent
            if self.lending.pinned:  # nor of these
                connector_output.finished_sending = sent - self.lending.unpin(sent)
        if isinstance(report := connector_output.kv_connector_worker_meta, RankReport):
            self._withdrawing_blocks = report.withdrawing_blocks
            # What one rank has given up is of no use to the others, which may wait for that rank's peer.
            given_up = self._reserved & report.unreceived
            self._next.withdrawn |= dict.fromkeys(given_up - self._next.withdrawn.keys(), "another rank gave it up")
            self._next.unwanted.extend(report.unpushed & (self._held | self._prefills.keys()))

    def take_stats(self, host_hit_tokens: int = 0, host_blocks: int = 0) -> PushStats | None:
        """What has changed since it was asked last, here and in the host tier."""
        more, self._withdrawing_told = self._withdrawing_blocks - self._withdrawing_told, self._withdrawing_blocks
        if not (more or host_hit_tokens or host_blocks):
            return None
        stats = PushStats()
        stats.record(PushStats.WITHDRAWING_BLOCKS, more)
        stats.record(PushStats.HOST_HIT_TOKENS, host_hit_tokens)
        stats.record(PushStats.HOST_BLOCKS, host_blocks)
        return stats

    # ---- the fleet ---------------------------------------------------------------------------------------------

    def fail_engine(self, engine_id: str) -> None:
        """The fleet reports `engine_id` dead. The next step, which this call causes, tells the worker half."""
        if engine_id != self.engine_id and not self._is_dead(engine_id):
            now = time.monotonic()
            self._dead = {name: until for name, until in self._dead.items() if now < until} | {engine_id: now + _DEAD_S}
            self._next.dead_engines.append(engine_id)

    def meet(self, given: dict[str, Any]) -> None:
        """Connect with the engine of this `Endpoint`, given by its fields. The next step, which this call causes, tells
        the worker half."""
        peer = msgspec.convert(given, Endpoint)
        if peer.engine_id != self.engine_id and not self._is_dead(peer.engine_id):
            self._next.met.append(Met(peer, self._endpoint))

    def _is_dead(self, engine_id: str) -> bool:
        if time.monotonic() >= self._dead.get(engine_id, 0.0):
            self._dead.pop(engine_id, None)
        return engine_id in self._dead

    def has_pending_push_work(self) -> bool:
        return self._next.has_news() or bool(self.lending.pinned)


def _source(params: dict[str, Any]) -> Source:
    return msgspec.convert(params["kv_source"], Source)
