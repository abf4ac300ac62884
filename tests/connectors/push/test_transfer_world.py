"""Both ends of a transfer under random delays, losses, reorderings, cut links, late devices, aborts and deaths.

What must hold whatever happens: no WRITE lands in a block that was given back, a transfer called complete holds the
right KV in every block, every request ends, and no block is kept on either side.
"""

import random
from collections.abc import Callable

import pytest
from support_transfers import Prefill, PrefillEngine, World

STEPS = 300
HISTORIES = 80  # of each kind


class History:
    """One random history. What it did last is in `log`."""

    def __init__(self, seed: int, ranks: tuple[int, int], chunkwise: bool, device_lags: bool) -> None:
        self.random = random.Random(seed)
        self.world = World(ranks=ranks, chunkwise=chunkwise)
        self.device_lags = device_lags
        self.count = 0
        self.streams: list[tuple[str, str]] = []  # (prefill engine, stream)
        self.waiting: list[tuple[str, str]] = []  # (decode engine, request)
        self.log: list[str] = []
        troubles = [
            self.decode_releases_unused,
            self.decode_aborts,
            self.prefill_aborts,
            self.a_message_is_lost,
            self.a_link_is_cut,
            self.a_link_falls_silent,
            self.a_false_alarm,
            self.prefill_takes_decode_for_dead,
            self.a_death_is_noticed,
            self.a_long_time_passes,
        ]
        # Mostly things go on, so that transfers get far; trouble comes in every state that they reach.
        self.events: dict[Callable[[], None], float] = {
            self.claim: 5,
            self.decode_reserves: 3,
            self.prefill_starts: 5,
            self.prefill_computes: 10,
            self.prefill_finishes: 5,
            self.device_ends_step: 8,
            self.deliver: 12,
            self.handshake: 6,
            self.everything_is_delivered: 2,
            self.write_lands_but_is_not_reported_yet: 3,
            self.write_ends: 10,
            self.a_moment_passes: 6,
            self.an_engine_dies: 0.1,
            self.prefill_is_stopped_for_long: 0.3,
            self.a_silent_link_heals: 0.7,
            self.what_was_on_its_way_lands: 1,
            self.prefill_is_preempted: 2,
            **dict.fromkeys(troubles, 0.7),
        }

    def run(self) -> None:
        events, weights = list(self.events), list(self.events.values())
        for event in self.random.choices(events, weights, k=STEPS):
            self.log.append(event.__name__)
            event()
        self.world.settle()

    def _of(self, things: list) -> int | None:
        return self.random.randrange(len(things)) if things else None

    def _prefill(self, **wanted: bool) -> tuple[PrefillEngine, str] | None:
        fitting = [
            (engine, stream)
            for name, stream in self.streams[-8:]
            if not (engine := self.world.prefills[name]).dead
            and all(getattr(engine.requests[stream], key) == value for key, value in wanted.items())
        ]
        return self.random.choice(fitting) if fitting else None

    # ---- schedulers

    def claim(self) -> None:
        """The usual way, in any order: prefill is queued, decode reserves and is heard of, prefill is scheduled."""
        self.count += 1
        engine, stream = self.random.choice(list(self.world.prefills.values())), f"s{self.count}"
        engine.requests[stream] = Prefill(self.random.randint(1, 6), lent=self.random.random() < 0.3)
        self.streams.append((engine.name, stream))
        if self.random.random() < 0.7:
            self._reserve(engine, stream)
        if self.random.random() < 0.5:
            self.everything_is_delivered()
        if self.random.random() < 0.7 and not engine.dead:
            engine.start(stream)

    def decode_reserves(self) -> None:
        if self.streams:
            name, stream = self.random.choice(self.streams[-8:])
            self._reserve(self.world.prefills[name], stream)

    def _reserve(self, engine: PrefillEngine, stream: str) -> None:
        if not self.world.decodes:
            return
        self.count += 1
        total, decode = engine.requests[stream].total, self.random.choice(list(self.world.decodes.values()))
        cached = self.random.choice([0, 0, self.random.randrange(total)])
        if decode.reserve(f"r{self.count}", stream, total, cached, engine):
            self.waiting.append((decode.name, f"r{self.count}"))

    def decode_releases_unused(self) -> None:
        if self.streams and self.world.decodes:
            self.count += 1
            name, stream = self.random.choice(self.streams[-8:])
            decode = self.random.choice(list(self.world.decodes.values()))
            decode.release_unused(f"r{self.count}", stream, self.world.prefills[name])

    def decode_aborts(self) -> None:
        if self.waiting:
            name, request = self.random.choice(self.waiting[-8:])
            if (decode := self.world.decodes.get(name)) is not None:
                decode.abort(request)

    def prefill_starts(self) -> None:
        if found := self._prefill(started=False, ended=False):
            found[0].start(found[1])

    def prefill_computes(self) -> None:
        found = self._prefill(started=True, ended=False)
        if found and found[0].requests[found[1]].done < found[0].requests[found[1]].total:
            found[0].compute(found[1], self.random.randint(1, 3), in_groups=self.random.random() < 0.5)
            while found[0].launched and not self.device_lags:
                found[0].device_ends_step()

    def device_ends_step(self) -> None:
        engine = self.random.choice(list(self.world.prefills.values()))
        if not engine.dead:
            engine.device_ends_step()

    def prefill_finishes(self) -> None:
        """Its token is known, so the device has computed it."""
        found = self._prefill(started=True, ended=False)
        if found and found[0].requests[found[1]].computed == found[0].requests[found[1]].total:
            found[0].end(found[1], ok=True)

    def prefill_is_preempted(self) -> None:
        """Also after its last chunk, with WRITEs in flight that now read what others compute."""
        flying = [(w.rank.engine, w.stream) for w in self.world.writes() if not w.rank.engine.requests[w.stream].ended]
        found = self.random.choice(flying) if flying else self._prefill(started=True, ended=False)
        if found:
            found[0].preempt(found[1])

    def prefill_aborts(self) -> None:
        if found := self._prefill(ended=False):
            found[0].end(found[1], ok=False)

    # ---- the network

    def deliver(self) -> None:
        if (index := self._of(self.world.network)) is not None:
            self.world.deliver(index)

    def everything_is_delivered(self) -> None:
        while self.world.handshakes or self.world.deliverable():
            while self.world.handshakes:
                self.world.shake(0, ok=True)
            while found := self.world.deliverable():
                self.world.deliver(found[0])

    def a_message_is_lost(self) -> None:
        if (index := self._of(self.world.network)) is not None:
            self.world.network.pop(index)

    def a_link_is_cut(self) -> None:
        prefill, decode = self.random.choice(["P0", "P1"]), self.random.choice(["D0", "D1"])
        self.world.cut(prefill, decode, self.random.randrange(5))

    def a_link_falls_silent(self) -> None:
        """Packets are lost meanwhile: kernels keep what is on its way, and send it when the link heals."""
        self.world.silent.add((self.random.choice(["P0", "P1"]), self.random.choice(["D0", "D1"])))

    def a_silent_link_heals(self) -> None:
        if self.world.silent:
            self.world.silent.remove(self.random.choice(sorted(self.world.silent)))

    def what_was_on_its_way_lands(self) -> None:
        """What the dead have sent, and parts of WRITEs that failed."""
        if self.world.late:
            self.world.late.pop(self.random.randrange(len(self.world.late))).land()

    def handshake(self) -> None:
        if (index := self._of(self.world.handshakes)) is not None:
            self.world.shake(index, self.random.random() < 0.85)

    def write_lands_but_is_not_reported_yet(self) -> None:
        if writes := self.world.writes():
            self.random.choice(writes).land()

    def write_ends(self) -> None:
        if writes := self.world.writes():
            write = self.random.choice(writes)
            reachable = not write.peer.engine.dead and (write.rank.agent, write.peer.agent) not in self.world.broken
            ok = reachable and (write.over or not write.torn) and self.random.random() < 0.95
            if not write.stalled:
                write.land()
                write.rank.end_write(write, ok)

    # ---- time and death

    def a_moment_passes(self) -> None:
        self.world.tick(self.random.choice([0.2, 0.6]))

    def a_long_time_passes(self) -> None:
        self.world.tick(11.0)

    def prefill_is_stopped_for_long(self) -> None:
        """Decode has given up by then, and its blocks are others'."""
        engine = self.random.choice(list(self.world.prefills.values()))
        if not engine.dead:
            self.world.stop(engine.name, seconds=self.random.choice([3.0, 25.0]))

    def a_false_alarm(self) -> None:
        """The fleet takes a living engine for dead, which may answer or not, as long as it is given."""
        self.world.announce(self.random.choice(["P0", "P1", "D0", "D1"]))

    def prefill_takes_decode_for_dead(self) -> None:
        """It lives, and WRITEs into its blocks are in flight for long."""
        self.world.announce(self.random.choice(["D0", "D1"]), to="P")

    def an_engine_dies(self) -> None:
        name = self.random.choice(["P0", "P1", "D0", "D1"])
        if name in self.world.decodes or (name in self.world.prefills and not self.world.prefills[name].dead):
            self.world.kill(name)

    def a_death_is_noticed(self) -> None:
        if self.world.unannounced:
            self.world.announce(self.world.unannounced.pop(0))


