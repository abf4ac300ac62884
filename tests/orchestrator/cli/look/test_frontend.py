"""Where a command looks for a fleet, and whom it asks."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support_redis import Server, fresh_namespace

from orchestrator.cli.doctor import command
from orchestrator.cli.handle import FleetHandle, Named, find_fleet, models_here, say
from orchestrator.cli.look import status
from orchestrator.cli.look.frontend import fleet_status, operator_key, reachable, with_frontend
from orchestrator.cli.look.trace import _logged
from orchestrator.config.models import parse_models
from orchestrator.config.settings import Refused, parse_config
from orchestrator.launch.host.run_folder import Ready, RunFolder
from orchestrator.store.client import Redis, connect
from orchestrator.store.registry import Frontend, Registry
from orchestrator.wire.addresses import address_towards


def test_remote_fleet_is_not_taken_for_local_one(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RunFolder("default")
    folder.claim()
    config = parse_config({"model": "m", "redis": {"url": "redis://here:1"}})
    folder.write_config(config)
    folder.note_ready(Ready("http://here:8000", "m", "1P1D"))
    here = FleetHandle("default", "redis://here:1", "http://here:8000", config)
    assert find_fleet(None, None) == find_fleet(None, "redis://here:1") == here
    assert find_fleet(None, "redis://there:1") == FleetHandle("default", "redis://there:1", None, None)
    folder.remove()


def test_a_model_of_the_fleet_here_is_found_by_its_name(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RunFolder("mine")
    folder.claim()
    models = {"a": {"model": "m"}, "b": {"model": "m"}}
    file = {"redis": {"url": "redis://here:1"}, "namespace": "mine", "models": models}
    configs = parse_models(file)
    for name, config in configs.items():
        assert folder.write_config(config, 3, name).name == f"config-{name}-3.yaml"
    folder.note_ready(Ready("http://here:8000", "a, b", "1P1D, 1P1D"))
    there = FleetHandle("mine.b", "redis://here:1", "http://here:8000/models/b", configs["b"], "b")
    assert find_fleet("b", None) == find_fleet("mine.b", None) == there
    assert models_here(None) == models_here("mine") == {"a": "mine.a", "b": "mine.b"} and models_here("b") == {}
    for which in (None, "mine"):
        with pytest.raises(Refused, match=r"fleet 'mine' has several models \(a, b\); name one with --model"):
            find_fleet(which, None)
    with pytest.raises(Refused, match="no fleet runs in namespace 'c'"):
        find_fleet("c", None)
    assert find_fleet("other.b", "redis://there:1").namespace == "other.b"
    second = RunFolder("second")
    second.claim()
    second.write_config(parse_models(file | {"namespace": "second"})["b"], 0, "b")
    with pytest.raises(Refused, match=r"several fleets here have a model 'b': name one of mine\.b, second\.b"):
        find_fleet("b", None)
    assert find_fleet("second", None).namespace == "second.b", "it has one model only"
    second.remove()
    folder.remove()


async def test_of_two_fleets_here_with_models_of_the_same_names_the_one_that_is_named_is_shown(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folders = [RunFolder(name) for name in ("mine", "b")]  # the second has the name of a model, too
    for folder in folders:
        folder.claim()
        file = {"redis": {"url": "redis://here:1"}, "namespace": folder.namespace}
        for name, config in parse_models(file | {"models": {"a": {"model": "m"}, "b": {"model": "m"}}}).items():
            folder.write_config(config, 0, name)

    async def told(handle: FleetHandle) -> dict[str, str]:
        return {"shown": handle.namespace}

    monkeypatch.setattr(status, "fleet_status", told)
    monkeypatch.setattr(status, "fleet_view", lambda seen, model: model)
    say(*await asyncio.to_thread(status.status, Named("mine")), as_json=True)
    assert json.loads(capsys.readouterr().out)["models"] == {"a": {"shown": "mine.a"}, "b": {"shown": "mine.b"}}
    with pytest.raises(Refused, match=r"several fleets run here \(b, mine\); name one with --namespace"):
        list(_logged(None))
    monkeypatch.setattr(command, "host_checks", lambda configs: [])
    (check,) = [check async for check in command._all_checks([], False, Named())]
    assert "not checked: several fleets run here (b, mine)" in check.said
    for folder in folders:
        folder.remove()


@pytest.mark.parametrize(
    ("redis_url", "asked"),
    [("redis://127.0.0.1:6379", True), ("unix:///run/redis", True), ("redis://192.0.2.1:6379", False)],
)
def test_the_loopback_address_of_another_host_is_not_asked(redis_url: str, asked: bool):
    here, there = "http://127.0.0.1:8000", "http://192.0.2.7:8000"
    assert reachable([there, here, there], redis_url) == ([there, here] if asked else [there])


def test_a_fleet_that_only_redis_knows_is_asked_by_its_registered_frontends(server: Server):
    namespace = fresh_namespace()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def asked(serving: bool) -> str | None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as there:
            port = there.sockets[0].getsockname()[1]
            registry = Registry(await connect(server.url, 2.0), namespace)
            await registry.refresh_frontend(Frontend("gone", "http://127.0.0.1:9", "1"), 60)
            if serving:
                await registry.refresh_frontend(Frontend("f", f"http://127.0.0.1:{port}", "2"), 60)
            found = await asyncio.to_thread(with_frontend, find_fleet(namespace, server.url))
            assert found.url == f"http://127.0.0.1:{port}"
            return found.url

    with pytest.raises(Refused, match=f"no frontend of fleet '{namespace}' answers; name one with --url"):
        asyncio.run(asked(serving=False))
    assert asyncio.run(asked(serving=True))


def test_local_operator_key_is_used_on_this_machine_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PD_OPERATOR_KEY", raising=False)
    own = address_towards("192.0.2.200")  # or loopback, where this machine has no network
    folder = RunFolder("default")
    folder.claim()
    security = {"operator_key": "the-key"}
    folder.write_config(parse_config({"model": "m", "redis": {"url": "redis://here:1"}, "security": security}))
    folder.note_ready(Ready(f"http://{own}:8000", "m", "1P1D"))
    handle = find_fleet(None, None)
    assert handle.url and operator_key(handle, handle.url) == "the-key"
    for url, key in {
        f"http://{own}:8000": "the-key",
        "http://127.0.0.1:8000": "the-key",
        "http://127.0.0.1:8001": None,  # who listens there is not that fleet
        "http://198.51.100.7:8000": None,
        "http://some.name:8000": None,
    }.items():
        assert operator_key(find_fleet(None, None, url), url) == key, url
    folder.remove()


@contextlib.asynccontextmanager
async def frontend() -> AsyncIterator[str]:
    """Answers every request as `/fleet` would; the URL of it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"model": "m1"}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_registered_frontend_is_asked(server: Server, redis: Redis):
    async with frontend() as url:
        namespace = fresh_namespace()
        await Registry(redis, namespace).refresh_frontend(Frontend("f1", url, ""), 30.0)
        assert (await fleet_status(FleetHandle(namespace, server.url, None, None)))["model"] == "m1"


async def test_known_frontend_is_asked_while_redis_is_away():
    async with frontend() as url:
        handle = FleetHandle("default", "redis://127.0.0.1:1", url, None)
        assert (await fleet_status(handle))["model"] == "m1"
        assert (await fleet_status(find_fleet(None, None, url)))["model"] == "m1"


async def test_nobody_answers_in_one_line():
    with pytest.raises(Refused, match="no frontend of a fleet answers there"):
        await fleet_status(find_fleet(None, None, "http://127.0.0.1:1"))
    with pytest.raises(Refused, match="--url: expected http"):
        find_fleet(None, None, "127.0.0.1:8000")
