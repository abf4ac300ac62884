"""A world of engines with both transfer ends in them: fake schedulers, a fake NIXL that delays, drops, reorders and
fails, and memory that remembers what was written into it. It asserts, on every step, what must never happen.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from connectors.push import actions as do
from connectors.push.actions import Connect, Finish, Send
from connectors.push.inbound import Inbound
from connectors.push.outbound import Outbound
from connectors.push.wire import Computing, Endpoint, Gone, Landed, Register, Unregister

TIMEOUT_S = 10.0
MAX_DELAY_S = 5.0  # the network loses what is older, and a WRITE takes no longer
DECODE_BLOCKS = 24


@dataclass
class Write:
    """A WRITE in flight: reads prefill memory and writes decode memory whenever it likes."""

    rank: PrefillRank
    stream: str
    order: Register
    pairs: list[tuple[int, int]]  # (position in the prompt, decode block)
    handle: int
    over: bool = False

    def land(self) -> None:
        decode = self.rank.world.decodes.get(self.order.decode.engine_id)
        if decode is None or self.rank.engine.dead:
            return
        for position, block in self.pairs:
            owner = decode.owner.get(block)
            assert owner == self.order.request, f"WRITE of {self.stream} into block {block} of {decode.name}: {owner}'s"
            decode.memory[block, self.rank.index] = self.rank.engine.content(self.stream, position)


class PrefillRank:
    """One worker: an `Outbound` and the part of `PushWorker` that carries out its actions."""

    def __init__(self, world: World, engine: PrefillEngine, index: int) -> None:
        self.world, self.engine, self.index = world, engine, index
        self.agent = f"{engine.name}/{index}"
        self.outbound = Outbound(lease_s=TIMEOUT_S, expect_s=TIMEOUT_S)
        self.connected: set[str] = set()
        self.connecting: set[str] = set()
        self.undelivered: list[do.Tell] = []
        self.writes: dict[int, Write] = {}

    def run(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Connect(peer=peer):
                    self._connect(peer.engine_id)
                case do.Tell():
                    self._tell(action)
                case do.Post():
                    self._post(action)
                case do.Release(stream=stream):
                    self.engine.released(stream, self.index)
                case do.Abandon(handles=handles):
                    for handle in handles:
                        self.writes.pop(handle).over = True
                case do.Ended():
                    pass
                case _:
                    raise AssertionError(action)

    def _connect(self, engine: str) -> None:
        if engine in self.connected:
            self.run(self.outbound.connected(engine, self.world.chunkwise, self.world.now))
        elif engine not in self.connecting:
            self.connecting.add(engine)
            self.world.handshakes.append((self, engine))

    def handshaken(self, engine: str, ok: bool) -> None:
        self.connecting.discard(engine)
        mine = [tell for tell in self.undelivered if tell.engine == engine]
        self.undelivered = [tell for tell in self.undelivered if tell.engine != engine]
        if ok:
            self.connected.add(engine)
            for tell in mine:
                self._tell(tell)
            self.run(self.outbound.connected(engine, self.world.chunkwise, self.world.now))
        else:
            self.run(self.outbound.unreachable(engine, "no answer", self.world.now))

    def _tell(self, tell: do.Tell) -> None:
        if tell.engine in self.connecting:
            self.undelivered.append(tell)
        elif tell.engine in self.connected and tell.peer in (None, tell.engine):
            if isinstance(tell.message, Gone):
                for write in self.writes.values():
                    assert write.order.request != tell.message.request, f"Gone with a WRITE in flight: {tell}"
            self.world.network.append((self, tell.engine, tell.message))

    def _post(self, post: do.Post) -> None:
        remote = post.order.blocks[0]
        skip = post.total_blocks - len(remote)
        pairs = [
            (chunk.start + offset, remote[chunk.start + offset - skip])
            for chunk in post.chunks
            for offset in range(len(chunk.blocks[0]))
            if chunk.start + offset >= skip
        ]
        if not pairs:
            self.run(self.outbound.settle(post.stream, self.world.now))
            return
        handle = next(self.world.handles)
        self.writes[handle] = Write(self, post.stream, post.order, pairs, handle)
        self.outbound.posted(post.stream, handle, self.world.now)

    def end_write(self, write: Write, ok: bool) -> None:
        del self.writes[write.handle]
        write.over = True
        self.run(self.outbound.written(write.stream, write.handle, ok, self.world.now))


@dataclass
class Prefill:
    """What the prefill scheduler knows of a request."""

    total: int
    done: int = 0
    epoch: int = 0
    started: bool = False
    ended: bool = False
    unreleased: set[int] = field(default_factory=set)


class PrefillEngine:
    def __init__(self, world: World, name: str, ranks: int) -> None:
        self.world, self.name = world, name
        self.dead = False
        self.ranks = [PrefillRank(world, self, index) for index in range(ranks)]
        self.requests: dict[str, Prefill] = {}

    def content(self, stream: str, position: int) -> object:
        """What the request's block holds now; garbage once it was freed, or before it is computed again."""
        request = self.requests[stream]
        held = not request.ended or request.unreleased
        return (stream, position) if held and position < request.done else "garbage"

    def start(self, stream: str) -> None:
        request = self.requests[stream]
        request.started = True
        for rank in self.ranks:
            rank.run(rank.outbound.start(stream, request.total, request.total, self.world.now))

    def compute(self, stream: str, blocks: int) -> None:
        request = self.requests[stream]
        first, request.done = request.done, min(request.total, request.done + blocks)
        closed = request.done == request.total
        chunk = do.Chunk(first, (tuple(range(first, request.done)),))
        for rank in self.ranks:
            rank.run(rank.outbound.computed(stream, [chunk], request.epoch, closed, self.world.now))
            rank.run(rank.outbound.stepped(self.world.now))

    def preempt(self, stream: str) -> None:
        request = self.requests[stream]
        request.done = 0
        request.epoch += 1
        for rank in self.ranks:
            rank.run(rank.outbound.preempted(stream, request.epoch, self.world.now))

    def end(self, stream: str, ok: bool) -> None:
        request = self.requests[stream]
        held = request.started and request.done > 0
        request.ended = True
        request.unreleased = {rank.index for rank in self.ranks} if held else set()
        for rank in self.ranks:
            if ok:
                rank.run(rank.outbound.finish(stream, self.world.now))
            else:
                rank.run(rank.outbound.abort(stream, held, "aborted", self.world.now))

    def released(self, stream: str, rank: int) -> None:
        assert rank in self.requests[stream].unreleased, f"{stream} released twice, or never held, by rank {rank}"
        self.requests[stream].unreleased.discard(rank)


