"""The nouns that all folders share: requests, workers, loads, jobs and sources of KV. Plain frozen structs without
behaviour beyond derived values; no I/O, no clock, no vLLM."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import astuple


class Role(str, enum.Enum):
    """A worker's role. The engine behind it can always do both."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class WorkerState(str, enum.Enum):
    """Whether a registered worker takes requests. One that loads its model or is gone has no entry, and so no state."""

    READY = "ready"
    DRAINING = "draining"  # finishes its requests, takes no new ones


class FinishReason(enum.IntEnum):
    """Why an engine ended a request. The numbers are those of vLLM's `FinishReason` (vllm/v1/engine, 0.32.0)."""

    STOP = 0  # a stop token
    LENGTH = 1  # the maximum number of tokens
    ABORT = 2
    ERROR = 3  # the engine could not continue it
    REPETITION = 4  # vLLM's detector of endless repetition ended it


class KVEndpoint(msgspec.Struct, frozen=True):
    """Where an engine's KV connector answers handshakes. `engine_id` is unique per process start."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1
    shards: int = 1  # ranks among which each prompt's blocks are dealt out: decode context parallelism
    key: str = ""  # public key of the handshake's port; empty where it is not encrypted


class KVSource(msgspec.Struct, frozen=True):
    """Where a decode engine gets the KV of one request: an endpoint and the request's key there."""

    endpoint: KVEndpoint
    key: str


Claimer = Literal["idle", "ahead", "busy"]  # of prefill jobs: see `policy.claims.claims_as`


class EngineIdentity(msgspec.Struct, frozen=True):
    """The properties that all workers of a generation must share, so that they can exchange KV.

    The fields of `ALWAYS_EQUAL` are equal in the whole fleet. Tensor and pipeline parallelism may differ.
    """

    model: str  # its name, or its folder's; `weights` stands for what is in that
    dtype: str
    kv_cache_dtype: str
    block_size: int  # tokens
    max_model_len: int  # tokens
    engine: str  # "vllm" or "sim"
    engine_version: str
    protocol: int
    revision: str = ""  # of the model: a commit where it is known
    weights: str = ""  # stands for the files of a model that is a folder
    quantization: str = ""  # of the weights
    attention_backend: str = ""  # decides the layout of KV blocks
    speculation: str = ""  # the drafter, where it has KV of its own
    kv_settings: str = ""  # other arguments of the engine that decide how KV is computed and laid out
    kv_copies: int = 1  # ranks that hold the same KV head; more than 1 where there are more ranks than heads
    messages: str = ""  # stands for the fields of its requests and outputs; versions of an engine may share them


# Frontends depend on these, and use workers of both generations during a rollout.
ALWAYS_EQUAL = ("engine", "messages", "protocol")


class EngineSpeed(msgspec.Struct, frozen=True):
    """An engine's speed, measured at its start without load or cache. Zeros: not measured."""

    prefill_s: float = 0.0  # fixed time of one prompt
    prefill_s_per_token: float = 0.0
    step_s: float = 0.0  # fixed time of one decode step
    step_s_per_sequence: float = 0.0


class WorkerInfo(msgspec.Struct, frozen=True):
    """One registered worker: what changes seldom. What changes every step is `WorkerLoad`."""

    id: str
    role: Role
    state: WorkerState
    host: str
    pid: int
    request_address: str  # ZMQ ROUTER, bound by the worker
    load_address: str  # ZMQ PUB, bound by the worker
    identity: EngineIdentity
    kv: KVEndpoint
    blocks_total: int  # usable KV blocks
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    supported_tasks: tuple[str, ...] = ("generate",)
    speed: EngineSpeed = EngineSpeed()
    mesh_key: str = ""  # public key of both addresses; empty where the mesh is not encrypted
    process: str = ""  # its identity, by `orchestrator.process.parent.identity_of`
    generation: int = 0  # of its configuration
    pairs_within: str = ""  # its value of the label that `routing.pairing: strict:LABEL` names; empty without
    ranks: tuple[str, ...] = ()  # the workers of its unit in their order; none: it is a unit by itself
    drained: bool = False  # it leaves, and only waits for the other ranks of its unit to have drained too
    started_as: Role | None = None  # the role whose engine arguments and number of ranks it keeps, whichever it has
    lends: bool = False  # prefixes pass between its cache and others': its KV can go block by block
    lockstep: bool = False  # the ranks of its unit take each step together
    adapter_slots: int = 0  # LoRA adapters in one engine step, at most; 0: it has no LoRA
    labels: tuple[str, ...] = ()  # where it is, as zone=a

    @property
    def unit(self) -> str:
        """What joins, drains, takes a role, restarts and ends as one; it has the id of its first rank, whose entry has
        its role and its orders. Requests, KV and load are the ranks' own."""
        return self.ranks[0] if self.ranks else self.id

    @property
    def domain(self) -> str:
        """KV passes between two workers of one domain, and no others."""
        return f"{self.generation}:{self.pairs_within}" if self.pairs_within else str(self.generation)

    def can_be(self, role: Role) -> bool:
        """Whether it may take this role. Pipeline stages only prefill, and ranks that share each prompt only decode."""
        return (self.kv.shards if role is Role.PREFILL else self.kv.pp_size) == 1


