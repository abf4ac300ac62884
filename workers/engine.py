"""The interface between a worker and its engine, real or simulated.

An engine identifies requests by key (`wire.messages.engine_key`): one key per attempt, never reused.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from orchestrator.config.settings import ConfigError
from orchestrator.process.tasks import first_of
from orchestrator.types import EngineIdentity, EngineSpeed, KVCounters, KVEndpoint, KVSource

log = logging.getLogger("pd.engine")

_LOAD_WEIGHT = 0.3  # of a new load of an adapter in the mean
_MIN_RATE_BYTES = 1 << 20  # a smaller WRITE takes mostly the link's latency


class Phase(str, enum.Enum):
    PREFILL = "prefill"  # compute the prompt, keep and push its KV, sample one token
    DECODE = "decode"  # generate; the prompt's KV is received if there is a KV source, else computed here


class Group(msgspec.Struct, frozen=True):
    """An engine's place among those that share a model's experts, and step together. They meet at `host` and `port`,
    where the first one listens."""

    rank: int = 0
    size: int = 1
    host: str = "127.0.0.1"
    port: int = 0


class EngineInfo(msgspec.Struct, frozen=True):
    """An engine's properties, known once it has started."""

    identity: EngineIdentity
    kv: KVEndpoint
    blocks_total: int  # usable KV blocks
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    supported_tasks: tuple[str, ...] = ("generate",)
    speed: EngineSpeed = EngineSpeed()
    lends: bool = False  # as in `WorkerInfo`
    lockstep: bool = False  # as in `WorkerInfo`
    adapter_slots: int = 0


class EngineLoad(msgspec.Struct, frozen=True):
    """The engine's load at the end of a step. Counters are cumulative."""

    blocks_free: int
    running: int
    waiting: int
    step_ms: float
    kv: KVCounters = KVCounters()
    adapters: dict[int, int] = {}  # as in `WorkerLoad`
    adapter_load_s: float = 0.0


def link_rate(size_bytes: float, seconds: float) -> float:
    """What one WRITE tells of the link's rate (bytes/s); 0 if it is too small to tell anything."""
    return size_bytes / seconds if size_bytes >= _MIN_RATE_BYTES and seconds > 0 else 0.0


class EngineRequest(msgspec.Struct, frozen=True):
    """One attempt to run. `frames` is the engine request as the frontend encoded it. `prefix_tokens`: only so many of
    its prompt's first tokens, for the prefix cache; one token is sampled, which says that they are cached. 0: all.
    """

    key: str
    phase: Phase
    frames: list[bytes]
    kv_source: KVSource | None = None
    resume_tokens: list[int] = []
    behind_s: float = 0.0  # its place in the engine's queue: as if it had arrived so much later (negative: earlier)
    prefix_tokens: int = 0


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was not taken. `final`: no worker would take it. The others: as in `wire.messages.Rejected`."""

    why: str
    final: bool = False
    leaving: bool = False
    late: bool = False


class EngineOutput(Protocol):
    """One request's part of a step. Engine-native objects satisfy it; `request_id` is the key and writable."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any  # None until finished


class PrefixDelta(msgspec.Struct, frozen=True):
    """Changes of the engine's prefix cache, as in `PrefixEvents`."""

    stored: list[int]  # keys of `policy.prefix_keys`
    removed: list[int]
    cleared: bool = False
    hosted: list[int] = []


class PrefixChanges:
    """Net changes of a prefix cache since `take` was last called."""

    def __init__(self) -> None:
        self._cleared = False
        self._cached: dict[int, str] = {}  # changed key -> where it is now: the list of `PrefixDelta` that it is in

    def __bool__(self) -> bool:
        return self._cleared or bool(self._cached)

    def stored(self, keys: Iterable[int]) -> None:
        self._cached.update(dict.fromkeys(keys, "stored"))

    def hosted(self, keys: Iterable[int]) -> None:
        self._cached.update(dict.fromkeys(keys, "hosted"))

    def removed(self, keys: Iterable[int]) -> None:
        self._cached.update(dict.fromkeys(keys, "removed"))

    def cleared(self) -> None:
        self._cleared = True
        self._cached.clear()

    def add(self, delta: PrefixDelta) -> None:
        if delta.cleared:
            self.cleared()
        self.removed(delta.removed)
        self.stored(delta.stored)
        self.hosted(delta.hosted)

    def take(self) -> PrefixDelta:
        lists: dict[str, list[int]] = {"stored": [], "removed": [], "hosted": []}
        for key, place in self._cached.items():
            lists[place].append(key)
        delta = PrefixDelta(cleared=self._cleared, **lists)
        self._cleared, self._cached = False, {}
        return delta


