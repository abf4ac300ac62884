"""One engine's KV memory: blocks in use, the prefix cache in the free blocks, and its host tier.

As in vLLM, sequences share the blocks of a prefix by reference counts, from the step on that computes them. Unused
blocks stay cached until they are evicted, the least recently used first. The host tier has a copy of what was used
last. A prefix key names a *unit* of one or more whole blocks (512 tokens in Mooncake's trace).
"""

from __future__ import annotations

from collections.abc import Sequence


class KVPool:
    """`used` counts blocks that sequences use. Cached blocks count as free, since any allocation may evict them."""

    __slots__ = ("_cached", "_host", "_refs", "dirty", "host_units", "total", "unit_blocks", "unwritten", "used")

    def __init__(self, total: int, unit_blocks: int = 1, host_blocks: int = 0) -> None:
        self.total = total
        self.host_units = host_blocks // unit_blocks
        self._host: dict[int, None] = {}  # oldest first
        self.unit_blocks = unit_blocks
        self.used = 0
        self._refs: dict[int, int] = {}
        self.unwritten: set[int] = set()  # of those in use: allocated, and not computed or received yet
        self._cached: dict[int, None] = {}  # oldest first
        self.dirty: set[int] = set()  # keys stored or removed since the last report

    @property
    def free(self) -> int:
        return self.total - self.used

    def holds(self, key: int) -> bool:
        """Whether the device has it."""
        return key in self._cached or (key in self._refs and key not in self.unwritten)

    def take_changes(self) -> tuple[list[int], list[int], list[int]]:
        """Since the last call: keys that the device has got, that are gone, and that only the host tier has still."""
        dirty, self.dirty = self.dirty, set()
        stored, left = [key for key in dirty if self.holds(key)], [key for key in dirty if not self.holds(key)]
        return stored, [key for key in left if key not in self._host], [key for key in left if key in self._host]

    def held_units(self, keys: Sequence[int]) -> int:
        """How many leading units of a prompt the device or the host tier has."""
        for depth, key in enumerate(keys):
            if not (self.holds(key) or key in self._host):
                return depth
        return len(keys)

    def hit_units(self, keys: Sequence[int]) -> int:
        """How many leading units of a prompt the device has."""
        refs, cached, unwritten = self._refs, self._cached, self.unwritten
        for depth, key in enumerate(keys):
            if (key not in refs or key in unwritten) and key not in cached:
                return depth
        return len(keys)

    def acquire(self, keys: Sequence[int], blocks: int) -> int:
        """Allocate `blocks` blocks for a prompt, those of its units `keys` included.

        Returns the number of leading units that were in memory, or -1 if there is no room. `write` says when the others
        are.
        """
        if not keys:
            if blocks > self.total - self.used:
                return -1
            self.used += blocks
            if self._cached:
                self._evict()
            return 0
        refs, cached, unit = self._refs, self._cached, self.unit_blocks
        shared = sum(key in refs for key in keys)
        need = blocks - shared * unit
        if need > self.total - self.used:
            return -1
        hits = self.hit_units(keys)
        for key in keys:
            if key in refs:
                refs[key] += 1
            else:
                refs[key] = 1
                if key in cached:
                    del cached[key]
                else:
                    self.unwritten.add(key)
        self.used += need
        self._evict()
        return hits

    def write(self, keys: Sequence[int]) -> None:
        """These units, which sequences use, are computed in this step, or have been received."""
        if self.unwritten and (new := self.unwritten.intersection(keys)):
            self.unwritten -= new
            self.dirty |= new

    def grow(self, blocks: int) -> None:
        """Allocate more blocks for sequences that have some. The caller has checked `free`."""
        self.used += blocks
        if self._cached:
            self._evict()

    def release(self, keys: Sequence[int], blocks: int) -> None:
        """Free the blocks that `acquire` and `grow` allocated: `blocks` in all, those of `keys` included."""
        refs, cached, unwritten, unit = self._refs, self._cached, self.unwritten, self.unit_blocks
        freed = blocks - len(keys) * unit
        # The last unit of a prefix becomes the oldest in the cache, so that eviction shortens a prefix from its end.
        for key in reversed(keys):
            left = refs[key] - 1
            if left:
                refs[key] = left
            else:
                del refs[key]
                freed += unit
                if key in unwritten:
                    unwritten.remove(key)
                else:
                    cached[key] = None
        self.used -= freed
        if self.host_units:
            self._copy([key for key in keys if self.holds(key)])

    def store(self, keys: Sequence[int]) -> None:
        """Cache leading units of a prompt that came from another worker, in blocks that no sequence uses."""
        refs, cached = self._refs, self._cached
        for key in reversed(keys):  # the oldest first, as `release` leaves them
            if key not in refs:
                if key not in cached:
                    self.dirty.add(key)
                cached.pop(key, None)
                cached[key] = None
        self.write(keys)
        if self.host_units:
            self._copy(keys)
        self._evict()

    def forget(self) -> None:
        """Nothing is cached any more, nor will be what is in use now."""
        self.dirty.update(self._refs, self._cached, self._host)
        self.unwritten.update(self._refs)
        self._cached.clear()
        self._host.clear()

    def clear(self) -> None:
        self.forget()
        self.unwritten.clear()
        self._refs.clear()
        self.used = 0

    def _copy(self, keys: Sequence[int]) -> None:
        """Into the host tier, or make them its newest."""
        host = self._host
        for key in reversed(keys):
            host.pop(key, None)
            host[key] = None
        while len(host) > self.host_units:
            key = next(iter(host))
            del host[key]
            self.dirty.add(key)

    def _evict(self) -> None:
        cached, unit = self._cached, self.unit_blocks
        while cached and self.used + len(cached) * unit > self.total:
            key = next(iter(cached))
            del cached[key]
            self.dirty.add(key)
