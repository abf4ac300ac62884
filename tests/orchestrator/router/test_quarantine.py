"""Engines that crash: who goes on, who goes on alone, and who is held to be the cause."""

import time

import pytest
from support_bench import Bench, FakeRequest

from orchestrator.router.dispatch import MAX_ATTEMPTS
from orchestrator.router.quarantine import TRIAL_S
from orchestrator.router.request import Overloaded, State
from orchestrator.types import FinishReason, PauseState, Role
from orchestrator.wire.messages import EngineCrashed, Rejected


class CrashBench(Bench):
    """Decode workers d0 to d3; short prompts, so that every request is decoded where it is prefilled."""

    def __init__(self, **routing):
        super().__init__(**routing)
        for name in ("d2", "d3"):
            self.add_worker(name, Role.DECODE)

    async def crash(self, worker_id, others=0, tried=None):
        """`tried`: a suspect of another frontend; ours is found."""
        mine = [name for name in self.on(worker_id) if self.router.requests[name].suspect]
        self.say(worker_id, EngineCrashed("a kernel failed", others, *mine or [tried]))
        self.fleet.remove(worker_id)
        self.router.lost.worker_lost(worker_id)
        await self.settle()

    def where(self, name):
        return self.router.requests[name].decode_worker

    def on(self, worker_id):
        return {name for name, active in self.router.requests.items() if active.decode_worker == worker_id}

    def why(self, name):
        return self.codec.failures[name].why

    def failed(self):
        return [name for name, _, finish in self.received() if finish is FinishReason.ERROR]


async def test_a_suspect_waits_no_longer_than_others_for_a_worker():
    bench = CrashBench(placement_timeout_s=30)
    await bench.submit_to_d0("a", "b", "c")
    bench.connect("d2", "d3", connected=False)
    await bench.crash("d0")
    assert len(bench.on("d1")) == 1
    bench.router.check(time.monotonic() + 31)  # the first trial has taken too long by then: d1 tries another
    await bench.settle()
    assert sorted(bench.failed()) == sorted({"a", "b", "c"} - bench.on("d1")) != []
    assert all("no worker could try it alone" in failure.why for failure in bench.codec.failures.values())
    assert all(Overloaded(failure.rejected).status == 503 for failure in bench.codec.failures.values())


@pytest.mark.parametrize("how", ["the fleet is paused", "this process stands still"])
async def test_time_in_which_nothing_could_come_about_is_no_time_of_suspects(how):
    bench = CrashBench(placement_timeout_s=30)
    await bench.submit_to_d0("a", "b", "c")
    bench.connect("d2", "d3", connected=False)
    await bench.crash("d0")
    tried, now, pause = bench.on("d1"), time.monotonic(), bench.fleet.pause
    if how == "the fleet is paused":
        pause.note("d1", PauseState(1, "keep"))
        pause.note("d1", PauseState(2))
        pause.ended_at = now + 60  # as if it had lasted a minute
    else:
        pause.stood_still(now + 60, 60.0)
    bench.router.check(now + 61)
    await bench.settle()
    assert bench.failed() == [] and bench.on("d1") == tried, "nor is its trial over"
    bench.router.check(now + 91)
    await bench.settle()
    assert len(bench.failed()) == 1


async def test_a_defect_that_one_suspect_meets_keeps_no_other_in_quarantine(monkeypatch):
    bench = CrashBench(placement_timeout_s=30)
    await bench.submit_to_d0("a", "b", "c", "d")
    bench.connect("d2", "d3", connected=False)
    await bench.crash("d0")
    fail, met = bench.router._dispatch.fail, []

    def defective(active, failure):
        return fail(active, failure) if met or met.append(active.id) else 1 // 0

    monkeypatch.setattr(bench.router._dispatch, "fail", defective)
    bench.router.check(time.monotonic() + 31)
    await bench.settle()
    failed = bench.failed()
    assert len(met) == 1 and sorted(failed) == sorted({"a", "b", "c", "d"} - bench.on("d1"))
    assert len(failed) == 2  # d1 tries another by then


