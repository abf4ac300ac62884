"""Workers for tests, in this process or their own, on a real Redis, and a frontend that does what a test tells it."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace
from support_router import RouterClient
from support_sim import expected
from support_wait import DEADLINE_S, until

from orchestrator.config.engine_args import engine_args
from orchestrator.config.settings import Config, parse_config
from orchestrator.config.simulated import HONOURED, Simulated, simulated
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.tasks import cancelled
from orchestrator.store import registry as store
from orchestrator.store.client import Redis, RedisAway, connect
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry
from orchestrator.types import (
    FinishReason,
    KVSource,
    PrefillJob,
    PrefixEvents,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from orchestrator.wire.addresses import Listening
from orchestrator.wire.curve import KeyPair
from orchestrator.wire.messages import (
    Abort,
    CallReply,
    Claimed,
    EngineCrashed,
    Outputs,
    Prefilled,
    PrefillFailed,
    PrefixSnapshot,
    Rejected,
    Submit,
    Welcome,
    pack_frames,
)
from orchestrator.wire.sockets import Sent
from orchestrator.wire.transport import Disconnected, FrontendTransport, Unreadable
from workers.agent import Agent
from workers.sim.codec import SimCodec, WireRequest, WireSampling
from workers.sim.engine import SimEngine

ROOT = Path(__file__).parents[1]


@dataclass
class Request:
    """What the frontend knows of one request."""

    id: str
    prompt: list[int]
    max_tokens: int
    attempt: int = 1
    decode: str = ""  # the worker to decode on
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    events: list[Any] = field(default_factory=list)  # every message about it but outputs
    claimed_by: list[str] = field(default_factory=list)  # who sent each `Claimed`

    def got(self, kind: type) -> Any:
        return next((event for event in self.events if isinstance(event, kind)), None)


class Frontend:
    """Connects to every worker of the fleet; binds claimed requests to the worker that the test chose."""

    def __init__(self, redis: Redis, config: Config, name: str = "") -> None:
        self.id = name or f"frontend-{uuid.uuid4().hex[:6]}"
        self.registry = Registry(redis, config.namespace)
        self.queue = PrefillQueue(redis, config.namespace, lease_s=config.workers.lease_s)
        self.keys = KeyPair.new()
        self.transport = FrontendTransport(self.id, keys=self.keys)
        self.codec = SimCodec()
        self.requests: dict[str, Request] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self.prefix_events: list[PrefixEvents] = []
        self.snapshots: list[PrefixSnapshot] = []
        self.welcomed: set[str] = set()
        self.disconnected: list[str] = []
        self.replies: list[CallReply] = []
        self.crashes: list[EngineCrashed] = []
        self.decode: str | None = None  # where claims are bound; None: nowhere
        self.late_outputs = self.welcomes = 0
        self._sequence: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, register: bool = True) -> None:
        if register:
            await self.register()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._receive_loads())]

    async def register(self) -> None:
        await self.registry.refresh_frontend(
            store.Frontend(self.id, "", str(os.getpid()), mesh_key=self.keys.public), 60
        )

    async def meet(self, *infos: WorkerInfo) -> None:
        for info in infos:
            self.transport.connect(info.id, info.request_address, info.load_address, info.mesh_key)
        await until(lambda: all(i.id in self.welcomed and i.id in self.loads for i in infos), "welcome and load")

    async def _receive_loads(self) -> None:
        while True:
            for message in await self.transport.receive_published():
                if isinstance(message, WorkerLoad):
                    self.loads[message.worker_id] = message
                else:
                    self.prefix_events.append(message)

    async def _receive(self) -> None:
        while True:
            worker_id, message, payload = await self.transport.receive()
            if isinstance(message, Welcome):
                self.welcomed.add(worker_id)
                self.welcomes += 1
            elif isinstance(message, Disconnected):
                self.disconnected.append(worker_id)
            elif isinstance(message, CallReply):
                self.replies.append(message)
            elif isinstance(message, PrefixSnapshot):
                self.snapshots.append(message)
            elif isinstance(message, Outputs):
                self._take_outputs(message, payload)
            elif isinstance(message, EngineCrashed):
                self.crashes.append(message)
            else:
                assert not isinstance(message, Unreadable), f"{worker_id} sent what cannot be read"
                self._take_event(worker_id, message)

    def _take_outputs(self, message: Outputs, payload: list[bytes]) -> None:
        decoded = self.codec.decode_outputs(payload)
        for output, attempt in zip(decoded.outputs, message.attempts, strict=True):
            request = self.requests.get(output.request_id)
            if request is None or request.attempt != attempt or request.finish is not None:
                self.late_outputs += 1
                continue
            request.tokens += output.new_token_ids
            request.finish = output.finish_reason

    def _take_event(self, worker_id: str, message: Claimed | Prefilled | PrefillFailed | Rejected) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.attempt != message.attempt:
            return
        request.events.append(message)
        if isinstance(message, Claimed):
            request.claimed_by.append(worker_id)
        if isinstance(message, Claimed) and self.decode is not None and not request.decode:
            request.decode = self.decode
            self.submit_to(self.decode, request, message.kv_source)

    def new(self, prompt: list[int], max_tokens: int = 8) -> Request:
        request = Request(f"r-{uuid.uuid4().hex[:8]}", prompt, max_tokens)
        self.requests[request.id] = request
        return request

    def frames(self, request: Request) -> list[bytes]:
        sampling = WireSampling(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        return self.codec.encode_request(WireRequest(request.id, request.prompt, sampling_params=sampling))

    def submit_to(
        self,
        worker_id: str,
        request: Request,
        source: KVSource | None = None,
        trial_s: float = 0.0,
        suspect: bool = False,
    ) -> Sent:
        """Also as a retry: what the client has already is resumed after."""
        request.decode = worker_id
        sequence = self._sequence[worker_id] = self._sequence.get(worker_id, 0) + 1
        submit = Submit(
            request.id,
            request.attempt,
            sequence,
            len(request.prompt),
            source,
            list(request.tokens),
            trial_s=trial_s,
            suspect=suspect,
        )
        return self.transport.send(worker_id, submit, self.frames(request))

    def submit(self, worker_id: str, prompt: list[int], max_tokens: int = 8) -> Request:
        request = self.new(prompt, max_tokens)
        self.submit_to(worker_id, request)
        return request

    async def decoded_by(self, worker_id: str, request: Request) -> None:
        """Submit it there, and wait until it has finished."""
        self.submit_to(worker_id, request)
        await self.finished(request)

    def sequence(self, worker_id: str) -> int:
        return self._sequence.get(worker_id, 0)

    async def enqueue(
        self, *requests: Request, body: bytes | None = None, cached: dict[str, int] | None = None, ttft_s: float = 0.0
    ) -> None:
        for request in requests:
            tokens = len(request.prompt)
            job = PrefillJob(
                request_id=request.id,
                attempt=request.attempt,
                tokens=tokens,
                uncached_tokens=tokens,
                arrived_at=time.time(),
                reply_to=self.id,
                body=pack_frames(self.frames(request)) if body is None else body,
                cached=cached or {},
                ttft_s=ttft_s,
            )
            await self.queue.enqueue(job)

    async def claimed(self, request: Request, cached: dict[str, int] | None = None) -> Claimed:
        """Enqueue it, and wait until a worker has claimed it."""
        await self.enqueue(request, cached=cached)
        found: Claimed = await until(lambda: request.got(Claimed), "a claim")
        return found

    def abort(self, worker_id: str, request: Request) -> None:
        self.transport.send(worker_id, Abort(request.id, request.attempt))

    async def finished(self, *requests: Request) -> None:
        """With the tokens that a simulated engine gives."""
        await self.ended(*requests)
        for r in requests:
            assert r.tokens == expected(r.prompt, r.max_tokens), r

    async def ended(self, *requests: Request) -> None:
        await until(lambda: all(r.finish is not None for r in requests), "finished")
        for r in requests:
            assert r.finish is FinishReason.LENGTH and len(r.tokens) == r.max_tokens, r

    async def close(self) -> None:
        await cancelled(*self._tasks)
        self.transport.close()
        self.loads.clear()  # it hears of none any more


@dataclass
class LocalWorker:
    """An agent in this process."""

    agent: Agent
    engine: SimEngine
    task: asyncio.Task[int]

    @property
    def info(self) -> WorkerInfo:
        assert self.agent.info is not None
        return self.agent.info

    @property
    def id(self) -> str:
        return self.agent.worker_id

    @property
    def ended(self) -> bool:
        return self.task.done()

    async def stopped(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.task


class WorkerProcess:
    """A worker started by its console entry point, its log collected."""

    def __init__(self, worker_id: str, process: asyncio.subprocess.Process, folder: Path) -> None:
        """`folder`: its temporary folder, with its configuration."""
        self.id, self.process, self.folder = worker_id, process, folder
        self.log: list[str] = []
        self._reader = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode(errors="replace").rstrip())

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    async def stopped(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            code = await self.process.wait()
            await self._reader
        return code


class Workers:
    """One namespace on one Redis, with everything started in it."""

    def __init__(self, url: str, server: EmbeddedRedis, redis: Redis, config: Config, tree: dict[str, Any]) -> None:
        self.url, self.server, self.redis, self.config, self.tree = url, server, redis, config, tree
        self.registry = Registry(redis, config.namespace)
        self.queue = PrefillQueue(redis, config.namespace, lease_s=config.workers.lease_s)
        self.local: list[LocalWorker] = []
        self.processes: list[WorkerProcess] = []
        self.frontends: list[Frontend] = []
        self.routers: list[RouterClient] = []
        self._numbers = itertools.count()

    async def start(self, role: Role, **sim: Any) -> LocalWorker:
        config = parse_config(self.tree)
        engine = SimEngine(self.simulated(role, **sim), "sim-model", kv=config.kv, tpot_s=config.slo.tpot_s)
        worker_id, listening = f"{role.value}-{next(self._numbers)}", Listening("127.0.0.1")
        agent = Agent(engine, self.redis, config, worker_id, role, listening, generation=0)
        worker = LocalWorker(agent, engine, asyncio.create_task(agent.run()))
        self.local.append(worker)
        await self.registered(worker.id)
        return worker

    def simulated(self, role: Role, **changed: Any) -> Simulated:
        """What an engine of this role is, with these fields changed."""
        config = parse_config(self.tree)
        return replace(simulated(config.sim, engine_args(config, role)), **changed)

    async def served(self, role: Role, **sim: Any) -> tuple[LocalWorker, Frontend]:
        """A worker, and a frontend that has met it."""
        worker = await self.start(role, **sim)
        return worker, await self.frontend(worker)

    async def pair(self, **sim: Any) -> tuple[LocalWorker, LocalWorker, Frontend]:
        """A prefill and a decode worker, and a frontend that binds what is claimed to the latter."""
        prefill, decode = await self.start(Role.PREFILL, **sim), await self.start(Role.DECODE, **sim)
        return prefill, decode, await self.frontend(prefill, decode, binds_to=decode)

    async def spawn(self, role: Role, *arguments: str, wait: bool = True, name: str = "") -> WorkerProcess:
        worker_id = name or f"{role.value}-{next(self._numbers)}"
        folder = Path(tempfile.mkdtemp(prefix="pd-test-"))
        (folder / "fleet.yaml").write_text(yaml.safe_dump(self.tree))
        command = [sys.executable, "-m", "workers.main", role.value, "--redis", self.url, "--id", worker_id]
        command += ["--config", str(folder / "fleet.yaml"), *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stderr=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(folder)}
        )
        worker = WorkerProcess(worker_id, process, folder)
        self.processes.append(worker)
        if wait:
            await self.registered(worker_id)
        return worker

    async def frontend(
        self,
        *workers: LocalWorker | WorkerProcess,
        name: str = "",
        binds_to: LocalWorker | WorkerProcess | None = None,
    ) -> Frontend:
        """A frontend that has met these workers. What is claimed it binds to the decode worker `binds_to`."""
        frontend = Frontend(self.redis, self.config, name)
        self.frontends.append(frontend)
        await frontend.start()
        registered = await self.registry.workers()
        await frontend.meet(*[registered[w.id] for w in workers])
        frontend.decode = binds_to.id if binds_to is not None else None
        return frontend

    def unstarted_router(self) -> RouterClient:
        """A frontend's router, which is closed with the workers."""
        self.routers.append(RouterClient(self.redis, self.config))
        return self.routers[-1]

    async def router(self, prefill: int = 0, decode: int = 0) -> RouterClient:
        """One that so many workers of each role have greeted."""
        router = self.unstarted_router()
        await router.start()
        ready = router.connection.fleet.ready
        await until(lambda: ready(Role.PREFILL) >= prefill and ready(Role.DECODE) >= decode, "greetings")
        return router

    async def registered(
        self,
        worker_id: str,
        role: Role | None = None,
        state: WorkerState = WorkerState.READY,
        timeout_s: float = DEADLINE_S,
    ) -> WorkerInfo:
        deadline = time.monotonic() + timeout_s
        while True:
            info = None
            with contextlib.suppress(RedisAway):
                info = (await self.registry.workers()).get(worker_id)
            if info is not None and info.state is state and role in (None, info.role):
                return info
            for worker in [*self.local, *self.processes]:
                if isinstance(worker, LocalWorker) and worker.id == worker_id and worker.task.done():
                    raise AssertionError(f"{worker_id} ended: {worker.task.exception() or worker.task.result()}")
                if isinstance(worker, WorkerProcess) and worker.id == worker_id and worker.process.returncode:
                    raise AssertionError(f"{worker_id} ended:\n" + "\n".join(worker.log))
            assert time.monotonic() < deadline, f"{worker_id} is {info}"
            await asyncio.sleep(0.01)

    def workers(self) -> list[LocalWorker | WorkerProcess]:
        return [*self.local, *self.processes]

    async def assert_no_leaks(self) -> None:
        """All blocks free, nothing held, as each worker itself publishes it; queue and claims empty, unless no worker
        is left to sweep them."""
        for frontend in self.frontends:
            for worker in self.workers():
                if worker.id not in frontend.loads:
                    continue

                def clean(frontend: Frontend = frontend, worker: LocalWorker | WorkerProcess = worker) -> bool:
                    load = frontend.loads[worker.id]
                    held = load.blocks_total - load.blocks_free
                    return worker.ended or (held, load.running, load.waiting, load.waiting_tokens) == (0, 0, 0, 0)

                await until(clean, f"{worker.id} free: {frontend.loads[worker.id]}")
        if all(worker.ended for worker in self.workers()):
            return
        deadline = time.monotonic() + DEADLINE_S
        while (depth := await self.queue.depth()).requests or depth.claimed or depth.tokens:
            assert time.monotonic() < deadline, depth
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for frontend in self.frontends:
            await frontend.close()
        for router in self.routers:
            await router.close()
        for worker in self.local:
            if not worker.ended:
                worker.agent.request_stop(0.0)
                worker.agent.request_stop(0.0)
                await worker.stopped()
        for spawned in self.processes:
            if not spawned.ended:
                spawned.kill()
            await spawned.stopped()
            shutil.rmtree(spawned.folder)


@contextlib.asynccontextmanager
async def running_workers(server: EmbeddedRedis, **sections: Any) -> AsyncIterator[Workers]:
    """`sections` are configuration sections, and `sim` may have sizes of engines too; times are short unless said
    otherwise. Nothing may be left at the end."""
    tree: dict[str, Any] = {
        "model": "sim-model",
        "engine": "sim",
        "namespace": f"test-{uuid.uuid4().hex[:8]}",
        "workers": {"timeout_s": 1.0, "drain_timeout_s": 5.0},
        "sim": {"speed": 10},
        "kv": {"transfer": "chunk", "transfer_timeout_s": 5.0},
        "launcher": {"stop_timeout_s": 4.0},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    sizes = {name: tree["sim"].pop(name) for name in [*tree["sim"]] if name in HONOURED}
    if sizes:
        tree["workers"]["engine_args"] = tree["workers"].get("engine_args", {}) | sizes
    config = parse_config(tree)
    redis = await connect(server.url, 2.0)
    workers = Workers(server.url, server, redis, config, tree)
    try:
        yield workers
        await workers.assert_no_leaks()
    finally:
        await workers.close()
        await redis.aclose()
