"""The configuration: frozen structs read from one YAML file, plus `--set a.b=c` overrides.

An unknown key, a wrong type or an impossible value is a ConfigError whose one line names the key, the value and the
fix. Defaults are defined here only; docs/configuration.md lists them, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from orchestrator.config.access import LimitsConfig, SecurityConfig, is_loopback
from orchestrator.config.explain import explain, find_unserializable, kind_of
from orchestrator.config.processes import FrontendConfig, LauncherConfig, LoggingConfig
from orchestrator.config.values import (
    NAME_PATTERN,
    PATTERNS,
    Amount,
    BytesOrNone,
    Count,
    Factor,
    Name,
    Pairing,
    Ports,
    Seconds,
    Share,
    SomeWorkers,
    Text,
    Workers,
    find_wrong_address,
)
from orchestrator.config.yaml_text import NotYaml, load_yaml
from orchestrator.process.files import CONFIG_BYTES, read_plain_file


class ConfigError(ValueError):
    """One line: key, value, fix. The command line prints it and exits with 2."""


class Refused(ConfigError):
    """An operator's order that cannot be carried out. One line: what, why, the fix."""


def check_name(key: str, name: str) -> str:
    """Returns `name`. Raises ConfigError for a name that may not become part of a Redis key or of a file's name."""
    if not re.search(NAME_PATTERN, name):
        raise ConfigError(f"{key}: expected text {PATTERNS[NAME_PATTERN]}, got {name!r}")
    return name


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    # embedded: a server for this host only. Else redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://
    url: Text = "embedded"
    timeout_s: Seconds = 0.5  # of one command; after it Redis counts as away. The launcher waits for 2


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workers of one role; `engine_args` and `env` override those of `workers`."""

    replicas: Workers = 1
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}


class WorkersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    # vLLM engine arguments for every worker: {tensor_parallel_size: 2, max_model_len: 8192}
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    labels: dict[Name, Name] = {}  # where they are: {zone: a, rack: r1}
    bind: Text = "127.0.0.1"  # address that workers listen at; auto: the one that leads to Redis; 0.0.0.0, "::": all
    # Where others reach them, an address or a name. Default: `bind`; where that is all, the address that leads to Redis
    advertise: Text | None = None
    # The ports that workers listen at, as 20000-20999; three for each, and those of UCX. Default: any that are free.
    ports: Ports | None = None
    timeout_s: Seconds = 4.0  # a worker that is silent for this long is gone
    start_timeout_s: Seconds = 900.0
    drain_timeout_s: Seconds = 120.0  # after it the remaining requests continue on other workers

    @property
    def heartbeat_s(self) -> float:
        """Between two heartbeats of a worker to Redis: three may be lost."""
        return self.timeout_s / 4

    @property
    def lease_s(self) -> float:
        """For so long a claim of a prefill holds unless it is renewed; then the job returns to the queue."""
        return 2.5 * self.timeout_s


class SLOClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Latency objectives of the requests that name this class in `x-slo-class`. None: the fleet's."""

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None


class SLOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Latency objectives of the fleet. The policies that predict aim at them."""

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.1
    classes: dict[str, SLOClass] = {}  # by name
    # For a request whose predicted TTFT misses the objective: serve it as usual, answer 429, or queue it last.
    admission: Literal["off", "reject", "queue"] = "queue"


class RoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    decode_choice: Literal[
        "kv_blocks",
        "kv_prefix",
        "round_robin",
        "least_requests",
        "power_of_two",
        "least_tokens",
        "dynamo_cost",
        "llm_d",
        "prefix_hash",
    ] = "kv_prefix"
    ranks: Literal["adp", "least_tokens", "round_robin"] = "adp"  # among the ranks of a group that steps together
    # Which decode worker gets the KV of a prefill worker. strict:LABEL: only one with the same value of this label.
    pairing: Pairing = "cost"
    # A prompt with at least this many uncached tokens is prefilled remotely. Default: predicted times decide.
    remote_prefill_min_tokens: Count | None = None
    # Where remote prefill is better and cannot be had: prefill on the decode worker, or answer 503 with `Retry-After`.
    fallback: Literal["local", "refuse"] = "local"
    # To a job that no worker claims for this long `fallback` applies. Default: 15 times slo.ttft_s, at least 15 s.
    claim_timeout_s: Seconds | None = None
    # The engine whose first token the client gets after a remote prefill. `prefill` is sent earlier, and only where
    # decode would sample the same token.
    first_token: Literal["prefill", "decode"] = "prefill"
    placement_timeout_s: Seconds = 60.0  # a request waits at most this long for a decode worker


class RatioConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whether the fleet moves workers between the roles by itself. It never changes their total number."""

    mode: Literal["off", "auto"] = "auto"
    min_prefill: Workers = 0  # 0: decode workers may prefill everything
    min_decode: SomeWorkers = 1


class ScaleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whether the launcher changes the total number of workers, within the limits that are given."""

    min_workers: SomeWorkers | None = None
    max_workers: SomeWorkers | None = None
    # The share of requests that should meet slo.ttft_s and slo.tpot_s.
    attainment: Share = 0.95
    # Workers are added when fewer met them over this time; one is removed when nearly all did, over ten times as long.
    grow_after_s: Seconds = 60.0

    @property
    def shrink_after_s(self) -> float:
        return 10 * self.grow_after_s


class KVConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    transfer: Literal["auto", "chunk", "layer", "whole"] = "auto"
    transfer_timeout_s: Seconds = 30.0  # decode computes a prompt itself after this long without news of its prefill
    verify: bool = False  # compare checksums of the blocks at both ends after every transfer: slow, for finding faults
    backends: dict[Name, dict[Name, str | int]] = {}  # of NIXL, and their parameters: {UCX: {num_workers: 2}}
    fetch: Literal["off", "auto"] = "auto"  # auto: a worker that prefills fetches what another has cached
    host_tier_bytes: BytesOrNone = 0  # of host memory for each rank of a worker, for KV that its device evicts


class SimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The simulated engine's times. Its sizes are vLLM's engine arguments (`orchestrator.config.simulated`)."""

    step_base_ms: Amount = 2.0
    prefill_us_per_token: Amount = 20.0
    decode_us_per_seq: Amount = 20.0
    link_gb_per_s: Factor = 10.0  # of KV of 128 KiB a token
    speed: Factor = 1.0  # 2 runs twice as fast as the times above


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Text  # "demo", a folder, or a Hugging Face name
    served_model_name: Text | None = None
    namespace: Name = "default"
    engine: Literal["vllm", "sim"] = "vllm"
    # The Python of workers and frontends on every host; default: the launcher's own. A rollout to another virtual
    # environment rolls its software out.
    python: Text | None = None
    idle_after_s: Seconds | None = None  # without a request its workers end; the next one brings them back
    cold_start_s: Seconds = 300.0  # for so long requests wait for workers that come back
    redis: RedisConfig = RedisConfig()
    frontend: FrontendConfig = FrontendConfig()
    workers: WorkersConfig = WorkersConfig()
    routing: RoutingConfig = RoutingConfig()
    slo: SLOConfig = SLOConfig()
    ratio: RatioConfig = RatioConfig()
    scale: ScaleConfig = ScaleConfig()
    kv: KVConfig = KVConfig()
    sim: SimConfig = SimConfig()
    launcher: LauncherConfig = LauncherConfig()
    logging: LoggingConfig = LoggingConfig()
    security: SecurityConfig = SecurityConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def name_served(self) -> str:
        """What clients call the model."""
        return self.served_model_name or Path(self.model).name


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply `a.b=value` overrides (values are YAML). Raises ConfigError."""
    return parse_config(overridden(read_tree(path), overrides or []))


def read_tree(path: Path) -> dict[str, Any]:
    """The content of a YAML file, not validated. Raises ConfigError."""
    try:
        text = read_plain_file(path, CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name an existing YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, got byte {error.object[error.start]:#04x}") from None
    try:
        tree = load_yaml(text)
    except NotYaml as error:
        line = f", line {error.line}" if error.line else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {kind_of(tree)}")
    return tree


UNKNOWN = object()


def leaves(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree by their names, as `a.b`."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def value_at(tree: Any, key: str) -> Any:
    """What a tree has at `a.b`; `UNKNOWN` where it has nothing."""
    rest: str | None = key
    while rest is not None:
        if not isinstance(tree, Mapping):
            return UNKNOWN
        name, rest = _split(tree, rest)
        if name not in tree:
            return UNKNOWN
        tree = tree[name]
    return tree


def _split(tree: Mapping[str, Any], key: str) -> tuple[str, str | None]:
    """The first name of `a.b`, and the rest, None after the last. One that is there may have dots, as a model's may."""
    there = (name for name in map(str, tree) if f"{key}.".startswith(f"{name}."))
    name = max(there, key=len, default=key.partition(".")[0])
    return name, key[len(name) + 1 :] if len(name) < len(key) else None


