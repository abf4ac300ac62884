"""Control calls to workers whose connections break: what is sent to them, when, and when a call counts as done."""

import asyncio
from typing import Any

import pytest
from support_info import connects, worker_info

from orchestrator.fleet.control_calls import ControlCalls, Unanswered
from orchestrator.fleet.view import Fleet
from orchestrator.types import Role
from orchestrator.wire.messages import Call, CallReply
from orchestrator.wire.sockets import Sent


class Wire:
    """In place of a FrontendTransport, with its fleet. `a` answers at once; `b` says nothing by itself."""

    def __init__(self) -> None:
        self.fleet = Fleet("f")
        self.calls = ControlCalls(self.fleet, self)
        self.sent: list[str] = []  # to whom
        self.unreachable: set[str] = set()
        for worker_id in ("a", "b"):
            connects(self.fleet, worker_info(worker_id, Role.DECODE))

    def send(self, worker_id: str, call: Call) -> Sent:
        if worker_id in self.unreachable:
            return Sent.UNREACHABLE
        self.sent.append(worker_id)
        if worker_id == "a":
            self.answers("a", call.call_id)
        return Sent.YES

    def answers(self, worker_id: str, call_id: int = 1, **answer: Any) -> None:
        self.calls.on_reply(worker_id, CallReply(call_id, **(answer or {"result": True})))

    def breaks(self) -> None:
        self.unreachable.add("b")
        self.fleet.workers["b"].disconnect(0.0)

    def is_reached(self) -> None:
        self.unreachable.discard("b")
        view = self.fleet.workers["b"]
        view.disconnected_at = None
        view.note_connected(True)
        self.calls.answers_lost("b")

    def is_lost(self) -> None:
        self.fleet.remove("b")
        self.calls.worker_lost("b")

    def ask(self, method: str, timeout_s: float = 60.0) -> asyncio.Task[Any]:
        return asyncio.create_task(self.calls.call(method, [], timeout_s=timeout_s))


async def settled() -> None:
    """Every task has done what it can do."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.mark.parametrize("method", ["reset_prefix_cache", "pin_lora", "set_weight_version", "set_pause"])
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard yet"])
async def test_a_worker_whose_connection_is_broken_is_asked_once_it_is_made_again(wire: Wire, method: str, heard: bool):
    """`heard`: the view knows that it is broken; else the sockets alone do."""
    wire.unreachable.add("b")
    if heard:
        wire.breaks()
    calling = wire.ask(method)
    await settled()
    assert wire.sent == ["a"] and not calling.done()
    wire.is_reached()
    await settled()
    assert wire.sent == ["a", "b"] and not calling.done()
    wire.answers("b")
    await calling


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard yet"])
async def test_a_worker_whose_connection_stays_broken_has_done_nothing(wire: Wire, heard: bool):
    """Nobody makes up for a reset of its cache. That of a pause its successor does."""
    wire.unreachable.add("b")
    if heard:
        wire.breaks()
    reset, paused = wire.ask("reset_prefix_cache"), wire.ask("set_pause")
    await settled()
    assert not reset.done() and not paused.done()
    wire.is_lost()
    with pytest.raises(Unanswered, match="reset_prefix_cache: worker b: it is gone"):
        await reset
    await paused


async def test_a_worker_that_is_neither_reached_nor_lost_is_waited_for_as_long_as_for_an_answer(wire: Wire):
    wire.breaks()
    with pytest.raises(Unanswered, match=r"worker b: no answer within 0\.1 s"):
        await wire.ask("set_pause", 0.1)


async def test_a_call_is_sent_once_more_and_the_first_answer_counts(wire: Wire):
    calling = wire.ask("list_loras")
    await settled()
    wire.breaks()
    wire.is_reached()
    wire.answers("b", result=[1])  # on the new connection, to what was sent on the one before
    await settled()
    assert wire.sent == ["a", "b", "b"]
    wire.answers("b", error="too late")
    assert calling.done()


async def test_a_connection_that_breaks_time_and_again_ends_a_call(wire: Wire):
    calling = wire.ask("set_pause")
    for _ in range(2):
        await settled()
        wire.breaks()
        wire.is_reached()
    with pytest.raises(Unanswered, match="worker b: its answer may be lost"):
        await calling
    assert wire.sent == ["a", "b", "b"]


async def test_one_worker_is_asked_that_is_connected(wire: Wire):
    wire.fleet.workers["a"].disconnect(0.0)
    calling = wire.ask("get_weight_version")
    await settled()
    assert wire.sent == ["b"]
    wire.answers("b", result="7")
    assert await calling == "7"
