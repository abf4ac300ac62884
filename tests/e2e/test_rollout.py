"""Another configuration for a fleet that serves: real processes, simulated engines, streaming load meanwhile."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_client
from support_fleet import CHECKOUT, ROOT, RunningFleet, running_fleet, token_prompt
from support_redis import running_server

from orchestrator.store.client import connect
from orchestrator.store.registry import Registry

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONFIG = str(ROOT / "configs" / "sim-2p2d.yaml")
# The fleet's, so also what is rolled out has them: roles stay, and long prompts are prefilled remotely.
FLEETS = ("ratio.mode=off", "routing.remote_prefill_min_tokens=100", support_client.LONG_STEPS)
PACKAGES = ("orchestrator", "workers", "connectors")
PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(40)]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    with running_fleet("sim-2p2d.yaml", *FLEETS) as running:
        yield running


def nobody_fails(fleet: RunningFleet) -> contextlib.AbstractAsyncContextManager[None]:
    return support_client.nobody_fails([fleet], PROMPTS, concurrency=8, max_tokens=MAX_TOKENS)


def rollout(fleet: RunningFleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fleet.cli("rollout", *arguments, *(f"--set={item}" for item in FLEETS if CONFIG in arguments), check=False)


def generations(fleet: RunningFleet) -> list[int]:
    return sorted(worker["generation"] for worker in fleet.workers())


async def test_unstartable_workers_roll_back(fleet: RunningFleet) -> None:
    was = {worker["pid"] for worker in fleet.workers()}
    bad = "workers.env={PYTHONHOME: /nowhere}"  # which the interpreter alone finds out
    async with nobody_fails(fleet):
        done = await asyncio.to_thread(rollout, fleet, CONFIG, "--set", bad)
    assert done.returncode == 1
    assert "cannot start" in done.stdout and "it ended with exit code 1" in done.stdout
    fleet.until(lambda: len(fleet.workers()) == 4, "all serve again")
    assert len(was & {worker["pid"] for worker in fleet.workers()}) == 3, "the others went on"
    assert fleet.shape() == (2, 2)


def another_environment(folder: Path, version: str) -> str:
    """The Python of a virtual environment with a copy of our packages, in which the engine is of another version."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    engine = packages / "workers" / "sim" / "engine.py"
    text = engine.read_text()
    assert "sim-1" in text
    engine.write_text(text.replace("sim-1", version))
    return str(folder / "bin" / "python")


async def versions(fleet: RunningFleet) -> set[str]:
    """Of the engines."""
    async with await connect(fleet.redis_url(), 5) as redis:
        return {info.identity.engine_version for info in (await Registry(redis, fleet.namespace).workers()).values()}


async def test_other_software_is_rolled_out_and_taken_back_under_load(fleet: RunningFleet, tmp_path: Path) -> None:
    """Blocks are of another size: a worker that took KV of another version would crash or answer with other tokens."""
    python = another_environment(tmp_path / "new", "sim-2")
    before = {worker["pid"] for worker in fleet.workers()}
    assert "pd_retries_total" in fleet.http.get("/metrics").text
    change = ("--set", f"python={python}", "--set", "workers.engine_args.block_size=32")
    async with nobody_fails(fleet):
        done = await asyncio.to_thread(rollout, fleet, CONFIG, *change, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [steps[0]["event"], steps[-1]["event"]] == ["ordered", "done"]
    started = [step["id"] for step in steps if step["event"] == "started"]
    assert {"worker-2", "worker-3", "worker-0", "worker-1"} <= set(started)
    assert started[-1].startswith("frontend"), "workers first: a new frontend may let in what old ones do not know"
    assert len(set(generations(fleet))) == 1 and not before & {worker["pid"] for worker in fleet.workers()}
    assert fleet.metric("pd_retries_total") == 0, "a new frontend counts anew"
    assert await versions(fleet) == {"sim-2"}
    commands = [Path(f"/proc/{worker['pid']}/cmdline").read_text() for worker in fleet.workers()]
    assert all(command.startswith(python) for command in commands), commands
    fresh = [token_prompt(600, seed=1000 + n) for n in range(8)]  # what is cached is not prefilled remotely
    answers = await fleet.ask_all(fresh, concurrency=8, max_tokens=MAX_TOKENS)
    assert all(answer.ok for answer in answers), [answer for answer in answers if not answer.ok]
    assert fleet.metric("pd_placements_total", decision="remote"), "new frontends, new workers of both roles"
    async with nobody_fails(fleet):
        before = {worker["pid"] for worker in fleet.workers()}
        gone = await asyncio.to_thread(rollout, fleet, CONFIG, "--set", "python=/nowhere/bin/python")
        assert {worker["pid"] for worker in fleet.workers()} == before, "refused before a worker was drained"
        back = await asyncio.to_thread(rollout, fleet, CONFIG)
    assert gone.returncode == 1 and "python: /nowhere/bin/python cannot be run" in gone.stdout, (
        gone.stdout + gone.stderr
    )
    assert back.returncode == 0 and await versions(fleet) == {"sim-1"}, back.stdout + back.stderr
    fleet.assert_no_leaks()


def test_a_launcher_that_is_killed_leaves_it_to_the_next(tmp_path: Path) -> None:
    """On a Redis that outlives it. The file is the old one: what is rolled out is kept in Redis."""
    with running_server(tmp_path / "redis") as server:
        sets = (f"redis.url={server.url}", "ratio.mode=off", "workers.timeout_s=2")
        first = RunningFleet("sim-2p2d.yaml", *sets)
        rolling: subprocess.Popen[str] | None = None
        try:
            command = [*CHECKOUT, "rollout", CONFIG, "--set", "workers.engine_args.num_gpu_blocks_override=2000"]
            command += ["--redis", server.url, "--namespace", first.namespace]
            rolling = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            first.until(lambda: 1 in generations(first), "a worker is replaced")
            first.process.kill()
            first.process.wait(30)
            assert rolling.wait(180) == 2 and "goes on with the rollout" in rolling.communicate()[1]
            with RunningFleet("sim-2p2d.yaml", *sets, namespace=first.namespace) as second:
                second.wait_for_line("going on with the rollout to generation 1", 10)
                second.until(lambda: generations(second) == [1] * 4, "all are replaced")
                assert {worker["blocks_total"] for worker in second.workers()} == {2000}
                second.wait_for_line("all run generation 1", 240)
        finally:
            first.end()
            if rolling is not None and rolling.poll() is None:
                rolling.kill()
        with RunningFleet("sim-2p2d.yaml", *sets, namespace=first.namespace) as third:
            assert generations(third) == [0] * 4, "nothing ran any more: a fleet begins with its file"
