"""What a worker tells of its prefix cache: changes as they come, coalesced, and all of it when a frontend asks.

Keys are those of `policy.prefix_keys`; the engine says which it stored and removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from orchestrator.types import PrefixEvents
from orchestrator.wire.messages import PrefixSnapshot
from workers.engine import PrefixDelta
from workers.loads import LoadReporter

# A prefix is asked for again seconds later; a batch for each engine step would be most of a large fleet's traffic.
MIN_INTERVAL_S = 0.02
SNAPSHOT_KEYS = 8192  # of one message: a frontend takes it in within a few milliseconds


class PrefixChanges:
    """Net changes since they were last taken, bounded by the keys that came or went."""

    def __init__(self) -> None:
        self._cleared = False
        self._held: dict[int, bool] = {}  # by key that came or went: whether it is held now

    def __bool__(self) -> bool:
        return self._cleared or bool(self._held)

    def stored(self, keys: Iterable[int]) -> None:
        self._held.update(dict.fromkeys(keys, True))

    def removed(self, keys: Iterable[int]) -> None:
        self._held.update(dict.fromkeys(keys, False))

    def cleared(self) -> None:
        self._cleared = True
        self._held.clear()

    def add(self, delta: PrefixDelta) -> None:
        if delta.cleared:
            self.cleared()
        self.removed(delta.removed)
        self.stored(delta.stored)

    def take(self) -> PrefixDelta:
        stored = [key for key, held in self._held.items() if held]
        removed = [key for key, held in self._held.items() if not held]
        delta = PrefixDelta(stored, removed, self._cleared)
        self._cleared, self._held = False, {}
        return delta


class PrefixReporter:
    """Feed it what the engine says; it publishes by itself. `publish` and `send` never wait."""

    def __init__(
        self,
        worker_id: str,
        publish: Callable[[PrefixEvents], None],
        send: Callable[[str, PrefixSnapshot], bool],
        load: LoadReporter,
    ) -> None:
        self._worker_id, self._publish, self._send, self._load = worker_id, publish, send, load
        self._keys: dict[int, None] = {}  # as large as the engine's cache, oldest first
        self._changes = PrefixChanges()
        self._sequence = int(time.time() * 1e6)  # those of a restarted worker continue nothing
        self._published_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, delta: PrefixDelta) -> None:
        if delta.cleared:
            self._keys.clear()
        for key in delta.removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(delta.stored))
        self._changes.add(delta)
        if self._timer is None:
            wait_s = self._published_at + MIN_INTERVAL_S - time.monotonic()
            if wait_s <= 0:
                self._publish_now()
            else:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._publish_now)

    def cleared(self) -> None:
        """The cache was reset. The engine says so too, but with its next step only: until then prompts would be sent
        after what is gone."""
        if self._keys:
            self.changed(PrefixDelta([], [], cleared=True))

    def snapshot(self, frontend_id: str) -> None:
        """Tell this frontend all that is held. What cannot be sent is asked for again."""
        if self._changes:
            self._publish_now()  # a snapshot is as of the last batch
        keys = list(self._keys)
        for start in range(0, len(keys) or 1, SNAPSHOT_KEYS):
            end = start + SNAPSHOT_KEYS
            part = PrefixSnapshot(self._worker_id, self._sequence, keys[start:end], more=end < len(keys))
            if not self._send(frontend_id, part):
                return

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _publish_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._published_at = time.monotonic()
        self._sequence += 1
        delta = self._changes.take()
        self._publish(PrefixEvents(self._worker_id, self._sequence, delta.stored, delta.removed, delta.cleared))
        self._load.prefix_sequence = self._sequence