@pytest.mark.parametrize("device_lags", [False, True])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2)])
def test_transfers_never_corrupt_or_leak_blocks(ranks: tuple[int, int], device_lags: bool) -> None:
    for seed in range(HISTORIES):
        history = History(seed, ranks, chunkwise=seed % 4 != 0, device_lags=device_lags)
        try:
            history.run()
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}, after {', '.join(history.log[-12:])}") from error


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 4)])
def test_a_rank_without_a_connection_ends_the_transfer_on_all_ranks_at_once(ranks: tuple[int, int]) -> None:
    """Prefill writes to nobody before all have registered: who has would wait for that until its time is over."""
    world = World(ranks=ranks)
    prefill, decode = world.prefills["P0"], world.decodes["D0"]
    prefill.requests["s"] = Prefill(4)
    decode.reserve("r", "s", 4, 0, prefill)
    while world.handshakes:
        world.shake(0, ok=world.handshakes[0][0] is not decode.ranks[1])
    prefill.start("s")
    prefill.compute("s", 4)
    prefill.device_ends_step()
    prefill.end("s", ok=True)
    steps = 0
    while decode.waiting or prefill.requests["s"].unreleased:
        steps += 1
        assert steps < 5, "decode waits, or prefill keeps its blocks"
        while world.handshakes:
            world.shake(0, ok=True)
        while world.network:
            world.deliver(0)
        world.tick(0.02)
    world.settle()
