"""A second host, in a network namespace of its own: it joins by a token, serves, restarts and is drained by `scale`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_fleet import ROOT, RunningFleet, running_fleet, token_prompt
from support_wait import DEADLINE_S

from orchestrator.launch.host.redis_server import server_binary
from orchestrator.process.parent import EXIT_AGAIN

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

NAME = f"pd{os.getpid() % 100_000}"
HERE, THERE = "10.213.7.1", "10.213.7.2"
PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(20)]


def ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def second_host() -> Iterator[list[str]]:
    """The beginning of a command that runs there."""
    try:
        ip(f"netns add {NAME}")
        ip(f"link add {NAME}a type veth peer name {NAME}b netns {NAME}")
        ip(f"addr add {HERE}/24 dev {NAME}a")
        ip(f"link set {NAME}a up")
        ip(f"-n {NAME} addr add {THERE}/24 dev {NAME}b")
        ip(f"-n {NAME} link set {NAME}b up")
        ip(f"-n {NAME} link set lo up")
        yield ["ip", "netns", "exec", NAME]
    finally:
        subprocess.run(["ip", "link", "del", f"{NAME}a"], capture_output=True, timeout=DEADLINE_S)
        subprocess.run(["ip", "netns", "del", NAME], capture_output=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def redis_url(second_host: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    options = {"port": port, "bind": HERE, "dir": folder, "save": "", "requirepass": "a-secret"}
    command = [server_binary(), *(part for key, value in options.items() for part in (f"--{key}", str(value)))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 15
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((HERE, port), 1).close()
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"redis://:a-secret@{HERE}:{port}"
    server.terminate()
    server.wait(15)


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


class FarWorker:
    """A worker on the second host, as a service manager would run it."""

    def __init__(self, fleet: RunningFleet, second_host: list[str]) -> None:
        told = fleet.cli("join").stdout
        assert told.startswith("PD_JOIN=") and "orchestrator worker --role decode" in told
        self._environment = {**os.environ, "PD_JOIN": told.split()[0].removeprefix("PD_JOIN=")}
        self._command = [*second_host, sys.executable, "-m", "orchestrator.cli.main", "worker", "--role", "decode"]
        self._command += ["--id", "far"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, cwd=ROOT, env=self._environment)

    def until_joined(self, fleet: RunningFleet) -> None:
        def joined() -> bool:
            if self.process.poll() == EXIT_AGAIN:  # Redis was too slow for it, say
                self.start()
            return "far" in there(fleet)

        fleet.until(joined, "it has joined")

    def exit_code(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def far(fleet: RunningFleet, second_host: list[str]) -> Iterator[FarWorker]:
    worker = FarWorker(fleet, second_host)
    yield worker
    if worker.process.poll() is None:
        worker.process.send_signal(signal.SIGTERM)
        worker.exit_code()


def there(fleet: RunningFleet) -> dict[str, str]:
    return {w["id"]: w["host"] for w in fleet.workers()}


def decoded_by(fleet: RunningFleet, worker_id: str) -> int:
    return sum(line["decode_worker"] == worker_id for line in fleet.request_lines())


async def test_a_second_host_joins_serves_restarts_and_is_drained(fleet: RunningFleet, far: FarWorker) -> None:
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
        await asyncio.to_thread(fleet.until, lambda: set(there(fleet)) == {"worker-0", "worker-1"}, "it is gone")
    assert [(a.status, a.error) for a in answers if not a.ok] == []


def test_the_doctor_finds_ports_that_are_not_reached(
    fleet: RunningFleet, far: FarWorker, second_host: list[str], redis_url: str
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
        ip(f"-n {NAME} link set {NAME}b down")
        cut = fleet.cli("doctor", "ports", THERE, check=False)
    finally:
        ip(f"-n {NAME} link set {NAME}b up")
        far.process.send_signal(signal.SIGCONT)
    assert cut.returncode == 1 and "open it in the firewall" in cut.stdout
    assert [line.split()[0] for line in cut.stdout.splitlines()] == ["fail"] * 3
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
