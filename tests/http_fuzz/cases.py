"""The requests: what a schema allows and what it does not, damaged text, odd heads, clients that leave.

A seed gives the same requests as long as the schema stays the same.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

HOSTILE: list[Any] = [
    None, True, "", "x", "\x00\ud7ff\U0010ffff", "half \ud83d", "x" * 10_000, 0, -1, 1, 2**31, 2**63, 2**64,
    -(2**63) - 1, 1e308, -0.5, float("nan"), float("inf"), [], [[]], [None], [-1], [2**40], ["x", 1], {}, {"": {}},
    {"type": "x"}, [{}], [{"role": "user"}], [{"role": "nobody", "content": [{"type": "text"}]}],
    [{"type": "function", "function": {}}],
]  # fmt: skip
# One pixel, a local file, an address of this host, and what is none of these.
_PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
_WORDS = [
    "hello", "", "a b c " * 40, "<|im_start|>", "é漢字👍🏽\u2028", "^(a+)+$", "#/$defs/x", '{"type": "object"}', "user",
    "auto", "json_schema", "file:///etc/passwd", "http://127.0.0.1:1/x.png", _PIXEL, "../../etc", "%s%n{0}", "\n\n",
    "a" * 300,
]  # fmt: skip
TEXT = [{"role": "user", "content": "hello"}]
# The least that each path answers with 200.
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "max_tokens": 3},
    "/v1/chat/completions/batch": {"messages": [TEXT, TEXT], "max_tokens": 3},
    "/v1/completions": {"prompt": "hello " * 40, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": TEXT, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": TEXT},
    "/inference/v1/generate": {"token_ids": [*range(5, 60)], "sampling_params": {"max_tokens": 3}},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
_JSON = "application/json"
_TYPES = [
    "Application/JSON", "application/json; charset=utf-16", "application/json;charset", "text/plain",
    "Multipart/Form-Data",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "application/vnd.x+json", "/", "",
]  # fmt: skip
_HEADERS = [
    "authorization: Bearer wrong", "authorization: Basic \xff", "x-request-id: \x01\xe9 a/b?c",
    "x-request-id: " + "r" * 5000, "traceparent: 00-0-0-00", "traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "accept: text/event-stream", "accept-encoding: gzip, br;q=nan", "expect: 100-continue", "origin: null",
    "host: other.example:99", "cookie: a=\x00b", "x-data-parallel-rank: -1", "x-session-id: s",
    "upgrade: websocket\r\nconnection: upgrade", "x: " + "y" * 70_000, "transfer-encoding: chunked, identity",
    "content-length: 3", "range: bytes=0-", "if-match: *", "\xff\xfe: a", "no-colon",
]  # fmt: skip
_QUERIES = ["", "", "?", "?a=b&a=c", "?stream=true&slowest=99999999999999999999", "?%00=%ff", "?" + "q" * 9000, "#x"]
_METHODS = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "POST", "BREW"]
_LEAVES_WITHIN_S = 0.05
_DEPTH = 4


class Case(msgspec.Struct, frozen=True):
    """The bytes of one request, on a connection of its own."""

    kind: str
    method: str
    path: str  # of the schema
    sent: bytes
    leaves_after_s: float | None = None  # the client leaves then, whatever it has read

    def shown(self) -> str:
        return f"{self.kind}: {self.sent[:1500]!r}"


class Cases:
    """Makes cases for one server. `schema`: its OpenAPI document; `model`: what it serves; `key`: the operator's."""

    def __init__(self, schema: dict[str, Any], model: str, seed: int, key: str = "") -> None:
        self._schema, self._model, self._key = schema, model, key
        self._draw = random.Random(seed)
        self._operations = [
            (method.upper(), path)
            for path, methods in schema["paths"].items()
            for method in methods
            # What these are asked to do would end what is tested.
            if not path.startswith(("/operator/", "/pause", "/v1/load_lora", "/v1/unload_lora"))
        ]
        self._paths = [path for path in SOUND if path in schema["paths"]]

    def take(self, count: int) -> Iterator[Case]:
        kinds: list[tuple[Callable[[], Case], int]] = [
            (self._fields, 35), (self._whole, 25), (self._damaged, 10), (self._head, 12), (self._other, 10),
            (self._leaving, 8),
        ]  # fmt: skip
        makers, weights = zip(*kinds, strict=True)
        for make in self._draw.choices(makers, weights, k=count):
            yield make()

    def with_fields(self, path: str, count: int) -> Iterator[Case]:
        """Sound bodies of one path, each with one or two fields that are hostile."""
        for _ in range(count):
            yield self._fields(path)

    def _fields(self, path: str = "") -> Case:
        path = path or self._draw.choice(self._paths)
        body, schema = self._sound(path), self._body_schema(path)
        fields = sorted(self._properties(schema))
        for name in self._draw.sample(fields, min(len(fields), self._draw.choice([1, 1, 2]))):
            body[name] = self._draw.choice(HOSTILE)
        return self._post("field", path, json.dumps(body).encode())

    def _whole(self) -> Case:
        """Several fields as the schema has them, at any depth, some of them hostile."""
        path = self._draw.choice(self._paths)
        body, properties = self._sound(path), self._properties(self._body_schema(path))
        for name in self._draw.sample(sorted(properties), min(len(properties), self._draw.choice([1, 2, 3, 6]))):
            if name not in ("model", "max_tokens", "max_completion_tokens", "max_output_tokens"):
                body[name] = self._value(properties[name], 0)
        return self._post("schema", path, json.dumps(body).encode())

    def _damaged(self) -> Case:
        path = self._draw.choice(self._paths)
        text = bytearray(json.dumps(self._sound(path)).encode())
        for _ in range(self._draw.choice([1, 1, 3])):
            at = self._draw.randrange(len(text))
            how = self._draw.randrange(4)
            if how == 0:
                text[at] = self._draw.randrange(256)
            elif how == 1:
                del text[at:]
                text += b"0"
            elif how == 2:
                text[at:at] = text[: self._draw.randrange(len(text))]
            else:
                text[at:at] = self._draw.choice([b"[" * 5000, b'"a":' * 50, b"\\ud800", b"\xc3", b"1e999", b"\0"])
        return self._post("bytes", path, bytes(text))

    def _head(self) -> Case:
        """A sound body under an odd head, or with another length than it says."""
        path = self._draw.choice(self._paths)
        body = json.dumps(self._sound(path)).encode()
        kind = self._draw.choice([_JSON, _JSON, *_TYPES])
        headers = "".join(f"{self._draw.choice(_HEADERS)}\r\n" for _ in range(self._draw.choice([0, 1, 1, 3])))
        length = self._draw.choice([len(body)] * 4 + [len(body) - 5, len(body) + 50])
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-type: {kind}\r\n{headers}"
        sent = head.encode("latin-1") + b"content-length: %d\r\n\r\n" % length + body
        # Who waits for the rest of a body leaves.
        return Case("head", "POST", path, sent, 0.5 if length > len(body) or "chunked" in headers else None)

    def _other(self) -> Case:
        """Any operation, method and path."""
        method, path = self._draw.choice(self._operations)
        filled = path
        for name in ("{response_id}", "{request_id}", "{name}"):
            filled = filled.replace(name, self._draw.choice(["x", "a%2fb", "%00", "resp_1", "..", "%E2%98%83"]))
        filled = self._draw.choice([filled] * 4 + [filled.upper(), "/" + filled, filled + "/", filled + "%2e"])
        method = self._draw.choice([method] * 3 + _METHODS)
        key = f"authorization: Bearer {self._key}\r\n" if self._key and self._draw.random() < 0.5 else ""
        body = json.dumps(self._draw.choice(HOSTILE)).encode() if method not in ("GET", "HEAD") else b""
        head = f"{method} {filled}{self._draw.choice(_QUERIES)} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{key}"
        sent = head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        return Case("other", method, path, sent, 0.5 if path == "/fleet/stream" else None)

    def _leaving(self) -> Case:
        path = self._draw.choice(self._paths)
        body = self._sound(path)
        if "max_tokens" in body:
            body |= {"max_tokens": 500, "stream": True, "ignore_eos": True}
        case = self._post("leaving", path, json.dumps(body).encode())
        cut = self._draw.choice([len(case.sent)] * 3 + [self._draw.randrange(1, len(case.sent))])
        after_s = self._draw.uniform(0, _LEAVES_WITHIN_S)
        return msgspec.structs.replace(case, sent=case.sent[:cut], leaves_after_s=after_s)

    def _post(self, kind: str, path: str, body: bytes) -> Case:
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-type: {_JSON}\r\n"
        return Case(kind, "POST", path, head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)

    def _sound(self, path: str) -> dict[str, Any]:
        body = {"model": self._model, **SOUND[path]}
        if "stream" in self._properties(self._body_schema(path)):
            body["stream"] = self._draw.choice([True, False])
        return body

    def _body_schema(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._schema["paths"][path]["post"]["requestBody"]["content"][_JSON]["schema"]
        return found

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schema["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def _properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        schema = self._resolved(schema)
        found = dict(schema.get("properties", {}))
        for choice in schema.get("anyOf", ()):
            found |= self._properties(choice)
        return found

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        draw = self._draw
        if depth > _DEPTH or draw.random() < 0.12:
            return draw.choice(HOSTILE)
        schema = self._resolved(schema)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._value(draw.choice(schema[name]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                properties, needed = schema.get("properties", {}), set(schema.get("required", ()))
                taken = {name for name in properties if name in needed or draw.random() < 0.3}
                return {name: self._value(properties[name], depth + 1) for name in sorted(taken)} or {
                    draw.choice(_WORDS): draw.choice(HOSTILE)
                }
            case "array":
                return [self._value(schema.get("items", {}), depth + 1) for _ in range(draw.choice([0, 1, 1, 2, 5]))]
            case "integer":
                low = int(schema.get("minimum", 0))
                return draw.choice([low, low + 1, low + 3, int(schema.get("maximum", 50_000))])
            case "number":
                return draw.choice([schema.get("minimum", 0.0), 0.5, 1.0, schema.get("maximum", 2.0)])
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
            case "string":
                return draw.choice(_WORDS)
        return draw.choice([*_WORDS, *HOSTILE])
