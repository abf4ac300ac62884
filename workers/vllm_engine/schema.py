"""A short hash of the messages that this vLLM's engine accepts and returns. If it is equal for two versions of vLLM,
the frontends of one can drive the engines of the other.

Names, order, types and defaults of all fields count: a field that a message leaves out has the receiver's default.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

_DIGITS = 16
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function, say: it differs between processes


def vllm_schema() -> str:
    return schema(EngineCoreRequest, EngineCoreOutputs)


def schema(*messages: type) -> str:
    """The hash of these classes and of all classes that their fields name."""
    classes, lines = list(messages), []
    for cls in classes:  # the loop appends to this list
        fields = []
        for name, wanted, default in _fields(cls):
            fields.append(f"{name}: {wanted!r} = {default}")
            classes += [found for found in _classes(wanted) if found not in classes]
        lines.append(f"{cls.__qualname__}({', '.join(fields)})")
    text = _ADDRESS.sub("", "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _fields(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Name, type and default of each field. A class without fields yields nothing: only its name counts."""
    if issubclass(cls, enum.Enum):
        yield from ((member.name, member.value, "") for member in cls)
    elif issubclass(cls, msgspec.Struct):
        yield "array_like", cls.__struct_config__.array_like, ""
        for field in msgspec.structs.fields(cls):
            yield field.encode_name, field.type, _default(field.default, field.default_factory, msgspec.NODEFAULT)
    elif dataclasses.is_dataclass(cls):
        hints = _hints(cls)
        for one in dataclasses.fields(cls):
            yield one.name, hints[one.name], _default(one.default, one.default_factory, dataclasses.MISSING)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        hints, defaults = _hints(cls), getattr(cls, "_field_defaults", {})
        for name in cls._fields:
            yield name, hints.get(name), repr(defaults[name]) if name in defaults else ""


def _default(value: Any, factory: Any, none: Any) -> str:
    if factory is not none:
        return f"{getattr(factory, '__qualname__', factory)}()"
    return "" if value is none else repr(value)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a name that only type checkers import
        return dict(cls.__annotations__)


def _classes(wanted: Any) -> Iterator[type]:
    for part in typing.get_args(wanted):
        yield from _classes(part)
    if isinstance(wanted, type) and not typing.get_args(wanted) and any(True for _ in _fields(wanted)):
        yield wanted
