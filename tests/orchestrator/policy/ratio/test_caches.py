"""The cost of prompts at another split, by the size of its caches."""

import msgspec
import pytest

from orchestrator.config.settings import RatioConfig, SLOConfig
from orchestrator.policy.prefix_keys import Reuse, ReuseCounter
from orchestrator.policy.ratio.attainment import Traffic
from orchestrator.policy.ratio.caches import Caches, caches_of, curve
from orchestrator.policy.ratio.decision import desired_ratio
from orchestrator.policy.ratio.load import LoadSample, traffic
from orchestrator.types import DesiredRatio, Offered

RATE, PROMPT, KEY_TOKENS = 40.0, 6000, 500
SLO, CONFIG = SLOConfig(ttft_s=1.0, tpot_s=0.05), RatioConfig()


def documents(count: int) -> Reuse:
    """The reuse of `count` documents of 6,000 tokens that are asked about in turn, over the third round."""
    counter = ReuseCounter()
    for n in range(3 * count):
        document = n % count
        if n == 2 * count:
            counter.take()
        keys = list(range(document * 100, document * 100 + PROMPT // KEY_TOKENS))
        counter.arrived(PROMPT, keys, KEY_TOKENS, n / RATE)
    return counter.take()


def caches(reuse: Reuse, prefill: int, decode: int, worker_tokens: float, **changes) -> Caches:
    settings = {
        "prompts_per_s": RATE,
        "worker_tokens": worker_tokens,
        "answer_tokens": 0.0,
        "distinct": (1.0, 1.0),
        "s_per_token": 0.00005,
    }
    return Caches(of=curve([reuse]), prefill=prefill, decode=decode, **(settings | changes))


def test_large_caches_find_reused_blocks():
    """400 documents of 6,000 tokens in turn: 2.4 million tokens."""
    fleet = caches(documents(400), 0, 8, 400_000)
    assert fleet.misses(8, 1.0)[0] == pytest.approx(0, abs=300), "3.2 million"
    assert fleet.misses(4, 1.0)[0] == PROMPT, "1.6 million: each is evicted before it comes again"
    assert fleet.misses(8, 0.5)[0] == PROMPT, "two copies of each"
    assert fleet.misses(8, 1.0, taken_tokens=1_600_000)[0] == PROMPT, "answers take half of it"


def test_distinct_share_follows_from_uncached_tokens():
    fleet = caches(documents(400), 4, 4, 800_000)
    for copies in (1.3, 1.5, 2.0):
        left = fleet.misses(4, 1 / copies)[0]
        if 300 < left < PROMPT:
            assert fleet.distinct_share(left, 4) == pytest.approx(1 / copies, rel=0.15)
    assert fleet.distinct_share(0.0, 4) == 1.0, "all is found"
    assert fleet.distinct_share(100 * PROMPT, 4) == pytest.approx(0.25, rel=0.01), "at least what one worker holds"


def test_prompts_cost_less_with_more_caching_workers():
    moments = (("s", 0.3), ("s2", 0.09))
    cost = {f"{where}_{name}": value for where in ("prefill", "local", "least") for name, value in moments}
    arriving = Traffic(
        requests_per_s=RATE, output_tokens=100, step_s=0.01, step_s_per_sequence=0.0, max_sequences=256, **cost
    )
    fleet = caches(documents(400), 4, 4, 420_000)
    assert fleet.moved(arriving, 0) == arriving
    none = fleet.moved(arriving, -4)
    assert none.local_s < 0.02 and none.local_s2 < 0.02
    back = msgspec.structs.replace(fleet, prefill=0, decode=8).moved(msgspec.structs.replace(arriving, local_s=0.01), 4)
    assert back.local_s > 0.1


def sample(reuse: Reuse, prefill_tokens: int, local_tokens: int, worker_tokens: float = 400_000) -> LoadSample:
    offered = Offered()
    for _ in range(400):
        offered += Offered.one(prefill_tokens, local_tokens, 150)
    return LoadSample(
        at=100.0,
        period_s=10.0,
        offered=offered,
        sequences=120,
        prefill_s_per_token=0.00004,
        step=(0.01, 0.0001),
        max_sequences=256.0,
        worker_tokens=worker_tokens,
        reuse=reuse,
    )


def test_split_goes_to_0_prefill_when_only_all_caches_suffice():
    even = DesiredRatio(4, 4, set_at=-1000.0)
    seen = sample(documents(400), PROMPT, PROMPT)
    decision = desired_ratio([seen, seen], even, CONFIG, SLO)
    assert (decision.after.prefill, decision.after.decode) == (0, 8)
    line = str(decision)
    assert "caches keep prefixes for" in line and "instead of 6000 tokens are computed where they decode" in line
    never = sample(documents(4000), PROMPT, PROMPT)
    apart = desired_ratio([never, never], even, CONFIG, SLO)
    assert apart is None or apart.after.prefill > 0, "nothing comes back: no cache helps"


def test_split_stays_at_0_prefill_when_fewer_caches_miss():
    none = DesiredRatio(0, 8, set_at=-1000.0)
    for documents_there, moves in ((400, False), (4000, True)):
        left = 300 if documents_there == 400 else PROMPT
        seen = sample(documents(documents_there), PROMPT, left)
        assert (desired_ratio([seen] * 3, none, CONFIG, SLO) is not None) == moves


@pytest.mark.parametrize(("left", "s_per_token"), [(1500, 0.00015), (3000, 0.00008)])
def test_no_worker_goes_half_the_way_to_a_better_split_where_that_bears_less(left, s_per_token):
    """With caches 4 of 16 prefill workers can be worse than none and than many."""
    none, kept = DesiredRatio(0, 16, set_at=-1000.0), sample(documents(200), PROMPT, left, 200_000)
    seen = [msgspec.structs.replace(kept, prefill_s_per_token=s_per_token)] * 3
    assert desired_ratio(seen, none, CONFIG, SLO) is None
    at_once = desired_ratio(seen, none, CONFIG, SLO, max_step=16)
    assert at_once.after.prefill > 4 and at_once.headroom_after > at_once.headroom_before


def test_caches_are_unknown_without_prompts_or_memory():
    known = sample(documents(400), PROMPT, PROMPT)
    current = DesiredRatio(4, 4)
    assert caches_of([known], traffic([known]), current) is not None
    for unknown in (sample(Reuse(), PROMPT, PROMPT), sample(documents(400), PROMPT, PROMPT, worker_tokens=0.0)):
        assert caches_of([unknown], traffic([unknown]), current) is None
