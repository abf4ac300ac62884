"""Synthetic loads: bursty arrivals and heavy-tailed lengths, seeded and repeatable. Made, not measured."""

from __future__ import annotations

import math
import random
from functools import partial

from orchestrator.simulator.trace import Arrival, Load, TraceError

UNIT_TOKENS = 512


def bursty(requests: int, seed: int = 0, rate: float = 1.0) -> Load:
    """Arrivals from a two-state Markov-modulated Poisson process: calm for 30 s on average, then four times as many
    for 10 s on average; `rate` is the mean over both (requests per second).

    Lengths are log-normal: prompts with median 700 and sigma 1, outputs with median 200 and sigma 0.7. A third of the
    prompts start with one of 40 system prompts of 512 or 1,024 tokens.
    """
    # Periods are drawn apart from requests: the same ones at every rate.
    rng, periods = random.Random(seed), random.Random(f"periods {seed}")
    calm_rate = rate / (0.75 + 0.25 * 4)
    now, in_burst, until = 0.0, False, periods.expovariate(1 / 30)
    arrivals = []
    for n in range(requests):
        work = rng.expovariate(1.0)
        while True:
            current = calm_rate * (4 if in_burst else 1)
            if now + work / current <= until:
                now += work / current
                break
            work -= (until - now) * current
            now = until
            in_burst = not in_burst
            until = now + periods.expovariate(1 / (10 if in_burst else 30))
        prompt = _lognormal(rng, 700, 1.0, 16, 32_000)
        keys: tuple[int, ...] = ()
        if rng.random() < 1 / 3:
            system = rng.randrange(40)
            units = 1 + system % 2
            prompt += units * UNIT_TOKENS
            keys = tuple(system * 2 + unit for unit in range(units))
            own = prompt // UNIT_TOKENS - units
            keys += tuple(1_000_000 + n * 100 + unit for unit in range(own))
        arrivals.append(Arrival(now, prompt, _lognormal(rng, 200, 0.7, 4, 4_000), keys))
    return Load("bursty", arrivals, UNIT_TOKENS, partial(bursty, requests, seed))


def heavy_tailed(requests: int, seed: int = 0) -> Load:
    """Poisson arrivals; prompts Pareto (shape 1.2, from 200 tokens, at most 60,000), outputs log-normal with median
    250 and sigma 1.2, at most 8,000: most requests are small, and a few carry most of the tokens.
    """
    rng = random.Random(seed)
    now = 0.0
    arrivals = []
    for _ in range(requests):
        now += rng.expovariate(1.0)
        prompt = min(60_000, int(200 * rng.paretovariate(1.2)))
        arrivals.append(Arrival(now, prompt, _lognormal(rng, 250, 1.2, 4, 8_000)))
    return Load("heavy_tailed", arrivals, 0)


LOADS = {"bursty": bursty, "heavy_tailed": heavy_tailed}


def synthetic(name: str, requests: int, seed: int = 0) -> Load:
    """Raises TraceError."""
    if name not in LOADS:
        raise TraceError(f"load: expected a trace file or one of {', '.join(LOADS)}, got {name!r}")
    return LOADS[name](requests, seed)


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(max(low, min(high, rng.lognormvariate(math.log(median), sigma))))
