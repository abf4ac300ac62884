"""The launcher's side of `orchestrator.process.fork_server`: processes that are forked instead of executed.

There is one fork server for each Python, list of modules and environment in which these are imported. Where one cannot
be had or does not answer, its processes are executed, which takes longer, and which says what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from orchestrator.process.fork_server import IMPORTS_S, MAX_MESSAGE_BYTES, OURS, OWN_VARIABLES, Order, Reply
from orchestrator.process.parent import kill_with
from orchestrator.process.tasks import in_background, in_thread

log = logging.getLogger("pd.launcher")

_SERVER = "orchestrator.process.fork_server"
_ENDS_WITHIN_S = 5.0
_EXIT_CODE_UNKNOWN = 255  # asyncio's, for a process that somebody else has waited for


class Forkable(NamedTuple):
    """What `python -m` runs, where its imports take long."""

    python: tuple[str, ...]  # with options
    module: str
    arguments: tuple[str, ...]
    imports: tuple[str, ...]  # modules that take long to import
    needs: int  # of these, the first; the rest are for other programs that one process forks

    @property
    def command(self) -> list[str]:
        return [*self.python, "-m", self.module, *self.arguments]


class ForkedProcess:
    """A child of this process that it has not executed itself. As asyncio.subprocess.Process."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where there is no such process."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            self.returncode = _EXIT_CODE_UNKNOWN
        self._ended.set()


class ForkServers:
    """Those of one launcher. For one thread; only `start` needs an event loop."""

    def __init__(self) -> None:
        self._servers: dict[tuple[object, ...], _ForkServer] = {}
        self._failed: set[tuple[object, ...]] = set()  # those that could not import
        self._numbers = itertools.count()  # of orders

    def prepare(self, program: Forkable, env: Mapping[str, str]) -> None:
        """Begin with the imports, so that the first process waits less for them."""
        key = (program.python, program.imports, _import_environment(env))
        if key not in self._servers and key not in self._failed and _can_watch():
            with contextlib.suppress(OSError):  # what is wrong shows when the program is executed
                self._servers[key] = _ForkServer(program, dict(key[2]))

    async def start(self, program: Forkable, env: Mapping[str, str], output: int) -> ForkedProcess | None:
        """A process that writes to this descriptor; None where it has to be executed. Cancelled, it leaves none."""
        key = (program.python, program.imports, _import_environment(env))
        number, arguments = next(self._numbers), list(program.arguments)
        order = Order(number, program.module, arguments, dict(env), os.getpid(), program.needs)
        for _ in range(2):  # once more after a change
            self.prepare(program, env)
            if (server := self._servers.get(key)) is None:
                return None
            reply = await server.ask(order, output)
            if reply is not None and reply.pid:
                try:
                    return ForkedProcess(reply.pid)
                except OSError:  # too many files are open, say: nobody would know of it
                    _end(reply.pid)
                    return None
            if self._servers.get(key) is server:
                del self._servers[key]
            if reply is None and not server.answered:
                self._failed.add(key)
            await server.end()
            if not server.changed:
                log.warning("a fork server does not answer: its processes are executed, which takes longer")
                return None
            log.info("%s has changed: modules are imported again", server.changed)
        return None

    def close(self) -> None:
        """Nothing is forked any more. Idempotent."""
        while self._servers:
            self._servers.popitem()[1].close()


class _ForkServer:
    def __init__(self, program: Forkable, env: Mapping[str, str]) -> None:
        """Raises OSError."""
        self.answered = False
        self.changed = ""  # a file, since it was imported: whoever waits here is to ask another server
        self._asked: dict[int, asyncio.Future[Reply | None]] = {}  # by the number of the order
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*program.python, "-m", _SERVER, str(theirs.fileno()), *program.imports],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=functools.partial(kill_with, os.getpid()),
            )

    async def ask(self, order: Order, output: int) -> Reply | None:
        """None where there is no answer."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._receive)
        try:
            # At once, while `output` is open.
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], [output])
        except OSError:
            return None
        answer: asyncio.Future[Reply | None] = self._loop.create_future()
        self._asked[order.number] = answer
        try:
            async with asyncio.timeout(IMPORTS_S):
                return await answer
        except TimeoutError:
            return None

    def _receive(self) -> None:
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.close()
            return
        self._answer(message)

    def _answer(self, message: bytes) -> None:
        self.answered = True
        reply = msgspec.msgpack.decode(message, type=Reply)
        self.changed = self.changed or reply.changed
        answer = self._asked.pop(reply.number)
        if not answer.done():
            answer.set_result(reply)
        elif reply.pid:  # whoever asked has gone
            _end(reply.pid)

    async def end(self) -> None:
        """As `close`, without holding up the loop."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await in_thread(functools.partial(self._process.wait, _ENDS_WITHIN_S))
        self.close(0)

    def close(self, within_s: float = _ENDS_WITHIN_S) -> None:
        """Idempotent. Whoever waits gets no answer but what has come."""
        if self._loop is not None and not self._loop.is_closed() and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        with contextlib.suppress(OSError):
            while message := self._socket.recv(MAX_MESSAGE_BYTES):  # a process that it forked has an owner, or ends
                self._answer(message)
        self._socket.close()
        while self._asked:
            if not (answer := self._asked.popitem()[1]).done():
                answer.set_result(None)


def _end(pid: int) -> None:
    """In a thread: the kernel may keep it for long, as at a disk that hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    in_background(functools.partial(os.waitpid, pid, 0))


def _can_watch() -> bool:
    """Whether this kernel tells when a process ends that was not executed here (Linux 5.3, pidfd_open(2))."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _import_environment(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """What modules may read when they are imported."""
    return frozenset(
        (name, value) for name, value in env.items() if name not in OWN_VARIABLES and not name.startswith(OURS)
    )
