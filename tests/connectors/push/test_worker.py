"""The worker half on a fake NIXL: ranks that differ, WRITEs and messages that fail, links that are cut."""

import contextlib
import queue
import socket
import threading
import time
import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from support_wait import DEADLINE_S

from connectors.push import wire
from connectors.push.blocks.chunks import StepLayers
from connectors.push.metadata import (
    Computed,
    Finished,
    Met,
    Preempted,
    PushMetadata,
    RankReport,
    Reserved,
    Started,
)

pytestmark = pytest.mark.vllm

DECODE = wire.Endpoint("D", "host", 1, 4)
FORWARD = object()  # a forward pass


@pytest.fixture
def push() -> Any:
    return pytest.importorskip("support_push")  # imports vLLM, which takes seconds


def order(stream: str, *blocks: int, decode: wire.Endpoint = DECODE) -> wire.Register:
    return wire.Register(stream, f"r-{stream}", decode, [list(blocks)], 32, valid_s=30.0)


def prefill(worker: Any, stream: str, decode: wire.Endpoint = DECODE) -> None:
    """Prefill `stream` of two blocks in one step."""
    worker.step(started=[Started(stream, 2, 32)])
    for agent in worker._agents(decode.engine_id).values() or (f"{decode.engine_id}/0",):
        worker.hear(agent, order(stream, 7, 8, decode=decode))
    worker.step(computed=[Computed(stream, 0, 0, ((1, 2),), True)], finished=[Finished(stream, True, True)])
    worker.step()


def ended(sent: str = "", received: str = "", failed: str = "") -> Any:
    """What the engine is told of requests that have ended: at most one of each kind."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    one = {sent} - {""}, {received, failed} - {""}, {failed} - {""}
    return KVConnectorTransferResults(*one)


@pytest.fixture
def unequal(push: Any) -> Any:
    """Rank 0 of 2. Decode has 4: this rank writes to two of them."""
    worker = push.FakeWorker(0, 2)
    worker.know("D", 4, [0, 1])
    return worker


def test_whole_push_lands_on_every_rank(unequal: Any) -> None:
    prefill(unequal, "s")
    first, second = unequal.nixl_wrapper.writes
    unequal.nixl_wrapper.writes[first] = "DONE"
    unequal.turn()
    assert unequal.nixl_wrapper.told() == []
    unequal.end_writes()
    assert unequal.nixl_wrapper.told() == [wire.Landed("r-s")] * 2
    assert unequal.get_transfer_results() == ended(sent="s")


def test_whole_push_of_what_came_layer_by_layer_has_each_block_once(unequal: Any) -> None:
    """With `kv.transfer: layer` the last chunk comes once per layer, also for an engine that is sent whole prompts."""
    unequal._layers = StepLayers(one_by_one=True)
    unequal._layers.know(["first", "second"], ["first", "second"], 1)
    unequal.num_regions = unequal._outbound.regions = 2
    unequal.block_len_per_layer, unequal.region_group_ids = [1, 1], [0, 0]
    unequal.dst_region_num_blocks |= {"P": [100, 100], "D": [100, 100]}
    unequal.dst_region_group_ids["D"] = [0, 0]
    unequal.step(started=[Started("s", 4, 64)], computed=[Computed("s", 0, 0, ((1, 2, 3),), False)])
    for agent in ("D/0", "D/1"):
        unequal.hear(agent, wire.Register("s", "r-s", DECODE, [[11, 12, 13, 14]], 64, valid_s=30.0))
    last = PushMetadata()
    last.computed = [Computed("s", 0, 3, ((4,),), True)]
    for layer in ("first", "second"):
        unequal.on_layer(layer, last, FORWARD)
    unequal.on_computed(last)
    unequal.turn()
    for mine, theirs in unequal.nixl_wrapper.posted:
        assert mine.tolist() == [1, 2, 3, 4, 101, 102, 103, 104]
        assert theirs.tolist() == [11, 12, 13, 14, 111, 112, 113, 114]
    assert len(unequal.nixl_wrapper.posted) == 2


def test_several_ranks_push_to_one_of_a_decode_engine_with_fewer(push: Any) -> None:
    """Rank 3 of 4 has half of the heads of decode's rank 1 of 2, which waits for rank 2 as well."""
    worker = push.FakeWorker(3, 4)
    worker.know("D", 2, [1])
    decode = wire.Endpoint("D", "host", 1, 2)
    worker.step(started=[Started("s", 2, 32)])
    worker.hear("D/1", order("s", 7, 8, decode=decode))
    worker.step(computed=[Computed("s", 0, 0, ((1, 2),), True)], finished=[Finished("s", True, True)])
    assert len(worker.nixl_wrapper.writes) == 1
    worker.end_writes()
    assert worker.nixl_wrapper.sent == [("D/1", wire.Landed("r-s"))]
    assert worker.get_transfer_results() == ended(sent="s")


