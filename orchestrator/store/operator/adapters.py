"""The fleet's list of LoRA adapters, a document in Redis, with a revision that every change raises.

Frontends follow it (`fleet/adapters.py`), and each says which revision it serves. Those of a frontend's configuration
are not in it.
"""

from __future__ import annotations

import time

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """`number`: by which engines know it; see `wire.adapters`. `path`: as workers read it."""

    name: str
    path: str
    number: int
    base_model: str | None = None
    is_3d: bool = False  # the layout of its MoE weights, as vLLM's `is_3d_lora_weight`


class AdapterList(msgspec.Struct, frozen=True):
    revision: int = 0
    adapters: dict[str, Adapter] = {}  # by name

    def changed(self, name: str, adapter: Adapter | None) -> AdapterList:
        """With this adapter in the place of the one of this name, or without it (None)."""
        others = {known: one for known, one in self.adapters.items() if known != name}
        # Microseconds of the clock, so that it grows even when Redis has lost the earlier ones.
        revision = max(self.revision + 1, int(time.time() * 1e6))
        return AdapterList(revision, others if adapter is None else {**others, name: adapter})
