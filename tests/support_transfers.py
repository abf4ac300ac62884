"""A world of engines with both transfer ends in them: fake schedulers, a fake NIXL that delays, drops, reorders and
fails, links that are cut, devices that compute late, and memory that remembers what was written. On every step it
asserts what must never happen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connectors.push import actions as do
from connectors.push.actions import Connect, Finish, Send
from connectors.push.inbound import Inbound
from connectors.push.outbound import Outbound
from connectors.push.records import Pings, Pongs
from connectors.push.wire import Computing, Endpoint, Gone, Hello, Landed, Message, Ping, Pong, Register, Unregister

TIMEOUT_S = 10.0
MAX_DELAY_S = 5.0  # a link that is whole loses what is older, and a WRITE over it takes no longer
DECODE_BLOCKS = 24
REGIONS = 2  # in which a block has its layers
_EPOCH = 1000  # prefill's block of a position, in the request's n-th epoch: n * _EPOCH + position


@dataclass
class Write:
    """A WRITE in flight: reads prefill memory and writes decode memory whenever it likes."""

    rank: PrefillRank
    stream: str
    order: Register
    peer: DecodeRank
    pairs: list[tuple[int, int, int]]  # (prefill block, decode block, region)
    handle: int
    posted_at: float
    socket: int
    over: bool = False  # though nobody has looked yet

    @property
    def torn(self) -> bool:
        return self.socket in self.rank.world.torn

    @property
    def stalled(self) -> bool:
        return self.rank.world.is_silent(self.rank, self.peer)

    def land(self) -> None:
        """Also when its engine has died since: what was sent is on its way."""
        decode = self.peer.engine
        if decode.dead or self.over or self.torn or self.stalled:
            return
        for mine, block, region in self.pairs:
            owner = decode.owner.get(block)
            assert owner == self.order.request, f"WRITE of {self.stream} into block {block} of {decode.name}: {owner}'s"
            content = self.rank.engine.content(self.stream, mine, region)
            decode.memory[block, self.rank.index, self.peer.index, region] = content


class Rank:
    """One worker and its connections, as `connections.py` keeps them. `kept` is told once a connection is made."""

    def __init__(self, world: World, engine: PrefillEngine | DecodeEngine, index: int) -> None:
        self.world, self.engine, self.index = world, engine, index
        self.agent = f"{engine.name}/{index}"
        self.connected: set[str] = set()
        self.connecting: set[str] = set()
        self.lost: set[str] = set()
        self.to_forget: set[str] = set()  # declared dead, rightly or not
        self.kept: list[do.Tell] = []
        self.sockets: dict[str, int] = {}  # by the other agent

    def peers(self, engine: str) -> list[str]:
        """Agents of `engine` that this rank has to do with."""
        raise NotImplementedError

    def run(self, actions: list[Any]) -> None:
        raise NotImplementedError

    def on_connected(self, engine: str) -> None:
        raise NotImplementedError

    def connect(self, engine: str) -> None:
        if engine in self.connecting:
            return
        if engine in self.connected:
            self.on_connected(engine)
        else:
            self.connecting.add(engine)
            self.world.handshakes.append((self, engine))

    def handshaken(self, engine: str, ok: bool) -> None:
        self.connecting.discard(engine)
        mine = [tell for tell in self.kept if tell.engine == engine]
        self.kept = [tell for tell in self.kept if tell.engine != engine]
        if not ok:
            self.run(self.end.unreachable(engine, "no answer", self.world.now))
            return
        self.connected.add(engine)
        self.sockets |= {peer: next(self.world.handles) for peer in self.peers(engine)}
        self.world.accepted |= {(self.sockets[peer], frozenset({self.agent, peer})) for peer in self.peers(engine)}
        self.world.broken -= {(self.agent, peer) for peer in self.peers(engine)}
        self.on_connected(engine)
        for tell in mine:
            self.tell(tell)

    def sent(self, engine: str, peer: str, message: Message) -> bool:
        if engine not in self.connected:
            return False
        reset = self.sockets[peer] in self.world.torn and not self.world.is_silent(self, self.world.rank(peer))
        if reset or (self.agent, peer) in self.world.broken:
            self.lose(engine)
            return False
        self.world.network.append((self, peer, message, self.world.now, self.sockets[peer]))
        return True

    def tell(self, tell: do.Tell) -> None:
        for peer in self.peers(tell.engine):
            if tell.peer in (None, peer):
                again = do.Tell(tell.engine, tell.message, peer)
                if tell.engine in self.connecting or not self.sent(tell.engine, peer, tell.message):
                    if tell.engine in self.connecting:
                        self.kept.append(again)

    def lose(self, engine: str) -> None:
        if engine in self.connected:
            self.connected.discard(engine)
            self.connecting.add(engine)
            self.lost.add(engine)
            self.end.forget(engine)

    def mend(self) -> None:
        for engine in sorted(self.lost):
            if not self.writes_to(engine):
                self.lost.discard(engine)
                self.world.handshakes.append((self, engine))

    def forget_dead(self) -> None:
        for engine in sorted(self.to_forget - self.end.engines() - self.connecting):
            self.to_forget.discard(engine)
            self.connected.discard(engine)
            self.end.forget(engine)

    def writes_to(self, engine: str) -> bool:
        return False


class PrefillRank(Rank):
    """An `Outbound` and the part of `PushWorker` that carries out its actions."""

    def __init__(self, world: World, engine: PrefillEngine, index: int) -> None:
        super().__init__(world, engine, index)
        self.end = self.outbound = Outbound(world.timeout_s)
        self.outbound.regions = REGIONS
        self.pongs = Pongs()
        self.writes: dict[int, Write] = {}

    def peers(self, engine: str) -> list[str]:
        return [f"{engine}/{index}" for index in self.world.decode_ranks_of(self.index)]

    def writes_to(self, engine: str) -> bool:
        return self.outbound.writes_to(engine)

    def run(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Connect(peer=peer):
                    self.connect(peer.engine_id)
                case do.Renew(engine=engine):
                    self.lose(engine)
                case do.Tell():
                    if isinstance(action.message, Gone):
                        flying = {write.order.request for write in self.writes.values()}
                        assert action.message.request not in flying, f"Gone with a WRITE in flight: {action}"
                    self.tell(action)
                case do.Post():
                    self._post(action)
                case do.Release(stream=stream):
                    self.engine.released(stream, self.index)
                case do.Ended(stream=stream, ok=ok):
                    if not ok:
                        self.engine.given_up.append(stream)
                case _:
                    raise AssertionError(action)

    def on_connected(self, engine: str) -> None:
        self.pongs.made(engine)
        self.run(self.outbound.connected(engine, self.world.chunkwise, tuple(self.peers(engine)), self.world.now))

    def _post(self, post: do.Post) -> None:
        remote = post.order.blocks[0]
        skip = post.total_blocks - len(remote)
        pairs = [
            (block, remote[chunk.start + offset - skip], region)
            for chunk in post.chunks
            for region in (range(REGIONS) if chunk.regions is None else chunk.regions)
            for offset, block in enumerate(chunk.blocks[0])
            if chunk.start + offset >= skip
        ]
        engine = post.order.decode.engine_id
        peers = self.peers(engine) if pairs else []
        cut = [peer for peer in peers if (self.agent, peer) in self.world.broken]
        for peer in peers:
            if peer not in cut:
                handle = next(self.world.handles)
                target, socket = self.world.all_decodes[engine].ranks[int(peer.partition("/")[2])], self.sockets[peer]
                self.writes[handle] = Write(
                    self, post.stream, post.order, target, pairs, handle, self.world.now, socket
                )
                self.outbound.posted(post.stream, handle, self.world.now)
        if cut:
            self.lose(engine)
            self.run(self.outbound.failed(post.stream, "not posted", self.world.now))
        elif not peers:
            self.run(self.outbound.settle(post.stream, self.world.now))

    def end_write(self, write: Write, ok: bool) -> None:
        del self.writes[write.handle]
        if not ok:
            self.world.late.append(write)
            self.lose(write.order.decode.engine_id)
        self.run(self.outbound.written(write.stream, write.handle, ok, self.world.now))
        self.mend()


class DecodeRank(Rank):
    """An `Inbound` and the part of `PushWorker` that carries out its actions."""

    def __init__(self, world: World, engine: DecodeEngine, index: int) -> None:
        super().__init__(world, engine, index)
        self.end = self.inbound = Inbound(world.timeout_s)
        self.pings = Pings()

    def peers(self, engine: str) -> list[str]:
        return [f"{engine}/{index}" for index in self.world.prefill_ranks_of(self.index)]

    def run(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Connect(peer=peer):
                    self.connect(peer.engine_id)
                case do.Renew(engine=engine):
                    self.lose(engine)
                case Send(engine=engine, peer=peer, message=message):
                    if engine in self.connecting:
                        self.run(self.inbound.unsent(peer, message, self.world.now))
                    elif not self.sent(engine, peer, message):
                        self.run(self.inbound.unsendable(engine, peer, message, self.world.now))
                case do.Cut():
                    self.world.tear(self, action.engine)
                    self.world.cuts.append((self, action))
                case Finish():
                    self.engine.finished(action, self.index)
                case _:
                    raise AssertionError(action)

    def on_connected(self, engine: str) -> None:
        self.run(self.inbound.connected(engine, tuple(self.peers(engine)), self.world.now))


class DeviceEvent:
    """Happens when the device has computed a step, which is when the world says so."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


