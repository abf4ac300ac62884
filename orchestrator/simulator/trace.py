"""Requests to simulate: reads published traces, and changes loads in rate, length or number.

Mooncake (kvcache-ai/Mooncake, FAST25-release/traces): JSON lines with `timestamp` (ms), `input_length`,
`output_length` and `hash_ids`, one per 512 prompt tokens. Azure (AzurePublicDataset): CSV with TIMESTAMP,
ContextTokens, GeneratedTokens. A malformed line is an error that names file and line.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.config.settings import ConfigError

MOONCAKE_UNIT_TOKENS = 512  # in a prefix unit, which prompts share as a whole or not at all

MOST_REQUESTS, MOST_S = 10_000_000, 1e6  # of a load: what a machine can hold, and simulate in minutes
SLOWED = 100  # by so much each load can be slowed down: whoever looks for a fleet's limit begins below it


class Arrival(msgspec.Struct, frozen=True):
    """One request of a load. `keys` name its prefix units, one key per whole `Load.unit_tokens` of the prompt."""

    at: float  # seconds from the start
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    priority: int = 0
    ttft_slo_s: float | None = None  # its own objectives; None: the fleet's
    tpot_slo_s: float | None = None
    tenant: str = ""
    adapter: int = 0  # the number of its LoRA adapter; 0: none


class Load(msgspec.Struct, frozen=True):
    """Arrivals in order of time. `unit_tokens` is 0 if no prompts share prefixes.

    `at` makes a synthetic load anew for another rate, because its periods in seconds must not change with the rate.
    """

    name: str
    arrivals: list[Arrival]
    unit_tokens: int = 0
    at: Callable[[float], Load] | None = None

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        span = self.arrivals[-1].at - self.arrivals[0].at if len(self.arrivals) > 1 else 0.0
        return (len(self.arrivals) - 1) / span if span > 0 else 0.0


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int]


def read_trace(path: Path, seed: int = 0) -> Load:
    """Read a trace of Mooncake or Azure, which differ in their first line. Raises ConfigError for any other file, a
    malformed line, or a trace without requests."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read ({why}); name a Mooncake .jsonl or an Azure .csv file") from None
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        arrivals, unit_tokens = _spread_bursts(_from_zero(_mooncake(path, lines)), seed), MOONCAKE_UNIT_TOKENS
    elif "ContextTokens" in first:
        arrivals, unit_tokens = _from_zero(_azure(path, lines)), 0
    else:
        expected = "JSON (Mooncake) or a header with ContextTokens (Azure)"
        raise ConfigError(f"{path}, line 1: expected {expected}, got {first[:60]!r}")
    if not arrivals:
        raise ConfigError(f"{path}: no requests in it")
    arrivals.sort(key=lambda arrival: arrival.at)
    return Load(path.stem, arrivals, unit_tokens)


