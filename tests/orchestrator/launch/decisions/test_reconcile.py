"""What the launcher does about the difference between desired and running workers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_redis import worker

from orchestrator.launch.decisions import reconcile
from orchestrator.launch.decisions.reconcile import Action, Drain, Flip, Start, decide, has_decoded, plan, stand_in
from orchestrator.store.fields import WorkerOrders
from orchestrator.store.planned import PlannedWorker, is_last_decode, planned_worker
from orchestrator.types import DesiredRatio, Role, WorkerState

P, D = Role.PREFILL, Role.DECODE
counts = st.integers(0, 5)


def seen(*names: str, ready: bool = True, owned: bool = True, leaving: bool = False) -> list[PlannedWorker]:
    """ "p0" is prefill-0. Those that are not ours were started by hand."""
    roles = {"p": P, "d": D}
    return [
        PlannedWorker(f"{roles[n[0]].value}-{n[1:]}", roles[n[0]], ready, leaving, owned, managed=owned) for n in names
    ]


def do(prefill: int, decode: int, workers: list[PlannedWorker]) -> list[Action]:
    return plan(DesiredRatio(prefill, decode), workers)


def test_desired_ratio_needs_no_action():
    assert do(1, 2, seen("p0", "d0", "d1")) == []


def test_a_worker_that_waits_for_room_goes_before_one_that_serves():
    waiting = msgspec.structs.replace(seen("p1", ready=False)[0], placed=False)
    workers = [*seen("p0", "d0"), waiting]
    assert do(2, 1, workers) == [], "it is wanted"
    assert do(1, 2, workers) == [Drain("prefill-1"), Start(D)], "prefill-0 serves, and is not flipped"
    assert do(1, 1, workers) == [Drain("prefill-1")]
    elsewhere = msgspec.structs.replace(waiting, owned=False)
    assert do(1, 2, [*seen("p0", "d0"), elsewhere]) == [Start(D)], "its own launcher gives it up"


def test_a_stand_in_comes_first_in_a_fleet_that_has_decoded_and_is_to_decode():
    workers = [*seen("p0", "p1"), *seen("d0", ready=False)]
    flip = Flip("prefill-1", D, stands_in=True)
    assert decide(DesiredRatio(2, 1), workers, decoded=True) == [flip]
    assert decide(DesiredRatio(2, 1), workers, decoded=False) == do(2, 1, workers) == []
    assert decide(DesiredRatio(2, 0), workers, decoded=True) == do(2, 0, workers) == [Drain("decode-0")]
    assert decide(DesiredRatio(1, 1), seen("p0", "d0"), decoded=True) == []
    assert has_decoded(seen("p0", "d0")) and not has_decoded(workers)


def test_an_empty_machine_gets_processes():
    assert sorted(do(1, 2, []), key=repr) == [Start(D), Start(D), Start(P)]


def test_roles_are_flipped_before_anything_is_started_or_drained():
    assert do(2, 1, seen("p0", "d0", "d1")) == [Flip("decode-1", P)]
    assert do(1, 2, seen("p0", "p1", "d0")) == [Flip("prefill-1", D)]


def test_a_worker_that_stood_in_returns_to_the_role_that_it_was_started_as():
    """A role may have engine arguments, and ranks, of its own: the newer worker, which has those for decode, stays."""
    stood_in = msgspec.structs.replace(seen("d0")[0], started_as=P)
    back = msgspec.structs.replace(seen("d1")[0], started_as=D)
    assert do(1, 1, [stood_in, msgspec.structs.replace(back, ready=False)]) == [], "until the other is ready"
    assert do(1, 1, [stood_in, back]) == [Flip("decode-0", P)]
    assert do(1, 1, [msgspec.structs.replace(stood_in, fixed=True), back]) == [Flip("decode-1", P)]


def test_a_difference_of_both_kinds_flips_and_then_starts_or_drains():
    assert do(3, 1, seen("p0", "d0", "d1")) == [Flip("decode-1", P), Start(P)]
    assert do(1, 1, seen("p0", "p1", "p2", "d0", "d1")) == [Drain("prefill-2"), Drain("prefill-1"), Drain("decode-1")]
    assert do(0, 2, seen("p0", "p1", "d0")) == [Flip("prefill-1", D), Drain("prefill-0")]


def test_one_that_serves_is_not_drained_while_one_of_the_other_role_loads():
    there = [*seen("p0", "p1", "d0", "d1"), *seen("d2", ready=False)]
    assert do(2, 3, there) == [], "it is awaited"
    assert do(1, 3, there) == [Flip("prefill-1", D), Drain("decode-2")]
    assert do(1, 2, there) == [Drain("decode-2"), Drain("prefill-1")]
    assert do(1, 2, [*there, *seen("d3", ready=False)]) == [Drain("decode-3"), Drain("decode-2"), Drain("prefill-1")]
    assert do(1, 3, [*there, *seen("d3", ready=False)]) == [Drain("decode-3"), Flip("prefill-1", D), Drain("decode-2")]
    fixed = [msgspec.structs.replace(worker, fixed=True) for worker in there]
    assert do(1, 3, fixed) == [Drain("prefill-1")], "it could not take its place"
    elsewhere = [*there[:4], msgspec.structs.replace(there[4], owned=False)]
    assert do(1, 3, elsewhere) == [Flip("prefill-1", D)], "its own launcher gives it up"
    by_hand = [*there[:4], msgspec.structs.replace(there[4], owned=False, managed=False)]
    assert do(1, 3, by_hand) == [Drain("prefill-1")]
    told = [*there[:1], msgspec.structs.replace(there[1], role=D, ready=False, flipping=True), *there[2:]]
    assert do(1, 3, told) == [Drain("decode-2")], "the one that takes its place stays"


def test_last_ready_decode_worker_stays_until_another_is_ready():
    swapping = [*seen("d0"), *seen("d1", ready=False)]
    assert do(1, 1, swapping) == []
    assert do(1, 1, seen("d0", "d1")) == [Flip("decode-1", P)]
    assert do(0, 1, swapping) == [Drain("decode-1")]


def test_last_ready_prefill_worker_stays_until_another_is_ready():
    loading = seen("p1", ready=False)
    assert do(1, 2, [*seen("p0", "d0"), *loading]) == [], "prefill-1 is not there yet"
    assert do(1, 2, seen("p0", "p1", "d0")) == [Flip("prefill-1", D)]
    assert do(1, 1, [*seen("p0", "d0"), *loading]) == [Drain("prefill-1")]
    assert do(0, 2, [*seen("p0", "d0")]) == [Flip("prefill-0", D)], "none is wanted"


def test_everything_may_go_when_no_decode_worker_is_desired():
    assert do(1, 0, seen("d0")) == [Flip("decode-0", P)]
    assert do(0, 0, seen("d0")) == [Drain("decode-0")]


def test_workers_that_load_are_counted_but_cannot_change_role():
    assert do(2, 1, seen("p0", "d0", "d1", ready=False)) == []


def test_a_worker_that_has_yet_to_change_its_role_keeps_it_before_another_changes():
    told = msgspec.structs.replace(seen("p1", ready=False)[0], flipping=True)  # serves as a decode worker until then
    assert do(2, 2, [*seen("p0", "d0", "d1"), told]) == []
    assert do(1, 3, [*seen("p0", "d0", "d1"), told]) == [Flip("prefill-1", D)]


def test_leaving_workers_do_not_count():
    assert do(1, 1, [*seen("p0", "d0"), *seen("p1", leaving=True)]) == []
    assert do(1, 1, [*seen("d0"), *seen("p0", leaving=True)]) == [Start(P)]


def test_workers_started_by_hand_count_and_flip_but_are_never_drained():
    foreign = seen("p7", "d7", "d8", owned=False)
    assert do(1, 1, foreign) == []
    assert do(2, 1, foreign) == [Flip("decode-8", P)]
    assert do(1, 1, [*foreign, *seen("d0")]) == []
    assert do(1, 1, [*foreign, *seen("d0", "d1")]) == [Drain("decode-1")]


def test_the_last_decode_worker_is_recognised():
    workers = [*seen("d0"), *seen("d1", ready=False), *seen("p0")]
    assert is_last_decode("decode-0", workers)
    assert not is_last_decode("decode-1", workers) and not is_last_decode("prefill-0", workers)
    assert not is_last_decode("decode-0", seen("d0", "d1"))


def views(owners: list[tuple[Role, str]]) -> dict[str, list[PlannedWorker]]:
    """What each of two launchers sees of the same workers; those of "hand" are nobody's."""
    return {
        launcher: [
            PlannedWorker(f"{role.value}-{n}", role, True, False, owned=owner == launcher, managed=owner != "hand")
            for n, (role, owner) in enumerate(owners)
        ]
        for launcher in ("a", "b")
    }


