"""What a worker does with messages from frontends, and with what its engine puts out: the data path.

Knows nothing of roles changing, leases or membership; it is told whether submissions are taken, and hands prefill
results to whoever claimed them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from orchestrator.types import engine_key
from orchestrator.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Call,
    CallReply,
    Hello,
    Outputs,
    PrefixResync,
    Rejected,
    Submit,
    ToFrontend,
    ToWorker,
    Welcome,
)
from workers.attempts import Attempts, Held
from workers.engine import Engine, EngineDead, EngineOutput, EngineRequest, EngineStep, InvalidEngineRequest, Phase
from workers.loads import LoadReporter
from workers.prefix import PrefixReporter

log = logging.getLogger("pd.worker")

CALL_TIMEOUT_S = 55.0
_UNDELIVERED_PER_FRONTEND = 10_000


class Prefills(Protocol):
    """Where prefill attempts end: the claim loop."""

    def finished(self, held: Held, output: EngineOutput, timestamp: float) -> None: ...

    def aborted(self, held: Held) -> None: ...

    def progressed(self) -> None: ...


class Serving:
    """Owns which frontends are connected and what could not be told to them."""

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        attempts: Attempts,
        load: LoadReporter,
        prefix: PrefixReporter,
        send: Callable[[str, ToFrontend, Sequence[bytes]], bool],
        refusal: Callable[[], str | None],
        max_model_len: int,
    ) -> None:
        """`refusal`: why no submission is taken now, or None. `max_model_len`: prompt and answer, in tokens."""
        self._worker_id, self._engine = worker_id, engine
        self._attempts, self._load, self._prefix = attempts, load, prefix
        self._send_frames, self._refusal, self._max_model_len = send, refusal, max_model_len
        self._greeted: dict[str, asyncio.Event] = {}
        self._unreachable_since: dict[str, float] = {}
        self._undelivered: dict[str, list[tuple[str, int]]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self.prefills: Prefills | None = None

    def send(self, frontend_id: str, message: ToFrontend, payload: Sequence[bytes] = ()) -> bool:
        return self._send_frames(frontend_id, message, payload)

    async def greeted(self, frontend_id: str, timeout_s: float) -> bool:
        """Wait until that frontend says hello, next time."""
        event = self._greeted.setdefault(frontend_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True

    # ---- from frontends ----------------------------------------------------------------------------------------

    async def handle(self, frontend_id: str, message: ToWorker, payload: list[bytes]) -> None:
        """Raises EngineDead."""
        if isinstance(message, Submit):
            await self._submit(frontend_id, message, payload)
        elif isinstance(message, Abort):
            await self._abort(message)
        elif isinstance(message, Hello):
            self._hello(frontend_id, message)
        elif isinstance(message, PrefixResync):
            self._prefix.snapshot(frontend_id)
        elif isinstance(message, Call):
            task = asyncio.create_task(self._call(frontend_id, message), name=f"call-{message.method}")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def _hello(self, frontend_id: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            # Unanswered it never sends a request, which beats misunderstanding each other.
            log.error(
                "frontend %s speaks protocol %d, this worker %d; run the same version everywhere",
                *(frontend_id, hello.protocol, PROTOCOL_VERSION),
            )
            return
        self.send(frontend_id, Welcome(self._worker_id))
        self._load.dirty.set()  # a report soon: the new frontend has none yet
        self._unreachable_since.pop(frontend_id, None)
        if event := self._greeted.pop(frontend_id, None):
            event.set()
        for request_id, attempt in self._undelivered.pop(frontend_id, []):
            self._reject(frontend_id, request_id, attempt, "its outputs were lost with the connection")

    async def _submit(self, frontend_id: str, submit: Submit, payload: list[bytes]) -> None:
        why = self._refusal() or await self._take(frontend_id, submit, payload)
        self._load.submitted(frontend_id, submit.sequence)
        if why is not None:
            self._reject(frontend_id, submit.request_id, submit.attempt, why)

    async def _take(self, frontend_id: str, submit: Submit, payload: list[bytes]) -> str | None:
        """Into the engine. Returns why not."""
        key = engine_key(submit.request_id, submit.attempt)
        older = self._attempts.find(Phase.DECODE, submit.request_id)
        if older is not None:
            if older.frontend_id != frontend_id:
                return f"request id {submit.request_id} is in use by another frontend"
            if older.attempt >= submit.attempt:
                return None  # a duplicate, or overtaken by its successor
            await self._drop([older])
        if self._attempts.get(key) is not None:
            return "this worker prefills it"
        context_tokens = submit.prompt_tokens + len(submit.resume_tokens)
        tokens = 0 if submit.kv_source is not None else max(1, context_tokens - submit.cached_tokens)
        held = Held(key, submit.request_id, submit.attempt, frontend_id, Phase.DECODE, tokens, time.monotonic())
        self._attempts.add(held)
        self._load.held()
        request = EngineRequest(key, Phase.DECODE, payload, submit.kv_source, submit.resume_tokens)
        why = await self.start(held, request, context_tokens)
        if why is not None:
            self._attempts.remove(held)
        return why

    async def start(self, held: Held, request: EngineRequest, context_tokens: int) -> str | None:
        """Hand an attempt to the engine. Returns why it was not taken. Raises EngineDead."""
        # Frontends check this too, but one with another configuration must not crash the engine of everybody.
        if context_tokens >= self._max_model_len:
            return f"invalid: {context_tokens} tokens, the longest sequence here has {self._max_model_len}"
        try:
            await self._engine.submit(request)
        except InvalidEngineRequest as error:
            return f"invalid: {error}"
        except EngineDead:
            raise
        except Exception as error:  # a defect met by one request must not end all the others
            log.exception("the engine could not take %s", request.key)
            return f"error: {type(error).__name__}: {error}"
        held.submitted = True
        return None

    async def _abort(self, abort: Abort) -> None:
        for phase in Phase:
            held = self._attempts.find(phase, abort.request_id)
            if held is not None and held.attempt <= abort.attempt:
                await self._drop([held])
        if keys := self._attempts.end_pushing(abort.request_id, abort.attempt):
            self._load.dirty.set()
            await self._engine.abort(keys)

    async def abort_frontend(self, frontend_id: str) -> None:
        """That frontend is gone: nobody waits for its requests."""
        held = [h for h in self._attempts.all() if h.frontend_id == frontend_id]
        if held:
            log.warning("aborted %d attempts of frontend %s, which is gone", len(held), frontend_id)
            await self._drop(held)
        if keys := self._attempts.end_pushing_to(frontend_id):
            self._load.dirty.set()
            await self._engine.abort(keys)
        for known in (self._greeted, self._unreachable_since, self._undelivered):
            known.pop(frontend_id, None)
        self._load.forget(frontend_id)

    async def _drop(self, dropped: list[Held]) -> None:
        for held in dropped:
            self._attempts.remove(held)
            if held.phase is Phase.PREFILL and self.prefills is not None:
                self.prefills.aborted(held)
        self._load.dirty.set()
        await self._engine.abort([held.key for held in dropped])

    async def give_back(self, why: str) -> None:
        """Tell the frontends to continue elsewhere what is decoded here, and forget it."""
        held = [h for h in self._attempts.all() if h.phase is Phase.DECODE]
        for each in held:
            self._reject(each.frontend_id, each.request_id, each.attempt, why)
        await self._drop(held)

    async def _call(self, frontend_id: str, call: Call) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                result = await self._engine.call(call.method, call.args)
            reply = CallReply(call.call_id, self._worker_id, result=result)
            self.send(frontend_id, reply)
            if call.method == "reset_prefix_cache" and result:
                self._prefix.cleared()
        except Exception as error:  # whatever the engine says of it is the caller's
            why = "no answer in time" if isinstance(error, TimeoutError) else f"{error or type(error).__name__}"
            self.send(frontend_id, CallReply(call.call_id, self._worker_id, error=f"{call.method}: {why}"))

    def _reject(self, frontend_id: str, request_id: str, attempt: int, why: str) -> None:
        log.log(logging.DEBUG if why == "draining" else logging.WARNING, "rejected %s#%d: %s", request_id, attempt, why)
        if not self.send(frontend_id, Rejected(request_id, attempt, self._worker_id, why)):
            self._remember_undelivered(frontend_id, request_id, attempt)

    def _remember_undelivered(self, frontend_id: str, request_id: str, attempt: int) -> None:
        lost = self._undelivered.setdefault(frontend_id, [])
        if len(lost) < _UNDELIVERED_PER_FRONTEND:
            lost.append((request_id, attempt))

    # ---- from the engine ---------------------------------------------------------------------------------------

    async def deliver(self, step: EngineStep) -> None:
        """Outputs of one step to whom they belong: one message per frontend. Raises EngineDead."""
        outputs: dict[str, list[Any]] = {}
        held_of: dict[str, list[Held]] = {}
        for output in step.outputs:
            held = self._attempts.get(output.request_id)
            if held is None:
                continue  # aborted meanwhile
            if not held.computed:
                self._attempts.compute(held)
                self._load.prefilled(_computed_tokens(held, output))
            if held.phase is Phase.PREFILL:
                if output.finish_reason is not None:
                    self._attempts.remove(held)
                    if self.prefills is not None:
                        self.prefills.finished(held, output, step.timestamp)
                continue
            output.request_id = held.request_id
            outputs.setdefault(held.frontend_id, []).append(output)
            held_of.setdefault(held.frontend_id, []).append(held)
        for frontend_id, batch in outputs.items():
            await self._deliver_to(frontend_id, batch, held_of[frontend_id], step.timestamp)
        if step.prefix is not None:
            self._prefix.changed(step.prefix)
        if step.prompt_tokens:
            self._attempts.progress(step.prompt_tokens)
            if self.prefills is not None:
                self.prefills.progressed()
        self._load.stepped(step.load)

    async def _deliver_to(self, frontend_id: str, outputs: list[Any], held: list[Held], timestamp: float) -> None:
        message = Outputs(self._worker_id, [h.attempt for h in held], time.monotonic())
        sent = self._send_frames(frontend_id, message, self._engine.encode_outputs(outputs, timestamp))
        unfinished = []
        for each, output in zip(held, outputs, strict=True):
            if output.finish_reason is not None:
                self._attempts.remove(each)
            elif not sent:
                unfinished.append(each)
            if not sent:
                self._remember_undelivered(frontend_id, each.request_id, each.attempt)
        if unfinished:
            # A token that was lost cannot be sent again: told on reconnection, the frontend starts another attempt.
            log.warning("frontend %s is not connected: gave up %d of its requests", frontend_id, len(unfinished))
            await self._drop(unfinished)

    # ---- frontends that vanish ---------------------------------------------------------------------------------

    async def check_frontends(self, timeout_s: float, now: float) -> None:
        """Abort what belongs to frontends that could not be reached for `timeout_s`. Raises EngineDead."""
        for frontend_id in self._attempts.frontends() | self._undelivered.keys():
            if self.send(frontend_id, Welcome(self._worker_id)):
                self._unreachable_since.pop(frontend_id, None)
            elif now - self._unreachable_since.setdefault(frontend_id, now) > timeout_s:
                await self.abort_frontend(frontend_id)

    async def frontend_left(self, frontend_id: str) -> None:
        """The registry says so; believed unless it is still connected."""
        if not self.send(frontend_id, Welcome(self._worker_id)):
            await self.abort_frontend(frontend_id)

    async def close(self) -> None:
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


def _computed_tokens(held: Held, output: EngineOutput) -> int:
    """Prompt tokens that were prefilled here: what was cached cost no time, whatever was believed of it."""
    stats = getattr(output, "prefill_stats", None)
    return held.tokens if stats is None else min(held.tokens, stats.num_computed_tokens)
