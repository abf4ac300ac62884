"""The worker half on a fake NIXL: ranks that differ, WRITEs and messages that fail, links that are cut."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from connectors.push import wire
from connectors.push.metadata import Computed, Finished, Preempted, PushMetadata, Reserved, Started

pytestmark = pytest.mark.vllm

DECODE = wire.Endpoint("D", "host", 1, 4)


@pytest.fixture
def push() -> Any:
    return pytest.importorskip("support_push")  # imports vLLM, which takes seconds


def order(stream: str, *blocks: int, decode: wire.Endpoint = DECODE) -> wire.Register:
    return wire.Register(stream, f"r-{stream}", decode, [list(blocks)], 32, valid_s=30.0)


def prefill(worker: Any, stream: str, decode: wire.Endpoint = DECODE) -> None:
    """Prefill `stream` of two blocks in one step, for the first rank of `decode`."""
    worker.step(started=[Started(stream, 2, 32)])
    worker.hear(f"{decode.engine_id}/0", order(stream, 7, 8, decode=decode))
    worker.step(computed=[Computed(stream, 0, 0, ((1, 2),), True)], finished=[Finished(stream, True, True)])
    worker.step()


@pytest.fixture
def unequal(push: Any) -> Any:
    """Rank 0 of 2. Decode has 4: this rank writes to two of them."""
    worker = push.FakeWorker(0, 2)
    worker.know("D", 4, [0, 1])
    return worker


def test_a_whole_push_is_told_as_landed_when_it_is_on_every_rank(unequal: Any) -> None:
    prefill(unequal, "s")
    first, second = unequal.nixl_wrapper.writes
    unequal.nixl_wrapper.writes[first] = "DONE"
    unequal.turn()
    assert unequal.nixl_wrapper.told() == []
    unequal.end_writes()
    assert unequal.nixl_wrapper.told() == [wire.Landed("r-s")] * 2
    assert unequal._get_new_notifs() == {"s"}


def test_a_whole_push_that_fails_at_one_rank_is_gone_once_its_other_writes_are_over(unequal: Any) -> None:
    unequal.nixl_wrapper.broken, unequal.handshakes = {"D/1"}, [None]
    prefill(unequal, "s")
    assert len(unequal.nixl_wrapper.writes) == 1
    assert not any(isinstance(message, wire.Gone | wire.Landed) for message in unequal.nixl_wrapper.told())
    unequal.end_writes()
    unequal.turn()
    (why,) = {message.why for message in unequal.nixl_wrapper.told()}
    assert "could not post" in why


@pytest.mark.parametrize("block", [-1, 100])
def test_a_whole_push_into_blocks_that_decode_has_not_is_refused(unequal: Any, block: int) -> None:
    unequal.step(started=[Started("s", 2, 32)])
    unequal.hear("D/0", order("s", 7, block))
    unequal.step(computed=[Computed("s", 0, 0, ((1, 2),), True)])
    assert unequal.nixl_wrapper.writes == {}
    assert f"block {block} of 100" in unequal.nixl_wrapper.told()[0].why


def test_vllms_own_completion_notice_ends_nothing(push: Any) -> None:
    """It comes even when the prefill worker gave its blocks back with the WRITE in flight."""
    worker = push.FakeWorker(0, 2)
    worker.know("P2", 2, [0])
    source = wire.Endpoint("P2", "host", 2, 2)
    worker.step(reserved=[Reserved(order("s", 7, 8), source)])
    assert len(worker.nixl_wrapper.told()) == 1
    worker.nixl_wrapper.heard["P2/0"] = [b"r-s:2"]
    worker.turn()
    worker._get_new_notifs()
    assert worker._recving_transfers == {} and worker._failed_recv_reqs.empty()
    assert worker._records.empty()  # not counted as a bad message
    worker.hear("P2/0", wire.Landed("r-s"))
    worker._get_new_notifs()
    assert worker._recving_transfers == {"r-s": []}


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
    assert [type(message) for message in nixl.told()] == [wire.Gone]
    prefill(equal, "second", NEAR)
    equal.end_writes()
    assert nixl.told() == [wire.Landed("r-second")]


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


def test_a_registration_that_never_left_goes_out_on_the_new_link(push: Any) -> None:
    worker = push.FakeWorker(0, 1)
    source = wire.Endpoint("P2", "host", 2, 1)
    worker.handshakes = [None]
    worker.step(reserved=[Reserved(order("s", 7, 8), source)])
    worker.turn()
    worker.nixl_wrapper.told()
    worker.nixl_wrapper.broken, worker.handshakes = {"P2/0"}, [None]
    worker.step(reserved=[Reserved(order("t", 9, 10), source)])
    worker.turn()
    # Both: an answer to the first may be lost.
    assert [message.stream for message in worker.nixl_wrapper.told()] == ["s", "t"]


def test_a_registration_that_never_left_fails_with_its_peer(push: Any) -> None:
    worker = push.FakeWorker(0, 1)
    source = wire.Endpoint("P2", "host", 2, 1)
    worker.handshakes = [None]
    worker.step(reserved=[Reserved(order("s", 7, 8), source)])
    worker.hear("P2/0", wire.Landed("r-s"))
    worker.nixl_wrapper.broken, worker.handshakes = {"P2/0"}, [zmq.Again()]
    worker.step(reserved=[Reserved(order("t", 7, 8), source)])
    worker.turn()
    worker._get_new_notifs()
    assert worker._failed_recv_reqs.get_nowait() == "r-t"


def test_a_handshake_that_raises_is_tried_again(push: Any) -> None:
    worker = push.FakeWorker(0, 1)
    source = wire.Endpoint("P2", "host", 2, 1)
    worker.handshakes = []  # it will raise
    worker.step(reserved=[Reserved(order("s", 7, 8), source)])
    worker._get_new_notifs()
    assert worker._failed_recv_reqs.get_nowait() == "r-s"
    worker.handshakes = [None]
    worker.step(reserved=[Reserved(order("t", 7, 8), source)])
    worker.turn()
    assert [message.stream for message in worker.nixl_wrapper.told()] == ["t"]


@pytest.mark.parametrize("second", [zmq.Again(), None])
def test_an_engine_is_written_to_after_a_handshake_that_failed_for_a_passing_reason(
    push: Any, second: Exception | None
) -> None:
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
    assert worker.nixl_wrapper.told() == [wire.Landed("r-last")]
