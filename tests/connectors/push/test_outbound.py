"""The prefill end, step by step: what is posted when, who is told what, and when blocks are given back."""

import gc

import msgspec
import pytest
from support_transfers import DeviceEvent

from connectors.push.actions import Chunk, Connect, Ended, Post, Release, Tell
from connectors.push.outbound import Outbound
from connectors.push.states import STREAM, STREAM_ENDS, Stream, StreamEvent
from connectors.push.wire import Computing, Endpoint, Gone, Hello, Landed, Register, Unregister

DECODE = Endpoint("D", "host", 1)
OTHER = Endpoint("D2", "host", 2)
ORDER = Register("s", "r", DECODE, [[10, 11, 12, 13]], 100, valid_s=30.0, epoch=1)
ORDER_OF_OTHER = Register("s", "r2", OTHER, [[5, 6, 7, 8]], 100, valid_s=30.0, epoch=1)
BACK = Unregister("s", "r", DECODE)


def chunk(start: int, *blocks: int, regions: tuple[int, ...] | None = None) -> Chunk:
    return Chunk(start, (blocks,), regions)


WHOLE = chunk(0, 1, 2, 3, 4)


def told(actions: list) -> list:
    return [action.message for action in actions if isinstance(action, Tell)]


def posts(actions: list) -> list[tuple[Chunk, ...]]:
    return [action.chunks for action in actions if isinstance(action, Post)]


def ship(end: Outbound, chunk: Chunk, now: float, write: int = 1, *, last: bool = False) -> None:
    """`chunk` is computed, and posted as WRITE number `write`."""
    end.computed("s", [chunk], 0, last, now)
    end.posted("s", write, now)


@pytest.fixture
def started() -> Outbound:
    """Prefill of four blocks has started."""
    end = Outbound(timeout_s=10)
    assert end.start("s", 4, 100, 0.0) == []
    return end


@pytest.fixture
def end(started: Outbound) -> Outbound:
    """And decode is registered and connected."""
    assert started.register(ORDER, "D", 0.0) == [Connect(DECODE)]
    assert started.connected("D", True, ("D",), 0.0) == [Tell("D", Hello(1))]
    return started


def test_each_chunk_is_posted_as_it_comes_and_landed_is_told_when_all_are_done(end: Outbound) -> None:
    first, second = chunk(0, 1, 2), chunk(2, 3, 4)
    assert posts(end.computed("s", [first], 0, False, 1.0)) == [(first,)]
    end.posted("s", 1, 1.0)
    assert posts(end.computed("s", [second], 0, True, 2.0)) == [(second,)]
    end.posted("s", 2, 2.0)
    assert end.written("s", 2, True, 3.0) == []  # the first is still in flight
    assert end.finish("s", 3.5) == []
    actions = end.written("s", 1, True, 4.0)
    assert told(actions) == [Landed("r")]
    assert actions[-1] == Release("s")
    assert [a for a in actions if isinstance(a, Ended)] == [Ended("s", True, 3.0, 2.0, "")]
    assert not end.busy


def test_blocks_are_released_only_after_the_scheduler_has_them(end: Outbound) -> None:
    ship(end, WHOLE, 1.0, last=True)
    assert told(end.written("s", 1, True, 2.0)) == [Landed("r")]
    assert end.finish("s", 3.0) == [Release("s")]


def test_a_registration_may_come_last(started: Outbound) -> None:
    started.computed("s", [WHOLE], 0, True, 1.0)
    started.finish("s", 2.0)
    started.register(ORDER, "D", 3.0)
    assert posts(started.connected("D", True, ("D",), 4.0)) == [(WHOLE,)]


def test_a_prefix_that_nobody_fetches_is_given_back_though_a_prefill_is_kept_for_longer() -> None:
    end = Outbound(timeout_s=120)
    for key, lent in (("lent", True), ("computed", False)):
        end.start(key, 4, 100, 0.0, lent=lent)
        end.computed(key, [WHOLE], 0, True, 0.0)
        end.finish(key, 0.0)
    assert end.tick(4.9) == []
    assert end.tick(5.1) == [Release("lent")]
    assert end.tick(119.9) == [] and end.tick(120.1) == [Release("computed")]


