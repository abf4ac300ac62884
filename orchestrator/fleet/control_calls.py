"""Control calls to workers (LoRA, pause, cache resets). Each has a deadline, and succeeds on all workers or on none.

A call goes to every worker that is not lost. One whose connection is broken gets it when that was made again. Where it
breaks meanwhile the answer may be lost, and the worker may not have heard the call: it is sent once more if a worker
may carry it out twice (`wire.control`), else it is unanswered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any, Union

from orchestrator.fleet.view import Fleet
from orchestrator.wire.control import METHODS
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
    """The worker left the fleet before it had answered."""


# What is heard of a worker that is asked: its answer; that it is lost; None: it is reached, and an answer may be lost.
_News = Union[CallReply, WorkerLost, None]


class ControlCalls:
    def __init__(self, fleet: Fleet, transport: FrontendTransport) -> None:
        self._fleet = fleet
        self._transport = transport
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[int, str], asyncio.Queue[_News]] = {}  # by call and worker

    async def call(
        self, method: str, args: list[Any], kwargs: dict[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Call a method of `wire.control` on the fleet, and return the combined answer. Raises CallFailed when a worker
        fails, Unanswered where none does but some are silent; it is then undone on the workers where it succeeded."""
        row = METHODS[method]
        connected = [worker_id for worker_id, view in self._fleet.workers.items() if view.connected]
        broken = [worker_id for worker_id, view in self._fleet.workers.items() if view.disconnected_at is not None]
        workers = connected + broken
        if not workers:
            idle = self._fleet.rest is not None and self._fleet.rest.away
            why = "the model is idle and has no worker; send it a request first" if idle else "no worker is connected"
            raise Unanswered(f"{method}: {why}")
        if row.of_one:
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

    async def _undo(self, workers: Sequence[str], method: str, undo: str, args: list[Any]) -> None:
        undo_args = [args[0].lora_int_id] if method == "add_lora" else []
        _, failures = await self._ask(workers, undo, undo_args, {}, CALL_TIMEOUT_S)
        for worker_id, error in failures.items():
            log.warning("%s was not undone on worker %s: %s", method, worker_id, error)

    async def _ask(
        self, workers: Sequence[str], method: str, args: list[Any], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, BaseException]]:
        """Results and failures by worker; each worker is in one of them."""
        call = Call(next(self._ids), method, args, kwargs)
        asking = (self._ask_one(worker_id, call, timeout_s) for worker_id in workers)
        answers = dict(zip(workers, await asyncio.gather(*asking, return_exceptions=True), strict=True))
        failures = {name: answer for name, answer in answers.items() if isinstance(answer, BaseException)}
        return {name: answer for name, answer in answers.items() if name not in failures}, failures

    async def _ask_one(self, worker_id: str, call: Call, timeout_s: float) -> Any:
        """The worker's answer. Raises CallFailed; WorkerLost where it leaves the fleet."""
        news = self._waiting[call.call_id, worker_id] = asyncio.Queue()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(worker_id, call, news)
        except TimeoutError:
            raise Unanswered(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._waiting[call.call_id, worker_id]

    async def _answer(self, worker_id: str, call: Call, news: asyncio.Queue[_News]) -> Any:
        view = self._fleet.workers.get(worker_id)
        if view is None:
            raise WorkerLost("it is gone")
        left = 2 if METHODS[call.method].repeatable else 1  # times that it may be sent
        told = None if view.disconnected_at is None else await news.get()
        while told is None:
            if not left:
                raise Unanswered("its answer may be lost")
            sent = self._transport.send(worker_id, call)
            if sent is Sent.YES:
                left -= 1
            elif sent is not Sent.UNREACHABLE:  # else its connection is broken, which is about to be heard
                raise (CallFailed if sent is Sent.TOO_LARGE else Unanswered)(sent.value)
            told = await news.get()
        if isinstance(told, WorkerLost):
            raise told
        if told.error is not None:
            raise CallFailed(told.error)
        return told.result

    def on_reply(self, worker_id: str, reply: CallReply) -> None:
        """Of a call that was sent twice the first answer counts."""
        if (news := self._waiting.get((reply.call_id, worker_id))) is not None:
            news.put_nowait(reply)

    def worker_lost(self, worker_id: str) -> None:
        self._tell(worker_id, WorkerLost("it is gone"))

    def answers_lost(self, worker_id: str) -> None:
        """It is connected, and stays: no successor makes up for what it may have missed."""
        self._tell(worker_id, None)

    def _tell(self, worker_id: str, news: _News) -> None:
        for (_, waited_for), waiting in self._waiting.items():
            if waited_for == worker_id:
                waiting.put_nowait(news)