class DecodeEngine:
    """One rank: an `Inbound`, a block pool, and memory."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.endpoint = Endpoint(name, "host", 1)
        self.inbound = Inbound(timeout_s=TIMEOUT_S)
        self.free = list(range(DECODE_BLOCKS))
        self.owner: dict[int, str] = {}
        self.memory: dict[tuple[int, int], object] = {}
        self.waiting: dict[str, Register] = {}
        self.outcomes: dict[str, bool] = {}
        self.connected: set[str] = set()
        self.connecting: set[str] = set()

    def reserve(self, request: str, stream: str, total: int, cached: int, source: PrefillEngine) -> bool:
        needed = total - cached
        if needed > len(self.free):
            return False
        blocks = [self.free.pop(0) for _ in range(needed)]
        for block in blocks:
            self.owner[block] = request
            for rank in source.ranks:
                self.memory[block, rank.index] = "garbage"
        order = Register(stream, request, self.endpoint, [blocks], total)
        self.waiting[request] = order
        self.run(self.inbound.register(order, Endpoint(source.name, "host", 2), self.world.now))
        return True

    def disown(self, request: str, stream: str, source: PrefillEngine) -> None:
        order = Unregister(stream, request, self.endpoint)
        self.run(self.inbound.disown(order, Endpoint(source.name, "host", 2), self.world.now))

    def run(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Connect(peer=peer):
                    self._connect(peer.engine_id)
                case Send(peer=peer, message=message):
                    self.world.network.append((self, peer, message))
                case Finish():
                    self._finished(action)
                case _:
                    raise AssertionError(action)

    def _connect(self, engine: str) -> None:
        if engine in self.connected:
            self.handshaken(engine, True)
        elif engine not in self.connecting:
            self.connecting.add(engine)
            self.world.handshakes.append((self, engine))

    def handshaken(self, engine: str, ok: bool) -> None:
        self.connecting.discard(engine)
        if ok:
            self.connected.add(engine)
            agents = tuple(rank.agent for rank in self.world.prefills[engine].ranks)
            self.run(self.inbound.connected(engine, agents, self.world.now))
        else:
            self.run(self.inbound.unreachable(engine, "no answer", self.world.now))

    def _finished(self, finish: Finish) -> None:
        assert finish.request not in self.outcomes, f"{finish.request} finished twice"
        order = self.waiting.pop(finish.request)
        self.outcomes[finish.request] = finish.ok
        skip = order.prompt_tokens - len(order.blocks[0])
        for offset, block in enumerate(order.blocks[0]):
            if finish.ok:
                for rank in range(self.world.ranks):
                    found = self.memory[block, rank]
                    assert found == (order.stream, skip + offset), f"{finish.request} decodes from {found}"
            # Given back at once, and taken by the next request: the harshest reuse.
            del self.owner[block]
            self.free.append(block)


class World:
    def __init__(self, *, ranks: int = 1, chunkwise: bool = True) -> None:
        self.now = 0.0
        self.ranks, self.chunkwise = ranks, chunkwise
        self.handles = itertools.count(1)
        self.network: list[tuple[Any, str, Any]] = []  # (sender, recipient agent, message)
        self.handshakes: list[tuple[Any, str]] = []
        self.prefills = {name: PrefillEngine(self, name, ranks) for name in ("P0", "P1")}
        self.decodes = {name: DecodeEngine(self, name) for name in ("D0", "D1")}
        self.unannounced: list[str] = []

    def writes(self) -> list[Write]:
        ranks = [rank for engine in self.prefills.values() if not engine.dead for rank in engine.ranks]
        return [write for rank in ranks for write in rank.writes.values()]

    def deliver(self, index: int) -> None:
        sender, recipient, message = self.network.pop(index)
        if isinstance(message, Register | Unregister):
            engine, _, rank = recipient.partition("/")
            target = self.prefills[engine]
            if not target.dead:
                outbound = target.ranks[int(rank)]
                event = outbound.outbound.register if isinstance(message, Register) else outbound.outbound.unregister
                outbound.run(event(message, sender.name, self.now))
        elif (decode := self.decodes.get(recipient)) is not None:
            if isinstance(message, Landed):
                decode.run(decode.inbound.landed(message.request, sender.agent, self.now))
            elif isinstance(message, Computing):
                decode.run(decode.inbound.computing(message.request, sender.agent, self.now))
            else:
                decode.run(decode.inbound.gone(message.request, sender.agent, message.why, self.now))

    def shake(self, index: int, ok: bool) -> None:
        side, engine = self.handshakes.pop(index)
        alive = not self.prefills[engine].dead if engine in self.prefills else engine in self.decodes
        if isinstance(side, PrefillRank) and side.engine.dead:
            return
        if isinstance(side, DecodeEngine) and side.name not in self.decodes:
            return
        side.handshaken(engine, ok and alive)

    def tick(self, seconds: float) -> None:
        if seconds > MAX_DELAY_S:
            self.network.clear()
            self.end_writes()
        self.now += seconds
        for decode in self.decodes.values():
            decode.run(decode.inbound.tick(self.now))
        for engine in self.prefills.values():
            if not engine.dead:
                for rank in engine.ranks:
                    rank.run(rank.outbound.tick(self.now))

    def end_writes(self) -> None:
        while writes := self.writes():
            writes[0].land()
            writes[0].rank.end_write(writes[0], ok=True)

    def kill(self, name: str) -> None:
        if name in self.prefills:
            self.prefills[name].dead = True
        else:
            del self.decodes[name]
        self.unannounced.append(name)

    def announce(self, name: str) -> None:
        for decode in self.decodes.values():
            decode.run(decode.inbound.declared_dead(name, self.now))
        for engine in self.prefills.values():
            for rank in engine.ranks if not engine.dead else []:
                rank.run(rank.outbound.declared_dead(name, self.now))

    def settle(self) -> None:
        """Let everything that was begun come to its end; then nothing may be left anywhere."""
        while self.unannounced:
            self.announce(self.unannounced.pop())
        for engine in self.prefills.values():
            for stream, request in engine.requests.items():
                if not engine.dead and request.started and not request.ended:
                    engine.end(stream, ok=False)
        for _ in range(200):
            while self.handshakes:
                self.shake(0, ok=True)
            while self.network:
                self.deliver(0)
            self.end_writes()
            if not self.network and not self.handshakes:
                self.tick(1.0)
        self.check_empty()

    def check_empty(self) -> None:
        for decode in self.decodes.values():
            assert not decode.waiting, f"{decode.name} waits for {list(decode.waiting)}"
            assert not decode.inbound.busy and not decode.owner
            assert len(decode.free) == DECODE_BLOCKS
        for engine in self.prefills.values():
            if engine.dead:
                continue
            assert not self.writes()
            for stream, request in engine.requests.items():
                assert not request.unreleased, f"{engine.name} still holds the blocks of {stream}"
            for rank in engine.ranks:
                assert not rank.outbound.busy, f"{rank.agent} still keeps streams"
