"""Messages between a decode worker and a prefill worker, as NIXL notifications; over TCP between simulated engines.

Neither the KV itself nor vLLM's own completion notice, which this protocol ignores (`is_stock_notice`).
"""

from __future__ import annotations

from typing import ClassVar, Union

import msgspec

# Raise it with any change below: peers of another version are refused at the handshake and at each message.
VERSION = 11
PREFIX = b"PDKV%d:" % VERSION


class WireError(ValueError):
    """A notification that is no message of this protocol and version."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine answers NIXL handshakes. Has the fields of `orchestrator.types.KVEndpoint`. `engine_id` is unique
    per process start."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1
    shards: int = 1
    key: str = ""


class Source(msgspec.Struct, frozen=True):
    """Where the KV of one request comes from: `kv_source` in a decode request's KV transfer parameters. Has the fields
    of `orchestrator.types.KVSource`."""

    endpoint: Endpoint
    key: str  # the request's id in the prefill engine


class Register(msgspec.Struct, tag="reg", frozen=True):
    """Decode to prefill: WRITE the KV of `stream` here. Sent once the blocks are reserved.

    `blocks` are the decode engine's logical block ids per KV cache group, without those that its prefix cache holds.
    No WRITE may be posted later than `valid_s` seconds after this was received; decode sends it again in answer to
    `Computing`, which renews it. No WRITE may use another connection than that of `epoch`: decode may have closed an
    older one and given the blocks to other requests. Those up to `cut` it has closed, so the peer makes a new one.
    """

    stream: str  # the request's id in the prefill engine
    request: str  # the request's id in the decode engine
    decode: Endpoint
    blocks: list[list[int]]
    prompt_tokens: int
    valid_s: float = 0.0  # this and what follows are set when it is sent
    epoch: int = 0  # of the prefill worker's last `Hello`
    cut: int = 0

    @property
    def receiver(self) -> tuple[str, str]:
        """The decode engine and its request: the same for all ranks of that engine."""
        return self.decode.engine_id, self.request


class Unregister(msgspec.Struct, tag="unreg", frozen=True):
    """Decode to prefill: post no more WRITEs. Answered with `Gone` once no WRITE is in flight or to come."""

    stream: str
    request: str
    decode: Endpoint


class _OfNoRequest(msgspec.Struct, frozen=True):
    request: ClassVar[str] = ""


class Hello(_OfNoRequest, tag="hello", frozen=True):
    """Prefill to decode: the number of this connection. Decode answers with all valid `Register` again.

    `listens`: addresses, packed, ports and inodes of the sockets at which UCX listens in the rank of `engine` that
    sends it. All are closed once the process has ended, and then nothing of it can land any more.
    """

    epoch: int
    engine: str = ""
    listens: list[tuple[bytes, int, int]] = []


class Meet(_OfNoRequest, tag="meet", frozen=True):
    """To an engine that may exchange KV with `sender` later: connect with it now. Not answered."""

    sender: Endpoint


class Ping(_OfNoRequest, tag="ping", frozen=True):
    """Decode to prefill, while it waits for KV: answer with `Pong`. Sending it shows a connection that has broken since
    the last message. `engine`: that of decode. `unanswered`: earlier ones in a row without an answer."""

    engine: str
    unanswered: int = 0


class Pong(_OfNoRequest, tag="pong", frozen=True):
    """Prefill to decode: the answer to a `Ping`."""


class Computing(msgspec.Struct, tag="computing", frozen=True):
    """Prefill to decode: this prefill is still running. Decode answers with the `Register` again."""

    request: str


class Landed(msgspec.Struct, tag="landed", frozen=True):
    """Prefill to decode: every WRITE of this request has landed, and none follows. `digest`: CRC-32 of the blocks."""

    request: str
    digest: int | None = None


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """Prefill to decode: the KV will not come; no WRITE is in flight or to come, except for parts of those that failed.

    `failed_epoch`: the connection, as in `Hello`, on which a WRITE failed. NIXL tells when a WRITE has failed, and not
    when the last of its parts has landed. 0: none failed, so nothing can land any more.
    """

    request: str
    why: str
    failed_epoch: int = 0


Message = Union[Register, Unregister, Hello, Meet, Ping, Pong, Computing, Landed, Gone]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    return PREFIX + _encoder.encode(message)


def parse(notification: bytes) -> Message:
    """Decode a notification. Raises WireError for one that is malformed or of another version."""
    if notification.startswith(PREFIX):
        try:
            return _decoder.decode(memoryview(notification)[len(PREFIX) :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed KV notification of {len(notification)} bytes: {error}") from error
    raise WireError(f"unknown KV notification {notification[:24]!r}; is the peer of another version?")


def is_stock_notice(notification: bytes) -> bool:
    """Whether it is vLLM's own completion notice, `"<request>:<ranks>"`, which comes with a WRITE of a whole prompt.

    It says that one WRITE has landed, and nothing about the others or the prefill. `Landed` always follows.
    """
    request, colon, ranks = notification.rpartition(b":")
    return bool(request and colon and ranks.isdigit()) and not notification.startswith(b"PDKV")