def test_whole_push_failing_at_one_rank_is_gone(unequal: Any) -> None:
    unequal.step(started=[Started("s", 2, 32)])
    for agent in ("D/0", "D/1"):
        unequal.hear(agent, order("s", 7, 8))
    unequal.nixl_wrapper.broken, unequal.handshakes = {"D/1"}, [None]
    unequal.step(computed=[Computed("s", 0, 0, ((1, 2),), True)], finished=[Finished("s", True, True)])
    assert len(unequal.nixl_wrapper.writes) == 1
    assert not any(isinstance(message, wire.Gone | wire.Landed) for message in unequal.nixl_wrapper.told())
    unequal.end_writes()
    unequal.turn()
    (why,) = {message.why for message in unequal.nixl_wrapper.told()}
    assert "could not post" in why


def test_the_last_blocks_of_a_long_prompt_in_a_window_are_written(equal: Any) -> None:
    """Block positions do not describe them: both ends keep the last ones only, of a prompt of many."""
    equal.step(started=[Started("s", 8, 256)])
    equal.hear("D/0", wire.Register("s", "r-s", NEAR, [[7, 8]], 256, valid_s=30.0))
    whole = Computed("s", 0, 0, ((1, 2),), True, whole=True)
    equal.step(earlier=[whole], finished=[Finished("s", True, True)])
    (written,) = equal.nixl_wrapper.posted
    assert [ids.tolist() for ids in written] == [[1, 2], [7, 8]]
    equal.end_writes()
    assert equal.nixl_wrapper.told() == [wire.Landed("r-s")]


@pytest.mark.parametrize("block", [-1, 100])
def test_whole_push_into_unknown_blocks_is_refused(unequal: Any, block: int) -> None:
    unequal.step(started=[Started("s", 2, 32)])
    for agent in ("D/0", "D/1"):
        unequal.hear(agent, order("s", 7, block))
    unequal.step(computed=[Computed("s", 0, 0, ((1, 2),), True)])
    assert unequal.nixl_wrapper.writes == {}
    assert f"block {block} of 100" in unequal.nixl_wrapper.told()[0].why


def test_blocks_that_vllm_cannot_pair_cost_their_own_request_only(unequal: Any) -> None:
    """It asserts that both ends name as many. The connection is whole, and others are written to over it."""
    prefill(unequal, "other")
    one, two = list(unequal.nixl_wrapper.writes)
    unequal.step(started=[Started("s", 1, 16)])
    for agent in ("D/0", "D/1"):
        unequal.hear(agent, wire.Register("s", "r-s", DECODE, [[7, 8]], 16, valid_s=30.0))
    unequal.step(computed=[Computed("s", 0, 0, ((1,),), True)], finished=[Finished("s", True, True)])
    assert list(unequal.nixl_wrapper.writes) == [one, two]
    unequal.end_writes()
    assert unequal.nixl_wrapper.removed == [] and "D" not in unequal._connecting
    told = unequal.nixl_wrapper.told()
    assert {type(message) for message in told if message.request == "r-s"} == {wire.Gone}
    assert [message for message in told if message.request == "r-other"] == [wire.Landed("r-other")] * 2


def post_to_both(unequal: Any) -> None:
    unequal.step(started=[Started("s", 2, 32)])
    for agent in ("D/0", "D/1"):
        unequal.hear(agent, order("s", 7, 8))
    unequal.step(computed=[Computed("s", 0, 0, ((1, 2),), True)], finished=[Finished("s", True, True)])


def test_writes_that_vllm_has_posted_count_when_its_plan_fails_at_a_later_rank(unequal: Any, monkeypatch: Any) -> None:
    """Blocks of decode that the first one writes are freed at the answer to its registration."""
    compute, calls = unequal._compute_desc_ids, []

    def fails_at_the_second_rank(*args: Any, **named: Any) -> Any:
        calls.append(args)
        assert len(calls) <= 2, "block counts of the second rank"  # two calls for a rank
        return compute(*args, **named)

    monkeypatch.setattr(unequal, "_compute_desc_ids", fails_at_the_second_rank)
    post_to_both(unequal)
    assert list(unequal.nixl_wrapper.writes) == [1] and len(calls) == 3
    assert unequal.nixl_wrapper.told() == [], "the first rank's WRITE is in flight"
    unequal.end_writes()
    assert {(type(it), it.failed_epoch) for it in unequal.nixl_wrapper.told()} == {(wire.Gone, 0)}
    assert not unequal._writes and not unequal._sending_transfers
    assert unequal.nixl_wrapper.removed == [], "the connection is whole"


