"""The live view: exact correction between load reports, new processes behind old names, and who counts as gone."""

import contextlib

import msgspec
import pytest
from support_info import connects, fleet_of
from support_info import worker_info as worker

from orchestrator.fleet.membership import mark_silent_quiet
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.types import KVCounters, KVEndpoint, Role, WorkerInfo, WorkerLoad, WorkerState


def load(name, sequence, free, seen=0):
    return WorkerLoad(name, sequence, 100, free, 1, 0, 0, 1.0, seen={"f": seen})


def crowd(count, free, **info):
    """So many decode workers of a large fleet. `free`: their free blocks, and `info`: of their entries, by number."""
    fleet = Fleet("f", decode_choice("kv_blocks").static_score)
    for i in range(count):
        connects(fleet, worker(f"d{i}", **{name: value(i) for name, value in info.items()}))
        fleet.take_load(load(f"d{i}", 1, free=free(i)), now=0.0)
        if i == count // 4:
            fleet.apply_changes()  # others come later
    return fleet


def test_placements_count_until_a_report_has_seen_them():
    fleet = fleet_of(worker("d"))
    view = fleet.workers["d"]
    fleet.take_load(load("d", 1, free=90), now=1.0)
    assert view.note_placed(160, 160) == 1 and view.note_placed(17, 17) == 2
    assert view.candidate.blocks_free == 90 - 10 - 2 and view.candidate.waiting == 2
    fleet.take_load(load("d", 2, free=80, seen=1), now=2.0)  # has seen the first, not yet the second
    assert view.candidate.blocks_free == 80 - 2 and view.candidate.waiting == 1
    fleet.take_load(load("d", 3, free=78, seen=2), now=3.0)
    assert view.candidate.blocks_free == 78 and view.candidate.waiting == 0


def test_older_report_is_ignored():
    fleet = fleet_of(worker("d"))
    fleet.take_load(load("d", 5, free=10), now=1.0)
    fleet.take_load(load("d", 4, free=99), now=2.0)
    assert fleet.workers["d"].candidate.blocks_free == 10


def test_unchanged_report_costs_next_decision_nothing():
    fleet = fleet_of(worker("d"))
    view = fleet.workers["d"]
    fleet.take_load(load("d", 1, free=90), now=1.0)
    before = view.candidate
    fleet.take_load(load("d", 2, free=90), now=2.0)
    assert view.candidate is before and view.last_heard_at == 2.0
    placed = view.note_placed(32, 32)
    fleet.take_load(load("d", 3, free=90, seen=placed), now=3.0)  # it has ended already
    assert view.candidate == before
    for changes in ({"blocks_free": 80}, {"running": 2}, {"waiting": 1}, {"waiting_tokens": 7}, {"blocks_total": 200}):
        said = msgspec.structs.replace(load("d", view.load.sequence + 1, free=90), **changes)
        last = view.candidate
        fleet.take_load(said, now=4.0)
        assert view.candidate != last, changes


def test_placements_never_make_free_blocks_negative():
    fleet = fleet_of(worker("d"))
    fleet.workers["d"].note_placed(16 * 1000, 0)
    assert fleet.workers["d"].candidate.blocks_free == 0


def test_a_new_process_behind_an_old_name_starts_from_nothing():
    fleet = fleet_of(worker("d"))
    fleet.workers["d"].note_placed(160, 160)
    assert not fleet.upsert(worker("d", state=WorkerState.DRAINING), now=1.0)
    assert fleet.workers["d"].candidate.waiting == 1 and fleet.workers["d"].usable_as is None
    assert fleet.upsert(worker("d", engine_id="restarted"), now=2.0)
    assert fleet.workers["d"].candidate.waiting == 0 and not fleet.workers["d"].connected


def test_lost_submissions_stop_counting_after_reconnect():
    """A worker that looked full by it would be given nothing, and so would never report a later submission."""
    fleet = fleet_of(worker("d"))
    view = fleet.workers["d"]
    fleet.take_load(load("d", 1, free=90), now=1.0)
    lost = [view.note_placed(160, 160) for _ in range(200)][-1]
    assert view.candidate.blocks_free == 0 and view.candidate.waiting == 200
    view.disconnect(now=1.5)
    view.greeted = True
    view.note_connected(True)
    fleet.take_load(load("d", 2, free=90), now=2.0)
    assert view.candidate.blocks_free == 90 and view.candidate.waiting == 0 and view.candidate.placed_tokens == 0
    assert view.note_placed(160, 160) > lost
    fleet.take_load(load("d", 3, free=80, seen=lost), now=3.0)
    assert view.candidate.blocks_free == 70 and view.candidate.waiting == 1


