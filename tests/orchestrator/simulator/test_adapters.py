from collections.abc import Iterator

import msgspec
import pytest

from orchestrator.simulator.engine.adapters import RunningStays
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.engine.stay import Stay
from orchestrator.simulator.job import Job
from orchestrator.simulator.loads import ADAPTERS, adapters
from orchestrator.simulator.report import Report, report
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load, at_rate

H100 = load_profile(PROFILES / "h100-llama-8b.json")
SLOTS = msgspec.structs.replace(H100, adapter_slots=4, adapter_load_s=0.1)


def stay(adapter: int) -> Stay:
    return Job(adapter, Arrival(0.0, 100, 10, adapter=adapter), 0).stay("local", 0.0)


def run(load: Load, blind: bool, slots: int = 4, split: tuple[int, int] = (8, 8)) -> tuple[Report, int]:
    """The report, and how many adapters were loaded. `blind`: the router does not know which request is for which."""
    profile = msgspec.structs.replace(SLOTS, adapter_slots=slots)
    settings = Settings(prefill=split[0], decode=split[1], profile=profile, stack=stack("ours:fixed"))
    sim = Simulation(settings, load)
    for job in sim.jobs if blind else ():
        job.adapter = 0
    sim.run()
    return report(sim), sum(worker.running.loads for worker in sim.workers.values())


def test_a_slot_is_taken_by_running_stays_and_the_idle_one_used_longest_ago_makes_room():
    running, first, second = RunningStays(2), stay(1), stay(2)
    running.join(first)
    running.join(second)
    assert running.fits(stay(1)) and not running.fits(stay(3))
    assert running.requests([stay(3), stay(1)]) == {2: 1, 3: 1, 1: 2}
    del running[second]
    del running[first]
    assert running.requests([]) == {2: 0, 1: 0}
    running.join(third := stay(3))
    assert running.requests([]) == {1: 0, 3: 1} and running.loads == 3
    running.join(stay(1))
    assert running.loads == 3 and not running.fits(stay(2))
    del running[third]
    running.clear()
    assert running.requests([]) == {}


@pytest.fixture
def most_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    seen, join = [0], RunningStays.join

    def counted(self: RunningStays, stay: Stay) -> None:
        join(self, stay)
        seen[0] = max(seen[0], len({one.adapter for one in self}))

    monkeypatch.setattr(RunningStays, "join", counted)
    yield seen


@pytest.mark.slow
@pytest.mark.parametrize("blind", [False, True])
def test_no_step_has_more_adapters_than_slots_and_all_requests_end(blind: bool, most_at_once: list[int]):
    shown, loads = run(at_rate(adapters(600), 15.0), blind, slots=3, split=(2, 3))
    assert most_at_once == [3]
    assert shown.finished == shown.requests and loads > 0


def test_a_load_takes_its_time_and_only_once():
    same = Load("one", [Arrival(at, 100, 2, adapter=1) for at in (0.0, 5.0)])
    other = Load("two", [Arrival(at, 100, 2, adapter=1 + n) for n, at in enumerate((0.0, 5.0))])
    none = Load("none", [Arrival(at, 100, 2) for at in (0.0, 5.0)])
    ttft_s = {load.name: run(load, blind=False, slots=1, split=(0, 1)) for load in (same, other, none)}
    assert [loads for _, loads in ttft_s.values()] == [1, 2, 0]
    first, again = ttft_s["one"][0].ttft_max_s, ttft_s["none"][0].ttft_max_s
    assert first == pytest.approx(again + SLOTS.adapter_load_s)


def test_the_load_asks_for_adapters_by_zipf_and_shares_prefixes_within_one():
    load = adapters(20_000, exponent=1.0)
    asked = [arrival.adapter for arrival in load.arrivals]
    assert set(asked) == set(range(1, ADAPTERS + 1))
    assert asked.count(1) / asked.count(10) == pytest.approx(10, rel=0.2)
    begins = {(a.keys[0], a.adapter) for a in load.arrivals if a.keys and a.keys[0] <= ADAPTERS}
    assert begins and all(key == adapter for key, adapter in begins)


@pytest.mark.slow
def test_a_router_that_knows_adapters_loads_fewer_and_serves_more():
    shown, loads = run(at_rate(adapters(2000), 15.0), blind=False)
    blind, blind_loads = run(at_rate(adapters(2000), 15.0), blind=True)
    assert loads <= 0.5 * blind_loads  # the first loads weigh more in a short run
    assert shown.attained > 0.99 > 0.9 > blind.attained