def test_a_write_that_could_not_be_posted_whole_counts_until_nixl_lets_it_go(unequal: Any, monkeypatch: Any) -> None:
    """Parts of it may be in flight, so vLLM's plan does not release it."""
    nixl = unequal.nixl_wrapper

    def transfer(handle: int) -> str:
        if handle == 2:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return "PROC"

    monkeypatch.setattr(nixl, "transfer", transfer)
    unequal.hear("D/0", order("first", 3, 4))
    unequal.handshakes = [None]
    post_to_both(unequal)
    assert list(nixl.writes) == [1, 2] and len(unequal._writes) == 2
    nixl.told()
    nixl.writes |= {1: "DONE", 2: "ERR"}
    for _ in range(3):
        unequal.turn()
    assert not unequal._writes
    assert {(type(it), it.failed_epoch > 0) for it in nixl.told() if it.request == "r-s"} == {(wire.Gone, True)}


def test_vllms_own_completion_notice_ends_nothing(push: Any) -> None:
    """It comes even when the prefill worker gave its blocks back with the WRITE in flight."""
    worker = push.FakeWorker(0, 2)
    worker.know("P2", 2, [0])
    source = wire.Endpoint("P2", "host", 2, 2)
    worker.step(reserved=[Reserved(order("s", 7, 8), source)])
    assert len(worker.nixl_wrapper.told()) == 1
    worker.nixl_wrapper.heard["P2/0"] = [b"r-s:2"]
    worker.turn()
    assert worker._records.empty()  # not counted as a bad message
    assert not worker.get_transfer_results().finished_recving
    worker.hear("P2/0", wire.Landed("r-s"))
    assert worker.get_transfer_results() == ended(received="r-s")


def test_a_write_that_ends_after_a_preemption_does_not_count(push: Any) -> None:
    """Its blocks are given to others in the step that begins with the preemption."""
    worker = push.FakeWorker(0, 2)
    worker.know("D", 2, [0])
    decode = wire.Endpoint("D", "host", 1, 2)
    worker.step(started=[Started("s", 2, 32)])
    worker.hear("D/0", order("s", 7, 8, decode=decode))
    worker.step(computed=[Computed("s", 0, 0, ((1, 2),), True)])
    preemption = PushMetadata()
    preemption.preempted.append(Preempted("s", 1))
    get_state = worker.nixl_wrapper.check_xfer_state

    def ends_while_the_step_begins(handle: int) -> str:
        worker.handle_preemptions(preemption)  # the engine's thread, between the writer's two looks
        worker.nixl_wrapper.check_xfer_state = get_state
        return "DONE"

    worker.nixl_wrapper.check_xfer_state = ends_while_the_step_begins
    worker.turn()
    worker.turn()
    assert worker.nixl_wrapper.told() == []
    worker.step(computed=[Computed("s", 1, 0, ((3, 4),), True)])
    worker.end_writes()
    assert worker.nixl_wrapper.told() == [wire.Landed("r-s")]


def test_an_engine_that_was_met_needs_no_handshake_for_its_first_request(push: Any) -> None:
    """It has had `Hello`, so its first registration names the connection."""
    worker, near, here = push.FakeWorker(0, 1), wire.Endpoint("D", "host", 1, 1), wire.Endpoint("P", "host", 2, 1)
    worker.handshakes = [None]
    worker.step(met=[Met(near, here)])
    worker.turn()
    assert worker.handshakes == [] and "D" in worker._remote_agents
    assert worker.nixl_wrapper.told() == [wire.Meet(here)]
    first = msgspec.structs.replace(order("s", 7, 8, decode=near), epoch=1)  # as `Hello` said
    again = [Met(near, here)]
    worker.step(met=again, started=[Started("s", 2, 32)], computed=[Computed("s", 0, 0, ((1, 2),), True)])
    worker.hear("D/0", first)
    assert len(worker.nixl_wrapper.posted) == 1 and worker.nixl_wrapper.told() == []


def test_an_engine_that_is_told_of_another_connects_with_it(push: Any) -> None:
    """As decode is of a worker that is prefill since a moment: of changed roles only that worker itself knows."""
    worker = push.FakeWorker(0, 1)
    worker.handshakes = [None]
    worker.hear("D/0", wire.Meet(NEAR), wire.Meet(NEAR))
    worker.turn()
    assert worker.handshakes == [] and "D" in worker._remote_agents
    prefill(worker, "s", NEAR)
    assert len(worker.nixl_wrapper.posted) == 1
    assert worker.nixl_wrapper.told() == [], "the answer to a meeting is the connection"


def test_decode_looks_less_often_the_longer_it_waits(push: Any, monkeypatch: Any) -> None:
    """Each look costs CPU time of the model; one that comes 1% of the wait late does not matter."""
    worker, source = push.FakeWorker(0, 1), wire.Endpoint("P2", "host", 1, 1)
    worker.know("P2", 1, [0])
    worker.step(reserved=[Reserved(order("old", 7), source)])
    began = worker._inbound.registered_at

    def looks_at(later_s: float) -> float:
        with monkeypatch.context() as context:
            context.setattr("connectors.push.worker.time.monotonic", lambda: began + later_s)
            return float(worker._poll_s())

    assert [looks_at(later_s) for later_s in (0.0, 0.2, 0.4, 60.0)] == pytest.approx([0.001, 0.001, 0.002, 0.004])
    worker.step(reserved=[Reserved(order("new", 8), source)])
    assert worker._poll_s() < 0.002


