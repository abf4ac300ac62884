"""One child process on this machine: its own session, its output line by line, and an end that leaves nothing behind.

`supervise.py` decides whether it should run, and `commands.py` what it runs. `Process` is the interface that processes
on other machines have too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from orchestrator.launch.host.fork_servers import Forkable, ForkedProcess, ForkServers
from orchestrator.process.parent import ALIVE, PARENT, ExitReason, exit_reason_in, identity_of
from orchestrator.process.tasks import first_of

log = logging.getLogger("pd.launcher")

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_KEPT_LINES = 100  # enough for a traceback
# The helpers of a dead process (its engine, Python's resource tracker) have this long to end by themselves.
_GROUP_PATIENCE_S = 3.0
ENDS_WITHIN_S = 30.0  # a process that was killed: one that waits for a device never does
_POLL_S = 0.02
# Errors of execve(2): the program does not exist, is not a program, or we may not run it.
_NEVER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


class ProcessSpec(msgspec.Struct, frozen=True):
    """What to start. `env` is added to this process's environment. `forkable`: the same command, where its imports take
    long."""

    name: str
    command: list[str]
    env: dict[str, str] = {}
    forkable: Forkable | None = None


def whole_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Of a child that has these variables besides this process's."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid()), **env}


class CannotRun(OSError):
    """The program cannot be run on its machine, and another start would fail too. The text is one line with the fix."""


def cannot_run(program: str, why: str = "no executable file") -> str:
    """The message about a program that this machine cannot run."""
    return f"{program} cannot be run on {socket.gethostname()} ({why}); install it there, or let `python` name another"


class Process(Protocol):
    """What runs as one under a name, on this machine or another one, and is started once."""

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> Sequence[Process]:
        """The processes that it consists of: itself, or one for each rank of a unit."""

    @property
    def last_lines(self) -> deque[str]:
        """The end of its output."""

    @property
    def identity(self) -> str:
        """See orchestrator.process.parent; empty before it was started."""

    @property
    def pid(self) -> int:
        """0 before it was started."""

    @property
    def running(self) -> bool: ...

    @property
    def told_alive_at(self) -> float:
        """When it last told that it works without Redis, monotonic; 0 for never. Of several, the earliest."""

    @property
    def lost(self) -> bool:
        """Whether its machine is gone, or SIGKILL does not end it. It counts as ended then, though it may still run."""

    @property
    def exit_reason(self) -> ExitReason | None:
        """The reason that it gave for its end, if any."""

    async def start(self) -> None:
        """Start it. Raises OSError; CannotRun if another start would fail too."""

    async def wait(self) -> int:
        """Wait until it and its process group have ended. Returns the exit code, negative for a signal."""

    async def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Send this signal, and SIGKILL after `timeout_s`. Returns when it is gone, or lost. Idempotent."""

    def kill(self) -> None:
        """Kill it and its process group, at once. `wait` returns in bounded time then."""


def adopt_orphans(adopt: bool = True) -> None:
    """Have orphaned grandchildren become children of this process, so that they can be waited for (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


class LocalProcess:
    """See Process.

    `start` it in the main thread: the kernel ties a child's parent-death signal to the thread that forked it.
    """

    def __init__(
        self, spec: ProcessSpec, on_line: Callable[[str, str], None], forks: ForkServers | None = None
    ) -> None:
        """With `forks` it is forked if it can be; this process must have adopted orphans."""
        self.name = spec.name
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._spec = spec
        self._on_line = on_line
        self._forks = forks
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._pump: asyncio.Task[None] | None = None
        self._gone = False  # with its process group: the pid may be another's by now
        self._given_up = asyncio.Event()  # for long after it was killed
        self.lost, self.told_alive_at = False, 0.0
        self.exit_reason: ExitReason | None = None
        self.identity = ""  # see orchestrator.process.parent; empty until it is started

    @property
    def parts(self) -> Sequence[Process]:
        return (self,)

    async def start(self) -> None:
        """Start it. Raises OSError, CannotRun."""
        env = whole_environment(self._spec.env)
        reader, writer = os.pipe()
        try:
            lines, pipe = await _reading(reader)
            try:
                self._process = await self._forked(env, writer) or await self._executed(env, writer)
            finally:
                if self._process is None:
                    pipe.close()
        finally:
            os.close(writer)
        self._pump = asyncio.create_task(self._read(lines, pipe), name=f"log-{self.name}")
        try:
            self.identity = identity_of(self._process.pid)
        except OSError:  # nobody would know it
            self.kill()
            await self.wait()
            raise

    async def _forked(self, env: dict[str, str], output: int) -> ForkedProcess | None:
        """None where it has to be executed."""
        program = self._spec.forkable
        return await self._forks.start(program, env, output) if self._forks and program else None

    async def _executed(self, env: dict[str, str], output: int) -> asyncio.subprocess.Process:
        """Raises OSError, CannotRun."""
        try:
            return await asyncio.create_subprocess_exec(
                *self._spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                # Ctrl-C reaches only the launcher, which ends the fleet in order.
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in _NEVER:
                raise CannotRun(cannot_run(self._spec.command[0], os.strerror(error.errno))) from None
            raise

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self.lost

    async def wait(self) -> int:
        """Wait until it and its process group have ended. Returns the exit code, negative for a signal."""
        assert self._process is not None and self._pump is not None, "start it first"
        async with first_of(self._process.wait(), self._given_up.wait()) as ended:
            self.lost = not ended.done()
            code = -signal.SIGKILL if self.lost else ended.result()
        await self._end_group()
        # A process outside the group may hold the pipe open. Its lines are not worth waiting for.
        await asyncio.wait({self._pump}, timeout=1.0)
        self._pump.cancel()
        return code

    async def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """See Process."""
        if self._process is None:
            return
        self.signal(number)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            async with first_of(self._process.wait(), self._given_up.wait()):
                pass
        await self._end_group()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """See Process."""
        if self._process is not None and not self._gone:
            asyncio.get_running_loop().call_later(ENDS_WITHIN_S, self._given_up.set)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _end_group(self) -> None:
        deadline = asyncio.get_running_loop().time() + _GROUP_PATIENCE_S
        killed = False
        while not self._gone and group_alive(self.pid):
            if self._given_up.is_set():
                what = "%s (process %d) has not ended within %g s of SIGKILL: it may still hold memory and devices"
                log.error(what, self.name, self.pid, ENDS_WITHIN_S)
                break
            if not killed and asyncio.get_running_loop().time() > deadline:
                self.kill()
                killed = True
            await asyncio.sleep(_POLL_S)
        self._gone = True

    async def _read(self, output: asyncio.StreamReader, pipe: asyncio.BaseTransport) -> None:
        rest = b""
        with contextlib.closing(pipe):
            while data := await output.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        # A progress bar redraws itself in one line: keep its last state.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()
        if (said := exit_reason_in(text)) is not None:
            self.exit_reason = said
            return
        if text == ALIVE:
            self.told_alive_at = time.monotonic()
        elif text:
            self.last_lines.append(text)
        if text:
            self._on_line(self.name, text)


async def _reading(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A reader of the pipe, and what closes it."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: protocol, os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader, transport


def group_alive(pgid: int) -> bool:
    """Whether a process group has members left. Reaps those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-pgid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True
