"""The engine seam: what an agent needs of an engine, real or simulated.

An engine knows requests by key (`types.engine_key`), one key per attempt, never reused.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from orchestrator.types import EngineIdentity, EngineSpeed, KVCounters, KVEndpoint, KVSource

log = logging.getLogger("pd.engine")


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
    speed: EngineSpeed = EngineSpeed()


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
    behind_s: float = 0.0  # its place among those that wait: as if it came so much later than it does, or earlier


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was not taken. `final`: no worker would take it. `leaving`: as `wire.messages.Rejected`."""

    why: str
    final: bool = False
    leaving: bool = False


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


class PrefixChanges:
    """Net changes of a prefix cache since they were last taken, bounded by the keys that came or went."""

    def __init__(self) -> None:
        self._cleared = False
        self._cached: dict[int, bool] = {}  # by key that came or went: whether it is cached now

    def __bool__(self) -> bool:
        return self._cleared or bool(self._cached)

    def stored(self, keys: Iterable[int]) -> None:
        self._cached.update(dict.fromkeys(keys, True))

    def removed(self, keys: Iterable[int]) -> None:
        self._cached.update(dict.fromkeys(keys, False))

    def cleared(self) -> None:
        self._cleared = True
        self._cached.clear()

    def add(self, delta: PrefixDelta) -> None:
        if delta.cleared:
            self.cleared()
        self.removed(delta.removed)
        self.stored(delta.stored)

    def take(self) -> PrefixDelta:
        stored = [key for key, cached in self._cached.items() if cached]
        removed = [key for key, cached in self._cached.items() if not cached]
        delta = PrefixDelta(stored, removed, self._cleared)
        self._cleared, self._cached = False, {}
        return delta


class EngineStep(msgspec.Struct):
    """One step: outputs of any number of requests, the load after it, and what it changed in the prefix cache.

    `tokens_left`: of the prompts that are begun and have no output yet, by key, the tokens still to be computed.
    """

    outputs: list[Any]  # of EngineOutput
    load: EngineLoad | None
    timestamp: float  # the engine's monotonic clock, seconds
    prefix: PrefixDelta | None = None
    tokens_left: dict[str, int] = {}


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

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A method of `wire.control`. Raises whatever the engine says of it."""
        ...

    async def stop(self) -> None: ...


async def submit(engine: Engine, request: EngineRequest) -> Refusal | None:
    """Hand a request to the engine. Returns why it was not taken. Raises EngineDead."""
    try:
        await engine.submit(request)
    except InvalidEngineRequest as error:
        return Refusal(f"invalid: {error}", final=True)
    except EngineDead:
        raise
    except Exception as error:  # a defect met by one request must not end all the others
        log.exception("the engine could not take %s", request.key)
        return Refusal(f"error: {type(error).__name__}: {error}")
    return None
