"""Wire messages between frontends and workers, grouped by receiver.

A message is `[header, *payload]`: the header one of the tagged unions below, the payload the engine's own encoding (an
engine request, or the outputs of one engine step), opaque here so that tokens are encoded once. `sockets` makes ZMQ
frames of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import msgspec

from orchestrator.types import KVSource, PrefixEvents, WorkerLoad

# Raised whenever a message below, or a worker's entry in the registry, changes meaning; part of EngineIdentity, so that
# mixed fleets are refused.
PROTOCOL_VERSION = 12


class MessageError(ValueError):
    """Bytes from the wire that are not a message of the expected union."""


class Prefix(msgspec.Struct, frozen=True):
    """The first `tokens` of a prompt, whole blocks, that another engine sends from its prefix cache."""

    source: KVSource
    tokens: int


# ---- to a worker -----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A frontend connected, and from now on is reached by this connection. Answered with `Welcome`."""

    protocol: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Decode this request. Payload: the engine request.

    Without `kv_source` the worker prefills too, and fetches `prefix` first. `resume_tokens` are tokens that the client
    has already: generation continues after them (the request moved here from a worker that died).
    """

    request_id: str
    attempt: int
    sequence: int  # counts this frontend's submissions, to all workers
    prompt_tokens: int
    kv_source: KVSource | None = None
    resume_tokens: list[int] = []
    cached_tokens: int = 0  # prompt tokens that the frontend believes are cached there
    trial_s: float = 0.0  # its last engine crashed: until its first output, for so long at most, it is on trial
    suspect: bool = False  # it may have been the cause: on trial alone
    behind_s: float = 0.0  # its place in the queue there: seconds behind one that arrives now (negative: before)
    prefix: Prefix | None = None


class Lend(msgspec.Struct, tag="lend", frozen=True):
    """Send the first `tokens` of this request's prompt from the prefix cache to the worker that asks for `key`.
    Payload: the engine request."""

    key: str
    tokens: int


class Fetch(msgspec.Struct, tag="fetch", frozen=True):
    """Answers a `Claimed` with `cached_tokens`: what to fetch before the prompt is computed, which is in the engine
    under `key`. None: nothing."""

    key: str
    prefix: Prefix | None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Forget this attempt wherever it is: waiting, prefilling, pushing or decoding. Idempotent."""

    request_id: str
    attempt: int


class Call(msgspec.Struct, tag="call", frozen=True):
    """A control call: a method of `wire.control`, for the engine or the worker itself. Answered with `CallReply`."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class PrefixResync(msgspec.Struct, tag="prefix_resync", frozen=True):
    """Events were lost, or sent before this frontend listened. Answered with `PrefixSnapshot`s."""


ToWorker = Union[Hello, Submit, Lend, Fetch, Abort, Call, PrefixResync]


# ---- to a frontend ---------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The worker knows this frontend and can send to it."""


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """A prefill worker has claimed the job and starts computing: bind a decode worker now.

    With `cached_tokens`, the prompt tokens that it has cached itself, it waits for a `Fetch` first.
    """

    request_id: str
    attempt: int
    kv_source: KVSource
    queued_s: float  # from enqueue to claim, by the queue's clock
    domain: str = "0"  # of the prefill worker: the decode worker must be of the same
    cached_tokens: int | None = None


class Prefilled(msgspec.Struct, tag="prefilled", frozen=True):
    """Prefill compute has ended; the last blocks may still be in flight. `prefill_s`: claim to last chunk.

    Payload, as that of `Outputs`: the engine's last output, with the token that it sampled.
    """

    request_id: str
    attempt: int
    prefill_s: float
    cached_tokens: int = 0  # the prefill worker's own prefix-cache hit
    created_cache_tokens: int = 0  # prompt tokens that it wrote to its prefix cache
    sent_at: float = 0.0  # the worker's monotonic clock, to rebase engine timestamps
    chunk_ends_s: list[float] = []  # from the claim; of all chunks but the last, which ends at `prefill_s`


class PrefillFailed(msgspec.Struct, tag="prefill_failed", frozen=True):
    """The prefill side gave this attempt up and will not push its KV."""

    request_id: str
    attempt: int
    why: str
    refused: bool = False  # by its engine when it got it, as by others: a decode worker computes it or says 400
    by_engine: bool = False  # its engine failed on it: if others do too, it is the request


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """The worker did not take a `Submit`. Place it elsewhere (it drains, say), unless it is `final`."""

    request_id: str
    attempt: int
    why: str
    final: bool = False  # every worker would refuse this request: it cannot be decoded, or is too long
    leaving: bool = False  # it drains, has prefilled it, or tries a suspect: does not count as an attempt
    late: bool = False  # it was not ready for it in time: its engine has not refused it


class EngineCrashed(msgspec.Struct, tag="engine_crashed", frozen=True):
    """The worker's engine has died by itself, and the worker leaves. `why`: the engine's own words.

    `suspect`: the suspect that was on trial, and so the cause; empty: no request of this worker is. Without one
    `others` counts the requests of other frontends on it that had produced nothing yet, so that one of them may be.
    """

    why: str
    others: int = 0
    suspect: str | None = None


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """One engine step's outputs for this frontend. Payload: the engine's encoding of the outputs.

    `attempts[i]` fences output i. `sent_at` is the worker's monotonic clock, to rebase engine timestamps.
    """

    attempts: list[int]
    sent_at: float


class CallReply(msgspec.Struct, tag="call_reply", frozen=True):
    call_id: int
    error: str | None = None
    result: Any = None


class PrefixSnapshot(msgspec.Struct, tag="prefix_snapshot", frozen=True):
    """A part of what the worker's prefix cache held when it had published the batch `sequence`. `hosted`: more keys,
    which only its host tier held."""

    sequence: int
    keys: list[int]
    more: bool  # other parts of the same snapshot follow
    hosted: list[int] = []


ToFrontend = Union[
    Welcome, Claimed, Prefilled, PrefillFailed, Rejected, EngineCrashed, Outputs, CallReply, PrefixSnapshot
]


# ---- from a worker to all frontends ------------------------------------------------------------------------------

Published = Union[WorkerLoad, PrefixEvents]


# ---- codecs ----------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToWorker | ToFrontend | Published) -> bytes:
    return _encoder.encode(message)


def _decoder(kind: Any, what: str) -> Callable[[bytes], Any]:
    """It raises MessageError."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"not a {what} message ({len(data)} bytes): {error}") from error

    return decoded


decode_to_worker: Callable[[bytes], ToWorker] = _decoder(ToWorker, "worker")
decode_to_frontend: Callable[[bytes], ToFrontend] = _decoder(ToFrontend, "frontend")
decode_published: Callable[[bytes], Published] = _decoder(Published, "published")
unpack_frames: Callable[[bytes], list[bytes]] = _decoder(list[bytes], "framed request")  # of `pack_frames`


def engine_key(request_id: str, attempt: int) -> str:
    """An engine's id of one attempt. It differs per attempt, so that a retry never uses an older attempt's KV."""
    return f"{request_id}#{attempt}"


def pack_frames(frames: list[bytes]) -> bytes:
    """Several frames as one value, to keep an engine request in Redis."""
    return _encoder.encode([bytes(frame) for frame in frames])
