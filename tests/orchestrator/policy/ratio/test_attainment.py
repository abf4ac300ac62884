"""The headroom of splits: the limits of prefill and of decode, and loads that want no prefill workers."""

import math
import random
import statistics

import msgspec
import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.ratio.attainment import (
    MAX_HEADROOM,
    Traffic,
    after_moves,
    carried,
    headroom,
    in_time_without_queue,
    max_utilization,
    scale_prefill_times,
    shortest,
    tpot_s,
)

SLO = SLOConfig(ttft_s=1.0, tpot_s=0.05)
# Ten requests per second with prompts of equal length: half of one worker's time in prefill.
EVEN = Traffic(
    requests_per_s=10.0,
    prefill_s=0.05,
    prefill_s2=0.0025,
    local_s=0.05,
    local_s2=0.0025,
    least_s=0.05,
    least_s2=0.0025,
    output_tokens=200.0,
    step_s=0.01,
    step_s_per_sequence=0.0001,
    max_sequences=256,
)


def bears(traffic: Traffic, prefill: int, decode: int, slo: SLOConfig = SLO) -> float:
    return headroom(traffic, prefill, decode, slo)


def of_prompts(seconds: float, squares: float, **changes) -> Traffic:
    """Traffic whose prompts cost the same on all workers."""
    cost = {
        f"{where}_{name}": value
        for where in ("prefill", "local", "least")
        for name, value in (("s", seconds), ("s2", squares))
    }
    return msgspec.structs.replace(EVEN, **cost, **changes)


def best(traffic: Traffic, workers: int = 8, slo: SLOConfig = SLO) -> int:
    return max(range(workers), key=lambda prefill: (bears(traffic, prefill, workers - prefill, slo), -prefill))


def test_decode_step_follows_littles_law():
    # 2000 tokens/s on one worker: TPOT = 0.01 + 0.0001 * (2000 * TPOT)
    assert tpot_s(EVEN, 1.0, taken=1.0, decode=1) == pytest.approx(0.0125)
    assert tpot_s(EVEN, 1.0, taken=0.0, decode=1) > 0.0125 / (1 - 0.5), "prefill takes half of its time"
    assert tpot_s(EVEN, 2.1, taken=0.0, decode=1) == math.inf, "more than all of it"
    full = msgspec.structs.replace(EVEN, max_sequences=20)
    assert tpot_s(full, 1.0, taken=1.0, decode=1) == math.inf


def test_sequence_count_varies_above_its_mean():
    """The mean number is ten, so sixteen is no rare number: a worker that holds no more would be full too often."""
    steady = of_prompts(0.0, 0.0, step_s_per_sequence=0.0, output_tokens=100.0)
    for most, bears_it in ((16, False), (18, True)):
        fits = msgspec.structs.replace(steady, max_sequences=most)
        assert (tpot_s(fits, 1.0, taken=1.0, decode=1) < math.inf) == bears_it


def some_long(requests_per_s: float) -> Traffic:
    """Prompts of 40 ms in the mean, of which a few have most of the second moment."""
    spread = of_prompts(0.04, 20 * 0.04**2, step_s=0.0084, step_s_per_sequence=0.00012, output_tokens=480.0)
    return msgspec.structs.replace(spread, requests_per_s=requests_per_s, max_sequences=math.inf)


@pytest.mark.parametrize(("requests_per_s", "in_time"), [(55.0, 1.0), (60.0, 0.91), (68.0, 0.51), (90.0, 0.0)])
def test_without_a_queue_long_prompts_delay_what_decodes_beside_them(requests_per_s, in_time):
    assert in_time_without_queue(some_long(requests_per_s), 8, SLO) == pytest.approx(in_time, abs=0.01)


def test_headroom_below_1_holds_the_longest_prompts_back():
    """By it, no prefill worker is better than two here, where half of the requests would be late without a queue."""
    assert 1 > bears(some_long(68.0), 0, 8) > bears(some_long(68.0), 2, 6) > 0.98


def test_workers_keep_caches_when_they_move():
    apart = msgspec.structs.replace(EVEN, prefill_s=0.3, prefill_s2=0.09, local_s=0.5, local_s2=0.25)
    half = after_moves(apart, 4, 4, -2)
    assert (half.local_s, half.local_s2) == (pytest.approx(0.275), pytest.approx(0.12625))
    assert (half.prefill_s, half.prefill_s2) == (0.3, 0.09), "those that still prefill have what they had"
    assert after_moves(apart, 4, 4, -4).local_s == apart.least_s
    assert after_moves(apart, 0, 8, 2).prefill_s == pytest.approx(0.05 + 0.25 * 6 / 8)
    assert after_moves(apart, 4, 4, 0) == apart


def test_scaled_prompts_scale_all_prefill_times():
    longer = scale_prefill_times(EVEN, 2.0)
    assert (longer.prefill_s, longer.local_s, longer.least_s) == (0.1, 0.1, 0.1)
    assert (longer.prefill_s2, longer.local_s2, longer.least_s2) == (0.01, 0.01, 0.01)
    assert bears(longer, 4, 4) < bears(EVEN, 4, 4)


def test_more_workers_give_headroom_and_0_decode_gives_none():
    assert bears(EVEN, 4, 0) == 0
    assert bears(EVEN, 2, 6) > bears(EVEN, 2, 3) > bears(EVEN, 1, 1) > 0
    assert bears(msgspec.structs.replace(EVEN, requests_per_s=0.0), 4, 4) == MAX_HEADROOM


def test_long_prompts_need_prefill_workers_and_long_answers_none():
    code = of_prompts(0.1, 0.02, output_tokens=20.0)
    stories = of_prompts(0.005, 0.00005, output_tokens=2000.0)
    assert best(code) >= 5
    assert best(stories) <= 1
    assert best(stories, workers=2) == 0, "a whole worker for prompts would be half of two"


