"""The simulated engine: it behaves like vLLM's engine from outside, with modelled time and without a model.

Steps take as long as `Simulated` says, `scheduler` has the requests and the model of an engine, `transfers` models KV
transfers between real processes, and tokens are a pure function of the prompt. Its identity says "sim" instead of
"vllm".
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

import msgspec

from orchestrator.config.model import name_in_fleet
from orchestrator.config.settings import KVConfig
from orchestrator.config.simulated import CRASH_TOKEN, Simulated
from orchestrator.policy.prefix_keys import prefix_keys, salt_of
from orchestrator.process.tasks import cancelled, first_of
from orchestrator.types import EngineIdentity, KVEndpoint
from orchestrator.wire.messages import PROTOCOL_VERSION, MessageError
from workers.engine import (
    EngineDead,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineStep,
    Group,
    InvalidEngineRequest,
    Phase,
)
from workers.load.board import Board
from workers.sim.codec import (
    EventType,
    SimCodec,
    WireEvent,
    WireOutput,
    WirePrefillStats,
    WireRequest,
    WireSampling,
)
from workers.sim.lockstep import Lockstep
from workers.sim.request import SimRequest, TokenStream
from workers.sim.scheduler import Sampled, SimScheduler
from workers.sim.transfers import SimTransfers

log = logging.getLogger("pd.sim")

SIM_VERSION = "sim-1"
# Only this much of a late step is made up for: beyond it the machine is too slow, not the model.
MAX_CATCH_UP_S = 0.05
# Of calls that change nothing here: there are no multimodal caches, and adapters change no simulated answer.
ANSWERS = dict.fromkeys(
    ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "add_lora", "remove_lora"), True
) | {"is_sleeping": False}


class SimEngine:
    """Implements `workers.engine.Engine`. A task of the caller's event loop runs the steps."""

    def __init__(
        self,
        config: Simulated,
        model: str,
        *,
        engine_id: str | None = None,
        kv_host: str = "127.0.0.1",
        kv_port: int = 0,
        kv_advertise: str = "",
        kv: KVConfig | None = None,
        tpot_s: float = 0.0,
    ) -> None:
        self._config, self._model = config, model
        self._engine_id = engine_id or f"sim-{uuid.uuid4().hex[:12]}"
        self._host, self._port, self._advertise = kv_host, kv_port, kv_advertise or kv_host
        self._codec, self._scheduler = SimCodec(), SimScheduler(config, tpot_s=tpot_s)
        self._transfers = SimTransfers(self._scheduler, kv or KVConfig(), self._engine_id, self._wake_up)
        self._lockstep = Lockstep(Group(), self._wake_up)
        self._board: Board | None = None
        self._steps: asyncio.Queue[EngineStep] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._step_ms = 0.0
        self._paused = False

    async def start(self, group: Group = Group()) -> EngineInfo:
        """Raises OSError if the KV port is in use."""
        self._lockstep, self._board = Lockstep(group, self._wake_up), Board.here()
        self._scheduler.board = self._board
        await self._lockstep.start()
        port = await self._transfers.listen(self._host, self._port, self._advertise)
        self._task = asyncio.create_task(self._run(), name="sim-engine")
        config = self._config
        identity = EngineIdentity(
            model=name_in_fleet(self._model),
            dtype="sim",
            kv_cache_dtype="sim",
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            engine="sim",
            engine_version=SIM_VERSION,
            protocol=PROTOCOL_VERSION,
            messages="sim",
        )
        return EngineInfo(
            identity=identity,
            kv=KVEndpoint(engine_id=self._engine_id, host=self._advertise, port=port),
            blocks_total=config.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_bytes_per_token=config.kv_bytes_per_token,
            speed=self._scheduler.profile.speed,
            lends=config.prefix_caching,
            lockstep=group.size > 1,
            adapter_slots=config.max_loras,
        )

    async def submit(self, request: EngineRequest) -> None:
        self._check_alive()
        simulated = self._admit(request)
        self._scheduler.submit(simulated)
        self._wake.set()

    async def abort(self, keys: list[str]) -> None:
        self._check_alive()
        for key in keys:
            if request := self._scheduler.requests.get(key):
                self._transfers.end(request, "aborted")
        self._wake.set()

    async def next_step(self) -> EngineStep:
        if self._steps.empty():
            self._check_alive()
            assert self._task is not None
            async with first_of(self._steps.get(), asyncio.shield(self._task)) as step:
                if step.done():
                    return step.result()
            self._check_alive()
        return self._steps.get_nowait()

    def encode_outputs(self, outputs: list[Any], timestamp: float) -> list[bytes]:
        return self._codec.encode_outputs(outputs, timestamp)

    async def load(self) -> EngineLoad:
        await self._lockstep.met()
        self._check_alive()
        return self._load()

    async def fail_peer(self, engine_id: str) -> None:
        self._transfers.fail_peer(engine_id)

    async def meet(self, peer: KVEndpoint) -> None:
        self._transfers.meet(peer)

    async def ended_suddenly(self) -> bool:  # it is part of the worker's process
        return False

    async def lend(self, key: str, frames: list[bytes], tokens: int) -> None:
        try:
            keys = self._prefix_keys(self._codec.decode_request(frames))[: tokens // self._config.block_size]
        except MessageError as error:
            raise RuntimeError(str(error)) from error
        cached = len(keys) * self._config.block_size == tokens and self._scheduler.kv.hit_units(keys) == len(keys)
        self._transfers.lend(key, tokens if cached else 0)

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Raises ValueError for a method that the simulated engine does not have."""
        if method in ("pause_scheduler", "resume_scheduler"):
            pausing = method == "pause_scheduler"
            await self._lockstep.agree(pausing)
            self._paused = pausing
            if kwargs.get("clear_cache"):
                self._scheduler.clear_cache()
            self._wake.set()
            return None
        if method == "reset_prefix_cache":
            self._scheduler.clear_cache()
        if method == "is_scheduler_paused":
            return self._paused
        if method == "fingerprint_lora":
            return args[1]  # nothing is read: an adapter changes no simulated answer
        if method not in ANSWERS:
            raise ValueError(f"the simulated engine cannot {method}; use --engine vllm")
        return ANSWERS[method]

    async def stop(self) -> None:
        await cancelled(self._task)
        await self._lockstep.close()
        await self._transfers.close()

    # ---- the inside --------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._task is None:
            raise EngineDead("the simulated engine was not started")
        if self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            raise EngineDead(f"the simulated engine ended: {error or 'stopped'}") from error

    def _wake_up(self) -> None:
        self._wake.set()

    def _admit(self, request: EngineRequest) -> SimRequest:
        try:
            wire = self._codec.decode_request(request.frames)
        except MessageError as error:
            raise InvalidEngineRequest(str(error)) from error
        sampling = wire.sampling_params
        if sampling is None or wire.pooling_params is not None:
            raise InvalidEngineRequest("the simulated engine only generates; it has no pooling")
        for name in ("logprobs", "prompt_logprobs", "structured_outputs"):
            if getattr(sampling, name) is not None:
                raise InvalidEngineRequest(f"the simulated engine has no {name}")
        return self._request(request, wire, sampling)

    def _request(self, request: EngineRequest, wire: WireRequest, sampling: WireSampling) -> SimRequest:
        if request.prefix_tokens:
            wire.prompt_token_ids = (wire.prompt_token_ids or [])[: request.prefix_tokens]
            sampling.max_tokens = 1
        prompt = wire.prompt_token_ids or []
        resumed = len(request.resume_tokens)
        limit = self._config.max_model_len if sampling.max_tokens is None else sampling.max_tokens
        if limit <= resumed:
            raise InvalidEngineRequest(f"{resumed} tokens of at most {limit} are there already")
        eos = None if sampling.ignore_eos else sampling.eos_token_id
        now = time.monotonic()
        return SimRequest(
            key=request.key,
            phase=request.phase,
            prompt=prompt,
            resume_tokens=resumed,
            max_tokens=limit - resumed,
            min_tokens=sampling.min_tokens,
            eos_token_id=eos,
            stop_token_ids=frozenset(sampling.stop_token_ids or ()),
            stream=TokenStream(prompt, sampling.eos_token_id),
            kv_source=request.kv_source if request.phase is Phase.DECODE else None,
            prefix=self._prefix_keys(wire),
            adapter=wire.adapter,
            queued_at=now,
            order=now + request.behind_s,
        )

    def _prefix_keys(self, wire: WireRequest) -> list[int]:
        if not self._config.prefix_caching or wire.lora_request is not None or wire.mm_features:
            return []
        return prefix_keys(wire.prompt_token_ids or [], self._config.block_size, salt_of(None, wire.cache_salt))

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            self._wake.clear()
            if self._lockstep.ended:
                raise EngineDead("another rank of its group has ended")
            began = time.monotonic()
            step, receiving = self._scheduler.schedule(began, self._paused)
            for request in receiving:
                self._transfers.receive(request)
            if step is None and not self._lockstep.running:
                if receiving:
                    self._steps.put_nowait(EngineStep([], self._load(), began, self._scheduler.prefix_changes()))
                await self._wake.wait()
                due = time.monotonic()
                continue
            tokens, prompts = (self._scheduler.step_tokens, self._scheduler.prompts) if step is not None else (0, 0)
            if step is not None:
                self._started(began)
            step_s = step.first_s if step is not None else self._scheduler.profile.step_s
            duration = await self._lockstep.meet(step_s, step is not None)
            # Sleep until the step is due, not for its duration: coarse timers then do not slow the model.
            due = max(due, began - MAX_CATCH_UP_S) + duration
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self._board is not None:
                self._board.note(tokens, duration, self._lockstep.waves, prompts)
            self._step_ms = duration * 1e3
            if step is not None or receiving:
                self._finish(began, step is not None)

    def _started(self, began: float) -> None:
        for request in (stay.job for stay in self._scheduler.running):
            if not request.scheduled_at:
                request.scheduled_at = began
                if request.phase is Phase.PREFILL:
                    self._transfers.start(request)

    def _finish(self, began: float, computed: bool) -> None:
        now, scheduler = time.monotonic(), self._scheduler
        outputs: list[WireOutput] = []
        if computed:
            self._crash_on_token()
            prompts = [stay.job for stay, _ in scheduler.chunks]
            outputs = [self._output(s) for s in scheduler.complete(now - began, now)]
            self._transfers.computed(prompts, began, now)
        step = EngineStep(outputs, self._load(), now, scheduler.prefix_changes(), scheduler.tokens_left())
        self._steps.put_nowait(step)

    def _crash_on_token(self) -> None:
        """Raises EngineDead if a prompt in the batch has the token `crash_token`."""
        token = self._config.crash_token
        for request in (stay.job for stay in self._scheduler.running) if token is not None else ():
            if not request.sampled and token in request.prompt:
                raise EngineDead(f"prompt of {request.key} has the token {token} ({CRASH_TOKEN})")

    def _output(self, sampled: Sampled) -> WireOutput:
        request = sampled.request
        output = WireOutput(request.key, [sampled.token], finish_reason=sampled.finish, stop_reason=sampled.stop_token)
        if sampled.first:
            tokens, received = len(request.prompt), request.stay.phase == "remote"
            external, cached = (tokens, 0) if received else (0, request.stay.hit_tokens)
            output.events = [
                WireEvent(EventType.QUEUED, request.queued_at),
                WireEvent(EventType.SCHEDULED, request.scheduled_at),
            ]
            # Clients see prefix-cache hits only: received KV is not one.
            cacheable = len(request.prefix) * self._config.block_size
            output.prefill_stats = WirePrefillStats(
                num_prompt_tokens=tokens,
                num_computed_tokens=tokens - external - cached,
                num_cached_tokens=cached,
                num_local_cached_tokens=cached,
                num_external_cached_tokens=external,
                num_cache_creation_tokens=max(0, cacheable - cached),
            )
        return output

    def _load(self) -> EngineLoad:
        kv = self._transfers.counters()
        return msgspec.structs.replace(self._scheduler.load(), step_ms=self._step_ms, kv=kv)
