"""A router against scripted workers: the means to speak for them, and to see what it did."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import msgspec
from prometheus_client import REGISTRY
from support_info import worker_info
from support_wait import DEADLINE_S

from orchestrator.config.settings import parse_config
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import PrefixView
from orchestrator.frontend.edge import Objectives
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.router.request import Batch, ParsedRequest
from orchestrator.router.router import Router
from orchestrator.types import FinishReason, KVEndpoint, KVSource, QueueDepth, Role, WorkerLoad
from orchestrator.wire.messages import Claimed, MessageError, Outputs, Submit
from orchestrator.wire.sockets import Sent


def counted(name: str, **labels: str) -> float:
    """A counter of this process, as `/metrics` would show it; 0 where nothing was counted."""
    return REGISTRY.get_sample_value(f"{name}_total", labels) or 0.0


def defective(call, request_id):
    """`call` of a request and more, with a defect that one request meets."""
    return lambda active, *more: call(active, *more) if active.id != request_id else 1 // 0


@dataclass
class FakeRequest:
    id: str
    prompt_tokens: int = 1000
    local_only: str | None = None
    early: bool = True
    max_new_tokens: int = 100
    priority: int = 0
    keys: list[int] = field(default_factory=list)
    own: Objectives = Objectives()
    adapter: int = 0


@dataclass
class FakeOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: int | None = None
    computed: int | None = None  # of its prompt, without KV from elsewhere


class FakeCodec:
    def __init__(self):
        self.failures = {}  # by request id
        self.prompts = []  # (cached, created) tokens, as counted
        self.dropped = []  # tokens that the client had, of each output of which it had anything

    def read(self, request, block_size):
        info = RequestInfo(
            request.id,
            request.prompt_tokens,
            request.max_new_tokens,
            time.time(),
            priority=request.priority,
            local_only=request.local_only,
            ttft_slo_s=request.own.ttft_s,
            tpot_slo_s=request.own.tpot_s,
            slo_class=request.own.name,
            tenant=request.own.tenant,
            adapter=request.adapter,
        )
        keys = request.keys if block_size else []
        whole, with_kv = [request.id.encode()], [b"less"]
        return ParsedRequest(info, whole, request.id, request.early, keys, frames_with_kv=with_kv)

    def decode_outputs(self, frames, sent_at, now):
        try:
            return Batch([FakeOutput(*fields) for fields in msgspec.msgpack.decode(frames[0])], now)
        except msgspec.DecodeError as error:
            raise MessageError(str(error)) from error

    def as_first(self, output):
        return FakeOutput(output.request_id, output.new_token_ids)

    def drop_told(self, output, tokens):
        self.dropped.append(tokens)
        output.new_token_ids = output.new_token_ids[tokens:]

    def computed_alone(self, output):
        return output.computed

    def count_prompt(self, output, cached_tokens, created_cache_tokens):
        self.prompts.append((cached_tokens, created_cache_tokens))

    def failure(self, parsed, failure):
        self.failures[parsed.info.id] = failure
        return FakeOutput(parsed.info.id, [], FinishReason.ERROR)


class FakeTransport:
    frontend_id = "f"

    def __init__(self):
        self.sent = []
        self.payloads = []  # of what was sent
        self.unreachable = set()
        self.refuses = {}  # worker id -> what becomes of messages to it

    def send(self, worker_id, message, payload=()):
        refused = Sent.UNREACHABLE if worker_id in self.unreachable else self.refuses.get(worker_id)
        if refused is None:
            self.sent.append((worker_id, message))
            self.payloads.append(payload)
        return Sent.YES if refused is None else refused

    def of(self, kind):
        return [(worker_id, message) for worker_id, message in self.sent if isinstance(message, kind)]


@dataclass
class FakeQueue:
    depth: QueueDepth | None = field(default_factory=lambda: QueueDepth(0, 0, 0))
    jobs: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    refuses: str | None = None  # why it takes no job
    known: dict = field(default_factory=dict)  # what has become of jobs
    claims: dict = field(default_factory=dict)  # by worker

    async def enqueue(self, job):
        if self.refuses is None:
            self.jobs.append(job)
        return self.refuses

    async def states(self, request_ids):
        return {name: self.known[name] for name in request_ids}

    async def claims_of(self, worker_id):
        return self.claims.get(worker_id, [])

    async def cancel(self, request_id, attempt):
        self.cancelled.append((request_id, attempt))


class Bench:
    """A router with decode workers d0, d1 and prefill worker p0, and the means to speak for them."""

    def __init__(self, slo=None, limits=None, **routing):
        routing = {"remote_prefill_min_tokens": 100, **routing}
        tree = {"model": "m", "routing": routing, "slo": slo or {}, "ratio": {"mode": "off"}, "limits": limits or {}}
        self.config = parse_config(tree)
        self.choose = choose = decode_choice(self.config.routing.decode_choice)
        self.fleet = Fleet("f", choose.static_score)
        self.transport, self.queue = FakeTransport(), FakeQueue()
        self.prefixes = PrefixView(self.transport.send)
        self.codec = FakeCodec()
        self._sequence = itertools.count(1)  # of load reports
        self.router = Router(
            self.config, self.fleet, self.transport, self.queue, self.prefixes.index, self.codec, choose, Metrics()
        )
        for name, role in (("d0", Role.DECODE), ("d1", Role.DECODE), ("p0", Role.PREFILL)):
            self.add_worker(name, role)

    @classmethod
    async def asked(cls, request, claimed=False, **config):
        """With one request that was submitted: by its length it decodes or is queued, and then may be claimed."""
        bench = cls(**config)
        await bench.router.submit(request)
        if claimed:
            bench.claim(request.id)
        return bench

    async def submit(self, *names, prompt_tokens=10):
        """By default so short that they decode where they are prefilled."""
        for name in names:
            await self.router.submit(FakeRequest(name, prompt_tokens))

    async def submit_to_d0(self, *names, prompt_tokens=10):
        others = [name for name, view in self.fleet.workers.items() if name != "d0" and view.info.role is Role.DECODE]
        self.connect(*others, connected=False)
        await self.submit(*names, prompt_tokens=prompt_tokens)
        self.connect(*others)

    def report(self, worker_id, blocks_free=900, **load):
        """A worker's load, of 1000 blocks. Nothing runs or waits unless said otherwise."""
        figures = {"running": 0, "waiting": 0, "waiting_tokens": 0, "step_ms": 1.0, **load}
        load = WorkerLoad(worker_id, next(self._sequence), 1000, blocks_free, **figures)
        self.fleet.take_load(load, time.monotonic())

    def connect(self, *worker_ids, connected=True):
        for worker_id in worker_ids:
            self.fleet.workers[worker_id].note_connected(connected)

    def add_worker(self, name, role, **more):
        self.fleet.upsert(worker_info(name, role, blocks_total=1000, **more), time.monotonic())
        self.fleet.workers[name].note_connected(True)

    def say(self, worker_id, message, payload=()):
        self.router.handle(worker_id, message, list(payload), time.monotonic())

    def lose(self, worker_id):
        self.fleet.remove(worker_id)
        self.router.lost.worker_lost(worker_id)

    def silence(self, worker_id):
        self.fleet.workers[worker_id].mark_quiet()
        self.router.lost.worker_quiet(worker_id)

    def claim(self, request_id, attempt=1, worker="p0", cached_tokens=None):
        source = KVSource(KVEndpoint(f"{worker}-engine", "127.0.0.1", 1), f"{request_id}#{attempt}")
        domain = view.info.domain if (view := self.fleet.workers.get(worker)) else "0"
        self.say(worker, Claimed(request_id, attempt, source, 0.01, domain, cached_tokens))

    def tokens(self, worker_id, request_id, tokens, attempt=1, finish=None, computed=None):
        payload = msgspec.msgpack.encode([[request_id, tokens, finish, computed]])
        self.say(worker_id, Outputs([attempt], 0.0), [payload])

    def received(self):
        got = []
        while not self.router.batches.empty():
            got += [(o.request_id, o.new_token_ids, o.finish_reason) for o in self.router.batches.get_nowait().outputs]
        return got

    def submits(self):
        return self.transport.of(Submit)

    def bound_to(self):
        return self.submits()[-1][0]

    async def settle(self):
        """Until nothing of the router runs in the background."""
        async with asyncio.timeout(DEADLINE_S):
            while tasks := set(self.router._dispatch._tasks):
                await asyncio.wait(tasks)

    def assert_no_leaks(self):
        assert not self.router.requests and not self.prefixes.index.expected
        assert not self.router._requests._by_worker