def test_only_one_of_two_launchers_drains_surplus():
    seen_by = views([(P, "a"), (P, "b"), (P, "a"), (P, "b"), (D, "a")])
    assert do(3, 1, seen_by["a"]) == []
    assert do(3, 1, seen_by["b"]) == [Drain("prefill-3")]


@given(st.lists(st.tuples(st.sampled_from([P, D]), st.sampled_from(["a", "b", "hand"])), max_size=8), counts, counts)
def test_two_launchers_make_same_plan(owners, prefill, decode):
    seen_by = views(owners)
    plans = {launcher: do(prefill, decode, seen_by[launcher]) for launcher in seen_by}
    flips = {launcher: [a for a in plans[launcher] if isinstance(a, Flip)] for launcher in plans}
    assert flips["a"] == flips["b"]
    assert stand_in(seen_by["a"]) == stand_in(seen_by["b"])
    alone = [msgspec.structs.replace(w, owned=w.managed) for w in seen_by["a"]]
    drained = sorted(a.worker_id for actions in plans.values() for a in actions if isinstance(a, Drain))
    assert drained == sorted(a.worker_id for a in do(prefill, decode, alone) if isinstance(a, Drain))


def test_a_worker_that_cannot_change_its_role_is_left_out_of_role_changes():
    fixed = [PlannedWorker("prefill-8", P, True, fixed=True)]
    assert do(1, 2, [*seen("p0", "d0"), *fixed]) == [Flip("prefill-0", D)]
    assert do(0, 2, [*seen("d0"), *fixed]) == [Start(D), Drain("prefill-8")]
    assert do(1, 2, [*seen("p0", ready=False), *seen("d0"), *fixed]) == []  # until prefill-0 is ready