Link = tuple[str, ...]  # the class of a link between two workers: ("host", "rack"), ("rack",), () ...


def link_of(one: Mapping[str, str], other: Mapping[str, str]) -> Link:
    """The names of the labels with the same value at both ends, in the order in which these workers have them."""
    return tuple([name for name, value in one.items() if other.get(name) == value])


class KVCounters(msgspec.Struct, frozen=True):
    """Totals of a worker's KV transfers since its engine started."""

    bytes_sent: int = 0
    descriptors: int = 0  # NIXL's, of the WRITEs posted; 0 where the engine is simulated
    transfers: int = 0  # requests whose KV was pushed
    transfer_s: float = 0.0  # from a request's first WRITE to its last, summed
    failures: int = 0  # transfers that failed, sent and received
    bad_messages: int = 0  # notifications that could not be read
    withdrawing_blocks: int = 0  # now: of transfers that were given up, kept until no WRITE can land in them
    host_hit_tokens: int = 0  # of prompts: loaded from the host tier
    host_blocks: int = 0  # now: in the host tier
    host_loaded_bytes: int = 0  # from there to the device, also to be lent
    host_load_s: float = 0.0  # in which each rank did so, summed over them
    link_bytes_per_s: float = 0.0  # of all ranks: the fastest large WRITE of the last minutes; 0: none was


