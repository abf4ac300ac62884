"""The data path of a worker: messages from frontends to the engine, and the engine's outputs to frontends.

Owns the attempts that are decoded here; outputs of prefills go to `prefills`. Changes of role, leases and membership
are in other modules.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from orchestrator.policy.decode_choice import blocks_for
from orchestrator.process.tasks import cancelled
from orchestrator.types import PauseState
from orchestrator.wire.control import METHODS
from orchestrator.wire.messages import (
    Abort,
    Call,
    CallReply,
    EngineCrashed,
    Fetch,
    Hello,
    Lend,
    Outputs,
    PrefixResync,
    Submit,
    ToWorker,
    engine_key,
)
from orchestrator.wire.sockets import MAX_MESSAGE_BYTES, Sent
from workers.attempts import Attempt
from workers.engine import EngineDead, EngineOutput, EngineRequest, EngineStep, Phase, Refusal, submit
from workers.load.reports import PrefixReporter
from workers.peers import IDLE_FRONTENDS_CHECK_S
from workers.prefills import Parts, Prefills
from workers.unit.link import GroupLink
from workers.unit.pause import CALL_TIMEOUT_S, EnginePause

log = logging.getLogger("pd.worker")


class Serving:
    """`handle` takes messages of frontends, `deliver` takes steps of the engine."""

    def __init__(self, parts: Parts, prefills: Prefills, prefix: PrefixReporter, link: GroupLink) -> None:
        info, self._engine, _, self._frontends, self._attempts, self._load = parts
        self._engine_id, self._block_size = info.kv.engine_id, info.identity.block_size
        self._prefills, self._prefix = prefills, prefix
        self.leaves = False  # then no submission is taken; else any is, also of a frontend that has not heard of a role
        self._idle_checked_at = 0.0  # when frontends without requests here were last checked
        self._calls: set[asyncio.Task[None]] = set()
        self._pause = EnginePause(parts.engine, link, parts.load.paused, prefix.cleared)
        self._start(self._pause.run())

    # ---- from frontends ----------------------------------------------------------------------------------------

    async def handle(self, frontend_id: str, message: ToWorker, payload: list[bytes]) -> None:
        """Raises EngineDead."""
        if isinstance(message, Submit):
            await self._submit(frontend_id, message, payload)
        elif isinstance(message, Abort):
            await self._abort(frontend_id, message)
        elif isinstance(message, Hello):
            self._frontends.on_hello(frontend_id, message)
            self._load.dirty.set()  # a report soon: a new frontend has none yet
        elif isinstance(message, PrefixResync):
            self._prefix.snapshot(frontend_id)
        elif isinstance(message, Fetch):
            asked = self._attempts.get(message.key)
            if asked is not None and asked.frontend_id == frontend_id:
                self._prefills.fetches.answer(message.key, message.prefix)
        elif isinstance(message, Lend):
            self._start(self._lend(message, payload))
        elif isinstance(message, Call):
            self._start(self._call(frontend_id, message))

    def _start(self, calling: Coroutine[Any, Any, None]) -> None:
        """The engine answers between two steps, and messages do not wait for that."""
        task = asyncio.create_task(calling)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _lend(self, message: Lend, payload: list[bytes]) -> None:
        self._attempts.lends = True  # so that the engine is told of the other's death
        try:
            await self._engine.lend(message.key, [bytes(frame) for frame in payload], message.tokens)
        except RuntimeError as error:  # the asker waits for a bounded time
            log.warning("no prefix is lent for %s: %s", message.key, error)

    async def _submit(self, frontend_id: str, message: Submit, payload: list[bytes]) -> None:
        taken = Refusal("draining", leaving=True) if self.leaves else await self._take(frontend_id, message)
        self._load.submitted(frontend_id, message.sequence)
        if isinstance(taken, Attempt):
            self._start(self._give(taken, message, payload))
        elif taken is not None:
            self._frontends.reject(frontend_id, message.request_id, message.attempt, taken)

    async def _take(self, frontend_id: str, message: Submit) -> Attempt | Refusal | None:
        """The new attempt, or why it is not taken; None for one that nobody waits for."""
        key = engine_key(message.request_id, message.attempt)
        older = self._attempts.find(Phase.DECODE, message.request_id)
        if older is not None:
            if older.frontend_id != frontend_id:
                return Refusal(f"request id {message.request_id} is in use by another frontend")
            if older.number >= message.attempt:
                return None  # a duplicate, or overtaken by its successor
            await self._drop([older])
        source = message.kv_source
        here = source is not None and source.endpoint.engine_id == self._engine_id
        if here or self._attempts.was_prefilled(message.request_id, key):
            # This worker prefilled the request and has changed its role. Its engine may still hold the key, and a
            # second request with the same key could end the engine.
            return Refusal("this worker prefilled it", leaving=True)
        if self._attempts.get(key) is not None:
            return Refusal("this worker prefills it")
        now = time.monotonic()
        if message.trial_s and any(
            now < tried.trial_until and (tried.suspect or message.suspect) for tried in self._attempts.on_trial()
        ):
            return Refusal("another is on trial here", leaving=True)
        context_tokens = message.prompt_tokens + len(message.resume_tokens)
        attempt = Attempt(
            key=key,
            request_id=message.request_id,
            number=message.attempt,
            frontend_id=frontend_id,
            phase=Phase.DECODE,
            tokens=0 if source is not None else max(1, context_tokens - message.cached_tokens),
            since=now,
            trial_until=now + message.trial_s if message.trial_s else 0.0,
            suspect=message.suspect,
            blocks=blocks_for(context_tokens, self._block_size),
        )
        self._attempts.add(attempt)
        self._load.added()
        if source is not None:
            self._attempts.sources.add(source.endpoint.engine_id)
        return attempt

    async def _give(self, attempt: Attempt, message: Submit, payload: list[bytes]) -> None:
        """Submit to the engine. A fetch before that, or a LoRA adapter that the engine has to load, takes seconds, for
        which other messages do not wait."""
        source, prefix = message.kv_source, message.prefix
        request = EngineRequest(attempt.key, Phase.DECODE, payload, source, message.resume_tokens, message.behind_s)
        try:
            if prefix is not None and source is None:
                await self._prefills.fetches.fetch(prefix, payload)
            if not self._attempts.holds(attempt):
                return
            refusal = await submit(self._engine, request)
            if not self._attempts.holds(attempt):
                await self._engine.abort([attempt.key])
            elif refusal is not None:
                self._attempts.remove(attempt)
                self._frontends.reject(attempt.frontend_id, attempt.request_id, attempt.number, refusal)
        except EngineDead as error:
            log.debug("%s was not submitted: %s", attempt.key, error)
        finally:
            self._load.given(attempt)

    async def _abort(self, frontend_id: str, message: Abort) -> None:
        for phase in Phase:
            attempt = self._attempts.find(phase, message.request_id)
            if attempt is not None and attempt.number <= message.attempt and attempt.frontend_id == frontend_id:
                await self._drop([attempt])
        await self._end_pushing(self._attempts.end_pushing(frontend_id, message.request_id, message.attempt))

    async def _end_pushing(self, keys: list[str]) -> None:
        if keys:
            self._load.dirty.set()
            await self._engine.abort(keys)

    async def _drop(self, dropped: list[Attempt]) -> None:
        for attempt in dropped:
            self._attempts.remove(attempt)
            if attempt.phase is Phase.PREFILL:
                self._prefills.aborted(attempt)
        self._load.dirty.set()
        await self._engine.abort([attempt.key for attempt in dropped])

    async def give_back(self, why: str) -> None:
        """Tell the frontends to continue elsewhere what is decoded here, and forget it."""
        decoding = [attempt for attempt in self._attempts.all() if attempt.phase is Phase.DECODE]
        refusal = Refusal(why, leaving=True)
        for attempt in decoding:
            self._frontends.reject(attempt.frontend_id, attempt.request_id, attempt.number, refusal)
        await self._drop(decoding)

    async def _call(self, frontend_id: str, call: Call) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                result = await self._carry_out(call)
            if self._frontends.send(frontend_id, CallReply(call.call_id, result=result)) is Sent.TOO_LARGE:
                raise ValueError("its answer is larger than a message may be")
            if call.method == "reset_prefix_cache" and result:
                self._prefix.cleared()
        except (EngineDead, TimeoutError):
            # No failure of the call. This worker leaves, and its successor makes up for what it did not do; or it is
            # late, and the frontend gives up within the next five seconds.
            return
        except Exception as error:  # every error of the engine goes to the caller
            failed = CallReply(call.call_id, error=f"{call.method}: {str(error) or type(error).__name__}")
            self._frontends.send(frontend_id, failed)

    async def _carry_out(self, call: Call) -> Any:
        if call.method not in METHODS:
            raise ValueError("not a control method")
        if call.method == "set_pause":
            return await self._pause.set(PauseState(*call.args))
        return await self._engine.call(call.method, call.args, call.kwargs)

    # ---- from the engine ---------------------------------------------------------------------------------------

    async def deliver(self, step: EngineStep) -> None:
        """Send the outputs of one step: one message per frontend. Raises EngineDead."""
        decoded: dict[str, list[tuple[Attempt, EngineOutput]]] = defaultdict(list)
        if step.tokens_left:
            self._attempts.computing(step.tokens_left, time.monotonic())
        for output in step.outputs:
            attempt = self._attempts.get(output.request_id)
            if attempt is None:
                self._prefills.fetches.take(output)
                continue  # else aborted meanwhile
            if not attempt.computed:
                self._attempts.mark_computed(attempt)
                self._load.prefilled(_computed_tokens(attempt, output))
            if attempt.phase is Phase.PREFILL:
                self._prefills.output(attempt, output, step.timestamp, step.refused.get(attempt.key))
            elif (why := step.refused.get(attempt.key)) is not None:
                self._attempts.remove(attempt)
                refusal = Refusal(f"invalid: {why}", final=True)
                self._frontends.reject(attempt.frontend_id, attempt.request_id, attempt.number, refusal)
            else:
                decoded[attempt.frontend_id].append((attempt, output))
        for frontend_id, batch in decoded.items():
            await self._deliver_to(frontend_id, batch, step.timestamp)
        if step.prefix is not None:
            self._prefix.changed(step.prefix)
        if step.load is not None:
            self._load.stepped(step.load)
        else:  # of no step, as those of requests that the engine refused
            self._load.dirty.set()

    async def _deliver_to(self, frontend_id: str, batch: list[tuple[Attempt, EngineOutput]], timestamp: float) -> None:
        for attempt, output in batch:
            output.request_id = attempt.request_id
        message = Outputs([attempt.number for attempt, _ in batch], time.monotonic())
        payload = self._engine.encode_outputs([output for _, output in batch], timestamp)
        sent = self._frontends.send(frontend_id, message, payload)
        if sent is Sent.TOO_LARGE:
            await self._deliver_large(frontend_id, batch, timestamp)
            return
        unfinished = []
        for attempt, output in batch:
            if output.finish_reason is not None:
                self._attempts.remove(attempt)
            else:
                unfinished.append(attempt)
        if unfinished and not sent:
            # A lost token cannot be sent again. The frontend starts another attempt when it has reconnected.
            log.warning("frontend %s is not connected: gave up %d of its requests", frontend_id, len(unfinished))
            await self._drop(unfinished)

    async def _deliver_large(
        self, frontend_id: str, batch: list[tuple[Attempt, EngineOutput]], timestamp: float
    ) -> None:
        """Outputs that are too large for one message: each goes by itself. One that is too large alone, such as all
        log-probabilities of a long prompt, is its own request's failure."""
        if len(batch) > 1:
            for one in batch:
                await self._deliver_to(frontend_id, [one], timestamp)
            return
        ((attempt, _),) = batch
        await self._drop([attempt])
        refusal = Refusal(f"its answer is larger than {MAX_MESSAGE_BYTES} bytes: ask for fewer log-probabilities", True)
        self._frontends.reject(frontend_id, attempt.request_id, attempt.number, refusal)

    def engine_crashed(self, why: str, first: bool) -> None:
        """Tell every frontend: one without requests here may wait for the answer of a call. One of the requests may be
        the cause where this engine was the `first` of its unit to die: what another rank has died of is none of them.
        """
        tried = self._attempts.on_trial()
        suspect = (tried[0].request_id if len(tried) == 1 and tried[0].suspect else None) if first else ""
        for frontend_id in self._attempts.frontends() | self._frontends.greeted:
            others = self._attempts.others_without_output(frontend_id)
            self._frontends.send(frontend_id, EngineCrashed(why, others, suspect))

    # ---- frontends that vanish ---------------------------------------------------------------------------------

    async def check_frontends(self, timeout_s: float, now: float, late_s: float = 0.0) -> None:
        """Forget frontends that could not be reached for `timeout_s`, and abort their requests. Raises EngineDead.

        `late_s`: see `Frontends.gone`.
        """
        known = self._attempts.frontends()
        if now - self._idle_checked_at >= IDLE_FRONTENDS_CHECK_S:
            self._idle_checked_at = now
            known |= self._load.frontends | self._frontends.greeted  # of one that is dead nothing is kept
        for frontend_id in self._frontends.gone(known, timeout_s, now, late_s):
            await self._abort_frontend(frontend_id, now)

    async def _abort_frontend(self, frontend_id: str, now: float) -> None:
        attempts = [attempt for attempt in self._attempts.all() if attempt.frontend_id == frontend_id]
        if attempts:
            log.warning("aborted %d attempts of frontend %s, which is gone", len(attempts), frontend_id)
            await self._drop(attempts)
        await self._end_pushing(self._attempts.end_pushing_to(frontend_id))
        self._frontends.forget(frontend_id, now)
        self._load.forget(frontend_id)

    async def close(self) -> None:
        await cancelled(*self._calls)


def _computed_tokens(attempt: Attempt, output: EngineOutput) -> int:
    """Prompt tokens that the engine computed: as it says, or as was believed; none of a request that it gave up."""
    if (stats := getattr(output, "prefill_stats", None)) is not None:
        return int(stats.num_computed_tokens)
    return attempt.tokens if output.new_token_ids else 0