def test_a_prefix_that_is_lent_goes_in_pieces_beside_pushes_and_at_once_without(end: Outbound) -> None:
    pieces = chunk(0, 5, 6, 7, 8, 9).pieces(2)
    assert pieces == [chunk(0, 5, 6), chunk(2, 7, 8), chunk(4, 9)]
    end.start("lent", 5, 100, 0.0, lent=True)
    end.register(msgspec.structs.replace(ORDER, stream="lent", request="f"), "D", 0.0)
    assert posts(end.computed("lent", pieces, 0, True, 1.0)) == [tuple(pieces[:1])]
    end.finish("lent", 1.0)
    end.posted("lent", 1, 1.0)
    assert posts(end.computed("s", [WHOLE], 0, True, 1.1)) == [(WHOLE,)], "a push waits for one piece at most"
    end.posted("s", 2, 1.1)
    assert posts(end.device_worked(1.2)) == [], "one after the other"
    assert posts(end.written("lent", 1, True, 1.3)) == [tuple(pieces[1:2])]
    end.posted("lent", 3, 1.3)
    end.finish("s", 1.4)
    assert told(end.written("s", 2, True, 1.4)) == [Landed("r")]
    end.start("next", 5, 100, 1.5, lent=True)  # no push either
    assert posts(end.written("lent", 3, True, 1.5)) == [tuple(pieces[2:])]
    end.posted("lent", 4, 1.5)
    assert told(end.written("lent", 4, True, 1.6)) == [Landed("f")]
    end.register(msgspec.structs.replace(ORDER, stream="next", request="g"), "D", 1.6)
    assert posts(end.computed("next", pieces, 0, True, 1.7)) == [tuple(pieces)]


def test_an_unwanted_prefill_is_released_when_its_lease_ends(started: Outbound) -> None:
    started.computed("s", [WHOLE], 0, True, 1.0)
    started.finish("s", 1.5)
    assert started.tick(10.9) == []
    assert started.tick(11.1) == [Release("s")]
    # Decode never reads KV that was released: who comes later is refused.
    assert told(started.register(ORDER, "D", 12.0)) == [Gone("r", "decode did not register within 10 s")]


def test_leased_kv_gives_way_to_a_prompt_for_which_decode_keeps_blocks() -> None:
    end = Outbound(timeout_s=30)
    for at, key in enumerate(("longest", "later")):
        end.start(key, 4, 100, at)
        end.computed(key, [WHOLE], 0, True, at)
        end.finish(key, at)

    def tick(now: float) -> list:
        end.stepped(now)
        return end.tick(now)

    assert tick(5.0) == [], "nobody waits for room"
    end.register(msgspec.structs.replace(ORDER, stream="waits"), "D", 5.0)
    assert tick(6.5) == [], "the engine does not have it yet: its prefix is fetched, say"
    end.arrived("waits", 6.6)
    assert end.tick(8.0) == [], "the engine takes no steps"
    end.start("running", 4, 100, 8.0)
    assert tick(8.1) == [], "a prompt is computed, whose end leaves room"
    end.abort("running", False, "aborted", 8.2)
    why = "a prompt that decode waits for needs its room"
    assert tick(8.3) == [Release("longest"), Ended("longest", False, 0.0, 8.3, why)]
    assert tick(9.2) == [], "the room that it leaves may be enough"
    end.start("waits", 4, 100, 9.2)
    assert tick(9.4) == []
    assert told(end.register(msgspec.structs.replace(ORDER, stream="longest"), "D", 9.5)) == [Gone("r", why)]
    end.preempted("waits", 1, 9.6)
    assert tick(10.5) == [], "it may be about to go on"
    assert tick(10.7)[0] == Release("later"), "it found no room a second time"


def test_leased_kv_stays_where_who_waits_for_room_is_computed_again() -> None:
    end = Outbound(timeout_s=30)
    for key in ("waits", "leased"):
        end.start(key, 4, 100, 0.0)
    end.register(msgspec.structs.replace(ORDER, stream="waits"), "D", 0.0)
    end.computed("leased", [WHOLE], 0, True, 0.0)
    end.finish("leased", 0.0)
    end.preempted("waits", 1, 1.0)
    end.computed("waits", [chunk(0, 1)], 1, False, 1.5)
    end.stepped(9.0)
    assert end.tick(9.0) == []