async def test_each_worker_tries_one_suspect():
    """So nobody waits for more than a share of the others; that no two meet on a worker, the worker sees to."""
    bench = CrashBench()
    names = "abcdefgh"
    await bench.submit_to_d0(*names)
    await bench.crash("d0")
    rounds = 0
    while waiting := [name for name in names if bench.router.requests[name].state is not State.DECODING]:
        tried = [name for name in waiting if bench.where(name) is not None]
        assert 0 < len(tried) <= 3
        for name in tried:
            bench.tokens(bench.where(name), name, [2], attempt=2)
        await bench.settle()
        rounds += 1
    assert rounds == 3
    for name in names:
        bench.tokens(bench.where(name), name, [3], attempt=2, finish=FinishReason.STOP)
    assert bench.failed() == []
    bench.assert_no_leaks()


async def test_suspect_runs_alone_until_its_first_token():
    bench = CrashBench()
    await bench.submit_to_d0("a", "b", "c")
    bench.connect("d2", "d3", connected=False)
    await bench.crash("d0")
    assert [bench.where(name) is not None for name in "abc"] == [True, False, False]
    bench.tokens(bench.where("a"), "a", [2], attempt=2)
    await bench.settle()
    assert [bench.where(name) is not None for name in "abc"] == [True, True, False]
    bench.router.abort(["b"])  # an end makes room too
    await bench.settle()
    bench.tokens(bench.where("c"), "c", [2], attempt=2, finish=FinishReason.STOP)
    bench.tokens(bench.where("a"), "a", [3], attempt=2, finish=FinishReason.STOP)
    assert bench.failed() == []
    bench.assert_no_leaks()


async def test_suspect_that_crashes_alone_fails_and_others_continue():
    bench = CrashBench()
    await bench.submit_to_d0("poison", "a", "b")
    await bench.crash("d0")
    second = bench.where("poison")
    await bench.submit("new")  # whoever else is on the second worker is not to blame
    await bench.crash(second)
    assert bench.failed() == ["poison"]
    assert bench.why("poison") == f"it crashed 2 engines, the last on {second}: a kernel failed"
    for _ in range(3):
        for name, active in list(bench.router.requests.items()):
            if active.decode_worker is not None and active.state is State.LOCAL:
                bench.tokens(active.decode_worker, name, [7], attempt=active.attempt)
        await bench.settle()
    assert all(active.state is State.DECODING for active in bench.router.requests.values())
    assert set(bench.router.requests) == {"a", "b", "new"}


async def test_only_request_of_two_crashes_is_guilty():
    bench = CrashBench()
    await bench.submit_to_d0("poison")
    bench.tokens("d0", "poison", [1])
    await bench.crash("d0")
    second = bench.where("poison")
    bench.tokens(second, "poison", [2], attempt=2)  # no longer alone
    await bench.submit(*(f"r{number}" for number in range(9)))
    bystanders = bench.on(second) - {"poison"}
    assert bystanders
    await bench.crash(second)
    assert bench.failed() == ["poison"]
    assert bystanders <= set(bench.router.requests)


async def test_prompt_computed_elsewhere_is_no_suspect():
    bench = CrashBench()
    await bench.submit("one", "two", prompt_tokens=1000)
    bench.claim("one")
    bench.claim("two")
    there = bench.where("one")
    two = bench.router.requests["two"]
    two.give_to(two.prefill, bench.router.requests["one"].decode)
    await bench.crash(there)
    assert all(bench.router.requests[name].state is State.LOCAL for name in ("one", "two")), "both at once"
    assert not any(active.suspect for active in bench.router.requests.values())


async def test_crashed_worker_gets_no_requests():
    bench = CrashBench()
    await bench.submit_to_d0("a")
    bench.connect("d1", "d2", "d3", connected=False)
    bench.say("d0", EngineCrashed("a kernel failed"))
    bench.connect("d1", "d2", "d3")
    await bench.submit(*(f"r{number}" for number in range(8)))
    await bench.settle()
    assert bench.on("d0") == set(), "though it is still in the registry"


async def test_crash_costs_bystanders_no_attempt(monkeypatch):
    monkeypatch.setattr("orchestrator.router.dispatch.MAX_ATTEMPTS", 1)
    bench = CrashBench()
    await bench.submit_to_d0("a", "b")
    await bench.crash("d0")
    for name in "ab":
        bench.tokens(bench.where(name), name, [1], attempt=2, finish=FinishReason.STOP)
        await bench.settle()
    assert bench.failed() == []
    bench.assert_no_leaks()


