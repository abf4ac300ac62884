"""Keeps one process running: starts it, waits until it is ready, and starts it again with growing pauses when it dies.

`mark_ready` says from outside that it is ready, which shows in the registry and not in the process.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from orchestrator.config.settings import LauncherConfig
from orchestrator.launch.host.process import CannotRun, Process, ProcessGroup
from orchestrator.process.parent import EXIT_AGAIN
from orchestrator.process.tasks import first_of

log = logging.getLogger("pd.launcher")

BACKOFF_S = 0.5  # before a process is started again after its first crash in a row
_HEALTHY_S = 60.0  # a process that was ready for this long has its earlier crashes forgotten
_PLACED_AT_ONCE_S = 0.5  # a shorter wait for room is not reported
# A process that was ready, still runs, and is not in a registry that works has hung: it has this many heartbeat
# time-outs to come back, and one that leaves its time to end, since it may have left the registry in order.
_HUNG_TIMEOUTS = 4.0
_NOT_STARTED = 127  # the exit code that a shell gives to a program that cannot be started


class Stage(enum.Enum):
    """As it is shown."""

    PLACING = "waiting for room"  # of a machine
    STARTING = "loading"
    READY = "ready"
    PAUSING = "restarting"  # it died; the pause before the next start
    LEAVING = "draining"  # its end is expected
    ENDED = "ended"  # and it is not started again


SUCCESSORS: dict[Stage, frozenset[Stage]] = {
    Stage.PLACING: frozenset({Stage.STARTING, Stage.LEAVING, Stage.ENDED}),
    Stage.STARTING: frozenset({Stage.PLACING, Stage.READY, Stage.PAUSING, Stage.LEAVING, Stage.ENDED}),
    Stage.READY: frozenset({Stage.PLACING, Stage.STARTING, Stage.PAUSING, Stage.LEAVING, Stage.ENDED}),
    Stage.PAUSING: frozenset({Stage.PLACING, Stage.STARTING, Stage.LEAVING, Stage.ENDED}),
    Stage.LEAVING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A move that the table does not have: a bug in the launcher."""


class Exit(msgspec.Struct, frozen=True):
    """How a process ended."""

    code: int  # negative for a signal
    reason: str  # what it said about its end, else the last line of its output, which need not be about that
    was_ready: bool
    said: bool = False  # the reason is what it said about its end
    final: bool = False  # it said that another start would end the same


def backoff_s(crashes: int, config: LauncherConfig) -> float:
    """The pause after the n-th crash in a row: doubling from `BACKOFF_S` up to restart_backoff_max_s."""
    exponent = min(max(crashes, 1) - 1, 30)
    return min(config.restart_backoff_max_s, BACKOFF_S * 2.0**exponent)


