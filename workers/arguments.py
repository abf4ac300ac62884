"""The worker's command line: one engine and one role, from options, a configuration file and vLLM's own arguments.

Turns them into a `WorkerSettings`, or a ConfigError of one line, and finds a free port for the engine's handshakes.
Starts nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from orchestrator.config.engine_args import check_arguments, engine_args
from orchestrator.config.settings import (
    Config,
    ConfigError,
    check_mesh,
    check_name,
    parse_config,
    port_range,
    read_tree,
)
from orchestrator.config.shared import merged
from orchestrator.config.simulated import simulated
from orchestrator.config.values import HOST, strict_label
from orchestrator.process.command_line import port_number
from orchestrator.store.client import RedisAway
from orchestrator.store.configuration import Version
from orchestrator.store.servers import redis_elsewhere
from orchestrator.types import Role
from orchestrator.wire.addresses import (
    ALL_IPV4,
    Listening,
    address_towards,
    hosts_in,
    is_local,
    is_unspecified,
    resolve,
)


class WorkerSettings(msgspec.Struct, frozen=True):
    """Everything one worker process needs."""

    worker_id: str
    role: Role
    redis_url: str
    bind: str  # address that it listens at
    advertise: str | None  # where frontends and other workers reach it; None: as workers.advertise says by default
    config: Config
    engine_args: dict[str, Any]  # of vLLM
    kv_port: int = 0  # 0 takes a free one
    cores: list[int] = []
    health_port: int | None = None  # answers /live and /ready; 0 takes a free one
    die_with_parent: bool = False
    id_claimed: bool = False  # by the launcher that starts it
    ranks: tuple[str, ...] = ()  # the workers of its unit in their order; none: it is alone
    generation: int | None = None  # of `config`; None: no launcher started this, so the fleet is to be asked


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(role: Role, arguments: list[str], fleets: Version | None = None) -> WorkerSettings:
    """The arguments override the configuration that the fleet runs, and that overrides the --config file. Raises
    ConfigError; exits 0 after --help."""
    options, passed_through = _parser(role).parse_known_args(arguments)
    given = {name: getattr(options, name) for name in ("model", "namespace", "engine")}
    overrides = {name: value for name, value in given.items() if value is not None}
    if options.config is None and options.model is None:
        raise ConfigError("--model: required when no --config names one")
    tree = read_tree(options.config) if options.config is not None else {}
    config = parse_config(tree | overrides)
    if fleets is not None:
        config = parse_config(msgspec.to_builtins(merged(config, fleets.config)) | overrides)
    config = _with_labels(config, options.label)
    redis_url = options.redis or redis_elsewhere(config)
    if "://" not in redis_url:
        raise ConfigError(f"--redis: expected redis://, rediss:// or unix://, got {redis_url!r}")
    of_engine = engine_args(config, role)
    if config.engine == "vllm":
        of_engine |= vllm_arguments(passed_through)
        check_arguments(config, of_engine, "workers.engine_args", role)
    elif passed_through:
        raise ConfigError(f"{passed_through[0]}: unknown argument; a simulated engine is set up by the --config file")
    else:
        simulated(config.sim, of_engine)
    worker_id = _generated_id() if options.id is None else check_name("--id", options.id)
    ranks = _ranks(options, worker_id, of_engine.get("data_parallel_size", 1))
    bind = options.bind or config.workers.bind
    check_mesh(config, bind)
    return WorkerSettings(
        worker_id=worker_id,
        role=role,
        redis_url=redis_url,
        bind=bind,
        advertise=options.advertise or config.workers.advertise,
        config=config,
        engine_args=of_engine,
        kv_port=options.kv_port,
        cores=_cores(options.cores),
        health_port=options.health_port,
        die_with_parent=options.die_with_parent,
        id_claimed=options.id_claimed or worker_id in ranks[1:],  # a unit's id is its first rank's
        ranks=ranks,
        generation=options.generation if fleets is None else fleets.generation,
    )


def _with_labels(config: Config, given: list[str]) -> Config:
    """The configuration with the labels of this process in it. Raises ConfigError for one that cannot be, or lacks."""
    labels = dict(config.workers.labels)
    for label in given:
        name, sign, value = label.partition("=")
        if not sign:
            raise ConfigError(f"--label: expected NAME=VALUE, got {label!r}")
        labels[check_name("--label", name)] = check_name("--label", value)
    needed = strict_label(config.routing.pairing)
    if needed and needed not in (HOST, *labels):
        raise ConfigError(
            f"routing.pairing: {config.routing.pairing} needs the label {needed} on every worker; set "
            f"workers.labels.{needed}, or start this one with --label {needed}=VALUE"
        )
    return replace(config, workers=replace(config.workers, labels=labels))


def _ranks(options: argparse.Namespace, worker_id: str, size: int) -> tuple[str, ...]:
    """The ids of the workers of its unit; none for one that is alone. Raises ConfigError."""
    ranks = tuple(check_name("--ranks", name) for name in options.ranks.split(",")) if options.ranks else ()
    if max(1, len(ranks)) != size or len({*ranks}) != len(ranks):
        raise ConfigError(
            f"--ranks: expected {size} different ids, as many as workers.engine_args.data_parallel_size, got "
            f"{options.ranks or 'none'}; name the worker of each rank, as --ranks d,d.1"
        )
    if ranks and worker_id not in ranks:
        raise ConfigError(f"--id: expected one of --ranks ({options.ranks}), got {worker_id}")
    return ranks


def _parser(role: Role) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"{role.value}-worker",
        description=f"Run one {role.value} worker, which joins its fleet by itself.",
        epilog="Arguments not listed here are vLLM's: --max-model-len 4096 --enforce-eager ...",
        allow_abbrev=False,
    )
    parser.add_argument("--redis", help="URL of the fleet's Redis; default: redis.url of --config, or PD_REDIS_URL")
    parser.add_argument("--model", help="Hugging Face name, folder, or 'demo'")
    parser.add_argument("--namespace", help="fleets of different namespaces ignore each other")
    parser.add_argument("--id", help="unique in the fleet; by default made up")
    parser.add_argument("--engine", help="vllm or sim")
    parser.add_argument("--bind", help="address that this worker listens at; 0.0.0.0 or :: for all of this host")
    parser.add_argument("--advertise", help="address or name that frontends and other workers reach it at")
    parser.add_argument("--label", action="append", default=[], help="NAME=VALUE, in place of workers.labels.NAME")
    parser.add_argument("--config", type=Path, help="the fleet's YAML file")
    parser.add_argument("--kv-port", type=port_number, default=0, help="port for KV handshakes; 0 takes a free one")
    parser.add_argument("--ranks", help="of a data-parallel group: the ids of its workers in their order, as d,d.1")
    parser.add_argument("--health-port", type=port_number, help="port that answers /live and /ready, for probes")
    parser.add_argument("--cores", help="CPU cores to compute on, as 0,1")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the parent process dies")
    parser.add_argument("--id-claimed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--generation", type=int, help=argparse.SUPPRESS)
    return parser


def _generated_id() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return f"worker-{host}-{secrets.token_hex(2)}"


def vllm_arguments(arguments: list[str]) -> dict[str, Any]:
    """Arguments as `vllm serve` spells them, as fields of AsyncEngineArgs: only those given. Raises ConfigError."""
    if not arguments:
        return {}
    # vLLM's own parser knows its hundreds of options, JSON values and dotted keys.
    from workers.vllm_engine.launch import parse_arguments

    try:
        return parse_arguments(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name or arguments[0]}: {error.message}") from None


def _cores(text: str | None) -> list[int]:
    if not text:
        return []
    try:
        cores = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--cores: expected numbers like 0,1, got {text!r}") from None
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise ConfigError(f"--cores: core {missing[0]} is not available to this process")
    return cores


def listening_at(settings: WorkerSettings) -> Listening:
    """Where this worker listens, and the address that it is registered with. Raises ConfigError, RedisAway."""
    redis = hosts_in(settings.redis_url)
    try:
        local_redis, here = is_local(settings.redis_url), address_towards(*redis, bind=settings.bind)
    except OSError as error:
        raise RedisAway(
            f"redis.url: {' and '.join(redis)} has no address now ({error.strerror}); mend the name, or its service"
        ) from None
    bind = _address("workers.bind", here if settings.bind == "auto" else settings.bind, here)
    given = settings.advertise or (here if is_unspecified(bind) else bind)
    address = _address("workers.advertise", given, bind)
    if is_unspecified(address):
        raise ConfigError(f"workers.advertise: expected the address of one host, got {given!r}")
    if bind == ALL_IPV4 and ":" in address:
        raise ConfigError(
            f'workers.bind: 0.0.0.0 listens at IPv4 only, but others would connect to {address}; set it to "::" or auto'
        )
    if ip_address(address).is_loopback and not local_redis:
        raise ConfigError(
            f"workers.bind: {given} is reached from this host alone, but Redis is elsewhere ({', '.join(redis)}); set "
            f"it to an address of this host ({here} leads to Redis), or to 0.0.0.0 for all"
        )
    return Listening(bind, address, port_range(settings.config))


def _address(key: str, given: str, like: str) -> str:
    """Of a name, once: where it has several each library would choose for itself. Raises ConfigError."""
    try:
        return resolve(given, like)
    except OSError as error:
        raise ConfigError(f"{key}: {given!r} has no address ({error.strerror})") from None
