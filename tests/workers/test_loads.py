"""Load reports and the table of attempts behind them."""

from __future__ import annotations

import asyncio

import pytest
from support_workers import until

from orchestrator.types import Role, WorkerLoad, WorkerState
from workers.attempts import Attempts, Held
from workers.engine import EngineLoad, Phase
from workers.lifecycle import LEGAL, REGISTERED, IllegalMove, Life, Lifecycle
from workers.loads import LoadReporter, PrefillRate

LOAD = EngineLoad(blocks_free=90, running=1, waiting=0, step_ms=1.0)


def held(key: str, tokens: int = 100, phase: Phase = Phase.DECODE, frontend: str = "f") -> Held:
    return Held(key, key.split("#")[0], int(key.split("#")[1]), frontend, phase, tokens, 0.0)


def reporter() -> tuple[LoadReporter, list[WorkerLoad], Attempts]:
    published: list[WorkerLoad] = []
    attempts = Attempts()
    return LoadReporter("w", 100, attempts, published.append), published, attempts


async def test_a_submission_is_seen_by_the_second_step_after_it() -> None:
    load, published, _ = reporter()
    load.submitted("f", 1)
    load.stepped(LOAD)  # may have begun before the submission
    assert published[-1].seen == {"f": 0}
    await until(lambda: (load.stepped(LOAD), published[-1].seen == {"f": 1})[1])
    assert load.settled


async def test_an_engine_that_was_asked_has_seen_everything() -> None:
    load, published, _ = reporter()
    load.submitted("f", 3)
    load.submitted("g", 5)
    assert not load.settled
    load.measured(LOAD)
    assert load.settled and published[-1].seen == {"f": 3, "g": 5}
    load.forget("g")
    await asyncio.sleep(0.003)  # beyond the interval between reports
    load.stepped(LOAD)
    assert published[-1].seen == {"f": 3}


async def test_reports_of_a_fast_engine_are_coalesced_and_the_last_is_not_lost() -> None:
    load, published, _ = reporter()
    for free in range(1000):
        load.stepped(EngineLoad(blocks_free=free, running=0, waiting=0, step_ms=0.1))
    assert len(published) < 100
    await until(lambda: published[-1].blocks_free == 999)
    assert [p.sequence for p in published] == list(range(1, len(published) + 1))


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


def test_the_sums_of_the_attempts() -> None:
    attempts = Attempts()
    one, two = held("a#1", 100), held("b#1", 50, Phase.PREFILL)
    attempts.add(one)
    attempts.add(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens, attempts.claims, len(attempts)) == (150, 50, 1, 2)
    attempts.compute(two)
    attempts.compute(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (100, 0)
    attempts.remove(one)
    attempts.remove(one)
    attempts.remove(two)
    assert (attempts.waiting_tokens, attempts.claimed_tokens, attempts.claims, len(attempts)) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="a#1 is held already"):
        attempts.add(held("a#1"))
        attempts.add(held("a#1"))


def test_removing_an_older_attempt_does_not_forget_the_newer() -> None:
    attempts = Attempts()
    older, newer = held("a#1"), held("a#2")
    attempts.add(older)
    attempts.add(newer)
    attempts.remove(older)
    assert attempts.find(Phase.DECODE, "a") is newer


def test_what_is_still_pushed_is_found_by_abort_and_by_frontend() -> None:
    attempts = Attempts()
    for key, frontend in (("a#2", "f"), ("b#1", "f"), ("c#1", "g")):
        attempts.note_pushing(held(key, phase=Phase.PREFILL, frontend=frontend))
    assert attempts.end_pushing("a", 1) == []  # an abort of an older attempt
    assert attempts.end_pushing("a", 2) == ["a#2"]
    assert attempts.end_pushing("a", 2) == []
    assert attempts.end_pushing_to("f") == ["b#1"]
    assert attempts.end_pushing("c", 5) == ["c#1"]


def test_life_has_no_way_out_of_gone_and_every_state_a_registered_one() -> None:
    assert set(LEGAL) == set(REGISTERED) == set(Life)
    assert not LEGAL[Life.GONE]
    life = Lifecycle(Role.PREFILL)
    assert (life.refusal(), life.claims, life.registered) == ("starting", False, WorkerState.STARTING)
    life.enter(Life.READY)
    assert (life.refusal(), life.claims) == ("this is a prefill worker", True)
    life.enter(Life.FLIPPING)
    assert (life.refusal(), life.claims, life.registered) == ("draining", False, WorkerState.DRAINING)
    life.role = Role.DECODE
    life.enter(Life.READY)
    assert (life.refusal(), life.claims) == (None, False)
    with pytest.raises(IllegalMove, match="ready cannot become starting"):
        life.enter(Life.STARTING)


def test_what_is_computed_in_chunks_waits_no_more() -> None:
    attempts = Attempts()
    one, two = held("a#1", 1000, Phase.PREFILL), held("b#1", 300, Phase.PREFILL)
    attempts.add(one)
    attempts.add(two)
    attempts.progress(400)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (900, 900)
    attempts.progress(400)
    attempts.compute(one)
    assert attempts.waiting_tokens == 300, "also before the step that completed it is accounted for"
    attempts.progress(400)  # the last 200 of one, 200 of two
    assert attempts.waiting_tokens == 100
    attempts.compute(two)
    attempts.progress(100)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (0, 0)


def test_what_was_believed_of_a_prompt_ends_with_it() -> None:
    """More computed than thought, less computed than thought, and given up half-way."""
    attempts = Attempts()
    names = [held(f"{name}#1", 100, Phase.PREFILL) for name in "abcd"]
    for each in names:
        attempts.add(each)
    attempts.progress(250)
    attempts.progress(250)
    attempts.compute(names[0])
    attempts.progress(50)
    assert attempts.waiting_tokens == 250, "at most the last step's tokens are another's"
    attempts.compute(names[1])
    attempts.progress(10)
    assert attempts.waiting_tokens == 200
    attempts.progress(60)
    attempts.remove(names[2])
    assert attempts.waiting_tokens == 100, "whose they were is not known"
    attempts.remove(names[3])
    attempts.progress(10)
    assert (attempts.waiting_tokens, attempts.claimed_tokens) == (0, 0)


def test_the_last_token_of_received_prompts_is_nobodys_progress() -> None:
    attempts = Attempts()
    for number in range(5):
        received = held(f"r{number}#1", 0)
        attempts.add(received)
        attempts.compute(received)
        attempts.progress(1)
    attempts.add(held("a#1", 100))
    assert attempts.waiting_tokens == 100
