"""A fleet on a Redis of its user's: over TLS, with a password and the least rights. Nobody else sees the password."""

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from support_acl import add_user
from support_fleet import ROOT, RunningFleet, descendants, token_prompt
from support_redis import fresh_namespace
from support_tls import running_tls_server
from support_wait import until

from orchestrator.store.client import Redis, RedisAway, connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PASSWORD = "sesame-42"


async def administering(url: str) -> Redis:
    async def connected() -> Redis | None:
        try:
            return await connect(url, 5.0)
        except RedisAway:
            return None

    redis: Redis = await until(connected, f"{url} answers")
    return redis


async def setup_user(url: str, namespace: str) -> None:
    async with await administering(url) as admin:
        await add_user(admin, namespace, PASSWORD)


async def denied_and_users(url: str) -> tuple[list[object], set[str]]:
    """What was denied so far, and as whom others than we are connected."""
    async with await administering(url) as admin:
        own = await admin.execute_command("CLIENT ID")
        clients = await admin.execute_command("CLIENT LIST")
        return await admin.execute_command("ACL LOG"), {c["user"] for c in clients if int(c["id"]) != own}


def test_a_fleet_lives_with_the_least_rights_and_shows_its_password_nowhere(tmp_path: Path) -> None:
    with running_tls_server(tmp_path / "redis") as url:
        namespace = fresh_namespace()
        asyncio.run(setup_user(url, namespace))
        config = yaml.safe_load((ROOT / "configs" / "sim-2p2d.yaml").read_text())
        config["redis"] = {"url": url.replace("://", f"://fleet:{PASSWORD}@"), "timeout_s": 5}
        config["routing"] = {"remote_prefill_min_tokens": 100}
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump(config))
        with RunningFleet(str(file), namespace=namespace) as fleet:
            prompts = [token_prompt(20 + 100 * number, seed=number) for number in range(10)]
            answers = asyncio.run(fleet.ask_all(prompts, concurrency=4))
            assert all(answer.ok for answer in answers)
            assert fleet.until_remote()["reason"] == "long_prompt"
            fleet.cli("scale", "prefill=1", "decode=3")
            fleet.until(lambda: fleet.shape() == (1, 3), "the fleet is 1P3D")
            shown = [fleet.cli(command, check=False).stdout for command in ("status", "queue", "doctor")]
            assert "worker-3" in shown[0] and "127.0.0.1" in shown[2]
            shown += [httpx.get(f"{fleet.url}{page}").text for page in ("/fleet", "/metrics", "/ready", "/predictions")]
            launcher = psutil.Process(fleet.process.pid)
            shown += [" ".join(process.cmdline()) for process in (launcher, *launcher.children(recursive=True))]
            assert asyncio.run(denied_and_users(url)) == ([], {"fleet"})
            family = descendants(fleet.process.pid)
            shown.append(fleet.cli("down").stdout)
            assert "ended" in shown[-1] and not [pid for pid in family if psutil.pid_exists(pid)]
            shown += [*fleet.log, *fleet.process_lines()]
        assert len(shown) > 20 and not [text for text in shown if PASSWORD in text]
