"""A request ends soon once a link works again that has lost messages, was cut or could not be connected, however long
the time-out: nothing that the other end would answer is waited for in vain."""

import random

import pytest
from support_transfers import Prefill, World

TIMEOUT_S = 600.0
SOON_S = 8.0  # two repeats
HISTORIES = 400


class Link:
    """A prefill and a decode engine, whose requests all go the usual way."""

    def __init__(self, ranks: tuple[int, int], seed: int = 0) -> None:
        self.random, self.world = random.Random(seed), World(ranks=ranks, timeout_s=TIMEOUT_S)
        self.prefill, self.decode = self.world.prefills["P0"], self.world.decodes["D0"]
        self.asked = 0
        self.log: list[str] = []
        self.troubles = {
            self.a_message_arrives: 10.0,
            self.a_handshake_ends: 6,
            self.a_write_ends: 8,
            self.a_moment_passes: 4,
            self.a_message_is_lost: 0.5,
            self.a_connection_is_cut: 0.5,
            self.a_handshake_fails: 0.3,
            self.it_falls_silent: 0.3,
            self.it_is_heard_again: 1,
            self.an_end_connects_anew: 1.4,
            self.decode_aborts: 0.5,
        }

    def ask(self, troubles: int = 6) -> None:
        """`troubles`: so many events at most after each of its steps."""
        self.asked += 1
        stream, blocks = f"s{self.asked}", self.random.randint(1, 4)
        self.prefill.requests[stream] = Prefill(blocks)
        steps = [
            lambda: self.decode.reserve(f"r{self.asked}", stream, blocks, 0, self.prefill),
            lambda: self._compute(stream, blocks),
        ]
        for step in self.random.sample(steps, 2):
            step()
            self.trouble(self.random.randint(0, troubles))

    def _compute(self, stream: str, blocks: int) -> None:
        self.prefill.start(stream)
        self.prefill.compute(stream, blocks)
        self.prefill.device_ends_step()
        self.prefill.end(stream, ok=True)

    def trouble(self, events: int) -> None:
        for event in self.random.choices(list(self.troubles), list(self.troubles.values()), k=events):
            self.log.append(event.__name__)
            event()

    def goes_on(self) -> float:
        """Without further trouble until no request waits. Returns how long that took, seconds."""
        world = self.world
        world.silent.clear()
        began = world.now
        while self.decode.waiting and world.now < began + TIMEOUT_S:
            while world.handshakes:
                world.shake(0, ok=True)
            while world.network:
                world.deliver(0)
            world.end_writes()
            for engine in world.engines():
                engine.step()
            world.tick(0.05)
        return world.now - began

    def a_message_arrives(self) -> None:
        if self.world.network:
            self.world.deliver(self.random.choice([0, self.random.randrange(len(self.world.network))]))

    def a_message_is_lost(self) -> None:
        if self.world.network:
            self.world.network.pop(self.random.randrange(len(self.world.network)))

    def a_handshake_ends(self, ok: bool = True) -> None:
        if self.world.handshakes:
            self.world.shake(self.random.randrange(len(self.world.handshakes)), ok)

    def a_handshake_fails(self) -> None:
        self.a_handshake_ends(ok=False)

    def a_write_ends(self) -> None:
        if writes := [write for write in self.world.writes() if not write.stalled]:
            write = self.random.choice(writes)
            whole = (write.rank.agent, write.peer.agent) not in self.world.broken and not write.torn
            write.land()
            write.rank.end_write(write, ok=write.over or whole)

    def a_moment_passes(self) -> None:
        self.world.tick(self.random.choice([0.05, 0.2, 0.6]))

    def a_connection_is_cut(self) -> None:
        self.world.cut("P0", "D0", self.random.randrange(5))

    def it_falls_silent(self) -> None:
        self.world.silent.add(("P0", "D0"))

    def it_is_heard_again(self) -> None:
        self.world.silent.clear()

    def an_end_connects_anew(self) -> None:
        end, other = self.random.choice([(self.decode, "P0"), (self.prefill, "D0")])
        for rank in end.ranks:
            rank.lose(other)

    def decode_aborts(self) -> None:
        if self.decode.waiting:
            self.decode.abort(self.random.choice(list(self.decode.waiting)))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_after_trouble_no_request_waits_for_long(ranks: tuple[int, int]) -> None:
    for seed in range(HISTORIES):
        link = Link(ranks, seed)
        for _ in range(link.random.randint(1, 6)):
            link.ask()
        link.trouble(link.random.randint(0, 30))
        assert (took_s := link.goes_on()) < SOON_S, f"history {seed}: {took_s:.1f} s, after {', '.join(link.log)}"


def test_a_handshake_that_failed_is_tried_again_soon() -> None:
    """Both ends have lost their connection. Prefill has another one, for which decode cannot register."""
    link = Link((1, 1))
    link.ask(troubles=0)
    link.goes_on()
    link.prefill.requests["late"] = Prefill(2)
    link.decode.reserve("waits", "late", 2, 0, link.prefill)
    link.a_message_arrives()
    for end, other, ok in ((link.prefill, "D0", True), (link.decode, "P0", False)):
        end.ranks[0].lose(other)
        end.ranks[0].mend()
        link.a_handshake_ends(ok)
    link._compute("late", 2)
    assert link.goes_on() < SOON_S
    assert link.decode.given_up == link.prefill.given_up == [], "it was transferred"