class PauseState(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Whether and how an operator has paused the fleet. The greater of two states is the newer one."""

    number: int = 0  # one more with each change
    mode: str = ""  # abort, wait or keep; empty: not paused
    engines: bool = False  # engines are paused too: their requests have ended, or are frozen
    clear_cache: bool = False  # engines also clear their prefix caches


class StepCounters(msgspec.Struct, frozen=True):
    """Steps that the ranks of a group took together, since it started."""

    steps: int
    mean_tokens: float  # of the ranks in a step, summed over the steps
    most_tokens: int  # of one rank in a step, summed: the balance is the mean divided by the most
    recent: float  # balance, of the latest steps
    lost_s: float  # of the steps' time, what less balance than 1 cost
    dummies: int  # empty batches of ranks without a request, in all
    waves: int  # from the first request of one of them until none has any


class WorkerLoad(msgspec.Struct, tag="load", frozen=True, omit_defaults=True):
    """A worker's load, published after engine steps and at every heartbeat while idle. Counters are of its process."""

    worker_id: str
    sequence: int  # of its reports; it begins as that of `PrefixEvents`
    blocks_total: int
    blocks_free: int
    running: int  # requests computing
    waiting: int  # requests waiting, those for remote KV included
    waiting_tokens: int  # prompt tokens not yet computed, of all requests here
    step_ms: float  # duration of the last engine step that did work
    seen: dict[str, int] = {}  # by frontend, its highest submission number: what it placed up to that is in this load
    prefill_tokens_per_s: float = 0.0  # measured, exponentially weighted; 0 = not measured yet
    kv: KVCounters = KVCounters()
    prefix_sequence: int = 0  # of the last `PrefixEvents` published before it; 0 = none ever
    pause: PauseState = PauseState()  # the newest that it has received
    corrupt_messages: int = 0  # messages from frontends that could not be read
    fetches: dict[str, int] = {}  # of prefixes from other workers' caches, by outcome
    fetched_tokens: int = 0
    rests_from: list[str] = []  # engines from which it fetches nothing now, since again and again nothing came in time
    group: StepCounters | None = None  # reported by the first rank
    # Requests here by the number of their LoRA adapter; 0 for one that is loaded and idle. Least recently used first.
    adapters: dict[int, int] = {}
    adapter_load_s: float = 0.0  # mean time of the latest loads; 0 = none was measured
    decodes: int = 0  # requests that decode here, or will: on a prefill worker, what it has of its former role


class PrefixEvents(msgspec.Struct, tag="prefix", frozen=True):
    """Changes of one worker's prefix cache, in this order: `cleared`, `removed`, `stored`, `hosted` (what only its host
    tier has now). No key is in two lists. Keys as in `prefix_keys`.

    `sequence` numbers the worker's batches. It begins at the worker's start time in microseconds, so that the batches
    of a restarted worker do not continue those of its predecessor.
    """

    worker_id: str
    sequence: int
    stored: list[int] = []
    removed: list[int] = []
    cleared: bool = False
    hosted: list[int] = []


class PrefillJob(msgspec.Struct, frozen=True):
    """A remote prefill, waiting or claimed. `attempt` fences results: those of all but the current one are ignored."""

    request_id: str
    attempt: int
    tokens: int  # prompt tokens
    uncached_tokens: int  # prompt tokens to compute
    arrived_at: float  # unix seconds, the server's clock once enqueued
    reply_to: str  # frontend id
    body: bytes  # `messages.pack_frames` of the engine request
    deliveries: int = 0  # how often a worker has claimed it
    delay_s: float = 0.0  # added to its arrival to give its score in the queue (`policy.policies`)
    cached: dict[str, int] = {}  # prompt tokens cached when it was enqueued, on at most 4 prefill workers and of `LENT`
    ttft_s: float = 0.0  # its own TTFT objective; 0: the fleet's
    LENT = "*"  # no worker's id: has what a worker without it could fetch, from a worker of either role
    ADAPTER = "@"  # before the id of a worker that has its LoRA adapter: what that saves, as prompt tokens

    def tokens_at(self, worker_id: str) -> int:
        """Prompt tokens to compute on this prefill worker; at least 1."""
        return max(1, self.tokens - self.cached.get(worker_id, 0)) if self.cached else self.uncached_tokens

    def lacking_at(self, worker_id: str) -> int:
        """Prompt tokens that this worker could fetch; 0 or less for none."""
        return self.cached.get(self.LENT, 0) - self.cached.get(worker_id, 0)


class JobState(str, enum.Enum):
    """A job's state in the queue. ABSENT: it was cancelled, has ended, or was lost."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    ABSENT = "absent"


class WindowJob(msgspec.Struct, frozen=True):
    """A waiting job as one prefill worker sees it. Cached tokens are hits of the prefix index."""

    request_id: str
    score: float
    tokens: int  # prompt tokens
    waited_s: float
    cached_here: int = 0
    cached_elsewhere: int = 0  # on the prefill worker, other than this one, that holds most of it
    adapter_here: int = 0  # what its LoRA adapter here saves, as prompt tokens; elsewhere it counts as cached


class QueueDepth(msgspec.Struct, frozen=True):
    """The prefill queue at one moment. Tokens are uncached prompt tokens of waiting jobs."""

    requests: int
    tokens: int
    claimed: int


class Offered(msgspec.Struct, frozen=True):
    """The load that has arrived since counting began, served or refused, and how much of it was late."""

    requests: int = 0
    prefill_tokens: int = 0  # prompt tokens to compute on the prefill worker with most of the prompt cached
    output_tokens: float = 0.0  # expected at arrival
    ended: int = 0  # requests that were answered, failed or refused
    late_first: int = 0  # ended requests whose first token missed slo.ttft_s, or never came
    late_tokens: int = 0  # ended requests whose other tokens missed slo.tpot_s
    prefill_tokens2: float = 0.0  # the squares of each request's prefill tokens, summed
    local_tokens: int = 0  # the same, on the decode worker with most of the prompt cached
    local_tokens2: float = 0.0
    least_tokens: int = 0  # the same, on the worker of either role with most of the prompt cached
    least_tokens2: float = 0.0
    late: int = 0  # of those that ended, those that missed one of the two objectives, or both
    generated_tokens: int = 0  # of all requests, ended or not
    patient_tokens2: float = 0.0  # by how much `prefill_tokens2` would be less if each request counted by its haste

    @classmethod
    def one(cls, prefill_tokens: int, local_tokens: int, output_tokens: float, haste: float = 1.0) -> Offered:
        """A single request. `haste`: as `policy.policies` has it."""
        least_tokens = min(prefill_tokens, local_tokens)
        return cls(
            requests=1,
            prefill_tokens=prefill_tokens,
            output_tokens=output_tokens,
            prefill_tokens2=float(prefill_tokens * prefill_tokens),
            local_tokens=local_tokens,
            local_tokens2=float(local_tokens * local_tokens),
            least_tokens=least_tokens,
            least_tokens2=float(least_tokens * least_tokens),
            patient_tokens2=(1 - haste * haste) * prefill_tokens * prefill_tokens,
        )

    def __add__(self, other: Offered) -> Offered:
        return Offered(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Offered) -> Offered:
        return Offered(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


IDLE, WAKE = "idle", "wake"  # who set a desired ratio: nobody asked for the model; somebody does again


class DesiredRatio(msgspec.Struct, frozen=True):
    """How many workers of each role there should be, of an idle model once it is asked for; who set it, and why."""

    prefill: int
    decode: int
    set_by: str = ""
    set_at: float = 0.0  # unix seconds
    why: str = ""  # empty for people

    @property
    def idle(self) -> bool:
        return self.set_by == IDLE

    @property
    def now(self) -> DesiredRatio:
        """How many there should be now: of an idle model none."""
        return DesiredRatio(0, 0, self.set_by, self.set_at, self.why) if self.idle else self
