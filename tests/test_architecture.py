"""The walk in docs/architecture.md names exactly the files that a remote request passes, found by tracing one."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from support_fleet import RunningFleet, running_fleet
from support_trace import Call, tracing

ROOT = Path(__file__).parents[1]
# Longer than anything that a fleet does periodically, so that only what is the request's is taken for it.
IDLE_S = 8.0
STARTING, WARM, IDLE, ASKED, AFTER = range(5)  # phases of the trace
# One call that lasts as long as the process: its loop receives every message.
LOOPS = {"orchestrator/frontend/wiring.py", "orchestrator/router/overdue.py"}


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


def differences(text: str, calls: set[Call]) -> list[str]:
    """What the walk leaves out, and what it names though no request passes it. A function that also runs while the
    fleet starts or idles, or for one of the two requests only, is not taken for the request's."""
    in_phase = {phase: {(call.file, call.function) for call in calls if call.phase == phase} for phase in range(AFTER)}
    asked = in_phase[ASKED]
    own = (asked & in_phase[WARM]) - in_phase[STARTING] - in_phase[IDLE]
    named = named_files(text)
    left_out = [f"left out: {file} ({function})" for file, function in own if file not in named]
    never = named - {file for file, _ in asked} - LOOPS
    return sorted(left_out) + [f"no request passes it: {file}" for file in sorted(never)]


def test_missing_and_unused_files_are_reported():
    router, queue = "orchestrator/router/router.py", "orchestrator/store/queue.py"
    calls = {Call(phase, router, "submit:1") for phase in (WARM, ASKED)}
    calls |= {Call(phase, queue, "depth:9") for phase in (STARTING, WARM, IDLE, ASKED)}
    assert differences("1. `router/router.py`", calls) == []
    assert differences("1. `store/queue.py`", calls) == [f"left out: {router} (submit:1)"]
    text = "1. `router/router.py`, `router/gone.py`"
    assert differences(text, calls) == ["no request passes it: orchestrator/router/gone.py"]


async def ask(fleet: RunningFleet, name: str) -> None:
    """A streamed request whose prompt is cached nowhere and long enough to be prefilled remotely. On a busy machine a
    traced worker may be silent for so long that the request goes elsewhere; then it is asked again."""
    lines: list[dict[str, object]] = []
    for number in range(5):
        before = len(fleet.request_lines())
        prompt = f"{name} {number}. " + "word " * 600
        async with fleet.client() as client:
            answer = await fleet.ask(client, prompt, max_tokens=8, return_token_ids=None)  # which is plain
        assert answer.ok, answer
        lines += fleet.until(lambda before=before: fleet.request_lines()[before:], "its pd.request line")[:1]
        fleet.assert_no_leaks()
        if (lines[-1]["outcome"], lines[-1]["decision"], lines[-1]["attempts"]) == ("finished", "remote", 1):
            return
    pytest.fail(f"no request was prefilled remotely at once: {lines}")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_walk_names_every_file_that_a_remote_request_passes_and_no_other(tmp_path: Path):
    # Float32: decode samples the token that prefill has sent, so that one attempt is all there is.
    settings = ("workers.engine_args.dtype=float32",)
    with tracing(tmp_path) as trace, running_fleet("demo-1p1d-cpu.yaml", *settings, forked=False) as fleet:
        trace.enter(WARM)
        asyncio.run(ask(fleet, "warm"))
        trace.enter(IDLE)
        time.sleep(IDLE_S)
        fleet.assert_no_leaks()  # what it asks for after each request is not the request's either
        trace.enter(ASKED)
        asyncio.run(ask(fleet, "asked"))
        trace.enter(AFTER)
    assert differences(walk(), trace.calls()) == []