async def test_slow_trial_does_not_block_other_suspects():
    bench = CrashBench()
    await bench.submit_to_d0("slow", "a")
    bench.connect("d2", "d3", connected=False)
    await bench.crash("d0")
    bench.router.check(time.monotonic())
    await bench.settle()
    assert bench.where("a") is None
    bench.router.check(time.monotonic() + TRIAL_S + 1)
    await bench.settle()
    assert bench.where("a") is not None


async def test_prefill_crash_suspects_its_prompts():
    bench = CrashBench()
    await bench.router.submit(FakeRequest("poison"))
    bench.claim("poison")
    await bench.crash("p0")
    assert bench.router.requests["poison"].state is State.LOCAL  # and alone
    await bench.crash(bench.where("poison"))
    assert bench.failed() == ["poison"]
    bench.assert_no_leaks()


async def test_repeated_suspect_is_not_guilty_if_another_frontend_may_be():
    bench = CrashBench()
    await bench.submit_to_d0("a")
    for attempt in (2, 3):
        await bench.crash(bench.where("a"), others=1)
        bench.tokens(bench.where("a"), "a", [1], attempt=attempt)
    assert bench.failed() == []
    bench.tokens(bench.where("a"), "a", [1], attempt=3, finish=FinishReason.STOP)
    bench.assert_no_leaks()


async def test_suspect_of_another_frontend_clears_ours():
    bench = CrashBench()
    await bench.submit_to_d0("a", "b")
    for name in "ab":
        bench.tokens("d0", name, [1])
    await bench.crash("d0", others=1, tried="theirs")
    assert all(bench.where(name) is not None for name in "ab")  # both at once
    assert not any(active.crashes or active.suspect for active in bench.router.requests.values())


async def test_crashes_of_another_rank_are_held_against_no_request_here():
    """Ranks of a group that steps together die of each other's ends. One that met three is not tried, and goes on."""
    bench = CrashBench()
    await bench.submit("a")
    for attempt in range(1, MAX_ATTEMPTS):
        await bench.settle()
        worker, active = bench.where("a"), bench.router.requests["a"]
        assert active.attempt == attempt and not active.suspect and not active.crashes
        bench.say(worker, EngineCrashed("cannot go on: d.1 has ended", 0, ""))
    await bench.settle()
    assert bench.where("a") and bench.failed() == []


async def test_a_request_does_not_end_groups_forever_where_each_rank_blames_another():
    bench = CrashBench()
    await bench.submit("a")
    for _ in range(MAX_ATTEMPTS):
        await bench.settle()
        assert bench.where("a"), "it goes on"
        bench.say(bench.where("a"), EngineCrashed("cannot go on: d.1 has ended", 0, ""))
    await bench.settle()
    assert bench.failed() == ["a"] and bench.why("a").startswith(f"{MAX_ATTEMPTS} attempts failed: engine_crashed")
    bench.assert_no_leaks()


async def test_answering_request_continues_and_is_suspect_of_second_crash():
    bench = CrashBench()
    await bench.submit_to_d0("a", "b", "new")
    for name in "ab":
        bench.tokens("d0", name, [1])
    await bench.crash("d0")
    assert all(bench.where(name) is not None for name in ("a", "b", "new"))
    tried = {message.request_id: message for _, message in bench.submits() if message.attempt == 2}
    assert {name for name, message in tried.items() if message.suspect} == {"new"}
    assert all(message.trial_s == TRIAL_S for message in tried.values())
    bench.tokens(bench.where("new"), "new", [1], attempt=2, finish=FinishReason.STOP)
    for name in "ab":
        bench.tokens(bench.where(name), name, [2], attempt=2)
    bench.connect("d1", "d2", connected=False)
    for name in "ab":  # they meet again
        bench.say(bench.where(name), Rejected(name, 2, "draining", leaving=True))
        await bench.settle()
        bench.tokens("d3", name, [3], attempt=3)
    bench.connect("d1")
    await bench.crash("d3")
    assert bench.failed() == []
    assert [bench.where(name) is not None for name in "ab"] == [True, False], "one after the other"


async def test_sole_possible_cause_is_guilty():
    bench = CrashBench()
    await bench.submit_to_d0("poison")
    await bench.crash("d0", others=1)
    await bench.crash(bench.where("poison"))
    assert bench.failed() == ["poison"]
