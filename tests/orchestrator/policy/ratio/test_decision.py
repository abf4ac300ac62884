"""From measured loads to xPyD."""

import msgspec
import pytest

from orchestrator.config.settings import RatioConfig, SLOConfig
from orchestrator.policy.ratio import decision
from orchestrator.policy.ratio import load as load_
from orchestrator.policy.ratio.attainment import headroom
from orchestrator.policy.ratio.decision import BUSY, DECODE_EARLIER, PREFILL_LATER, desired_ratio
from orchestrator.policy.ratio.load import LoadSample, long_prompts_wait, prompt_error, recent, traffic
from orchestrator.types import DesiredRatio, Offered

SLO = SLOConfig(ttft_s=1.0, tpot_s=0.05)
CONFIG = RatioConfig()
# 60 prompts per second of 50 ms each, with few output tokens: most of eight workers should prefill.
SAMPLE = LoadSample(
    at=100.0,
    period_s=10.0,
    offered=Offered(
        600,
        600_000,
        12_000.0,
        prefill_tokens2=6e8,
        local_tokens=600_000,
        local_tokens2=6e8,
        least_tokens=600_000,
        least_tokens2=6e8,
        generated_tokens=13_333,
    ),
    sequences=20,
    prefill_s_per_token=0.00005,
    step=(0.01, 0.0001),
    max_sequences=256.0,
)
EVEN = DesiredRatio(4, 4, set_at=-1000.0)


@pytest.fixture(autouse=True)
def samples_of_ten_seconds(monkeypatch):
    monkeypatch.setattr(load_, "WINDOW_SAMPLES", 6)


def offering(requests: int, prompt_tokens: int, output_tokens: int, local_tokens: int | None = None) -> LoadSample:
    offered = Offered(generated_tokens=SAMPLE.offered.generated_tokens)
    for _ in range(requests):
        offered += Offered.one(prompt_tokens, prompt_tokens if local_tokens is None else local_tokens, output_tokens)
    return msgspec.structs.replace(SAMPLE, offered=offered)


def generating(sample: LoadSample, tokens: int, sequences: int) -> LoadSample:
    offered = msgspec.structs.replace(sample.offered, generated_tokens=tokens)
    return msgspec.structs.replace(sample, offered=offered, sequences=sequences)


CODE, STORIES = offering(1300, 1000, 20), offering(300, 50, 1000)


def decide(*window: LoadSample, current=EVEN, config=CONFIG, **more):
    return desired_ratio(list(window), current, config, SLO, **more)


def test_traffic_has_rates_moments_and_costs():
    found = traffic([SAMPLE])
    assert (found.requests_per_s, found.output_tokens) == (60.0, pytest.approx(22.2, rel=0.01))
    assert (found.prefill_s, found.prefill_s2) == (pytest.approx(0.05), pytest.approx(0.0025))
    cached = traffic([offering(600, 1000, 20, local_tokens=200)])
    assert (cached.prefill_s, cached.local_s, cached.local_s2) == pytest.approx((0.05, 0.01, 0.0001))
    assert traffic([offering(10, 1000, 20)]) is None, "too few to tell"


def test_unfinished_answers_count_by_generated_tokens():
    busy = generating(SAMPLE, 600_000, sequences=900)
    assert traffic([busy]).output_tokens == pytest.approx(1000)
    filling = [generating(SAMPLE, 600_000, sequences=count) for count in (300, 900)]
    assert traffic(filling).output_tokens == pytest.approx(2000), "half of those that came ended"
    emptying = [generating(SAMPLE, 600_000, sequences=count) for count in (900, 300)]
    assert traffic(emptying).output_tokens == pytest.approx(1200_000 / 1800), "more ended than came"


def test_burst_makes_no_answer_seem_longer():
    """In a burst the measured ITL is that of the calm before. Counted by it, answers seemed five times as long."""
    burst = generating(offering(1300, 1000, 20), 26_000, sequences=900)
    assert traffic([SAMPLE, burst]).output_tokens < 40


