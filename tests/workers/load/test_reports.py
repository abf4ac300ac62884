"""Load reports: exact, coalesced, and how fast prefill is."""

import asyncio
import itertools
import time
from typing import cast

import msgspec
import pytest
from support_info import worker_info
from support_wait import until

from orchestrator.fleet.membership import QUIET_S
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.types import WorkerLoad
from workers.attempts import Attempt, Attempts
from workers.engine import Engine, EngineDead, EngineLoad, Phase
from workers.load import reports
from workers.load.reports import LOAD_INTERVAL_S, LoadReporter, PrefillRate, load_interval_s

LOAD = EngineLoad(blocks_free=90, running=1, waiting=0, step_ms=1.0)


def reporter() -> tuple[LoadReporter, list[WorkerLoad], Attempts]:
    published: list[WorkerLoad] = []
    attempts = Attempts()
    return LoadReporter("w", 100, attempts, published.append), published, attempts


def decode(attempts: Attempts, request_id: str, tokens: int, blocks: int) -> Attempt:
    attempt = Attempt(f"{request_id}#1", request_id, 1, "f", Phase.DECODE, tokens, 0.0, blocks=blocks)
    attempts.add(attempt)
    return attempt


async def test_a_submission_counts_once_from_when_it_comes_until_it_ends() -> None:
    """A step's figures may have been taken before the engine was given it; those of the step after show it."""
    load, published, attempts = reporter()
    given = decode(attempts, "r", 80, 5)
    load.submitted("f", 1)
    load.given(given)
    for free in 90, 85, 84:
        load.stepped(EngineLoad(blocks_free=free, running=1, waiting=0, step_ms=1.0))
        await asyncio.sleep(2 * LOAD_INTERVAL_S)
        told = published[-1]
        assert (told.blocks_free, told.seen, told.waiting_tokens) == (min(free, 85), {"f": 1}, 80)
    assert not load.unsettled


@pytest.mark.parametrize("shown", ["chunk", "output"])
async def test_a_submission_that_a_step_shows_counts_once_though_its_worker_learns_late_that_it_was_given(
    shown: str,
) -> None:
    load, published, attempts = reporter()
    late = decode(attempts, "r", 80, 5)
    load.submitted("f", 1)
    for _ in range(2):
        if shown == "chunk":
            attempts.computing({"r#1": 40}, 1.0)
        else:
            attempts.mark_computed(late)
        load.stepped(msgspec.structs.replace(LOAD, blocks_free=85))
        await asyncio.sleep(2 * LOAD_INTERVAL_S)
        assert (published[-1].blocks_free, published[-1].waiting) == (85, 0)
        load.given(late)
    assert not load.unsettled


async def test_measured_load_includes_what_was_given_before_the_question() -> None:
    load, published, attempts = reporter()
    before, after = decode(attempts, "r", 80, 5), decode(attempts, "s", 80, 3)
    load.submitted("f", 3)
    load.submitted("g", 5)
    load.given(before)
    asked = load.unsettled
    load.given(after)  # while the engine answers
    load.measured(LOAD, asked)
    assert load.unsettled == [after]
    assert (published[-1].seen, published[-1].blocks_free) == ({"f": 3, "g": 5}, LOAD.blocks_free - 3)
    load.forget("g")
    await asyncio.sleep(0.003)  # beyond the interval between reports
    load.stepped(LOAD)
    assert published[-1].seen == {"f": 3}


async def test_one_that_waits_for_its_adapter_counts_once_whatever_comes_after_it() -> None:
    load, published, attempts = reporter()
    waits = decode(attempts, "waits", 500, 30)
    load.submitted("f", 1)
    for _ in range(3):  # however long it waits
        load.measured(LOAD, load.unsettled)
        await asyncio.sleep(2 * LOAD_INTERVAL_S)
    later = decode(attempts, "later", 100, 7)
    load.submitted("f", 2)
    load.given(later)
    load.measured(LOAD, load.unsettled)  # its seven blocks are in the engine's figures
    await until(lambda: published[-1].seen == {"f": 2})
    told = published[-1]
    assert (told.waiting_tokens, told.blocks_free, told.waiting) == (600, LOAD.blocks_free - 30, 1)
    attempts.remove(waits)  # its client has gone
    load.given(waits)
    await asyncio.sleep(2 * LOAD_INTERVAL_S)
    load.measured(LOAD, load.unsettled)
    told = published[-1]
    assert (told.waiting_tokens, told.blocks_free, told.waiting) == (100, LOAD.blocks_free, 0)


async def test_reports_of_a_fast_engine_are_coalesced_and_the_last_is_not_lost() -> None:
    load, published, _ = reporter()
    for free in range(1000):
        load.stepped(EngineLoad(blocks_free=free, running=0, waiting=0, step_ms=0.1))
    assert len(published) < 100
    await until(lambda: published[-1].blocks_free == 999)
    first = published[0].sequence
    assert [p.sequence for p in published] == list(range(first, first + len(published)))


