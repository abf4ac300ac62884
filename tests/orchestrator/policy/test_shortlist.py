"""The shortlist holds what the full scan would choose."""

import random

import msgspec

from orchestrator.policy.decode_choice import Candidate, KVBlocks, RequestInfo
from orchestrator.policy.shortlist import Shortlist


def candidate(rng: random.Random, n: int, total: int) -> Candidate:
    return Candidate(f"w{n}", total, rng.randrange(total), 16, running=rng.randrange(64), waiting=rng.randrange(3),
                     waiting_tokens=rng.randrange(4000))  # fmt: skip


def test_the_choice_from_the_shortlist_is_the_choice_from_all():
    rng = random.Random(5)
    policy = KVBlocks(overlap_weight=2.0)
    shortlist = Shortlist(policy.static_score)
    fleet = {}
    for n in range(300):
        fleet[f"w{n}"] = candidate(rng, n, 4096 if n % 3 else 9000)
        shortlist.update(fleet[f"w{n}"])
    for turn in range(500):
        n = rng.randrange(300)
        fleet[f"w{n}"] = candidate(rng, n, fleet[f"w{n}"].blocks_total)
        shortlist.update(fleet[f"w{n}"])
        request = RequestInfo(f"r{turn}", rng.randrange(1, 20_000), 100, 0.0)
        hits = {f"w{rng.randrange(300)}": rng.randrange(request.prompt_tokens) for _ in range(5)}
        few = shortlist.pick(hits)
        assert len(few) <= 2 * 4 + 5
        everyone = [msgspec.structs.replace(c, cached_tokens=hits.get(c.worker_id, 0)) for c in fleet.values()]
        assert policy(request, few).worker_id == policy(request, everyone).worker_id


def test_removed_workers_are_not_offered_and_updates_do_not_pile_up():
    rng = random.Random(1)
    shortlist = Shortlist(KVBlocks().static_score, per_class=5000)
    for turn in range(5000):
        shortlist.update(candidate(rng, turn % 10, 4096))
    assert len(shortlist.pick({})) == len(shortlist) == 10
    for n in range(9):
        shortlist.remove(f"w{n}")
    assert [c.worker_id for c in shortlist.pick({"w3": 16})] == ["w9"]
    assert [c.cached_tokens for c in shortlist.pick({"w9": 16})] == [16]
    shortlist.remove("w9")
    assert shortlist.pick({}) == [] and len(shortlist) == 0


def test_the_best_are_offered_while_one_after_the_other_fills_up_and_empties_again():
    rng = random.Random(3)
    score = KVBlocks().static_score
    shortlist = Shortlist(score)
    fleet = {}
    for n in range(500):
        fleet[f"w{n}"] = candidate(rng, n, 4096)
        shortlist.update(fleet[f"w{n}"])
    for blocks_free in [0] * 600 + [4000] * 600 + [0] * 600:
        best = sorted(fleet.values(), key=lambda c: -score(c))
        assert {score(c) for c in best[:4]} == {score(c) for c in shortlist.pick({})}
        changed = best[0] if not blocks_free else best[-1]
        fleet[changed.worker_id] = msgspec.structs.replace(changed, blocks_free=blocks_free)
        shortlist.update(fleet[changed.worker_id])


def test_the_best_of_each_place_is_offered_too():
    rng = random.Random(2)
    shortlist = Shortlist(KVBlocks().static_score, per_class=2)
    for n in range(60):
        shortlist.update(candidate(rng, n, 4096), (f"rack=r{n % 20}", "zone=a"))
    everywhere = {c.worker_id for c in shortlist.pick({})}
    found = {c.worker_id for c in shortlist.pick({}, ["rack=r7", "rack=none"])}
    assert len(everywhere) == 2 and everywhere <= found and len(found & {"w7", "w27", "w47"}) >= 2
    for n in (7, 27, 47):
        shortlist.update(candidate(rng, n, 4096), ("rack=r8",))
    assert {c.worker_id for c in shortlist.pick({}, ["rack=r7"])} == {c.worker_id for c in shortlist.pick({})}
    for n in range(60):
        shortlist.remove(f"w{n}")
    assert not shortlist._places, "nothing of a place without workers stays"


def test_a_load_report_leaves_what_a_shortlist_made_anew_has():
    """It puts a worker's new entry in the place of the one before, unless the worker's places, pool or group change."""
    rng = random.Random(4)
    score = KVBlocks().static_score
    shortlist, fleet = Shortlist(score), {}
    for turn in range(2000):
        worker_id = f"w{rng.randrange(200)}"
        before = fleet.get(worker_id)
        moves = before is None or rng.random() < 0.05
        total = rng.choice((4_000_000, 9_000_000)) if moves else before[0].blocks_total
        group = rng.choice(("", "g1", "g2")) if moves else before[0].group
        places = (f"rack=r{rng.randrange(3)}", "zone=a")[: rng.randrange(3)] if moves else before[1]
        fleet[worker_id] = Candidate(worker_id, total, rng.randrange(total), 16, 1, 0, 0, group=group), places
        shortlist.update(*fleet[worker_id])
        if rng.random() < 0.05:
            shortlist.remove(gone := rng.choice(sorted(fleet)))
            del fleet[gone]
        if turn % 20 == 0:
            anew = Shortlist(score)
            for candidate, places in fleet.values():
                anew.update(candidate, places)
            for asked in ((), ("rack=r1",), ("rack=r2", "zone=a")):
                hits = dict.fromkeys(rng.sample(sorted(fleet), min(4, len(fleet))), 32)
                found, expected = ({c.worker_id: c for c in it.pick(hits, asked)} for it in (shortlist, anew))
                assert found == expected
    assert len(shortlist) == len(fleet)