def _from_zero(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Shift the arrivals so that the first is at 0: a piece of a longer trace may begin hours later."""
    found = list(arrivals)
    begin = min((arrival.at for arrival in found), default=0.0)
    return [msgspec.structs.replace(arrival, at=arrival.at - begin) for arrival in found]


def _mooncake(path: Path, lines: Sequence[str]) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        # The last id may name a partial unit, which no cache holds.
        keys = tuple(entry.hash_ids[: entry.input_length // MOONCAKE_UNIT_TOKENS])
        yield Arrival(entry.timestamp / 1000, entry.input_length, max(1, entry.output_length), keys)


def _azure(path: Path, lines: Sequence[str]) -> Iterator[Arrival]:
    header = [name.strip() for name in lines[0].split(",")]
    try:
        columns = [header.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    except ValueError as error:
        raise ConfigError(f"{path}, line 1: {error}; expected TIMESTAMP, ContextTokens, GeneratedTokens") from None
    start: datetime | None = None
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fields = line.split(",")
        try:
            stamp, prompt, output = (fields[column].strip() for column in columns)
            moment = datetime.fromisoformat(stamp[:26])  # the fraction of a second has seven digits; Python reads six
            prompt_tokens, output_tokens = int(prompt), int(output)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path}, line {number}: {error}; got {line[:80]!r}") from None
        if prompt_tokens < 1 or output_tokens < 0:
            raise ConfigError(f"{path}, line {number}: expected at least one prompt token, got {line[:80]!r}")
        start = start or moment
        yield Arrival((moment - start).total_seconds(), prompt_tokens, max(1, output_tokens))


def _spread_bursts(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Spread the requests of each tick at random over the tick: Mooncake's timestamps are about 3 s apart."""
    rng = random.Random(seed)
    times = sorted({arrival.at for arrival in arrivals})
    following = dict(zip(times, [*times[1:], times[-1] + 3.0 if times else 0.0], strict=True))
    return [msgspec.structs.replace(a, at=a.at + rng.random() * min(3.0, following[a.at] - a.at)) for a in arrivals]


def poisson(name: str, requests: int, seed: int, lengths: Callable[[random.Random], tuple[int, int]]) -> Load:
    """Poisson arrivals, one per second on average, that share nothing. `lengths` draws tokens in and out."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += rng.expovariate(1.0)
        arrivals.append(Arrival(now, *lengths(rng)))
    return Load(name, arrivals)


def steady(requests: int, prompt_tokens: int, output_tokens: int, seed: int = 0) -> Load:
    """`poisson`, all with the same lengths."""
    name = f"{prompt_tokens} in {output_tokens} out"
    return poisson(name, requests, seed, lambda rng: (prompt_tokens, output_tokens))


def at_rate(load: Load, rate: float) -> Load:
    """The load at this mean rate (requests per second); a trace's times are stretched or squeezed. Raises ConfigError
    for a rate of 0 or less, or at which the load has no requests, too many, or takes too long."""
    if rate <= 0:
        raise ConfigError(f"rate: expected more than 0 requests per second, got {rate}")
    if rate < (least := min(len(load.arrivals) / MOST_S, load.rate / SLOWED)):
        raise ConfigError(
            f"rate: expected at least {least:.3g} requests per second, got {rate:g}: {len(load.arrivals)} requests "
            f"would take longer than {len(load.arrivals) / least:.3g} s"
        )
    if load.at is not None:
        return filled(load.at(rate))
    factor = load.rate / rate
    arrivals = [msgspec.structs.replace(a, at=a.at * factor) for a in load.arrivals]
    return Load(load.name, arrivals, load.unit_tokens)


def first(load: Load, requests: int) -> Load:
    return Load(load.name, load.arrivals[:requests], load.unit_tokens, _anew(load, lambda made: first(made, requests)))


def scaled(load: Load, factor: float) -> Load:
    """The same arrivals with lengths multiplied by a factor. Prefix keys are kept only at factor 1."""
    if factor == 1.0:
        return load
    arrivals = [
        msgspec.structs.replace(
            a,
            prompt_tokens=max(1, round(a.prompt_tokens * factor)),
            output_tokens=max(1, round(a.output_tokens * factor)),
            keys=(),
        )
        for a in load.arrivals
    ]
    return Load(load.name, arrivals, 0, _anew(load, lambda made: scaled(made, factor)))


def filled(load: Load) -> Load:
    """Return the load. Raises ConfigError if it is empty."""
    if not load.arrivals:
        raise ConfigError(f"load {load.name}: none of so few requests comes in time; ask for more")
    return load


def _anew(load: Load, change: Callable[[Load], Load]) -> Callable[[float], Load] | None:
    """The `at` of the load that `change` makes: make the load for the rate, then change it."""
    at = load.at
    return None if at is None else lambda rate: change(at(rate))


def repeated(load: Load, times: int) -> Load:
    """Copies of the load one after another, each with prefixes of its own, for fleets that a short trace would not
    fill."""
    span = load.arrivals[-1].at + (1.0 / load.rate if load.rate else 1.0)
    top = 1 + max((key for a in load.arrivals for key in a.keys), default=0)
    arrivals = [
        msgspec.structs.replace(a, at=a.at + n * span, keys=tuple(key + n * top for key in a.keys))
        for n in range(times)
        for a in load.arrivals
    ]
    return Load(load.name, arrivals, load.unit_tokens)