def test_without_a_ready_decode_worker_a_prefill_worker_takes_the_role():
    dead = seen("d0", "d1", ready=False)
    assert stand_in([*seen("p0", "p1"), *dead]) == Flip("prefill-1", D, stands_in=True)
    assert stand_in([*seen("p0", owned=False)]) == Flip("prefill-0", D, stands_in=True), "one started by hand too"
    assert stand_in([*seen("p0", "d0"), *seen("d1", ready=False)]) is None
    assert stand_in([*seen("p0"), *seen("d0", leaving=True)]) == Flip("prefill-0", D, stands_in=True)
    assert stand_in([*seen("p0", ready=False), *seen("p1", leaving=True), *dead]) is None, "nobody could"
    assert stand_in([PlannedWorker("prefill-8", P, True, fixed=True), *dead]) is None


def test_one_stand_in_is_enough():
    becoming = PlannedWorker("prefill-1", D, False, flipping=True)
    assert stand_in([*seen("p0"), becoming, *seen("d0", ready=False)]) is None


def test_flipping_stand_in_is_not_called_back():
    """decode-1 loads, and a launcher that died still claims the others: they count, and would make a prefill worker of
    the one that is about to decode, again and again."""
    becoming = PlannedWorker("prefill-1", D, False, flipping=True)
    claimed = [msgspec.structs.replace(w, owned=False) for w in seen("p0", "d0", ready=False)]
    workers = [becoming, *seen("d1", ready=False), *claimed]
    assert stand_in(workers) is None and do(2, 2, workers) == []
    assert do(2, 2, [becoming, *seen("d1"), *claimed]) == [Flip("prefill-1", P)], "another decodes: it need not move"


def test_flipping_decode_worker_is_called_back():
    leaving_the_role = PlannedWorker("decode-0", P, False, flipping=True)
    assert stand_in([*seen("p0"), leaving_the_role, *seen("d1", ready=False)]) == Flip("decode-0", D, stands_in=True)
    info = worker("decode-0", D)
    assert planned_worker(info, WorkerOrders(P), owned=True).flipping, "until its entry has the role"
    assert not planned_worker(info, WorkerOrders(D), owned=True).flipping


