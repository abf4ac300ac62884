"""One line of the doctor: what was looked at, how it is, and the mend where it is not well."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    name: str
    level: Level
    said: str
    mend: str = ""


def at_least(name: str, value: float, warn: float, fail: float, said: str, mend: str) -> Check:
    """`fail` below one bound, `warn` below another."""
    level: Level = "fail" if value < fail else "warn" if value < warn else "ok"
    return Check(name, level, said, "" if level == "ok" else mend)


def at_most(name: str, value: float, warn: float, fail: float, said: str, mend: str) -> Check:
    """`fail` above one bound, `warn` above another."""
    return at_least(name, -value, -warn, -fail, said, mend)
