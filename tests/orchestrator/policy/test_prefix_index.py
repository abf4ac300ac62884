"""The prefix index: correct and bounded, and correct again after lost events."""

import random
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policy.prefix_index import (
    MANY_RETIRED,
    MAX_KEYS,
    MIN_KEYS,
    MORE_PROBES,
    SWEPT_AT_ONCE,
    PrefixIndex,
)
from orchestrator.types import PrefixEvents


def test_the_deepest_holder_is_found_exactly():
    index = PrefixIndex()
    keys = list(range(100, 1100))
    for depth, name in ((1, "a"), (37, "b"), (999, "c")):
        index.stored(name, keys[:depth])
    found = index.match(keys)
    assert found["c"] == 999 and found["a"] == 1 and 1 <= found["b"] <= 37


def test_slightly_shorter_hit_is_distinguished():
    index = PrefixIndex()
    keys = list(range(750))
    index.stored("prefill", keys[:600])
    index.stored("decode", keys[:630])  # the answer too
    assert index.match(keys) == {"prefill": 600, "decode": 630}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 40))
def test_no_worker_is_credited_with_more_than_it_holds(depths, asked):
    index = PrefixIndex()
    keys = list(range(40))
    for n, depth in enumerate(depths):
        index.stored(f"w{n}", keys[:depth])
    found = index.match(keys[:asked], max_workers=len(depths))
    for n, depth in enumerate(depths):
        assert found.get(f"w{n}", 0) <= min(depth, asked)
    assert max(found.values(), default=0) == min(max(depths), asked)


def test_removal_and_clearing():
    index = PrefixIndex()
    index.apply(PrefixEvents("a", 1, stored=[1, 2, 3]))
    index.apply(PrefixEvents("b", 1, stored=[1]))
    index.apply(PrefixEvents("a", 2, removed=[3]))
    assert index.match([1, 2, 3])["a"] == 2
    index.apply(PrefixEvents("a", 3, cleared=True))
    assert index.match([1, 2, 3]) == {"b": 1}


def test_what_only_host_memory_has_is_held_and_known_as_such():
    index, keys = PrefixIndex(), [1, 2, 3, 4]
    index.apply(PrefixEvents("a", 1, stored=keys))
    index.apply(PrefixEvents("b", 1, stored=keys))
    index.apply(PrefixEvents("a", 2, hosted=[3, 4]))
    assert index.match(keys) == {"a": 4, "b": 4}
    assert [index.blocks_on_device(name, keys, 4) for name in ("a", "b", "unknown")] == [2, 4, 4]
    assert index.blocks_on_device("a", keys, 1) == 1
    index.apply(PrefixEvents("a", 3, stored=[3]))
    assert index.blocks_on_device("a", keys, 4) == 3, "it was loaded"
    index.apply(PrefixEvents("a", 4, removed=[4]))
    index.apply(PrefixEvents("a", 5, stored=[4]))
    assert index.blocks_on_device("a", keys, 4) == 4, "computed anew"
    index.apply(PrefixEvents("a", 6, hosted=[1, 2, 3, 4]))
    index.apply(PrefixEvents("a", 7, cleared=True))
    index.apply(PrefixEvents("a", 8, stored=keys))
    assert index.blocks_on_device("a", keys, 4) == 4


def test_as_many_keys_are_remembered_as_workers_have_blocks_within_bounds():
    index = PrefixIndex()
    for blocks, kept in ((0, MIN_KEYS), (3_000_000, 3_000_000), (10**9, MAX_KEYS)):
        index.make_room(blocks)
        assert index.max_keys == kept
    index.make_room(0)
    index.hosted("a", range(MIN_KEYS + 10))
    assert len(index) <= MIN_KEYS
    assert index.blocks_on_device("a", range(MIN_KEYS + 10), 5) == 5, "what is forgotten is not hosted"
    index.removed("a", range(MIN_KEYS + 10))
    assert not index._holders and not index._hosted, "nothing is left of what nobody holds"


