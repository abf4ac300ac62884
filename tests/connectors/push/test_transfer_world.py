"""Both ends of a transfer under random delays, drops, reorderings, cut links, aborts, preemptions and deaths.

What must hold whatever happens: no WRITE lands in a block that was given back, a transfer called complete holds the
right KV in every block, every request ends, and no block is kept on either side.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support_transfers import Prefill, PrefillEngine, World

INDEX = st.integers(0, 63)


class Transfers(RuleBasedStateMachine):
    @initialize(ranks=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2)]), chunkwise=st.booleans())
    def create(self, ranks: tuple[int, int], chunkwise: bool) -> None:
        self.world = World(ranks=ranks, chunkwise=chunkwise)
        self.count = 0
        self.streams: list[tuple[str, str]] = []  # (prefill engine, stream)
        self.waiting: list[tuple[str, str]] = []  # (decode engine, request)

    def _prefill(self, index: int, **wanted: bool) -> tuple[PrefillEngine, str] | None:
        fitting = [
            (engine, stream)
            for name, stream in self.streams
            if not (engine := self.world.prefills[name]).dead
            and all(getattr(engine.requests[stream], key) == value for key, value in wanted.items())
        ]
        # Small indices mean the latest: histories in which one request gets far are worth more.
        return fitting[-1 - index % len(fitting)] if fitting else None

    # ---- schedulers

    @rule(
        prefill=st.sampled_from(["P0", "P1"]),
        blocks=st.integers(1, 6),
        decode=st.sampled_from(["D0", "D1", None]),
        start=st.booleans(),
        heard=st.booleans(),
    )
    def claim(self, prefill: str, blocks: int, decode: str | None, start: bool, heard: bool) -> None:
        """The usual way, in any order: prefill is queued, decode reserves and is heard of, prefill is scheduled."""
        self.count += 1
        stream = f"s{self.count}"
        self.world.prefills[prefill].requests[stream] = Prefill(blocks)
        self.streams.append((prefill, stream))
        if decode is not None:
            self.decode_reserves(len(self.streams) - 1, decode, 0)
        if heard:
            self.everything_is_delivered()
        if start:
            self.prefill_starts(0)

    @precondition(lambda self: self.streams)
    @rule(index=INDEX, decode=st.sampled_from(["D0", "D1"]), cached=st.integers(0, 5))
    def decode_reserves(self, index: int, decode: str, cached: int) -> None:
        name, stream = self.streams[index % len(self.streams)]
        engine, target = self.world.prefills[name], self.world.decodes.get(decode)
        if target is None:
            return
        self.count += 1
        total = engine.requests[stream].total
        if target.reserve(f"r{self.count}", stream, total, min(cached, total - 1), engine):
            self.waiting.append((decode, f"r{self.count}"))

    def decode_disowns(self, index: int) -> None:
        if not self.streams:
            return
        decode = ("D0", "D1")[index % 2]
        name, stream = self.streams[index % len(self.streams)]
        if (target := self.world.decodes.get(decode)) is not None:
            self.count += 1
            target.disown(f"r{self.count}", stream, self.world.prefills[name])

    def decode_aborts(self, index: int) -> None:
        if not self.waiting:
            return
        decode, request = self.waiting[index % len(self.waiting)]
        if (target := self.world.decodes.get(decode)) is not None:
            target.abort(request)

    @rule(index=INDEX)
    def prefill_starts(self, index: int) -> None:
        if found := self._prefill(index, started=False, ended=False):
            found[0].start(found[1])

    @rule(index=INDEX, blocks=st.integers(1, 3))
    def prefill_computes(self, index: int, blocks: int) -> None:
        found = self._prefill(index, started=True, ended=False)
        if found and found[0].requests[found[1]].done < found[0].requests[found[1]].total:
            found[0].compute(found[1], blocks)

    @rule(index=INDEX)
    def prefill_finishes(self, index: int) -> None:
        found = self._prefill(index, started=True, ended=False)
        if found and found[0].requests[found[1]].done == found[0].requests[found[1]].total:
            found[0].end(found[1], ok=True)

    @rule(index=INDEX)
    def prefill_is_preempted(self, index: int) -> None:
        """Also after its last chunk, with WRITEs in flight that now read what others compute."""
        if found := self._prefill(index, started=True, ended=False):
            found[0].preempt(found[1])

    def prefill_aborts(self, index: int) -> None:
        if found := self._prefill(index, ended=False):
            found[0].end(found[1], ok=False)

    # ---- the network

    @precondition(lambda self: self.world.network)
    @rule(index=INDEX)
    def deliver(self, index: int) -> None:
        self.world.deliver(index % len(self.world.network))

    @rule()
    def everything_is_delivered(self) -> None:
        while self.world.handshakes or self.world.network:
            while self.world.handshakes:
                self.world.shake(0, ok=True)
            while self.world.network:
                self.world.deliver(0)

    def drop(self, index: int) -> None:
        if self.world.network:
            self.world.network.pop(index % len(self.world.network))

    def a_link_is_cut(self, index: int) -> None:
        self.world.cut(("P0", "P1")[index % 2], ("D0", "D1")[index // 2 % 2], index // 4 % 4)

    @precondition(lambda self: self.world.handshakes)
    @rule(index=INDEX, ok=st.sampled_from([True, True, True, False]))
    def handshake(self, index: int, ok: bool) -> None:
        self.world.shake(index % len(self.world.handshakes), ok)

    @precondition(lambda self: self.world.writes())
    @rule(index=INDEX)
    def write_lands_but_is_not_reported_yet(self, index: int) -> None:
        writes = self.world.writes()
        writes[index % len(writes)].land()

    @precondition(lambda self: self.world.writes())
    @rule(index=INDEX, ok=st.sampled_from([True, True, True, False]))
    def write_ends(self, index: int, ok: bool) -> None:
        writes = self.world.writes()
        write = writes[index % len(writes)]
        ok = ok and not write.peer.engine.dead and (write.rank.agent, write.peer.agent) not in self.world.broken
        if ok:
            write.land()
        write.rank.end_write(write, ok)

    # ---- time and death

    @rule(seconds=st.sampled_from([0.2, 0.6, 0.6, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    def a_false_alarm(self, index: int) -> None:
        """The fleet takes a living engine for dead; it answers within the grace it is given."""
        name = ("P0", "P1", "D0", "D1")[index % 4]
        self.world.broken = {link for link in self.world.broken if not any(agent.startswith(name) for agent in link)}
        self.world.announce(name)
        self.everything_is_delivered()
        self.world.end_writes()
        self.everything_is_delivered()

    def prefill_takes_decode_for_dead(self, index: int) -> None:
        """It lives, and WRITEs into its blocks are in flight for long."""
        self.world.announce(("D0", "D1")[index % 2], to="P")

    def an_engine_dies(self, index: int) -> None:
        name = ("P0", "P1", "D0", "D1")[index % 4]
        if name in self.world.decodes or (name in self.world.prefills and not self.world.prefills[name].dead):
            self.world.kill(name)

    @rule(
        what=st.sampled_from(
            [
                "decode_disowns",
                "decode_aborts",
                "prefill_aborts",
                "drop",
                "an_engine_dies",
                "a_false_alarm",
                "a_link_is_cut",
                "prefill_takes_decode_for_dead",
            ]
        ),
        index=INDEX,
    )
    def trouble(self, what: str, index: int) -> None:
        getattr(self, what)(index)

    @precondition(lambda self: self.world.unannounced)
    @rule()
    def a_death_is_noticed(self) -> None:
        self.world.announce(self.world.unannounced.pop(0))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