def test_split_follows_load_in_bounded_steps_down_to_0_prefill():
    to_prefill = decide(CODE, CODE, CODE)
    assert (to_prefill.after.prefill, to_prefill.after.decode) == (6, 2), "a quarter of the fleet at a time, to prefill"
    assert decide(CODE, CODE, CODE, max_step=8).after.prefill == 7
    none = decide(STORIES, STORIES)
    assert none.after.prefill == 0 and none.headroom_after > none.headroom_before
    assert decide(STORIES, STORIES, max_step=8, config=RatioConfig(min_prefill=2)).after.prefill == 2
    far_below = DesiredRatio(0, 8, set_at=-1000.0)  # the minimum is more than one move away
    assert decide(CODE, CODE, CODE, current=far_below, config=RatioConfig(min_prefill=4)).after.prefill == 2


def test_prefill_workers_come_back():
    aggregated = DesiredRatio(0, 8, set_at=-1000.0)
    assert decide(CODE, CODE, CODE, current=aggregated, max_step=8).after.prefill == 7


def test_hysteresis_and_cool_down(monkeypatch):
    after = decide(CODE, CODE, CODE, max_step=8).after
    assert decide(CODE, CODE, CODE, current=msgspec.structs.replace(after, set_at=-1000.0)) is None
    assert decide(CODE, CODE, CODE, current=DesiredRatio(4, 4, set_at=97.0)) is None
    staying = msgspec.structs.replace(offering(300, 4000, 100), sequences=150)  # for 5 s each
    assert decide(staying, staying, staying, current=DesiredRatio(4, 4, set_at=95.0), went=1) is None
    assert decide(staying, staying, staying, current=DesiredRatio(4, 4, set_at=85.0)) is not None
    ahead = DesiredRatio(4, 4, set_at=3700.0)  # by a clock that was set back by an hour since
    assert decide(CODE, CODE, CODE, current=ahead) is not None
    assert decide() is None
    monkeypatch.setattr(decision, "SURE_GAIN", 9.0)
    assert decide(CODE, CODE, CODE) is not None
    monkeypatch.setattr(decision, "OVERLOADED_GAIN", 0.9)
    assert decide(CODE, CODE, CODE) is None


def test_no_more_than_all_that_arrives_can_be_in_time():
    assert decision._why(1.3, 0.92) == "92% instead of 100% of what arrives can be in time"
    assert decision._why(0.5, 1.0) == "bears 1.00 instead of 0.50 times what arrives, 100% more"


@pytest.mark.parametrize(
    ("in_time", "load", "moved"), [(1.005, 2.0, False), (1.05, 0.9, False), (1.05, 1.03, True), (1.15, 0.9, True)]
)
def test_where_few_more_would_be_in_time_the_split_must_bear_more_load_too(monkeypatch, in_time, load, moved):
    """The model of percentiles tells no small difference: two measures of it must agree."""
    for measure, gain in (("headroom", in_time), ("multiple", load)):
        found = {True: 0.8 * gain, False: 0.8}
        monkeypatch.setattr(decision, measure, lambda traffic, prefill, decode, slo, found=found: found[prefill > 4])
    assert (decide(CODE, CODE, CODE) is not None) == moved


@pytest.mark.parametrize(("in_time", "samples", "moved"), [(1.05, 5, (6,)), (1.05, 6, (2, 6)), (1.15, 5, (2, 6))])
@pytest.mark.parametrize("prefill", [2, 6])
def test_where_few_more_would_be_in_time_the_whole_window_must_say_so_for_decode(
    monkeypatch, prefill, in_time, samples, moved
):
    for measure in ("headroom", "multiple"):
        found = {True: 0.8 * in_time, False: 0.8}
        monkeypatch.setattr(decision, measure, lambda traffic, prefills, *_, found=found: found[prefills == prefill])
    assert (decide(*[CODE] * samples) is not None) == (prefill in moved)


@pytest.mark.parametrize(("gain", "went"), [(gain, went) for gain in (0.03, 0.15) for went in (-1, 0, 1)])
def test_a_change_is_taken_back_within_a_cool_down_only_for_a_large_gain(monkeypatch, gain, went):
    """Where requests end within two seconds it may go on the same way. One that others made stays for a cool-down."""
    found = {True: 0.5 + 0.5 * gain, False: 0.5}
    for measure in ("headroom", "multiple"):
        monkeypatch.setattr(decision, measure, lambda traffic, prefill, decode, slo: found[prefill > 4])
    for after_s, moved in ((3, False), (5, went > 0 or (went < 0 and gain > 0.1)), (15, True)):
        last = DesiredRatio(4, 4, set_at=CODE.at - after_s)
        assert (decide(CODE, CODE, CODE, current=last, went=went) is not None) == moved


