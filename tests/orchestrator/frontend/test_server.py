"""How a frontend reads the arguments of vLLM's server, and what it says about itself. The server runs in e2e tests."""

import asyncio
import gc
import math
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvicorn
from support_wait import until

from orchestrator.config.settings import Config, ConfigError, parse_config
from orchestrator.config.shared import shared
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import Redis
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.registry import Registry
from orchestrator.wire.addresses import address_towards

pytest.importorskip("vllm")

from orchestrator.frontend import server
from orchestrator.frontend.models import app
from orchestrator.frontend.models.app import build_vllm_config, server_arguments
from orchestrator.frontend.models.served import rolled_out_config
from orchestrator.frontend.server import advertised_url, grace_s
from orchestrator.frontend.untrusted import connections

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def any_model(monkeypatch):
    monkeypatch.setattr(app, "resolve_model", lambda model: model)


def parsed(**server_args: object) -> Any:
    parser = app.make_arg_parser(app.ServerParser())
    return parser.parse_args(server_arguments(config(**server_args), parser))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend of simulated engines lets vLLM take any length, and its whole process with it: not these tests'."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")


def config(**server_args: object) -> Config:
    return parse_config({"model": "/m", "engine": "sim", "frontend": {"server_args": server_args}})


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("middleware", ["m.a", "m.b"], ["m.a", "m.b"]),
        ("allowed_origins", ["https://a"], ["https://a"]),
        ("served_model_name", ["a", "b"], ["a", "b"]),
    ],
)
def test_list_argument_reaches_vllm(name, value, got):
    assert getattr(parsed(**{name: value}), name) == got


def test_lora_modules_are_sections_or_pairs():
    modules = parsed(lora_modules=["a=/x", {"name": "b", "path": "/y"}]).lora_modules
    assert [(module.name, module.path) for module in modules] == [("a", "/x"), ("b", "/y")]


