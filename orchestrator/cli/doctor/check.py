"""One check of the doctor: its name, its result, and the fix if it did not pass."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    name: str
    level: Level
    said: str
    fix: str = ""


def at_least(name: str, value: float, warn: float, fail: float, said: str, fix: str) -> Check:
    """`fail` below one bound, `warn` below another."""
    level: Level = "fail" if value < fail else "warn" if value < warn else "ok"
    return Check(name, level, said, "" if level == "ok" else fix)


def at_most(name: str, value: float, warn: float, fail: float, said: str, fix: str) -> Check:
    """`fail` above one bound, `warn` above another."""
    return at_least(name, -value, -warn, -fail, said, fix)