def test_however_many_ask_to_meet_a_transfer_connects_beyond_the_bound(push: Any) -> None:
    from connectors.push.connections import MEET_MOST

    worker = push.FakeWorker(0, 1)
    worker.handshakes = [None] * (MEET_MOST + 1)
    strangers = [wire.Endpoint(f"S{number}", "host", 1, 1) for number in range(2 * MEET_MOST)]
    worker.hear("S0/0", *(wire.Meet(peer) for peer in strangers))
    assert len(worker.handshakes) == 1 and len(worker._endpoints) == MEET_MOST
    worker.step(reserved=[Reserved(order("s", 7, 8), strangers[-1])])
    assert worker.handshakes == [] and strangers[-1].engine_id in worker._endpoints


def test_a_write_is_looked_after_each_millisecond_also_while_prefill_computes(push: Any) -> None:
    """Without a progress thread NIXL moves on only when it is asked."""
    worker = push.FakeWorker(0, 1)
    worker.know("D", 1, [0])
    near = wire.Endpoint("D", "host", 1, 1)
    worker.step(started=[Started("s", 2, 32)])
    worker.hear("D/0", order("s", 7, 8, decode=near))
    assert worker._poll_s() == 0.004
    worker.step(computed=[Computed("s", 0, 0, ((1,),), False)])
    assert worker._poll_s() == 0.001 and not worker._outbound.awaits_writes
    worker.end_writes()
    assert worker._poll_s() == 0.004
    worker.step(dead_engines=["D"])
    worker.step(computed=[Computed("s", 0, 1, ((2,),), True)])
    worker.step(finished=[Finished("s", True, True)])
    assert worker._poll_s() == 0.004, "for a moment more: a connection was made"
    worker._connected_at = 0.0
    assert worker._poll_s() == 0.25


@pytest.fixture
def equal(push: Any) -> Any:
    """Rank 0 of 1, connected with D of one rank."""
    worker = push.FakeWorker(0, 1)
    worker.handshakes = [None]
    worker.hear("D/0", order("first", 7, 8, decode=NEAR))
    worker.turn()
    return worker


NEAR = wire.Endpoint("D", "host", 1, 1)


def test_after_a_write_failed_on_a_cut_link_the_next_request_is_transferred(equal: Any) -> None:
    nixl = equal.nixl_wrapper
    nixl.broken, equal.handshakes = {"D/0"}, [None]
    prefill(equal, "first", NEAR)
    assert nixl.removed == ["D/0"]
    equal.turn()
    assert {type(message) for message in nixl.told()} == {wire.Gone}
    prefill(equal, "second", NEAR)
    equal.end_writes()
    assert nixl.told() == [wire.Landed("r-second")]


def test_what_is_said_over_a_new_connection_leaves_at_once_though_nothing_else_is_done(push: Any) -> None:
    """UCX sends it when both ends have looked a few times, and a lost connection is dropped by a turn of the thread."""
    worker = push.FakeWorker(0, 1)
    worker.handshakes = [None]
    worker.step(met=[Met(NEAR, wire.Endpoint("P", "host", 2, 1))])
    worker.turn()
    assert not worker._outbound.busy and worker._poll_s() == 0.004
    worker._connected_at = 0.0
    assert worker._poll_s() == 0.25
    worker._lose("D", "its kernel says so")
    assert worker._poll_s() == 0.004


def test_nothing_is_written_over_a_connection_that_decode_has_cut(equal: Any) -> None:
    nixl = equal.nixl_wrapper
    equal.step(started=[Started("s", 2, 32)], computed=[Computed("s", 0, 0, ((1, 2),), True)])
    nixl.told()
    equal.handshakes = [None]
    equal.hear("D/0", msgspec.structs.replace(order("s", 7, 8, decode=NEAR), epoch=1, cut=1))
    assert nixl.posted == [] and nixl.removed == ["D/0"], "it is dropped"
    equal.turn()
    assert len(nixl.posted) == 1, "over the new one"
    equal.end_writes()
    assert nixl.told() == [wire.Landed("r-s")]


def test_a_link_that_was_cut_is_noticed_without_any_further_registration(waiting: Any, monkeypatch: Any) -> None:
    """The message that broke it had left already."""
    worker, nixl, began = waiting, waiting.nixl_wrapper, time.monotonic()
    nixl.broken, worker.handshakes = {"P2/0"}, [None]
    worker._inbound._waiting["r-s"].resend_at = began + 60.0
    for passed_s in (1.0, 2.0):
        monkeypatch.setattr(time, "monotonic", lambda passed_s=passed_s: began + passed_s)
        worker.turn()
    worker.turn()
    assert nixl.removed == ["P2/0"]
    assert [message.stream for message in nixl.told() if isinstance(message, wire.Register)] == ["s"]


