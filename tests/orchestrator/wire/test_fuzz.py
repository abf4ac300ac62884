"""Bytes from anywhere: a decoder gives a message or its own error. Every message of every union is covered."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_fuzz import any_of, damaged, members, nested, values

from orchestrator import types
from orchestrator.wire import messages
from orchestrator.wire.messages import MessageError
from orchestrator.wire.sockets import Assembler

UNIONS: dict[Callable[[bytes], Any], Any] = {
    messages.decode_to_worker: messages.ToWorker,
    messages.decode_to_frontend: messages.ToFrontend,
    messages.decode_published: messages.Published,
}


def assemble(data: bytes) -> Any:
    return Assembler().take([data])


DECODERS: list[Callable[[bytes], Any]] = [*UNIONS, messages.unpack_frames, assemble]
MESSAGES = [(decode, kind) for decode, union in UNIONS.items() for kind in members(union)]
EACH = 25  # of each message
TAGS = [kind.__struct_config__.tag for _, kind in MESSAGES]


def is_refused_or_read(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        decode(data)
    except MessageError as refused:
        assert str(refused)


def test_every_tagged_message_is_in_a_union_that_is_fuzzed() -> None:
    structs = [kind for module in (messages, types) for _, kind in inspect.getmembers(module, inspect.isclass)]
    tagged = {kind for kind in structs if issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None}
    assert tagged == {kind for _, kind in MESSAGES}


def test_no_message_says_who_sent_it() -> None:
    """The connection says that. A worker could otherwise answer in another's name."""
    own_names = {"worker_id", "frontend_id", "sender"}
    for union in (messages.ToWorker, messages.ToFrontend):
        assert not [kind for kind in members(union) if own_names & set(kind.__struct_fields__)]


@pytest.mark.parametrize(("decode", "kind"), MESSAGES, ids=TAGS)
@settings(max_examples=EACH)
@given(data=st.data())
def test_messages_survive_the_wire(decode: Callable[[bytes], Any], kind: Any, data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    assert decode(messages.encode(message)) == message


@pytest.mark.parametrize(("decode", "kind"), MESSAGES, ids=TAGS)
@settings(max_examples=EACH)
@given(data=st.data(), at=st.integers(0, 1000), byte=st.integers(0, 255), cut=st.integers(0, 2))
def test_damaged_messages_are_read_or_refused(
    decode: Callable[[bytes], Any], kind: Any, data: st.DataObject, at: int, byte: int, cut: int
) -> None:
    sound = messages.encode(data.draw(any_of(kind)))
    for reader in DECODERS:
        is_refused_or_read(reader, damaged(sound, at, byte, cut))


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    is_refused_or_read(decode, data)


@pytest.mark.parametrize(("decode", "kind"), MESSAGES, ids=TAGS)
def test_what_is_nested_too_deeply_is_refused(decode: Callable[[bytes], Any], kind: Any) -> None:
    for reader, data in ((decode, nested(kind.__struct_config__.tag)), (assemble, nested())):
        with pytest.raises(MessageError):
            reader(data)


@pytest.mark.parametrize(("decode", "kind"), MESSAGES, ids=TAGS)
@settings(max_examples=EACH)
@given(data=st.data())
def test_any_values_in_known_fields(decode: Callable[[bytes], Any], kind: Any, data: st.DataObject) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    fields = {name: data.draw(values) for name in names}
    is_refused_or_read(decode, msgspec.msgpack.encode({"type": kind.__struct_config__.tag, **fields}))
