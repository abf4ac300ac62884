"""What tells versions of vLLM apart whose frontends and engines do not understand each other."""

import dataclasses
import enum

import msgspec
import pytest

from workers.vllm_engine.identity import schema

pytestmark = pytest.mark.vllm


class Reason(enum.Enum):
    STOP = 0


@dataclasses.dataclass
class Statistics:
    cached: int = 0


class Output(msgspec.Struct, array_like=True):
    tokens: list[int]
    statistics: Statistics | None = None
    reasons: list[Reason] = []


def request(*fields: object, **options: bool) -> type:
    return msgspec.defstruct("Request", [("id", str), *fields], **options)  # type: ignore[list-item, call-overload]


@pytest.mark.parametrize(
    "changed",
    [
        request(("priority", int, 0), ("outputs", list[Output], [])),
        request(("outputs", list[Output], []), ("priority", int, 1)),
        request(("outputs", list[Output], []), ("priority", float, 0)),
        request(("outputs", list[Output], []), ("priority", int, 0), ("more", int, 0)),
        request(("outputs", list[Output], []), ("priority", int, 0), array_like=True),
    ],
)
def test_changed_field_changes_schema(changed: type):
    assert schema(changed) != schema(request(("outputs", list[Output], []), ("priority", int, 0)))


@pytest.mark.parametrize("part", [Output, Statistics, Reason])
def test_schema_covers_nested_classes(part: type, monkeypatch: pytest.MonkeyPatch):
    message = request(("outputs", list[Output] | None, None))
    before = schema(message)
    assert schema(request(("outputs", list[Output] | None, None))) == before
    import workers.vllm_engine.identity as module

    fields = module._fields
    monkeypatch.setattr(
        module, "_fields", lambda cls: iter([*fields(cls), *([("new", int, "")] if cls is part else [])])
    )
    assert schema(message) != before