def test_leased_kv_stays_where_decode_has_withdrawn_what_waited_for_room(end: Outbound) -> None:
    end.start("leased", 4, 100, 0.0)
    end.computed("leased", [WHOLE], 0, True, 0.0)
    end.finish("leased", 0.0)
    ship(end, chunk(0, 1), 1.0)
    end.preempted("s", 1, 2.0)
    end.unregister(BACK, "D", 3.0)  # a WRITE is still in flight
    end.stepped(9.0)
    assert end.busy and end.tick(9.0) == []


def test_a_preempted_prefill_posts_nothing_new_until_its_old_writes_are_over(end: Outbound) -> None:
    ship(end, chunk(0, 1, 2), 1.0)
    again = chunk(0, 7, 8)
    assert end.computed("s", [again], 1, False, 2.0) == []
    assert posts(end.written("s", 1, True, 3.0)) == [(again,)]
    end.posted("s", 2, 3.0)
    assert end.computed("s", [chunk(2, 9)], 0, False, 4.0) == []  # late news of the old epoch
    last = chunk(2, 9, 6)
    assert posts(end.computed("s", [last], 1, True, 5.0)) == [(last,)]


def test_a_prefill_that_is_preempted_after_its_last_chunk_begins_again(end: Outbound) -> None:
    ship(end, WHOLE, 1.0, last=True)
    assert end.preempted("s", 1, 1.1) == []
    assert end.written("s", 1, True, 1.2) == []  # it may have read another request's KV
    assert posts(end.computed("s", [chunk(0, 21)], 1, False, 1.3)) == [(chunk(0, 21),)]
    end.posted("s", 2, 1.3)
    assert end.written("s", 2, True, 1.4) == []  # one block of four
    assert posts(end.computed("s", [chunk(1, 22, 23, 24)], 1, True, 1.5)) == [(chunk(1, 22, 23, 24),)]
    end.posted("s", 3, 1.5)
    assert told(end.written("s", 3, True, 1.6)) == [Landed("r")]


def test_preemption_ends_lease(started: Outbound) -> None:
    started.computed("s", [WHOLE], 0, True, 1.0)
    assert started.preempted("s", 1, 2.0) == []
    assert started.tick(20.0) == []
    started.register(ORDER, "D", 21.0)
    assert posts(started.connected("D", True, ("D",), 21.0)) == []  # what was computed is void
    assert posts(started.computed("s", [chunk(0, 5, 6, 7, 8)], 1, True, 22.0)) == [(chunk(0, 5, 6, 7, 8),)]


def test_incomplete_restart_does_not_land(end: Outbound) -> None:
    ship(end, chunk(0, 1, 2), 1.0)
    end.computed("s", [chunk(2, 3, 4)], 1, True, 2.0)
    assert told(end.written("s", 1, True, 3.0)) == [Gone("r", "only 0 of 4 blocks were shipped")]


def test_regions_count_as_shipped_only_when_all_of_them_are() -> None:
    gone = Gone("r", "only 2 of 4 blocks were shipped")
    for shipped, message in [(((0,), (1,), (2,)), Landed("r")), (((1, 2), (0,)), Landed("r")), (((0,), (2,)), gone)]:
        end = Outbound(timeout_s=10)
        end.regions = 3
        end.start("s", 4, 100, 0.0)
        end.register(ORDER, "D", 0.0)
        end.connected("D", True, ("D",), 0.0)
        posted = end.computed("s", [chunk(0, 1, 2)], 0, False, 1.0)
        for regions in shipped:
            posted += end.computed("s", [chunk(2, 3, 4, regions=regions)], 0, False, 1.0)
        closing = end.computed("s", [], 0, True, 2.0)
        assert len(posts(posted)) == 1 + len(shipped)
        assert told(closing) == [message]


def test_a_withdrawal_is_answered_after_the_writes_in_flight(end: Outbound) -> None:
    ship(end, chunk(0, 1, 2), 1.0)
    assert end.unregister(BACK, "D", 2.0) == []
    assert end.computed("s", [chunk(2, 3, 4)], 0, True, 3.0) == []  # nothing more is posted
    assert told(end.written("s", 1, True, 4.0)) == [Gone("r", "withdrawn by decode")]
    assert told(end.unregister(BACK, "D", 5.0)) == [Gone("r", "withdrawn by decode")]  # repeated, answered again
    assert end.finish("s", 6.0) == [Release("s")]


