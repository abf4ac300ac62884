"""Who has which adapter: reports, corrected by what was sent since."""

import msgspec
from support_info import connects, fleet_of
from support_info import worker_info as worker

from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import EXPECTED_S
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.predict.adapters import PRIOR_LOAD_S, AdapterDemand
from orchestrator.types import Role, WorkerInfo, WorkerLoad

LOAD_S, REST_S = 0.5, 3.0


def with_slots(name: str, role: Role = Role.DECODE, slots: int = 1) -> WorkerInfo:
    return msgspec.structs.replace(worker(name, role), adapter_slots=slots)


def load(name: str, sequence: int, adapters: dict[int, int], seen: int = 0, load_s: float = 0.0) -> WorkerLoad:
    said = WorkerLoad(name, sequence, 100, 90, 1, 0, 0, 1.0, seen={"f": seen}, adapters=adapters)
    return msgspec.structs.replace(said, adapter_load_s=load_s)


def spent_s(fleet: Fleet, name: str, adapter: int) -> float:
    fleet.apply_changes()
    return fleet.adapters.places[Role.DECODE].spent_s(name, adapter, LOAD_S, REST_S, AdapterDemand())


def holders(fleet: Fleet, adapter: int) -> list[str] | None:
    fleet.apply_changes()
    return fleet.adapters.places[Role.PREFILL].holders(adapter)


def test_what_was_sent_counts_until_a_report_has_seen_it():
    fleet = fleet_of(with_slots("d"))
    fleet.take_load(load("d", 1, {}), now=1.0)
    assert spent_s(fleet, "d", 7) == LOAD_S
    sequence = fleet.workers["d"].note_placed(100, 100)
    fleet.note_adapter("d", 7, 1.0, sequence)
    assert spent_s(fleet, "d", 7) == 0.0 and spent_s(fleet, "d", 8) == LOAD_S + REST_S
    fleet.take_load(load("d", 2, {}), now=1.1)  # from before it came
    assert spent_s(fleet, "d", 7) == 0.0
    fleet.take_load(load("d", 3, {7: 2}, seen=sequence), now=1.2)
    assert spent_s(fleet, "d", 8) == LOAD_S + 2 * REST_S
    fleet.take_load(load("d", 2, {9: 1}), now=1.3)  # an older report
    assert spent_s(fleet, "d", 7) == 0.0
    fleet.take_load(load("d", 4, {7: 0}, seen=sequence), now=1.4)
    assert spent_s(fleet, "d", 8) == LOAD_S  # it was asked for by nobody known: no dearer


def test_what_a_prefill_worker_claims_is_expected_there_for_a_time():
    fleet = fleet_of(with_slots("p", Role.PREFILL, 2), with_slots("d"))
    for name in ("p", "d"):
        fleet.take_load(load(name, 1, {}), now=1.0)
    assert holders(fleet, 7) is None
    fleet.note_adapter("p", 7, 1.0)
    assert holders(fleet, 7) == ["p"]
    fleet.take_load(load("p", 2, {}), now=1.1)  # not in its engine yet
    assert holders(fleet, 7) == ["p"]
    fleet.take_load(load("p", 3, {7: 1}), now=1.2)
    fleet.take_load(load("p", 4, {8: 1}), now=1.3)
    assert holders(fleet, 7) is None and holders(fleet, 8) == ["p"]
    fleet.note_adapter("p", 7, 1.3)  # and it lost its claim, or went elsewhere
    fleet.take_load(load("p", 5, {8: 1}), now=1.4 + EXPECTED_S)
    assert holders(fleet, 7) is None


def test_a_worker_that_is_gone_quiet_or_new_or_of_another_role_has_nothing():
    fleet = fleet_of(with_slots("p", Role.PREFILL))
    fleet.take_load(load("p", 1, {7: 0}), now=1.0)
    assert holders(fleet, 7) == ["p"]
    fleet.workers["p"].mark_quiet()
    assert holders(fleet, 7) is None
    fleet.workers["p"].mark_quiet(False)
    assert holders(fleet, 7) == ["p"]
    fleet.upsert(msgspec.structs.replace(fleet.workers["p"].info, role=Role.DECODE), 1.0)
    assert holders(fleet, 7) is None and spent_s(fleet, "p", 7) == 0.0 < spent_s(fleet, "p", 8)
    fleet.remove("p")
    assert spent_s(fleet, "p", 8) == 0.0 and not fleet.adapters._sent


def test_load_times_are_those_that_workers_measure():
    fleet = fleet_of(with_slots("d"), with_slots("e"))
    assert fleet.adapters.load_s == PRIOR_LOAD_S
    fleet.take_load(load("d", 1, {}), now=1.0)
    assert fleet.adapters.load_s == PRIOR_LOAD_S
    for sequence in range(2, 50):
        fleet.take_load(load("d", sequence, {7: 0}, load_s=2.0), now=1.0)
    assert fleet.adapters.load_s == 2.0
    fleet.take_load(load("e", 1, {7: 0}, load_s=4.0), now=1.0)
    assert fleet.adapters.load_s == 3.0  # one measurement each, however often it is reported


def test_in_a_large_fleet_holders_are_among_the_candidates():
    choice = decode_choice("kv_prefix")
    fleet = Fleet("f", choice.static_score)
    for n in range(100):
        connects(fleet, with_slots(f"d{n}"))
        fleet.take_load(msgspec.structs.replace(load(f"d{n}", 1, {7 if n == 50 else 9: 1}), blocks_free=n), now=1.0)
    assert "d50" not in {c.worker_id for c in fleet.candidates().decode}
    assert "d50" in {c.worker_id for c in fleet.candidates(adapter=7).decode}
