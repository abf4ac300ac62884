"""The seam between the router and the engine's request and output types, so that it needs to know neither.

`frontend.vllm_codec` implements it for vLLM; tests have their own.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from orchestrator.router.request import Asked, Failure


class Batch(msgspec.Struct):
    """Outputs of one engine step that belong to current attempts, in the engine's own type."""

    outputs: list[Any]
    timestamp: float  # this process's monotonic clock, seconds


class Codec(Protocol):
    """What the router needs to know of the engine's request and output types."""

    def read(self, request: Any, block_size: int) -> Asked:
        """What the client asked for. `block_size` (tokens): 0 makes no prefix keys. Raises what the server answers with
        4xx for a request that a fleet cannot serve."""
        ...

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        """Raises messages.MessageError. Timestamps are rebased from the sender's clock to `now`'s."""
        ...

    def as_first(self, output: Any) -> Any:
        """Prefill's only output as the first of an answer that goes on: its token, and what belongs to that."""
        ...

    def drop_first(self, output: Any) -> None:
        """Remove the first token from decode's first output, with everything that prefill's output told already."""
        ...

    def count_prompt(self, output: Any, cached_tokens: int, created_cache_tokens: int) -> None:
        """Say in decode's first output how much of the prompt prefill had cached, and how much it cached."""
        ...

    def failure(self, request_id: str, failure: Failure) -> Any:
        """An output that ends the request as failed, with `failure` as its stop reason."""
        ...
