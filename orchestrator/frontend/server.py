"""A frontend process: vLLM's OpenAI app over the router, for one model or for several. Several may share one port.

`python -m orchestrator.frontend.server --config FILE --index I --port P`; usually started by the launcher.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # loading vLLM makes a million objects, hardly one of them garbage

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import resource
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client.registry import Collector, CollectorRegistry
from vllm.config import VllmConfig
from vllm.envs import enable_envs_cache
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import get_prometheus_registry

from orchestrator.config.access import API_KEY, secured
from orchestrator.config.engine_args import check_environment
from orchestrator.config.models import shared_part
from orchestrator.config.server_args import uses_tls, uvicorn_options
from orchestrator.config.settings import Config, ConfigError, read_tree
from orchestrator.frontend.access import Access
from orchestrator.frontend.edge import EdgeMiddleware
from orchestrator.frontend.models.app import build_model_app, build_vllm_config
from orchestrator.frontend.models.door import ModelDoor, ModelPaths
from orchestrator.frontend.models.metrics import (
    ModelsCollector,
    OnlyModels,
    keep_vllm_metrics,
    share_http_metrics,
    shared_stat_logger,
)
from orchestrator.frontend.models.served import Served, as_listed, rolled_out_config, served_models
from orchestrator.frontend.pages import FleetCollector
from orchestrator.frontend.untrusted.connections import BoundedHttp, FrontendServer, listen
from orchestrator.frontend.vllm_codec import VllmCodec
from orchestrator.frontend.wiring import FleetConnection, FleetConnections, unless_ended
from orchestrator.process.command_line import CommandLine, port_number
from orchestrator.process.parent import EXIT_AGAIN, die_with_parent, ending_signals, report_exit
from orchestrator.process.telemetry.logs import set_up as set_up_logging
from orchestrator.process.telemetry.metrics import Metrics, join_ended, keep_counting
from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.operator.log_levels import LogLevels, follow_log_level
from orchestrator.store.servers import redis_elsewhere
from orchestrator.wire.addresses import ALL_IPV4, ANYBODY_IPV4, address_towards, hosts_in, in_url

log = logging.getLogger("pd.frontend")

MAX_DESCRIPTORS = 65_535
_END_S = 2.0  # from the end of the last request to the end of the process
_LOOK_S = 0.1
_NO_TIME_S = 0.01  # for requests that still run: with 0 uvicorn logs an error, also where none runs
# A client that for this long does not send what it has begun, or does not read its answer, is disconnected.
CLIENT_TIMEOUT_S = 300.0
_YOUNG_OBJECTS = 20_000  # Python's default is 700


def advertised_url(config: Config, bound: tuple[str, int], redis_url: str) -> str:
    """The URL of this frontend for others. If it listens on all addresses: the address from which it reaches Redis."""
    host, port = bound
    if ipaddress.ip_address(host).is_unspecified:
        here = address_towards(*hosts_in(redis_url), bind=host)
        # Where Redis is reached over IPv6, and this listens at IPv4 only: the address that leads to anybody else.
        host = address_towards(ANYBODY_IPV4) if host == ALL_IPV4 and ":" in here else here
    return f"{'https' if uses_tls(config) else 'http'}://{in_url(host)}:{port}"


def grace_s(config: Config, supervised: bool) -> float:
    """How long running requests may take after SIGTERM, seconds.

    A launcher kills its processes after `launcher.stop_timeout_s`, so a supervised frontend stops a little earlier, to
    end by itself. Any other frontend has `workers.drain_timeout_s`, like a worker.
    """
    if not supervised:
        return config.workers.drain_timeout_s
    stop_timeout_s = config.launcher.stop_timeout_s
    return max(stop_timeout_s - _END_S, stop_timeout_s / 2)


class Prepared(msgspec.Struct, frozen=True):
    """A model whose app can be made: vLLM's arguments and configuration, and its fleet."""

    name: str
    config: Config
    args: argparse.Namespace
    vllm_config: VllmConfig
    connection: FleetConnection


class ServerApp(msgspec.Struct, frozen=True):
    """What the server serves: `edge` around the apps of all models."""

    asgi: Any
    edge: EdgeMiddleware
    apps: list[FastAPI]


