"""Control calls to workers (LoRA, pause, cache resets). Each has a deadline, and succeeds on all workers or on none."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from typing import Any

from orchestrator.fleet.view import Fleet
from orchestrator.wire.control import METHODS, CallTarget
from orchestrator.wire.messages import Call, CallReply
from orchestrator.wire.sockets import Sent
from orchestrator.wire.transport import FrontendTransport

log = logging.getLogger("pd.frontend")

CALL_TIMEOUT_S = 60.0


class CallFailed(RuntimeError):
    """A worker refused the call, or did not answer in time; names the call and the workers."""


class Unanswered(CallFailed):
    """No worker failed it, but some did not answer, or there is none: another time it may succeed."""


class WorkerLost(Unanswered):
    """The worker left the fleet, or was not connected, before it had answered."""


class ControlCalls:
    def __init__(self, fleet: Fleet, transport: FrontendTransport) -> None:
        self._fleet = fleet
        self._transport = transport
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[int, str], asyncio.Future[Any]] = {}

    async def call(
        self, method: str, args: list[Any], kwargs: dict[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Call a method of `wire.control` on the fleet, and return the combined answer. Raises CallFailed when a worker
        fails, Unanswered where none does but some are silent; it is then undone on the workers where it succeeded."""
        row = METHODS[method]
        workers = [worker_id for worker_id, view in self._fleet.workers.items() if view.connected]
        if not workers:
            idle = self._fleet.rest is not None and self._fleet.rest.away
            why = "the model is idle and has no worker; send it a request first" if idle else "no worker is connected"
            raise Unanswered(f"{method}: {why}")
        if row.target is CallTarget.ONE:
            workers = workers[:1]
        results, failures = await self._ask(workers, method, args, kwargs or {}, timeout_s)
        if row.made_up_for and results:
            failures = {name: error for name, error in failures.items() if not isinstance(error, WorkerLost)}
        if not failures:
            if row.alike and any(result != next(iter(results.values())) for result in results.values()):
                told = ", ".join(f"{result!r} on {worker_id}" for worker_id, result in results.items())
                raise CallFailed(f"{method}: workers differ: {told}")
            return row.combine(list(results.values()))
        why = "; ".join(f"worker {worker_id}: {error}" for worker_id, error in failures.items())
        if row.undo is not None and results:
            # A call without an answer may have succeeded; undoing a call that did not happen does no harm.
            await self._undo([*results, *failures], method, row.undo, args)
            why += f" (undone on {', '.join(results)})"
        silent = all(isinstance(error, Unanswered) for error in failures.values())
        raise (Unanswered if silent else CallFailed)(f"{method}: {why}")

    def tell(self, worker_id: str, method: str, args: list[Any]) -> None:
        """Call one worker, without waiting for its answer."""
        self._transport.send(worker_id, Call(next(self._ids), method, args))

    async def _undo(self, workers: Iterable[str], method: str, undo: str, args: list[Any]) -> None:
        undo_args = [args[0].lora_int_id] if method == "add_lora" else []
        _, failures = await self._ask(workers, undo, undo_args, {}, CALL_TIMEOUT_S)
        for worker_id, error in failures.items():
            log.warning("%s was not undone on worker %s: %s", method, worker_id, error)

    async def _ask(
        self, workers: Iterable[str], method: str, args: list[Any], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, BaseException]]:
        """Results and failures by worker; each worker is in one of them."""
        call_id = next(self._ids)
        loop = asyncio.get_running_loop()
        waiting: dict[str, asyncio.Future[Any]] = {}
        for worker_id in workers:
            waiting[worker_id] = self._waiting[call_id, worker_id] = loop.create_future()
            if not (sent := self._transport.send(worker_id, Call(call_id, method, args, kwargs))):
                kinds = {Sent.UNREACHABLE: WorkerLost, Sent.NOT_READ: Unanswered}
                waiting[worker_id].set_exception(kinds.get(sent, CallFailed)(sent.value))
        try:
            _, silent = await asyncio.wait(waiting.values(), timeout=timeout_s)
        finally:
            for worker_id in waiting:
                del self._waiting[call_id, worker_id]
        for future in silent:
            future.set_exception(Unanswered(f"no answer within {timeout_s:g} s"))
        failures = {worker_id: error for worker_id, future in waiting.items() if (error := future.exception())}
        return {name: future.result() for name, future in waiting.items() if name not in failures}, failures

    def on_reply(self, worker_id: str, reply: CallReply) -> None:
        future = self._waiting.get((reply.call_id, worker_id))
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(CallFailed(reply.error))
        else:
            future.set_result(reply.result)

    def worker_lost(self, worker_id: str) -> None:
        self._give_up(worker_id, WorkerLost, "it is gone")

    def answers_lost(self, worker_id: str) -> None:
        """It stays, and no successor makes up for what it may have missed: its calls are unanswered, never done."""
        self._give_up(worker_id, Unanswered, "its answer may be lost")

    def _give_up(self, worker_id: str, kind: type[Unanswered], why: str) -> None:
        for (_, waited_for), future in self._waiting.items():
            if waited_for == worker_id and not future.done():
                future.set_exception(kind(why))