def test_a_withdrawal_that_comes_first_stops_the_prefill_to_come() -> None:
    end = Outbound(timeout_s=10)
    assert told(end.unregister(BACK, "D", 0.0)) == [Gone("r", "withdrawn by decode")]
    assert told(end.register(ORDER, "D", 1.0)) == [Gone("r", "withdrawn by decode")]  # overtaken on the way
    end.start("s", 4, 100, 2.0)
    assert end.computed("s", [WHOLE], 0, True, 3.0) == []
    assert end.finish("s", 4.0) == [Release("s")]


def test_a_withdrawal_after_landing_is_answered_with_landed_to_its_owner_only(end: Outbound) -> None:
    ship(end, WHOLE, 1.0, last=True)
    end.written("s", 1, True, 2.0)
    end.finish("s", 2.0)
    assert told(end.unregister(BACK, "D", 3.0)) == [Landed("r")]
    assert told(end.unregister(Unregister("s", "r2", OTHER), "D2", 3.0)) == [Gone("r2", "the prefill has ended")]


def test_only_the_first_decode_engine_gets_the_kv(end: Outbound) -> None:
    assert told(end.register(ORDER_OF_OTHER, "D2", 1.0)) == [Gone("r2", "another decode engine has registered")]
    assert end.register(ORDER, "D/1", 1.0) == []  # another rank of the same


def test_an_aborted_prefill_is_released_at_once_and_told_after_its_writes(end: Outbound) -> None:
    ship(end, chunk(0, 1, 2), 1.0)
    assert end.abort("s", True, "the prefill was aborted", 2.0) == [Release("s")]
    actions = end.written("s", 1, True, 3.0)
    assert told(actions) == [Gone("r", "the prefill was aborted")]
    assert Release("s") not in actions and not end.busy


def test_endless_write_holds_no_blocks(end: Outbound) -> None:
    ship(end, WHOLE, 1.0, last=True)
    assert end.finish("s", 1.0) == []
    assert end.unregister(BACK, "D", 2.0) == [Release("s")]
    assert end.awaits_writes
    assert end.tick(10.0) == [] and not end.awaits_writes
    assert end.busy  # decode is not told that no WRITE is in flight
    assert told(end.written("s", 1, False, 1e6)) == [Gone("r", "withdrawn by decode", 1)]


def test_a_failed_write_fails_the_transfer_not_the_prefill(end: Outbound) -> None:
    ship(end, chunk(0, 1, 2), 1.0)
    assert told(end.written("s", 1, False, 2.0)) == [Gone("r", "a WRITE failed", 1)]
    assert end.finish("s", 3.0) == [Release("s")]


@pytest.mark.parametrize("peer", ["D", "another rank of D"])
def test_failed_stream_answers_registration(end: Outbound, peer: str) -> None:
    """The first answer may have been lost with the link on which a WRITE failed."""
    ship(end, chunk(0, 1, 2), 1.0)
    assert told(end.written("s", 1, False, 2.0)) == [Gone("r", "a WRITE failed", 1)]
    assert told(end.register(ORDER, peer, 5.0)) == [Gone("r", "a WRITE failed", 1)]
    assert told(end.register(ORDER_OF_OTHER, "D2", 5.5)) == [Gone("r2", "a WRITE failed")]


def test_landed_stream_answers_registration(end: Outbound) -> None:
    ship(end, WHOLE, 1.0, last=True)
    assert told(end.written("s", 1, True, 2.0)) == [Landed("r")]
    assert told(end.register(ORDER, "D", 5.0)) == [Landed("r")]
    assert told(end.unregister(BACK, "D", 5.0)) == [Landed("r")]


def test_dead_decode_engine_gets_gone_after_its_writes(end) -> None:
    ship(end, WHOLE, 1.0, last=True)
    end.finish("s", 2.0)
    assert end.declared_dead("D", 3.0) == [Release("s")]
    # It lives after all, and asks: the answer comes when the WRITE is over, not before.
    assert told(end.unregister(BACK, "D", 4.0)) == []
    assert told(end.written("s", 1, True, 5.0)) == [Gone("r", "decode engine D is dead")]
    assert not end.busy


def test_a_write_to_a_dead_engine_that_lasts_keeps_no_block_and_is_not_denied(end: Outbound) -> None:
    """Both engines may live, and the link between them be silent: when it heals, the WRITE lands."""
    ship(end, chunk(0, 1, 2), 1.0)
    assert end.declared_dead("D", 3.0) == []
    assert end.abort("s", True, "aborted", 4.0) == [Release("s")]
    assert end.tick(900.0) == [] and not end.awaits_writes
    assert told(end.unregister(BACK, "D", 901.0)) == []
    end.connected("D", True, ("D",), 901.0)
    assert told(end.written("s", 1, False, 902.0)) == [Gone("r", "decode engine D is dead", 1)]
    assert not end.busy


