"""The record of one ended request: the `pd.request` log line, and the request's stages on one time line.

The router writes it; the dashboard, the exporter of traces and the command line read it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stages in milliseconds. `exposed_ms`: from the end of prefill compute to decode's first token."""

    id: str
    outcome: str
    decision: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    decode_worker: str | None
    prefill_worker: str | None
    total_ms: float
    ttft_ms: float | None = None
    queued_ms: float | None = None
    claim_ms: float | None = None  # from the claim until its frontend knew of it, plus the job's way to the queue
    prefill_ms: float | None = None
    exposed_ms: float | None = None
    decode_ms: float | None = None
    cached_tokens: int = 0  # of the prompt, at the worker that prefilled it: estimated if local, counted if remote
    retries: list[str] = []
    arrived_at: float = 0.0  # at the frontend, unix seconds
    frontend_ms: float | None = None  # from arrival to the router: parsing, the chat template, tokenizing
    sent_ms: float | None = None  # from arrival at the router until a decode worker was given the last attempt
    chunks_ms: list[float] = []  # ends of a remote prefill's chunks, from its begin; the last one's is `prefill_ms`

    @property
    def took_ms(self) -> float:
        """From its arrival at the frontend to its end."""
        return self.total_ms + (self.frontend_ms or 0.0)

    @property
    def ended_at(self) -> float:
        """Unix seconds."""
        return self.arrived_at + self.took_ms / 1e3

    def with_stages(self) -> dict[str, Any]:
        """As types of JSON."""
        return {**msgspec.to_builtins(self), "stages": msgspec.to_builtins(stages(self))}


class Stage(msgspec.Struct, frozen=True):
    """`begin_ms` and `end_ms` count from the request's arrival at the frontend."""

    name: str
    begin_ms: float
    end_ms: float
    worker: str = ""

    @property
    def took_ms(self) -> float:
        return self.end_ms - self.begin_ms


def stages(line: RequestLine) -> list[Stage]:
    """The stages of the last attempt, in order. The time of earlier attempts is in `place`, the first stage after
    `frontend`. Stages that did not happen are left out."""
    begin_ms = line.frontend_ms or 0.0
    end_ms = begin_ms + line.total_ms
    found = [Stage("frontend", 0.0, begin_ms)]
    prefill, decode = line.prefill_worker or "", line.decode_worker or ""
    if line.sent_ms is None:
        return [*found, Stage("place", begin_ms, end_ms)]
    sent_ms = min(begin_ms + line.sent_ms, end_ms)
    claim_ms = max(begin_ms, sent_ms - (line.claim_ms or 0.0))
    queue_ms = max(begin_ms, claim_ms - (line.queued_ms or 0.0))
    found.append(Stage("place", begin_ms, queue_ms))
    if line.queued_ms is not None:
        found.append(Stage("queue", queue_ms, claim_ms))
        found.append(Stage("claim", claim_ms, sent_ms, prefill))
    computed_ms = min(sent_ms + (line.prefill_ms if line.prefill_ms is not None else end_ms - sent_ms), end_ms)
    found.append(Stage("prefill", sent_ms, computed_ms, prefill or decode))
    if line.prefill_ms is None:
        return found  # it ended while it was being prefilled
    decoding_ms = computed_ms
    if prefill:
        decoding_ms = min(computed_ms + (line.exposed_ms if line.exposed_ms is not None else end_ms), end_ms)
        found.append(Stage("transfer", computed_ms, decoding_ms, f"{prefill} to {decode}"))
    if line.ttft_ms is not None and decoding_ms < end_ms:
        found.append(Stage("decode", decoding_ms, end_ms, decode))
    return found
