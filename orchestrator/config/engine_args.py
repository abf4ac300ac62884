"""Engine arguments and environment of each role, the names that this vLLM knows, and their command-line spelling.

The names are read from vLLM's source without importing it, which would take seconds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from connectors.unsupported import unsupported, unsupported_backends
from orchestrator.config.access import API_KEY, OPERATOR_KEY
from orchestrator.config.explain import missing
from orchestrator.config.model import read_model_config
from orchestrator.config.server_args import OF_FLEET, check_server_args
from orchestrator.config.settings import Config, ConfigError, PoolConfig
from orchestrator.config.simulated import simulated
from orchestrator.config.values import KEY_IS, is_key
from orchestrator.types import Role

# Where vLLM defines the arguments, relative to its package, and the dataclasses that hold them.
_ENGINE_FILE, _ENGINE_CLASSES = "engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")
_SERVER_FILE = "entrypoints/common/cli_args.py"
_SERVER_FILE_0_32 = "entrypoints/launchers/cli_args.py"
_SERVER_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
_GROUP = "data_parallel_size"
_UNPICKLES, _SAME_IDS = "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
_TRANSPORTS, _LOG_LEVEL = "UCX_TLS", "PD_LOG_LEVEL"
_TENSOR, _STAGES, _SHARDS = "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"
# What the workers of a role cannot have, and the mend.
_OF_OTHER_ROLE = {
    Role.DECODE: (
        _STAGES,
        "split a decode worker by tensor_parallel_size, and set stages in workers.prefill.engine_args",
    ),
    Role.PREFILL: (_SHARDS, "a prefill worker sends whole prompts; set it in workers.decode.engine_args"),
}
# How ranks share a model; and what says that another file than its config.json describes it.
_EXPERTS = "enable_expert_parallel"
_SHARES = {_EXPERTS, _TENSOR, _STAGES}
_OTHER_CONFIGS = {"hf_overrides", "hf_config_path"}
# How many experts a model's config.json says that a layer has. EPLB adds copies of some.
_EXPERT_COUNTS, _ADDS_EXPERTS = (
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "enable_eplb",
)
# Where a model's config.json has the sizes of its text part.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
# An engine's KV blocks can be read by another engine only when these agree.
_FOR_KV = ("dtype", "kv_cache_dtype", "block_size", "max_model_len", "quantization", "revision")
# An answer has its first token from either, and goes on at any: so what is sampled, and what is said of it, must agree.
_FOR_ANSWERS = ("logits_processors", "logprobs_mode", "use_fp64_gumbel", "watermark_config")


def pool(config: Config, role: Role) -> PoolConfig:
    """The section of the configuration that describes the workers of this role."""
    return config.workers.prefill if role is Role.PREFILL else config.workers.decode


def engine_args(config: Config, role: Role) -> dict[str, Any]:
    """vLLM's engine arguments for the workers of this role; the role's own replace the common ones."""
    return {**config.workers.engine_args, **pool(config, role).engine_args}


def _key(config: Config, role: Role, name: str) -> str:
    """Where it is set which value of this argument the workers of this role have."""
    own = f"{role.value}." if name in pool(config, role).engine_args else ""
    return f"workers.{own}engine_args.{name}"


def _difference(config: Config, name: str, default: object = None) -> str | None:
    """The key of an argument that the two roles have with different values, and these; None where they are equal."""
    role = Role.PREFILL if name in config.workers.prefill.engine_args else Role.DECODE
    its, others = (engine_args(config, each).get(name, default) for each in (role, role.other))
    if its == others:
        return None
    return f"{_key(config, role, name)}: {its!r} for {role.value}, and {others!r} for {role.other.value}"


def environment(config: Config, role: Role) -> dict[str, str]:
    """Environment variables for the workers of this role; an engine reads many of them when it is imported."""
    return {**config.workers.env, **pool(config, role).env}


def check_installed(config: Config) -> None:
    """Raises ConfigError where frontends, and the workers of this engine, lack vLLM on this host."""
    if config.python is None and importlib.util.find_spec("vllm") is None:  # another interpreter has its own packages
        raise ConfigError(missing("a fleet", "vLLM", "cpu") + ", or [cuda] with GPUs")


def check_environment(changes: Mapping[str, str] | None = None) -> None:
    """Check this process's environment, with `changes`. Raises ConfigError where vLLM would unpickle messages, which
    could then run code, or give two requests one id; for a key that no client can send, and for no level of logs."""
    env = {**os.environ, **(changes or {})}
    if (level := env.get(_LOG_LEVEL, "INFO")).upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"{_LOG_LEVEL}: expected DEBUG, INFO, WARNING or ERROR, got {level!r}; set one, or unset it")
    if env.get(_UNPICKLES, "0") not in ("", "0"):
        raise ConfigError(f"{_UNPICKLES}: messages between hosts are never unpickled; unset it, and in workers.env")
    if os.environ.get(_SAME_IDS, "0") not in ("", "0"):
        raise ConfigError(f"{_SAME_IDS}: of two requests with one x-request-id one would never be answered; unset it")
    for name in (OPERATOR_KEY, API_KEY):
        if not is_key(os.environ.get(name, "")):
            raise ConfigError(f"{name}: expected text {KEY_IS}; see whether it ends with a line break")


def check_workers_environment(config: Config, role: Role) -> None:
    """As `check_environment`, for this role's workers: engines need TCP too, by which they tell that one has ended."""
    check_environment(changes := environment(config, role))
    transports = {**os.environ, **changes}.get(_TRANSPORTS, "")
    named = {each.removeprefix("\\") for each in transports.lstrip("^").split(",")}  # UCX takes spaces as part of names
    if config.engine == "vllm" and transports not in ("", "all") and transports.startswith("^") == ("tcp" in named):
        raise ConfigError(
            f"{_TRANSPORTS}: expected tcp among them, also where KV goes over others, got {transports!r}: by its "
            "connections an engine is cut off, and known to have ended; add it, here or in workers.env"
        )


