"""One request to a server, timed as its user sees it. Chunks are counted, not decoded, so that the client costs little.

The server streams the server-sent events of OpenAI's completions API: one JSON object per `data:` line, then one with
the usage and an empty list of choices, then `[DONE]`.
"""

from __future__ import annotations

import re
import time

import aiohttp
import msgspec

from orchestrator.config.settings import ConfigError

_CHOICE = b'"finish_reason"'  # each choice has this key; the chunk with the usage has no choice
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_ERROR = b'data: {"error"'
_TIMEOUT_S, _CONNECT_TIMEOUT_S = 600.0, 10.0


class MeasureError(ConfigError):
    """The message is one line: the server, and what it answered or the fix."""


class Timing(msgspec.Struct, frozen=True):
    """The times of one answered request, in seconds. `tpot_s` is 0 for a single token. `gaps_s` are the times between
    chunks of the stream."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    gaps_s: list[float]
    cached_tokens: int = 0  # of the prompt, as the server reports them

    @property
    def total_s(self) -> float:
        return self.ttft_s + sum(self.gaps_s)


class Target:
    """A server. Use it as an async context manager: on entry it asks for the model, and raises MeasureError if no
    OpenAI server answers."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.model = ""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
            headers={"content-type": "application/json", **headers},
            read_bufsize=1 << 18,
        )

    async def __aenter__(self) -> Target:
        try:
            async with self._client.get(f"{self.url}/v1/models") as answer:
                self.model = (await answer.json())["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            await self._client.close()
            raise MeasureError(f"{self.url}: no OpenAI server answers there ({error}); start a fleet first") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def complete(self, prompt: list[int] | str, output_tokens: int, since: float | None = None) -> Timing:
        """Send a request and time its answer. `since`: when its user began to wait, by `time.perf_counter`; None
        means now. Raises MeasureError for anything but a complete answer."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        began = time.perf_counter() if since is None else since
        try:
            async with self._client.post(f"{self.url}/v1/completions", data=body) as answer:
                if answer.status != 200:
                    raise MeasureError(f"{self.url}: answered {answer.status}: {(await answer.text())[:200]}")
                stamps, end = await _read(answer.content)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise MeasureError(f"{self.url}: {type(error).__name__} {error}") from None
        if _ERROR in end:
            raise MeasureError(f"{self.url}: {end[end.index(_ERROR) :][:200].decode(errors='replace')}")
        if not stamps or b"data: [DONE]" not in end:
            raise MeasureError(f"{self.url}: the answer broke off after {len(stamps)} tokens")
        counted, read, cached = _last(_USAGE, end), _last(_PROMPT, end), _last(_CACHED, end)
        tokens = len(stamps) if counted is None else counted
        prompt_tokens = len(prompt) if read is None or not isinstance(prompt, str) else read
        tpot_s = (stamps[-1] - stamps[0]) / (tokens - 1) if tokens > 1 else 0.0
        gaps = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
        return Timing(prompt_tokens, tokens, stamps[0] - began, tpot_s, gaps, cached or 0)


def _last(pattern: re.Pattern[bytes], end: bytes) -> int | None:
    """The last number that matches: a server may send the usage so far with every event."""
    found = pattern.findall(end)
    return int(found[-1]) if found else None


async def _read(content: aiohttp.StreamReader) -> tuple[list[float], bytes]:
    """The arrival time of each event with a choice, and the last 4,096 bytes of the stream, which have the usage."""
    stamps: list[float] = []
    end = b""
    async for chunk in content.iter_any():
        now = time.perf_counter()
        # An event may be cut in two, so the end of the last chunk is searched together with this one.
        seam = end[1 - len(_CHOICE) :] if end else b""
        stamps += [now] * (seam + chunk).count(_CHOICE)
        end = (end + chunk)[-4096:]
    return stamps, end
