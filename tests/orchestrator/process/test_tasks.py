"""Whoever waits for the first of several gets it, and nothing of the others is left."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest
from support_wait import DEADLINE_S

from orchestrator.process.tasks import MOST_SAID, SAID_FOR_S, Turns, cancelled, first_of, in_thread


async def never() -> None:
    await asyncio.Event().wait()


async def test_the_first_that_ends_is_told_and_the_others_have_ended_with_the_context():
    before = asyncio.all_tasks()
    async with first_of(asyncio.sleep(0, "done"), never(), never()) as work:
        assert work.result() == "done"
        assert len(asyncio.all_tasks() - before) == 2
    assert asyncio.all_tasks() == before
    with pytest.raises(ValueError, match="of the context"):
        async with first_of(never(), asyncio.sleep(0)) as work:
            assert not work.done()
            raise ValueError("of the context")
    assert work.cancelled() and asyncio.all_tasks() == before


async def test_when_the_time_is_over_nothing_has_ended_and_what_is_shielded_goes_on():
    other = asyncio.create_task(never())
    async with first_of(never(), asyncio.shield(other), within_s=0.01) as work:
        assert not work.done()
    assert work.cancelled() and not other.done()
    await cancelled(other, None)
    assert other.cancelled()


async def test_tasks_that_are_cancelled_have_ended_whatever_they_raise():
    async def stubborn() -> None:
        try:
            await never()
        finally:
            raise ValueError("at its end")

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await cancelled(task)
    assert isinstance(task.exception(), ValueError)


async def test_what_a_call_in_a_thread_returns_once_nobody_waits_is_given_back():
    goes_on, unwanted = threading.Event(), asyncio.Queue[str]()

    def call() -> str:
        assert goes_on.wait(DEADLINE_S)
        return "made"

    asking = asyncio.create_task(in_thread(call, unwanted=unwanted.put_nowait))
    await asyncio.sleep(0)
    await cancelled(asking)
    goes_on.set()
    assert await unwanted.get() == "made"
    assert await in_thread(lambda: 1, unwanted=unwanted.put_nowait) == 1 and unwanted.empty()


def test_a_loop_goes_on_and_says_what_its_turns_meet_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("orchestrator.process.tasks.time", SimpleNamespace(monotonic=lambda: clock.now))
    turns = Turns(logging.getLogger("pd.launcher"), "a thing")

    def said(*errors: Exception | None) -> list[str]:
        caplog.clear()
        for error in errors:
            with turns.turn():
                if error is not None:
                    raise error
        assert set(caplog.messages) <= {"a thing: failed, and is tried again"}
        return [repr(record.exc_info[1]) for record in caplog.records if record.exc_info]

    full, other = OSError("full"), KeyError("x")
    assert said(full, full, other, None, other, full) == [repr(full), repr(other)]
    clock.now += SAID_FOR_S / 2
    assert said(*[full, other] * 100) == []
    clock.now += SAID_FOR_S / 2
    assert said(full, full, other) == [repr(full), repr(other)], "it is so still, or again"
    assert len(said(*map(KeyError, range(1000)))) == MOST_SAID - 2, "each has another text"
    clock.now += SAID_FOR_S
    assert said(other) == [repr(other)]
    with pytest.raises(asyncio.CancelledError), turns.turn():
        raise asyncio.CancelledError
