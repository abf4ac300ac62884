"""Two launchers share a fleet of several models: what one is told, both do. Simulated engines, real processes."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support_client import FleetClient
from support_fleet import RunningFleet
from support_redis import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

SECTION = "model: demo\nengine: sim\nworkers: {prefill: {replicas: 0}, engine_args: {max_model_len: 8192}}\n"


class Fleet:
    def __init__(self, folder: Path, redis: str, patch: pytest.MonkeyPatch) -> None:
        self.redis, self.launchers = redis, list[RunningFleet]()
        sets = ["ratio.mode=off", f"redis.url={redis}", "frontend.replicas=1", "models.large.workers.decode.replicas=1"]
        for host in ("one", "two"):  # each with a run folder of its own, as on two hosts
            (folder / host).mkdir()
            patch.setenv("XDG_RUNTIME_DIR", str(folder / host))
            name = self.launchers[0].namespace if self.launchers else ""
            self.launchers.append(RunningFleet("sim-two-models.yaml", *sets, namespace=name))

    def cli(self, *arguments: str, model: str = "") -> subprocess.CompletedProcess[str]:
        namespace = self.launchers[0].namespace + (f".{model}" if model else "")
        return self.launchers[0].run(*arguments, "--namespace", namespace, "--redis", self.redis, timeout_s=600)

    def answers(self, model: str) -> list[int]:
        """The status of a request for this model at each launcher's frontend."""
        body = {"model": model, "prompt": "x", "max_tokens": 2}
        asked = [httpx.post(f"{each.url}/v1/completions", json=body, timeout=120) for each in self.launchers]
        return [answer.status_code for answer in asked]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    (tmp_path / "redis").mkdir()
    server = Server(tmp_path / "redis")
    running = Fleet(tmp_path, server.url, monkeypatch)
    try:
        yield running
    finally:
        for each, host in zip(running.launchers, ("one", "two"), strict=False):
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / host))
            each.end()
        server.stop()


def test_both_launchers_follow_the_list_and_a_restart(fleet: Fleet, tmp_path: Path) -> None:
    first, _ = fleet.launchers
    assert fleet.answers("small") == fleet.answers("large") == [200, 200]
    small = FleetClient(f"{first.url}/models/small", first.namespace)
    before = {worker["pid"] for worker in small.workers()}
    done = fleet.cli("restart", "--force", model="small")
    assert done.returncode == 0 and "2 workers restarted" in done.stdout, done.stdout + done.stderr
    small.until(lambda: small.shape() == (1, 1), "its workers serve")
    assert not before & {worker["pid"] for worker in small.workers()}
    (file := tmp_path / "third.yaml").write_text(SECTION)
    done = fleet.cli("model", "add", str(file), "--name", "third")
    assert done.stdout.splitlines()[-1] == "third: added: 0P1D ready, 2 frontends serve it", done.stdout + done.stderr
    assert fleet.answers("third") == [200, 200]
    done = fleet.cli("model", "remove", "small")  # the one whose registry has all frontends
    assert done.stdout.splitlines()[-1] == "small: removed", done.stdout + done.stderr
    assert fleet.answers("small") == [404, 404] and fleet.answers("third") == fleet.answers("large") == [200, 200]
    listed: dict[str, Any] = json.loads(fleet.cli("model", "list", "--json").stdout)
    assert [(model["name"], model["frontends"]) for model in listed["models"]] == [("large", 2), ("third", 2)]