def test_registration_during_stop_may_be_expired(equal: Any, monkeypatch: Any) -> None:
    """Decode frees its blocks when a registration has run out unanswered: nothing may be written into them then."""
    equal.step(started=[Started("s", 2, 32)], computed=[Computed("s", 0, 0, ((1, 2),), True)])
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    equal.hear("D/0", order("s", 7, 8, decode=NEAR))
    assert not equal.nixl_wrapper.writes
    assert wire.Gone("r-s", "decode has given up by now") in equal.nixl_wrapper.told()
    equal.step(started=[Started("t", 2, 32)], computed=[Computed("t", 0, 0, ((1, 2),), True)])
    equal.hear("D/0", order("t", 7, 8, decode=NEAR))
    assert equal.nixl_wrapper.writes


def test_agents_stay_until_no_write_uses_them(equal: Any) -> None:
    nixl = equal.nixl_wrapper
    equal.handshakes = [None]
    prefill(equal, "first", NEAR)
    prefill(equal, "second", NEAR)
    first, second = nixl.writes
    nixl.writes[first] = "ERR"
    for _ in range(5):
        equal.turn()
    assert nixl.removed == []
    nixl.writes[second] = "DONE"
    for _ in range(3):
        equal.turn()
    assert nixl.removed == ["D/0"]
    assert {type(message) for message in nixl.told()} == {wire.Gone, wire.Landed}


def test_a_failed_write_that_nixl_keeps_is_told_of_once(equal: Any, caplog: Any, monkeypatch: Any) -> None:
    """It may still be in flight, so its state is asked for in each of the thread's turns, hundreds a second."""
    import logging

    caplog.set_level(logging.INFO, "vllm.pd.push")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    nixl, asked = equal.nixl_wrapper, []

    def refuse(handle: int) -> None:
        asked.append(handle)
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    prefill(equal, "s", NEAR)
    monkeypatch.setattr(nixl, "check_xfer_state", refuse)
    monkeypatch.setattr(nixl, "release_xfer_handle", refuse)
    for _ in range(20):
        equal.turn()
    assert len(asked) > 20 and nixl.removed == []
    # A set: where vLLM's logger has the handler too, a record comes twice.
    assert len({record for record in caplog.records if record.levelno >= logging.WARNING}) == 1
    monkeypatch.undo()
    equal.handshakes = [None]
    equal.end_writes("ERR")
    equal.turn()
    assert nixl.removed == ["D/0"] and equal._failed == set()


SOURCE = wire.Endpoint("P2", "host", 2, 1)


@pytest.fixture
def waiting(push: Any) -> Any:
    """Rank 0 of 1, connected with SOURCE, from which it waits for s."""
    worker = push.FakeWorker(0, 1)
    worker.handshakes = [None]
    worker.step(reserved=[Reserved(order("s", 7, 8), SOURCE)])
    worker.turn()
    worker.nixl_wrapper.told()
    return worker


def test_a_registration_that_never_left_goes_out_on_the_new_link(waiting: Any) -> None:
    worker = waiting
    worker.nixl_wrapper.broken, worker.handshakes = {"P2/0"}, [None]
    worker.step(reserved=[Reserved(order("t", 9, 10), SOURCE)])
    worker.turn()
    # Both: an answer to the first may be lost.
    assert [message.stream for message in worker.nixl_wrapper.told()] == ["s", "t"]


def test_kv_that_has_arrived_counts_though_its_sender_is_disconnected_before_the_engine_looks(waiting: Any) -> None:
    """An engine looks at the end of its step. Meanwhile another request found the link cut, or the sender dead."""
    worker = waiting
    worker.hear("P2/0", wire.Landed("r-s"))
    worker.nixl_wrapper.broken, worker.handshakes = {"P2/0"}, [zmq.Again()]
    worker.step(reserved=[Reserved(order("t", 9, 10), SOURCE)])
    worker.turn()
    assert worker.nixl_wrapper.removed == ["P2/0"], "the registration that never left fails with its peer"
    results = worker.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"r-s", "r-t"}, {"r-t"})