def ranks(config: Config, role: Role) -> int:
    """How many GPUs, or CPU processes, one worker of this role has. Raises ConfigError."""
    return _size(config, role, _TENSOR) * _size(config, role, _STAGES)


def group_size(config: Config, role: Role) -> int:
    """How many workers a unit of this role has: the ranks of a data-parallel group. Raises ConfigError."""
    return _size(config, role, _GROUP)


def unit_ranks(config: Config, role: Role) -> int:
    """How many GPUs, or CPU processes, one unit of this role has. Raises ConfigError."""
    return ranks(config, role) * group_size(config, role)


def _size(config: Config, role: Role, name: str) -> int:
    size = engine_args(config, role).get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{_key(config, role, name)}: expected an integer >= 1, got {size!r}")
    return size


def unit_size(config: Config) -> int:
    """How many workers change roles together. Raises ConfigError where units of the two roles differ in it."""
    sizes = [group_size(config, role) for role in Role]
    if (difference := _difference(config, _GROUP, 1)) is not None:
        raise ConfigError(
            f"{difference}: ratio.mode auto changes the roles of groups, which keep their size; set it once, in "
            "workers.engine_args, or ratio.mode to off"
        )
    return sizes[0]


def _check_groups(config: Config) -> None:
    """Raises ConfigError for a data-parallel group that this fleet cannot have."""
    if config.ratio.mode == "auto":
        unit_size(config)
    for role in Role:
        size = group_size(config, role) if pool(config, role).replicas else 1
        if size > 1 and config.launcher.kind == "ray" and not config.security.trust_network:
            raise ConfigError(
                f"{_key(config, role, _GROUP)}: {size}: on a Ray cluster a group's ranks may be on several nodes, and "
                "whoever reaches vLLM's ports between them can run programs there; set security.trust_network: true "
                "where nobody else is on that network, or this to 1"
            )


