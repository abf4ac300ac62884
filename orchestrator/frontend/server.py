"""A frontend process: vLLM's OpenAI app over the router. Several may share one port.

`python -m orchestrator.frontend.server --config FILE --index I --port P`; usually started by the launcher.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # loading vLLM makes a million objects, hardly one of them garbage

import argparse
import asyncio
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import uvicorn
import uvloop
from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.envs import enable_envs_cache
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.prometheus import get_prometheus_registry

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

from orchestrator.config.access import API_KEY, secured
from orchestrator.config.engine_args import check_environment, engine_args, to_command_line
from orchestrator.config.model import resolve_model
from orchestrator.config.server_args import uses_tls, uvicorn_options
from orchestrator.config.settings import Config, ConfigError, load_config
from orchestrator.config.shared import differences, merged
from orchestrator.frontend import tracing
from orchestrator.frontend.access import Access
from orchestrator.frontend.adapters import fleet_models
from orchestrator.frontend.codec.detokenizer import use_backend
from orchestrator.frontend.codec.vllm_codec import VllmCodec
from orchestrator.frontend.dashboard.routes import operator_routes, page_routes, stream_routes
from orchestrator.frontend.edge import EdgeMiddleware
from orchestrator.frontend.engine import FleetCore, FleetLLM
from orchestrator.frontend.pages import FleetCollector, fleet_routes
from orchestrator.frontend.plain import route, streaming
from orchestrator.frontend.untrusted.bodies import refuse_what_trips
from orchestrator.frontend.untrusted.connections import BoundedHttp, FrontendServer, listen
from orchestrator.frontend.untrusted.media import fetch_public_only
from orchestrator.frontend.wiring import FleetConnection, unless_ended
from orchestrator.process.command_line import CommandLine
from orchestrator.process.parent import die_with_parent, report_exit
from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.registry import Registry
from orchestrator.store.servers import redis_elsewhere
from orchestrator.telemetry.logs import set_up as set_up_logging
from orchestrator.telemetry.metric_files import recreate_missing_folder
from orchestrator.types import Role
from orchestrator.wire.addresses import address_towards, in_url

log = logging.getLogger("pd.frontend")

MAX_DESCRIPTORS = 65_535
_END_S = 2.0  # from the end of the last request to the end of the process
_LOOK_S = 0.1
_YOUNG_OBJECTS = 20_000  # Python's default is 700
# A frontend has no engine, so options about the place of an engine's weights and memory are left out.
_ENGINE_ONLY = ("tensor_parallel", "pipeline_parallel", "data_parallel", "distributed_", "kv_cache_memory", "gpu_")


class ServerParser(FlexibleArgumentParser):
    """vLLM's parser. It raises ValueError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def server_arguments(config: Config, parser: argparse.ArgumentParser) -> list[str]:
    """Arguments for vLLM's OpenAI server parser, from the fleet's configuration."""
    options: dict[str, Any] = {
        "model": resolve_model(config.model),
        "served_model_name": config.name_served,
        **{k: v for k, v in engine_args(config, Role.DECODE).items() if not k.startswith(_ENGINE_ONLY)},
        **tracing.configure(config),
        **config.frontend.server_args,
        # vLLM's cache assumes one engine, which has received every item that was sent before.
        "mm_processor_cache_gb": 0,
    }
    if config.engine == "sim":
        options.setdefault("max_model_len", config.sim.max_model_len)
    # Only argparse's list of actions shows how an option takes several values.
    spread = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    repeated = {action.dest for action in parser._actions if isinstance(action, argparse._AppendAction)}
    return to_command_line(options, spread, repeated)


