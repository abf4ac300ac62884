"""The interface through which the router reads and makes the engine's requests and outputs, whose types it ignores.

`frontend.codec.vllm_codec` implements it for vLLM; tests have their own.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from orchestrator.router.request import Failure, ParsedRequest


class Batch(msgspec.Struct):
    """Outputs of one engine step that belong to current attempts, in the engine's own type."""

    outputs: list[Any]
    timestamp: float  # this process's monotonic clock, seconds


class Codec(Protocol):
    """What the router needs to know of the engine's request and output types."""

    def read(self, request: Any, block_size: int) -> ParsedRequest:
        """The client's request. `block_size` (tokens): with 0 no prefix keys are made. Raises errors that the server
        answers with 4xx for a request that a fleet cannot serve."""
        ...

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        """Raises messages.MessageError. Timestamps are rebased from the sender's clock to `now`'s."""
        ...

    def as_first(self, output: Any) -> Any:
        """The prefill engine's only output as the first one of an unfinished answer: token and log-probabilities."""
        ...

    def drop_first(self, output: Any) -> None:
        """Remove the first token, and everything that the prefill engine's output had already, from decode's first
        output."""
        ...

    def count_prompt(self, output: Any, cached_tokens: int, created_cache_tokens: int) -> None:
        """Put the prefill engine's cached and newly cached token counts into decode's first output."""
        ...

    def failure(self, request_id: str, failure: Failure) -> Any:
        """An output that ends the request as failed, with `failure` as its stop reason."""
        ...
