"""Values of any of our message types, made from the types: a message that is added is fuzzed from then on."""

import enum
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Any: st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    type(None): st.none(),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=12),
    bytes: st.binary(max_size=12),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Raises TypeError for a type that no message of ours has had so far: add it here."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return any_of(inner[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(any_of, inner))
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(any_of(inner[0]), max_size=4)
    if origin is tuple:
        return st.tuples(*map(any_of, inner))
    if origin is dict:
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=4)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{field.name: any_of(field.type) for field in msgspec.structs.fields(kind)})
    raise TypeError(f"no strategy for {kind!r}")


def members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    """The messages of a tagged union."""
    return typing.get_args(union)


def damaged(sound: bytes, at: int, byte: int, cut: int) -> bytes:
    """With one other byte, and without its end."""
    where = at % len(sound)
    return (sound[:where] + bytes([byte]) + sound[where + 1 :])[: len(sound) - cut % 3]


def nested(tag: str = "") -> bytes:
    """A message of this tag in msgpack with a field that none has: lists in lists, deeper than a reader goes."""
    tagged = msgspec.msgpack.encode({"type": tag, "new": None} if tag else {"new": None})
    return tagged[:-1] + b"\x91" * 100_000 + b"\x90"
