"""Sends cases to a server, judges the answers, and watches requests of others that run beside."""

import asyncio
import collections
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

import msgspec
from support_client import Answer, FleetClient
from support_fleet import token_prompt
from support_sim import expected

from http_fuzz.cases import Case

ANSWER_TIMEOUT_S = 30.0
STALL_S = 5.0  # between two tokens of a request beside: something holds the event loop
_SHOWN = 400
_ASKERS, _MAX_TOKENS = 4, 16
_PROMPTS = [token_prompt(length, seed) for seed, length in enumerate((8, 40, 200, 600))]
_NOT_IMPLEMENTED = 501
_BROKEN_OFF = 500
# What vLLM 0.32 answers with a server error too, as `make fuzz` shows: the path, and a part of what it says.
_VLLMS_OWN = (
    ("/scale_elastic_ep", "has no attribute 'get'"),
    ("/v1/responses", "ResponsesResponse"),
    ("/v1/responses", "broken off"),
)
# What differs from one answer to the next.
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f-]{12,}|\d+")


class Wrong(msgspec.Struct, frozen=True):
    """A case whose answer is a server's error, or that got none. `like`: equal for those with the same cause."""

    case: Case
    status: int  # 0: no answer
    said: str

    @property
    def like(self) -> tuple[int, str, str]:
        return self.status, self.case.path, _VARIES.sub("#", self.said)[:120]

    @property
    def is_vllms_own(self) -> bool:
        return any(self.case.path == path and part in self.said for path, part in _VLLMS_OWN)


class Tally(msgspec.Struct):
    """What came of all cases."""

    cases: int = 0
    by_kind: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    by_status: collections.Counter[int] = msgspec.field(default_factory=collections.Counter)
    wrong: list[Wrong] = []
    slowest_s: float = 0.0


async def send_all(url: str, cases: Iterable[Case], at_once: int) -> Tally:
    tally = Tally()
    waiting = iter(cases)

    async def sender() -> None:
        for case in waiting:
            began = time.monotonic()
            status, said = await answer(url, case)
            tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
            tally.cases += 1
            tally.by_kind[case.kind] += 1
            tally.by_status[status] += 1
            failed = status >= 500 and status != _NOT_IMPLEMENTED
            if failed or (status == 0 and case.leaves_after_s is None):
                tally.wrong.append(Wrong(case, status, said))

    await asyncio.gather(*(sender() for _ in range(at_once)))
    return tally


async def answer(url: str, case: Case) -> tuple[int, str]:
    """Status and end of the answer; 0 and why when there was none. An error inside a stream counts as its code."""
    where = urlsplit(url)
    writer, got = None, b""
    try:
        async with asyncio.timeout(case.leaves_after_s or ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(case.sent)
            while part := await reader.read(65536):
                got += part
    except (OSError, TimeoutError) as error:
        if not got or case.leaves_after_s is None:
            return 0, f"{type(error).__name__} after {len(got)} bytes"
    finally:
        if writer is not None:
            writer.transport.abort()
    got = got.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    first, _, rest = got.partition(b"\r\n")
    status = int(first.split(b" ")[1]) if first.startswith(b"HTTP/1.1 ") else 0
    text = rest.decode(errors="replace").partition("\r\n\r\n")[2]
    if found := re.search(r'"code": ?(5\d\d)\b', text):
        status = int(found[1])
    elif b"\r\ntransfer-encoding: chunked\r\n" in got and not got.endswith(b"\r\n0\r\n\r\n"):
        if case.leaves_after_s is None and case.method != "HEAD":
            return _BROKEN_OFF, f"broken off: {text[-_SHOWN:]}"
    return status, text[-_SHOWN:] if status else f"no HTTP: {got[:100]!r}"


@contextlib.asynccontextmanager
async def others(fleet: FleetClient) -> AsyncIterator[list[Answer]]:
    """Requests that stream while the body runs, remote and local ones: their answers, filled as they end."""
    async with fleet.under_load(_PROMPTS, _ASKERS, _MAX_TOKENS) as answers:
        yield answers


def wrong_answers(answers: list[Answer]) -> list[str]:
    """Each is to be what simulated engines always answer: their tokens depend on prompt and position only."""
    wrong = [answer.error or f"answered {answer.status}" for answer in answers if not answer.ok]
    sound = [answer for answer in answers if answer.ok]
    another = (answer for answer in sound if answer.tokens != expected(answer.prompt, _MAX_TOKENS))
    wrong += [f"{len(answer.prompt)} tokens: {answer.tokens} is another answer" for answer in another]
    gaps = [answer.longest_gap_s for answer in sound]
    return wrong + [f"{gap:.1f} s between two tokens" for gap in gaps if gap > STALL_S]


def figures(answers: list[Answer]) -> dict[str, float]:
    sound = [answer for answer in answers if answer.ok and answer.tokens]
    first, gaps = sorted(a.times[1] - a.times[0] for a in sound), sorted(a.longest_gap_s for a in sound)

    def at(found: list[float], share: float) -> float:
        return round(found[min(len(found) - 1, int(len(found) * share))] * 1e3, 1) if found else 0.0

    return {
        "requests": len(sound),
        "ttft_p50_ms": at(first, 0.5),
        "ttft_p99_ms": at(first, 0.99),
        "gap_p50_ms": at(gaps, 0.5),
        "gap_max_ms": at(gaps, 1.0),
    }