@dataclass
class Prefill:
    """What the prefill scheduler knows of a request."""

    total: int
    lent: bool = False  # its chunks are pieces of a prefix that is lent
    done: int = 0  # blocks of steps that were launched
    computed_in: list[int] = field(default_factory=lambda: [0] * REGIONS)  # blocks that the device has, by region
    epoch: int = 0
    started: bool = False
    ended: bool = False
    unreleased: set[int] = field(default_factory=set)

    @property
    def computed(self) -> int:
        return min(self.computed_in)


class PrefillEngine:
    def __init__(self, world: World, name: str, ranks: int) -> None:
        self.world, self.name, self.dead = world, name, False
        self.endpoint = Endpoint(name, "host", 2, ranks)
        self.ranks = [PrefillRank(world, self, index) for index in range(ranks)]
        self.requests: dict[str, Prefill] = {}
        # Event, request, its epoch, its blocks then, and the regions in which it has them
        self.launched: list[tuple[DeviceEvent, Prefill, int, int, range]] = []
        self.given_up: list[str] = []  # by a rank, which its scheduler learns with the next step

    def step(self) -> None:
        """What one rank has given up is given up by all."""
        given_up, self.given_up = self.given_up, []
        for rank in self.ranks:
            for stream in given_up:
                rank.run(rank.outbound.failed(stream, "another rank gave it up", self.world.now))

    def content(self, stream: str, block: int, region: int) -> object:
        """What the block holds now; garbage before it is computed, and once the request was preempted or freed it."""
        request = self.requests[stream]
        epoch, position = divmod(block, _EPOCH)
        held = (not request.ended or request.unreleased) and epoch == request.epoch
        return (stream, position) if held and position < request.computed_in[region] else "garbage"

    def start(self, stream: str) -> None:
        request = self.requests[stream]
        request.started = True
        for rank in self.ranks:
            rank.run(rank.outbound.start(stream, request.total, request.total, self.world.now, request.lent))

    def compute(self, stream: str, blocks: int, in_groups: bool = False) -> None:
        """`in_groups`: if it is the last chunk, its regions go out one after the other."""
        request = self.requests[stream]
        first, request.done = request.done, min(request.total, request.done + blocks)
        closed = request.done == request.total
        base = request.epoch * _EPOCH
        mine = (tuple(range(base + first, base + request.done)),)
        groups = [range(at, at + 1) for at in range(REGIONS)] if closed and in_groups else [range(REGIONS)]
        for number, regions in enumerate(groups):
            event = DeviceEvent()
            self.launched.append((event, request, request.epoch, request.done, regions))
            chunk = do.Chunk(first, mine, tuple(regions) if len(groups) > 1 else None, event)
            ends = closed and number == len(groups) - 1
            for rank in self.ranks:
                rank.run(rank.outbound.computed(stream, [chunk], request.epoch, ends, self.world.now))
        for rank in self.ranks:
            rank.run(rank.outbound.stepped(self.world.now))

    def device_ends_step(self) -> None:
        """Steps end in the order in which they were launched, however late."""
        if self.launched:
            event, request, epoch, done, regions = self.launched.pop(0)
            event.happened = True
            if epoch == request.epoch:
                for region in regions:
                    request.computed_in[region] = done
        for rank in self.ranks:
            rank.run(rank.outbound.device_worked(self.world.now))

    def preempt(self, stream: str) -> None:
        request = self.requests[stream]
        request.done, request.computed_in = 0, [0] * REGIONS
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
    """A block pool, memory, and an `Inbound` per rank: a request ends when it has ended on every rank."""

    def __init__(self, world: World, name: str, ranks: int) -> None:
        self.world, self.name, self.dead = world, name, False
        self.endpoint = Endpoint(name, "host", 1, ranks)
        self.ranks = [DecodeRank(world, self, index) for index in range(ranks)]
        self.free = list(range(DECODE_BLOCKS))
        self.owner: dict[int, str] = {}
        self.memory: dict[tuple[int, int, int, int], object] = {}  # (block, prefill rank, decode rank, region)
        self.waiting: dict[str, Register] = {}
        self.ended_on: dict[str, dict[int, bool]] = {}
        self.given_up: list[str] = []  # by a rank, which its scheduler learns with the next step

    def step(self) -> None:
        """What one rank has given up is given up by all."""
        given_up, self.given_up = self.given_up, []
        for rank in self.ranks:
            for request in given_up:
                rank.run(rank.inbound.withdraw(request, "another rank gave it up", self.world.now))

    def reserve(self, request: str, stream: str, total: int, cached: int, source: PrefillEngine) -> bool:
        needed = total - cached
        if needed > len(self.free):
            return False
        blocks = [self.free.pop(0) for _ in range(needed)]
        for block in blocks:
            self.owner[block] = request
            for pair, region in itertools.product(self.world.rank_pairs(), range(REGIONS)):
                self.memory[block, *pair, region] = "garbage"
        order = Register(stream, request, self.endpoint, [blocks], total)
        self.waiting[request], self.ended_on[request] = order, {}
        for rank in self.ranks:
            rank.run(rank.inbound.register(order, source.endpoint, self.world.now))
        return True

    def release_unused(self, request: str, stream: str, source: PrefillEngine) -> None:
        order = Unregister(stream, request, self.endpoint)
        for rank in self.ranks:
            rank.run(rank.inbound.release_unused(order, source.endpoint, self.world.now))

    def abort(self, request: str) -> None:
        for rank in self.ranks:
            rank.run(rank.inbound.withdraw(request, "aborted", self.world.now))

    def finished(self, finish: Finish, rank: int) -> None:
        ended = self.ended_on[finish.request]
        assert rank not in ended, f"{finish.request} finished twice on rank {rank}"
        ended[rank] = finish.ok
        if not finish.ok:
            self.given_up.append(finish.request)
        if len(ended) < len(self.ranks):
            return
        order = self.waiting.pop(finish.request)
        skip = order.prompt_tokens - len(order.blocks[0])
        for offset, block in enumerate(order.blocks[0]):
            if all(ended.values()):
                for pair, region in itertools.product(self.world.rank_pairs(), range(REGIONS)):
                    found = self.memory[block, *pair, region]
                    assert found == (order.stream, skip + offset), f"{finish.request} decodes from {found}"
            # Given back at once, and taken by the next request: the harshest reuse.
            del self.owner[block]
            self.free.append(block)


