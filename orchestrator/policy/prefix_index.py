"""Which workers have which KV blocks cached, learned from their events of stored and removed blocks.

A key names a block *and everything before it* (a chained hash, see `prefix_keys.py`), so a worker that holds the key at
depth d holds d blocks. The index may be wrong: that costs a cache miss, never a wrong answer. Memory and look-ups are
bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from orchestrator.policy.prefix_keys import ExpectedPrefixes
from orchestrator.types import PrefixEvents

# Probes of one look-up, beyond the bisection for its deepest holder, that find the depths of the other holders. Each
# probe is a miss in the CPU's cache. All probes together take a quarter of a decision's time.
MORE_PROBES = 6
# At most so many holders of one depth are searched for workers of one kind.
MAX_HOLDERS = 64
# Keys that are remembered, at least and at most: 0.1 and 1 GB.
MIN_KEYS, MAX_KEYS = 1_000_000, 10_000_000
EXPECTED_STEP = 16  # keys: of prompts that are not computed yet, one in so many is remembered
# When so many workers are gone, their bits are cleared in all keys: in so many keys with each batch of events.
MANY_RETIRED, SWEPT_AT_ONCE = 64, 1024


class Hits(msgspec.Struct, frozen=True):
    """How many leading blocks of one prompt each worker holds. Valid until the index takes the next event."""

    _index: PrefixIndex
    _all: int  # mask of all workers that hold any
    _levels: list[tuple[int, int]]  # (blocks, mask of the workers that hold so many), most blocks first

    def __bool__(self) -> bool:
        return bool(self._levels)

    def with_depth(self, worker: int, depth: int) -> Hits:
        """The same, with so many blocks for one worker, which is given by its mask."""
        others = [(blocks, mask & ~worker) for blocks, mask in self._levels if mask & ~worker]
        at = sum(blocks > depth for blocks, _ in others)
        return Hits(self._index, self._all | worker, [*others[:at], (depth, worker), *others[at:]])

    def blocks(self, worker_id: str) -> int:
        return self.blocks_of((worker_id,)).get(worker_id, 0)

    def blocks_of(self, worker_ids: Iterable[str]) -> dict[str, int]:
        """Leading blocks by worker, for those of `worker_ids` that hold any."""
        found: dict[str, int] = {}
        bits, holders = self._index.bits, self._all
        for worker_id in worker_ids:
            bit = bits.get(worker_id)
            if bit is None or not holders >> bit & 1:
                continue
            for depth, mask in self._levels:
                if mask >> bit & 1:
                    found[worker_id] = depth
                    break
        return found

    def longest(self) -> Iterator[tuple[str, int]]:
        """The workers that hold any of it, and how many leading blocks, most first. Those with equal hits take turns,
        so that a few of them do not get the whole load of a common prefix."""
        for depth, mask in self._levels:
            for worker_id in self._index.holders(mask):
                yield worker_id, depth

    def longest_hits_by_kind(
        self, max_workers: int, one: Container[str], other: Collection[str], block_size: int = 1
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The `max_workers` workers of each of two kinds that hold most, in one walk over all holders, and how many
        leading blocks each holds, or tokens with a `block_size`."""
        ones: dict[str, int] = {}
        others: dict[str, int] = {}
        worker_at, holders = self._index.worker_at, self._index.holders
        for depth, mask in self._levels:
            last = mask.bit_length() - 1  # most depths have one worker: a call would take as long as all of the rest
            for worker_id in (worker_at[last],) if mask == 1 << last else holders(mask):
                if worker_id in one:
                    if len(ones) < max_workers:
                        ones[worker_id] = depth * block_size
                elif len(others) < max_workers and worker_id in other:
                    others[worker_id] = depth * block_size
            if len(ones) == max_workers and (not other or len(others) == max_workers):
                break
        return ones, others