def test_a_replayed_batch_changes_nothing():
    index = PrefixIndex()
    index.apply(PrefixEvents("a", 5, stored=[1]))
    index.apply(PrefixEvents("a", 6, removed=[1]))
    assert index.apply(PrefixEvents("a", 5, stored=[1]))
    assert index.match([1]) == {}


def test_lost_events_clear_worker_until_resync():
    index = PrefixIndex()
    index.apply(PrefixEvents("a", 1, stored=[1, 2]))
    assert not index.apply(PrefixEvents("a", 3, stored=[7]))  # batch 2 said that 1 and 2 were removed
    assert index.match([1, 2]) == {} and index.match([7]) == {"a": 1}
    index.resync("a", 9, [1, 7])
    assert index.match([1, 2]) == {"a": 1}
    assert index.apply(PrefixEvents("a", 10, stored=[2]))


def test_eviction_gives_no_false_hit():
    index = PrefixIndex(max_keys=100)
    for start in range(0, 1000, 10):
        index.stored("a", range(start, start + 10))
    assert 90 <= len(index) <= 100
    assert index.match(list(range(10))) == {} and index.match(list(range(990, 1000))) == {"a": 10}


def test_removed_workers_leave_nothing_behind():
    index = PrefixIndex()
    for n in range(1000):
        index.stored(f"w{n}", [1, 2])
        index.forget(f"w{n}")
    index.stored("last", [1])
    assert index.match([1, 2]) == {"last": 1}
    assert max(mask.bit_length() for mask in index._holders.values()) <= 130


def test_bits_of_workers_that_are_gone_are_cleared_little_by_little():
    """Of a large fleet's ten million keys all at once would hold up a frontend for seconds."""
    index, rng = PrefixIndex(), random.Random(1)
    cached: dict[str, set[int]] = {}
    for step in range(3 * MANY_RETIRED):
        if len(cached) > 5:
            index.forget(gone := rng.choice(sorted(cached)))
            del cached[gone]
        keys = [rng.randrange(20_000) for _ in range(300)]
        cached[name := f"w{step}"] = set(keys)
        before = len(index._unswept)
        (index.stored if step % 2 else index.hosted)(name, keys)
        assert len(index._unswept) >= before - 2 * SWEPT_AT_ONCE
        removed = rng.sample(keys, 20)
        index.removed(name, removed)
        cached[name] -= set(removed)
        for key in rng.sample(range(20_000), 200):
            assert index.match([key]).keys() == {name for name, keys in cached.items() if key in keys}
    assert max(index.bits.values()) < 2.5 * MANY_RETIRED, "they are used again"


def test_look_up_cost_is_bounded():
    index = PrefixIndex()
    keys = list(range(8192))
    for n in range(200):
        index.stored(f"w{n}", keys[: 40 * n + 1])

    class Counted(dict):
        probes = 0

        def get(self, key, default=None):
            Counted.probes += 1
            return super().get(key, default)

    index._holders = Counted(index._holders)
    found = dict(islice(index.look_up(keys).longest(), 4))
    assert Counted.probes <= 1 + 14 + MORE_PROBES
    assert found["w199"] == 40 * 199 + 1  # the deepest is found exactly, however many there are
    assert all(depth <= 40 * int(name[1:]) + 1 for name, depth in found.items())


def by_sets(depths: dict[str, int], asked: int) -> dict[str, int]:
    """The rule of a look-up, in sets of workers and numbers of blocks."""
    found: dict[str, int] = {}
    parts = [(1, asked, {name for name, depth in depths.items() if depth})]
    probes = asked.bit_length() + MORE_PROBES
    while parts:
        least, most, those = parts.pop()
        while those and least < most and probes:
            middle, probes = (least + most + 1) // 2, probes - 1
            deeper = {name for name in those if depths[name] >= middle}
            if not deeper:
                most = middle - 1
                continue
            if deeper != those:
                parts.append((least, middle - 1, those - deeper))
            least, those = middle, deeper
        found |= dict.fromkeys(those, least)
    return found


