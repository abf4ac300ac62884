"""The engine seam: what an agent needs of an engine, real or simulated.

An engine knows requests by key (`types.engine_key`), one key per attempt, never reused.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import msgspec

from orchestrator.types import EngineIdentity, KVCounters, KVEndpoint, KVSource


class Phase(str, enum.Enum):
    PREFILL = "prefill"  # compute the prompt, keep and push its KV, sample one token
    DECODE = "decode"  # generate; with a KV source the prompt's KV is received, else computed here


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself once started."""

    identity: EngineIdentity
    kv: KVEndpoint
    blocks_total: int  # usable KV blocks
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    supported_tasks: tuple[str, ...] = ("generate",)


class EngineLoad(msgspec.Struct, frozen=True):
    """The engine's own view at the end of a step; counters are cumulative."""

    blocks_free: int
    running: int
    waiting: int
    step_ms: float
    kv: KVCounters = KVCounters()


class EngineRequest(msgspec.Struct, frozen=True):
    """One attempt to run. `frames` is the engine request as the frontend encoded it."""

    key: str
    phase: Phase
    frames: list[bytes]
    kv_source: KVSource | None = None
    resume_tokens: list[int] = []


class EngineOutput(Protocol):
    """One request's part of a step. Engine-native objects satisfy it; `request_id` is the key and writable."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any  # None until finished


class PrefixDelta(msgspec.Struct, frozen=True):
    """What changed in the engine's prefix cache: `cleared` first, then `removed`, then `stored`. No key is in both."""

    stored: list[int]  # keys of `policy.prefix_keys`
    removed: list[int]
    cleared: bool = False


class EngineStep(msgspec.Struct):
    """One step: outputs of any number of requests, the load after it, and what it changed in the prefix cache."""

    outputs: list[Any]  # of EngineOutput
    load: EngineLoad | None
    timestamp: float  # the engine's monotonic clock, seconds
    prefix: PrefixDelta | None = None
    prompt_tokens: int = 0  # computed in it


class EngineDead(RuntimeError):
    """The engine process ended; nothing it held can be recovered."""


class InvalidEngineRequest(ValueError):
    """The frames cannot be decoded, or ask for something this engine cannot do."""


class Engine(Protocol):
    """Every method may raise EngineDead. `submit` raises InvalidEngineRequest for what cannot be run."""

    async def start(self) -> EngineInfo: ...

    async def submit(self, request: EngineRequest) -> None: ...

    async def abort(self, keys: list[str]) -> None:
        """Idempotent; unknown keys are ignored. Frees what they hold as soon as no transfer can touch it."""
        ...

    async def next_step(self) -> EngineStep:
        """Waits for the next step that has something to say."""
        ...

    def encode_outputs(self, outputs: list[Any], timestamp: float) -> list[bytes]:
        """Frames that a frontend's codec decodes."""
        ...

    async def load(self) -> EngineLoad:
        """The load right now, also when no step has run since something was freed."""
        ...

    async def fail_peer(self, engine_id: str) -> None:
        """The engine with this KV identity is dead: end every transfer with it, recompute what waited for it."""
        ...

    async def call(self, method: str, args: list[Any]) -> Any: ...

    async def stop(self) -> None: ...
