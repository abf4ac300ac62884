"""vLLM's app over the fleet of one model, with vLLM's routes and ours, from that model's configuration."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from transformers.models.auto import processing_auto
from vllm import entrypoints
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.exceptions import GenerationError
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

from orchestrator.config.engine_args import engine_args, to_command_line
from orchestrator.config.model import resolve_model
from orchestrator.config.settings import Config, ConfigError
from orchestrator.config.simulated import HONOURED, simulated
from orchestrator.frontend import tracing
from orchestrator.frontend.dashboard.routes import operator_routes, page_routes, stream_routes
from orchestrator.frontend.engine import FleetCore, FleetLLM
from orchestrator.frontend.models.adapters import fleet_models
from orchestrator.frontend.pages import fleet_routes
from orchestrator.frontend.plain import route, streaming
from orchestrator.frontend.untrusted.media import fetch_public_only
from orchestrator.frontend.wiring import FleetConnection
from orchestrator.types import Role

# A frontend has no engine, so options about the place of an engine's weights and memory are left out.
_ENGINE_ONLY = ("tensor_parallel", "pipeline_parallel", "data_parallel", "distributed_", "kv_cache_memory", "gpu_")


def _import_routers() -> None:
    """Import what vLLM imports when it makes an app, so that a frontend that is forked afterwards need not."""
    folder = Path(entrypoints.__path__[0])
    for file in folder.rglob("api_router.py"):
        with contextlib.suppress(Exception):  # an app that needs it imports it again, and says why
            importlib.import_module(".".join((entrypoints.__name__, *file.relative_to(folder).with_suffix("").parts)))


_import_routers()


class ServerParser(FlexibleArgumentParser):
    """vLLM's parser. It raises ValueError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def server_arguments(config: Config, parser: argparse.ArgumentParser) -> list[str]:
    """Arguments for vLLM's OpenAI server parser, from the model's configuration."""
    arguments = engine_args(config, Role.DECODE)
    if config.engine == "sim":
        sizes = simulated(config.sim, arguments)
        arguments = {k: v for k, v in arguments.items() if k not in HONOURED} | {"max_model_len": sizes.max_model_len}
    options: dict[str, Any] = {
        "model": resolve_model(config.model),
        "served_model_name": config.name_served,
        **{k: v for k, v in arguments.items() if not k.startswith(_ENGINE_ONLY)},
        **tracing.configure(config),
        **config.frontend.server_args,
        # vLLM's cache assumes one engine, which has received every item that was sent before.
        "mm_processor_cache_gb": 0,
    }
    # Only argparse's list of actions shows how an option takes several values.
    spread = {action.dest for action in parser._actions if action.nargs in ("+", "*")}
    repeated = {action.dest for action in parser._actions if isinstance(action, argparse._AppendAction)}
    return to_command_line(options, spread, repeated)


def build_vllm_config(config: Config) -> tuple[argparse.Namespace, VllmConfig]:
    """The arguments of vLLM's server, and vLLM's configuration. Raises ConfigError for arguments that vLLM refuses."""
    os.environ["VLLM_MAX_N_SEQUENCES"] = str(config.limits.max_n)  # vLLM checks each request by it
    streaming.use_backend(config.frontend.tokenizer_backend)
    fetch_public_only(config.frontend.host)
    if config.engine == "sim":
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # nothing is computed, so any length is allowed
    parser = make_arg_parser(ServerParser())
    try:
        args = parser.parse_args(server_arguments(config, parser))
        validate_parsed_serve_args(args)
        # By this use vLLM chooses the size of steps, as for engines, and by that size it bounds images.
        return args, AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM raises many types, each because of the configuration
        raise _refused(config, error) from error


def _refused(config: Config, error: Exception) -> ConfigError:
    line = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"vLLM's server refuses model {config.model!r}, workers.engine_args or frontend.server_args: {line}"
    )


async def build_model_app(
    args: argparse.Namespace,
    vllm_config: VllmConfig,
    config: Config,
    connection: FleetConnection,
    registry: CollectorRegistry,
    stat_logger: Any,
) -> FastAPI:
    """`registry`: what `/metrics` shows. `stat_logger`: vLLM's, a class. Raises ConfigError."""
    tasks = ("generate",) if vllm_config.model_config.runner_type == "generate" else await connection.supported_tasks()
    if args.lora_modules or (vllm_config.lora_config and vllm_config.lora_config.default_mm_loras):
        await connection.worker_connected()  # vLLM loads them while its app is made
    core = FleetCore(connection, tasks)
    try:
        engine = FleetLLM(vllm_config, core, config.frontend.most_replicas, connection.adapters, stat_logger)
        app = build_app(args, tasks, vllm_config.model_config)
        with fleet_models(), no_second_tokenizer(vllm_config):
            await init_app_state(engine, app.state, args, tasks)
    except Exception as error:
        raise _refused(config, error) from error
    end_streams_of_failures(getattr(app.state, "openai_serving_responses", None))
    route.refuse_what_trips(app)
    streaming.watch(app, args)
    route.install(app, args)
    ours = fleet_routes(config.name_served, connection, registry)
    streams = stream_routes(connection.history, connection.siblings, lambda: _is_stopping(app))
    routes = [*ours.routes, *streams.routes]
    if config.frontend.dashboard:
        routes += [*page_routes().routes, *operator_routes(connection.steering).routes]
    app.router.routes[:0] = routes  # before vLLM's own /metrics, which has nothing about the fleet
    # Routes are tried in turn, once for the request and once for its metrics: the most used ones come first.
    app.router.routes.sort(key=lambda each: getattr(each, "path", None) not in route.PATHS)
    return app


@contextlib.contextmanager
def no_second_tokenizer(vllm_config: VllmConfig) -> Iterator[None]:
    """Inside this context the tokenizer of a text model is read once. vLLM asks for a processor, which may have a chat
    template (vllm/renderers/hf.py, 0.32.0). For a model without one transformers reads its tokenizer instead, which
    vLLM has already, and drops."""
    original = processing_auto.AutoTokenizer
    if not vllm_config.model_config.is_multimodal_model:
        processing_auto.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    try:
        yield
    finally:
        processing_auto.AutoTokenizer = original


def end_streams_of_failures(responses: Any) -> None:
    """Who watches a response that is made in the background hears of its failure: vLLM waits for a last event, which
    does not come then (vllm/entrypoints/openai/responses/serving.py, 0.32.0). `responses`: its handler, if any."""

    async def nothing_follows() -> NoReturn:
        raise GenerationError("the response has ended, and no event of it follows: GET /v1/responses/ID says how")

    async def made(request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await make(request, *args, **kwargs)
        finally:
            _, told = responses.event_store[request.request_id]
            told.wait = nothing_follows  # whoever has got all events asks for more

    if responses is not None:
        make, responses._run_background_request_stream = responses._run_background_request_stream, made


def _is_stopping(app: FastAPI) -> bool:
    """Whether the server was told to end. Streams without an end must end then, or they would delay it."""
    server = getattr(app.state, "server", None)
    return server is not None and bool(server.should_exit or server.draining)