def build_vllm_config(config: Config) -> tuple[argparse.Namespace, VllmConfig]:
    """The arguments of vLLM's server, and vLLM's configuration. Raises ConfigError for arguments that vLLM refuses."""
    os.environ["VLLM_MAX_N_SEQUENCES"] = str(config.limits.max_n)  # vLLM checks each request by it
    use_backend(config.frontend.tokenizer_backend)
    fetch_public_only(config.frontend.host)
    if config.engine == "sim":
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # nothing is computed, so any length is allowed
    parser = make_arg_parser(ServerParser())
    try:
        args = parser.parse_args(server_arguments(config, parser))
        validate_parsed_serve_args(args)
        return args, AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except Exception as error:  # vLLM raises many types, each because of the configuration
        raise _refused(config, error) from error


def advertised_url(config: Config, bound: tuple[str, int], redis_url: str) -> str:
    """The URL of this frontend for others. If it listens on all addresses: the address from which it reaches Redis."""
    host, port = bound
    if ipaddress.ip_address(host).is_unspecified:
        first = urlsplit(redis_url.partition(",")[0])  # the first of several hosts
        host = address_towards(first.hostname or "127.0.0.1")
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


def _refused(config: Config, error: Exception) -> ConfigError:
    line = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"vLLM's server refuses model {config.model!r}, workers.engine_args or frontend.server_args: {line}"
    )


async def build_server_app(
    args: argparse.Namespace, vllm_config: VllmConfig, config: Config, connection: FleetConnection
) -> EdgeMiddleware:
    """vLLM's app over the fleet, with vLLM's routes and ours. Raises ConfigError."""
    security = secured(config.security, config.frontend.host)
    os.environ.pop(API_KEY, None)  # vLLM's own middleware would accept this key only, and check few paths
    access = Access(security, config.limits, config.frontend.server_args.get("root_path") or "")
    tasks = ("generate",) if vllm_config.model_config.runner_type == "generate" else await connection.supported_tasks()
    if args.lora_modules or (vllm_config.lora_config and vllm_config.lora_config.default_mm_loras):
        await connection.worker_connected()  # vLLM loads them while its app is made
    core = FleetCore(connection, tasks)
    try:
        engine = FleetLLM(vllm_config, core, config.frontend.most_replicas, connection.adapters)
        app = build_app(args, tasks, vllm_config.model_config)
        with fleet_models():
            await init_app_state(engine, app.state, args, tasks)
    except Exception as error:
        raise _refused(config, error) from error
    refuse_what_trips(app)
    streaming.watch(app, args)
    route.install(app, args)
    registry = get_prometheus_registry()
    depth, desired = lambda: connection.queue.depth, lambda: connection.desired
    registry.register(FleetCollector(connection.fleet.workers.values, depth, desired))
    ours = fleet_routes(
        config.name_served,
        connection.fleet,
        depth,
        desired,
        connection.rollout,
        registry,
        connection.router.learning.predictor,
    )
    streams = stream_routes(connection.history, connection.router.recent, lambda: _is_stopping(app))
    routes = [*ours.routes, *streams.routes]
    if config.frontend.dashboard:
        routes += [*page_routes().routes, *operator_routes(connection.steering).routes]
    app.router.routes[:0] = routes  # before vLLM's own /metrics, which has nothing about the fleet
    # Routes are tried in turn, once for the request and once for its metrics: the most used ones come first.
    app.router.routes.sort(key=lambda each: getattr(each, "path", None) not in route.PATHS)
    traced = tracing.begin if config.frontend.otlp_endpoint is not None else None
    return EdgeMiddleware(app, config.limits.max_body_bytes, access, traced)


def _is_stopping(app: FastAPI) -> bool:
    """Whether the server was told to end. Streams without an end must end then, or they would delay it."""
    server = getattr(app.state, "server", None)
    return server is not None and bool(server.should_exit or server.draining)


async def rolled_out_config(config: Config, redis: Redis) -> tuple[Config, int]:
    """The configuration and generation of a frontend that no launcher starts: its own configuration, with the values
    of the last settled rollout. Raises ConfigError, RedisAway."""
    rollout = await Registry(redis, config.namespace).configuration.rollout()
    if rollout is None:
        return config, 0
    version = rollout.settled
    fleets = merged(config, version.config)
    if keys := ", ".join(differences(config, fleets)):
        log.warning("configuration %d was rolled out: its values go before this file's of %s", version.generation, keys)
    return fleets, version.generation


