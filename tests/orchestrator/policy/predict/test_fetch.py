"""Which prefixes are fetched, from whom, and how long for."""

import msgspec
import pytest

from orchestrator.policy.decode_choice import (
    FIXED_S,
    MAX_WAIT_S,
    MIN_WAIT_S,
    PRIOR_LOAD_BYTES_PER_S,
    Holder,
    choose_holder,
    could_gain,
    gain_s,
    load_s_per_token,
    wait_limit_s,
)

COMPUTE_S, LINK_S = 1e-4, 1e-5  # per token


@pytest.mark.parametrize(
    "tokens, compute_s, link_s, worth",
    [
        (10_000, COMPUTE_S, LINK_S, True),
        (100, COMPUTE_S, LINK_S, False),  # the fixed time is most of it
        (10_000, COMPUTE_S, 2 * COMPUTE_S, False),  # the link is slower than computing
        (10_000, COMPUTE_S, 0.6 * COMPUTE_S, False),  # the gain is within the errors of the prediction
        (0, COMPUTE_S, LINK_S, False),
    ],
)
def test_only_what_saves_much_is_fetched(tokens: int, compute_s: float, link_s: float, worth: bool) -> None:
    gain = gain_s(tokens, 0.005, compute_s, link_s)
    assert (gain > 0) is worth
    if worth:
        assert gain == pytest.approx(tokens * (compute_s - link_s) - FIXED_S - 0.005)
        assert could_gain(tokens, compute_s), "a worker asks wherever the answer may be yes"


def test_of_holders_that_give_about_the_same_the_least_busy_one_is_asked() -> None:
    holders = [Holder("most", 10_000, 30), Holder("near", 9_500, 2), Holder("less", 2_000, 0)]
    assert choose_holder(holders, 0, COMPUTE_S, LINK_S) == holders[1]
    assert choose_holder(holders[::-1], 0, COMPUTE_S, LINK_S) == holders[1]
    assert choose_holder(holders[:1], 0, COMPUTE_S, LINK_S) == holders[0]


def test_what_the_asker_has_itself_is_not_fetched() -> None:
    holders = [Holder("a", 10_000, 0), Holder("b", 4_000, 0)]
    assert choose_holder(holders, 10_000, COMPUTE_S, LINK_S) is None
    assert choose_holder(holders, 9_900, COMPUTE_S, LINK_S) is None, "not worth a fetch"
    assert choose_holder([], 0, COMPUTE_S, LINK_S) is None
    chosen = choose_holder(holders, 5_000, COMPUTE_S, LINK_S)
    assert chosen is not None and chosen.worker_id == "a"


def test_a_slow_link_counts() -> None:
    near, far = Holder("near", 5_000, 9), Holder("far", 6_000, 0, link_extra_s=0.25)
    assert choose_holder([near, far], 0, COMPUTE_S, LINK_S) == near
    assert choose_holder([msgspec.structs.replace(far, link_extra_s=0.4)], 0, COMPUTE_S, LINK_S) is None


def test_a_busy_engines_step_counts() -> None:
    slow, quick = Holder("slow", 1_000, 0, step_s=0.2), Holder("quick", 1_000, 5, step_s=0.005)
    assert choose_holder([slow, quick], 0, COMPUTE_S, LINK_S) == quick
    assert choose_holder([slow], 0, COMPUTE_S, LINK_S) is None


def test_a_fetch_is_waited_for_within_bounds() -> None:
    assert wait_limit_s(1, COMPUTE_S) == MIN_WAIT_S
    assert wait_limit_s(1_000_000, COMPUTE_S) == MAX_WAIT_S == 2.0
    assert wait_limit_s(5_000, COMPUTE_S) == pytest.approx(1.0)


def test_what_only_host_memory_has_counts_the_load_and_a_step():
    s_per_token = load_s_per_token(1000, loaded_bytes=2_000_000, seconds=0.5, ranks=2)
    assert s_per_token == 1000 / 8e6
    assert load_s_per_token(1000, 0, 0.0) == 1000 / PRIOR_LOAD_BYTES_PER_S
    device = Holder("device", 10_000, 0, step_s=0.01)
    host = Holder("host", 10_000, 0, step_s=0.01, host_tokens=4_000, load_s_per_token=s_per_token)
    assert host.delay_s == pytest.approx(0.02 + 4_000 * s_per_token)
    assert choose_holder([host, device], 0, COMPUTE_S, LINK_S) == device
    slow = msgspec.structs.replace(host, load_s_per_token=COMPUTE_S)
    assert choose_holder([slow], 6_000, COMPUTE_S, LINK_S) is None, "computed as fast as loaded"