class World:
    def __init__(
        self, *, ranks: tuple[int, int] = (1, 1), chunkwise: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`ranks`: of a prefill and of a decode engine. Unequal ones push whole prompts."""
        self.now, self.timeout_s = 0.0, timeout_s
        self.ranks, self.chunkwise = ranks, chunkwise and ranks[0] == ranks[1]
        self.handles = itertools.count(1)
        self.network: list[tuple[Rank, str, Message, float, int]] = []  # sender, recipient agent, ..., sent at, socket
        self.handshakes: list[tuple[Rank, str]] = []
        self.broken: set[tuple[str, str]] = set()  # agents whose connection fails, from the first to the second
        self.prefills = {name: PrefillEngine(self, name, ranks[0]) for name in ("P0", "P1")}
        self.all_decodes = {name: DecodeEngine(self, name, ranks[1]) for name in ("D0", "D1")}
        self.unannounced: list[str] = []
        self.silent: set[tuple[str, str]] = set()  # engines between which nothing passes, and nobody is told
        self.accepted: set[tuple[int, frozenset[str]]] = set()  # all sockets, and their ends: NIXL closes none
        self.torn: set[int] = set()  # sockets that a decode engine has torn down
        self.cuts: list[tuple[DecodeRank, do.Cut]] = []  # that it does not know yet to be done
        self.late: list[Write] = []  # of engines that have died since, and parts of those that failed

    def rank(self, agent: str) -> Rank:
        name, _, number = agent.partition("/")
        return (self.prefills.get(name) or self.all_decodes[name]).ranks[int(number)]

    def is_silent(self, one: Rank, other: Rank) -> bool:
        names = one.engine.name, other.engine.name
        return names in self.silent or names[::-1] in self.silent

    def tear(self, decode: DecodeRank, prefill: str) -> None:
        for rank in self.prefills[prefill].ranks:
            self.torn |= {socket for socket, ends in self.accepted if ends == {rank.agent, decode.agent}}

    def deliverable(self) -> list[int]:
        return [at for at, one in enumerate(self.network) if not self.is_silent(one[0], self.rank(one[1]))]

    @property
    def decodes(self) -> dict[str, DecodeEngine]:
        return {name: decode for name, decode in self.all_decodes.items() if not decode.dead}

    def engines(self) -> list[PrefillEngine | DecodeEngine]:
        return [engine for engine in [*self.prefills.values(), *self.decodes.values()] if not engine.dead]

    def living(self) -> list[Rank]:
        return [rank for engine in self.engines() for rank in engine.ranks]

    def rank_pairs(self) -> list[tuple[int, int]]:
        """(prefill rank, decode rank) that hold the same heads."""
        theirs, ours = self.ranks
        return [(i * theirs // max(self.ranks), i * ours // max(self.ranks)) for i in range(max(self.ranks))]

    def decode_ranks_of(self, prefill_rank: int) -> list[int]:
        return [decode for prefill, decode in self.rank_pairs() if prefill == prefill_rank]

    def prefill_ranks_of(self, decode_rank: int) -> list[int]:
        return [prefill for prefill, decode in self.rank_pairs() if decode == decode_rank]

    def writes(self) -> list[Write]:
        ranks = [rank for engine in self.prefills.values() if not engine.dead for rank in engine.ranks]
        return [write for rank in ranks for write in rank.writes.values()]

    def deliver(self, index: int, since: float | None = None) -> None:
        """`since`: when the recipient looked for messages before."""
        sender, recipient, message, _, socket = self.network[index]
        rank = self.rank(recipient)
        if self.is_silent(sender, rank):
            return
        del self.network[index]
        if rank.engine.dead or socket in self.torn:
            return
        if isinstance(message, Register | Unregister):
            rank.to_forget.discard(sender.engine.name)
        match message:
            case Register():
                rank.run(rank.end.register(message, sender.agent, self.now, since))
            case Unregister():
                rank.run(rank.end.unregister(message, sender.agent, self.now))
            case Landed():
                rank.run(rank.end.landed(message.request, sender.agent, self.now))
            case Hello():
                rank.run(rank.end.hello(sender.agent, message.epoch, self.now))
            case Ping():
                writes = rank.outbound.writes_to(message.engine)
                rank.run(rank.pongs.answer(message, sender.agent, self.now, writes))
            case Pong():
                rank.pings.answered(sender.agent)
            case Computing():
                rank.run(rank.end.computing(message.request, sender.agent, self.now))
            case Gone():
                rank.run(rank.end.gone(message.request, sender.agent, message.why, self.now, message.failed_epoch))
        rank.mend()

    def shake(self, index: int, ok: bool) -> None:
        rank, engine = self.handshakes.pop(index)
        peer = self.prefills.get(engine) or self.all_decodes[engine]
        if not rank.engine.dead:
            rank.handshaken(engine, ok and not peer.dead and not self.is_silent(rank, peer.ranks[0]))
            rank.mend()

    def cut(self, prefill: str, decode: str, which: int) -> None:
        """Both engines live, but what connects them, or two of their ranks, does not. Messages under way are lost."""
        pairs = [(f"{prefill}/{mine}", f"{decode}/{theirs}") for mine, theirs in self.rank_pairs()]
        pairs = pairs[which : which + 1] or pairs
        links = {*pairs, *((theirs, mine) for mine, theirs in pairs)}
        self.broken |= links
        self.network = [one for one in self.network if (one[0].agent, one[1]) not in links]

    def tick(self, seconds: float, stopped: str = "") -> None:
        """`stopped`: this engine's processes do not run. What is sent to it waits there."""
        self.now += seconds
        oldest = self.now - MAX_DELAY_S
        self.network = [
            one
            for one in self.network
            if one[3] >= oldest or one[1].startswith(f"{stopped}/") or self.is_silent(one[0], self.rank(one[1]))
        ]
        self.end_writes(oldest, stopped)
        cuts, self.cuts = self.cuts, []
        for rank, cut in cuts:
            if not rank.engine.dead:
                rank.run(rank.inbound.cut_off(cut, self.now))
        for rank in self.living():
            if rank.engine.name != stopped:
                rank.run(rank.end.tick(self.now))
                if isinstance(rank, DecodeRank):
                    rank.run(rank.pings.due(rank.inbound.awaited(self.now), rank.inbound.engines(), self.now))
                rank.mend()
                rank.forget_dead()
        for engine in self.engines():
            if engine.name != stopped:
                engine.step()

    def stop(self, name: str, seconds: float) -> None:
        """A prefill engine's processes are stopped for so long, and go on. Half of their WRITEs end meanwhile."""
        since = self.now
        for write in self.writes():
            if write.rank.engine.name == name and write.handle % 2 and not write.stalled:
                write.land()
                write.over = True
        while self.now < since + seconds:
            self.tick(1.0, stopped=name)
            self._deliver_all(lambda recipient: recipient != name)
        self._deliver_all(lambda recipient: recipient == name, since)

    def _deliver_all(self, to: Callable[[str], bool], since: float | None = None) -> None:
        """In the order in which they were sent. `to`: an engine."""
        while found := [at for at in self.deliverable() if to(self.network[at][1].partition("/")[0])]:
            self.deliver(found[0], since)

    def end_writes(self, posted_before: float = math.inf, stopped: str = "") -> None:
        def due(write: Write) -> bool:
            return write.posted_at < posted_before and write.rank.engine.name != stopped and not write.stalled

        while writes := [write for write in self.writes() if due(write)]:
            writes[0].land()
            writes[0].rank.end_write(writes[0], ok=not writes[0].torn or writes[0].over)

    def kill(self, name: str) -> None:
        self.late += [write for write in self.writes() if write.rank.engine.name == name]
        (self.prefills.get(name) or self.all_decodes[name]).dead = True
        self.unannounced.append(name)

    def announce(self, name: str, to: str = "PD") -> None:
        for rank in self.living():
            if rank.agent[0] in to and rank.engine.name != name:
                rank.to_forget.add(name)
                rank.run(rank.end.declared_dead(name, self.now))

    def settle(self) -> None:
        """Let everything that was begun come to its end; then nothing may be left anywhere."""
        self.silent.clear()
        while self.unannounced:
            self.announce(self.unannounced.pop())
        for engine in self.prefills.values():
            for stream, request in engine.requests.items():
                if not engine.dead and request.started and not request.ended:
                    engine.end(stream, ok=False)
        for _ in range(200):
            for engine in self.prefills.values():
                while engine.launched and not engine.dead:
                    engine.device_ends_step()
            while self.handshakes:
                self.shake(0, ok=True)
            while self.network:
                self.deliver(0)
            self.end_writes()
            for write in self.late:
                write.land()
            if not self.network and not self.handshakes:
                self.tick(1.0)
        self.check_empty()

    def check_empty(self) -> None:
        for decode in self.decodes.values():
            assert not decode.waiting, f"{decode.name} waits for {list(decode.waiting)}"
            assert not decode.owner and len(decode.free) == DECODE_BLOCKS
        assert not self.writes()
        for engine in self.prefills.values():
            for stream, request in engine.requests.items():
                assert engine.dead or not request.unreleased, f"{engine.name} still holds the blocks of {stream}"
        for rank in self.living():
            assert not rank.end.busy, f"{rank.agent} is still busy"
            assert not rank.lost and not rank.kept
