"""What the claiming verbs of `lua/queue/claim.lua` answer: a line with a length, that much msgpack, the jobs' bodies.

Reads bytes, and calls nobody.
"""

from __future__ import annotations

import msgspec

from orchestrator.types import WindowJob

_LONG_STR_HEAD = {0xD9: 2, 0xDA: 3, 0xDB: 5}  # msgpack's str 8, 16 and 32, and the bytes before their content


class ClaimedRow(msgspec.Struct, array_like=True):
    """A row of `take` in claim.lua. Raw: a Lua string, which need not be text."""

    request_id: msgspec.Raw
    reply_to: msgspec.Raw
    cached: msgspec.Raw
    body_bytes: int
    attempt: int
    tokens: int
    uncached_tokens: int
    deliveries: int
    arrived_at: float


class ClaimReply(msgspec.Struct, array_like=True):
    """What both claiming verbs answer before the bodies. Times are unix seconds, the server's clock."""

    now: float
    lease_until: float
    claims: list[ClaimedRow]
    window: list[WindowJob]
    waits: bool  # the next job wakes the claimer
    share_tokens: int  # of what waits, where other workers are idle; -1 where none is


_decoder = msgspec.msgpack.Decoder(ClaimReply)


def read_reply(packed: bytes) -> tuple[ClaimReply, bytes]:
    """A line with a length, that much msgpack, and bodies. Raises UnicodeDecodeError."""
    length, _, rest = packed.partition(b"\n")
    return _decoder.decode(rest[: int(length)]), rest[int(length) :]


def raw_bytes(raw: msgspec.Raw) -> bytes:
    """The bytes of a msgpack str: what follows its head of 1 byte, or of 2, 3 or 5 where it is longer than 31 bytes."""
    packed = bytes(raw)
    return packed[_LONG_STR_HEAD.get(packed[0], 1) :]
