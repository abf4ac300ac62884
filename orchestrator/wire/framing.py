"""Messages as ZMQ frames: one frame for each message, or one for each part of a very large message.

Never several frames: libzmq 4.3.5 may go on with the frames of another sender, or end the process, if a connection is
closed while a message of several frames is read. (`fq_t::pipe_terminated` in its `src/fq.cpp` moves the connection that
is being read, and then looks for it in the first place.)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Union

import msgspec

from orchestrator.wire.messages import MessageError

# Sockets take no larger frame, so a peer that was not let in costs no more memory.
MAX_FRAME_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - (MAX_MESSAGE_BYTES >> 4)  # its message also has all tokens generated so far
UNFINISHED_S = 60.0  # for which a part waits for the next one, at least

_PART_BYTES = 64  # that `Part` adds to its data, at most
_encoder = msgspec.msgpack.Encoder()


class Part(msgspec.Struct, frozen=True):
    """A part of a message that is too large for one frame. The parts are sent in order."""

    message: int  # a random number, the same in all parts
    index: int
    count: int
    data: bytes


_decoder = msgspec.msgpack.Decoder(Union[list[bytes], Part])


def frames_of(message: Sequence[bytes]) -> Sequence[bytes]:
    """The frames to send, one by one. `message`: a header and its payload. Raises MessageError for one above
    MAX_MESSAGE_BYTES."""
    whole = _encoder.encode(message)
    if len(whole) <= MAX_FRAME_BYTES:
        return (whole,)
    if len(whole) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(whole)} bytes; the largest may have {MAX_MESSAGE_BYTES}")
    size = MAX_FRAME_BYTES - _PART_BYTES
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    number = secrets.randbits(63)
    return [_encoder.encode(Part(number, index, len(pieces), piece)) for index, piece in enumerate(pieces)]


class Assembler:
    """Makes messages of the frames that a socket receives. Parts of several messages may come in turns."""

    def __init__(self) -> None:
        self._unfinished: dict[int, _Unfinished] = {}  # by `Part.message`; first the one whose last part is oldest

    @property
    def unfinished_parts(self) -> int:
        return sum(len(begun.pieces) for begun in self._unfinished.values())

    def take(self, frames: Iterable[bytes]) -> list[bytes] | None:
        """The message that was given to `frames_of`; None while parts of it are missing. Raises MessageError.

        `frames`: those that ZMQ delivered as one message.
        """
        frame, *more = frames
        if more:
            raise MessageError(f"a message of {1 + len(more)} frames; all have one")
        found = _decoded(frame)
        if isinstance(found, list):
            return found
        whole = self._add(found)
        return None if whole is None else _message(whole)

    def _add(self, part: Part) -> bytes | None:
        """All parts together when this is the last one."""
        now = time.monotonic()
        if part.index == 0:
            for number in [n for n, begun in self._unfinished.items() if now - begun.at > UNFINISHED_S]:
                del self._unfinished[number]
            self._unfinished[part.message] = _Unfinished()
        begun = self._unfinished.pop(part.message, None)
        if begun is None or len(begun.pieces) != part.index:
            raise MessageError(f"part {part.index + 1} of {part.count} of a message whose other parts did not come")
        begun.pieces.append(part.data)
        begun.at = now
        if part.index == part.count - 1:
            return b"".join(begun.pieces)
        self._unfinished[part.message] = begun
        # Parts count, not bytes: a member could send empty ones without end.
        while self.unfinished_parts > _pieces(MAX_MESSAGE_BYTES):
            del self._unfinished[next(iter(self._unfinished))]
        return None


class _Unfinished:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.at = 0.0  # when the last of them came


def _pieces(size: int) -> int:
    """Of a message of this many bytes."""
    return -(-size // (MAX_FRAME_BYTES - _PART_BYTES))


def _message(whole: bytes) -> list[bytes]:
    found = _decoded(whole)
    if not isinstance(found, list):
        raise MessageError("a part of a part of a message")
    return found


def _decoded(data: bytes) -> list[bytes] | Part:
    try:
        found: list[bytes] | Part = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"not a framed message ({len(data)} bytes): {error}") from error
    if not found:
        raise MessageError("empty message")
    return found
