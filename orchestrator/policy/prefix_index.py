"""Which workers hold which KV blocks of which prefixes: fed by their stored/removed events, asked per request.

Keys name a block *and everything before it* (a chained hash, see `prefix_keys.py`), so one look-up at depth d tells
of d blocks. Beliefs only: a wrong one costs a cache miss, never an answer. Memory and look-ups are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class PrefixEvents(msgspec.Struct, frozen=True):
    """What changed in one worker's prefix cache, in order: removed before stored. `sequence` counts its batches."""

    worker_id: str
    sequence: int
    stored: list[int] = []
    removed: list[int] = []
    cleared: bool = False


class PrefixIndex:
    """`max_keys` bounds memory: beyond it the keys stored longest ago are forgotten (a lost hit, no false one).

    A gap in a worker's sequence means lost events, and what is believed of it may be wrong: all of it is dropped,
    and the worker is named in `stale` until `resync` brings what it holds, or it is fed anew by what it stores.
    """

    def __init__(self, max_keys: int = 1_000_000) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys: expected at least 1, got {max_keys}")
        self.max_keys = max_keys
        self.stale: set[str] = set()
        # One bit per worker, in one integer per key: a thousand workers cost 128 bytes, and one & selects the live.
        self._holders: dict[int, int] = {}
        self._bit: dict[str, int] = {}
        self._worker_at: dict[int, str] = {}
        self._sequence: dict[str, int] = {}
        self._live = 0
        self._free_bits: list[int] = []
        self._retired: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, events: PrefixEvents) -> bool:
        """Take one batch. False when batches were lost before it; replayed ones are ignored."""
        worker_id = events.worker_id
        last = self._sequence.get(worker_id)
        if last is not None and events.sequence <= last:
            return True
        complete = last is None or events.sequence == last + 1
        if not complete:
            self.forget(worker_id)
            self.stale.add(worker_id)
        self._sequence[worker_id] = events.sequence
        if events.cleared:
            self._retire(worker_id)
        if events.removed:
            self.removed(worker_id, events.removed)
        if events.stored:
            self.stored(worker_id, events.stored)
        return complete

    def resync(self, worker_id: str, sequence: int, keys: Iterable[int]) -> None:
        """Replace what is believed of a worker by all that it holds as of `sequence`."""
        self.forget(worker_id)
        self._sequence[worker_id] = sequence
        self.stored(worker_id, keys)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that is gone, restarted, or no longer believed. Constant time."""
        self._retire(worker_id)
        self._sequence.pop(worker_id, None)
        self.stale.discard(worker_id)

    def stored(self, worker_id: str, keys: Iterable[int]) -> None:
        mask = 1 << self._bit_of(worker_id)
        holders = self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | mask
        while len(holders) > self.max_keys:
            del holders[next(iter(holders))]

    def removed(self, worker_id: str, keys: Iterable[int]) -> None:
        bit = self._bit.get(worker_id)
        if bit is None:
            return
        mask, holders = 1 << bit, self._holders
        for key in keys:
            if (held := holders.get(key)) is not None:
                if held := held & ~mask:
                    holders[key] = held
                else:
                    del holders[key]

    def match(self, keys: Sequence[int], max_workers: int = 8) -> dict[str, int]:
        """Blocks of the prefix held, by worker, for the (at most `max_workers`) workers that hold most.

        About log2(len(keys)) probes: the deepest hit is found by bisection (whoever holds a block holds those
        before it, up to evictions under way), and the depths of others are the probes they were seen at, so
        never more than they hold.
        """
        holders, live = self._holders, self._live
        low, high = 0, len(keys)  # the deepest hit is in [low, high)
        seen: list[tuple[int, int]] = []
        while low < high:
            # The first probe settles most requests: nobody holds even the first block.
            middle = (low + high) // 2 if seen else 0
            mask = holders.get(keys[middle], 0) & live
            if mask:
                seen.append((middle + 1, mask))
                low = middle + 1
            elif not seen:
                return {}
            else:
                high = middle
        found: dict[str, int] = {}
        taken = 0
        for depth, mask in reversed(seen):  # hits were probed at growing depth
            mask &= ~taken
            taken |= mask
            while mask and len(found) < max_workers:
                lowest = mask & -mask
                mask ^= lowest
                found[self._worker_at[lowest.bit_length() - 1]] = depth
        return found

    def _bit_of(self, worker_id: str) -> int:
        bit = self._bit.get(worker_id)
        if bit is None:
            if not self._free_bits and len(self._retired) >= 64:
                self._sweep()
            bit = self._free_bits.pop() if self._free_bits else len(self._bit) + len(self._retired)
            self._bit[worker_id] = bit
            self._worker_at[bit] = worker_id
            self._live |= 1 << bit
        return bit

    def _retire(self, worker_id: str) -> None:
        # The bit stays set in the keys, but outside the live mask: it is reused only once swept out of them.
        bit = self._bit.pop(worker_id, None)
        if bit is not None:
            del self._worker_at[bit]
            self._live &= ~(1 << bit)
            self._retired.append(bit)

    def _sweep(self) -> None:
        live = self._live
        self._holders = {key: mask & live for key, mask in self._holders.items() if mask & live}
        self._free_bits, self._retired = self._retired, []
