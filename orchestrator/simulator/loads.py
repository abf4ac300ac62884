"""Synthetic loads: seeded and repeatable arrivals with patterns that the public traces do not have."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from orchestrator.config.settings import ConfigError
from orchestrator.simulator.trace import MOST_REQUESTS, Arrival, Load, filled, poisson

MADE_UNIT_TOKENS = 512  # in a prefix unit, which prompts share as a whole or not at all


def bursty(requests: int, seed: int = 0, rate: float = 1.0) -> Load:
    """Arrivals from a two-state Markov-modulated Poisson process: calm for 30 s on average, then four times as many
    for 10 s on average; `rate` is the mean over both (requests per second).

    Lengths are log-normal: prompts with median 700 and sigma 1, outputs with median 200 and sigma 0.7. A third of the
    prompts start with one of 40 system prompts of 512 or 1,024 tokens.
    """
    # Periods have a random generator of their own, so that they are the same at every rate.
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
            prompt += units * MADE_UNIT_TOKENS
            keys = tuple(system * 2 + unit for unit in range(units))
            own = prompt // MADE_UNIT_TOKENS - units
            keys += tuple(1_000_000 + n * 100 + unit for unit in range(own))
        arrivals.append(Arrival(now, prompt, _lognormal(rng, 200, 0.7, 4, 4_000), keys))
    return Load("bursty", arrivals, MADE_UNIT_TOKENS, partial(bursty, requests, seed))


def heavy_tailed(requests: int, seed: int = 0) -> Load:
    """Poisson arrivals; prompts Pareto (shape 1.2, from 200 tokens, at most 60,000), outputs log-normal with median
    250 and sigma 1.2, at most 8,000: most requests are small, and a few carry most of the tokens.
    """

    def lengths(rng: random.Random) -> tuple[int, int]:
        return min(60_000, int(200 * rng.paretovariate(1.2))), _lognormal(rng, 250, 1.2, 4, 8_000)

    return poisson("heavy_tailed", requests, seed, lengths)


def code(requests: int, seed: int = 0) -> Load:
    """Code completion: Poisson arrivals of long prompts (log-normal, median 2,500 tokens, sigma 0.7) that share
    nothing, and of few tokens out (median 20, sigma 0.6).
    """

    def lengths(rng: random.Random) -> tuple[int, int]:
        return _lognormal(rng, 2500, 0.7, 64, 16_000), _lognormal(rng, 20, 0.6, 1, 200)

    return poisson("code", requests, seed, lengths)


def documents(requests: int, seed: int = 0) -> Load:
    """Chats beside documents: Poisson arrivals, every fourth one, by chance, a prompt of about 8,000 tokens that is
    answered in 64. The others are about 200 tokens long, and are answered in 300 (all sigma 0.3).
    """

    def lengths(rng: random.Random) -> tuple[int, int]:
        prompt, output = (8_000, 64) if rng.random() < 0.25 else (200, 300)
        return _lognormal(rng, prompt, 0.3, 16, 32_000), _lognormal(rng, output, 0.3, 4, 4_000)

    return poisson("documents", requests, seed, lengths)


def chat(requests: int, seed: int = 0, rate: float = 1.0) -> Load:
    """Conversations of four turns on average, 30 s apart on average, that begin with one of 20 system prompts of 512
    tokens. A turn adds a question (median 120 tokens) to all turns before it; answers have a median of 250 tokens.
    """
    conversation = _Sessions(turns=4, think_s=30.0, added=(120, 1.0), output=(250, 0.8), shared=[1] * 20)
    return Load("chat", conversation.arrivals(requests, seed, rate), MADE_UNIT_TOKENS, partial(chat, requests, seed))


def agents(requests: int, seed: int = 0, rate: float = 1.0) -> Load:
    """Agents of 12 calls on average, 4 s apart on average, that begin with one of eight instructions of 4,096 to 11,264
    tokens. A call adds a tool's output (median 500 tokens, sigma 1); answers are short (median 60 tokens).
    """
    agent = _Sessions(turns=12, think_s=4.0, added=(500, 1.0), output=(60, 0.8), shared=range(8, 24, 2))
    return Load("agents", agent.arrivals(requests, seed, rate), MADE_UNIT_TOKENS, partial(agents, requests, seed))


# The request rate of each phase of `changing`, relative to `chat`: a fleet is about equally busy in each phase.
PHASES: dict[str, float] = {"chat": 1.0, "code": 0.7, "agents": 0.4}


def changing(requests: int, seed: int = 0, rate: float = 1.0) -> Load:
    """`chat`, then `code`, then `agents`, for a third of the time each: no fixed split suits all three."""
    phase_s = requests / (rate * sum(PHASES.values()))
    arrivals: list[Arrival] = []
    for number, (name, share) in enumerate(PHASES.items()):
        own = max(2, int(phase_s * rate * share))
        made = LOADS[name](own, seed)
        made = made.at(rate * share) if made.at is not None else made
        factor = 1.0 if made.at is not None else 1.0 / (rate * share)  # `code` always has one request per second
        arrivals += [
            Arrival(
                number * phase_s + a.at * factor,
                a.prompt_tokens,
                a.output_tokens,
                tuple(key * len(PHASES) + number for key in a.keys),
            )
            for a in made.arrivals
            if a.at * factor < phase_s
        ]
    return Load("changing", arrivals, MADE_UNIT_TOKENS, partial(changing, requests, seed))


ADAPTERS = 100  # in the load of this name


def adapters(requests: int, seed: int = 0, exponent: float = 1.0) -> Load:
    """Poisson arrivals for one of 100 LoRA adapters each, of which the n-th is asked for as often as n to the power of
    `-exponent` (Zipf). Lengths as in `bursty`; half of the prompts begin with 512 tokens that its adapter's share.
    """
    rng = random.Random(seed)
    numbers = range(1, ADAPTERS + 1)
    drawn = rng.choices(numbers, [number**-exponent for number in numbers], k=requests)
    now = 0.0
    arrivals = []
    for n, adapter in enumerate(drawn):
        now += rng.expovariate(1.0)
        prompt, keys = _lognormal(rng, 700, 1.0, 16, 32_000), [1_000_000 + n * 100 + unit for unit in range(63)]
        if rng.random() < 0.5:
            prompt, keys = prompt + MADE_UNIT_TOKENS, [adapter, *keys]
        units = tuple(keys[: prompt // MADE_UNIT_TOKENS])
        arrivals.append(Arrival(now, prompt, _lognormal(rng, 200, 0.7, 4, 4_000), units, adapter=adapter))
    return Load("adapters", arrivals, MADE_UNIT_TOKENS)


class _Sessions(NamedTuple):
    """Sessions in which each request's prefix is all of the session before it. Lengths are (median, sigma)."""

    turns: int  # mean; geometric
    think_s: float  # mean from one request to the next; exponential
    added: tuple[float, float]  # prompt tokens per turn
    output: tuple[float, float]
    shared: Sequence[int]  # for each kind of session, the prefix units that all of its sessions share

    def arrivals(self, requests: int, seed: int, rate: float) -> list[Arrival]:
        rng = random.Random(seed)
        arrivals: list[Arrival] = []
        now = 0.0
        # The load begins in the middle of sessions, not with the first requests of all.
        warm_up_s = 3 * self.turns * self.think_s
        if (made := warm_up_s * rate + requests) > MOST_REQUESTS:
            most = (MOST_REQUESTS - requests) / warm_up_s
            raise ConfigError(
                f"rate: expected at most {most:.3g} requests per second, got {rate:g}: sessions that think for "
                f"{self.think_s:g} s begin with {made:.3g} requests then"
            )
        for session in count():
            now += rng.expovariate(rate / self.turns)
            if now > warm_up_s + requests / rate:
                break
            kind = rng.randrange(len(self.shared))
            units = [kind * 1000 + unit for unit in range(self.shared[kind])]
            tokens, at = len(units) * MADE_UNIT_TOKENS, now
            while True:
                tokens += _lognormal(rng, *self.added, 4, 16_000)
                own = tokens // MADE_UNIT_TOKENS - self.shared[kind]
                keys = (*units, *(1_000_000 + session * 1000 + unit for unit in range(own)))
                output = _lognormal(rng, *self.output, 1, 4_000)
                if at >= warm_up_s:
                    arrivals.append(Arrival(at - warm_up_s, tokens, output, keys))
                tokens += output
                if rng.random() < 1 / self.turns or tokens > 100_000:
                    break
                at += rng.expovariate(1 / self.think_s)
        arrivals.sort(key=lambda arrival: arrival.at)
        return arrivals[:requests]


LOADS: dict[str, Callable[[int, int], Load]] = {
    "bursty": bursty,
    "heavy_tailed": heavy_tailed,
    "code": code,
    "documents": documents,
    "chat": chat,
    "agents": agents,
    "changing": changing,
    "adapters": adapters,
}


def synthetic(name: str, requests: int, seed: int = 0) -> Load:
    """The named load, of about `requests` requests. Raises ConfigError for an unknown name, or if none is made."""
    if name not in LOADS:
        raise ConfigError(f"load: expected a trace file or one of {', '.join(LOADS)}, got {name!r}")
    return filled(LOADS[name](requests, seed))


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(max(low, min(high, rng.lognormvariate(math.log(median), sigma))))
