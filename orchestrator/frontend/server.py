"""A frontend process: vLLM's OpenAI app over the router. Several may share one port.

`python -m orchestrator.frontend.server --config FILE --index I --port P`; usually started by the launcher.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import logging
import os
import resource
import signal
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
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.envs import enable_envs_cache
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.prometheus import get_prometheus_registry

from orchestrator.config.access import API_KEY, secured
from orchestrator.config.engine_args import engine_args, to_command_line
from orchestrator.config.model import resolve_model
from orchestrator.config.server_args import uses_tls, uvicorn_options
from orchestrator.config.settings import Config, ConfigError, check_environment, load_config
from orchestrator.config.shared import differences, merged
from orchestrator.frontend import tracing
from orchestrator.frontend.access import Access
from orchestrator.frontend.connections import BoundedHttp, QuietServer, listen
from orchestrator.frontend.dashboard.routes import operator_routes, page_routes, stream_routes
from orchestrator.frontend.detokenizer import use_backend
from orchestrator.frontend.edge import EdgeMiddleware
from orchestrator.frontend.engine import FleetCore, FleetLLM
from orchestrator.frontend.pages import FleetCollector, fleet_routes
from orchestrator.frontend.plain import route, streaming
from orchestrator.frontend.vllm_codec import VllmCodec
from orchestrator.frontend.wiring import FleetConnection, unless_ended
from orchestrator.parent import die_with_parent, report_exit
from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.registry import Registry
from orchestrator.store.servers import redis_elsewhere
from orchestrator.telemetry.logs import set_up as set_up_logging
from orchestrator.telemetry.metric_files import outlive_their_folder
from orchestrator.types import Role
from orchestrator.wire.addresses import address_towards, in_url

log = logging.getLogger("pd.frontend")

MAX_DESCRIPTORS = 65_535
_END_S = 2.0  # from the end of the last request to the end of the process
_LOOK_S = 0.1
_YOUNG_OBJECTS = 20_000  # 700 is Python's own
# A frontend has no engine: what says where an engine's weights and memory go is not its business.
_ENGINE_ONLY = ("tensor_parallel", "pipeline_parallel", "data_parallel", "distributed_", "kv_cache_memory", "gpu_")


class ServerParser(FlexibleArgumentParser):
    """vLLM's parser, which raises where it would print its usage and end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def server_arguments(config: Config, parser: argparse.ArgumentParser) -> list[str]:
    """Arguments for vLLM's OpenAI server parser, from the fleet's configuration."""
    options: dict[str, Any] = {
        "model": resolve_model(config.model),
        "served_model_name": config.name_served,
        **{k: v for k, v in engine_args(config, Role.DECODE).items() if not k.startswith(_ENGINE_ONLY)},
        # Its cache assumes a single engine that has seen what it has sent.
        "mm_processor_cache_gb": 0,
        **tracing.configure(config),
        **config.frontend.server_args,
    }
    if config.engine == "sim":
        options.setdefault("max_model_len", config.sim.max_model_len)
    # argparse tells how an option takes several values only in its list of actions.
    spread = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    repeated = {action.dest for action in parser._actions if isinstance(action, argparse._AppendAction)}
    return to_command_line(options, spread, repeated)


def build_vllm_config(config: Config) -> tuple[argparse.Namespace, VllmConfig]:
    """Raises ConfigError for arguments that vLLM refuses."""
    os.environ["VLLM_MAX_N_SEQUENCES"] = str(config.limits.max_n)  # vLLM checks each request by it
    use_backend(config.frontend.tokenizer_backend)
    if config.engine == "sim":
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # nothing is computed, so any length goes
    parser = make_arg_parser(ServerParser())
    try:
        args = parser.parse_args(server_arguments(config, parser))
        validate_parsed_serve_args(args)
        return args, AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except Exception as error:  # vLLM refuses in many ways, all of them the configuration's doing
        raise _refused(config, error) from error


def advertised_url(config: Config, bound: tuple[str, int], redis_url: str) -> str:
    """Where others reach this frontend. For one that listens on all addresses: at that which leads to Redis."""
    host, port = bound
    if ipaddress.ip_address(host).is_unspecified:
        first = urlsplit(redis_url.partition(",")[0])  # of several hosts
        host = address_towards(first.hostname or "127.0.0.1")
    return f"{'https' if uses_tls(config) else 'http'}://{in_url(host)}:{port}"


