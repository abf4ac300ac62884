"""A small server of known behaviour that streams completions as OpenAI's API does: made-up tokens at a given pace."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any


class Server:
    """`first_s` and `gap_s` are its times. `cut` bytes at a time leave it. `broken`: status, stream or event."""

    telling = False  # the usage so far, with every event
    key = ""  # that clients must send
    gone_after: int | None = None  # so many questions for its models

    def __init__(self, first_s: float = 0.0, gap_s: float = 0.0, cut: int = 0, broken: str = "") -> None:
        self.first_s, self.gap_s, self.cut, self.broken = first_s, gap_s, cut, broken
        self.prompts: list[list[int]] = []
        self.most_at_once = 0
        self._now = 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One answer per connection."""
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if f"bearer {self.key}" not in head.lower() and self.key:
                self._begin(writer, 401, "application/json")
            elif head.startswith("POST"):
                lines = [line.split(":") for line in head.splitlines()]
                length = next(int(line[1]) for line in lines if line[0].lower() == "content-length")
                await self._answer(json.loads(await reader.readexactly(length)), writer)
            elif self.gone_after == 0:
                writer.close()
                return
            else:
                self.gone_after = None if self.gone_after is None else self.gone_after - 1
                self._begin(writer, 200, "application/json")
                writer.write(b'{"data": [{"id": "m"}]}' if head.startswith("GET /v1/models") else b"{}")
            await writer.drain()
        writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.prompts.append(asked["prompt"])
        if self.broken == "status":
            self._begin(writer, 429, "application/json")
            writer.write(b'{"error": "full"}')
            return
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        self._begin(writer, 200, "text/event-stream")
        await asyncio.sleep(self.first_s)
        for number in range(asked["max_tokens"]):
            if number and self.gap_s:
                await asyncio.sleep(self.gap_s)
            event: dict[str, Any] = {"choices": [{"text": "x", "finish_reason": None}]}
            if self.telling:
                event["usage"] = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": number + 1}
            await self._send(writer, event)
        self._now -= 1
        if self.broken == "stream":
            return
        if self.broken == "event":
            await self._send(writer, {"error": {"message": "the engine died"}})
        usage = {"completion_tokens": asked["max_tokens"], "prompt_tokens_details": {"cached_tokens": 3}}
        await self._send(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    async def _send(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        for at in range(0, len(data), self.cut or len(data)):
            writer.write(data[at : at + (self.cut or len(data))])
            await writer.drain()
            await asyncio.sleep(0)

    def _begin(self, writer: asyncio.StreamWriter, status: int, kind: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode())
