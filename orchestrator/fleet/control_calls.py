"""Control calls to every worker at once (LoRA, sleep, cache resets), each with a deadline."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from orchestrator.fleet.view import Fleet
from orchestrator.wire.messages import Call, CallReply
from orchestrator.wire.transport import FrontendTransport

CALL_TIMEOUT_S = 60.0


class CallFailed(RuntimeError):
    """A worker refused the call, or did not answer in time; names the worker and the call."""


class ControlCalls:
    def __init__(self, fleet: Fleet, transport: FrontendTransport) -> None:
        self._fleet = fleet
        self._transport = transport
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[int, str], asyncio.Future[Any]] = {}

    async def call(self, method: str, args: list[Any], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """One result per connected worker. Raises CallFailed when any of them fails."""
        call_id = next(self._ids)
        loop = asyncio.get_running_loop()
        waiting = {}
        for worker_id, view in self._fleet.workers.items():
            if view.connected and self._transport.send(worker_id, Call(call_id, method, args)):
                waiting[worker_id] = self._waiting[call_id, worker_id] = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return [await future for future in waiting.values()]
        except TimeoutError:
            silent = [worker_id for worker_id, future in waiting.items() if not future.done()]
            raise CallFailed(f"{method}: no answer from {', '.join(silent)} within {timeout_s:g} s") from None
        finally:
            for worker_id in waiting:
                del self._waiting[call_id, worker_id]

    def on_reply(self, worker_id: str, reply: CallReply) -> None:
        future = self._waiting.get((reply.call_id, worker_id))
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(CallFailed(f"worker {worker_id}: {reply.error}"))
        else:
            future.set_result(reply.result)

    def worker_lost(self, worker_id: str) -> None:
        for (_, waited_for), future in self._waiting.items():
            if waited_for == worker_id and not future.done():
                future.set_exception(CallFailed(f"worker {worker_id} is gone"))
