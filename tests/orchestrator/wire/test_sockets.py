"""Messages as frames: whole, in parts, in turns, torn, and too large."""

import msgspec
import pytest

from orchestrator.wire import sockets
from orchestrator.wire.messages import MessageError
from orchestrator.wire.sockets import Assembler, Part, frames_of


@pytest.fixture
def small(monkeypatch):
    """Frames of which a message of a hundred bytes has several."""
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", sockets._PART_BYTES + 16)


def long(letter):
    return [b"header", letter * 100, b"", letter]


def test_each_message_is_one_frame():
    (frame,) = frames_of([b"header", b"payload", b""])
    assert Assembler().take([frame]) == [b"header", b"payload", b""]


def test_parts_of_several_messages_may_come_in_turns(small):
    assembler, first, second = Assembler(), frames_of(long(b"a")), frames_of(long(b"b"))
    assert len(first) == len(second) > 5 and max(map(len, first)) <= sockets.MAX_FRAME_BYTES
    *found, last, latest = [assembler.take([frame]) for pair in zip(first, second, strict=True) for frame in pair]
    assert found == [None] * len(found)
    assert (last, latest) == (long(b"a"), long(b"b")) and assembler.unfinished_parts == 0


def test_a_missing_part_is_an_error_and_the_next_message_is_read(small):
    assembler, frames = Assembler(), frames_of(long(b"a"))
    assert assembler.take(frames[:1]) is None
    with pytest.raises(MessageError, match="part 3 of .* whose other parts did not come"):
        assembler.take(frames[2:3])
    assert [assembler.take([frame]) for frame in frames[3:]] == [None] * len(frames[3:]), "it was told once"
    assert assembler.unfinished_parts == 0
    assert [assembler.take([frame]) for frame in frames_of(long(b"b"))][-1] == long(b"b")


def test_of_several_messages_without_their_first_parts_each_is_told_once(small):
    assembler, told = Assembler(), 0
    for parts in zip(*(frames_of(long(letter))[2:] for letter in (b"a", b"b", b"c")), strict=True):
        for part in parts:
            try:
                assert assembler.take([part]) is None
            except MessageError:
                told += 1
    assert told == 3


def test_parts_that_end_are_forgotten(small, monkeypatch):
    assembler = Assembler()
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 160)  # ten parts
    for number in range(100):
        assembler.take([msgspec.msgpack.encode(Part(number, 0, 2, b""))])
    assert assembler.unfinished_parts == 10
    monkeypatch.setattr(sockets, "UNFINISHED_S", -1.0)
    assembler.take(frames_of(long(b"b"))[:1])
    assert assembler.unfinished_parts == 1


def test_too_large_messages_are_not_sent(small, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(MessageError, match="a message of 1.. bytes; the largest may have 100"):
        frames_of(long(b"a"))


@pytest.mark.parametrize("frames", [[b"\xff"], [b""], [b"\x90"], [b"\x80"], [b"\x91\xc4\x00", b"more"]])
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(MessageError):
        Assembler().take(frames)