def test_expired_registration_posts_nothing(end: Outbound) -> None:
    assert told(end.tick(30.0)) == [Gone("r", "decode has given up by now")]
    assert end.computed("s", [WHOLE], 0, True, 31.0) == []


def test_expired_registration_posts_nothing_without_tick(end: Outbound) -> None:
    """This process was stopped for a minute, and finds what its engine has computed before it looks at a clock."""
    actions = end.computed("s", [chunk(0, 1, 2)], 0, False, 61.0)
    assert posts(actions) == [] and told(actions) == [Gone("r", "decode has given up by now")]


@pytest.mark.parametrize("expected", [True, False], ids=["before the prefill", "while it computes"])
def test_delayed_registration_counts_from_earliest_arrival(expected: bool) -> None:
    """It was read a minute late, by a process that was stopped: decode may have given these blocks to others."""
    end = Outbound(timeout_s=10)
    end.connected("D", True, ("D",), 0.0)
    if not expected:
        end.start("s", 4, 100, 0.0)
        end.computed("s", [chunk(0, 1, 2)], 0, False, 1.0)
    actions = end.register(ORDER, "D", 61.0, since=1.0)
    if expected:
        actions += end.start("s", 4, 100, 61.0) + end.computed("s", [chunk(0, 1, 2)], 0, False, 61.0)
    assert posts(actions) == [] and told(actions) == [Gone("r", "decode has given up by now")]


def test_a_long_prefill_has_decode_register_again_while_its_engine_works(end: Outbound) -> None:
    assert end.tick(11.0) == []  # no step since it was registered: nothing to tell
    end.stepped(11.5)
    assert told(end.tick(12.0)) == [Computing("r")]
    assert end.tick(12.5) == []
    assert told(end.tick(13.5)) == [Computing("r")]  # the answer may be lost
    assert end.register(ORDER, "D", 14.0) == []
    assert end.tick(23.9) == [] and end.tick(24.5) == []  # hangs since then
    assert told(end.tick(43.9)) == []
    assert told(end.tick(44.1)) == [Gone("r", "decode has given up by now")]
    # What comes late revives nothing.
    assert told(end.register(ORDER, "D", 44.2)) == [Gone("r", "decode has given up by now")]
    assert end.computed("s", [WHOLE], 0, True, 45.0) == []


def test_late_registration_does_not_shorten_validity(end: Outbound) -> None:
    end.register(Register("s", "r", DECODE, [[10, 11, 12, 13]], 100, valid_s=1.0), "D", 5.0)
    assert told(end.tick(29.0)) == []
    assert told(end.tick(30.0)) == [Gone("r", "decode has given up by now")]


def test_an_unreachable_decode_engine_ends_the_stream(end: Outbound) -> None:
    end = Outbound(timeout_s=10)
    end.register(ORDER, "D", 0.0)
    end.start("s", 4, 100, 0.0)
    end.computed("s", [WHOLE], 0, True, 1.0)
    end.finish("s", 1.0)
    assert end.unreachable("D", "no answer", 2.0)[0] == Release("s")
    assert not end.busy


def test_different_prompt_lengths_fail_transfer() -> None:
    end = Outbound(timeout_s=10)
    end.start("s", 4, 99, 0.0)
    assert told(end.register(ORDER, "D", 1.0)) == [Gone("r", "decode has 100 prompt tokens, prefill 99")]


def test_a_peer_that_takes_no_chunks_gets_everything_at_the_end(started: Outbound) -> None:
    started.register(ORDER, "D", 0.0)
    started.connected("D", False, ("D",), 0.0)
    first, second = chunk(0, 1, 2), chunk(2, 3, 4)
    assert started.computed("s", [first], 0, False, 1.0) == []
    assert posts(started.computed("s", [second], 0, True, 2.0)) == [(first, second)]


def test_transition_table_is_complete() -> None:
    """Every state can end, ends have no way out, and only what was registered streams."""
    assert not [pair for pair in STREAM if pair[0] in STREAM_ENDS]
    for state in set(Stream) - STREAM_ENDS:
        assert StreamEvent.GIVE_UP in {event for before, event in STREAM if before is state} or state is Stream.DRAINING
    assert {after for (_, event), after in STREAM.items() if event is StreamEvent.GIVE_UP} == {Stream.DRAINING}
    assert [before for (before, _), after in STREAM.items() if after is Stream.LANDED] == [Stream.FLUSHING]


