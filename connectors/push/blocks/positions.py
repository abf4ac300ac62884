"""Where the KV of a prompt is: the blocks of a request, by KV cache group and position in the prompt.

Attention has a block for each position. A recurrent state has one for the whole prompt: it counts as that of the last
position, like a window of one token. Pure functions of block lists, which vLLM's scheduler hands out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from connectors.push.actions import NO_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

BlockIds = Sequence[Sequence[int]]  # logical, by KV cache group


def keep_for_the_last_token(manager: KVCacheManager) -> None:
    """From now on requests keep what their last computed token attends to, and vLLM no longer drops of it what the next
    one does not: decode computes the last token of a prompt again, once all of its KV has come. So it reserves a block
    for each of those, and prefill, which has computed the prompt, gives none of them away before they are sent."""
    for one in manager.coordinator.single_type_managers:
        if isinstance(one, SlidingWindowManager | ChunkedLocalAttentionManager):
            one.get_num_skipped_tokens = functools.partial(_skipped_by_the_last, one.get_num_skipped_tokens)


def _skipped_by_the_last(skipped: Callable[[int], int], computed_tokens: int) -> int:
    return skipped(max(0, computed_tokens - 1))


class Positions:
    """Of a model whose blocks have `block_size` tokens on a rank, of which `shards` share each block (decode context
    parallelism)."""

    def __init__(self, kv_cache_config: KVCacheConfig, block_size: int, shards: int = 1) -> None:
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._shards, self._block_size = shards, block_size * shards
        all_are_sent = len(kv_cache_config.transfer_groups) == len(self._specs)
        if shards > 1 and any(isinstance(spec, AttentionSpec) and not spec.dcp_sharded for spec in self._specs):
            raise ValueError(
                f"decode_context_parallel_size: KV of a drafter that every rank has whole is not pushed, expected 1, "
                f"got {shards}; remove it or speculative_config"
            )
        # What a prompt needs of each group is known by position, so that it can be sent while it is computed.
        self.known = all_are_sent and all(self._is_known(spec, block_size) for spec in self._specs)

    def _is_known(self, spec: Any, block_size: int) -> bool:
        """Whether block p of a request has the KV of its tokens from p times the block size on, or there is one."""
        attention = isinstance(spec, FullAttentionSpec) or type(spec) is SlidingWindowSpec
        return isinstance(spec, MambaSpec) or (attention and spec.block_size == block_size)

    def count(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def full(self, tokens: int) -> int:
        return tokens // self._block_size

    def first_kept(self, tokens: int) -> list[int]:
        """By group, the first block that decode needs: the first that the prompt's last token attends to. Neither
        engine frees one from there on (`keep_for_the_last_token`): no WRITE reads a block that was given away."""
        return [max(0, tokens - (_window(it) or tokens)) // self._block_size for it in self._specs]

    def computed(self, ids: BlockIds, tokens: int, start: int, end: int) -> tuple[tuple[int, ...], ...]:
        """Of a prompt of so many tokens, the blocks from `start` to `end`, which are computed; NO_BLOCK for those that
        decode does not need. `ids`: all that the request has."""
        found = []
        for group, spec, first in zip(ids, self._specs, self.first_kept(tokens), strict=True):
            first = min(max(start, first), end)
            kept = group[first:end]
            if isinstance(spec, MambaSpec) and first < end:  # it moves from block to block until the prompt ends
                kept = clip_ssm_state_blocks(list(group), spec.num_speculative_blocks)
            found.append((NO_BLOCK,) * (first - start) + tuple(kept))
        return tuple(found)

    def reserved(self, ids: BlockIds, tokens: int) -> list[list[int]]:
        """Of the blocks that decode has for a prompt, and not from its prefix cache: those that it needs."""
        total = self.count(tokens)
        return [list(group[kept - total :]) for group, kept in zip(ids, self.first_kept(tokens), strict=True)]

    def of_prompt(self, ids: BlockIds, tokens: int) -> tuple[Sequence[int], ...]:
        """Block ids without those that speculation reserves for later tokens: both ends have the same number."""
        return tuple(
            group[: -(-tokens // (spec.block_size * self._shards))] if isinstance(spec, AttentionSpec) else group
            for group, spec in zip(ids, self._specs, strict=True)
        )


def _window(spec: Any) -> int | None:
    """To how many of the last tokens all layers of a group attend; None: some to the whole prompt. Those may share a
    group with layers that have a window, whose size vLLM then names too (`disable_hybrid_kv_cache_manager`)."""
    if isinstance(spec, MambaSpec):
        return 1
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
