"""Models that are added to a fleet that runs, and removed: simulated engines, two frontends, real processes."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support_client import LONG_STEPS, Answer
from support_fleet import token_prompt
from support_many_models import Models

from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.store.client import connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

PROMPTS = [token_prompt(20 + 173 * i % 1500, seed=i) for i in range(40)]
SECTION = """\
model: demo
engine: sim
workers: {prefill: {replicas: 1}, decode: {replicas: 1}, engine_args: {max_model_len: 8192}}
sim: {step_base_ms: 20}
"""


class Changing(Models):
    def __init__(self, *sets: str) -> None:
        super().__init__("sim-two-models.yaml", "frontend.replicas=2", LONG_STEPS, *sets)

    def change(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`orchestrator model`, which starts each frontend again."""
        return self.steer("model", *arguments, "--namespace", self.namespace)

    def listed(self) -> dict[str, dict[str, Any]]:
        shown = json.loads(self.cli("model", "list", "--json").stdout)
        return {model["name"]: model for model in shown["models"]}

    def keys_of(self, model: str) -> list[str]:
        async def read() -> list[str]:
            async with await connect(self.redis_url(), 5) as redis:
                found = await redis.execute_command("KEYS", f"pd:{{{self.namespace}.{model}}}:*")
                return sorted(key.decode() for key in found)

        return asyncio.run(read())

    def processes_of(self, model: str) -> list[int]:
        """Workers of the model, and frontends that serve it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if f"/{self.namespace}/config-{model}-" in " ".join(_command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def fleet() -> Iterator[Changing]:
    with Changing() as running:
        yield running


@pytest.fixture
def section(tmp_path: Path) -> Path:
    (file := tmp_path / "third.yaml").write_text(SECTION)
    return file


async def test_a_model_is_added_used_and_removed_under_load_of_another(fleet: Changing, section: Path) -> None:
    small, third = fleet.of("small"), fleet.of("third")
    before = fleet.shared_memory()
    truth = [answer.tokens for answer in await small.ask_all(PROMPTS, concurrency=8)]
    loaded: list[list[Answer]] = []
    async with small.under_load(PROMPTS, 1, max_tokens=16) as answers:
        loaded.append(answers)
        added = await asyncio.to_thread(fleet.change, "add", str(section), "--name", "third")
        assert added.stdout.splitlines()[-1] == "third: added: 1P1D ready, 2 frontends serve it"
        cards = fleet.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["small", "large", "third"]
        used = await third.ask_all(PROMPTS, concurrency=4)
        assert [(a.status, a.error) for a in used if not a.ok] == []
        assert await asyncio.to_thread(fleet.keys_of, "third")
        fleet.at("third").assert_no_leaks()
        assert 'model_name="third"' in fleet.http.get("/metrics").text
        assert fleet.processes_of("third")
        its_memory = fleet.shared_memory() - before
        async with third.under_load(PROMPTS, 1, max_tokens=16) as last:
            removing = asyncio.create_task(asyncio.to_thread(fleet.change, "remove", "third"))
            await third.soon(lambda: any(answer.status == 404 for answer in last), "its name is unknown", 400)
        removed = await removing
        assert removed.stdout.splitlines()[-1] == "third: removed"
    for answers in loaded:
        assert answers and [(a.status, a.error) for a in answers if not a.ok] == []
        assert all(answer.tokens == truth[PROMPTS.index(answer.prompt)] for answer in answers)
    assert {answer.status for answer in last if not answer.ok} == {404}, "no request of it is lost"
    unknown = fleet.http.post("/v1/completions", json={"model": "third", "prompt": "x", "max_tokens": 1})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "NotFoundError"
    assert 'model_name="third"' not in fleet.http.get("/metrics").text
    assert fleet.listed().keys() == {"small", "large"} == set(RunFolder(fleet.namespace).models())
    assert await asyncio.to_thread(fleet.keys_of, "third") == []
    assert fleet.processes_of("third") == []
    assert not [path for path in RunFolder(fleet.namespace).path.iterdir() if "third" in path.name]
    assert not its_memory & set(os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("model: /no/such/folder\n", "bad was not added: .*no/such/folder"),
        ("model: demo\nfrontend: {server_args: {enable_auto_tool_choice: true}}\n", "bad was not added: frontend-"),
    ],
    ids=["workers", "frontends"],
)
def test_a_model_that_cannot_start_is_taken_out_again(fleet: Changing, tmp_path: Path, more: str, why: str) -> None:
    (file := tmp_path / "bad.yaml").write_text(more + SECTION.partition("\n")[2])
    frontends = set(fleet.processes_of("small")) - {worker["pid"] for worker in fleet.at("small").workers()}
    done = fleet.run("model", "add", str(file), "--name", "bad", "--namespace", fleet.namespace, timeout_s=500)
    assert done.returncode == 2 and re.search(why, done.stderr), done.stdout + done.stderr
    assert fleet.listed().keys() == {"small", "large"} and fleet.keys_of("bad") == fleet.processes_of("bad") == []
    assert len(frontends) == 2
    assert frontends <= set(fleet.processes_of("small")), "those that serve the others stay"
    assert all(answer.ok for answer in asyncio.run(fleet.of("small").ask_all(PROMPTS[:4], concurrency=2)))
