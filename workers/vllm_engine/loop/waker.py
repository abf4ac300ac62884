"""What an engine with nothing to compute waits for: until it is woken, instead of asking a thousand times a second.

An input wakes it, and KV that has come or gone: a rank in this process sets an event, one in another process sends a
datagram (`connectors/wake.py`) to a socket in the folder of the engine's sockets, its user's alone.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import RequestStatus

# The longest wait, in case something does not wake the engine. Each step that finds nothing costs a rank in another
# process, and the engine, a millisecond of CPU time.
_WOKEN_S = 0.25
# Where nobody wakes it: the first wait, the longest, and the steps between them.
_FIRST_POLL_S, _POLL_S, _POLL_STEPS = 0.001, 0.02, 150
_SOCKET = "PD_WAKE_SOCKET"  # read by connectors/wake.py in the processes of ranks


def name_socket(folder: str, executor: type, config: Any) -> None:
    """Before the ranks start: where they wake this process. Those on other hosts cannot."""
    os.environ.pop(_SOCKET, None)
    if issubclass(executor, MultiprocExecutor) and config.parallel_config.nnodes_within_dp == 1:
        os.environ[_SOCKET] = os.path.join(folder, f"pd-wake-{uuid.uuid4().hex[:8]}")


def waker_of(engine: Any) -> Waker:
    if not hasattr(engine, "_pd_waker"):
        engine._pd_waker = Waker(engine.input_queue)
    waker: Waker = engine._pd_waker
    return waker


class Waker:
    """Of one engine. `step` before each step, then `worked` or `wait`."""

    def __init__(self, input_queue: Any) -> None:
        worker = getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None
        event: threading.Event | None = getattr(worker, "wake_event", None)
        self._event = event or threading.Event()
        self._by_all_ranks = event is not None or self._listen()  # none of them has to be asked
        self._empty_steps = 0  # since something happened
        put = input_queue.put_nowait

        def put_and_wake(item: Any) -> None:
            put(item)
            self._event.set()

        input_queue.put_nowait = put_and_wake

    def step(self) -> None:
        if self._event.is_set():
            self._empty_steps = 0
            self._event.clear()  # before the step collects: a later event ends the wait at once

    def worked(self) -> None:
        self._empty_steps = 0

    def wait(self, engine: Any) -> None:
        """After a step in which there was nothing to compute."""
        self._empty_steps += 1
        if not self._by_all_ranks or _compiles_grammar(engine.scheduler):
            self._event.wait(min(_POLL_S, _FIRST_POLL_S + _POLL_S * self._empty_steps / _POLL_STEPS))
        elif self._empty_steps > _settling_steps(engine) and engine.input_queue.empty():
            self._event.wait(_WOKEN_S)

    def _listen(self) -> bool:
        if not (path := os.environ.get(_SOCKET, "")):
            return False
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.bind(path)
        except OSError:  # the folder's name is too long for a socket
            listening.close()
            return False
        threading.Thread(target=self._relay, args=(listening,), name="pd-wake", daemon=True).start()
        return True

    def _relay(self, listening: socket.socket) -> None:
        while True:
            listening.recv(1)
            self._event.set()


def _settling_steps(engine: Any) -> int:
    """If batches are queued, one step collects KV that has arrived, a later one notes it and the next schedules it."""
    return 1 + max(2, int(engine.batch_queue_size))


def _compiles_grammar(scheduler: Any) -> bool:
    """Whether a request waits for its grammar, which a thread of vLLM's compiles that wakes nobody."""
    waiting = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return any(request.status is waiting for request in scheduler.requests.values())