def test_split_stays_when_headroom_is_large(monkeypatch):
    light = offering(300, 1000, 20)
    assert decide(light, light, light) is None
    monkeypatch.setattr(decision, "BUSY", 0.1)
    assert decide(light, light, light) is not None


def test_workers_go_to_decode_earlier_than_to_prefill():
    """At a headroom a little above `1 / busy` a load that wants more prefill workers moves none; one that wants fewer
    does."""
    code, stories = offering(900, 1000, 20), offering(205, 50, 1000)
    for load, prefill in ((code, 4), (stories, 0)):
        arriving = traffic([load])
        assert 1 < headroom(arriving, 4, 4, SLO) * BUSY < DECODE_EARLIER
        decision = decide(load, load, load)
        assert (decision.after.prefill if decision else EVEN.prefill) == prefill


def test_workers_go_to_prefill_only_when_headroom_is_nearly_used():
    """All are in time at either headroom, and decode workers serve any load that comes."""
    for requests, moved in ((1010, False), (1090, True)):
        load = offering(requests, 1000, 20)
        headroom_now = headroom(traffic([load]), 4, 4, SLO)
        assert headroom_now > 1 and (headroom_now < PREFILL_LATER / BUSY) is moved
        assert headroom_now < 1 / BUSY
        assert (decide(load, load, load) is not None) is moved


def test_prompts_cached_at_decode_need_no_prefill_workers():
    agents = offering(600, 15_000, 80, local_tokens=1200)
    assert decide(agents, agents, max_step=8).after.prefill == 0


def test_prefill_workers_keep_caches_when_they_change_role():
    """Half of the conversations are cached on decode workers, half on prefill workers, which take their caches along to
    decode."""
    both = Offered()
    for _ in range(150):
        both += Offered.one(15_000, 1200, 80) + Offered.one(1200, 15_000, 80)
    assert both.least_tokens == 300 * 1200
    assert decide(*[msgspec.structs.replace(SAMPLE, offered=both)] * 2, max_step=8).after.prefill == 0
    nowhere = msgspec.structs.replace(both, least_tokens=both.local_tokens, least_tokens2=both.local_tokens2)
    after = decide(*[msgspec.structs.replace(SAMPLE, offered=nowhere)] * 2, max_step=8)
    assert after is None or after.after.prefill > 0


def test_zero_prefill_requires_capacity_for_all_prompts():
    """Without prefill workers no queue holds prompts back. If the answers overload the fleet a queue does not help."""
    for requests, left in ((600, 0), (950, 1), (3000, 1)):
        agents = offering(requests, 15_000, 80, local_tokens=1200)
        assert decide(agents, agents, max_step=8).after.prefill == left
    stories = offering(2000, 50, 1000)
    assert decide(stories, stories, max_step=8).after.prefill == 0


def test_no_worker_goes_to_prefill_while_caches_fill():
    cold, warm = offering(1000, 2000, 20), CODE
    assert decide(cold, warm) is None
    assert decide(warm, warm) is not None
    assert decide(warm, cold) is not None, "prompts that grow longer are no caches that fill"
    few = [msgspec.structs.replace(offering(300, tokens, 1000), at=SAMPLE.at) for tokens in (100, 50)]
    assert decide(*few).after.prefill < 4, "that cold caches say more than is true of prompts is no reason to wait"


def test_decoding_sequences_fit_on_remaining_decode_workers():
    for sequences, prefill in ((20, 7), (600, 5)):
        slow = msgspec.structs.replace(CODE, sequences=sequences)
        assert decide(slow, slow, max_step=8).after.prefill == prefill


def test_each_decode_worker_helps_overloaded_fleet():
    full = msgspec.structs.replace(STORIES, sequences=20 * 256)
    assert decide(full, full, full, max_step=8).after.prefill < 4


