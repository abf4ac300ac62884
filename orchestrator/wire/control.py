"""The control calls that workers accept: one row per engine-core method that vLLM's server may call.

The methods are those of vLLM's engine-core client (vllm/v1/engine/core_client.py, 0.32.0) without their `_async`.
Workers refuse all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec


def _intersection(results: Sequence[Any]) -> set[Any]:
    return set.intersection(*(set(result) for result in results))


def _first(results: Sequence[Any]) -> Any:
    return results[0]


class ControlMethod(msgspec.Struct, frozen=True):
    """Called on every connected worker; it fails if one of them fails. `combine` makes one answer of theirs. `undo`
    takes the id of the method's first argument."""

    of_one: bool = False  # called on any worker: all give the same answer
    combine: Callable[[Sequence[Any]], Any] = _first
    undo: str | None = None  # called on the workers that succeeded when another one failed
    alike: bool = False  # the call fails where workers give different answers
    made_up_for: bool = False  # a worker that is lost during the call gets what it missed when it is back: no failure
    # Carried out twice by a worker it does what it does once, also after calls that came between, and answers the same:
    # it is sent again where the answer may be lost. Of `set_weight_version` the later one would count, and a reset or a
    # profile that is asked for again is another one.
    repeatable: bool = False


METHODS: dict[str, ControlMethod] = {
    # Carried out by the worker, with the fields of a PauseState: see orchestrator/fleet/pause.py.
    "set_pause": ControlMethod(made_up_for=True, repeatable=True),
    # Carried out by the worker's engine interface: name and path of a LoRA adapter, to what its files are.
    "fingerprint_lora": ControlMethod(alike=True, made_up_for=True, repeatable=True),
    # Carried out by its engine. Requests bring the adapter that they need, by its path.
    "add_lora": ControlMethod(combine=all, undo="remove_lora", made_up_for=True, repeatable=True),
    "remove_lora": ControlMethod(combine=all, made_up_for=True),
    "is_scheduler_paused": ControlMethod(combine=all, repeatable=True),
    "is_sleeping": ControlMethod(combine=all, repeatable=True),
    "list_loras": ControlMethod(combine=_intersection, repeatable=True),
    "pin_lora": ControlMethod(combine=all),
    "reset_prefix_cache": ControlMethod(combine=all),
    "reset_mm_cache": ControlMethod(),
    "reset_encoder_cache": ControlMethod(),
    "profile": ControlMethod(),
    "set_weight_version": ControlMethod(),
    "get_weight_version": ControlMethod(of_one=True, repeatable=True),
    "compute_weight_checksums": ControlMethod(of_one=True, repeatable=True),
}
# The methods that a worker calls on its engine: the same ones, with these two in place of `set_pause`.
ENGINE_METHODS = (METHODS.keys() - {"set_pause"}) | {"pause_scheduler", "resume_scheduler"}

_KV_MEMORY = "the engines' KV memory stays registered for transfers"
_ONE_ENGINE = "its arguments name the ranks of one engine"
REFUSED: dict[str, str] = {
    "sleep": _KV_MEMORY,
    "wake_up": _KV_MEMORY,
    "release_kv_cache_memory": _KV_MEMORY,
    "collective_rpc": _ONE_ENGINE,
    "save_sharded_state": _ONE_ENGINE,
    "execute_dummy_batch": _ONE_ENGINE,
    "prepare_elastic_ep": "scale the fleet with `orchestrator scale`",
    "commit_elastic_ep": "scale the fleet with `orchestrator scale`",
    "abort_external_elastic_ep": "scale the fleet with `orchestrator scale`",
    "get_external_elastic_ep_status": "scale the fleet with `orchestrator scale`",
    "handle_fault": "the fleet replaces workers that fail",
    "get_status": "`/fleet` shows the workers",
}