def test_a_rank_reports_what_it_has_given_up_and_how_many_blocks_wait_for_a_silent_peer(push: Any) -> None:
    worker = push.FakeWorker(0, 2)
    worker.handshakes = [zmq.Again(), None]
    peer = wire.Endpoint("P2", "host", 2, 2)
    worker.step(reserved=[Reserved(order("s", 7, 8), peer)])
    worker.get_transfer_results()
    assert worker.reports.take() == RankReport(unreceived=frozenset({"r-s"}))
    assert worker.reports.take() is None

    worker.step(reserved=[Reserved(order("t", 7, 8, 9), peer)])
    worker.step(withdrawn={"r-t": "aborted"})
    assert [worker.reports.take() for _ in range(2)] == [RankReport(withdrawing_blocks=3)] * 2
    worker.hear("P2/0", wire.Gone("r-t", "withdrawn by decode"))
    worker.get_transfer_results()
    assert worker.reports.take() == RankReport(unreceived=frozenset({"r-t"})), "none wait any more"
    assert worker.reports.take() is None

    worker.step(started=[Started("u", 2, 32)])
    worker.hear("P2/0", order("u", 7, 8, decode=peer))
    worker.hear("P2/0", wire.Unregister("u", "r-u", peer))
    assert worker.reports.take() == RankReport(unpushed=frozenset({"u"}))


def test_what_could_not_be_said_to_an_engine_that_is_gone_ends_no_later_handshake(waiting: Any) -> None:
    """vLLM forgets engines that it has not used for an hour, before it connects with another one."""
    worker = waiting
    worker.nixl_wrapper.broken, worker.handshakes = {"P2/0"}, [zmq.Again()]
    worker._lose("P2", "its kernel says so")
    worker.turn()
    assert "P2" not in worker._remote_agents
    worker.step(withdrawn={"r-s": "aborted"})
    worker.hear("P2/0", wire.Gone("r-s", "withdrawn by decode"))
    assert worker.get_transfer_results() == ended(failed="r-s")
    worker._engine_ttl = 3600.0
    worker._engine_last_active = dict.fromkeys(worker._engine_last_active, -7200.0)
    worker.nixl_wrapper.told()
    worker.handshakes = [None]
    worker.step(reserved=[Reserved(order("t", 7, 8), wire.Endpoint("P3", "host", 3, 1))])
    worker.turn()
    assert [message.stream for message in worker.nixl_wrapper.told()] == ["t"]


def test_a_lost_engine_that_was_not_used_for_an_hour_is_connected_anew(equal: Any) -> None:
    equal.hear("D/0", wire.Unregister("first", "r-first", NEAR))
    assert not equal._engines_with_inflight_transfers()
    equal._engine_ttl = 3600.0
    equal._engine_last_active["D"] -= 7200.0
    equal._lose("D", "its kernel says so")
    equal.handshakes = [None, None]
    equal.step(met=[Met(wire.Endpoint("P2", "host", 2, 1), None)])
    equal.turn()
    assert equal.handshakes == [] and set(equal._remote_agents) == {"D", "P2"}


def test_a_handshake_that_raises_is_tried_again(push: Any) -> None:
    worker = push.FakeWorker(0, 1)
    source = wire.Endpoint("P2", "host", 2, 1)
    worker.handshakes = []  # it will raise
    worker.step(reserved=[Reserved(order("s", 7, 8), source)])
    assert worker.get_transfer_results() == ended(failed="r-s")
    worker.handshakes = [None]
    worker.step(reserved=[Reserved(order("t", 7, 8), source)])
    worker.turn()
    assert [message.stream for message in worker.nixl_wrapper.told()] == ["t"]


def test_no_handshake_waits_behind_those_with_a_rack_that_has_died(push: Any) -> None:
    """Their kernels accept connections, or drop packets; none answers within vLLM's five seconds."""
    from connectors import handshake

    pool = push.FakeWorker(0, 1)._handshake_initiation_executor
    answers, ready, stop = {(0, 0): b"known"}, threading.Event(), threading.Event()

    def ask(port: int) -> bytes:
        """As vLLM does."""
        with handshake._opened(zmq.REQ, f"tcp://127.0.0.1:{port}") as asking:
            asking.setsockopt(zmq.RCVTIMEO, 5000)
            asking.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            return bytes(asking.recv_multipart()[0])

    with socket.create_server(("127.0.0.1", 0), backlog=128) as dead, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        serving = threading.Thread(target=handshake.listen, args=(answers, ready, stop, "127.0.0.1", port))
        serving.start()
        try:
            assert ready.wait(DEADLINE_S)
            waiting = [pool.submit(ask, dead.getsockname()[1]) for _ in range(64)]
            deadline = time.monotonic() + DEADLINE_S
            while handshake._slots._value < 8 or pool._work_queue.qsize():
                assert time.monotonic() < deadline, "those with the dead, which wait, hold up nobody"
                time.sleep(0.01)
            assert pool.submit(ask, port).result(DEADLINE_S) == b"known"
        finally:
            stop.set()
            serving.join()
            for future in waiting:  # or its thread waits on
                with contextlib.suppress(zmq.ZMQError):
                    future.result()
            pool.shutdown()