def test_split_without_room_for_sequences_is_left():
    by_chance, too_many = 4 * 256 + 50, 4 * 256 + 60  # a standard deviation is 33 sequences
    waiting = msgspec.structs.replace(CODE, sequences=too_many)
    assert decide(waiting, waiting) is None, "they lack places in the batch, and only wait"
    code = [msgspec.structs.replace(CODE, sequences=n, memory_sequences=256.0) for n in (by_chance, too_many)]
    assert decide(code[0], code[0]) is None, "more would prefill, by what arrives, and have no room"
    assert decide(code[1], code[1]).after.prefill == 3, "five workers hold it"
    assert decide(code[0], code[1]) is None, "it may pass"


def test_split_keeps_sequences_that_are_too_many_by_chance():
    """Few sequences with long prompts fill the memory of decode workers. Another split would bear no more."""
    for sequences, moved in ((140, False), (160, True)):
        summaries = msgspec.structs.replace(offering(110, 8000, 330), sequences=sequences, step=(0.0084, 0.00057))
        summaries = msgspec.structs.replace(summaries, max_sequences=32.0, memory_sequences=32.0)
        assert (decide(summaries, summaries, summaries) is not None) == moved


def test_last_prefill_worker_stays_in_overload():
    """It holds back long prompts. Without it the split would have less headroom."""
    last = DesiredRatio(1, 7, set_at=-1000.0)
    mixed = offering(560, 1000, 500)
    full = msgspec.structs.replace(generating(mixed, 358_400, sequences=7 * 256 + 80), memory_sequences=256.0)
    found = traffic([full, full])
    assert headroom(found, 0, 8, SLO) < headroom(found, 1, 7, SLO) < 1
    assert decide(full, full, current=last) is None
    stories = msgspec.structs.replace(generating(STORIES, 1_200_000, 7 * 256 + 80), memory_sequences=256.0)
    assert decide(stories, stories, current=last).after.prefill == 0, "with more headroom it goes"


def test_workers_stay_at_decode_while_sequences_grow():
    few, more = (msgspec.structs.replace(CODE, sequences=count) for count in (20, 60))
    assert decide(few, few, few) is not None and decide(more, more, more) is not None
    assert decide(few, few, more) is None
    story = msgspec.structs.replace(STORIES, sequences=60)
    assert decide(STORIES, STORIES, story).after.prefill < 4, "they may come"


def test_last_prefill_worker_goes_only_for_a_sure_gain():
    """One prompt in 500 is a third of the work. Twenty seconds do not tell how many of those come."""
    tailed = Offered.one(40_000, 40_000, 670)
    for _ in range(499):
        tailed += Offered.one(150, 150, 670)
    load, one = msgspec.structs.replace(SAMPLE, offered=tailed, sequences=900), DesiredRatio(1, 7, set_at=-1000.0)
    assert decide(*[load] * 2, current=one) is None
    assert decide(*[load] * 6, current=one).after.prefill == 0


@pytest.mark.parametrize(("haste", "prefill"), [(1.0, 5), (0.01, 4)])
def test_prompts_that_can_wait_ask_for_no_more_prefill_workers(haste, prefill):
    """Twenty long ones among 900 short ones, where all have 0.3 s, and where the long ones have 30 s."""
    offered = Offered()
    for count, tokens, own in ((900, 300, 1.0), (20, 20_000, haste)):
        for _ in range(count):
            offered += Offered.one(tokens, tokens, 150, own)
    load = msgspec.structs.replace(SAMPLE, offered=offered)
    found = desired_ratio([load] * 6, EVEN, CONFIG, SLOConfig(ttft_s=0.3, tpot_s=0.05))
    assert (found.after if found is not None else EVEN).prefill == prefill