@given(st.lists(st.integers(0, 900), min_size=1, max_size=30), st.integers(1, 900))
def test_a_look_up_finds_what_its_rule_says(depths, asked):
    index, keys = PrefixIndex(), list(range(900))
    for n, depth in enumerate(depths):
        index.stored(f"w{n}", keys[:depth])
    expected = by_sets({f"w{n}": depth for n, depth in enumerate(depths)}, asked)
    hits = index.look_up(keys[:asked])
    assert hits.blocks_of([f"w{n}" for n in range(len(depths))]) == expected == index.match(keys[:asked], 30)
    assert hits.longest_hits_by_kind(30, expected, [], 16)[0] == {
        name: 16 * blocks for name, blocks in expected.items()
    }
    found = [blocks for _, blocks in hits.longest()]
    assert found == sorted(found, reverse=True)


def test_workers_of_the_wanted_kind_are_found_among_others():
    index = PrefixIndex()
    for n in range(20):
        index.stored(f"p{n}", [1, 2, 3])
    index.stored("d", [1, 2])
    hits = index.look_up([1, 2, 3])
    prefill, decode = hits.longest_hits_by_kind(4, {f"p{n}" for n in range(10)}, {"d", "d2"})
    assert decode == {"d": 2} and len(prefill) == 4 and set(prefill.values()) == {3}
    assert all(int(name[1:]) < 10 for name in prefill)
    assert hits.longest_hits_by_kind(4, {"d"}, set()) == ({"d": 2}, {})
    assert hits.blocks("d") == 2 and hits.blocks("p7") == 3 and hits.blocks("unknown") == 0
    assert not index.look_up([9]) and not index.look_up([])


def test_equal_holders_take_turns():
    index = PrefixIndex()
    for n in range(100):
        index.stored(f"w{n}", [1])
    seen = set()
    for _ in range(100):
        seen |= dict(islice(index.look_up([1]).longest(), 2)).keys()
    assert len(seen) == 100


def test_expected_prefix_counts_until_settled():
    index = PrefixIndex(expected_step=4)
    keys = list(range(40))
    index.stored("a", keys[:10])
    index.stored("b", keys[:3])
    index.expected.sent("r", "b", keys[:30])
    assert index.match(keys) == {"b": 28, "a": 10}  # every fourth key is remembered
    assert index.match(keys[:3]) == {"a": 3, "b": 3}
    index.expected.settled("r")
    assert index.match(keys) == {"a": 10, "b": 3}
    assert not index.expected


def test_prefix_is_expected_until_all_its_prompts_are_settled():
    index = PrefixIndex(expected_step=1)
    keys = list(range(10))
    for worker_id in ("a", "b"):
        index.stored(worker_id, [999])
    index.expected.sent("first", "a", keys[:6])
    index.expected.sent("second", "b", [*keys[:4], 77])
    assert index.match(keys) == {"a": 6}
    assert index.match(keys[:4]) == {"b": 4}  # where it was sent last
    index.expected.settled("first")
    assert index.match(keys) == {"b": 4}
    index.expected.sent("second", "a", keys[:2])  # another attempt
    assert index.match(keys) == {"a": 2}
    index.expected.settled("second")
    assert index.match(keys) == {} and index.match([999]) == {"a": 1, "b": 1}


def test_nothing_is_expected_of_gone_worker():
    index = PrefixIndex(expected_step=1)
    index.stored("a", [1])
    index.expected.sent("r", "a", [1, 2, 3])
    index.forget("a")
    assert index.match([1, 2, 3]) == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=12), st.integers(1, 40))
def test_expected_prefixes_are_those_of_unsettled_prompts(prompts, asked):
    index, keys = PrefixIndex(expected_step=1), list(range(40))
    for n in range(4):
        index.stored(f"w{n}", [1000 + n])
    for number, (worker, depth, _) in enumerate(prompts):
        index.expected.sent(f"r{number}", f"w{worker}", keys[:depth])
    for number, (_, _, settled) in enumerate(prompts):
        if settled:
            index.expected.settled(f"r{number}")
    deepest = max((depth for _, depth, settled in prompts if not settled), default=0)
    found = index.match(keys[:asked])
    assert list(found.values()) == [min(deepest, asked)] * bool(deepest)