async def build_server_app(models: list[Prepared]) -> ServerApp:
    """vLLM's apps over the fleet, with vLLM's routes and ours. Raises ConfigError."""
    shared = models[0].config
    several = bool(models[0].name)
    os.environ.pop(API_KEY, None)  # vLLM's own middleware would accept this key only, and check few paths
    root_path = shared.frontend.server_args.get("root_path") or ""
    access = Access(secured(shared.security, shared.frontend.host), shared.limits, root_path)
    registry, shown = get_prometheus_registry(), CollectorRegistry()
    apps: dict[str, FastAPI] = {}
    collectors: dict[str, Collector] = {}
    stat_logger = shared_stat_logger() if several else PrometheusStatLogger
    with keep_vllm_metrics() if several else contextlib.nullcontext():
        for each in models:
            apps[each.name] = await build_model_app(
                each.args, each.vllm_config, each.config, each.connection, shown, stat_logger
            )
            collectors[each.name] = FleetCollector(each.connection.fleet, each.connection.queue)
    registry.register(ModelsCollector(collectors) if several else collectors[""])
    shown.register(OnlyModels(registry, (name for each in models for name in (each.name, each.config.name_served))))
    served: Any = ModelDoor(apps, root_path) if several else apps[""]
    if several:
        share_http_metrics(list(apps.values()))
    traced = shared.frontend.otlp_endpoint is not None
    edge = EdgeMiddleware(served, shared.limits.max_body_bytes, access, traced)
    asgi = ModelPaths(edge, frozenset(apps), root_path) if several else edge
    return ServerApp(asgi, edge, list(apps.values()))


async def serve(
    models: list[Served],
    redis_url: str,
    index: int,
    port: int,
    drain_s: float,
    shared: Mapping[str, Any] | None = None,
) -> None:
    """Serve until an order to drain or a signal to end. A frontend that no launcher started reads its models and their
    configurations from Redis; `shared` is what its file says of all, where it has several. Raises ConfigError,
    RedisAway."""
    config = models[0].config
    listener = listen(config.frontend.host, port)
    redis = await connect(redis_url, config.redis.timeout_s)
    frontend_id = f"frontend-{index}-{uuid.uuid4().hex[:8]}"
    if shared is not None:
        models = await as_listed(models, shared, redis)
    prepared = [await prepare(each, frontend_id, redis) for each in models]
    connection = FleetConnections({each.name: each.connection for each in prepared})
    levels = [LogLevels(redis, each.config.namespace) for each in prepared]
    connected = asyncio.create_task(connection.run())
    levelled = asyncio.create_task(follow_log_level(levels, frontend_id.rpartition("-")[0], logging.getLogger("pd")))
    await unless_ended(connected, connection.synced())
    app = await unless_ended(connected, build_server_app(prepared))
    await connection.begin_adapters()
    enable_envs_cache()  # vLLM reads some of its environment variables at each token
    collect_garbage_seldom()
    server = http_server(app, config, drain_s)
    told_to_end = asyncio.Event()

    def told(number: signal.Signals) -> None:
        if number == signal.SIGINT:  # unlike SIGTERM it says that nobody else serves
            server.end_idle()
        told_to_end.set()

    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, told, number)
    served = asyncio.create_task(server.serve(sockets=[listener]))
    following = asyncio.create_task(app.edge.access.follow_keys())
    url = advertised_url(config, listener.getsockname()[:2], redis_url)
    while not (server.started or served.done()):  # once announced, it may replace a frontend that leaves
        await asyncio.sleep(_LOOK_S)
    await connection.announce(url)
    log.info("listening on %s", url)
    await until_told_to_end(server, listener, served, connected, connection, told_to_end, drain_s)
    server.should_exit = True
    await served
    for task in (following, levelled, connected):
        task.cancel()
    try:
        await connected  # raises the error that ended it: the process ends with an error and is restarted
    except asyncio.CancelledError:
        log.info("stopped")
    finally:
        await connection.close()
        await redis.aclose()