class Supervised:
    """One process and its successors, of one name. `make` makes the next, or raises OSError; `place` waits for room."""

    def __init__(
        self,
        name: str,
        make: Callable[[], ProcessGroup],
        config: LauncherConfig,
        start_timeout_s: float,
        on_stage: Callable[[Supervised], None],
        on_exit: Callable[[Supervised], Awaitable[None]],
        place: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.name = name
        self.stage = Stage.STARTING
        self.crashes = 0  # in a row
        self.last_exit: Exit | None = None
        self.started_at = 0.0  # monotonic
        self.start_timeout_s = start_timeout_s  # of what starts next, or does now
        self._make = make
        self._place = place
        self._config = config
        self._on_stage = on_stage
        self._on_exit = on_exit
        self._process: ProcessGroup | None = None
        self._not_started: Exception | None = None  # why not
        self._late = ""  # why it was ended before it was ready
        self._ready_at = 0.0
        self._missed_s = 0.0  # for so long it has not been in the registry
        self._ready = asyncio.Event()
        self._wanted = True
        self._stopping, self._stop_by = asyncio.Event(), signal.SIGTERM
        self._restart_now = asyncio.Event()

    @property
    def pid(self) -> int:
        """0 while nothing runs."""
        return self.parts[0].pid if self._process is not None and self._process.running else 0

    @property
    def last_identity(self) -> str:
        """Which process runs, or ran last."""
        return self.parts[0].identity if self.parts else ""

    @property
    def parts(self) -> Sequence[Process]:
        """The processes of what runs, or ran last: one, or one for each rank of a unit."""
        return self._process.parts if self._process is not None else ()

    def runs_as(self, identity: str) -> bool:
        return self.pid != 0 and self.last_identity == identity

    @property
    def last_lines(self) -> list[str]:
        return list(self._process.told.last_lines) if self._process is not None else []

    def mark_ready(self) -> None:
        if self.stage is Stage.STARTING:
            self._ready_at = time.monotonic()
            self._ready.set()
            self._enter(Stage.READY)

    def seen(self) -> None:
        self._missed_s = 0.0

    def missed(self, looked_s: float, timeout_s: float, there: Collection[str] = ()) -> None:
        """The registry, read for `looked_s` more, does not have it, though each member writes there within `timeout_s`;
        it has the processes `there`. Kills one that has hung: that tells nothing by its output either."""
        if self.stage not in (Stage.READY, Stage.LEAVING):
            return
        ends_s = self._config.stop_timeout_s if self.stage is Stage.LEAVING else 0.0
        self._missed_s = min(self._missed_s + looked_s, self._silent_s(there))
        if self._missed_s > _HUNG_TIMEOUTS * timeout_s + ends_s:
            what = "%s: runs (process %d) but was not in the registry, nor told that it lives, for %.0f s: killing it"
            log.error(what, self.name, self.pid, self._missed_s)
            self.kill()

    def _silent_s(self, there: Collection[str] = ()) -> float:
        """For how long a part of it that is not `there` has not told that it works, though without Redis."""
        now = time.monotonic()
        return max((now - part.told_alive_at for part in self.parts if part.identity not in there), default=0.0)

    def expect_exit(self, within_s: float) -> None:
        """It was told to leave: do not start it again, and stop it if it still runs after `within_s`."""
        if self.stage in (Stage.PLACING, Stage.STARTING, Stage.READY, Stage.PAUSING):
            self._wanted = False
            self._enter(Stage.LEAVING)
            if self.pid == 0:  # nothing runs that could have been told
                self._stopping.set()
            else:
                asyncio.get_running_loop().call_later(within_s, self._stopping.set)

    def request_stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """End it now: by this signal, and by SIGKILL after launcher.stop_timeout_s."""
        self._wanted, self._stop_by = False, by
        self._stopping.set()

    def restart_now(self) -> None:
        """It is started with something else, or what it lacked is back: earlier crashes do not count any more."""
        self.crashes = 0
        self._restart_now.set()

    def kill(self) -> None:
        """SIGKILL. Counts as a crash: it is started again unless its end was expected."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> None:
        """Returns when it was stopped, or ended as expected. Leaves no process behind, however it returns."""
        self._on_stage(self)
        try:
            while self._wanted and await self._placed():
                code = await self._run_once()
                self.last_exit = self._describe_exit(code)
                await self._on_exit(self)
                if not self._wanted or (code == 0 and self._ready.is_set()):
                    break  # it left in order; reconcile.py decides whether another is needed
                if self._process is not None and self._process.lost:
                    # It may still run, unseen: another process takes its place under another name.
                    log.error("%s: is lost (%s)", self.name, describe(self.last_exit))
                    break
                if code == EXIT_AGAIN and self._ready.is_set():
                    log.info("%s: drained to be started again", self.name)
                else:
                    await self._pause()
        finally:
            await self._end_what_runs()
            self._enter(Stage.ENDED)

    async def _end_what_runs(self) -> None:
        if self._process is not None and self._process.running:
            self._process.kill()
            await self._process.wait()

    async def _placed(self) -> bool:
        """Wait for room. False when it was told to end meanwhile."""
        if self._place is None:
            return True
        waits = asyncio.get_running_loop().call_later(_PLACED_AT_ONCE_S, self._wait_for_room)
        try:
            async with first_of(self._place(), self._stopping.wait()) as placed:
                if placed.done():
                    placed.result()
                return placed.done() and self._wanted
        finally:
            waits.cancel()

    def _wait_for_room(self) -> None:
        if self._wanted:  # else it leaves, and waits no more
            self._enter(Stage.PLACING)

    async def _run_once(self) -> int:
        """One process from its start to its end. Returns the exit code."""
        self._ready.clear()
        self.started_at = time.monotonic()
        self._enter(Stage.STARTING)
        self._process, self._not_started, self._late = None, None, ""
        try:
            self._process = self._make()
            async with first_of(self._process.start(), self._stopping.wait()) as starting:
                if not starting.done():  # it was told to end meanwhile: nothing runs then
                    return -signal.SIGTERM
                starting.result()
            async with first_of(self._process.wait(), self._stopping.wait(), self._wait_until_late()) as exited:
                if not exited.done():
                    await self._process.stop(self._config.stop_timeout_s, self._stop_by)
                return await exited
        except Exception as error:
            if not isinstance(error, OSError):  # a defect, or no more threads: it must not end what keeps it running
                log.exception("%s: could not be started, or waited for", self.name)
            await self._end_what_runs()
            self._not_started = error
            return _NOT_STARTED

    async def _wait_until_late(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.start_timeout_s):
                    await self._ready.wait()
                break
            except TimeoutError:
                if self._silent_s() > self.start_timeout_s:
                    self._late = f"not ready within {self.start_timeout_s:g} s, of workers.start_timeout_s"
                    log.error("%s: %s; ending it", self.name, self._late)
                    return
                log.warning("%s: has loaded, and waits for Redis", self.name)
        await asyncio.Event().wait()  # ready: never too late any more

    async def _pause(self) -> None:
        healthy_s = time.monotonic() - self._ready_at if self._ready.is_set() else 0.0
        self.crashes = 1 if healthy_s > min(_HEALTHY_S, self._config.restart_backoff_max_s) else self.crashes + 1
        assert self.last_exit is not None
        # A process that cannot run now may run after its surroundings change: a folder is mounted, a worker leaves.
        final = self.last_exit.final
        pause_s = self._config.restart_backoff_max_s if final else backoff_s(self.crashes, self._config)
        then = "the next try is" if final else "starting it again"
        log.error("%s: %s; %s in %.1f s", self.name, describe(self.last_exit), then, pause_s)
        self._restart_now.clear()
        self._enter(Stage.PAUSING)
        async with first_of(self._stopping.wait(), self._restart_now.wait(), within_s=pause_s):
            pass

    def _describe_exit(self, code: int) -> Exit:
        ready = self._ready.is_set()
        if (why := self._not_started) is not None:
            never = isinstance(why, CannotRun)
            return Exit(code, str(why), ready, said=never, final=never)
        if self._process is not None and (said := self._process.told.exit_reason) is not None:
            return Exit(code, said.text, ready, said=True, final=said.final)
        if self._late:
            return Exit(code, self._late, ready, said=True)
        return Exit(code, (self.last_lines or ["no output"])[-1].strip(), ready)

    def _enter(self, stage: Stage) -> None:
        if stage is self.stage:
            return
        if stage not in SUCCESSORS[self.stage]:
            raise IllegalTransition(f"{self.name}: {self.stage.value} -> {stage.value}")
        self.stage = stage
        self._on_stage(self)


def describe(end: Exit) -> str:
    """How a process ended, for a line that begins with its name."""
    # The last output of a process that was killed says nothing about its end.
    how = f"was killed by signal {-end.code}" if end.code < 0 else f"ended with exit code {end.code}"
    return f"{how} ({end.reason})" if end.said or end.code >= 0 else how