async def test_what_a_predecessor_reported_last_is_older_than_what_its_successor_reports_first() -> None:
    """A frontend that stood still may read it after it has seen that there is another process: it would take no report
    of that one until it had made as many."""
    (load, late, _), free = reporter(), EngineLoad(blocks_free=100, running=0, waiting=0, step_ms=1.0)
    for _ in range(3):
        load.stepped(LOAD)
        await asyncio.sleep(2 * LOAD_INTERVAL_S)
    again, published, _ = reporter()
    again.stepped(free)
    view = WorkerView(worker_info("w"), 0.0, set(), itertools.count(1))
    for told in (late[-1], published[0], late[-2]):
        view.note_load(told, 0, 1.0)
    assert len(late) == 3 and view.load is published[0]


async def test_report_rate_is_limited_in_large_fleet() -> None:
    published: list[WorkerLoad] = []
    load = LoadReporter("w", 100, Attempts(), published.append, workers=lambda: 1000)
    began = time.monotonic()
    for free in range(100):
        load.stepped(EngineLoad(blocks_free=free, running=0, waiting=0, step_ms=0.1))
        await asyncio.sleep(0.003)
    await until(lambda: published[-1].blocks_free == 99)
    assert len(published) <= 2 + (time.monotonic() - began) / load_interval_s(1000)


def test_report_interval_stays_below_quiet_limit() -> None:
    assert [load_interval_s(count) for count in (1, 5, 1000)] == [LOAD_INTERVAL_S, 0.0025, 0.4]
    assert 2 * load_interval_s(1_000_000) < QUIET_S, "one lost report is nothing"


class Hanging:
    """An engine that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def load(self) -> EngineLoad:
        await self.answers.wait()
        return LOAD


@pytest.mark.parametrize("longest_step_s", [0.01, 0.1])
async def test_worker_with_stuck_engine_is_silent_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, longest_step_s: float
) -> None:
    monkeypatch.setattr(reports, "IDLE_REPORT_S", 0.02)
    monkeypatch.setattr(reports, "ENGINE_STUCK_S", 0.3)
    load, published, _ = reporter()
    load.stepped(msgspec.structs.replace(LOAD, step_ms=longest_step_s * 1e3))
    engine = Hanging()
    running = asyncio.create_task(load.run(cast(Engine, engine), lambda: None))
    began = time.monotonic()
    await until(lambda: load.stuck)
    assert time.monotonic() - began > 0.9 * max(0.3, 10 * longest_step_s)
    shown = len(published)
    assert shown > 5, "a long step is no reason to be silent"
    await asyncio.sleep(0.2)
    assert len(published) == shown
    engine.answers.set()
    await until(lambda: len(published) > shown and not load.stuck)
    running.cancel()


class Counting:
    """An idle engine that counts how often it is asked."""

    asked = 0

    async def load(self) -> EngineLoad:
        self.asked += 1
        return msgspec.structs.replace(LOAD, blocks_free=100, running=0, step_ms=float(self.asked))


async def test_idle_engine_is_asked_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures of recent time age while no step reports them."""
    monkeypatch.setattr(reports, "IDLE_REPORT_S", 0.005)
    monkeypatch.setattr(reports, "ASK_IDLE_S", 0.05)
    load, published, _ = reporter()
    engine = Counting()
    running = asyncio.create_task(load.run(cast(Engine, engine), lambda: None))
    await until(lambda: engine.asked >= 4)
    assert len(published) > engine.asked, "most reports only say that the worker lives"
    await until(lambda: published[-1].step_ms >= 4)
    running.cancel()


async def test_step_in_which_engine_hung_is_not_its_longest() -> None:
    load, _, _ = reporter()
    load.stepped(msgspec.structs.replace(LOAD, step_ms=15_000.0))
    assert load.stuck_after_s == reports.ENGINE_STUCK_S
    load.stepped(msgspec.structs.replace(LOAD, step_ms=2_000.0))
    assert load.stuck_after_s == 20.0
    load.stepped(msgspec.structs.replace(LOAD, step_ms=15_000.0))
    assert load.stuck_after_s == 150.0


async def test_engine_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "IDLE_REPORT_S", 0.02)
    monkeypatch.setattr(reports, "ENGINE_HUNG_S", 0.3)
    load, _, _ = reporter()
    load.stepped(LOAD)
    with pytest.raises(EngineDead, match=r"has not answered for 0\.3 s"):
        await load.run(cast(Engine, Hanging()), lambda: None)


def test_prefill_rate_counts_only_time_with_work() -> None:
    rate = PrefillRate()
    rate.busy(0.0)
    rate.prefilled(1000, more=True, now=0.5)
    assert rate.tokens_per_s == pytest.approx(2000)
    rate.prefilled(1000, more=False, now=1.0)
    assert rate.tokens_per_s == pytest.approx(2000)
    rate.busy(100.0)  # the pause in between does not count
    rate.prefilled(1000, more=False, now=100.25)
    assert 2000 < rate.tokens_per_s < 4000
    before = rate.tokens_per_s
    rate.busy(200.0)
    rate.prefilled(10, more=False, now=200.001)  # 1 ms of evidence moves it little
    assert rate.tokens_per_s == pytest.approx(before, rel=0.05)
