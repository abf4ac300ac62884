"""What is simulated beside the load: a fleet, its times, and the stack of policies that its router uses.

A stack names a policy for each of the router's decisions. A decode choice alone is one decision. The field's routers
are modelled whole as well (`field:NAME`): they choose a prefill and a decode worker at arrival by the same policy, and
know neither local prefill nor a global queue.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from orchestrator.config.settings import RatioConfig, SLOConfig
from orchestrator.policy.decode_choice import POLICY_NAMES
from orchestrator.simulator.profile import Profile


class FleetError(ValueError):
    """An impossible fleet or setting."""


class Stack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    decode_choice: str = "kv_prefix"
    # Prefill work is claimed by free workers from one queue, or pushed to the worker that `decode_choice` picks.
    dispatch: Literal["queue", "push"] = "queue"
    placement: Literal["remote", "threshold", "cost"] = "cost"
    weight: float = 1.0  # of the length in the order; 0 is first come, first served
    affinity: float = 1.0  # of claims to cached prefixes; 0 claims in order
    window: int = 16  # jobs at the head of the queue that a claim chooses from
    prefix_index: bool = True
    admission: Literal["off", "reject", "queue"] = "off"
    ratio: RatioConfig | None = None  # how roles change; None: never


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run, but for its load. Times in seconds."""

    prefill: int
    decode: int
    profile: Profile
    stack: Stack
    seed: int = 0
    report_age_s: float = 0.1  # load reports are this old at most, and half of it on average
    transfer: Literal["chunk", "whole"] = "whole"
    first_token: Literal["prefill", "decode"] = "decode"  # which worker's token a client gets first
    claim_batches: float = 2.0
    slo: SLOConfig | None = None  # default: the profile's
    itl_weight: float = 0.02
    max_waiting_per_worker: int = 128
    remote_prefill_min_tokens: int = 256
    max_queued_prefill_tokens: int = 1 << 60


FIELD = "field:"
_OURS = Stack(
    name="ours",
    weight=7.0,
    admission="queue",
    ratio=RatioConfig(mode="auto", cool_down_s=30.0, gain=0.1),
)
# What the router does with the configuration's defaults.
_DEFAULT = Stack(name="default", placement="threshold", window=32)
_NAMED = {
    "default": _DEFAULT,
    "ours": _OURS,
    "ours:fixed": msgspec.structs.replace(_OURS, name="ours:fixed", ratio=None),
    "ours:fcfs": Stack(name="ours:fcfs", weight=0.0),
    "ours:reject": msgspec.structs.replace(_OURS, name="ours:reject", admission="reject"),
}
# What knows of prefixes in the field; the others route blind.
_PREFIX_AWARE = {"dynamo_cost", "kv_prefix"}


def stack_names() -> list[str]:
    return [*_NAMED, *POLICY_NAMES, *(FIELD + name for name in POLICY_NAMES)]


def stack(name: str) -> Stack:
    """`ours` and its variants; a decode choice's name for ours with that choice; `field:NAME` for the field's way.

    Raises ValueError.
    """
    if name in _NAMED:
        return _NAMED[name]
    if name in POLICY_NAMES:
        return msgspec.structs.replace(_NAMED["ours:fixed"], name=name, decode_choice=name)
    choice = name.removeprefix(FIELD)
    if name.startswith(FIELD) and choice in POLICY_NAMES:
        return Stack(
            name=name,
            decode_choice=choice,
            dispatch="push",
            placement="remote",
            affinity=0.0,
            prefix_index=choice in _PREFIX_AWARE,
        )
    raise ValueError(f"policy: expected one of {', '.join(stack_names())}, got {name!r}")