def test_rediscovered_worker_is_counted_exactly():
    fleet = fleet_of(worker("d"))
    seen = [fleet.workers["d"].note_placed(160, 160) for _ in range(500)][-1]  # the worker remembers this
    fleet.remove("d")
    fleet.upsert(worker("d"), now=1.0)
    for _ in range(2):
        fleet.workers["d"].note_placed(160, 160)
    fleet.take_load(load("d", 1, free=100, seen=seen), now=2.0)  # of a step that began before those two
    assert fleet.workers["d"].candidate.blocks_free == 100 - 20


def test_worker_without_report_is_given_up():
    fleet = fleet_of(worker("deaf"), worker("starting"))
    fleet.workers["deaf"].greeted = True
    assert fleet.silent(3.9, timeout_s=4, reconnect_s=0.5) == []
    assert fleet.silent(4.1, timeout_s=4, reconnect_s=0.5) == ["deaf"]


def test_stall_of_this_process_is_not_silence():
    fleet = fleet_of(worker("d"), worker("broken"))
    fleet.take_load(load("d", 1, free=1), now=1.0)
    fleet.workers["broken"].last_heard_at, fleet.workers["broken"].disconnected_at = 1.0, 1.2
    fleet.discount_stall(5.0, now=6.3)
    assert fleet.silent(6.3, timeout_s=4, reconnect_s=0.5) == []
    assert fleet.silent(6.8, timeout_s=4, reconnect_s=0.5) == ["broken"]  # and no longer than that
    assert fleet.silent(10.1, timeout_s=4, reconnect_s=0.5) == ["d", "broken"]
    fleet.discount_stall(60.0, now=11.0)
    assert fleet.silent(15.1, timeout_s=4, reconnect_s=0.5) == ["d", "broken"]


def test_candidates_are_ready_connected_decode_workers_and_avoidance_is_a_preference():
    fleet = fleet_of(worker("d0"), worker("d1"), worker("p", Role.PREFILL), worker("s", state=WorkerState.DRAINING))
    fleet.upsert(worker("unconnected"), now=0.0)
    names = {c.worker_id for c in fleet.candidates().decode}
    assert names == {"d0", "d1"} and fleet.ready(Role.PREFILL) == 1
    assert [c.worker_id for c in fleet.candidates(avoid=["d0"]).decode] == ["d1"]
    for avoid in (["d0", "d1"], ["d1", "d0"], ["gone", "d1", "d0"]):
        first = next(name for name in avoid if name != "gone")
        assert [c.worker_id for c in fleet.candidates(avoid=avoid).decode] == [first], "avoided longest ago"


def test_large_fleet_shortlist_follows_changes():
    choose, fleet = decode_choice("kv_blocks"), crowd(200, lambda i: 50)
    request = RequestInfo("r", prompt_tokens=160, max_new_tokens=16, arrived_at=0.0)
    fleet.take_load(load("d150", 2, free=99), now=1.0)
    candidates = fleet.candidates().decode
    assert len(candidates) < 32 and choose(request, candidates).worker_id == "d150"
    fleet.workers["d150"].note_placed(16 * 60, 0)  # no longer the emptiest, before any report says so
    assert choose(request, fleet.candidates().decode).worker_id != "d150"
    fleet.take_load(load("d7", 2, free=98), now=1.0)
    fleet.workers["d7"].note_connected(False)
    assert "d7" not in {c.worker_id for c in fleet.candidates().decode} and fleet.ready(Role.DECODE) == 199
    fleet.upsert(worker("d8", state=WorkerState.DRAINING), now=1.0)
    fleet.remove("d9")
    assert fleet.ready(Role.DECODE) == 197
    spread = []
    for _ in range(100):
        chosen = choose(request, fleet.candidates().decode)
        fleet.workers[chosen.worker_id].note_placed(request.prompt_tokens, 0)
        spread.append(chosen.worker_id)
    assert max(spread.count(name) for name in set(spread)) <= 3


def test_silent_or_disconnected_worker_is_lost():
    fleet = fleet_of(worker("talks"), worker("silent"), worker("broken"))
    fleet.upsert(worker("starting"), now=0.0)
    for name in ("talks", "silent", "broken"):
        fleet.take_load(load(name, 1, free=1), now=0.0)
    fleet.take_load(load("talks", 2, free=1), now=9.0)
    fleet.take_load(load("broken", 2, free=1), now=9.0)
    fleet.workers["broken"].disconnected_at = 9.0
    assert fleet.silent(9.1, timeout_s=4, reconnect_s=0.5) == ["silent"]
    assert fleet.silent(9.6, timeout_s=4, reconnect_s=0.5) == ["silent", "broken"]


def of_generation(info: WorkerInfo, generation: int) -> WorkerInfo:
    return msgspec.structs.replace(info, generation=generation, kv=KVEndpoint(f"{info.id}-{generation}", "h", 1))


