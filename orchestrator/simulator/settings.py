"""The settings of a simulation, beside its load: the fleet, its times, and the configuration of its router.

Other projects' routers are modelled as well (`field:NAME`): they choose a prefill and a decode worker at arrival by the
same policy, and have no global queue. Two of them prefill some prompts on the decode worker (`Stack.bypass`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from orchestrator.config.settings import Config, ConfigError, SLOConfig
from orchestrator.policy.choices.named import POLICY_NAMES
from orchestrator.simulator.engine.profile import Profile


class Stack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A configuration and the way prefills are dispatched: prefill workers claim them from one queue, or the router
    pushes them at arrival to the prefill worker that the decode choice picks."""

    name: str
    config: Config
    dispatch: Literal["queue", "push"] = "queue"
    prefixes: bool = True  # the router knows which worker has a prefix cached
    bypass: str = ""  # with "push": the rule of `choices.named.BYPASSES` that keeps prompts on the decode worker


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about one run but its load. Times in seconds."""

    prefill: int
    decode: int
    profile: Profile
    stack: Stack
    seed: int = 0
    racks: int = 1
    between_racks: float = 1.0  # times as long as over a worker's own link KV takes from one rack to another
    slo: SLOConfig | None = None  # objectives; default: the profile's


# The defaults of every key.
SHIPPED = Config(model="simulated")
FIELD = "field:"
CONDITIONAL = "field:dynamo_conditional"  # `dynamo_cost` with Dynamo's conditional disaggregation
# Our stack with a few keys changed, to measure what each is worth.
_VARIANTS: dict[str, dict[str, Any]] = {"ours": {}, "ours:fixed": {"ratio": {"mode": "off"}}}
# The `field:` choices that know which worker has a prefix cached.
_PREFIX_AWARE = {"dynamo_cost", "kv_prefix", "llm_d"}
_BYPASS = {CONDITIONAL: "dynamo", FIELD + "llm_d": "llm_d"}


def stack_names() -> list[str]:
    return [*_VARIANTS, *POLICY_NAMES, *(FIELD + name for name in POLICY_NAMES), CONDITIONAL]


def stack(name: str, config: Config = SHIPPED) -> Stack:
    """The stack of a name. `ours` is the configuration as it is. The name of a decode choice is the configuration with
    that choice and a fixed ratio. `field:NAME` works as routers of other projects do.

    Raises ConfigError for an unknown name.
    """
    if name in _VARIANTS:
        return Stack(name=name, config=changed(config, _VARIANTS[name]))
    choice = "dynamo_cost" if name == CONDITIONAL else name.removeprefix(FIELD)
    if choice not in POLICY_NAMES:
        raise ConfigError(f"policy: expected one of {', '.join(stack_names())}, got {name!r}")
    fixed = changed(config, {"ratio": {"mode": "off"}, "routing": {"decode_choice": choice}})
    if not name.startswith(FIELD):
        return Stack(name=name, config=fixed)
    field = changed(fixed, {"slo": {"admission": "off"}})
    prefixes, bypass = choice in _PREFIX_AWARE, _BYPASS.get(name, "")
    return Stack(name=name, config=field, dispatch="push", prefixes=prefixes, bypass=bypass)


def changed(config: Config, sections: dict[str, dict[str, Any]]) -> Config:
    """The configuration with these keys replaced, by section."""
    replaced = {name: msgspec.structs.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return msgspec.structs.replace(config, **replaced)
