"""The walk in docs/architecture.md names exactly the files that a remote request passes, found by tracing one."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_fleet import RunningFleet, running_fleet, small_model
from support_trace import Call, Trace, tracing

ROOT = Path(__file__).parents[1]
# Longer than anything that a fleet does periodically, so that only what is the request's is taken for it.
IDLE_S = 8.0
# In which a frontend has noted in Redis what it retried: longer than `HEARTBEAT_S` of `frontend/wiring.py`.
NOTED_S = 2.0
STARTING, IDLE, AFTER, FIRST_TRY = range(4)  # phases of the trace; each try of a request has one of its own
# One call that lasts as long as the process: its loop receives every message.
LOOPS = {"orchestrator/frontend/wiring.py"}
# A look at deadlines meets only a request that takes longer than `CHECK_S` of `router/router.py`, as on a busy machine.
DEADLINES = {"orchestrator/router/lost.py", "orchestrator/fleet/pause.py"}


def walk() -> str:
    text = (ROOT / "docs" / "architecture.md").read_text()
    (section,) = re.findall(r"^## A remote request, step by step$.*?(^1\. .*?)^A \*local\* request", text, re.M | re.S)
    return section


def named_files(text: str) -> set[str]:
    """Paths in backticks, relative to the repository; the walk leaves `orchestrator/` away."""
    names = re.findall(r"`([\w/]+\.py)`", text)
    return {
        name if name.startswith(("workers/", "connectors/", "tests/")) else f"orchestrator/{name}" for name in names
    }


def test_the_walk_has_at_most_ten_steps_and_each_names_its_files():
    steps = re.split(r"^\d+\. ", walk(), flags=re.M)[1:]
    assert 5 <= len(steps) <= 10
    assert all(named_files(step) for step in steps)


def test_every_file_named_in_the_document_exists():
    named = named_files((ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 30
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_document_is_three_screens():
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def differences(text: str, calls: set[Call], warm: int, last: int) -> list[str]:
    """What the walk leaves out, and what it names though no request passes it. `warm` and `last` are the phases of two
    requests. A function that also runs while the fleet starts or idles, or for one of the two only, is not taken for
    the request's."""
    starting, idle, first, asked = (
        {(call.file, call.function) for call in calls if call.phase == phase} for phase in (STARTING, IDLE, warm, last)
    )
    own = (asked & first) - starting - idle
    named = named_files(text)
    left_out = [f"left out: {file} ({function})" for file, function in own if file not in named | DEADLINES]
    never = named - {file for file, _ in asked} - LOOPS
    return sorted(left_out) + [f"no request passes it: {file}" for file in sorted(never)]


def test_missing_and_unused_files_are_reported():
    router, queue = "orchestrator/router/router.py", "orchestrator/store/queue.py"
    tries = (FIRST_TRY, FIRST_TRY + 1)
    calls = {Call(phase, router, "submit:1") for phase in tries}
    calls |= {Call(phase, queue, "depth:9") for phase in (STARTING, IDLE, *tries)}
    assert differences("1. `router/router.py`", calls, *tries) == []
    assert differences("1. `store/queue.py`", calls, *tries) == [f"left out: {router} (submit:1)"]
    calls |= {Call(phase, "orchestrator/fleet/pause.py", "waited_s:1") for phase in tries}
    assert differences("1. `router/router.py`", calls, *tries) == [], "it took long"
    text = "1. `router/router.py`, `router/gone.py`"
    assert differences(text, calls, *tries) == ["no request passes it: orchestrator/router/gone.py"]


class Scripted:
    """A fleet whose requests are retried or not, and the trace of what it runs: with a heartbeat it notes retries."""

    def __init__(self, retried: list[bool]) -> None:
        self.calls: set[Call] = set()
        self._retried, self._phase, self._lines = retried, STARTING, list[dict[str, Any]]()
        self._noting: asyncio.Task[None] | None = None

    def enter(self, phase: int) -> None:
        self._phase = phase

    def client(self) -> Scripted:
        return self

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def ask(self, *_: object, **__: object) -> SimpleNamespace:
        retried = self._retried.pop(0)
        self.calls.add(Call(self._phase, "orchestrator/router/dispatch.py", "retry:1" if retried else "place:1"))
        self._lines.append({"outcome": "finished", "decision": "remote", "attempts": 1 + retried})
        if retried:
            self._noting = asyncio.create_task(self._note())
        return SimpleNamespace(ok=True)

    async def _note(self) -> None:
        from orchestrator.frontend.wiring import HEARTBEAT_S

        await asyncio.sleep(HEARTBEAT_S)
        self.calls.add(Call(self._phase, "orchestrator/store/operator/events.py", "note:1"))

    def request_lines(self) -> list[dict[str, Any]]:
        return self._lines

    def until(self, found: Any, *_: object) -> Any:
        return found()

    def assert_no_leaks(self) -> None:
        pass


@pytest.mark.slow
async def test_what_a_discarded_try_leaves_to_the_heartbeat_is_no_part_of_the_walk():
    scripted, tries = Scripted([True, False, True, False]), itertools.count(FIRST_TRY)
    fleet: Any = scripted
    warm, last = [await ask(fleet, fleet, name, tries) for name in ("warm", "asked")]
    assert {call.function for call in scripted.calls} == {"retry:1", "place:1", "note:1"}
    assert differences("1. `router/dispatch.py`", scripted.calls, warm, last) == []


async def ask(trace: Trace, fleet: RunningFleet, name: str, tries: Iterator[int]) -> int:
    """A streamed request whose prompt is cached nowhere and long enough to be prefilled remotely. Returns its phase. On
    a busy machine a traced worker may be silent for so long that the request goes elsewhere; then it is asked again,
    once its retry has been noted."""
    lines: list[dict[str, object]] = []
    for number in range(5):
        trace.enter(phase := next(tries))
        before = len(fleet.request_lines())
        prompt = f"{name} {number}. " + "word " * 600
        async with fleet.client() as client:
            answer = await fleet.ask(client, prompt, max_tokens=8, return_token_ids=None)  # which is plain
        assert answer.ok, answer
        lines += fleet.until(lambda before=before: fleet.request_lines()[before:], "its pd.request line")[:1]
        fleet.assert_no_leaks()
        if (lines[-1]["outcome"], lines[-1]["decision"], lines[-1]["attempts"]) == ("finished", "remote", 1):
            return phase
        await asyncio.sleep(NOTED_S)
    pytest.fail(f"no request was prefilled remotely at once: {lines}")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_walk_names_every_file_that_a_remote_request_passes_and_no_other(tmp_path: Path):
    # In float32 decode samples the token that prefill has sent, so that one attempt is all there is.
    model = f"model={small_model(tmp_path / 'small')}"
    with tracing(tmp_path) as trace, running_fleet("demo-1p1d-cpu.yaml", model, forked=False) as fleet:
        tries = itertools.count(FIRST_TRY)
        warm = asyncio.run(ask(trace, fleet, "warm", tries))
        trace.enter(IDLE)
        time.sleep(IDLE_S)
        fleet.assert_no_leaks()  # what it asks for after each request is not the request's either
        last = asyncio.run(ask(trace, fleet, "asked", tries))
        trace.enter(AFTER)
    assert differences(walk(), trace.calls(), warm, last) == []
