"""What an engine must have in common with the others of its fleet, read from its configuration.

`store.registry` compares it when a worker joins, so that a difference is reported there and not at the first transfer.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import _get_speculative_compatibility_factors
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from orchestrator.config.model import name_in_fleet
from orchestrator.types import EngineIdentity
from orchestrator.wire.messages import PROTOCOL_VERSION

# Other settings that decide how KV is computed and laid out. vLLM's handshake does not compare `hf_overrides`; KV that
# a prefill worker computes without them is wrong on a decode worker with them.
_KV_SETTINGS = {
    "hf_overrides": "model_config",
    "disable_sliding_window": "model_config",
    "disable_hybrid_kv_cache_manager": "scheduler_config",
    "kv_cache_dtype_skip_layers": "cache_config",
    "mamba_cache_dtype": "cache_config",
    "mamba_ssm_cache_dtype": "cache_config",
    "mamba_cache_mode": "cache_config",
    "swa_bounded_replay": "cache_config",
}
_DIGITS = 16
# Of a file of weights, which may have hundreds of gigabytes, so many samples are read.
_SAFE, _OTHERS, _CONFIGURATION = (".safetensors",), (".bin", ".pt", ".pth", ".gguf"), ("config.json", "params.json")
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "scaler")  # vLLM loads none of these either
_SAMPLES, _SAMPLE_BYTES = 128, 4096
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function, say: it differs between processes


def identity_of(model: str, config: VllmConfig, attention_backend: str) -> EngineIdentity:
    """`model`: where this engine has it. `attention_backend`: the one that the ranks have chosen."""
    its = config.model_config
    drafts = _get_speculative_compatibility_factors(config)  # None if speculation has no KV of its own
    return EngineIdentity(
        model=name_in_fleet(model),
        dtype=str(its.dtype).removeprefix("torch."),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        block_size=config.cache_config.block_size,
        max_model_len=its.max_model_len,
        engine="vllm",
        engine_version=vllm.__version__,
        protocol=PROTOCOL_VERSION,
        messages=vllm_schema(),
        revision=getattr(its.hf_config, "_commit_hash", None) or its.revision or "",
        weights=_weights(Path(model)),
        quantization=str(its.quantization or ""),
        attention_backend=attention_backend,
        speculation=msgspec.json.encode(drafts, enc_hook=str, order="sorted").decode() if drafts is not None else "",
        kv_settings=_kv_settings(config),
        kv_copies=_kv_copies(its, config.parallel_config.tensor_parallel_size),
    )


def _weights(model: Path) -> str:
    """A short hash of the files of a model's folder, or of its one file: KV of other weights would be wrong. Empty for
    a model of a hub, whose revision is known, and for one that is not there any more."""
    files, digest = sorted(model.iterdir()) if model.is_dir() else [model], hashlib.sha256()
    kinds = _SAFE if any(file.suffix in _SAFE for file in files) else _OTHERS  # as vLLM chooses
    read = [file for file in files if file.is_file() and (file.suffix in kinds or file.name in _CONFIGURATION)]
    read = [file for file in read if not file.name.startswith(_OF_TRAINING)]
    for file in read:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode(errors="surrogatepass"))
        with file.open("rb") as opened:
            for place in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                opened.seek(place)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:_DIGITS] if read else ""


def _kv_settings(config: VllmConfig) -> str:
    """The settings that differ from vLLM's defaults, as JSON; empty if none does."""
    found = {name: getattr(getattr(config, section), name) for name, section in _KV_SETTINGS.items()}
    usual = {name: getattr(AsyncEngineArgs, name, None) for name in found}
    # None and empty values are equal, and so is false if vLLM's default is None.
    kept = {name: value for name, value in found.items() if (value or usual[name]) and value != usual[name]}
    return msgspec.json.encode(kept, enc_hook=str, order="sorted").decode() if kept else ""


def _kv_copies(model: Any, ranks: int) -> int:
    if model.use_mla:
        return 1  # every rank has all of the KV, and transfers allow for that
    return max(1, ranks // model.get_total_num_kv_heads())


def vllm_schema() -> str:
    """If it is equal for two versions of vLLM, the frontends of one can drive the engines of the other."""
    return schema(EngineCoreRequest, EngineCoreOutputs)


def schema(*messages: type) -> str:
    """A short hash of these classes and of all classes that their fields name.

    Names, order, types and defaults of all fields count: a field that a message leaves out has the receiver's default.
    """
    classes, lines = list(messages), []
    for cls in classes:  # the loop appends to this list
        fields = []
        for name, wanted, default in _fields(cls):
            fields.append(f"{name}: {wanted!r} = {default}")
            classes += [found for found in _classes(wanted) if found not in classes]
        lines.append(f"{cls.__qualname__}({', '.join(fields)})")
    text = _ADDRESS.sub("", "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _fields(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Name, type and default of each field. A class without fields yields nothing: only its name counts."""
    if issubclass(cls, enum.Enum):
        yield from ((member.name, member.value, "") for member in cls)
    elif issubclass(cls, msgspec.Struct):
        yield "array_like", cls.__struct_config__.array_like, ""
        for field in msgspec.structs.fields(cls):
            yield field.encode_name, field.type, _default(field.default, field.default_factory, msgspec.NODEFAULT)
    elif dataclasses.is_dataclass(cls):
        hints = _hints(cls)
        for one in dataclasses.fields(cls):
            yield one.name, hints[one.name], _default(one.default, one.default_factory, dataclasses.MISSING)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        hints, defaults = _hints(cls), getattr(cls, "_field_defaults", {})
        for name in cls._fields:
            yield name, hints.get(name), repr(defaults[name]) if name in defaults else ""


def _default(value: Any, factory: Any, none: Any) -> str:
    if factory is not none:
        return f"{getattr(factory, '__qualname__', factory)}()"
    return "" if value is none else repr(value)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a name that only type checkers import
        return dict(cls.__annotations__)


def _classes(wanted: Any) -> Iterator[type]:
    for part in typing.get_args(wanted):
        yield from _classes(part)
    if isinstance(wanted, type) and not typing.get_args(wanted) and any(True for _ in _fields(wanted)):
        yield wanted
