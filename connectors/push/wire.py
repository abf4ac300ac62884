"""Messages between a decode worker and a prefill worker. NIXL notifications carry them; TCP between simulated engines.

Not the KV itself, and not vLLM's own completion notice, which ends nothing here (`is_stock_notice`).
"""

from __future__ import annotations

from typing import Union

import msgspec

# Raised with any change below: a peer of another version is refused at the handshake, and message by message.
VERSION = 6
PREFIX = b"PDKV%d:" % VERSION


class WireError(ValueError):
    """A notification that is not one of ours, or not of this version."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine answers NIXL handshakes, as `orchestrator.types.KVEndpoint` spells it. `engine_id` is unique per
    process start."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1
    key: str = ""


class Source(msgspec.Struct, frozen=True):
    """Where the KV of one request comes from, as `orchestrator.types.KVSource` spells it: `kv_source` among a decode
    request's KV transfer parameters."""

    endpoint: Endpoint
    key: str  # the request as the prefill engine knows it


class Register(msgspec.Struct, tag="reg", frozen=True):
    """Decode to prefill: WRITE the KV of `stream` here. Sent once the blocks are reserved.

    `blocks` are the decode engine's logical block ids per KV cache group, without what its prefix cache holds.
    No WRITE may be posted later than `valid_s` after this was received. Decode sends it again in answer to `Computing`,
    which makes it valid anew. Nor over another connection than that of `epoch`: decode may have torn one down and given
    the blocks to others.
    """

    stream: str  # the request as the prefill engine knows it
    request: str  # the request as the decode engine knows it
    decode: Endpoint
    blocks: list[list[int]]
    prompt_tokens: int
    valid_s: float = 0.0  # this and the next are set when it is sent
    epoch: int = 0  # the last that the prefill worker has named in a `Hello`

    @property
    def asker(self) -> tuple[str, str]:
        """The decode engine and its request: the same for all ranks of that engine."""
        return self.decode.engine_id, self.request


class Unregister(msgspec.Struct, tag="unreg", frozen=True):
    """Decode to prefill: WRITE no more. Answered with `Gone` once no WRITE is in flight or to come."""

    stream: str
    request: str
    decode: Endpoint


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Prefill to decode: the number of my connection to you. Answered with all `Register` that are valid, again."""

    epoch: int

    @property
    def request(self) -> str:
        return ""  # it is about none


class Computing(msgspec.Struct, tag="computing", frozen=True):
    """Prefill to decode: this prefill goes on, and is not done yet. Answered with the `Register` again."""

    request: str


class Landed(msgspec.Struct, tag="landed", frozen=True):
    """Prefill to decode: every WRITE of this request has landed, none will follow. `digest`: CRC-32 of the blocks."""

    request: str
    digest: int | None = None


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """Prefill to decode: the KV will not come; no WRITE is in flight or to come."""

    request: str
    why: str


Message = Union[Register, Unregister, Hello, Computing, Landed, Gone]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    return PREFIX + _encoder.encode(message)


def parse(notification: bytes) -> Message:
    """Raises WireError for anything malformed, naming what came."""
    if notification.startswith(PREFIX):
        try:
            return _decoder.decode(memoryview(notification)[len(PREFIX) :])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"malformed KV notification of {len(notification)} bytes: {error}") from error
    raise WireError(f"unknown KV notification {notification[:24]!r}; is the peer of another version?")


def is_stock_notice(notification: bytes) -> bool:
    """Whether it is vLLM's own completion notice, `"<request>:<ranks>"`, which rides on a WRITE of a whole prompt.

    It tells that one WRITE has landed, and nothing of the others or of the prefill. Our `Landed` always follows.
    """
    request, colon, ranks = notification.rpartition(b":")
    return bool(request and colon and ranks.isdigit()) and not notification.startswith(b"PDKV")