def test_kv_passes_within_a_generation_only():
    fleet = fleet_of(*(worker(name) for name in ("d", "e")), worker("p", Role.PREFILL), worker("q", Role.PREFILL))
    for info in (of_generation(worker("d"), 1), of_generation(worker("p", Role.PREFILL), 1)):
        connects(fleet, info, now=1.0)
    assert [c.worker_id for c in fleet.candidates(domain="1").decode] == ["d"]
    assert [c.worker_id for c in fleet.candidates(domain="0").decode] == ["e"]
    assert {c.worker_id for c in fleet.candidates().decode} == {"d", "e"}, "to prefill it themselves"
    assert fleet.candidates(domain="2").decode == [], "of a worker that is not known yet"
    assert fleet.ready(Role.PREFILL) == 2 and fleet.claims()


def test_prefill_worker_without_decode_generation_is_unusable():
    fleet = fleet_of(worker("d"), worker("p", Role.PREFILL))
    connects(fleet, of_generation(worker("d"), 1), now=1.0)
    assert fleet.ready(Role.PREFILL) == 0 and not fleet.claims()
    assert fleet.candidates(domain="0").decode == [] and fleet.ready(Role.DECODE) == 1
    connects(fleet, of_generation(worker("p", Role.PREFILL), 1), now=2.0)
    assert fleet.ready(Role.PREFILL) == 1 and [c.worker_id for c in fleet.candidates(domain="1").decode] == ["d"]
    fleet.remove("p")
    fleet.remove("d")
    connects(fleet, worker("d"), now=3.0)
    assert [c.worker_id for c in fleet.candidates(domain="0").decode] == ["d"]


def test_a_prefill_worker_without_a_decode_worker_of_its_place_is_unusable():
    fleet = fleet_of(
        worker("d1", pairs_within="r1"),
        worker("d2", pairs_within="r2"),
        worker("p1", Role.PREFILL, pairs_within="r1"),
        worker("p2", Role.PREFILL, pairs_within="r2"),
    )
    assert fleet.ready(Role.PREFILL) == 2
    assert [c.worker_id for c in fleet.candidates(domain="0:r2").decode] == ["d2"]
    fleet.remove("d2")
    assert fleet.ready(Role.PREFILL) == 1 and fleet.claims()
    assert fleet.candidates(domain="0:r2").decode == []
    fleet.remove("p1")
    assert fleet.ready(Role.PREFILL) == 0 and not fleet.claims()


def test_a_large_fleet_offers_the_best_workers_of_a_domain():
    fleet = crowd(200, lambda i: i, pairs_within=lambda i: f"r{i % 50}")
    assert {c.worker_id for c in fleet.candidates(domain="0:r7").decode} == {"d7", "d57", "d107", "d157"}
    assert fleet.candidates(domain="1").decode == []
    assert len(fleet.candidates().decode) < 20
    index = PrefixIndex()
    for i in range(150):  # many elsewhere have more of it
        index.stored(f"d{i}", [1, 2, 3] if i % 50 else [1])
    index.stored("d7", [1, 2])
    best = {c.worker_id: c.cached_tokens for c in fleet.candidates(hits=index.look_up([1, 2, 3]), domain="0:r0").decode}
    assert best["d0"] == best["d50"] == best["d100"] == 16


@pytest.mark.parametrize("expected", [30, 8, 2], ids=["deeper", "between", "shallower"])
def test_who_has_most_of_a_prompt_comes_first_whether_it_holds_it_or_will(expected):
    index, keys, held = PrefixIndex(expected_step=1), list(range(40)), {"p1": 5, "p2": 10, "p3": 1}
    for name, depth in held.items():
        index.stored(name, keys[:depth])
    index.expected.sent("r", "p3", keys[:expected])
    fleet = fleet_of(worker("d"), *(worker(name, Role.PREFILL) for name in held))
    found = fleet.candidates(hits=index.look_up(keys))
    tokens = sorted((16 * depth for depth in (5, 10, expected)), reverse=True)
    assert list(found.cached_at_prefill.values()) == tokens
    assert found.most_at_prefill == max(tokens)


def test_a_large_fleet_offers_the_best_workers_near_a_prefill_worker():
    places = {"host": lambda i: f"h{i // 8}", "labels": lambda i: (f"rack=r{i // 40}",)}
    fleet = crowd(200, lambda i: 99 if i >= 120 else 50, **places)
    fleet.upsert(worker("p", Role.PREFILL, host="h0", labels=("rack=r0",)), now=0.0)
    assert not {c.worker_id for c in fleet.candidates().decode} & {f"d{i}" for i in range(40)}
    candidates = fleet.candidates(near="p").decode
    links = fleet.places.links("p", candidates)
    assert set(links.values()) == {("host", "rack"), ("rack",), ()} and len(candidates) < 32
    assert all(links[f"d{i}"] == ("host", "rack") for i in range(8) if f"d{i}" in links)


