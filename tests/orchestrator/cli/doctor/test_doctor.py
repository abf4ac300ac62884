"""The doctor: each line with its fix, exit code 1 where something fails, and what it reads of devices and fleets."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from support_redis import Server, fresh_namespace, worker

from orchestrator.cli.doctor import host
from orchestrator.cli.doctor.fleet import kv_checks, learned, port_checks, redis_checks, written
from orchestrator.cli.doctor.host import Check, at_least, at_most
from orchestrator.cli.handle import FleetHandle, open_fleet
from orchestrator.config.settings import Refused, parse_config
from orchestrator.store.client import Redis, connect
from orchestrator.store.planned import Seen
from orchestrator.store.registry import Registry
from orchestrator.types import IDLE, DesiredRatio, Role

ROOT = Path(__file__).parents[4]


def test_checks_have_bounds_and_fixes():
    levels = [at_least("x", value, 10, 5, "said", "fix") for value in (10, 9, 4)]
    assert [(check.level, check.fix) for check in levels] == [("ok", ""), ("warn", "fix"), ("fail", "fix")]
    assert [at_most("x", value, 5, 10, "", "").level for value in (5, 6, 11)] == ["ok", "warn", "fail"]


def test_links_of_gpus_are_named():
    topology = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tPHB\nGPU2\tSYS\tPHB\t X \n\nPIX = ..."
    assert host.links(topology) == ["NVLink", "between sockets", "the host"]


def test_rdma_ports_are_read_from_the_kernel(tmp_path: Path):
    assert host._rdma(tmp_path / "none").level == "warn"
    (tmp_path / "irdma0").mkdir()  # one that shows no port
    assert host._rdma(tmp_path).level == "warn"
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("1: DOWN\n")
    assert host._rdma(tmp_path).level == "fail"
    (port / "state").write_text("4: ACTIVE\n")
    assert host._rdma(tmp_path) == Check("RDMA", "ok", "mlx5_0 port 1 active, 400 Gb/sec (4X NDR)")


def test_a_host_without_shared_memory_fails_that_check_alone(monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", Mock(side_effect=FileNotFoundError))
    check = host._shared_memory()
    assert check.level == "fail" and "/dev/shm" in check.fix


def test_missing_package_fails_with_fix():
    check = host._package("X", ("no-such-package",), "1", "pip install X")
    assert (check.level, check.fix) == ("fail", "pip install X")
    assert host._package("msgspec", ("msgspec",), "0.0", "m").level == "warn"


@pytest.mark.parametrize(
    ("torch", "vision", "level", "fix"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", "ok", ""),
        ("2.13.0", "0.28.0", "ok", ""),
        ("2.13.0+cpu", "0.28.0", "fail", "https://download.pytorch.org/whl/cpu"),
        ("2.13.0", "0.28.0+cpu", "fail", "--no-deps torchvision"),
    ],
)
def test_torchvision_that_is_built_for_another_torch_fails(torch, vision, level, fix, monkeypatch):
    monkeypatch.setattr(host.importlib.metadata, "version", {"torch": torch, "torchvision": vision}.__getitem__)
    (check,) = host._torchvision()
    assert check.level == level and check.fix.endswith(fix)


@pytest.mark.parametrize(("program", "mended"), [("sleep 60", "less to do"), ("false", "pip install nixl")])
def test_a_write_that_takes_too_long_is_not_mended_by_a_package(program, mended, tmp_path: Path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {program}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(host, "_PROBE_TIMEOUT_S", 0.5 if "sleep" in program else 60.0)
    (check,) = host._nixl()
    assert check.level == "fail" and mended in check.fix and "kv_probe" in check.fix


async def test_a_redis_that_is_away_fails():
    (check,) = [check async for check in redis_checks(FleetHandle("x", "redis://127.0.0.1:1", None, None))]
    assert check.level == "fail" and "cannot be used" in check.said and check.fix


async def test_a_redis_that_fills_the_host_or_forgets_jobs_is_warned_of(mortal: Server):
    """A server of its own, since it is changed."""
    handle = FleetHandle(fresh_namespace(), mortal.url, None, None)
    async with await connect(mortal.url, 5.0) as redis:
        for key, value, fix in (
            ("maxmemory", 0, "set maxmemory below"),
            ("maxmemory-policy", "allkeys-lru", "noeviction"),
        ):
            await redis.config_set(key, value)
            found = {check.name: check async for check in redis_checks(handle)}
            assert found["Redis memory"].level == "warn" and fix in found["Redis memory"].fix


async def test_doctor_checks_a_fleet(server: Server, redis: Redis):
    namespace = fresh_namespace()
    registry, handle = Registry(redis, namespace), FleetHandle(namespace, server.url, None, None)
    found = {check.name: check async for check in redis_checks(handle)}
    assert found["Workers"].level == "fail", "nobody decodes"
    one = msgspec.structs.replace(handle, model="a")
    (of_one,) = [check async for check in redis_checks(one) if check.name == "Workers"]
    assert of_one.said.startswith("a: 0 prefill") and of_one.fix.endswith(f" --model {namespace}`")
    assert await registry.steer(Seen(), desired=DesiredRatio(1, 1, IDLE)) is not None
    (idle,) = [check async for check in redis_checks(one) if check.name == "Workers"]
    assert idle.level == "ok" and "idle" in idle.said, "as it is to be"
    assert await registry.steer(Seen(), desired=DesiredRatio(1, 1, "scale")) is not None
    assert found["Redis"].level == found["Clock"].level == found["Redis memory"].level == "ok"
    here = worker("p0")
    address = server.url.replace("redis://", "tcp://")  # something that listens
    await registry.join(msgspec.structs.replace(here, request_address=address), 60.0)
    closed = msgspec.structs.replace(worker("d0", Role.DECODE), request_address="tcp://127.0.0.1:1")
    await registry.join(closed, 60.0)
    checks = [check async for check in kv_checks(handle, "p0", "d0")]
    assert [check.level for check in checks if check.name == "Requests"] == ["ok", "fail"]
    assert [check.level for check in checks if check.name in ("Layout", "Ranks")] == ["ok", "ok"]
    for config, model in ((None, here.identity.model), (parse_config({"model": "m", "served_model_name": "s"}), "s")):
        known = msgspec.structs.replace(handle, config=config)
        (layout,) = [check async for check in kv_checks(known, "p0", "d0") if check.name == "Layout"]
        assert layout.said.startswith(f"both {model}, ")
    with pytest.raises(Refused, match="'x9' is not in the fleet; its workers: d0, p0"):
        _ = [check async for check in kv_checks(handle, "x9", "d0")]


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid"])
async def test_a_host_without_an_address_is_refused(server: Server, host: str):
    handle = FleetHandle(fresh_namespace(), server.url, None, None)
    with pytest.raises(Refused, match=f"'{host}' has no address .*; name one of the fleet's hosts"):
        _ = [check async for check in port_checks(handle, host)]


def test_what_frontends_have_learned_of_a_link_is_told():
    a, b = worker("p0", labels=("rack=r1",)), worker("d0", Role.DECODE, host="10.0.0.2", labels=("rack=r1",))
    page = {"links": {"rack": [0.002, 3e-6, 40], "host,rack": [0.001, 1e-6, 9]}}
    figures = "40 transfers between such workers: 2.0 ms and 3.00 ms per 1,000 tokens after the prefill"
    assert learned(a, b, page).said == f"both have the same rack; {figures}"
    assert "the same host and rack; 9 transfers" in learned(a, a, page).said
    assert learned(a, b, {"links": {}}).said == "both have the same rack; no transfer over such a link yet"
    elsewhere = worker("d1", Role.DECODE, host="10.0.0.3", labels=("rack=r2",))
    assert "no label in common" in learned(a, elsewhere, page).said
    assert learned(a, b, None).level == "warn" and learned(a, b, None).fix


@pytest.mark.vllm
async def test_writes_between_two_processes_are_measured_here_only(server: Server):
    namespace = fresh_namespace()
    async with open_fleet(FleetHandle(namespace, server.url, None, None)) as fleet:
        a, b = worker("p0", engine="vllm"), worker("d0", Role.DECODE, engine="vllm")
        checks = {check.name: check async for check in written(fleet, a, b)}
        assert checks["WRITE"].level == "ok" and "16 MiB at" in checks["WRITE"].said
        assert checks["Transport"].said.endswith("what limits it is a core that copies memory"), checks
        far = worker("d1", Role.DECODE, host="192.0.2.7")
        (check,) = [check async for check in written(fleet, a, far)]
        assert "not measured" in check.said and "--listen 192.0.2.7` on 192.0.2.7" in check.said


@pytest.mark.vllm
def test_doctor_command_checks_this_host():
    command = [sys.executable, "-m", "orchestrator.cli.main", "doctor", "--host", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == any(check["level"] == "fail" for check in checks.values())
    assert {"Python", "vLLM", "NIXL", "UCX", "GPUs", "RDMA", "Files", "Shared memory", "Memory"} <= set(checks)
    assert checks["UCX"]["level"] == "ok" and "GB/s" in checks["UCX"]["said"]
    assert all(check["fix"] for check in checks.values() if check["level"] != "ok")
