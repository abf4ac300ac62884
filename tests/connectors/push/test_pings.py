"""Signs of life: a connection that swallows messages without an error is made anew by the end that it belongs to."""

from collections.abc import Collection

import pytest
from support_transfers import TIMEOUT_S, Prefill, World

from connectors.push.actions import Renew, Send, Tell
from connectors.push.records import Awaited, Pings, Pongs
from connectors.push.wire import Ping, Pong

PEER = Awaited("P", "P/0", "D")


def test_a_peer_that_is_awaited_for_long_is_asked_twice_a_second() -> None:
    pings = Pings()
    assert pings.due([PEER], {"P"}, 1.0) == [], "its answer may be on its way"
    assert pings.due([PEER], {"P"}, 1.1) == []
    for now in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0):
        assert pings.due([PEER], {"P"}, now) == [Send("P", "P/0", Ping("D", 0))]
        pings.answered("P/0")
    assert pings.due([], (), 4.5) == [] and pings.due([PEER], {"P"}, 5.0) == []


def test_silence_has_decode_connect_anew_less_and_less_often() -> None:
    pings = Pings()
    found = [pings.due([PEER], {"P"}, 0.5 * turn) for turn in range(1, 41)]
    renewed = [turn for turn, actions in enumerate(found) if any(isinstance(action, Renew) for action in actions)]
    assert renewed == [5, 9, 17, 33]
    pings.answered("P/0")
    assert pings.due([PEER], {"P"}, 30.0) == [Send("P", "P/0", Ping("D", 0))]


def test_silence_is_counted_on_while_the_connection_is_made_anew() -> None:
    pings = Pings()
    renewed = []
    for turn in range(1, 41):
        connecting = bool(renewed) and turn - renewed[-1] < 3  # a handshake with an engine that is stopped
        actions = pings.due([] if connecting else [PEER], {"P"}, 0.5 * turn)
        renewed += [turn for action in actions if isinstance(action, Renew)]
    assert len(renewed) == 4 and renewed[3] - renewed[2] > renewed[2] - renewed[1] > renewed[1] - renewed[0]
    assert pings.due([], (), 30.0) == pings.due([PEER], {"P"}, 31.0) == [], "nobody waited, so it begins again"


def test_answers_that_do_not_arrive_have_prefill_connect_anew() -> None:
    pongs = Pongs()
    assert pongs.answer(Ping("D"), "D/0", 0.0, False) == [], "without a connection"
    pongs.made("D")
    for unanswered in range(4):
        assert pongs.answer(Ping("D", unanswered), "D/0", 0.5 * unanswered, False) == [Tell("D", Pong(), "D/0")]
    assert [type(action) for action in pongs.answer(Ping("D", 4), "D/0", 2.0, False)] == [Renew]
    pongs.made("D")
    assert pongs.answer(Ping("D", 5), "D/0", 2.5, False) == [Tell("D", Pong(), "D/0")]


def test_what_prefill_never_heard_does_not_count_as_an_answer() -> None:
    pongs = Pongs()
    pongs.made("D")
    assert pongs.answer(Ping("D", 9), "D/0", 5.0, False) == [Tell("D", Pong(), "D/0")]


def test_answers_to_pings_that_came_together_are_on_their_way() -> None:
    """Prefill has not looked for some seconds: decode could not have had its answers."""
    pongs = Pongs()
    pongs.made("D")
    assert {type(*pongs.answer(Ping("D", unanswered), "D/0", 5.0, False)) for unanswered in range(9)} == {Tell}


def test_answers_behind_writes_take_as_long_as_these() -> None:
    pongs = Pongs()
    pongs.made("D")
    answers = [pongs.answer(Ping("D", turn), "D/0", 0.5 * turn, True) for turn in range(9)]
    answers += [pongs.answer(Ping("D", 9 + turn), "D/0", 4.5 + 0.5 * turn, False) for turn in range(5)]
    assert [type(*actions) for actions in answers] == [Tell] * 13 + [Renew]


def ask(world: World, number: int) -> None:
    prefill = world.prefills["P0"]
    prefill.requests[f"s{number}"] = Prefill(4)
    world.decodes["D0"].reserve(f"r{number}", f"s{number}", 4, 0, prefill)
    prefill.start(f"s{number}")
    prefill.compute(f"s{number}", 4)
    prefill.device_ends_step()
    prefill.end(f"s{number}", ok=True)


def go_on(world: World, until_s: float, swallowed: Collection[int] = ()) -> None:
    """Until nobody waits. `swallowed`: sockets whose messages are lost."""
    while world.decodes["D0"].waiting and world.now < until_s:
        while world.handshakes:
            world.shake(0, ok=True)
        world.network = [one for one in world.network if one[4] not in swallowed]
        while world.network:
            world.deliver(0)
            world.network = [one for one in world.network if one[4] not in swallowed]
        world.end_writes()
        world.tick(0.1)


@pytest.mark.parametrize("dead", ["P0/0", "D0/0"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_a_request_over_a_connection_that_swallows_everything_is_transferred_soon(
    ranks: tuple[int, int], dead: str
) -> None:
    """It gives no error, in one direction: nothing but the silence shows it. `dead`: the agent that sends over it."""
    world = World(ranks=ranks)
    prefill, decode = world.prefills["P0"], world.decodes["D0"]

    ask(world, 1)
    go_on(world, 1.0)
    assert not decode.waiting and prefill.given_up == []
    sockets = {socket for agent, socket in world.rank(dead).sockets.items() if agent[1:] in ("0/0", "0/1")}
    began = world.now
    ask(world, 2)
    go_on(world, began + TIMEOUT_S, sockets)
    assert not decode.waiting and world.now - began < TIMEOUT_S / 2, f"{world.now - began:.1f} s"
    assert prefill.given_up == [] and decode.given_up == [], "it was transferred"


def test_nothing_is_said_to_who_is_not_awaited() -> None:
    world = World()
    ask(world, 1)
    go_on(world, 1.0)
    assert not world.decodes["D0"].waiting
    world.network.clear()
    for _ in range(30):
        world.tick(0.1)
    assert world.network == []
