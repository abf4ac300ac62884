"""What comes from the network is checked message by message."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_fuzz import any_of, damaged, members, nested

from connectors.push import wire
from orchestrator.types import KVEndpoint, KVSource


@pytest.mark.parametrize("kind", members(wire.Message))
@settings(max_examples=25)
@given(data=st.data())
def test_messages_survive_the_wire(kind: type[wire.Message], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    assert wire.parse(wire.pack(message)) == message


def test_source_has_fields_of_fleet_type() -> None:
    """A worker hands it over as builtins; the connector may not import it."""
    source = KVSource(KVEndpoint("engine-1", "127.0.0.1", 5600, tp_size=2, pp_size=3), "r#1")
    builtins = msgspec.to_builtins(source)
    assert msgspec.to_builtins(msgspec.convert(builtins, wire.Source)) == builtins


@pytest.mark.parametrize(
    ("notification", "stock"),
    [
        (b"chat-1:with:colons#2:4", True),
        (wire.pack(wire.Landed("r:2")), False),
        (b"PDKV0:1", False),
        (b"HB:a,b", False),
        (b":4", False),
        (b"", False),
    ],
)
def test_stock_completion_notice_is_recognised(notification: bytes, stock: bool) -> None:
    assert wire.is_stock_notice(notification) is stock
    if stock:
        with pytest.raises(wire.WireError):
            wire.parse(notification)


@pytest.mark.parametrize(
    "notification",
    [
        b"",
        b"HB:a,b",
        b"PUSH_REG:junk",
        b"PDKV0:" + wire.pack(wire.Landed("r"))[len(wire.PREFIX) :],
        wire.PREFIX,
        wire.PREFIX + b"\x81\xa4type\xa3xyz",
        wire.PREFIX + nested("ping"),
        wire.pack(wire.Landed("r"))[:-2],
        b"\xff\xfe:1",
    ],
)
def test_other_messages_are_refused(notification: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.parse(notification)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for notification in (data, wire.PREFIX + data):
        with contextlib.suppress(wire.WireError):
            wire.parse(notification)


@pytest.mark.parametrize("kind", members(wire.Message))
@settings(max_examples=25)
@given(data=st.data(), at=st.integers(0, 1000), byte=st.integers(0, 255), cut=st.integers(0, 2))
def test_damaged_messages_are_read_or_refused(
    kind: type[wire.Message], data: st.DataObject, at: int, byte: int, cut: int
) -> None:
    with contextlib.suppress(wire.WireError):
        wire.parse(damaged(wire.pack(data.draw(any_of(kind))), at, byte, cut))