def of_chats_and_documents(chats: int, answers: int, documents: int, tokens: int, haste: float) -> LoadSample:
    offered = Offered(generated_tokens=(chats + documents) * answers)
    for count, length, own in ((chats, 300, 1.0), (documents, tokens, haste)):
        for _ in range(count):
            offered += Offered.one(length, length, answers, own)
    return msgspec.structs.replace(SAMPLE, offered=offered, sequences=5 * (chats + documents) // 2)


LAST = DesiredRatio(1, 7, set_at=-1000.0)
INTERACTIVE = SLOConfig(ttft_s=0.3, tpot_s=0.05)


@pytest.mark.parametrize(
    ("chats", "answers", "documents", "tokens"),
    [(280, 1200, 100, 1500), (300, 800, 150, 1500)],
    ids=["all instead of 99% in time", "a headroom of 1.18 instead of 1.12"],
)
def test_last_prefill_worker_stays_for_long_prompts_that_may_wait(chats, answers, documents, tokens):
    """Nothing else holds them back in a burst. Where no prompt may wait for longer than others it goes."""
    for haste, prefill in ((1.0, 0), (0.01, 1)):
        load = of_chats_and_documents(chats, answers, documents, tokens, haste)
        found = desired_ratio([load] * 6, LAST, CONFIG, INTERACTIVE)
        assert (found.after if found is not None else LAST).prefill == prefill


def test_last_prefill_worker_goes_for_a_tenth_more_whoever_may_wait():
    """Of two workers one is too few to decode."""
    load = of_chats_and_documents(75, 800, 37, 1500, 0.01)
    assert long_prompts_wait([load] * 6)
    last = DesiredRatio(1, 1, set_at=-1000.0)
    assert desired_ratio([load] * 6, last, CONFIG, INTERACTIVE).after.prefill == 0


def test_a_burst_of_others_does_not_let_the_last_prefill_worker_go():
    """Half a minute of chats alone, of which all workers bear 5% more if they decode. Documents will come again."""
    for haste, prefill in ((1.0, 0), (0.01, 1)):
        calm = of_chats_and_documents(100, 400, 100, 3000, haste)
        burst = of_chats_and_documents(400, 1200, 0, 0, haste)
        window = [calm] * 3 + [burst] * 3
        assert long_prompts_wait(window) == (haste < 1) and not long_prompts_wait(window[3:])
        found = desired_ratio(window, LAST, CONFIG, INTERACTIVE)
        assert (found.after if found is not None else LAST).prefill == prefill


@pytest.mark.parametrize(
    ("prompts", "waits"),
    [
        ([(900, 300, 1.0), (100, 3000, 1.0), (1, 300, 0.01)], False),
        ([(900, 300, 1.0), (100, 3000, 1.0), (900, 300, 0.01)], False),
        ([(900, 300, 1.0), (100, 3000, 0.999)], False),
        ([(900, 300, 1.0), (100, 3000, 1.0), (90, 3000, 0.01)], False),
        ([(900, 300, 1.0), (100, 3000, 1.0), (150, 3000, 0.01)], True),
        ([(900, 300, 1.0), (100, 3000, 0.6)], True),
    ],
    ids=["a short one", "many short ones", "for hardly longer", "less than half", "most", "all, for 1.7 times as long"],
)
def test_long_prompts_wait_where_most_of_their_squares_may(prompts, waits):
    offered = Offered()
    for count, tokens, haste in prompts:
        for _ in range(count):
            offered += Offered.one(tokens, tokens, 1000, haste)
    # Of a counter that has run for long, as they come: the sums of all before are the same, and end in other digits.
    before = Offered(requests=10**9, prefill_tokens=10**12, prefill_tokens2=3.3e15, patient_tokens2=1.1e15)
    for since in (Offered(), before):
        load = msgspec.structs.replace(SAMPLE, offered=since + offered - since)
        assert long_prompts_wait([load] * 6) == waits


def test_chance_in_prompt_lengths_counts_in_full_however_long_they_may_wait():
    """One that is most of the work among 99 short ones."""
    errors = []
    for haste in (1.0, 0.01):
        offered = Offered.one(100_000, 100_000, 1000, haste)
        for _ in range(99):
            offered += Offered.one(300, 300, 1000)
        load = msgspec.structs.replace(SAMPLE, offered=offered, sequences=2000)
        errors.append(prompt_error([load]))
    assert errors == [pytest.approx(0.77, abs=0.01)] * 2


def test_burst_moves_no_worker():
    calm = offering(400, 400, 150)
    assert decide(CODE, CODE, CODE) is not None
    assert decide(calm, CODE) is None


def test_workers_go_to_decode_for_two_samples_and_to_prefill_for_ten_seconds_or_where_requests_end_at_once(monkeypatch):
    monkeypatch.setattr(load_, "WINDOW_SAMPLES", 30)
    short = [msgspec.structs.replace(load, period_s=2.0) for load in (offering(260, 1000, 20), offering(60, 50, 1000))]
    code, stories = short
    assert decide(stories, stories) is None, "too few requests"
    many = msgspec.structs.replace(stories, offered=offering(120, 50, 1000).offered)
    assert decide(many, many).after.prefill == 0
    assert decide(code, code).after.prefill == 6
    staying = msgspec.structs.replace(code, sequences=300)  # for 2.3 s each
    assert decide(staying, staying) is None
    assert decide(*[staying] * 5).after.prefill == 6


def test_few_huge_prompts_count_as_chance(monkeypatch):
    """Two loads of as many prompts with the same mean: in one, a few prompts carry most of the work; in the other all
    are equal. Of the first 4P4D bears all that arrives, but only just."""
    tailed = Offered()
    for tokens in (30_000,) * 3 + (300,) * 147:
        tailed += Offered.one(tokens, tokens, 120)
    wild, alike = (
        msgspec.structs.replace(SAMPLE, period_s=1.0, offered=offered, sequences=2, prefill_s_per_token=each_s)
        for offered, each_s in ((tailed, 0.00003), (offering(150, 894, 120).offered, 0.00005))
    )  # for 13 ms each
    assert headroom(traffic([wild]), 4, 4, SLO) > 1
    monkeypatch.setattr(load_, "WINDOW_SAMPLES", 2)
    for load, moved in ((alike, True), (wild, False)):
        with monkeypatch.context() as patch:
            assert decide(load, load).after.prefill > 4, "a wrong change would be undone in a moment"
            patch.setattr(decision, "COOL_DOWN_S", 0.01)
            assert (decide(load, load) is not None) == moved


def test_window_is_shortest_with_enough_requests():
    few = offering(15, 1000, 20)
    assert list(recent([STORIES, CODE, CODE])) == [CODE, CODE]
    assert recent([few] * 3) == (), "not enough yet"
    assert len(recent([few] * 6)) == 6, "all that there is"


def test_shorter_windows_need_more_requests():
    some = offering(60, 1000, 20)
    assert len(recent([some] * 6)) == 2, "10 s and 100 requests"
    assert len(recent([some] * 6, least_s=0.0)) == 4, "200 requests, which may be one burst"


@pytest.mark.parametrize(("window", "current"), [(CODE, (4, 4)), (STORIES, (4, 4)), (STORIES, (2, 6)), (CODE, (0, 8))])
def test_groups_move_as_the_workers_that_they_hold_would(window: LoadSample, current: tuple[int, int]):
    """The load is that of eight workers; where two of them change roles together, their number is a multiple of two."""
    each, units = DesiredRatio(*current, set_at=-1000.0), DesiredRatio(current[0] // 2, current[1] // 2, set_at=-1000.0)
    single = decide(window, window, window, current=each, max_step=8)
    grouped = decide(window, window, window, current=units, max_step=4, unit_size=2)
    assert grouped.before == units and grouped.after.prefill + grouped.after.decode == 4
    assert abs(2 * grouped.after.prefill - single.after.prefill) <= 1
    assert grouped.headroom_before == single.headroom_before
    assert grouped.headroom_after <= single.headroom_after * 1.001


def test_a_group_is_moved_where_a_quarter_of_the_fleet_is_less_than_one():
    units = DesiredRatio(1, 3, set_at=-1000.0)
    moved = decide(CODE, CODE, CODE, current=units, unit_size=8)
    assert moved is None or moved.after.prefill == 2
    four = [msgspec.structs.replace(CODE, prefill_s_per_token=each) for each in [CODE.prefill_s_per_token * 4] * 3]
    assert decide(*four, current=units, unit_size=8).after.prefill == 2


def test_least_numbers_count_groups():
    units, config = DesiredRatio(2, 2, set_at=-1000.0), RatioConfig(min_prefill=1)
    assert decide(STORIES, STORIES, current=units, config=config, max_step=4, unit_size=2).after.prefill == 1
