"""A fleet on a Redis of its user's: with a password and the least rights, and nobody else gets to see the password."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from support_acl import add_user
from support_fleet import ROOT, RunningFleet, token_prompt
from support_redis import fresh_namespace, running_server

from orchestrator.store.client import connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PASSWORD = "sesame-42"


async def setup_user(url: str, namespace: str) -> None:
    admin = await connect(url, 5.0)
    await add_user(admin, namespace, PASSWORD)
    await admin.aclose()


async def denied(url: str) -> list[object]:
    admin = await connect(url, 5.0)
    log: list[object] = await admin.execute_command("ACL LOG")
    await admin.aclose()
    return log


def test_a_fleet_serves_with_the_least_rights_and_shows_its_password_nowhere(tmp_path: Path) -> None:
    with running_server(tmp_path / "redis") as server:
        namespace = fresh_namespace()
        asyncio.run(setup_user(server.url, namespace))
        config = yaml.safe_load((ROOT / "configs" / "sim-2p2d.yaml").read_text())
        config["redis"] = {"url": server.url.replace("redis://", f"redis://fleet:{PASSWORD}@"), "timeout_s": 5}
        config["routing"] = {"remote_prefill_min_tokens": 100}
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump(config))
        fleet = RunningFleet(str(file), namespace=namespace)
        try:
            prompts = [token_prompt(20 + 100 * number, seed=number) for number in range(10)]
            answers = asyncio.run(fleet.ask_all(prompts, concurrency=4))
            assert all(answer.ok for answer in answers)
            assert fleet.metric("pd_placements_total", decision="remote", reason="long_prompt") >= 1
            fleet.cli("scale", "prefill=1", "decode=3")
            fleet.until(lambda: fleet.shape() == (1, 3), "the fleet is 1P3D")
            shown = [fleet.cli("status").stdout, fleet.cli("queue").stdout]
            shown += [httpx.get(f"{fleet.url}{page}").text for page in ("/fleet", "/metrics", "/ready", "/predictions")]
            launcher = psutil.Process(fleet.process.pid)
            shown += [" ".join(process.cmdline()) for process in (launcher, *launcher.children(recursive=True))]
            assert asyncio.run(denied(server.url)) == []
            fleet.stop()
            shown += [*fleet.log, *fleet.process_lines()]
        finally:
            fleet.end()
        assert len(shown) > 20 and not [text for text in shown if PASSWORD in text]