class AdapterUse:
    """The adapters that an engine has on its device: those of its requests, and the idle ones that were used last."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._requests: dict[int, int] = {}  # by adapter, used last, last
        self._of: dict[str, int] = {}  # by key of a request
        self.load_s = 0.0  # mean of the latest loads

    def shown(self, load: EngineLoad) -> EngineLoad:
        """The load, with what is known here."""
        if not self._slots:
            return load
        return msgspec.structs.replace(load, adapters=dict(self._requests), adapter_load_s=self.load_s)

    def began(self, key: str, adapter: int) -> None:
        """A request was given to the engine."""
        self._of[key] = adapter
        self._count(adapter, 1)

    def ended(self, *keys: str) -> None:
        """Ignores unknown keys."""
        for key in keys:
            if adapter := self._of.pop(key, 0):
                self._count(adapter, -1)

    def loaded(self, adapter: int, seconds: float) -> None:
        self.load_s += (seconds - self.load_s) * (_LOAD_WEIGHT if self.load_s else 1.0)
        self._count(adapter, 0)

    def removed(self, adapter: int) -> None:
        if not self._requests.get(adapter, 0):
            self._requests.pop(adapter, None)

    def _count(self, adapter: int, change: int) -> None:
        self._requests[adapter] = self._requests.pop(adapter, 0) + change
        idle = [known for known, requests in self._requests.items() if not requests]
        for known in idle[: max(0, len(self._requests) - self._slots)]:
            del self._requests[known]


class EngineStep(msgspec.Struct):
    """One engine step: the outputs of its requests, the load after it, and its changes of the prefix cache.

    `tokens_left`: uncomputed prompt tokens by key, of requests whose prefill has begun and which have no output yet.
    `refused`: by key, why the engine ended a request without running it: any other engine would end it, too.
    """

    outputs: list[Any]  # of EngineOutput
    load: EngineLoad | None
    timestamp: float  # the engine's monotonic clock, seconds
    prefix: PrefixDelta | None = None
    tokens_left: dict[str, int] = {}
    refused: dict[str, str] = {}


class EngineDead(RuntimeError):
    """The engine process ended. None of its state can be recovered."""


class EngineStartFailed(RuntimeError):
    """The engine did not start. One line."""


class InvalidEngineRequest(ValueError):
    """The frames cannot be decoded, or this engine cannot run the request."""


class AdapterUnavailable(RuntimeError):
    """The LoRA adapter of a request cannot be loaded here, or is not the one that the request means."""


class AdapterLate(AdapterUnavailable):
    """It was not loaded in time, and may be another time."""


class Engine(Protocol):
    """Every method may raise EngineDead. `submit` raises InvalidEngineRequest for a request that cannot run, and
    AdapterUnavailable for one that cannot run here."""

    async def start(self, group: Group = Group()) -> EngineInfo: ...

    async def submit(self, request: EngineRequest) -> None: ...

    async def abort(self, keys: list[str]) -> None:
        """End requests. Idempotent; unknown keys are ignored. Blocks are freed once no transfer can touch them."""
        ...

    async def next_step(self) -> EngineStep:
        """Wait for the next step that has outputs or changes."""
        ...

    def encode_outputs(self, outputs: list[Any], timestamp: float) -> list[bytes]:
        """Encode outputs as frames for a frontend's codec."""
        ...

    async def load(self) -> EngineLoad:
        """The present load, also when blocks were freed and no step has run since."""
        ...

    async def fail_peer(self, engine_id: str) -> None:
        """Another engine is dead: end every transfer with it, and recompute the prompts that waited for its KV."""
        ...

    async def meet(self, peer: KVEndpoint) -> None:
        """Connect with another engine, from which KV may come or to which it may go. Returns before it is done."""
        ...

    async def lend(self, key: str, frames: list[bytes], tokens: int) -> None:
        """Send the first `tokens` of this request's prompt, whole blocks, from the prefix cache to the engine that asks
        for `key`. Nothing is computed: that engine is refused where one of them is not cached. Raises RuntimeError for
        frames that cannot be decoded."""
        ...

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of `wire.control`. Raises the engine's own error."""
        ...

    async def ended_suddenly(self) -> bool:
        """Of an engine that may be dead: whether its process has ended, or does within a moment, without a word of why:
        it was killed, or its own memory was at fault. What an engine dies of with others, it says."""
        ...

    async def stop(self) -> None: ...


async def started(
    engine: Engine,
    limit_s: float,
    stopped: asyncio.Event,
    group: Group,
    broken: asyncio.Future[str],
    waited_s: float = 0.0,
) -> EngineInfo | None:
    """Start an engine. None if `stopped` was set meanwhile. `broken`: done once another rank of its group has gone.
    `waited_s`: how much of `limit_s` has passed before. Raises EngineStartFailed, ConfigError."""
    ends = (stopped.wait(), asyncio.shield(broken))
    try:
        async with first_of(engine.start(group), *ends, within_s=max(0.0, limit_s - waited_s)) as starting:
            if starting.done():
                return starting.result()
    except EngineDead as error:
        raise EngineStartFailed(f"the engine did not start: {error}") from error
    except (ValueError, TypeError) as error:  # vLLM's errors for arguments that cannot work
        raise ConfigError(str(error)) from error
    await engine.stop()
    if stopped.is_set():
        return None
    if broken.done():
        raise EngineStartFailed(broken.result())
    raise EngineStartFailed(f"the engine did not start within workers.start_timeout_s ({limit_s:g} s)")


async def submit(engine: Engine, request: EngineRequest) -> Refusal | None:
    """Submit a request to the engine. Returns None, or why the engine did not take it. Raises EngineDead."""
    try:
        await engine.submit(request)
    except InvalidEngineRequest as error:
        return Refusal(f"invalid: {error}", final=True)
    except AdapterUnavailable as error:
        return Refusal(str(error), late=isinstance(error, AdapterLate))
    except EngineDead:
        raise
    except Exception as error:  # a defect in one request must not end all others
        log.exception("the engine could not take %s", request.key)
        return Refusal(f"error: {type(error).__name__}: {error}")
    return None
