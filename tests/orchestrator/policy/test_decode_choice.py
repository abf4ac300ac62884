"""The named decode-choice policies."""

import pytest

from orchestrator.policy.decode_choice import Candidate, decode_choice
from orchestrator.types import RequestInfo

REQUEST = RequestInfo(id="r", prompt_tokens=1600, max_new_tokens=160, arrived_at=0.0)


def worker(name: str, free: int, total: int = 1000, running: int = 0, waiting_tokens: int = 0) -> Candidate:
    return Candidate(name, total, free, 16, running=running, waiting=0, waiting_tokens=waiting_tokens, max_num_seqs=64)


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
    assert choose(REQUEST, [worker("a", 10), worker("b", 50)]).worker_id == "b"  # both would: least bad


def test_kv_blocks_rotates_over_ties():
    choose = decode_choice("kv_blocks")
    workers = [worker(name, 1000) for name in "abc"]
    assert sorted(choose(REQUEST, workers).worker_id for _ in range(6)) == list("aabbcc")


def test_nothing_to_choose_from():
    assert decode_choice("kv_blocks")(REQUEST, []) is None


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"kv_blocks.*'best'"):
        decode_choice("best")
