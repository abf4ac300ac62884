"""Who is replaced next: never more than may be away, both roles at the same pace."""

from collections.abc import Collection

import msgspec
from support_redis import worker

from orchestrator.launch.decisions.replacement import MissingByHand, to_replace
from orchestrator.types import Role, WorkerInfo, WorkerState


def fleet(prefill: int, decode: int) -> dict[str, WorkerInfo]:
    infos = [worker(f"prefill-{n}", Role.PREFILL) for n in range(prefill)]
    infos += [worker(f"decode-{n}", Role.DECODE) for n in range(decode)]
    return {info.id: info for info in infos}


def choose(workers: dict[str, WorkerInfo], busy: Collection[str], loading: int, max_unavailable: int) -> list[str]:
    old = [name for name, info in workers.items() if info.generation == 0]
    return to_replace(workers, old, busy, loading, max_unavailable)


def renew(workers: dict[str, WorkerInfo], worker_id: str) -> None:
    workers[worker_id] = msgspec.structs.replace(workers[worker_id], generation=1)


def test_roles_are_replaced_at_the_same_pace_and_decode_first():
    workers, order = fleet(2, 4), []
    while any(info.generation == 0 for info in workers.values()):
        [chosen] = choose(workers, (), 0, max_unavailable=1)
        order.append(chosen)
        renew(workers, chosen)
    assert order == ["decode-0", "prefill-0", "decode-1", "decode-2", "prefill-1", "decode-3"]


def test_missing_workers_count_as_unavailable():
    workers = fleet(2, 2)
    assert len(choose(workers, (), 0, max_unavailable=2)) == 2
    assert choose(workers, {"decode-1"}, 0, max_unavailable=1) == [], "it has orders"
    assert choose(workers, (), 1, max_unavailable=1) == [], "one loads"
    workers["prefill-0"] = msgspec.structs.replace(workers["prefill-0"], state=WorkerState.DRAINING)
    assert choose(workers, (), 0, max_unavailable=1) == []
    assert choose(workers, (), 0, max_unavailable=2) == ["decode-0"]


def test_max_unavailable_above_fleet_size_keeps_one_serving():
    assert sorted(choose(fleet(1, 2), (), 0, max_unavailable=9)) == ["decode-0", "prefill-0"]
    assert choose(fleet(0, 2), {"decode-0"}, 0, max_unavailable=9) == []
    assert choose(fleet(0, 1), (), 1, max_unavailable=9) == [], "another one loads"
    assert choose(fleet(0, 1), (), 0, max_unavailable=9) == ["decode-0"], "there is no other"


def test_only_the_old_ones_are_restarted():
    """Of a restart of one role: the others count as serving."""
    workers = fleet(2, 2)
    assert to_replace(workers, ["decode-1", "decode-0"], (), 0, max_unavailable=9) == ["decode-0", "decode-1"]
    assert to_replace(workers, [], (), 0, max_unavailable=9) == []


def test_unrestarted_workers_count_as_missing():
    by_hand = MissingByHand()
    assert by_hand.missing({"a", "b", "c"}, (), ()) == 0
    assert by_hand.missing({"b", "c"}, (), ()) == 1, "a has ended"
    assert by_hand.missing({"b", "c"}, (), {"a-2"}) == 0, "it is back, and counts as one that loads"
    assert by_hand.missing({"b", "c", "a-2"}, {"b"}, ()) == 0
    assert by_hand.missing({"c", "a-2"}, (), ()) == 0, "b was to leave"
    assert by_hand.missing({"a-2"}, (), ()) == 1
    assert by_hand.missing({"a-2", "c", "d"}, (), ()) == 0
    assert by_hand.missing({"a-2", "c"}, (), ()) == 1, "of those that came meanwhile too"