class PrefixIndex:
    """The keys that each worker holds. `max_keys` bounds memory: above it the index forgets the keys that were stored
    first, which loses hits. Raises ValueError if `max_keys` is below 1.

    A gap in a worker's sequence numbers means lost events. Then the index drops all keys of that worker, and learns
    them anew from `resync` or from later events.

    What a worker is `expected` to compute counts as held, and so does what only its host tier has, which is *hosted*.
    """

    def __init__(self, max_keys: int = MIN_KEYS, expected_step: int = EXPECTED_STEP) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys: expected at least 1, got {max_keys}")
        self.max_keys = max_keys
        self.expected = ExpectedPrefixes(expected_step)
        # One integer per key, one bit per worker: a thousand workers cost 128 bytes, and one `&` selects the live ones.
        self._holders: dict[int, int] = {}
        self._hosted: dict[int, int] = {}  # of these, the holders of which host memory alone has the key
        self.bits: dict[str, int] = {}
        self.worker_at: list[str] = []  # by bit; one that is retired still has its worker's
        self._sequence: dict[str, int] = {}
        self._live = 0
        self._free_bits: list[int] = []
        self._retired: list[int] = []
        self._sweeping: list[int] = []  # bits that are being cleared, in the keys that are left
        self._unswept: list[int] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._holders)

    def make_room(self, blocks: int) -> None:
        """Remember as many keys as all workers together have blocks, within bounds."""
        self.max_keys = min(MAX_KEYS, max(MIN_KEYS, blocks))

    def apply(self, events: PrefixEvents) -> bool:
        """Take one batch of events. Returns False if batches were lost before it. Replayed batches are ignored."""
        worker_id = events.worker_id
        last = self._sequence.get(worker_id, 0)
        if events.sequence <= last:
            return True
        complete = events.sequence == last + 1
        if not complete:
            self.forget(worker_id)
        self._sequence[worker_id] = events.sequence
        if events.cleared:
            self._retire(worker_id)
        if events.removed:
            self.removed(worker_id, events.removed)
        if events.stored:
            self.stored(worker_id, events.stored)
        if events.hosted:
            self.hosted(worker_id, events.hosted)
        return complete

    def sequence(self, worker_id: str) -> int:
        """The number of the last batch taken from this worker; 0 before the first."""
        return self._sequence.get(worker_id, 0)

    def resync(self, worker_id: str, sequence: int, keys: Collection[int]) -> None:
        """Replace the keys of a worker by those that it held after batch `sequence`."""
        self.forget(worker_id)
        self._sequence[worker_id] = sequence
        self.stored(worker_id, keys)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that is gone or restarted, or whose events were lost. Constant time."""
        self._retire(worker_id)
        self._sequence.pop(worker_id, None)

    def hosted(self, worker_id: str, keys: Collection[int]) -> None:
        """From now on only its host tier has them."""
        self.stored(worker_id, keys)
        mask, hosted = 1 << self._bit_of(worker_id), self._hosted
        hosted.update({key: hosted.get(key, 0) | mask for key in keys if key in self._holders})

    def stored(self, worker_id: str, keys: Collection[int]) -> None:
        mask = 1 << self._bit_of(worker_id)
        self._unhost(mask, keys)
        holders, before, after = self._holders, 0, mask
        for key in keys:
            held = holders.get(key, 0)
            if held is not before:
                before, after = held, held | mask
            holders[key] = after  # neighbouring keys with the same holders share one integer
        if (excess := len(holders) - self.max_keys) > 0:
            # Delete many at once: each search for the oldest key walks over all entries deleted before.
            for key in list(islice(holders, excess + self.max_keys // 16)):
                del holders[key]
                self._hosted.pop(key, None)
        if self._sweeping:
            self._sweep()

    def removed(self, worker_id: str, keys: Collection[int]) -> None:
        bit = self.bits.get(worker_id)
        if bit is None:
            return
        self._unhost(1 << bit, keys)
        others, holders, before, after = ~(1 << bit), self._holders, 0, 0
        for key in keys:
            if (held := holders.get(key)) is not None:
                if held is not before:
                    before, after = held, held & others
                if after:
                    holders[key] = after
                else:
                    del holders[key]

    def _unhost(self, mask: int, keys: Collection[int]) -> None:
        if hosted := self._hosted:
            for key in keys:
                if not (held := hosted.get(key, 0)) & mask:
                    continue
                if rest := held & ~mask:
                    hosted[key] = rest
                else:
                    del hosted[key]

    def blocks_on_device(self, worker_id: str, keys: Sequence[int], blocks: int) -> int:
        """Of the leading `blocks` that a worker holds, how many come before the first that only its host tier has."""
        if not self._hosted or (bit := self.bits.get(worker_id)) is None:
            return blocks
        hosted, mask, low = self._hosted, 1 << bit, 0
        while low < blocks:  # a device evicts a prefix from its end
            middle = (low + blocks) // 2
            if hosted.get(keys[middle], 0) & mask:
                blocks = middle
            else:
                low = middle + 1
        return low

    def look_up(self, keys: Sequence[int]) -> Hits:
        """How many leading blocks each worker holds, or will hold by what it is expected to compute."""
        hits = self._held(keys)
        if (expected := self.expected.deepest(keys)) is not None:
            worker_id, depth = expected
            if (bit := self.bits.get(worker_id)) is not None and hits.blocks(worker_id) < depth:
                return hits.with_depth(1 << bit, depth)
        return hits

    def _held(self, keys: Sequence[int]) -> Hits:
        """How many leading blocks each worker holds. One probe is enough if no worker holds the first block.

        Otherwise one bisection finds the depths of all holders: each probe separates the workers that hold this block
        from those that do not (a worker that holds a block holds those before it, except while it evicts them). After
        `MORE_PROBES` the remaining holders are credited with the deepest block that they were found to hold, so never
        with more than they have.
        """
        holders_of = self._holders.get
        at_low = holders_of(keys[0], 0) if keys else 0
        first = at_low & self._live
        if not first:
            return Hits(self, 0, [])
        levels: list[tuple[int, int]] = []
        # Still to be bisected, deepest last: a key that these workers hold, a later one that none of them does, mask,
        # and what the index has at both keys. Neighbours share it where they have the same holders.
        parts: list[tuple[int, int, int, int, int]] = []
        low, high, mask, at_high = 0, len(keys), first, 0
        for _ in range(len(keys).bit_length() + MORE_PROBES):
            while low == (middle := (low + high) >> 1):
                levels.append((low + 1, mask))
                if not parts:
                    return Hits(self, first, levels)
                low, high, mask, at_low, at_high = parts.pop()
            held = holders_of(keys[middle], 0)
            if held is at_low:
                low = middle
            elif held is at_high or not (deeper := held & mask):
                high, at_high = middle, held
            else:
                if deeper != mask:
                    parts.append((low, middle, mask ^ deeper, at_low, held))
                    mask = deeper
                low, at_low = middle, held
        parts.append((low, high, mask, at_low, at_high))
        levels += [(low + 1, mask) for low, _, mask, _, _ in reversed(parts)]
        return Hits(self, first, levels)

    def match(self, keys: Sequence[int], max_workers: int = 8) -> dict[str, int]:
        """Leading blocks by worker, for the (at most `max_workers`) workers that hold most."""
        return dict(islice(self.look_up(keys).longest(), max_workers))

    def holders(self, mask: int) -> list[str]:
        """The workers of a mask that has any, at most `MAX_HOLDERS`. With more than four, each call begins with another
        one."""
        last = mask.bit_length() - 1
        if mask == 1 << last:  # most depths have one worker
            return [self.worker_at[last]]
        parts: tuple[int, ...] = (mask,)
        if mask.bit_count() > 4:
            self._turn += 1
            split = self._turn % mask.bit_length()
            parts = (mask & ((1 << split) - 1), mask >> split << split)
        found: list[str] = []
        worker_at = self.worker_at
        for part in parts:
            while part and len(found) < MAX_HOLDERS:
                bit = part.bit_length() - 1
                part ^= 1 << bit
                found.append(worker_at[bit])
        return found

    def _bit_of(self, worker_id: str) -> int:
        bit = self.bits.get(worker_id)
        if bit is None:
            if not (self._free_bits or self._sweeping) and len(self._retired) >= MANY_RETIRED:
                self._sweeping, self._retired, self._unswept = self._retired, [], list(self._holders)
            if self._free_bits:
                bit = self._free_bits.pop()
                self.worker_at[bit] = worker_id
            else:
                bit = len(self.worker_at)
                self.worker_at.append(worker_id)
            self.bits[worker_id] = bit
            self._live |= 1 << bit
        return bit

    def _retire(self, worker_id: str) -> None:
        # The bit stays set in the keys, but not in the live mask. It is reused only after a sweep has cleared it in the
        # keys.
        bit = self.bits.pop(worker_id, None)
        if bit is not None:
            self._live &= ~(1 << bit)
            self._retired.append(bit)

    def _sweep(self) -> None:
        """Clear the bits of workers that are gone in some more keys. All at once would take seconds."""
        unswept, holders, hosted = self._unswept, self._holders, self._hosted
        others, before, after = ~sum(1 << bit for bit in self._sweeping), 0, 0
        for _ in range(min(SWEPT_AT_ONCE, len(unswept))):
            key = unswept.pop()
            if (held := holders.get(key)) is None:
                continue
            if held is not before:
                before, after = held, held & others
            if not after:
                del holders[key]
                hosted.pop(key, None)
            elif after != held:
                holders[key] = after
                if its := hosted.pop(key, 0) & others:
                    hosted[key] = its
        if not unswept:
            self._free_bits, self._sweeping = self._sweeping, []
