"""Messages as frames: whole, in parts, in turns, torn, and too large."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio
from support_wait import DEADLINE_S

from orchestrator.wire import sockets
from orchestrator.wire.messages import MessageError
from orchestrator.wire.sockets import Assembler, Part, Reader, Woken, frames_of


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


def test_of_several_broken_messages_each_is_told_once(small):
    """A connection broke while messages of many were on their way: their parts come in turns."""
    assembler, told = Assembler(), []
    for frame in [
        frame for parts in zip(*(frames_of(long(b"a"))[1:] for _ in range(5)), strict=True) for frame in parts
    ]:
        try:
            assert assembler.take([frame]) is None
        except MessageError as error:
            told.append(str(error))
    assert len(told) == 5


async def test_a_wake_up_is_not_lost_that_comes_when_nobody_waits_or_a_message_has_just_woken_the_reader():
    """A connection that breaks takes with it what has come on it, and only the wake-up says so."""
    context = zmq.asyncio.Context()
    socket = sockets.make(context, zmq.PULL)
    reader = Reader(socket)
    try:
        reader.wake()
        with pytest.raises(Woken):
            await asyncio.wait_for(reader.next(), DEADLINE_S)
        waits = asyncio.create_task(reader.next())
        while reader._waiting is None:
            await asyncio.sleep(0)
        reader._waiting.set_result(None)  # as `look`, of a message that is gone by the time it is read
        reader.wake()
        with pytest.raises(Woken):
            await asyncio.wait_for(waits, DEADLINE_S)
    finally:
        reader.close()
        context.destroy(linger=0)


def test_parts_that_end_are_forgotten(small, monkeypatch):
    assembler = Assembler()
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 160)  # ten parts
    for number in range(100):
        assembler.take([msgspec.msgpack.encode(Part(number, 0, 2, b""))])
    assert assembler.unfinished_parts == 10
    monkeypatch.setattr(sockets, "UNFINISHED_S", -1.0)
    assert assembler.take(frames_of([b"of one frame"])) == [b"of one frame"]
    assert assembler.unfinished_parts == 0, "the next large message may be long in coming"
    assembler.take(frames_of(long(b"b"))[:1])
    assert assembler.unfinished_parts == 1


def test_a_part_that_comes_late_is_not_lost(small, monkeypatch):
    assembler = Assembler()
    other, *rest = frames_of(long(b"b"))
    assembler.take([other])
    monkeypatch.setattr(sockets, "UNFINISHED_S", -1.0)  # more than that passes before each part
    assert [assembler.take([frame]) for frame in frames_of(long(b"a"))][-1] == long(b"a")
    assert assembler.unfinished_parts == 0, "the one whose next part did not come is forgotten"
    with pytest.raises(MessageError, match="whose other parts did not come"):
        assembler.take(rest[:1])


def test_too_large_messages_are_not_sent(small, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(MessageError, match="a message of 1.. bytes; the largest may have 100"):
        frames_of(long(b"a"))


@pytest.mark.parametrize("frames", [[b"\xff"], [b""], [b"\x90"], [b"\x80"], [b"\x91\xc4\x00", b"more"]])
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(MessageError):
        Assembler().take(frames)