async def serve(
    config: Config, redis_url: str, index: int, port: int, drain_s: float, generation: int | None = None
) -> None:
    """Serve until an order to drain, SIGTERM or SIGINT. `generation`: that of `config`; None if no launcher started
    this frontend, which then reads the fleet's configuration from Redis. Raises ConfigError, RedisAway."""
    listener = listen(config.frontend.host, port)
    redis = await connect(redis_url, config.redis.timeout_s)
    by_hand = generation is None
    if generation is None:
        config, generation = await rolled_out_config(config, redis)
    args, vllm_config = build_vllm_config(config)
    frontend_id = f"frontend-{index}-{uuid.uuid4().hex[:8]}"
    codec = VllmCodec.of(vllm_config, config.slo.classes)
    connection = FleetConnection(frontend_id, config, redis, codec, generation, by_hand)
    connected = asyncio.create_task(connection.run())
    await unless_ended(connected, connection.synced())
    app = await unless_ended(connected, build_server_app(args, vllm_config, config, connection))
    await connection.adapters.begin()
    enable_envs_cache()  # vLLM reads some of its environment variables at each token
    collect_garbage_seldom()
    server = http_server(app, config, drain_s)
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
    served = asyncio.create_task(server.serve(sockets=[listener]))
    following = asyncio.create_task(app.access.follow_keys())
    url = advertised_url(config, listener.getsockname()[:2], redis_url)
    while not (server.started or served.done()):  # once announced, it may replace a frontend that leaves
        await asyncio.sleep(_LOOK_S)
    await connection.announce(url)
    log.info("listening on %s", url)
    await until_told_to_end(server, listener, served, connected, connection, told_to_end, drain_s)
    server.should_exit = True
    await served
    following.cancel()
    connected.cancel()
    try:
        await connected  # raises the error that ended it: the process ends with an error and is restarted
    except asyncio.CancelledError:
        log.info("stopped")
    finally:
        await connection.close()
        await redis.aclose()


def http_server(app: EdgeMiddleware, config: Config, drain_s: float) -> FrontendServer:
    """The server of `app`. It is not started."""
    server = FrontendServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            http=BoundedHttp,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # a fraction will do
            **uvicorn_options(config),
        ),
        config.limits.client_timeout_s,
    )
    app.app.state.server = server  # vLLM's error handlers read it
    return server


async def until_told_to_end(
    server: FrontendServer,
    listener: socket.socket,
    served: asyncio.Task[None],
    connected: asyncio.Task[None],
    connection: FleetConnection,
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
        drained = asyncio.create_task(server.drain([listener], hurried=told_to_end.is_set()))
        await asyncio.wait({served, connected, drained, ending}, return_when=asyncio.FIRST_COMPLETED)
        if told_to_end.is_set():  # unlike an order, a signal gives only so much time
            await asyncio.wait({served, connected, drained}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            server.config.timeout_graceful_shutdown = 0
        drained.cancel()
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
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--generation", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    allow_many_connections()
    recreate_missing_folder()
    try:
        check_environment()
        config = load_config(options.config)
        set_up_logging(f"frontend-{options.index}", config.logging.format, config.logging.level)
        if options.die_with_parent:
            die_with_parent(config.launcher.stop_timeout_s)
        port = config.frontend.port if options.port is None else options.port
        redis_url = options.redis or redis_elsewhere(config)
        drain_s = grace_s(config, options.die_with_parent)
        uvloop.run(serve(config, redis_url, options.index, port, drain_s, options.generation))
    except (ConfigError, RedisAway) as error:
        report_exit("orchestrator.frontend.server", str(error), final=isinstance(error, ConfigError))
        sys.exit(2)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main()
