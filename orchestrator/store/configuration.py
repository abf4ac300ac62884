"""The fleet's configuration in Redis, and its change from one generation to the next: a rollout.

What is here is told to workers and launchers of every host, so it has neither the URL of Redis nor anything of
frontends' own. Not responsible for carrying a rollout out (`launch/rollout.py`).
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from orchestrator.store.client import Redis
from orchestrator.store.keys import REGISTRY, Keys


class Phase(str, enum.Enum):
    FORWARD = "forward"  # to the new configuration
    BACK = "back"  # to the old one: somebody aborted it, or a new worker cannot start
    DONE = "done"
    UNDONE = "undone"


class Version(msgspec.Struct, frozen=True):
    """A configuration, as `launch.commands.shared` makes it, and its number: every rollout takes a new one."""

    generation: int
    config: dict[str, Any]


class RolloutStatus(msgspec.Struct, frozen=True):
    """A rollout as `/fleet` and `orchestrator status` show it: without the configurations."""

    phase: Phase
    old: int  # generation
    new: int
    why: str
    # URLs of frontends that no launcher runs, and that kept another configuration than the rollout ended with.
    to_restart: list[str] = []


class Rollout(msgspec.Struct, frozen=True):
    """The last one that was ordered. Wherever it stands, `target` is what all members are to run."""

    old: Version
    new: Version
    max_unavailable: int = 1
    phase: Phase = Phase.FORWARD
    why: str = ""  # it goes, or went, back

    @property
    def target(self) -> Version:
        return self.new if self.phase in (Phase.FORWARD, Phase.DONE) else self.old

    @property
    def under_way(self) -> bool:
        return self.phase in (Phase.FORWARD, Phase.BACK)

    @property
    def settled(self) -> Version:
        """What a process that comes begins with: the old one, until the rollout has ended."""
        return self.old if self.under_way else self.target

    def to(self, phase: Phase, why: str = "") -> Rollout:
        return msgspec.structs.replace(self, phase=phase, why=why or self.why)


_rollout: msgspec.json.Decoder[Rollout] = msgspec.json.Decoder(Rollout)


class Configuration:
    """Every method raises RedisAway."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def write(self, version: Version) -> None:
        """What workers on other hosts are started with. It stays when the fleet ends."""
        await self._redis.execute_command("SET", self._keys.config, msgspec.json.encode(version))

    async def read(self) -> Version | None:
        """None when there is none, or it was written by another release."""
        found: bytes | None = await self._redis.execute_command("GET", self._keys.config)
        try:
            return msgspec.json.decode(found, type=Version) if found else None
        except msgspec.DecodeError:
            return None

    async def rollout(self) -> Rollout | None:
        """The last one; None when there was none, or it was written by another release."""
        found: bytes | None = await self._redis.execute_command("GET", self._keys.rollout)
        try:
            return _rollout.decode(found) if found else None
        except msgspec.DecodeError:
            return None

    async def change_rollout(self, seen: Rollout | None, wanted: Rollout) -> bool:
        """False when it is not as `seen` any more: somebody else changed it."""
        was = msgspec.json.encode(seen) if seen is not None else b""
        args = (self._keys.prefix, was, msgspec.json.encode(wanted))
        return bool(await self._redis.call(REGISTRY, "write_rollout", *args))

    async def forget_rollout(self) -> None:
        """Of a fleet that has ended: the next one begins with its own configuration."""
        await self._redis.execute_command("DEL", self._keys.rollout)
