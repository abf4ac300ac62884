"""Where a request is prefilled: at its decode worker (local), by the prefill pool (remote), or not at all.

Every decision carries a reason, a short word that metrics count by. Which decode worker is
`decode_choice`'s business; a remote request gets its worker only when a prefill worker has claimed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from orchestrator.config import RoutingConfig
from orchestrator.policy.decode_choice import Candidate, DecodeChoice, blocks_for
from orchestrator.types import QueueDepth, RequestInfo

RETRY_AFTER_S = 1.0  # when nothing better is known


class PrefillView(msgspec.Struct, frozen=True):
    """The prefill pool as the router sees it. `queue` is None while the queue is unavailable."""

    workers_ready: int
    queue: QueueDepth | None


class Local(msgspec.Struct, tag="local", frozen=True):
    worker_id: str
    reason: str


class Remote(msgspec.Struct, tag="remote", frozen=True):
    reason: str


class Reject(msgspec.Struct, tag="reject", frozen=True):
    """Answered with 429 and `Retry-After`."""

    reason: str
    retry_after_s: float


Decision = Union[Local, Remote, Reject]


def place(
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    routing: RoutingConfig,
    choose: DecodeChoice,
) -> Decision:
    """Decide for a request that has just arrived, or whose earlier attempt failed.

    Reasons. Local: `short_prompt`, `no_prefill_worker`, `queue_unavailable`, `queue_full`, or the request's
    own `local_only`. Remote: `long_prompt`, or `decode_full` for a short prompt that no decode worker can
    take now. Reject: `decode_full`, `no_decode_worker`.
    """
    if not candidates:
        return Reject("no_decode_worker", RETRY_AFTER_S)
    blocker = _why_not_remote(request, candidates, prefill, routing)
    open_ones = [c for c in candidates if not is_full(request, c, routing)]

    if request.local_only is not None:
        return _local(request, open_ones, choose, request.local_only)
    # Only workers that hold enough of the prompt's prefix make it short.
    near = [c for c in open_ones if uncached_tokens(request, c) < routing.remote_prefill_min_tokens]
    if near and (chosen := choose(request, near)) is not None:
        return Local(chosen.worker_id, "short_prompt")
    if blocker is None:
        short = request.prompt_tokens < routing.remote_prefill_min_tokens
        return Remote("decode_full" if short else "long_prompt")
    return _local(request, open_ones, choose, blocker)


def is_full(request: RequestInfo, candidate: Candidate, routing: RoutingConfig) -> bool:
    """No blocks for the prompt, and as many requests waiting as are allowed to."""
    return (
        candidate.waiting >= routing.max_waiting_per_worker
        and blocks_for(request.prompt_tokens, candidate.block_size) > candidate.blocks_free
    )


def uncached_tokens(request: RequestInfo, candidate: Candidate) -> int:
    return max(0, request.prompt_tokens - candidate.cached_tokens)


def _why_not_remote(
    request: RequestInfo, candidates: Sequence[Candidate], prefill: PrefillView, routing: RoutingConfig
) -> str | None:
    if prefill.workers_ready == 0:
        return "no_prefill_worker"
    if prefill.queue is None:
        return "queue_unavailable"
    cost = min(uncached_tokens(request, candidate) for candidate in candidates)
    if prefill.queue.tokens + cost > routing.max_queued_prefill_tokens:
        return "queue_full"
    return None


def _local(request: RequestInfo, open_ones: Sequence[Candidate], choose: DecodeChoice, reason: str) -> Decision:
    chosen = choose(request, open_ones)
    if chosen is None:
        return Reject("decode_full", RETRY_AFTER_S)
    return Local(chosen.worker_id, reason)
