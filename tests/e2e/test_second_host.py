"""A second host, in a network namespace of its own: it joins by a token, serves, restarts and is drained by `scale`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_fleet import ROOT, RunningFleet, running_fleet, token_prompt
from support_second_host import HERE, THERE, HandWorker, cut

from orchestrator.process.parent import EXIT_AGAIN

pytestmark = [pytest.mark.vllm, pytest.mark.topology, pytest.mark.timeout(300)]

PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(20)]


@pytest.fixture(scope="module")
def fleet(redis_url: str) -> Iterator[RunningFleet]:
    with running_fleet(
        "sim-2p2d.yaml",
        "workers.prefill.replicas=1",
        "workers.decode.replicas=1",
        "workers.bind=auto",
        "workers.timeout_s=60",  # one that is stopped and cut off stays registered, however long the doctor takes
        "routing.decode_choice=round_robin",
        f"redis.url={redis_url}",
    ) as running:
        yield running


@pytest.fixture
def far(fleet: RunningFleet, second_host: list[str]) -> Iterator[HandWorker]:
    worker = HandWorker(fleet, "far", second_host)
    yield worker
    worker.stop()


def there(fleet: RunningFleet) -> dict[str, str]:
    return {w["id"]: w["host"] for w in fleet.workers()}


def decoded_by(fleet: RunningFleet, worker_id: str) -> int:
    return sum(line["decode_worker"] == worker_id for line in fleet.request_lines())


async def test_a_second_host_joins_serves_restarts_and_is_drained(fleet: RunningFleet, far: HandWorker) -> None:
    await asyncio.to_thread(far.until_joined, fleet)
    assert there(fleet) == {"worker-0": HERE, "worker-1": HERE, "far": THERE}
    command = Path(f"/proc/{far.process.pid}/cmdline").read_text()
    assert "workers.main" in command and "a-secret" not in command
    async with fleet.under_load(PROMPTS, concurrency=4, max_tokens=40) as answers:
        await fleet.soon(lambda: decoded_by(fleet, "far"), "it decodes")
        restart = asyncio.create_task(asyncio.to_thread(fleet.cli, "restart", "--role", "decode"))
        assert await asyncio.to_thread(far.exit_code) == EXIT_AGAIN
        far.start()
        assert "2 workers restarted" in (await restart).stdout
        fleet.cli("scale", "decode=1")
        assert await asyncio.to_thread(far.exit_code) == 0, "drained: not to be started again"
        await fleet.soon(lambda: set(there(fleet)) == {"worker-0", "worker-1"}, "it is gone")
    assert [(a.status, a.error) for a in answers if not a.ok] == []


def test_the_doctor_finds_ports_that_are_not_reached(
    fleet: RunningFleet, far: HandWorker, second_host: list[str], redis_url: str
) -> None:
    far.until_joined(fleet)
    lines = fleet.cli("doctor", "ports", THERE).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 3 and all(f"far: {THERE}:" in line for line in lines)
    command = [*second_host, sys.executable, "-m", "orchestrator.cli.main", "doctor", "ports", HERE]
    command += ["--redis", redis_url, "--namespace", fleet.namespace, "--json"]
    back = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    named = {(check["name"], check["level"]) for check in json.loads(back.stdout)}
    assert named == {("Requests", "ok"), ("Load reports", "ok"), ("KV port", "ok")}, "its HTTP port is loopback's"
    far.process.send_signal(signal.SIGSTOP)  # so that it stays registered while it is cut off
    try:
        cut(True)
        told = fleet.cli("doctor", "ports", THERE, check=False)
    finally:
        cut(False)
        far.process.send_signal(signal.SIGCONT)
    assert told.returncode == 1 and "open it in the firewall" in told.stdout
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["fail"] * 3
    nobody = fleet.cli("doctor", "ports", "192.0.2.1", check=False)
    assert nobody.returncode == 2 and "nothing of this fleet runs on 192.0.2.1; its hosts: " in nobody.stderr


def test_a_token_that_is_damaged_or_leads_nowhere(second_host: list[str], redis_url: str) -> None:
    def run(token: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "orchestrator.cli.main", "worker", "--role", "decode"]
        environment = {**os.environ, "PD_JOIN": token}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    damaged = run("WyJyZWRpczo")
    assert damaged.returncode == 2 and "--join: expected what `orchestrator join` prints" in damaged.stderr
    from orchestrator.cli.join import Token

    nobody = run(Token(redis_url, "nobody-here").encode())
    assert nobody.returncode == EXIT_AGAIN and "has no configuration in Redis" in nobody.stderr
    away = run(Token("redis://127.0.0.1:1", "default").encode())
    assert away.returncode == EXIT_AGAIN and "127.0.0.1:1" in away.stderr