def _check_sizes(config: Config) -> None:
    """Raises ConfigError for ranks that the model, by its config.json where that is here, cannot be shared by."""
    for role in Role:
        arguments = engine_args(config, role)
        if not pool(config, role).replicas or not arguments.keys() & _SHARES or arguments.keys() & _OTHER_CONFIGS:
            continue
        unit_ranks(config, role)  # each is a number
        for name, why in _misfits(read_model_config(config.model), arguments):
            raise ConfigError(f"{_key(config, role, name)}: {why}")


def _misfits(model: Mapping[str, Any], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments that do not fit a model, and why. None for a model that is not known."""
    text = next((part for key in _TEXT_PARTS if isinstance(part := model.get(key), dict)), model)
    if model and arguments.get(_EXPERTS) and not _has_experts(model):
        yield _EXPERTS, "this model has no experts; remove it"
    heads, ranks, size = text.get("num_attention_heads"), arguments.get(_TENSOR, 1), arguments.get(_GROUP, 1)
    experts = next((text[key] for key in _EXPERT_COUNTS if isinstance(text.get(key), int)), 0)
    if arguments.get(_EXPERTS) and not arguments.get(_ADDS_EXPERTS) and 0 < experts < size * ranks:
        mend = f"use at most {experts // ranks}" if ranks <= experts else f"lower {_TENSOR}"
        yield (
            _GROUP,
            f"{size} x {ranks} ranks cannot share this model's {experts} experts; {mend}, or remove {_EXPERTS}",
        )
    if isinstance(heads, int) and isinstance(ranks, int) and ranks > 0 and heads % ranks:
        fitting = ", ".join(str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0)
        yield _TENSOR, f"{ranks} ranks cannot share this model's {heads} attention heads; use {fitting}"
    layers, stages = text.get("num_hidden_layers"), arguments.get(_STAGES, 1)
    if isinstance(layers, int) and isinstance(stages, int) and stages > layers:
        yield _STAGES, f"this model's {layers} layers are too few for {stages} stages; use at most {layers}"


def _has_experts(part: object) -> bool:
    """Whether any part of a model's config.json counts experts."""
    if isinstance(part, list):
        return any(map(_has_experts, part))
    if not isinstance(part, dict):
        return False
    counts = (
        value[0] if isinstance(value, list) and value else value for key, value in part.items() if "expert" in key
    )
    return any(isinstance(count, int) and count > 0 for count in counts) or any(map(_has_experts, part.values()))


def _check_role(config: Config, arguments: Mapping[str, Any], role: Role) -> None:
    """Raises ConfigError for an engine that cannot send KV, or receive it. Whole prompts are sent, into one stage."""
    name, mend = _OF_OTHER_ROLE[role]
    if (size := arguments.get(name, 1)) not in (1, None):
        raise ConfigError(f"{_key(config, role, name)}: expected 1, got {size!r}; {mend}")


def to_command_line(
    arguments: Mapping[str, Any], spread: Collection[str] = (), repeated: Collection[str] = ()
) -> list[str]:
    """{enforce_eager: true, max_model_len: 4096} as `--enforce-eager --max-model-len 4096`.

    The items of a list follow the option where it is in `spread`, and each its own option where it is in `repeated`.
    Other lists, and sections, are JSON.
    """
    line: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            line.append(flag)
        elif value is False:
            line.append(flag.replace("--", "--no-", 1))
        elif name in spread and isinstance(value, list):
            line += [flag, *map(_text, value)]
        elif name in repeated and isinstance(value, list):
            line += [part for item in value for part in (flag, _text(item))]
        elif value is not None:
            line += [flag, _text(value)]
    return line


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def check_engine_args(config: Config) -> None:
    """Raises ConfigError for everything about the engines that the configuration alone decides: a name that none knows,
    a setting with which KV would be lost, and a value that the two roles must share but do not."""
    if config.engine == "sim":
        for role in Role:
            simulated(config.sim, engine_args(config, role))
        if config.kv.host_tier_bytes:
            raise ConfigError("kv.host_tier_bytes: the simulated engine has no host memory for KV; set it to 0")
    workers = config.workers
    sections = {
        "workers.engine_args": workers.engine_args,
        "workers.prefill.engine_args": workers.prefill.engine_args,
        "workers.decode.engine_args": workers.decode.engine_args,
    }
    for section, arguments in sections.items():
        check_arguments(config, arguments, section)
    for role in Role:
        check_workers_environment(config, role)
        if pool(config, role).replicas:
            check_arguments(config, engine_args(config, role), "workers.engine_args", role)
    _check_groups(config)
    if config.engine == "vllm":
        _check_sizes(config)
    check_server_args(config)
    _check_names("frontend.server_args", config.frontend.server_args, _engine_names() | _server_names())
    if workers.prefill.replicas and workers.decode.replicas:
        stages, shards = engine_args(config, Role.PREFILL).get(_STAGES), engine_args(config, Role.DECODE).get(_SHARDS)
        if stages not in (1, None) and shards not in (1, None):
            raise ConfigError(
                f"{_key(config, Role.DECODE, _SHARDS)}: {shards} ranks cannot share prompts of {stages} stages: "
                f"set {_SHARDS} or workers.prefill.engine_args.{_STAGES} to 1"
            )
        for name in _FOR_KV + _FOR_ANSWERS:
            if (difference := _difference(config, name)) is not None:
                raise ConfigError(f"{difference}; set it once, in workers.engine_args")


def check_arguments(config: Config, arguments: Mapping[str, Any], section: str, role: Role | None = None) -> None:
    """Raises ConfigError for engine arguments with which no worker, or none that begins in `role`, can serve."""
    for name in arguments:
        if name in OF_FLEET:
            raise ConfigError(f"{section}.{name}: is set by the fleet; {OF_FLEET[name]} instead")
        if name.startswith("data_parallel_") and name != _GROUP:
            raise ConfigError(f"{section}.{name}: is set by the fleet; set {_GROUP} alone")
    _check_names(section, arguments, _engine_names())
    kv = config.kv
    found = unsupported(arguments, kv.transfer, kv.host_tier_bytes, kv.verify) or unsupported_backends(kv.backends)
    if found is not None:
        key, why = found
        raise ConfigError(f"{key if key.startswith('kv.') else f'{section}.{key}'}: {why}")
    if role is not None:
        _check_role(config, arguments, role)


def _check_names(section: str, arguments: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in arguments:
        if known and name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, 1)
            mend = f"did you mean {close[0]}?" if close else "see `vllm serve --help` for the known ones"
            raise ConfigError(f"{section}.{name}: not an argument of this vLLM; {mend}")


def _engine_names() -> frozenset[str]:
    return _names(_ENGINE_FILE, _ENGINE_CLASSES)


def _server_names() -> frozenset[str]:
    file = next((file for file in (_SERVER_FILE, _SERVER_FILE_0_32) if _names(file, _SERVER_CLASSES)), _SERVER_FILE)
    fields = _names(file, _SERVER_CLASSES)
    # Some options have no field, so the options that the parsers spell out are known too.
    return fields and fields | _names(file, ()) | _names(_ENGINE_FILE, ())


@functools.cache
def _names(file: str, classes: tuple[str, ...]) -> frozenset[str]:
    """The fields of the classes, or without classes every "--option" in the file; empty without vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    try:
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    if not classes:
        values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return frozenset(v[2:].replace("-", "_") for v in values if isinstance(v, str) and v.startswith("--"))
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    return frozenset(
        field.target.id
        for body in bodies
        for field in body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    )