class NotedLock:
    """`wanted` once another thread than its maker's wants it."""

    def __init__(self) -> None:
        self._lock, self._maker, self.wanted = threading.RLock(), threading.get_ident(), threading.Event()

    def __enter__(self) -> None:
        if threading.get_ident() != self._maker:
            self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_a_handshake_that_ends_at_once_has_ended_for_vllm_before_anybody_hears_of_it(
    push: Any, monkeypatch: Any
) -> None:
    """vLLM's callback notes the agents, and forgets the attempt: without that, decode would register with nobody, and
    the next attempt would get the old answer."""
    worker, vllms, heard = push.FakeWorker(0, 1), push.NixlPushConnectorWorker, queue.SimpleQueue[bool]()
    worker._handshake_lock = lock = NotedLock()
    begun = threading.Event()

    def begin(*args: Any, **named: Any) -> Any:
        lock.__enter__()  # vLLM's callback waits for it
        future = vllms._ensure_handshake(worker, *args, **named)
        begun.set()
        assert lock.wanted.wait(DEADLINE_S)
        return future

    def fail(*args: Any) -> Any:
        assert begun.wait(DEADLINE_S)
        raise RuntimeError("no answer")

    monkeypatch.setattr(vllms, "_nixl_handshake", fail)
    monkeypatch.setattr(worker, "_ensure_handshake", begin)
    monkeypatch.setattr(worker, "_handshake_done", lambda *args: heard.put("P2" in worker._handshake_futures))
    worker.step(reserved=[Reserved(order("s", 7, 8), wire.Endpoint("P2", "host", 2, 1))])
    lock.__exit__()
    assert not heard.get(timeout=DEADLINE_S)


def test_an_engine_that_was_taken_for_one_of_another_layout_is_tried_again(push: Any, monkeypatch: Any) -> None:
    """It may have been a passing error. The connection for messages does not break by itself."""
    worker = push.FakeWorker(0, 1)
    worker.handshakes = [RuntimeError("odd"), None]
    for stream in ("first", "soon"):
        prefill(worker, stream, NEAR)
        assert isinstance(worker.nixl_wrapper.told()[-1], wire.Gone)
    monkeypatch.setattr("connectors.push.records._UNWRITABLE_S", 0.0)
    worker.handshakes = [None]
    prefill(worker, "late", NEAR)
    worker.turn()
    assert worker.handshakes == [] and not worker._unwritable
    worker.nixl_wrapper.told()
    prefill(worker, "last", NEAR)
    worker.end_writes()
    assert worker.nixl_wrapper.told()[-1] == wire.Landed("r-last")


@pytest.mark.parametrize("second", [zmq.Again(), None])
def test_engine_is_written_to_after_temporary_handshake_failure(push: Any, second: Exception | None) -> None:
    """First an error that looks like another memory layout, then silence or messages only, then a good one."""
    worker = push.FakeWorker(0, 1)
    worker.handshakes = [RuntimeError("layout"), second]
    prefill(worker, "first", NEAR)
    worker.turn()
    if second is None:  # it is connected for messages; the link is cut before it is connected for all
        worker.nixl_wrapper.broken, worker.handshakes = {"D/0"}, [None]
        prefill(worker, "between", NEAR)
        worker.turn()
    else:
        worker.handshakes = [None]
    worker.nixl_wrapper.told()
    prefill(worker, "last", NEAR)
    worker.turn()
    worker.end_writes()
    assert worker.nixl_wrapper.told()[-1] == wire.Landed("r-last")


class LateChecksum:
    """Its copies from the device come when the test says so."""

    ready = False
    value = 7
    of: list[list[list[int]]] = []

    def __init__(self, worker: Any, blocks: list[list[int]]) -> None:
        LateChecksum.of.append(blocks)


@pytest.fixture
def late(push: Any, monkeypatch: pytest.MonkeyPatch) -> type[LateChecksum]:
    from connectors.push.blocks import verify

    monkeypatch.setattr(verify, "Checksum", LateChecksum)
    monkeypatch.setattr(LateChecksum, "ready", False)
    monkeypatch.setattr(LateChecksum, "of", [])
    return LateChecksum


def test_blocks_are_kept_and_landed_is_told_when_their_checksum_is_known(equal: Any, late: Any) -> None:
    from connectors.push.blocks.verify import Shipments

    equal._shipments = Shipments()
    prefill(equal, "s", NEAR)
    equal.end_writes()
    equal.hear("D/0", order("s", 7, 8, decode=NEAR))  # again: decode hears nothing
    assert late.of == [[[1, 2]]]
    assert equal.nixl_wrapper.told() == [] and equal.get_transfer_results() == ended()
    other = [Started("t", 2, 32)]
    equal.step(started=other)  # the writer is not held up
    assert "t" in equal._outbound._streams
    late.ready = True
    equal.turn()
    assert equal.nixl_wrapper.told() == [wire.Landed("r-s", 7)] and equal.get_transfer_results() == ended(sent="s")