async def prepare(model: Served, frontend_id: str, redis: Redis) -> Prepared:
    """Raises ConfigError, RedisAway."""
    config, generation, by_hand = model.config, model.generation, model.generation is None
    if generation is None:
        config, generation = await rolled_out_config(config, redis)
    args, vllm_config = build_vllm_config(config)
    codec = VllmCodec.of(vllm_config, config.slo.classes)
    metrics = Metrics(model.name or None)
    connection = FleetConnection(frontend_id, config, redis, codec, generation, by_hand, metrics)
    return Prepared(model.name, config, args, vllm_config, connection)


def http_server(app: ServerApp, config: Config, drain_s: float) -> FrontendServer:
    """The server of `app`. It is not started."""
    server = FrontendServer(
        uvicorn.Config(
            app.asgi,
            access_log=False,
            log_config=None,
            http=BoundedHttp,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # a fraction will do
            **uvicorn_options(config),
        ),
        CLIENT_TIMEOUT_S,
    )
    for model in app.apps:
        model.state.server = server  # vLLM's error handlers read it
    return server


async def until_told_to_end(
    server: FrontendServer,
    listener: socket.socket,
    served: asyncio.Task[None],
    connected: asyncio.Task[None],
    connection: FleetConnections,
    told_to_end: asyncio.Event,
    drain_s: float,
) -> None:
    """Returns when the server or the connection to the fleet has ended, after a signal, or after an order to drain:
    then when the last client has left, or `drain_s` after a signal."""
    ordered, ending = (asyncio.create_task(told.wait()) for told in (connection.told_to_drain, told_to_end))
    await asyncio.wait({served, connected, ordered, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not (served.done() or connected.done()):
        log.info("draining: it takes no new connections")
        connection.drain()
        within_s = drain_s if told_to_end.is_set() else math.inf
        drained = asyncio.create_task(server.drain([listener], within_s))
        await asyncio.wait({served, connected, drained, ending}, return_when=asyncio.FIRST_COMPLETED)
        if told_to_end.is_set():  # unlike an order, a signal gives only so much time
            await asyncio.wait({served, connected, drained}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            server.config.timeout_graceful_shutdown = _NO_TIME_S  # type: ignore[assignment]
        drained.cancel()
    if connected.done():  # nobody receives what workers send: no request that runs would ever be answered
        server.config.timeout_graceful_shutdown = _NO_TIME_S  # type: ignore[assignment]
    ordered.cancel()
    ending.cancel()


def collect_garbage_seldom() -> None:
    """Collect garbage less often. Each collection goes through all requests in flight, few of which are garbage: with
    Python's default it took 4% of the CPU time."""
    gc.set_threshold(_YOUNG_OBJECTS)


def allow_many_connections() -> None:
    """Raise the limit of file descriptors to that of `vllm serve`, or as far as the system allows. Each client and each
    worker takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_DESCRIPTORS:
        allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def main() -> None:
    parser = CommandLine(prog="orchestrator.frontend.server", description=__doc__)
    parser.add_argument("--redis", help="URL of the fleet's Redis; default: redis.url of --config, or PD_REDIS_URL")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--port", type=port_number)
    parser.add_argument("--generation", type=int, help=argparse.SUPPRESS)
    # Of each model where there are several, instead of --config and --generation.
    parser.add_argument("--model", nargs=3, action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    allow_many_connections()
    keep_counting()
    join_ended()
    try:
        check_environment()
        models = served_models(options)
        config = models[0].config
        set_up_logging(f"frontend-{options.index}", config.logging.format, config.logging.level)
        if options.die_with_parent:
            die_with_parent(config.launcher.stop_timeout_s)
        port = config.frontend.port if options.port is None else options.port
        redis_url = options.redis or redis_elsewhere(config)
        drain_s = grace_s(config, options.die_with_parent)
        by_hand = bool(models[0].name) and models[0].generation is None
        shared = shared_part(read_tree(options.config)) if by_hand else None
        uvloop.run(serve(models, redis_url, options.index, port, drain_s, shared))
    except (ConfigError, RedisAway) as error:
        final = isinstance(error, ConfigError)
        report_exit("orchestrator.frontend.server", str(error), final)
        sys.exit(2 if final else EXIT_AGAIN)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main()
