"""The prefixes that workers will have cached soon: those of prompts that were sent to them and are not computed yet.

A worker reports a block as stored when it is computed. Until then the next turn of a conversation, or another prompt of
a burst that shares its beginning, would be sent elsewhere and computed twice. The longer prompts wait, the more of them
would be, so that a fleet which has fallen behind would stay behind.
"""

from __future__ import annotations

from collections.abc import Sequence


class ExpectedPrefixes:
    """The prompts that one router has sent. Keys are those of `PrefixIndex`."""

    def __init__(self, step: int) -> None:
        """One key in `step` is remembered, which bounds the work for a long prompt."""
        self._step = step
        # By key: the worker of the latest prompt, and the number of prompts.
        self._coming: dict[int, tuple[str, int]] = {}
        self._keys_of: dict[str, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._keys_of)

    def sent(self, request_id: str, worker_id: str, keys: Sequence[int]) -> None:
        """A prompt with these keys was sent to a worker, which will compute it."""
        self.settled(request_id)
        sampled = keys[self._step - 1 :: self._step]
        if not sampled:
            return
        self._keys_of[request_id] = sampled
        coming = self._coming
        for key in sampled:
            known = coming.get(key)
            coming[key] = worker_id, known[1] + 1 if known is not None else 1

    def settled(self, request_id: str) -> None:
        """The prompt is computed, or will not be. Ignores unknown requests."""
        for key in self._keys_of.pop(request_id, ()):
            worker_id, prompts = self._coming[key]
            if prompts > 1:
                self._coming[key] = worker_id, prompts - 1
            else:
                del self._coming[key]

    def deepest(self, keys: Sequence[int]) -> tuple[str, int] | None:
        """The worker that will hold most leading blocks of a prompt, and their number."""
        if not self._coming:
            return None
        step, coming = self._step, self._coming
        # All keys before a known one are known, because a prompt is remembered from its first block on.
        low, high = 0, len(keys) // step
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle * step - 1] in coming:
                low = middle
            else:
                high = middle - 1
        return (coming[keys[low * step - 1]][0], low * step) if low else None