def test_a_chunk_is_posted_once_the_device_has_computed_it(end: Outbound) -> None:
    steps = DeviceEvent(), DeviceEvent()
    first, second = Chunk(0, ((1, 2),), ready=steps[0]), Chunk(2, ((3, 4),), ready=steps[1])
    assert end.computed("s", [first], 0, False, 1.0) == []
    assert end.computed("s", [second], 0, True, 1.1) == []  # the next step is launched before the first has ended
    assert end.awaits_device
    steps[0].happened = True
    assert posts(end.device_worked(2.0)) == [(first,)]
    end.posted("s", 1, 2.0)
    assert end.written("s", 1, True, 2.1) == []  # not landed: the second chunk is to come
    assert end.device_worked(2.2) == []
    steps[1].happened = True
    assert posts(end.device_worked(3.0)) == [(second,)]
    assert not end.awaits_device
    end.posted("s", 2, 3.0)
    assert told(end.written("s", 2, True, 3.1)) == [Landed("r")]


def test_decode_withdraws_while_the_device_computes(end: Outbound) -> None:
    step = DeviceEvent()
    end.computed("s", [Chunk(0, ((1, 2, 3, 4),), ready=step)], 0, True, 1.0)
    assert told(end.unregister(BACK, "D", 1.5)) == [Gone("r", "withdrawn by decode")]
    step.happened = True
    assert end.device_worked(2.0) == [] and not end.awaits_device


def test_a_prompt_that_goes_out_whole_waits_for_all_its_chunks() -> None:
    end = Outbound(timeout_s=10)
    step = DeviceEvent()
    end.start("s", 4, 100, 0.0)
    end.register(ORDER, "D", 0.0)
    end.connected("D", False, ("D",), 0.0)
    first, second = chunk(0, 1, 2), Chunk(2, ((3, 4),), ready=step)
    assert end.computed("s", [first], 0, False, 1.0) == []
    assert end.computed("s", [second], 0, True, 1.1) == []
    step.happened = True
    assert posts(end.device_worked(2.0)) == [(first, second)]


def test_ended_stream_keeps_no_prompt_memory() -> None:
    end = Outbound(timeout_s=10)
    end.start("long", 1000, 16_000, 0.0)
    end.register(Register("long", "r", DECODE, [list(range(1000))], 16_000, valid_s=30.0, epoch=1), "D", 0.0)
    end.connected("D", True, ("D",), 0.0)
    end.computed("long", [chunk(0, *range(1000))], 0, True, 1.0)
    end.posted("long", 1, 1.0)
    end.written("long", 1, True, 2.0)
    end.finish("long", 2.0)
    assert not end.busy
    assert [kept for kept in gc.get_objects() if isinstance(kept, Register) and kept.stream == "long"] == []
    back = Unregister("long", "r", DECODE)
    assert told(end.unregister(back, "D", 3.0)) == [Landed("r")], "what comes late is still answered"


def test_old_registration_is_not_written_over_new_connection(end: Outbound) -> None:
    """Decode may have given it up, with what came over the old one."""
    ship(end, chunk(0, 1, 2), 1.0)
    end.written("s", 1, True, 2.0)
    end.forget("D")
    assert told(end.connected("D", True, ("D",), 3.0)) == [Hello(2)]
    assert posts(end.computed("s", [chunk(2, 3, 4)], 0, True, 4.0)) == []
    assert end.register(ORDER, "D", 5.0) == [Tell("D", Hello(2), "D")]  # sent before, it was long on its way
    (post,) = posts(end.register(msgspec.structs.replace(ORDER, epoch=2), "D", 6.0))
    assert post == (chunk(2, 3, 4),)
    assert posts(end.register(ORDER, "D", 7.0)) == []


def test_unregistered_rank_gets_no_writes(started: Outbound) -> None:
    started.connected("D", False, ("D/0", "D/1"), 0.0)
    assert posts(started.register(ORDER, "D/0", 0.0)) == []
    assert posts(started.computed("s", [WHOLE], 0, True, 1.0)) == []
    assert len(posts(started.register(ORDER, "D/1", 2.0))) == 1
