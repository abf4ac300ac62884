"""What a request's headers say of its latency objectives, and of the tenant who sends it.

Objectives are in milliseconds, in headers that llm-d and the Gateway API's predictor use too, or a class of the
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from orchestrator.config.settings import SLOClass

TTFT, TPOT, CLASS, TENANT = b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-slo-class", b"x-tenant"
MAX_MS = 86_400_000.0  # a day
_SHOWN = 100


class Objectives(NamedTuple):
    """Seconds; None: the fleet's."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    name: str = ""  # of its class
    tenant: str = ""

    def resolved(self, classes: Mapping[str, SLOClass]) -> Objectives:
        """What the headers leave open is as its class has it. Raises ValueError for a class that there is not."""
        if not self.name:
            return self
        if (known := classes.get(self.name)) is None:
            there = ", ".join(sorted(classes)) or "none; slo.classes in the configuration adds them"
            raise ValueError(f"{CLASS.decode()}: no class {self.name!r}; there are: {there}")
        return self._replace(ttft_s=self.ttft_s or known.ttft_s, tpot_s=self.tpot_s or known.tpot_s)


def read(headers: Iterable[tuple[bytes, bytes]]) -> Objectives:
    """Raises ValueError for what is no number of milliseconds."""
    found = {name: value for name, value in headers if name in (TTFT, TPOT, CLASS, TENANT)}
    ttft_s, tpot_s = (_seconds(name, found[name]) if name in found else None for name in (TTFT, TPOT))
    return Objectives(ttft_s, tpot_s, *(_text(found.get(name, b"")) for name in (CLASS, TENANT)))


def _text(value: bytes) -> str:
    return value[:_SHOWN].decode("latin-1")


def _seconds(name: bytes, value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= MAX_MS:  # not for NaN either
        raise ValueError(f"{name.decode()}: expected milliseconds above 0 and up to {MAX_MS:.0f}, got {_text(value)!r}")
    return milliseconds / 1e3