def test_a_worker_that_drains_leaves_whichever_role_it_is_told_to_take():
    draining = msgspec.structs.replace(worker("decode-0", D), state=WorkerState.DRAINING)
    for orders in (None, WorkerOrders(P)):
        told = planned_worker(draining, orders, owned=True)
        assert (told.leaving, told.ready, told.flipping) == (True, False, False)


def test_a_worker_that_restarts_is_neither_ready_nor_leaving():
    """No other is started in its place: it comes back under its name."""
    draining = msgspec.structs.replace(worker("prefill-0", P), state=WorkerState.DRAINING)
    seen_so = planned_worker(draining, WorkerOrders(restart=True), owned=True)
    assert (seen_so.ready, seen_so.leaving) == (False, False)
    assert do(1, 1, [seen_so, *seen("d0")]) == []
    assert planned_worker(draining, WorkerOrders(drain=True, restart=True), owned=True).leaving, "a drain goes before"


def test_the_stand_in_goes_back_once_others_decode_again():
    stood_in = [*seen("p0"), PlannedWorker("prefill-1", D, True)]
    assert do(2, 2, [*stood_in, *seen("d0", "d1", ready=False)]) == [], "they are being started again"
    assert do(2, 2, [*stood_in, *seen("d0"), *seen("d1", ready=False)]) == [Flip("prefill-1", P)]


fleets = st.lists(
    st.tuples(st.sampled_from([P, D]), st.booleans(), st.booleans(), st.booleans(), st.booleans()), max_size=8
).map(lambda rows: [PlannedWorker(f"w-{i}", *row, managed=row[3]) for i, row in enumerate(rows)])


def carry_out(actions: list[Action], workers: list[PlannedWorker]) -> list[PlannedWorker]:
    """The world after every action has come to its end, and every worker that loaded is ready."""
    after = {w.id: w for w in workers if not w.leaving}
    for action in actions:
        match action:
            case Start(role):
                after[name] = PlannedWorker(name := f"new-{len(after)}-{len(workers)}", role, True)
            case Flip(worker_id, role):
                assert not after[worker_id].fixed
                after[worker_id] = msgspec.structs.replace(after[worker_id], role=role)
            case Drain(worker_id):
                del after[worker_id]
    return [msgspec.structs.replace(w, ready=True, leaving=False) for w in after.values()]


@given(fleets, counts, counts)
def test_plan_keeps_last_decode_worker_and_foreign_workers(workers, prefill, decode):
    actions = do(prefill, decode, workers)
    owned = {w.id for w in workers if w.owned}
    assert all(action.worker_id in owned for action in actions if isinstance(action, Drain))
    touched = {a.worker_id for a in actions if not isinstance(a, Start)}
    assert len(touched) == sum(not isinstance(a, Start) for a in actions), "no worker is told two things"
    ready = {w.id for w in workers if w.role is D and w.ready and not w.leaving}
    if ready and decode:
        assert ready - touched


@given(fleets, counts, st.integers(1, 5))
def test_plans_end_at_the_desired_ratio(workers, prefill, decode):
    for _ in range(10):
        workers = carry_out([], workers)
        actions = do(prefill, decode, workers)
        if not actions:
            break
        workers = carry_out(actions, workers)
    else:
        pytest.fail(f"still {actions}")
    for role, wanted in ((P, prefill), (D, decode)):
        have = [w for w in workers if w.role is role]
        assert len(have) >= wanted
        assert sum(w.owned for w in have) <= wanted or len(have) == wanted


@pytest.mark.parametrize("desired", [(0, 1), (1, 0), (1, 1), (0, 240)])
def test_a_plan_for_a_large_fleet_looks_at_each_worker_a_few_times(desired, monkeypatch):
    """The launcher plans on its event loop: a plan of a minute's work would cost it its id, and so never be done."""
    looks = 0

    def counted(worker_id: str) -> tuple[int, str]:
        nonlocal looks
        looks += 1
        return age_order(worker_id)

    age_order = reconcile._age_order
    monkeypatch.setattr(reconcile, "_age_order", counted)
    each = 120
    do(*desired, seen(*(f"p{n}" for n in range(each)), *(f"d{n}" for n in range(each))))
    assert looks <= 8 * 2 * each
