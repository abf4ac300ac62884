"""The named decode-choice policies."""

from collections import Counter

import msgspec
import pytest

from orchestrator.policy.choices.named import POLICY_NAMES, decode_choice, dynamo_bypass, llm_d_bypass
from orchestrator.policy.decode_choice import Candidate, RequestInfo

REQUEST = RequestInfo(id="r", prompt_tokens=1600, max_new_tokens=160, arrived_at=0.0)


def worker(
    name: str,
    free: int,
    total: int = 1000,
    running: int = 0,
    waiting_tokens: int = 0,
    cached: int = 0,
    waiting: int = 0,
):
    return Candidate(name, total, free, 16, running, waiting, waiting_tokens=waiting_tokens, cached_tokens=cached)


def test_kv_blocks_takes_most_free_relative_to_the_pool():
    choose = decode_choice("kv_blocks")
    assert choose(REQUEST, [worker("a", 400), worker("b", 500)]).worker_id == "b"
    assert choose(REQUEST, [worker("big", 600, total=4000), worker("small", 500, total=600)]).worker_id == "small"


def test_kv_blocks_counts_waiting_prompts_and_growth():
    choose = decode_choice("kv_blocks")
    assert choose(REQUEST, [worker("a", 500, waiting_tokens=3200), worker("b", 450)]).worker_id == "b"
    assert choose(REQUEST, [worker("a", 500, running=40), worker("b", 450)]).worker_id == "b"


def test_kv_blocks_avoids_preemption_before_it_balances():
    choose = decode_choice("kv_blocks")
    # b is relatively emptier, but too small for the request: 110 blocks needed
    assert choose(REQUEST, [worker("a", 150, total=2000), worker("b", 100, total=200)]).worker_id == "a"
    assert choose(REQUEST, [worker("b", 100, total=200), worker("a", 150, total=2000)]).worker_id == "a"
    assert choose(REQUEST, [worker("a", 10), worker("b", 50)]).worker_id == "b"  # both would have to preempt


def test_kv_blocks_rotates_over_ties():
    choose = decode_choice("kv_blocks")
    workers = [worker(name, 1000) for name in "abc"]
    assert sorted(choose(REQUEST, workers).worker_id for _ in range(6)) == list("aabbcc")


def test_kv_prefix_prefers_a_hit_but_not_at_any_price():
    choose = decode_choice("kv_prefix")
    assert choose(REQUEST, [worker("a", 500), worker("b", 400, cached=1600)]).worker_id == "b"
    assert choose(REQUEST, [worker("a", 900), worker("b", 400, cached=1600)]).worker_id == "a"
    # a hit does not excuse a preemption
    assert choose(REQUEST, [worker("a", 120), worker("b", 50, cached=1600)]).worker_id == "a"
    assert decode_choice("kv_blocks")(REQUEST, [worker("a", 500), worker("b", 400, cached=1600)]).worker_id == "a"


def test_round_robin_starts_anywhere_and_visits_all():
    workers = [worker(name, 1000) for name in "abcd"]
    starts = {decode_choice("round_robin", seed)(REQUEST, workers).worker_id for seed in range(32)}
    assert len(starts) > 1
    choose = decode_choice("round_robin", 1)
    assert Counter(choose(REQUEST, workers).worker_id for _ in range(8)) == dict.fromkeys("abcd", 2)


def test_least_requests_and_least_tokens_look_at_different_things():
    few_but_long, many_but_short = worker("long", 100, running=2), worker("short", 800, running=30)
    assert decode_choice("least_requests")(REQUEST, [few_but_long, many_but_short]).worker_id == "long"
    assert decode_choice("least_tokens")(REQUEST, [few_but_long, many_but_short]).worker_id == "short"


def test_power_of_two_never_takes_the_fullest_and_spreads():
    workers = [worker(name, 500, running=n) for n, name in enumerate("abcd")]
    choose = decode_choice("power_of_two", 3)
    taken = Counter(choose(REQUEST, workers).worker_id for _ in range(400))
    assert taken["d"] == 0 and taken["a"] > taken["b"] > taken["c"] > 0


def test_dynamo_cost_weighs_overlap_against_blocks_in_use():
    choose = decode_choice("dynamo_cost")
    assert choose(REQUEST, [worker("a", 500), worker("b", 450, cached=1600)]).worker_id == "b"
    assert choose(REQUEST, [worker("a", 500), worker("b", 350, cached=1600)]).worker_id == "a"


def test_llm_d_weighs_cached_share_twice_and_queue_once():
    choose = decode_choice("llm_d")
    half = REQUEST.prompt_tokens // 2
    queues = [worker("short", 500), worker("long", 500, waiting=8)]
    assert choose(REQUEST, queues).worker_id == "short"
    hit = [worker("short", 500), worker("long", 500, waiting=8, cached=half + 16)]
    assert choose(REQUEST, hit).worker_id == "long", "more than half of the prompt outweighs the longest queue"
    less = [worker("short", 500), worker("long", 500, waiting=8, cached=half - 16)]
    assert choose(REQUEST, less).worker_id == "short"
    equal = Counter(choose(REQUEST, [worker("a", 500), worker("b", 10)]).worker_id for _ in range(200))
    assert min(equal["a"], equal["b"]) > 50, "equal queues tell nothing, whatever memory is free"


def test_prefix_hash_sends_same_prefix_to_one_worker_until_overloaded():
    choose = decode_choice("prefix_hash")
    workers = [worker(name, 500, running=4) for name in "abcd"]
    named = {}
    for key in range(100):
        request = msgspec.structs.replace(REQUEST, prefix_key=key)
        named[key] = choose(request, workers).worker_id
        assert choose(request, workers[::-1]).worker_id == named[key]
    counts = Counter(named.values())
    assert set(counts) == set("abcd") and max(counts.values()) < 50
    left = [candidate for candidate in workers if candidate.worker_id != "a"]
    for key, name in named.items():
        if name != "a":  # consistent hashing: only the prompts of the worker that left move
            assert choose(msgspec.structs.replace(REQUEST, prefix_key=key), left).worker_id == name
    busy = msgspec.structs.replace(workers[0], running=6)  # mean 4.75 with the new one; 1.25 times that is less
    mine = next(key for key, name in named.items() if name == "a")
    assert choose(msgspec.structs.replace(REQUEST, prefix_key=mine), [busy, *left]).worker_id != "a"
    at_most = msgspec.structs.replace(workers[0], running=5)
    assert choose(msgspec.structs.replace(REQUEST, prefix_key=mine), [at_most, *left]).worker_id == "a"


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_takes_one_of_the_candidates_or_none(name):
    choose = decode_choice(name)
    assert choose(REQUEST, []) is None
    only = worker("only", 1)
    assert choose(REQUEST, [only]) is only


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"kv_blocks.*'best'"):
        decode_choice("best")


@pytest.mark.parametrize(
    ("prompt", "cached", "stays"),
    [(200, 0, False), (200, 100, True), (10_000, 8_000, True), (10_000, 7_952, False), (1000, 2000, True)],
)
def test_dynamo_bypass_keeps_short_and_mostly_cached_prompts(prompt, cached, stays):
    assert dynamo_bypass(prompt, cached) is stays


@pytest.mark.parametrize(("cached", "stays"), [(984, False), (985, True), (1000, True)])
def test_llm_ds_decider_keeps_a_prompt_with_fewer_than_16_uncached_tokens(cached, stays):
    assert llm_d_bypass(1000, cached) is stays
