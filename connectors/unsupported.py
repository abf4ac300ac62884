"""Settings with which KV would be lost or wrong, whatever the model. Imports no vLLM: commands ask before it loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTEXT = "KV can be pushed from and to whole sequences only, expected 1, got {}"
_UNTRIED = (
    "what a rank gets of a prompt was not compared on GPUs yet, expected 1, got {}; set kv.verify: true to have each "
    "transfer compared"
)
_EXPERTS = "the experts of a prompt are not pushed with its KV; remove it"
_OFFLOADS = "vLLM would put its own KV connector in place of the fleet's; remove it, and set kv.host_tier_bytes"
_WAITS = "an engine would end its requests, and wait for orders that nobody gives; remove it: a group starts again"
_ENCODES = "the engines that compute a prompt encode its media, and none is there for that alone; remove it"
# vLLM's engine arguments.
_SHARED, _PREFILL_CONTEXT = "decode_context_parallel_size", "prefill_context_parallel_size"
_UNSET = {
    "kv_offloading_size": _OFFLOADS,
    "kv_offloading_backend": _OFFLOADS,
    "enable_return_routed_experts": _EXPERTS,
    "aux_output_config.enable_return_routed_experts": _EXPERTS,
    "ec_transfer_config": _ENCODES,
    "mm_encoder_only": _ENCODES,
    "enable_elastic_ep": "a group keeps its ranks until it starts again; remove it, and scale the fleet by groups",
    "enable_fault_tolerance": _WAITS,
    "fault_tolerance_config": _WAITS,
    "attention_config.hisparse_config": "KV in host memory cannot be pushed; remove it",
    "enable_sleep_mode": (
        "sleep would free KV memory that other engines write to; remove it, and scale the fleet instead"
    ),
}
# Which of vLLM's classes have what KV transfer needs of them; unset, vLLM chooses among these.
_SCHEDULER = "vllm.v1.core.sched.{}scheduler.{}Scheduler"
_ONE_OF = {
    "distributed_executor_backend": (
        ("mp", "uni"),
        "its ranks would be processes that the worker does not start, cannot watch and does not set up",
    ),
    "scheduler_cls": (
        (_SCHEDULER.format("", ""), _SCHEDULER.format("async_", "Async")),
        "another one may reuse blocks to which KV is sent",
    ),
}
# NIXL's backends of storage.
_STORAGE = {"AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX"}
_ERRORS, _PEER = "ucx_error_handling_mode", "peer"


def unsupported_backends(backends: Mapping[str, Mapping[str, object]]) -> tuple[str, str] | None:
    """The first key under kv.backends that cannot be served with, and why, with the mend."""
    for name, parameters in backends.items():
        key = f"kv.backends.{name}"
        if name in _STORAGE:
            return key, "it has no notifications, by which engines tell each other what has landed; use UCX"
        if name != "UCX":
            return key, (
                "WRITEs through it cannot be cut off here, so a late one could land in the blocks of another request; "
                "use UCX"
            )
        if parameters.get(_ERRORS, _PEER) != _PEER:
            got = parameters[_ERRORS]
            return f"{key}.{_ERRORS}", f"expected {_PEER}, got {got}: broken connections would stay unnoticed"
    return None


def unsupported(
    arguments: Mapping[str, Any], transfer: str, host_tier_bytes: int, verify: bool
) -> tuple[str, str] | None:
    """The first engine argument, or key of the configuration, that cannot be served with, and why, with the mend.

    `transfer`, `host_tier_bytes` and `verify`: those of kv. Values of another type than vLLM's are left for vLLM to
    refuse.
    """
    if _above_one(arguments, "nnodes"):
        nodes = arguments["nnodes"]
        return "nnodes", f"a worker is on one host, expected 1, got {nodes}; data_parallel_size spans several"
    if _above_one(arguments, _PREFILL_CONTEXT):
        return _PREFILL_CONTEXT, _CONTEXT.format(arguments[_PREFILL_CONTEXT])
    if _above_one(arguments, _SHARED) and not verify:
        return _SHARED, _UNTRIED.format(arguments[_SHARED])
    if _above_one(arguments, _SHARED) and host_tier_bytes:
        return "kv.host_tier_bytes", f"{_SHARED} gives each rank other blocks of a prompt; set it to 0"
    for name, why in _UNSET.items():
        section, _, part = name.partition(".")
        value = arguments.get(section)
        if part:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, False):
            return name, why
    for name, (known, why) in _ONE_OF.items():
        if (value := arguments.get(name)) is not None and value not in known:
            return name, f"{why}, expected {' or '.join(known)}, got {value!r}; remove it"
    if host_tier_bytes and arguments.get("enable_prefix_caching") is False:
        return (
            "kv.host_tier_bytes",
            "it keeps what a prefix cache evicts, and there is none; set it to 0",
        )
    if host_tier_bytes and _above_one(arguments, "pipeline_parallel_size"):
        stages = arguments["pipeline_parallel_size"]
        return (
            "kv.host_tier_bytes",
            f"the caches of {stages} pipeline stages are of unequal size; set it to 0",
        )
    if transfer == "layer" and (arguments.get("enable_dbo") or _above_one(arguments, "ubatch_size")):
        return "kv.transfer", "by layer it would ship the blocks of both batches of enable_dbo at each; choose auto"
    return None


def _above_one(arguments: Mapping[str, Any], name: str) -> bool:
    value = arguments.get(name)
    return isinstance(value, int) and value > 1
