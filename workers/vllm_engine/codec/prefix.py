"""Turns vLLM's KV cache events, in the engine process, into changes of our prefix keys.

The collector replaces the scheduler's event publisher, and passes every batch on to it. `block_hashes` are vLLM's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, EventBatch, EventPublisher
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from orchestrator.policy.prefix_keys import EventTranslator, salt_of
from orchestrator.wire.adapters import unique_name
from workers.engine import PrefixChanges


class PrefixCollector(EventPublisher):
    """Collects changes until they are taken, once a step. Bounded by the engine's cache and its host tier: what either
    has is cached."""

    def __init__(self, block_size: int, inner: EventPublisher) -> None:
        super().__init__()
        self.changes = PrefixChanges()
        self._inner = inner
        self._translator = EventTranslator(block_size)
        self._group: int | None = None

    def publish(self, events: EventBatch) -> None:
        for event in events.events:
            if isinstance(event, BlockStored | BlockRemoved) and event.medium == MEDIUM_CPU:
                if event.group_idx == self._group:
                    self._in_host_memory(event)
            elif isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                if event.group_idx == self._group:
                    self._removed(*self._translator.removed(event.block_hashes))
            else:
                self._translator.clear()
                self.changes.cleared()
        self._inner.publish(events)

    def _in_host_memory(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockStored):
            self._translator.copied(event.block_hashes)
        else:
            self._removed(*self._translator.removed(event.block_hashes, from_host=True))

    def _removed(self, keys: list[int], hosted: list[int]) -> None:
        self.changes.removed(keys)
        self.changes.hosted(hosted)

    def _stored(self, event: BlockStored) -> None:
        block_size, hashes = self._translator.block_size, event.block_hashes
        # If layers have several kinds of caches, full attention's counts: a sliding window drops its prefix.
        if not (event.kv_cache_spec_kind or "full_attention").endswith(("full_attention", "mla_attention")):
            return
        if self._group is None:
            self._group = event.group_idx
        # If the kinds differ in block size, parts of blocks are cached too.
        whole = event.block_size == block_size and len(event.token_ids) == len(hashes) * block_size
        if event.group_idx != self._group or not whole:
            return
        lora = event.lora_name
        extras = [_without(extra, lora) for extra in event.extra_keys or ()] or [()] * len(hashes)
        others = [[each for each in extra if not isinstance(each, tuple)] for extra in extras]
        cache_salt = None
        if event.parent_block_hash is None and len(others[0]) == 1 and isinstance(others[0][0], str):
            cache_salt = others[0].pop()
        # From the first embedding on, a block depends on more than its tokens and media.
        known = next((at for at, other in enumerate(others) if other), len(others))
        marks = {at: [each for each in extras[at] if isinstance(each, tuple)] for at in range(known)}
        keys = self._translator.stored(
            hashes[:known], event.parent_block_hash, event.token_ids, salt_of(lora, cache_salt), marks
        )
        self.changes.stored(keys)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def get_publisher_config(self) -> Any:
        return self._inner.get_publisher_config()


def _without(extra: tuple[Any, ...] | None, lora: str | None) -> tuple[Any, ...]:
    """A block's extra keys without its LoRA's name, which comes first."""
    extra = extra or ()
    return extra[1:] if lora is not None and extra[:1] == (lora,) else extra


def block_hashes(
    frames: list[bytes], hasher: Callable[[Request], list[BlockHash]] | None, of_block: int = 1
) -> list[BlockHash]:
    """Of the prompt's whole blocks, as an engine that computes the request has them in its prefix cache. `of_block`:
    how many hashes an engine makes for each, of which the last one names it (`prefix_match_unit`)."""
    core: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(frames)
    if core.sampling_params is not None:
        core.sampling_params.extra_args = None  # which a client writes: no token there is the prompt's
    if (adapter := core.lora_request) is not None:
        adapter.lora_name = unique_name(adapter.lora_name, adapter.lora_int_id)  # as `Adapters.prepare` names it
    return list(Request.from_engine_core_request(core, hasher).block_hashes)[of_block - 1 :: of_block]