def test_workers_in_one_place_have_no_links_to_tell_apart():
    fleet = fleet_of(worker("d"), worker("p", Role.PREFILL))
    assert fleet.places.links("p", fleet.candidates().decode) == {} and fleet.places.names("p") == ()
    fleet.upsert(worker("e", labels=("rack=r1",)), now=0.0)
    assert fleet.places.names("p") == ("host=h",)
    assert fleet.places.link("p", "e") == ("host",) and fleet.places.link("p", "gone") == ()
    fleet.remove("e")
    assert fleet.places.names("p") == ()


def test_fastest_link_is_that_of_the_workers_that_are_there():
    fleet = fleet_of(worker("a"), worker("b"), worker("p", Role.PREFILL))

    def measured(name, sequence, rate):
        fleet.take_load(msgspec.structs.replace(load(name, sequence, 1), kv=KVCounters(link_bytes_per_s=rate)), now=1.0)
        return fleet.link_bytes_per_s

    assert fleet.link_bytes_per_s == 0
    assert [measured("a", 1, 3e9), measured("p", 1, 9e9), measured("b", 1, 5e9)] == [3e9, 9e9, 9e9]
    assert measured("a", 1, 99e9) == 9e9, "an older report"
    assert measured("p", 2, 4e9) == 5e9, "the fastest WRITE was too long ago"
    fleet.remove("b")
    assert fleet.link_bytes_per_s == 4e9
    fleet.upsert(worker("p", Role.PREFILL, engine_id="restarted"), now=2.0)
    assert fleet.link_bytes_per_s == 3e9
    assert measured("a", 2, 0.0) == 0


def test_a_large_fleet_offers_few_workers_to_a_request_that_avoids_some():
    fleet = crowd(100, lambda i: i, pairs_within=lambda i: f"r{i % 2}")
    found = {c.worker_id for c in fleet.candidates(avoid=["d99"]).decode}
    assert "d98" in found and "d99" not in found and len(found) < 20
    best = [f"d{i}" for i in range(80, 100)]
    assert not {c.worker_id for c in fleet.candidates(avoid=best).decode} & set(best)
    assert all(int(c.worker_id[1:]) % 2 == 0 for c in fleet.candidates(avoid=best, domain="0:r0").decode)
    everywhere = [f"d{i}" for i in range(100)]
    assert [c.worker_id for c in fleet.candidates(avoid=everywhere, domain="0:r1").decode] == ["d1"]


def test_ranks_that_wait_for_a_lost_one_are_quiet():
    """They take no step any more, and may report for long that they live: until their longest steps have passed."""
    fleet = Fleet("f")
    for name in ("a", "a.1", "b"):
        connects(fleet, worker(name, ranks=("a", "a.1") if name != "b" else ()))
        if name == "a":
            assert mark_silent_quiet(fleet, 0.0, 1.0) == [], "the other one is about to join"
        fleet.take_load(WorkerLoad(name, 1, 100, 100, 0, 0, 0, 1.0), 0.0)
    assert mark_silent_quiet(fleet, 0.5, 1.0) == []
    fleet.remove("a.1")
    assert mark_silent_quiet(fleet, 0.6, 1.0) == ["a"] and fleet.ready(Role.DECODE) == 1
    fleet.upsert(worker("a.1", ranks=("a", "a.1")), now=0.7)  # it was only cut off
    assert mark_silent_quiet(fleet, 0.8, 1.0) == []
    assert not fleet.workers["a"].quiet
    for name in ("a.1", "a"):
        fleet.remove(name)
    assert not fleet.broken_units
    assert not fleet._lost_ranks, "all have gone"


def test_a_worker_that_meets_a_defect_keeps_no_other_from_being_seen(monkeypatch):
    fleet = fleet_of(worker("a"), worker("b"), worker("c"))
    for name in "abc":
        fleet.take_load(load(name, 1, free=90), now=1.0)
    assert fleet.ready(Role.DECODE) == 3
    for name in "abc":
        fleet.take_load(load(name, 2, free=80), now=2.0)
    met, usable_as = [], WorkerView.usable_as.fget

    def defective(view):
        return 1 // 0 if view.info.id == "b" and not met.append(view) else usable_as(view)

    monkeypatch.setattr(WorkerView, "usable_as", property(defective))
    for _ in range(2):  # the first may have met it
        with contextlib.suppress(ZeroDivisionError):
            fleet.apply_changes()
    assert len(met) == 1 and {one.worker_id: one.blocks_free for one in fleet.candidates().decode}["a"] == 80
    assert {one.worker_id: one.blocks_free for one in fleet.candidates().decode}["c"] == 80
