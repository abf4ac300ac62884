"""Keeps one process running: starts it, waits until it is ready, and starts it again with growing pauses when it dies.

Whether it is ready is told from outside (`mark_ready`): it shows in the registry, not in the process.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from orchestrator.config.settings import LauncherConfig
from orchestrator.launch.process import LocalProcess, ProcessSpec

log = logging.getLogger("pd.launcher")


class Stage(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    PAUSING = "restarting"  # it died; the pause before the next start
    LEAVING = "leaving"  # its end is expected
    ENDED = "ended"  # and it is not started again


class Exit(msgspec.Struct, frozen=True):
    """How a process ended. `code` is negative for a signal; `why` is what it said last."""

    code: int
    why: str
    was_ready: bool


def backoff_s(crashes: int, config: LauncherConfig) -> float:
    """The pause after the n-th crash in a row: doubling from restart_backoff_s up to restart_backoff_max_s."""
    exponent = min(max(crashes, 1) - 1, 30)
    return min(config.restart_backoff_max_s, config.restart_backoff_s * 2.0**exponent)


class Supervised:
    """One process and its successors, under one name."""

    def __init__(
        self,
        name: str,
        spec: Callable[[], ProcessSpec],
        config: LauncherConfig,
        start_timeout_s: float,
        on_line: Callable[[str, str], None],
        on_stage: Callable[[Supervised], None],
        on_exit: Callable[[Supervised], Awaitable[None]],
    ) -> None:
        self.name = name
        self.stage = Stage.STARTING
        self.crashes = 0  # in a row
        self.last_exit: Exit | None = None
        self.started_at = 0.0  # monotonic
        self._spec = spec
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._on_line = on_line
        self._on_stage = on_stage
        self._on_exit = on_exit
        self._process: LocalProcess | None = None
        self._ready_at = 0.0
        self._ready = asyncio.Event()
        self._wanted = True
        self._stopping = asyncio.Event()
        self._stop_timeout_s = config.stop_timeout_s

    @property
    def pid(self) -> int:
        """0 while nothing runs."""
        return self._process.pid if self._process is not None and self._process.running else 0

    @property
    def last_pid(self) -> int:
        """Of what runs, or ran last."""
        return self._process.pid if self._process is not None else 0

    def mark_ready(self) -> None:
        if self.stage is Stage.STARTING:
            self._ready_at = time.monotonic()
            self._ready.set()
            self._enter(Stage.READY)

    def expect_exit(self, within_s: float) -> None:
        """It was told to leave: it is not started again, and stopped when it is still there after `within_s`."""
        if self.stage in (Stage.STARTING, Stage.READY, Stage.PAUSING):
            pausing = self.stage is Stage.PAUSING
            self._wanted = False
            self._enter(Stage.LEAVING)
            if pausing:
                self._stopping.set()
            else:
                asyncio.get_running_loop().call_later(within_s, self._stopping.set)

    def request_stop(self, timeout_s: float | None = None) -> None:
        """End it now: SIGTERM, and SIGKILL after `timeout_s` (default: launcher.stop_timeout_s)."""
        self._wanted = False
        if timeout_s is not None:
            self._stop_timeout_s = timeout_s
        self._stopping.set()

    def kill(self) -> None:
        """SIGKILL, as a crash: it is started again unless its end was expected."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> None:
        """Until stopped, or it ended as expected. Leaves no process behind, however it ends."""
        self._on_stage(self)
        try:
            while self._wanted:
                code = await self._run_once()
                self.last_exit = Exit(code, self._why(), self._ready.is_set())
                await self._on_exit(self)
                if not self._wanted or (code == 0 and self._ready.is_set()):
                    break  # it left in order; whether another is needed is for whoever plans
                await self._pause()
        finally:
            if self._process is not None and self._process.running:
                self._process.kill()
                await self._process.wait()
            self._enter(Stage.ENDED)

    async def _run_once(self) -> int:
        """One start to its end. Returns the exit code."""
        self._ready.clear()
        self.started_at = time.monotonic()
        self._enter(Stage.STARTING)
        self._process = LocalProcess(self._spec(), self._on_line)
        try:
            await self._process.start()
        except OSError as error:
            self._process.last_lines.append(f"{self._spec().command[0]}: {error.strerror}")
            return 127  # as a shell says it
        exited = asyncio.create_task(self._process.wait())
        stop = asyncio.create_task(self._stopping.wait())
        late = asyncio.create_task(self._too_late())
        try:
            await asyncio.wait({exited, stop, late}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._process.stop(self._stop_timeout_s)
            return await exited
        finally:
            for task in (stop, late):
                task.cancel()
            await asyncio.gather(stop, late, return_exceptions=True)

    async def _too_late(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._ready.wait()
        except TimeoutError:
            log.error("%s: not ready within %g s; ending it", self.name, self._start_timeout_s)
            return
        await asyncio.Event().wait()  # ready: never too late any more

    async def _pause(self) -> None:
        steady = self._ready.is_set() and time.monotonic() - self._ready_at > self._config.restart_backoff_max_s
        self.crashes = 1 if steady else self.crashes + 1
        pause_s = backoff_s(self.crashes, self._config)
        assert self.last_exit is not None
        log.error("%s: %s; starting it again in %.1f s", self.name, describe(self.last_exit), pause_s)
        self._enter(Stage.PAUSING)
        try:
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _why(self) -> str:
        """What it said about its end: its own last word where it has one, else the last line."""
        lines = list(self._process.last_lines) if self._process is not None else []
        own = [line for line in lines if line.startswith(_LAST_WORDS)]
        return (own or lines or ["no output"])[-1]

    def _enter(self, stage: Stage) -> None:
        if stage is not self.stage:
            self.stage = stage
            self._on_stage(self)


# How the fleet's programs begin the one line that says why they end.
_LAST_WORDS = ("prefill-worker: ", "decode-worker: ", "orchestrator.frontend.server: ")


def describe(end: Exit) -> str:
    how = f"killed by signal {-end.code}" if end.code < 0 else f"ended with exit code {end.code}"
    for prefix in _LAST_WORDS:
        if end.why.startswith(prefix):
            return f"{how} ({end.why.removeprefix(prefix)})"
    return f"{how} ({end.why})" if end.code >= 0 else how
