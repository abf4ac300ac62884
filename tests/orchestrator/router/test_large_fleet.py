"""What the decisions for one request look at in a large fleet: as many workers as in a small one."""

import pytest
from support_bench import FakeCodec, FakeQueue, FakeRequest
from support_info import connects, worker_info

from orchestrator.config.settings import parse_config
from orchestrator.fleet.view import Fleet
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.policy.shortlist import SHORTLIST_FROM
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.decider import Decider
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest
from orchestrator.types import KVCounters, QueueDepth, Role, WorkerLoad

KEYS = list(range(1, 63))  # of a prompt of 1000 tokens, in blocks of 16


class Counting(dict):
    """Counts how many of its values are looked at."""

    looked = 0

    def __getitem__(self, key):
        self.looked += 1
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.looked += 1
        return super().get(key, default)

    def values(self):
        return (self[key] for key in self)

    def items(self):
        return ((key, self[key]) for key in self)


def looked_at(workers: int, generations: int) -> list[int]:
    """For each decision on a request of which four workers have the beginning."""
    choose = decode_choice("kv_prefix")
    fleet = Fleet("f", choose.static_score)
    for number in range(workers):
        name, role = (f"d{number}", Role.DECODE) if number % 2 else (f"p{number}", Role.PREFILL)
        connects(fleet, worker_info(name, role, generation=number // 2 % generations, lends=True))
        kv = KVCounters(link_bytes_per_s=1e9 + number)
        fleet.take_load(WorkerLoad(name, 1, 100, 90 - number % 10, 1, 0, 0, 1.0, kv=kv), now=0.0)
    prefixes, config = PrefixIndex(), parse_config({"model": "m"})
    for name in ("d1", "d3", "p0", "p2"):
        prefixes.stored(name, KEYS[:40])
    learning = Learning(fleet, choose, config.slo, Metrics())
    decider = Decider("f", config, fleet, FakeQueue(QueueDepth(10, 50_000, 5)), prefixes, choose, learning)
    active = ActiveRequest(FakeCodec().read(FakeRequest("r", keys=KEYS), 16), 0.0)
    again = ActiveRequest(FakeCodec().read(FakeRequest("again", keys=KEYS), 16), 0.0)
    again.avoid_worker("d1")
    decider.decide(active)  # applies the first load reports
    fleet.workers = counting = Counting(fleet.workers)
    found = []
    for decision in (
        lambda: decider.decide(active),
        lambda: decider.decide(again),
        lambda: decider.bind(active, "0"),
        lambda: decider.holder(active, "d5", 0),
    ):
        before = counting.looked
        assert decision() is not None
        found.append(counting.looked - before)
    return found


@pytest.mark.parametrize("generations", [1, 2])
def test_no_decision_looks_at_all_workers(generations):
    found = looked_at(800, generations)
    assert found[-1] > 0 and max(found) < 32


def test_a_large_fleet_of_quiet_workers_has_candidates():
    """As a small one has: this frontend alone may have heard nobody for a second."""
    fleet = Fleet("f", decode_choice("kv_prefix").static_score)
    for number in range(SHORTLIST_FROM):
        connects(fleet, worker_info(name := f"d{number}", Role.DECODE))
        fleet.take_load(WorkerLoad(name, 1, 100, 90, 1, 0, 0, 1.0), now=0.0)
        fleet.workers[name].mark_quiet(True)
    assert fleet.ready(Role.DECODE) == len(fleet.candidates().decode) == SHORTLIST_FROM
