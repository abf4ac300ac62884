"""What the scheduler half tells the worker half each step, the options both read, and what comes back.

Pickled when workers are separate processes, so plain data only.
"""

from __future__ import annotations

import queue
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from connectors.push.wire import Endpoint, Register, Unregister

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata


@dataclass(frozen=True)
class PushOptions:
    """From `kv_connector_extra_config`. Times are seconds."""

    transfer: str = "auto"
    # Decode waits this long for KV, or news of its prefill, before it recomputes. Prefill keeps finished blocks as long
    # for a decode that has not registered.
    timeout_s: float = 30.0
    verify: bool = False  # compare checksums of both ends' blocks
    advertise: str = ""  # where peers reach this engine; empty: where it listens
    host_tier_bytes: int = 0  # of each rank; 0: there is no host tier
    writer_cores: tuple[int, ...] = ()  # where the thread that writes may run; none: where its process may

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> PushOptions:
        """As a worker gives them, whose configuration was checked."""
        assert vllm_config.kv_transfer_config is not None
        given = vllm_config.kv_transfer_config.get_from_extra_config
        transfer = given("transfer", cls.transfer)
        if transfer == "auto" and vllm_config.parallel_config.use_ubatching:
            transfer = "chunk"  # the hooks of a layer come for a part of the batch, once for each
        return cls(
            transfer,
            given("kv_transfer_timeout_s", cls.timeout_s),
            given("verify", cls.verify),
            given("advertise", cls.advertise),
            given("host_tier_bytes", cls.host_tier_bytes),
            tuple(given("writer_cores", ())),
        )


@dataclass(frozen=True)
class Started:
    """A prefill was scheduled for the first time. `lent`: there is none, it is a prefix from the cache."""

    key: str
    total_blocks: int
    prompt_tokens: int
    lent: bool = False


@dataclass(frozen=True)
class Computed:
    """A step computes blocks `start ..` of a prefill. `closed`: they are the last.

    `epoch` counts the prefill's restarts. `blocks` are logical ids per KV cache group. `whole`: they are all that
    is to be pushed, in groups that `start` and block positions do not describe. `lent`: they are of the prefix cache.
    """

    key: str
    epoch: int
    start: int
    blocks: tuple[tuple[int, ...], ...]
    closed: bool
    whole: bool = False
    lent: bool = False


@dataclass(frozen=True)
class Preempted:
    """A prefill has lost its blocks, and begins again as `epoch`."""

    key: str
    epoch: int


@dataclass(frozen=True)
class Finished:
    """A prefill ended; `held`: the scheduler keeps its blocks until they are reported sent."""

    key: str
    ok: bool
    held: bool


@dataclass(frozen=True)
class Reserved:
    """Decode blocks wait for the KV of `order.stream` from `source`."""

    order: Register
    source: Endpoint


@dataclass(frozen=True)
class Unused:
    """A decode request ended before it reserved blocks: `source` need not keep anything for it."""

    order: Unregister
    source: Endpoint


@dataclass(frozen=True)
class Met:
    """Connect with `peer`, and have it connect with `here`, before a request needs that."""

    peer: Endpoint
    here: Endpoint


class PushMetadata(KVConnectorMetadata):
    def __init__(self) -> None:
        self.arrived: set[str] = set()  # prefills, which have not been scheduled
        self.started: list[Started] = []
        self.earlier: list[Computed] = []  # by steps before this one: whole prompts, and prefixes that are lent
        self.computed: list[Computed] = []  # by this step
        self.preempted: list[Preempted] = []
        self.finished: list[Finished] = []
        self.unwanted: list[str] = []  # prefills that ended well
        self.reserved: list[Reserved] = []
        self.withdrawn: dict[str, str] = {}  # and why
        self.unused: list[Unused] = []
        self.dead_engines: list[str] = []
        self.met: list[Met] = []
        self.host: SimpleCPUOffloadMetadata | None = None  # copies from and to the host tier

    def has_news(self) -> bool:
        """Whether a step is needed to tell it. Prefills that wait and copies of the host tier go with the next one."""
        return any(told for name, told in vars(self).items() if name not in ("arrived", "host"))


@dataclass(frozen=True)
class RankReport(KVConnectorWorkerMetadata):
    """What one rank tells the scheduler half, which hears of all ranks together: whose KV it has given up, how many
    blocks wait here for peers that do not answer, and by number how many ranks have ended a store to the host tier."""

    unreceived: frozenset[str] = frozenset()
    unpushed: frozenset[str] = frozenset()
    withdrawing_blocks: int = 0
    stored: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        assert isinstance(other, RankReport)
        # All ranks have the same blocks, each with its own share of the heads.
        most = max(self.withdrawing_blocks, other.withdrawing_blocks)
        stored = Counter(self.stored) + Counter(other.stored)
        return RankReport(self.unreceived | other.unreceived, self.unpushed | other.unpushed, most, stored)


class RankReports:
    """What one rank has to report. Its writer thread adds to it, and the engine's thread takes it after each step."""

    def __init__(self) -> None:
        self.unreceived: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.unpushed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.withdrawing_blocks = self._told = 0

    def take(self, stored: dict[int, int] | None = None) -> RankReport | None:
        """`stored`: as in `RankReport`. None where nothing is to be told."""
        report = RankReport(_all(self.unreceived), _all(self.unpushed), self.withdrawing_blocks, stored or {})
        before, self._told = self._told, report.withdrawing_blocks
        return report if before or report != RankReport() else None


def _all(told: queue.SimpleQueue[str]) -> frozenset[str]:
    return frozenset(told.get() for _ in range(told.qsize()))


class PushStats(NixlKVConnectorStats):
    """Statistics of one engine: vLLM's per WRITE, and ours per request. Lists, which grow during a step and are emptied
    with it; `VllmEngine` sums them."""

    # Seconds, per request pushed: from first WRITE to last, and from the last chunk computed to everything landed.
    STREAM_SECONDS = "pd_stream_seconds"
    EXPOSED_SECONDS = "pd_exposed_seconds"
    # One entry per occurrence.
    STREAMS_FAILED = "pd_streams_failed"
    RECEIVES_FAILED = "pd_receives_failed"
    BAD_MESSAGES = "pd_bad_messages"
    VERIFIED = "pd_verified"
    CORRUPT = "pd_corrupt"
    # One entry per load of one rank's share of the host tier.
    HOST_LOADED_BYTES = "pd_host_loaded_bytes"
    HOST_LOAD_SECONDS = "pd_host_load_seconds"
    # Told by the scheduler half: how many more than it told last.
    WITHDRAWING_BLOCKS = "pd_withdrawing_blocks"
    HOST_HIT_TOKENS = "pd_host_hit_tokens"
    HOST_BLOCKS = "pd_host_blocks"
    OURS = tuple(name for name in list(vars().values()) if isinstance(name, str) and name.startswith("pd_"))

    def reset(self) -> None:
        super().reset()
        self.data.update({name: [] for name in self.OURS})

    def record(self, name: str, value: float = 1.0) -> None:
        self.data[name].append(value)

    def record_load(self, size_bytes: int, seconds: float) -> None:
        """From the host tier to the device."""
        self.record(self.HOST_LOADED_BYTES, size_bytes)
        self.record(self.HOST_LOAD_SECONDS, seconds)

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data.get(name) for name in self.OURS)
