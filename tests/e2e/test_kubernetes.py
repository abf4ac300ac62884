"""The pods of `deploy/kubernetes` as containers of namespaces: the manifests' commands, environment, volumes, signals.

The engines are simulated; the model is a folder in the cache volume, for its tokenizer.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support_client import FleetClient
from support_container import DOCKERFILE, ROOT, USER, Container, can_contain, image_environment, wait_until
from support_fleet import small_model, token_prompt
from support_tools import program

from orchestrator.config.settings import read_tree
from orchestrator.launch.host.redis_server import server_binary
from orchestrator.wire.addresses import hold_port

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BASE = ROOT / "deploy" / "kubernetes" / "base"
START_S, END_S = 240.0, 120.0
SECRET = {"redis-password": "a-secret", "operator-key": "an-operator", "api-keys": "a-key\n"}


def manifest(name: str) -> dict[str, Any]:
    return next(m for m in yaml.safe_load_all((BASE / f"{name}.yaml").read_text()) if m["kind"] == "Deployment")


class Pods:
    """All on this host's network: each gets ports of its own in place of the manifests'."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, []  # type: Path, list[Container]
        self._held = []
        for name in ("fleet", "keys", "cache"):
            (folder / name).mkdir()
        (folder / "keys" / "api-keys").write_text(SECRET["api-keys"])
        small_model(folder / "cache" / "model")
        self.ports = {str(port): str(self._free_port()) for port in (6379, 8000)}
        tree = read_tree(BASE / "fleet.yaml")
        tree |= {"model": "/cache/model", "engine": "sim", "sim": {"decode_us_per_seq": 20_000}}
        tree["workers"] |= {"engine_args": {"max_model_len": 8192}, "ports": None}
        tree["frontend"]["port"] = int(self.ports["8000"])
        tree["routing"] = {"remote_prefill_min_tokens": 100}
        (folder / "fleet" / "fleet.yaml").write_text(yaml.safe_dump(tree))
        for path in (folder, *folder.rglob("*")):  # as fsGroup does
            shutil.chown(path, USER, USER)
            path.chmod(0o755 if path.is_dir() else 0o644)

    def _free_port(self) -> int:
        held, port = hold_port("127.0.0.1")
        self._held.append(held)
        return port

    def start(self, name: str, init: bool = True) -> Container:
        """`init`: with the image's entry point; else the command itself is process 1."""
        spec = manifest(name)["spec"]["template"]["spec"]
        (told,) = spec["containers"]
        sources = {volume["name"]: volume for volume in spec.get("volumes", [])}
        volumes = {m["mountPath"]: self._volume(sources[m["name"]]) for m in told.get("volumeMounts", [])}
        environment = {"PATH": os.pathsep.join([f"{ROOT}/.venv/bin", str(Path(server_binary()).parent), "/usr/bin"])}
        if "command" not in told:
            environment |= image_environment() | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        for variable in told.get("env", []):
            value = variable.get("value") or SECRET[variable["valueFrom"]["secretKeyRef"]["key"]]
            environment[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], value)
        (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
        begins = json.loads(entrypoint) if init and "command" not in told else []
        command = [self._local(word) for word in told.get("command", told.get("args"))]
        if "--health-port" in command:
            command[command.index("--health-port") + 1] = self.ports[name] = str(self._free_port())
        environment = {key: self._local(value) for key, value in environment.items()}
        container = Container(command, environment, volumes, begins, self.folder / f"{name}.log")
        self.running.append(container)
        return container

    def _volume(self, source: dict[str, Any]) -> Path | None:
        held = {"fleet", "keys"} if "emptyDir" not in source else {"cache"}
        return self.folder / source["name"] if source["name"] in held else None

    def _local(self, text: str) -> str:
        text = text.replace("pd-redis:6379", f"127.0.0.1:{self.ports['6379']}")
        return text.replace("port 6379", f"port {self.ports['6379']}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['8000']}"

    def probe(self, port: str, path: str) -> Callable[[], bool]:
        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=5, trust_env=False).is_success
            return False

        return answers

    def end(self) -> None:
        for container in self.running:
            container.end()
        for held in self._held:
            held.close()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    if not can_contain():
        pytest.skip("needs root, and a machine that allows namespaces and mounts")
    program("tini", "tini")
    running = Pods(tmp_path)
    try:
        yield running
    finally:
        running.end()


def status_of(container: Container, field: str) -> str:
    """Of the program, which is process 1 or a child of the init."""
    program = next(iter(container.main.children()), container.main)
    return re.findall(rf"^{field}:\s*(.*)$", Path(f"/proc/{program.pid}/status").read_text(), re.MULTILINE)[0]


async def test_pods_serve_as_nobody_on_a_read_only_root_and_drain_on_sigterm(pods: Pods):
    redis = pods.start("redis")
    prefill = pods.start("prefill")
    decode = pods.start("decode", init=False)
    frontend = pods.start("frontend")
    for name, container in (("prefill", prefill), ("decode", decode)):
        wait_until(pods.probe(name, "/ready"), f"{name} is ready", START_S, redis, container)
        assert pods.probe(name, "/live")()
        assert status_of(container, "Uid").split() == [str(USER)] * 4
        assert int(status_of(container, "CapBnd"), 16) == 0
    wait_until(pods.probe("8000", "/ready"), "the frontend is ready", START_S, *pods.running)
    assert not any("a-secret" in Path(f"/proc/{c.main.pid}/cmdline").read_text() for c in pods.running)
    assert not pods.probe("8000", "/v1/models")(), "it needs a key"

    fleet = FleetClient(pods.url, "default", api_key="a-key")
    async with httpx.AsyncClient(base_url=pods.url, headers={"authorization": "Bearer a-key"}, timeout=120) as client:
        answers = [await fleet.ask(client, token_prompt(length, seed=length), 8) for length in (20, 600)]
        assert [answer.error for answer in answers if not answer.ok] == []
        asking = asyncio.create_task(fleet.ask(client, token_prompt(20), 300))
        shown = httpx.Client(base_url=pods.url, headers={"authorization": "Bearer an-operator"}, trust_env=False)
        await asyncio.to_thread(
            wait_until,
            lambda: any(worker["running"] for worker in shown.get("/fleet").json()["workers"]),
            "it decodes", START_S, *pods.running,
        )  # fmt: skip
        for container in (decode, prefill, frontend):
            container.terminate()
        answer = await asking
    assert answer.ok and len(answer.tokens) == 300, "SIGTERM drains: neither worker nor frontend cut it off"
    for container in (decode, prefill, frontend):
        assert await asyncio.to_thread(container.exit_code, END_S) == 0, container.lines()[-20:]
    assert not any(answer.request_id in line and "retr" in line for line in frontend.lines())
    redis.terminate()
    assert redis.exit_code(END_S) == 0


def test_a_pod_that_still_starts_ends_at_once(pods: Pods):
    """Its program handles no signal yet, and as process 1 it would not hear SIGTERM."""
    frontend = pods.start("frontend")
    wait_until(lambda: frontend.process.poll() is None and frontend.main.children(), "it starts", END_S, frontend)
    time.sleep(0.5)
    frontend.terminate()
    assert frontend.exit_code(END_S / 4) == 143
