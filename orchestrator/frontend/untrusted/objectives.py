"""Latency objectives that a request brings with it, in headers that llm-d and the Gateway API's predictor use too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

TTFT, TPOT = b"x-slo-ttft-ms", b"x-slo-tpot-ms"
MAX_MS = 86_400_000.0  # a day


class Objectives(NamedTuple):
    """Seconds; None: the fleet's."""

    ttft_s: float | None = None
    tpot_s: float | None = None


def read(headers: Iterable[tuple[bytes, bytes]]) -> Objectives:
    """Raises ValueError for what is no number of milliseconds."""
    found = {name: _seconds(name, value) for name, value in headers if name in (TTFT, TPOT)}
    return Objectives(found.get(TTFT), found.get(TPOT))


def _seconds(name: bytes, value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= MAX_MS:  # not for NaN either
        shown = value[:40].decode("latin-1")
        raise ValueError(f"{name.decode()}: expected milliseconds above 0 and up to {MAX_MS:.0f}, got {shown!r}")
    return milliseconds / 1e3