def test_blocks_of_a_prefill_that_ends_while_their_checksum_is_computed_are_kept(equal: Any, late: Any) -> None:
    """Its KV has landed before the engine has heard of its last token."""
    from connectors.push.blocks.verify import Shipments

    equal._shipments = Shipments()
    equal.step(started=[Started("s", 2, 32)])
    equal.hear("D/0", order("s", 7, 8, decode=NEAR))
    equal.step(computed=[Computed("s", 0, 0, ((1, 2),), True)])
    equal.end_writes()
    assert late.of == [[[1, 2]]]
    equal.step(finished=[Finished("s", True, True)])
    assert equal.get_transfer_results() == ended(), "other requests would get the blocks that are being copied"
    late.ready = True
    equal.turn()
    assert equal.nixl_wrapper.told() == [wire.Landed("r-s", 7)] and equal.get_transfer_results() == ended(sent="s")


def test_where_no_checksum_can_be_made_decode_hears_it_unsigned(equal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU's host has no more memory for copies."""
    from connectors.push.blocks import verify

    def without_memory(worker: Any, blocks: list[list[int]]) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(verify, "Checksum", without_memory)
    equal._shipments = verify.Shipments()
    prefill(equal, "s", NEAR)
    equal.end_writes()
    assert equal.get_transfer_results() == ended(sent="s")
    equal.hear("D/0", order("s", 7, 8, decode=NEAR))  # again, without an answer
    assert equal.nixl_wrapper.told() == [wire.Landed("r-s", None)]


@pytest.mark.parametrize("digest", [7, 8])
def test_decode_begins_when_the_checksum_of_what_came_is_known(push: Any, late: Any, digest: int) -> None:
    worker = push.FakeWorker(0, 1)
    worker.know("P2", 1, [0])
    worker.step(reserved=[Reserved(order("s", 8, 7), wire.Endpoint("P2", "host", 2, 1))])
    worker.hear("P2/0", wire.Landed("r-s", digest))
    assert late.of == [[[7, 8]]]
    assert worker.get_transfer_results() == ended()
    late.ready = True
    worker.turn()
    assert worker.get_transfer_results() == (ended(received="r-s") if digest == 7 else ended(failed="r-s"))


def test_checksum_of_freed_blocks_is_ignored(push: Any, late: Any) -> None:
    worker = push.FakeWorker(0, 1)
    worker.know("P2", 1, [0])
    worker.step(reserved=[Reserved(order("s", 7, 8), wire.Endpoint("P2", "host", 2, 1))])
    worker.hear("P2/0", wire.Landed("r-s", 8))
    worker.step(withdrawn={"r-s": "aborted"})
    worker.hear("P2/0", wire.Gone("r-s", "withdrawn by decode"))
    late.ready = True
    worker.turn()
    assert worker._records.qsize() == 1  # of the failed receipt
    assert worker.get_transfer_results() == ended(failed="r-s")


def test_a_checksum_that_raises_costs_no_other_request_its_end(equal: Any, late: Any) -> None:
    known: list[int] = []
    equal._check([[1]], lambda value: 1 // 0)
    equal._check([[2]], known.append)
    late.ready = True
    equal.turn()
    equal.turn()
    assert known == [7] and not equal._checks


def test_gpu_checksum_equals_cpu_checksum(push: Any, monkeypatch: Any) -> None:
    """With `torch.cuda` replaced: the copies run on a stream of their own, and its event says when they are done."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from connectors.push.blocks import verify

    memory = torch.arange(2 * 10 * 64, dtype=torch.uint8).view(2, 10, 64)  # two layers, ten kernel blocks of 64 bytes
    worker = SimpleNamespace(
        device_type="cpu", device_id=0, engine_id="P", tp_rank=0, _physical_blocks_per_logical_kv_block=2,
        region_names=["a", "b"], region_group_ids=[0, 1], block_stride_per_layer=[64, 64],
        block_len_per_layer=[64, 64], device_kv_caches={"a": memory[0], "b": memory[1]},
        kv_caches_base_addr={"P": {0: [memory[0].data_ptr(), memory[1].data_ptr()]}},
        _group_spec_types=(FullAttentionSpec, MambaSpec), _mamba_ssm_size=(40, 60),
    )  # fmt: skip
    blocks = [[1, 3], [2]]
    content = b"".join(memory[0, block].numpy().tobytes() for block in (2, 3, 6, 7))
    content += memory[1, 4:6].flatten()[:100].numpy().tobytes()  # a recurrent state, and no padding
    on_cpu = verify.Checksum(worker, blocks)
    assert on_cpu.ready and on_cpu.value == zlib.crc32(content)

    happened = threading.Event()
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=happened.is_set))
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    worker.device_type = "cuda"
    on_gpu = verify.Checksum(worker, blocks)
    assert not on_gpu.ready
    happened.set()
    assert on_gpu.ready and on_gpu.value == on_cpu.value
