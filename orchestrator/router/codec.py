"""The seam between the router and the engine's request and output types, so that it needs to know neither.

`frontend_codec` implements it for vLLM; tests have their own.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from orchestrator.types import RequestInfo


class Batch(msgspec.Struct):
    """Outputs of one engine step that belong to current attempts, in the engine's own type."""

    outputs: list[Any]
    timestamp: float  # this process's monotonic clock, seconds


class Codec(Protocol):
    """What the router needs to know of the engine's request and output types."""

    def describe(self, request: Any) -> tuple[RequestInfo, bool, str]:
        """(what policies see, whether it can be continued elsewhere after tokens were sent, the client's id)."""
        ...

    def prefix_keys(self, request: Any, block_size: int) -> list[int]:
        """`policy.prefix_keys` of the prompt's blocks that a cache may hold; none for what shares them with nobody."""
        ...

    def encode(self, request: Any) -> list[bytes]: ...

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        """Raises messages.MessageError. Timestamps are rebased from the sender's clock to `now`'s."""
        ...

    def early(self, request: Any) -> bool:
        """Whether its first token is the same wherever it is sampled, but for rounding, and shown at once."""
        ...

    def as_first(self, output: Any) -> Any:
        """Prefill's last output as the first of an answer that goes on: its token, and what belongs to that."""
        ...

    def drop_first(self, output: Any) -> None:
        """Take the first token out of decode's first output, and what was told with prefill's already."""
        ...

    def failure(self, request_id: str) -> Any:
        """An output that ends the request as failed."""
        ...