def grace_s(config: Config, supervised: bool) -> float:
    """How long running requests may take after SIGTERM.

    A launcher kills after `launcher.stop_timeout_s`, and what is left lets the process end before that; whoever else
    runs this frontend waits until it is drained, like a worker.
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
    """vLLM's app with all of its routes, over the fleet, plus ours. Raises ConfigError."""
    security = secured(config.security, config.frontend.host)
    os.environ.pop(API_KEY, None)  # vLLM's own middleware would ask for this key alone, and under a few paths only
    access = Access(security, config.limits, config.frontend.server_args.get("root_path") or "")
    tasks = ("generate",) if vllm_config.model_config.runner_type == "generate" else await connection.supported_tasks()
    if args.lora_modules:
        await connection.worker_connected()  # vLLM's app loads them while it is made
    core = FleetCore(connection, tasks)
    try:
        engine = FleetLLM(vllm_config, core, config.frontend.most_replicas)
        app = build_app(args, tasks, vllm_config.model_config)
        await init_app_state(engine, app.state, args, tasks)
    except Exception as error:
        raise _refused(config, error) from error
    streaming.watch(app, args)
    route.install(app, args)
    registry = get_prometheus_registry()
    registry.register(
        FleetCollector(connection.fleet.workers.values, lambda: connection.queue.depth, lambda: connection.desired)
    )
    ours = fleet_routes(
        config.name_served,
        connection.fleet,
        lambda: connection.queue.depth,
        lambda: connection.desired,
        connection.rollout,
        registry,
        connection.router.learning.predictor,
    )
    routes = [*ours.routes, *stream_routes(connection.history, connection.router.recent, lambda: _stops(app)).routes]
    if config.frontend.dashboard:
        routes += [*page_routes().routes, *operator_routes(connection.steering).routes]
    app.router.routes[:0] = routes  # ahead of vLLM's own /metrics, which does not know the fleet
    # Each request tries them in turn, and so does what measures it: what is asked most comes first.
    app.router.routes.sort(key=lambda each: getattr(each, "path", None) not in route.PATHS)
    traced = tracing.begin if config.frontend.otlp_endpoint is not None else None
    return EdgeMiddleware(app, config.limits.max_body_bytes, access, traced)


def _stops(app: FastAPI) -> bool:
    """Whether the server was told to end: a stream that goes on for ever would hold it up."""
    server = getattr(app.state, "server", None)
    return server is not None and bool(server.should_exit or server.draining)


async def the_fleets(config: Config, redis: Redis) -> tuple[Config, int]:
    """The configuration of a frontend that no launcher starts: its own, with what a rollout has changed since; and its
    generation. Raises ConfigError, RedisAway."""
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
    """Serves until it is told to drain, or SIGTERM or SIGINT. `generation`: of `config`; None: no launcher started
    this, so the fleet is asked. Raises ConfigError, RedisAway."""
    listener = listen(config.frontend.host, port)
    redis = await connect(redis_url, config.redis.timeout_s)
    by_hand = generation is None
    if generation is None:
        config, generation = await the_fleets(config, redis)
    args, vllm_config = build_vllm_config(config)
    frontend_id = f"frontend-{index}-{uuid.uuid4().hex[:8]}"
    connection = FleetConnection(frontend_id, config, redis, VllmCodec(), generation, by_hand)
    connected = asyncio.create_task(connection.run())
    await unless_ended(connected, connection.synced())
    app = await unless_ended(connected, build_server_app(args, vllm_config, config, connection))
    enable_envs_cache()  # vLLM asks for some of its variables at each token
    collect_seldom()
    server = QuietServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            http=BoundedHttp,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # a fraction will do
            **uvicorn_options(config),
        )
    )
    app.app.state.server = server  # vLLM's error handlers look there
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    served = asyncio.create_task(server.serve(sockets=[listener]))
    url = advertised_url(config, listener.getsockname()[:2], redis_url)
    while not (server.started or served.done()):  # who is announced may take the place of one that leaves
        await asyncio.sleep(_LOOK_S)
    await connection.announce(url)
    log.info("listening on %s", url)
    draining = asyncio.create_task(connection.told_to_drain.wait())
    await asyncio.wait({served, connected, draining}, return_when=asyncio.FIRST_COMPLETED)
    if not (served.done() or connected.done()):
        log.info("draining: it takes no new connections")
        drained = asyncio.create_task(server.drain([listener]))
        await asyncio.wait({served, connected, drained}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
    draining.cancel()
    server.should_exit = True
    await served
    connected.cancel()
    try:
        await connected  # raises what broke it, so that the process ends with an error and is started again
    except asyncio.CancelledError:
        log.info("stopped")
    finally:
        await connection.close()
        await redis.aclose()


def collect_seldom() -> None:
    """Each look for cycles goes through all requests in flight, of which few are garbage: 4% of the CPU time at 700."""
    gc.set_threshold(_YOUNG_OBJECTS)


def allow_many_connections() -> None:
    """Each client and each worker costs descriptors: allow as many as `vllm serve` does, or as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_DESCRIPTORS:
        allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def main() -> None:
    parser = argparse.ArgumentParser(prog="orchestrator.frontend.server", description=__doc__)
    parser.add_argument("--redis", help="URL of the fleet's Redis; default: redis.url of --config, or PD_REDIS_URL")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--generation", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    allow_many_connections()
    outlive_their_folder()
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
    main()
