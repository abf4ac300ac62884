"""The uncached tokens that follow from ages at reuse, compared with those of a real cache."""

import math
import random

import pytest

from orchestrator.policy.prefix_keys import AGES_S, MAX_KEYS, NONE, SAMPLED_TOKENS, Reuse, ReuseCounter
from orchestrator.policy.ratio.caches import curve, uncached

KEY_TOKENS = 512


class LRU:
    """A cache of whole keys that evicts the least recently used one, and of one prompt the last one first."""

    def __init__(self, tokens: int) -> None:
        self.most, self.keys = tokens // KEY_TOKENS, dict[int, None]()

    def left_of(self, prompt_tokens: int, keys: list[int]) -> int:
        hits = next((n for n, key in enumerate(keys) if key not in self.keys), len(keys))
        for key in reversed(keys):
            self.keys.pop(key, None)
            self.keys[key] = None
        while len(self.keys) > self.most:
            del self.keys[next(iter(self.keys))]
        return prompt_tokens - hits * KEY_TOKENS


def sessions(rng: random.Random, prompts: int, rate: float):
    """Turns of 400 conversations, each of which begins with one of ten instructions, and questions on 300 documents."""
    live: list[list[int]] = [[] for _ in range(400)]
    now, fresh = 0.0, 10**6
    for _ in range(prompts):
        now += rng.expovariate(rate)
        if rng.random() < 0.4:
            document = min(299, int(rng.paretovariate(0.8)))
            yield now, [10**4 + document * 100 + n for n in range(4 + document % 12)]
            continue
        keys = rng.choice(live)
        if not keys or rng.random() < 0.1:
            kind = rng.randrange(10)
            keys[:] = [kind * 100 + n for n in range(4 + kind)]
        fresh += 1
        keys.append(fresh)
        yield now, list(keys)


@pytest.mark.parametrize("cache_tokens", [100_000, 300_000, 1_000_000, 3_000_000])
def test_reuse_curve_gives_hits_of_any_cache_size(cache_tokens):
    rng, counter, cache = random.Random(1), ReuseCounter(), LRU(cache_tokens)
    rate, left, squares, prompts = 20.0, 0, 0, 0
    for n, (now, keys) in enumerate(sessions(rng, 12_000, rate)):
        tokens = len(keys) * KEY_TOKENS + 100
        counter.arrived(tokens, keys, KEY_TOKENS, now)
        uncached_here = cache.left_of(tokens, keys)
        if n == 6000:
            counter.take()
        elif n > 6000:
            prompts, left, squares = prompts + 1, left + uncached_here, squares + uncached_here**2
    mean, mean2, _ = uncached(curve([counter.take()]), cache_tokens, rate)
    assert mean == pytest.approx(left / prompts, rel=0.1)
    assert math.sqrt(mean2) == pytest.approx(math.sqrt(squares / prompts), rel=0.2)


def test_reused_key_is_counted_once_by_its_age():
    counter = ReuseCounter()
    counter.arrived(2100, [1, 2, 3, 4], KEY_TOKENS, 100.0)
    assert counter.take().saved == NONE
    counter.arrived(1600, [1, 2, 9], KEY_TOKENS, 103.0)
    counter.arrived(700, [1], KEY_TOKENS, 103.1)
    taken = counter.take()
    assert (taken.prompts, taken.tokens, taken.keyed) == (2, 2300, 4 * KEY_TOKENS)
    by_age = {age: saved for age, saved in zip(AGES_S, taken.saved, strict=True) if saved}
    assert by_age == {0.5: KEY_TOKENS, 4.0: 2 * KEY_TOKENS}, "0.1 s and 3 s"
    everything = curve([taken])
    assert everything.uncached[-1] == (2300 - 3 * KEY_TOKENS) / 2
    assert everything.uncached2[-1] == pytest.approx(((1600 - 2 * KEY_TOKENS) ** 2 + (700 - KEY_TOKENS) ** 2) / 2)
    assert counter.take() == Reuse(), "once"


def test_recent_key_counts_as_being_computed():
    counter = ReuseCounter()
    assert counter.arrived(2100, [1, 2, 3, 4], KEY_TOKENS, 100.0) == 0
    assert counter.arrived(2100, [1, 2, 3, 5], KEY_TOKENS, 100.1) == 3 * KEY_TOKENS
    assert counter.arrived(2100, [1, 2, 3, 5], KEY_TOKENS, 103.0) == 0, "computed long since, and cached or not"


def test_small_blocks_are_sampled():
    counter = ReuseCounter()
    keys = list(range(1, 101))  # of 16 tokens each
    for now in (0.0, 1.0):
        counter.arrived(1610, keys, 16, now)
    assert sum(counter.take().saved) == 6 * SAMPLED_TOKENS, "of 1600 tokens 1536"


def test_counter_forgets_ends_of_old_prompts_first():
    counter = ReuseCounter()
    counter.arrived(10 * KEY_TOKENS, list(range(10)), KEY_TOKENS, 0.0)
    for n in range(1, 200):
        counter.arrived(1000 * KEY_TOKENS, list(range(n * 1000, n * 1000 + 1000)), KEY_TOKENS, float(n))
        counter.arrived(2 * KEY_TOKENS, [0, 1], KEY_TOKENS, float(n))
    assert len(counter._last_used) <= MAX_KEYS
    counter.take()
    counter.arrived(10 * KEY_TOKENS, list(range(10)), KEY_TOKENS, 200.0)
    assert sum(counter.take().saved) == 2 * KEY_TOKENS