def test_prompts_cached_at_decode_are_best_prefilled_there():
    code = of_prompts(0.1, 0.02, output_tokens=20.0)
    sessions = msgspec.structs.replace(code, local_s=0.01, local_s2=0.0002)
    assert best(sessions) == 0 < best(code)


@pytest.mark.parametrize(("sigma", "share"), [(0.05, 0.48), (0.833, 0.2024), (1.6, 0.0548)])
def test_few_prefill_workers_take_most_long_prompts(sigma: float, share: float):
    """Half of the work, done by prefill workers, leaves this share of the second moment: nearly half where all prompts
    are alike, little where a few are long."""
    spread = of_prompts(0.05, 0.0025 * math.exp(sigma * sigma))
    steady = msgspec.structs.replace(spread, local_s2=0.0)

    def lumps2(taken: float) -> float:
        """The variance by prompts, but for what is common to all."""
        mean_s = tpot_s(steady, 1.0, taken, decode=2)
        lumps_s = tpot_s(spread, 1.0, taken, decode=2) - mean_s
        left = EVEN.step_s / mean_s
        return lumps_s * lumps_s * left * left / mean_s

    assert lumps2(0.25) / lumps2(0.0) == pytest.approx(share, rel=0.01)
    assert lumps2(0.5) == 0


def test_log_normal_shares_are_those_of_log_normal_prompts():
    rng = random.Random(0)
    prompts_s = sorted(rng.lognormvariate(-3.0, 1.2) for _ in range(200_000))
    moments = [statistics.fmean(x**k for x in prompts_s) for k in (1, 2)]
    total_s, total_s2, work_s, work_s2 = sum(prompts_s), sum(x * x for x in prompts_s), 0.0, 0.0
    for x in prompts_s:
        work_s, work_s2 = work_s + x, work_s2 + x * x
        if work_s >= 0.7 * total_s:
            break
    assert shortest(0.7, of_prompts(*moments)) == pytest.approx(work_s2 / total_s2, rel=0.1)
    assert shortest(0.7, of_prompts(*moments)) == pytest.approx(sum(prompts_s[:140_000]) / total_s, rel=0.1)


def test_an_overloaded_split_bears_the_share_of_requests_with_the_shortest_prompts():
    """More prompts than all workers can compute. If few of them are most of the work, nearly all others are in time."""
    alike, tailed = (of_prompts(0.45, 0.45 * 0.45 * spread, requests_per_s=20.0) for spread in (1.0, 7.0))
    assert bears(alike, 6, 2) < 0.65 and bears(tailed, 6, 2) > 0.9
    assert bears(tailed, 5, 3) < bears(tailed, 6, 2) < bears(tailed, 7, 1) < 1
    hasty = msgspec.structs.replace(tailed, prefill_s2=10 * tailed.prefill_s2)
    assert bears(hasty, 6, 2) < bears(tailed, 6, 2), "tight objectives make no prompt longer"


def test_an_overload_by_long_prompts_leaves_decode_workers_what_answers_need():
    """Prefill workers put long prompts off, and decode workers can put nothing off: one of them is too few here, though
    all prompts together would need more than seven workers."""
    slo = SLOConfig(ttft_s=30.0, tpot_s=0.05)
    load = of_prompts(0.345, 0.345 * 0.345 * 6.8, requests_per_s=21.6, output_tokens=135.0)
    load = msgspec.structs.replace(load, step_s=0.0145, step_s_per_sequence=0.00024, max_sequences=140)
    assert load.requests_per_s * load.prefill_s > 7
    assert best(load, slo=slo) == 6
    assert best(msgspec.structs.replace(load, output_tokens=70.0), slo=slo) == 7


def test_max_utilization_falls_with_spread_and_rises_with_workers():
    wild = msgspec.structs.replace(EVEN, prefill_s2=0.1)
    assert max_utilization(1, wild, 1.0) < max_utilization(1, EVEN, 1.0) <= 0.95
    assert max_utilization(1, wild, 1.0) < max_utilization(8, wild, 1.0)
    assert max_utilization(2, wild, 0.2) < max_utilization(2, wild, 5.0)


def test_prompts_that_may_wait_are_no_reason_for_more_prefill_workers():
    """Those that a worker takes over which goes to prefill count in full. Those that stay when one leaves may wait."""
    patient = msgspec.structs.replace(EVEN, prefill_s2=0.01, least_s2=0.1, local_s2=0.1)
    assert after_moves(patient, 4, 4, 2).prefill_s2 == pytest.approx(0.5 * 0.01 + 0.5 * 0.1)
    assert after_moves(patient, 4, 4, -2).prefill_s2 == 0.01


def test_links_bound_what_prefill_workers_can_hand_over():
    """KV for which a link takes a fifth of the prefill's time: one decode worker takes that of less than five."""
    code = of_prompts(0.1, 0.02, output_tokens=20.0, requests_per_s=40.0)
    linked = msgspec.structs.replace(code, link_share=0.2)
    assert bears(linked, 7, 1) < 0.75 * bears(code, 7, 1)
    assert bears(linked, 4, 4) == bears(code, 4, 4), "four links carry all that four workers prefill"
    assert best(linked) < best(code) == 7
    # Half of each prompt is cached where it decodes: half of the KV is sent.
    cached = msgspec.structs.replace(linked, local_s=0.05, local_s2=0.005)
    assert 1.9 * carried(1, linked, SLO.ttft_s) < carried(1, cached, SLO.ttft_s)
    assert 4 < carried(1, linked, SLO.ttft_s) < 5
    assert carried(1, code, SLO.ttft_s) == math.inf, "as long as the link's rate is not known"
