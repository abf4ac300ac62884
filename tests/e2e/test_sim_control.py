"""What an operator asks of vLLM's server, over a fleet of simulated engines and two frontends."""

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psutil
import pytest
from support_fleet import running_fleet, token_prompt

from orchestrator.config.simulated import CRASH_TOKEN

POISON = 48_999
LONGEST = 8192  # tokens that a worker takes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv(CRASH_TOKEN, str(POISON))
        sets = ("frontend.replicas=2", "routing.remote_prefill_min_tokens=100")
        longer = f"frontend.server_args.max_model_len={LONGEST + 1000}"  # frontends let pass what workers refuse
        with running_fleet("sim-2p2d.yaml", *sets, longer, "logging.format=json") as running:
            yield running


def test_every_process_logs_json_and_takes_another_level_while_it_runs(fleet):
    """The first here: a process that crashes, as workers do below, says so in lines of its own."""

    def logged() -> bool:
        """Whether a new request has its line."""
        before = len(fleet.request_lines())
        answered = fleet.http.post("/v1/completions", json={"model": fleet.model, "prompt": [1, 2], "max_tokens": 2})
        assert answered.status_code == 200
        time.sleep(0.5)  # the launcher reads it from a pipe
        return len(fleet.request_lines()) > before

    fleet.until(logged, "a request has a line")
    lines = [json.loads(line) for line in fleet.process_lines()]
    names = {*(f"worker-{number}" for number in range(4)), "frontend-0", "frontend-1"}
    assert {line["process"] for line in lines} >= names
    assert [line for line in lines if "time" not in line] == []
    shown = fleet.cli("logs", "worker-1").stdout.splitlines()
    assert shown and {json.loads(line)["process"] for line in shown} == {"worker-1"}
    assert json.loads(fleet.cli("trace", "--last", "--json").stdout)
    assert json.loads(fleet.cli("log-level", "error", "--json").stdout) == {"process": None, "level": "ERROR"}
    fleet.until(lambda: not logged(), "no line at a higher level")
    fleet.cli("log-level", "default")
    fleet.until(logged, "lines again")
    assert fleet.cli("log-level", "loud", check=False).returncode == 2


@pytest.fixture
def resumed(fleet):
    """A test that fails leaves the fleet to the next one as it found it."""
    yield
    fleet.http.post("/resume")


@pytest.mark.usefixtures("resumed")
async def test_a_pause_that_aborts_ends_what_runs_at_either_frontend(fleet):
    async with fleet.client() as client:
        # Connections are kept alive, so that both frontends have some of them. No answer ends before the pause comes.
        running = [asyncio.create_task(fleet.ask(client, token_prompt(30 * i + 5, i), 3000)) for i in range(12)]
        await fleet.soon(lambda: sum(w["running"] for w in fleet.workers("decode")) == 12, "all decode")
        answered = await client.post("/pause", params={"mode": "abort"})
        assert (answered.status_code, answered.json()) == (200, {"status": "paused"})
        later = asyncio.create_task(fleet.ask(client, token_prompt(500, 77), 5))
        assert (await client.get("/is_paused")).json()["is_paused"]
        answers = await asyncio.gather(*running)
        assert [a.error for a in answers if a.error] == [] and max(len(a.tokens) for a in answers) < 3000
        await asyncio.sleep(1)
        assert not later.done(), "a new request waits"
        assert (await client.post("/resume")).status_code == 200
        assert (await later).ok and len((await later).tokens) == 5
    fleet.assert_no_leaks()


async def test_unsupported_call_is_refused_with_501(fleet):
    async with fleet.client() as client:
        answered = await client.post("/collective_rpc", json={"method": "reset_weights"})
        assert answered.status_code == 501 and "collective_rpc is not supported" in answered.text
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert (await client.post("/reset_mm_cache")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_reads_why_a_worker_refuses_its_request(fleet, path, stream):
    prompt = {"prompt": token_prompt(LONGEST + 100)}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "word " * (LONGEST + 100)}]}
    async with fleet.client() as client:
        body = {"model": fleet.model, "max_tokens": 5, "stream": stream, **prompt}
        answered = await client.post(path, json=body)
        assert answered.status_code == 400, answered.text
        assert f"the longest sequence is {LONGEST}" in answered.json()["error"]["message"], answered.text
    fleet.assert_no_leaks()


async def test_client_reads_that_its_request_crashed_engines(fleet):
    async with fleet.client() as client:
        body = {"model": fleet.model, "prompt": [POISON, 5, 6], "max_tokens": 5}
        answered = await client.post("/v1/completions", json=body)
        assert answered.status_code == 500
        assert "it crashed 2 engines" in answered.json()["error"]["message"], answered.text
    await fleet.soon(lambda: fleet.shape() == (2, 2), "the crashed workers are back")
    fleet.assert_no_leaks()


def test_who_connects_while_one_of_two_frontends_gets_sigterm_is_answered(fleet):
    """Kubernetes and systemd end processes so."""
    url, ended, ending, answers = urlsplit(fleet.url), threading.Event(), threading.Event(), Counter()

    def serving():
        return {process.pid for (_, port), process in fleet.listening() if port == url.port}

    def connects_again_and_again():
        while not ended.is_set():
            client = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
            try:
                client.request("GET", "/health", headers={"connection": "close"})
                answers[client.getresponse().status] += 1
            except (OSError, http.client.HTTPException) as error:
                answers[repr(error)] += 1
            finally:
                client.close()
            if not ending.is_set():
                ended.wait(0.1)  # leaves cores to the frontend that starts

    with ThreadPoolExecutor(8) as crowd:
        for _ in range(8):
            crowd.submit(connects_again_and_again)
        try:
            for pid in serving():
                ending.set()
                enough = answers.total() + 200
                fleet.until(lambda enough=enough: answers.total() > enough, "many connect")
                os.kill(pid, signal.SIGTERM)
                fleet.until(lambda pid=pid: not psutil.pid_exists(pid), "it ended")
                ending.clear()
                fleet.until(lambda: len(serving()) == 2, "another serves in its place", 180)
        finally:
            ended.set()
    assert set(answers) == {200}, answers
