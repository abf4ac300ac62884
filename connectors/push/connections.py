"""A worker's connections to its peers, and the messages over them.

`worker.py` builds on it. Nothing is decided here: each connection and each message is an event for the state machines.
"""

from __future__ import annotations

import functools
import os
import queue
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import zmq
from vllm.logger import init_logger

from connectors import handshake, sockets, wake
from connectors.agent import agent_settings
from connectors.push import actions as do
from connectors.push import wire, writer
from connectors.push.blocks import verify
from connectors.push.inbound import Inbound
from connectors.push.metadata import PushOptions, PushStats
from connectors.push.outbound import Outbound
from connectors.push.records import Pings, Pongs, Unwritable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.pd.push")

_HANDSHAKES_AT_ONCE = 128  # threads, most of which wait: for the answers of a rack that has died, five seconds
_FIRST_MESSAGES_S = 1.0
_UNDELIVERED_MAX = 4096  # messages kept per engine while its handshake runs
MEET_MOST = 64  # engines; a transfer connects with any more


class Connections(verify.Verifying):
    """vLLM's push worker with our connections in place of its own."""

    # Part of vLLM's compatibility hash: peers of another protocol are refused at the handshake.
    _TRANSFER_MODE: str = f"pd-push-{wire.VERSION}"

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        cores, polled, others = os.sched_getaffinity(0), wake.epolls(), {it.inode for it in sockets.connections()}
        with agent_settings(vllm_config.kv_transfer_config.get_from_extra_config("backend_parameters", {})):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._push_writer_wake = wake.MessageEvent(wake.epolls() - polled)
        if self.device_type == "cpu":
            os.sched_setaffinity(0, cores)  # vLLM has just pinned the compute thread to the last core
        self.options = PushOptions.of(vllm_config)
        self._inbound = Inbound(self.options.timeout_s)
        hello = wire.Hello(0, engine_id, [one for one in sockets.listening() if one[2] not in others])
        self._outbound = Outbound(self.options.timeout_s, hello)
        self._events: queue.SimpleQueue[verify.Event] = queue.SimpleQueue()
        self._records: queue.SimpleQueue[verify.Record] = queue.SimpleQueue()
        self._connecting: set[str] = set()
        self._unwritable: dict[str, Unwritable] = {}  # connected for messages only
        self._to_forget: set[str] = set()
        self._endpoints: dict[str, wire.Endpoint] = {}  # of engines that are connected, or being so
        self._lost: set[str] = set()  # connected anew as soon as no WRITE uses the old connection
        self._undelivered: dict[str, list[tuple[str | None, wire.Message]]] = {}
        self._pings, self._pongs = Pings(), Pongs()
        self._connected_at = 0.0  # the last time
        self._looked_at = time.monotonic()  # messages read next may have arrived since then
        self._shipments = verify.Shipments() if self.options.verify else None
        self._signing, self._checks = {}, []
        self.peer_addresses = sockets.PeerAddresses(others)
        self._handshake_initiation_executor.shutdown(wait=False)
        self._handshake_initiation_executor: ThreadPoolExecutor = ThreadPoolExecutor(
            _HANDSHAKES_AT_ONCE, "pd-kv-handshake"
        )

    def _submit(self, event: verify.Event) -> None:
        """From any thread: have the writer thread run `event`."""
        self._events.put(event)
        self._push_writer_wake.set()

    def _run(self, event: verify.Event) -> None:
        """On the writer thread: report the event, and carry out the actions that follow. One failing stops no other."""
        try:
            actions = list(event(time.monotonic()))
        except Exception:
            logger.exception("KV transfer: unexpected error; the writer goes on")
            return
        self._carry_out_all(actions)

    def _carry_out_all(self, actions: list[Any]) -> None:
        for at, action in enumerate(actions):
            try:
                if self._is_put_off(action, actions[at + 1 :]):
                    return
                self._carry_out(action)
            except Exception:
                logger.exception("KV transfer: %s was not carried out", type(action).__name__)

    def _carry_out(self, action: Any) -> None:
        match action:
            case do.Connect(peer=peer):
                self._connect(peer)
            case do.Renew(engine=engine, why=why):
                self._lose(engine, why)
            case do.Send(engine=engine, peer=peer, message=message):
                self._send(engine, peer, message)
            case do.Tell(engine=engine, message=message, peer=peer):
                if message.request not in self._signing:  # else its answer follows with the checksum
                    self._tell(engine, message, peer)
            case _:
                raise TypeError(f"{type(self).__name__} carries out no {type(action).__name__}")

    # ---- messages ----------------------------------------------------------------------------------------------

    def _send(self, engine: str, agent: str, message: wire.Message) -> None:
        if engine in self._connecting:
            self._run(functools.partial(self._inbound.unsent, agent, message))
        elif not self._sent(engine, agent, message):
            self._run(functools.partial(self._inbound.unsendable, engine, agent, message))

    def _tell(self, engine: str, message: wire.Message, agent: str | None) -> None:
        if engine in self._connecting:
            self._keep(engine, agent, message)
            return
        for name in self._agents(engine).values():
            if (agent is None or agent == name) and not self._sent(engine, name, message):
                self._keep(engine, name, message)

    def _keep(self, engine: str, agent: str | None, message: wire.Message) -> None:
        if len(waiting := self._undelivered.setdefault(engine, [])) < _UNDELIVERED_MAX:
            waiting.append((agent, message))

    def _sent(self, engine: str, agent: str, message: wire.Message) -> bool:
        self._engine_last_active[engine] = time.perf_counter()
        try:
            self.nixl_wrapper.send_notif(agent, notif_msg=wire.pack(message))
        except Exception as error:
            self._records.put(lambda s: s.record_failed_notification())
            self._lose(engine, f"{type(message).__name__}: {error}")
            return False
        return True

    def _receive(self) -> bool:  # whether a message was there
        looks_at, found = time.monotonic(), self.nixl_wrapper.get_new_notifs()
        for agent, notifications in found.items():
            for notification in notifications:
                if wire.is_stock_notice(notification):
                    continue
                try:
                    message = wire.parse(notification)
                except wire.WireError as error:
                    logger.warning("KV message from %s dropped: %s", agent, error)
                    self._records.put(lambda s: s.record(PushStats.BAD_MESSAGES))
                    self._run(functools.partial(self._inbound.unreadable, agent))
                else:
                    self._run(functools.partial(self._on_message, message, agent))
        self._looked_at = looks_at
        return bool(found)

    def _on_message(self, message: wire.Message, agent: str, now: float) -> Iterable[Any]:
        self._pings.answered(agent)
        if isinstance(message, wire.Register | wire.Unregister):
            self._to_forget.discard(message.decode.engine_id)  # it lives
        match message:
            case wire.Register():
                return self._outbound.register(message, agent, now, since=self._looked_at)
            case wire.Unregister():
                return self._outbound.unregister(message, agent, now)
            case wire.Hello(epoch=epoch, engine=engine, listens=listens):
                self.peer_addresses.listens(engine, listens)
                return self._inbound.hello(agent, epoch, now)
            case wire.Meet(sender=sender):
                return self._meet(sender, None, now)
            case wire.Ping():
                return self._pongs.answer(message, agent, now, self._outbound.writes_to(message.engine))
            case wire.Pong():
                return ()
            case wire.Computing(request=request):
                return self._inbound.computing(request, agent, now)
            case wire.Landed(request=request, digest=digest):
                if digest is None or not (blocks := self._arriving(request)):
                    return self._inbound.landed(request, agent, now)
                compare = functools.partial(self._on_checksum, request, agent, digest, blocks)
                self._check(blocks, lambda found: self._run(functools.partial(compare, found)))
                return ()
            case wire.Gone(request=request, why=why, failed_epoch=failed_epoch):
                return self._inbound.gone(request, agent, why, now, failed_epoch)

    def _ping(self, now: float) -> Iterable[Any]:
        return self._pings.due(self._inbound.awaited(now), self._inbound.engines(), now)

    # ---- connections -------------------------------------------------------------------------------------------

    @property
    def _is_connecting(self) -> bool:
        """Whether a connection is being made, or was made just now: UCX has messages of its own then."""
        return bool(self._connecting) or time.monotonic() < self._connected_at + _FIRST_MESSAGES_S

    def _meet(self, peer: wire.Endpoint, here: wire.Endpoint | None, now: float) -> Iterable[Any]:
        """Connects ahead. The peer is told to do so too where it has `here`: it may not look for a worker whose role
        has changed. However many send `Meet`, they fill no more than this with connections that may never be used."""
        if peer.engine_id in self._endpoints or len(self._endpoints) >= MEET_MOST:
            return []
        return [do.Connect(peer), *([do.Tell(peer.engine_id, wire.Meet(here))] if here is not None else [])]

    def _connect(self, peer: wire.Endpoint) -> None:
        if peer.engine_id not in self._connecting:
            self._connecting.add(peer.engine_id)
            self._endpoints[peer.engine_id] = peer
            # Full handshakes wherever possible: today's decode peer writes to us once roles have changed.
            self._handshake(peer, messages_only=peer.pp_size > 1)

    def _handshake(self, peer: wire.Endpoint, messages_only: bool) -> None:
        try:
            where = (peer.engine_id, peer.host, peer.port, peer.tp_size)
            with self._handshake_lock:  # it ends behind this: `_handshake_done` is called after vLLM's own callback
                future = self._ensure_handshake(*where, pp_size=peer.pp_size, notif_agents_only=messages_only)
                if future is not None:
                    future.add_done_callback(functools.partial(self._handshake_done, peer, messages_only))
        except Exception as error:
            logger.exception("no handshake with %s", peer.engine_id)
            self._run(functools.partial(self._on_unreachable, peer.engine_id, f"no handshake: {error}"))
            return
        if future is None:
            self._run(functools.partial(self._on_connected, peer.engine_id))

    def _nixl_handshake(self, host: str, port: int, ranks: int, engine: str, *args: Any, **kwargs: Any) -> Any:
        """In a thread of its own."""
        try:
            with handshake.expecting(self._endpoints[engine].key):
                return super()._nixl_handshake(host, port, ranks, engine, *args, **kwargs)
        finally:
            with self._handshake_lock:  # the writer has both callbacks in place
                pass

    def _handshake_done(self, peer: wire.Endpoint, messages_only: bool, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            if not messages_only:
                self._unwritable.pop(peer.engine_id, None)
            self._submit(functools.partial(self._on_connected, peer.engine_id))
            return
        why = str(error) or type(error).__name__
        if messages_only or isinstance(error, zmq.ZMQError) or type(error).__module__.startswith("nixl"):
            self._submit(functools.partial(self._on_unreachable, peer.engine_id, why))
        else:
            # It answers, but we cannot write to its memory layout. It may be able to write to ours, and must be told
            # what we cannot do.
            self._submit(functools.partial(self._handshake_for_messages, peer, why))

    def _handshake_for_messages(self, peer: wire.Endpoint, why: str, now: float) -> Iterable[Any]:
        self._cleanup_remote_engine(peer.engine_id, log_eviction=False)
        self._endpoints[peer.engine_id], self._unwritable[peer.engine_id] = peer, Unwritable(why, since=now)
        self._handshake(peer, messages_only=True)
        return ()

    def _agents(self, engine: str) -> dict[tuple[int, int], str]:
        """By stage and rank."""
        with self._handshake_lock:
            names = dict(self._remote_agents.get(engine) or {})
        # NIXL returns bytes where it loads an agent, and text where it names a notification's sender.
        return {rank: name.decode() if isinstance(name, bytes) else name for rank, name in names.items()}

    def _on_connected(self, engine: str, now: float) -> Iterable[Any]:
        self._connecting.discard(engine)
        self._connected_at = now
        self._pongs.made(engine)
        agents = tuple(self._agents(engine).values())
        # After `Hello`: decode then knows this connection when it cuts one on which a WRITE has failed, and cuts once.
        undelivered = [do.Tell(engine, message, agent) for agent, message in self._undelivered.pop(engine, [])]
        chunkwise = writer.takes_chunks(self, engine)
        if not chunkwise and self.options.transfer != "whole":
            logger.info_once("KV for engine %s is pushed whole: its rank layout differs", engine)
        info, ratio = self.transfer_topo.get_engine_info(engine), self._physical_blocks_per_logical_kv_block
        if (info.remote_block_size, info.remote_physical_blocks_per_logical) == (self.block_size, ratio):
            receiving = self._inbound.connected(engine, agents, now)
        else:
            # vLLM's push cannot write to smaller blocks, nor sort out what comes in larger ones.
            theirs = f"{info.remote_physical_blocks_per_logical} x {info.remote_block_size}"
            why = f"prefill engine {engine} has KV blocks of {theirs} tokens, this one of {ratio} x {self.block_size}"
            receiving = self._inbound.incompatible(engine, agents, why, now)
        return [*receiving, *self._outbound.connected(engine, chunkwise, agents, now), *undelivered]

    def _on_unreachable(self, engine: str, why: str, now: float) -> Iterable[Any]:
        self._connecting.discard(engine)
        self._undelivered.pop(engine, None)
        if engine not in self._remote_agents:
            self._cleanup_remote_engine(engine, log_eviction=False)
        return [*self._inbound.unreachable(engine, why, now), *self._outbound.unreachable(engine, why, now)]

    def _on_dead(self, engine: str, now: float) -> Iterable[Any]:
        self._to_forget.add(engine)
        return [*self._inbound.declared_dead(engine, now), *self._outbound.declared_dead(engine, now)]

    def _lose(self, engine: str, why: str) -> None:
        """A message or a WRITE to it failed: its agents stay broken for ever, even when the link is whole again."""
        if engine in self._connecting or engine not in self._endpoints:
            return
        logger.warning("KV link to %s failed (%s); it is made anew", engine, why)
        self._connecting.add(engine)
        self._lost.add(engine)
        self._inbound.forget(engine)
        self._outbound.forget(engine)

    def _reconnect_lost(self) -> None:
        """Drops NIXL's state of lost engines that no WRITE uses any more, and connects anew."""
        for engine in [engine for engine in self._lost if not self._outbound.writes_to(engine)]:
            self._lost.discard(engine)
            self._connecting.discard(engine)
            peer = self._endpoints[engine]
            self._cleanup_remote_engine(engine)
            self._connect(peer)

    def _forget_dead(self) -> None:
        """Drops NIXL's state of dead engines once nothing refers to it."""
        for engine in self._to_forget - self._engines_with_inflight_transfers():
            self._to_forget.discard(engine)
            self._cleanup_remote_engine(engine)

    def _engines_with_inflight_transfers(self) -> set[str]:
        """Those that vLLM may not forget, however long ago it has used them."""
        return self._inbound.engines() | self._outbound.engines() | self._connecting

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        """Also of an engine that is not connected: of a message that could not be sent, or of a handshake that failed
        halfway. Whatever were left would fail here, at each later handshake with any engine."""
        self._remote_agents.setdefault(engine_id, {})  # vLLM insists
        try:
            super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
        finally:
            self._engine_last_active.pop(engine_id, None)
            self._unwritable.pop(engine_id, None)
            self._endpoints.pop(engine_id, None)
            self._pongs.forget(engine_id)
            self._inbound.forget(engine_id)
            self._outbound.forget(engine_id)
            self.peer_addresses.forget(engine_id, awaited=self._inbound.engines())

    def add_remote_agent(self, meta: Any, *args: Any, **kwargs: Any) -> str:
        self._note_address(meta)
        return super().add_remote_agent(meta, *args, **kwargs)

    def _add_notif_only_remote_agent(self, meta: Any, *args: Any, **kwargs: Any) -> str:
        self._note_address(meta)
        return super()._add_notif_only_remote_agent(meta, *args, **kwargs)

    def _note_address(self, meta: Any) -> None:
        at = self._endpoints[meta.engine_id]
        self.peer_addresses.connecting(meta.engine_id, meta.agent_metadata, (at.host, at.port))