@pytest.mark.parametrize("wrong", [{"lora_modules": ["nonsense"]}, {"max_logprobs": "many"}, {"served_model_name": []}])
def test_argument_refused_by_vllm_is_configuration_error(wrong, capsys):
    with pytest.raises(ConfigError, match=r"frontend\.server_args: .*"):
        build_vllm_config(config(**wrong))
    assert "usage:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bound", "redis_url", "url"),
    [
        (("10.1.2.3", 80), "redis://h", "http://10.1.2.3:80"),
        (("fd00::1", 80), "redis://h", "http://[fd00::1]:80"),
        (("0.0.0.0", 80), "redis://127.0.0.1:6379", "http://127.0.0.1:80"),
        (("0.0.0.0", 80), "unix:///run/redis", "http://127.0.0.1:80"),
        (("0.0.0.0", 80), "redis://127.5.5.5", "http://127.0.0.1:80"),
        (("::", 80), "redis://[::1]:6379", "http://[::1]:80"),
        (("0.0.0.0", 80), "redis://no.such.host.invalid", "http://127.0.0.1:80"),
        (("0.0.0.0", 80), "redis://both", "http://127.0.0.1:80"),
        (("::", 80), "redis://both", "http://[::1]:80"),
        (("0.0.0.0", 80), "redis://[::1]:6379", f"http://{address_towards('192.0.2.200')}:80"),
    ],
)
def test_a_frontend_announces_an_address_that_others_can_reach(bound, redis_url, url, monkeypatch):
    ask = socket.getaddrinfo

    def look_up(host: str, *more: Any, **named: Any) -> list[Any]:
        names = ("::1", "127.0.0.1") if host == "both" else (host,)
        return [found for name in names for found in ask(name, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert advertised_url(config(), bound, redis_url) == url


@pytest.mark.parametrize(("stop_timeout_s", "grace"), [(10.0, 8.0), (3.0, 1.5), (0.5, 0.25)])
def test_requests_end_before_the_launcher_kills_the_process(stop_timeout_s, grace):
    told = parse_config({"model": "/m", "launcher": {"stop_timeout_s": stop_timeout_s}})
    assert grace_s(told, supervised=True) == grace


class Drained:
    """A server without clients."""

    def __init__(self):
        self.within_s, self.config = 0.0, SimpleNamespace(timeout_graceful_shutdown=None)

    async def drain(self, listeners, within_s):
        self.within_s = within_s


@pytest.mark.parametrize("supervised", [True, False])
async def test_a_signal_leaves_clients_the_time_in_which_they_use_an_idle_connection(supervised):
    """httpx does for 5 s: a request on one that is closed before that is lost. An order to drain has all the time."""
    drain_s = grace_s(config(), supervised)
    assert min(connections._IDLE_END_S, connections._IDLE_PART * drain_s) > 5.0
    for signalled in (True, False):
        drained, ends, ordered = Drained(), asyncio.Event(), asyncio.Event()
        (ends if signalled else ordered).set()
        fleet = SimpleNamespace(told_to_drain=ordered, drain=lambda: None)
        never = [asyncio.create_task(asyncio.Event().wait()) for _ in range(2)]
        await server.until_told_to_end(drained, None, *never, fleet, ends, drain_s)
        assert drained.within_s == (drain_s if signalled else math.inf)
        await cancelled(*never)


@pytest.mark.parametrize("draining", [False, True])
async def test_clients_of_a_frontend_whose_connection_to_the_fleet_has_ended_are_not_kept_waiting(draining):
    drained, ordered = Drained(), asyncio.Event()
    served, connected = asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(asyncio.sleep(0))

    async def waits_for_clients(listeners, within_s):
        await asyncio.Event().wait()

    drained.drain = waits_for_clients
    if draining:
        ordered.set()
    else:
        await connected
    fleet = SimpleNamespace(told_to_drain=ordered, drain=lambda: None)
    await server.until_told_to_end(drained, None, served, connected, fleet, asyncio.Event(), 300.0)
    assert drained.config.timeout_graceful_shutdown < 0.1
    await cancelled(served)


async def test_an_end_in_order_without_requests_logs_no_error(caplog):
    drained, ends = Drained(), asyncio.Event()
    drained.config = uvicorn.Config(Drained, port=0, lifespan="off", log_config=None)
    ends.set()
    fleet = SimpleNamespace(told_to_drain=asyncio.Event(), drain=lambda: None)
    never = [asyncio.create_task(asyncio.Event().wait()) for _ in range(2)]
    await server.until_told_to_end(drained, None, *never, fleet, ends, 1.0)
    served = uvicorn.Server(drained.config)
    serving = asyncio.create_task(served.serve())
    await until(lambda: served.started)
    served.should_exit = True
    await serving
    await cancelled(*never)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_frontend_without_launcher_drains():
    assert grace_s(parse_config({"model": "/m", "workers": {"drain_timeout_s": 300}}), supervised=False) == 300


def test_garbage_is_collected_seldom() -> None:
    before = gc.get_threshold()
    try:
        server.collect_garbage_seldom()
        looked = gc.get_stats()[0]["collections"]
        kept = [[] for _ in range(10_000)]  # as many objects as a hundred requests in flight have
        assert gc.get_stats()[0]["collections"] - looked <= 1 and kept
    finally:
        gc.set_threshold(*before)


async def test_frontend_without_launcher_takes_rolled_out_config(redis: Redis):
    own = config(max_logprobs=3)
    fleets = msgspec.structs.replace(own, sim=msgspec.structs.replace(own.sim, speed=32))
    rollout = Rollout(Version(4, shared(own)), Version(5, shared(fleets)))
    stored = Registry(redis, own.namespace).rollout
    assert await rolled_out_config(own, redis) == (own, 0)
    await stored.change(None, rollout)
    assert await rolled_out_config(own, redis) == (own, 4), "it has not ended"
    await stored.change(rollout, rollout.to(Phase.DONE))
    taken, generation = await rolled_out_config(own, redis)
    assert generation == 5 and taken.sim.speed == 32
    assert taken.frontend == own.frontend, "what is a frontend's own stays"
