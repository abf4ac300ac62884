"""One child process on this machine: its own session, its output line by line, and an end that leaves nothing behind.
And those of a unit's ranks as one: they start together, and once one has ended, all end.

`supervise.py` decides whether it should run, and `commands.py` what it runs. A `Process` may be on another machine too.
"""

from __future__ import annotations

import abc
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

import msgspec

from orchestrator.launch.host.fork_servers import Forkable, ForkedProcess, ForkServers
from orchestrator.process.parent import ALIVE, EXIT_AGAIN, PARENT, ExitReason, exit_reason_in, identity_of
from orchestrator.process.tasks import first_of

log = logging.getLogger("pd.launcher")

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_CONTINUED = b"    "  # before the rest of a longer line, as of what has several lines: a client may have written it
_KEPT_LINES = 100  # enough for a traceback
# The helpers of a dead process (its engine, Python's resource tracker) have this long to end by themselves.
_GROUP_PATIENCE_S = 3.0
ENDS_WITHIN_S = 30.0  # a process that was killed: one that waits for a device never does
_POLL_S = 0.02
# Ranks that leave in order wait for each other's last request. What remains then is to end their engines.
_RANKS_PATIENCE_S = 10.0
_IN_ORDER = (0, EXIT_AGAIN)
# Errors of execve(2): the program does not exist, is not a program, or we may not run it.
_NEVER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


class ProcessSpec(msgspec.Struct, frozen=True):
    """`env` is added to this process's environment. `forkable`: the same command, where its imports take long."""

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
    return f"{program} cannot be run on {socket.gethostname()} ({why}); install it there, or let `python` name another"


class Process(abc.ABC):
    """What runs under a name, on this machine or another one, and is started once."""

    def __init__(self, name: str, on_line: Callable[[str, str], None]) -> None:
        self.name, self._on_line = name, on_line
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)  # the end of its output
        self.pid = 0  # before it was started
        self.identity = ""  # see orchestrator.process.parent; empty before it was started
        self.told_alive_at = 0.0  # monotonic; when it last told that it works without Redis
        self.lost = False  # its machine is gone, or SIGKILL does not end it: taken as ended, though it may still run
        self.exit_reason: ExitReason | None = None  # that it gave for its end

    @property
    @abc.abstractmethod
    def running(self) -> bool: ...

    @abc.abstractmethod
    async def start(self) -> None:
        """Raises OSError; CannotRun if another start would fail too."""

    @abc.abstractmethod
    async def wait(self) -> int:
        """Wait until it and its process group have ended. Returns the exit code, negative for a signal."""

    @abc.abstractmethod
    async def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Send this signal, and SIGKILL after `timeout_s`. Returns when it is gone, or lost. Idempotent."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill it and its process group, at once. `wait` returns in bounded time then."""

    def _hear(self, line: str) -> None:
        """A line of its output that is for people, or tells that it lives."""
        if line == ALIVE:
            self.told_alive_at = time.monotonic()
        else:
            self.last_lines.append(line)
        self._on_line(self.name, line)


class ProcessGroup:
    """One process, or those of a unit's ranks in their order."""

    def __init__(self, parts: Sequence[Process]) -> None:
        self.parts = parts
        self.told = parts[0]  # whose end is told: once they have ended, the one that did so first

    @property
    def running(self) -> bool:
        return any(part.running for part in self.parts)

    @property
    def lost(self) -> bool:
        return any(part.lost for part in self.parts)

    async def start(self) -> None:
        """Raises OSError. Nothing runs then, or if this is cancelled."""
        for part in self.parts:
            try:
                await part.start()
            except BaseException:
                self.kill()
                await asyncio.gather(*(other.wait() for other in self.parts if other.running))
                raise

    async def wait(self) -> int:
        """Returns when all have ended: the exit code of the one that ended first."""
        waits = {asyncio.create_task(part.wait()): part for part in self.parts}
        try:
            ended, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = next(wait for wait in waits if wait in ended)
            self.told = waits[first]
            for part in (waits[wait] for wait in others):
                if first.result() not in _IN_ORDER:
                    part.kill()  # it waits for the step of one that takes none any more
            ending = (waits[wait].stop(_RANKS_PATIENCE_S) for wait in others if first.result() in _IN_ORDER)
            await asyncio.gather(*ending, *others)
            return first.result()
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        await asyncio.gather(*(part.stop(timeout_s, number) for part in self.parts))

    def kill(self) -> None:
        for part in self.parts:
            part.kill()


def adopt_orphans(adopt: bool = True) -> None:
    """Have orphaned grandchildren become children of this process, so that they can be waited for (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


class LocalProcess(Process):
    """`start` it in the main thread: the kernel ties a child's parent-death signal to the thread that forked it."""

    def __init__(
        self, spec: ProcessSpec, on_line: Callable[[str, str], None], forks: ForkServers | None = None
    ) -> None:
        """With `forks` it is forked if it can be; this process must have adopted orphans."""
        super().__init__(spec.name, on_line)
        self._spec, self._forks = spec, forks
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._pump: asyncio.Task[None] | None = None
        self._gone = False  # with its process group: the pid may be another's by now
        self._given_up = asyncio.Event()  # for long after it was killed

    async def start(self) -> None:
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
        self.pid = self._process.pid
        try:
            self.identity = identity_of(self.pid)
        except OSError:  # nobody would know it
            self.kill()
            await self.wait()
            raise

    async def _forked(self, env: dict[str, str], output: int) -> ForkedProcess | None:
        """None where it has to be executed."""
        program = self._spec.forkable
        return await self._forks.start(program, env, output) if self._forks and program else None

    async def _executed(self, env: dict[str, str], output: int) -> asyncio.subprocess.Process:
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
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self.lost

    async def wait(self) -> int:
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
                    lines, rest = [*lines, rest], _CONTINUED
                for line in lines:
                    self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        # A progress bar redraws itself in one line: keep its last state.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        if line.startswith(_CONTINUED) and not shown.startswith(_CONTINUED):
            shown = _CONTINUED + shown
        text = shown.decode(errors="replace").rstrip()
        if (said := exit_reason_in(text)) is not None:
            self.exit_reason = said
        elif text:
            self._hear(text)


async def _reading(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
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
