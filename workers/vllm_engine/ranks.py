"""The processes of an engine: why one did not start, and that a rank's has ended, at which the others are killed.

vLLM notices such an end too, but ten seconds later if the others wait for the dead one in a collective operation.
Meanwhile they keep their cores or GPUs busy, and hold memory that the next engine needs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

log = logging.getLogger("pd.worker")

WHY = "PD_ENGINE_WHY"  # a file for why it did not start: an engine's processes say so in their logs only


def tell_why(process: type, then: Callable[[Any], None] | None = None) -> None:
    """In an engine's process: what ends the making of `process` is told to the worker, by the first that fails. `then`
    is called with what has been made."""
    make = vars(process)["__init__"]

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
            if then is not None:
                then(self)
        except Exception as error:
            with suppress(OSError, KeyError), open(os.environ[WHY], "x") as file:
                file.write(" ".join(f"{type(error).__name__}: {error}".split()))
            raise

    process.__init__ = made  # type: ignore[misc]


def told(file: str) -> str:
    """What was told, once; empty if nothing was."""
    try:
        with open(file) as opened:
            why = opened.read()
        os.unlink(file)
    except OSError:
        return ""
    return why


def coordinators(client: Any) -> list[int]:
    """The process that wakes the other engines of a group when one gets a request. vLLM's client of its first rank has
    it."""
    coordinator = client.resources.coordinator
    return [coordinator.proc.pid] if coordinator is not None else []


class RankWatch:
    """Watches the ranks from its construction until `close`."""

    def __init__(self, pids: Collection[int], ended: Callable[[str], None]) -> None:
        """`pids`: the ranks' processes. `ended` is called on the running loop, with a text that says what happened."""
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._descriptors: set[int] = set()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(ended, f"the process {pid} of one of its ranks has ended")
            except OSError as error:  # a kernel before 5.3, or a container that forbids it
                log.warning("the process %d of a rank cannot be watched (%s): vLLM will say when it ends", pid, error)
            else:
                self._descriptors.add(descriptor)
                self._loop.add_reader(descriptor, self._has_ended, pid, descriptor)

    def close(self) -> None:
        """Idempotent."""
        for descriptor in list(self._descriptors):
            self._forget(descriptor)

    def _has_ended(self, pid: int, descriptor: int) -> None:
        self._forget(descriptor)
        for other in self._descriptors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(other, signal.SIGKILL)
        self.close()
        self._ended(f"the process {pid} of one of its ranks has ended")

    def _forget(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