def overridden(tree: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The tree, changed in place by `a.b=value`. Raises ConfigError."""
    for override in overrides:
        _apply(tree, override)
    return tree


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a tree and return it as a Config. Raises ConfigError."""
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), tree, Config)) from None
    if (why := find_unserializable(tree)) is not None:
        raise ConfigError(why)
    for name in {**config.workers.env, **config.workers.prefill.env, **config.workers.decode.env}:
        if not name or "=" in name:
            raise ConfigError(f"workers.env: expected names of variables, got {name!r}")
    for name in config.slo.classes:
        check_name("slo.classes", name)
    hosts = {"frontend.host": config.frontend.host, "workers.advertise": config.workers.advertise}
    if config.workers.bind != "auto":
        hosts["workers.bind"] = config.workers.bind
    if (why := find_wrong_address(config.redis.url, hosts)) is not None:
        raise ConfigError(why)
    if config.launcher.kind == "ray" and config.redis.url == "embedded":
        raise ConfigError(
            "redis.url: launcher.kind: ray needs a Redis that every node reaches, got 'embedded'; start one and name it"
        )
    if config.workers.decode.replicas == 0:
        raise ConfigError("workers.decode.replicas: expected an integer >= 1 (decode workers answer requests), got 0")
    ratio, scale = config.ratio, config.scale
    refuses = config.routing.fallback == "refuse" and ratio.mode == "auto"
    for key, value, lower, least in (
        ("ratio.min_prefill", ratio.min_prefill, "what routing.fallback: refuse needs", 1 if refuses else None),
        ("scale.max_workers", scale.max_workers, "scale.min_workers", scale.min_workers),
    ):
        if value is not None and least is not None and value < least:
            raise ConfigError(f"{key}: expected at least {lower} ({least:g}), got {value:g}")
    check_mesh(config, config.workers.bind)
    port_range(config)
    return config


def port_range(config: Config) -> range | None:
    """The ports that workers may listen at; None for any. Raises ConfigError."""
    if config.workers.ports is None:
        return None
    first, last = (int(port) for port in config.workers.ports.split("-"))
    if not 0 < first <= last < 65536:
        raise ConfigError(f"workers.ports: expected FIRST-LAST from 1 to 65535, got {config.workers.ports!r}")
    return range(first, last + 1)


def check_mesh(config: Config, host: str) -> None:
    """Raises ConfigError for a worker on a network that would have no keys, unless security.trust_network is set."""
    security = config.security
    if security.mesh == "none" and not security.trust_network and not is_loopback(host):
        raise ConfigError(
            f"security.mesh: none lets whoever reaches {host} use the workers; remove it, or set "
            "security.trust_network: true where nobody else is on that network"
        )


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sign, value = override.partition("=")
    if not sign or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected a.b=value")
    name, rest = _split(tree, key)
    while rest:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a section")
        name, rest = _split(tree, rest)
    try:
        tree[name] = load_yaml(value, typed=True)
    except NotYaml as error:
        why = f"{value!r} is not a YAML value ({error}); text is written as --set '{key}=\"...\"'"
        raise ConfigError(f"--set {override}: {why}") from None
