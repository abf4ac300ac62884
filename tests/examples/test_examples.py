"""The programs in `examples/` run against a fleet, and show what they say. `grafana.py`: `e2e/test_telemetry.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_fleet import RunningFleet, running_fleet

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet():
    details = "frontend.server_args.enable_prompt_tokens_details=true"
    with running_fleet("sim-2p2d.yaml", "routing.remote_prefill_min_tokens=100", details) as running:
        yield running


def run(name: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_chat_streams_and_tells_its_times(fleet: RunningFleet):
    said = run("chat.py", "--url", fleet.url, "--max-tokens", "8", "Hello")
    assert re.search(r"^\(\d+ ms to the first token, then [1-9]\d* tokens/s\)$", said, re.MULTILINE), said


def test_the_agent_finds_its_conversation_again(fleet: RunningFleet):
    said = run("agent.py", "--url", fleet.url, "--max-tokens", "8", "configs")
    rows = [tuple(map(int, row)) for row in re.findall(r"^\S+\.yaml +(\d+) +(\d+) +\d+ ", said, re.MULTILINE)]
    assert len(rows) == 5
    # All that was said before, but for the last block and what the template puts after an answer.
    assert all(cached >= before - 32 for (before, _), (_, cached) in zip(rows, rows[1:], strict=False)), said


def test_the_load_draws_what_users_see(fleet: RunningFleet, tmp_path: Path):
    picture = tmp_path / "load.png"
    said = run("load.py", PD_URL=fleet.url, PD_USERS="1,4", PD_REQUESTS="3", PD_PICTURE=str(picture))
    assert re.findall(r"(\d+) users: TTFT +[\d.]+ ms, (\d+) answers", said) == [("1", "3"), ("4", "12")]
    assert picture.read_bytes().startswith(b"\x89PNG")
