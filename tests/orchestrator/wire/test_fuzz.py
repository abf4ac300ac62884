"""Bytes from anywhere: a decoder gives a message or its own error, and a process that hears them goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.types import KVEndpoint, KVSource
from orchestrator.wire import messages
from orchestrator.wire.messages import Call, Claimed, MessageError, Prefilled, Submit

SOUND = [
    Submit("r", 1, 2, 30, KVSource(KVEndpoint("e", "h", 1), "r#1"), [4, 5]),
    Call(1, "profile", [True], {"profile_prefix": "p"}),
    Claimed("r", 1, "w", KVSource(KVEndpoint("e", "h", 1), "r#1"), 0.1),
    Prefilled("r", 1, "w", 0.2, 3, 4, 5.0),
]
DECODERS: list[Callable[[bytes], Any]] = [
    messages.decode_to_worker,
    messages.decode_to_frontend,
    messages.decode_published,
    messages.unpack_frames,
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def damaged(sound: bytes, at: int, byte: int, cut: int) -> bytes:
    """With one other byte, and without its end."""
    where = at % len(sound)
    return (sound[:where] + bytes([byte]) + sound[where + 1 :])[: len(sound) - cut % 3]


def is_refused_or_read(decode: Callable[[bytes], Any], data: bytes, error: type[Exception]) -> None:
    try:
        decode(data)
    except error as refused:
        assert str(refused)


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@given(data=st.binary(max_size=200))
def test_any_bytes(decode: Callable[[bytes], Any], data: bytes) -> None:
    is_refused_or_read(decode, data, MessageError)


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@given(value=values, tag=st.sampled_from(["hello", "submit", "call", "claimed", "prefilled", "outputs", "load"]))
def test_any_values_behind_a_known_tag(decode: Callable[[bytes], Any], value: Any, tag: str) -> None:
    fields = value if isinstance(value, dict) else {"request_id": value, "attempt": value, "worker_id": value}
    is_refused_or_read(decode, msgspec.msgpack.encode({"type": tag, **fields}), MessageError)


@pytest.mark.parametrize("sound", SOUND, ids=lambda message: type(message).__name__)
@given(at=st.integers(0, 1000), byte=st.integers(0, 255), cut=st.integers(0, 2))
def test_sound_messages_that_were_damaged(sound: Any, at: int, byte: int, cut: int) -> None:
    data = damaged(messages.encode(sound), at, byte, cut)
    for decode in DECODERS:
        is_refused_or_read(decode, data, MessageError)
