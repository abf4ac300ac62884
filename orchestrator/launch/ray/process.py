"""A process on a node of a Ray cluster, which the runner on that node starts and watches."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from orchestrator.launch.host.process import CannotRun, Process
from orchestrator.launch.machines import OnLine
from orchestrator.launch.ray.places import first_line
from orchestrator.launch.ray.runner import Ended, NotStarted, Order, Runner, Started, decode_reply, encode
from orchestrator.process.parent import ExitReason
from orchestrator.process.tasks import first_of, in_background, in_thread

NODE_LOST = -9  # the exit code of a process whose node or runner is gone: as if it had been killed
_CALLS_AT_ONCE = 16
# Until Ray knows that a node is gone it still sends work there, which is never answered.
_START_DEADLINE_S = 120.0
_ENDS_WITHIN_S = 30.0  # a process that was killed, or a runner says so: one that is frozen never does
_ASK_AGAIN_S = 1.0
_LINES_WAIT_S = 10.0
_LAST_LINES_S = 1.0


class RayProcess(Process):
    """`place` returns the actor's options: where it runs, and which resources of a node it takes."""

    def __init__(self, order: Order, place: Callable[[], dict[str, Any]], on_line: OnLine, runners: Runners) -> None:
        super().__init__(order.name, on_line)
        self._order, self._place, self._runners = order, place, runners
        self._runs = False
        self._given_up = asyncio.Event()  # its runner has not answered in time
        self._runner: Any = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._runs

    async def start(self) -> None:
        """Start it, or take over a process of this name that an earlier launcher left running. Raises OSError."""
        options = {"get_if_exists": True, "lifetime": "detached", "max_concurrency": _CALLS_AT_ONCE, **self._place()}
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                self._runner = await self._runners.named(self.name, options)
                reply = decode_reply(await self._runner.start.remote(encode(self._order)))
        except TimeoutError:
            self._release()
            raise OSError(0, f"no answer from its node within {_START_DEADLINE_S:g} s") from None
        except asyncio.CancelledError:
            self._release()
            raise
        except (RayError, ValueError, RuntimeError) as error:
            self._release()
            raise OSError(0, f"Ray: {first_line(error)}") from error
        if isinstance(reply, NotStarted):
            self._release()
            raise CannotRun(reply.reason) if reply.never else OSError(0, reply.reason)
        assert isinstance(reply, Started)
        self.pid, self.identity, self._runs = reply.pid, reply.identity, True
        self._pump = asyncio.create_task(self._read(), name=f"log-{self.name}")

    async def wait(self) -> int:
        try:
            ended = decode_reply(await self._asked(lambda: self._runner.wait.remote()))
            assert isinstance(ended, Ended)
            code, self.lost = ended.code, ended.lost
            if ended.reason is not None:
                self.exit_reason = ExitReason(ended.reason, ended.final)
        except RayError as error:
            self.lost = True
            self.last_lines.append(first_line(error))
            code = NODE_LOST
        self._runs = False
        assert self._pump is not None
        await asyncio.wait({self._pump}, timeout=_LAST_LINES_S)
        self._pump.cancel()
        self._release()
        return code

    async def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """It is SIGTERM whatever is asked. `wait` returns in bounded time then."""
        if (runner := self._runner) is not None:
            asyncio.get_running_loop().call_later(timeout_s + _ENDS_WITHIN_S, self._given_up.set)
            with contextlib.suppress(RayError):
                await self._asked(lambda: runner.stop.remote(timeout_s))

    def kill(self) -> None:
        if self._runner is not None and self.running:
            asyncio.get_running_loop().call_later(_ENDS_WITHIN_S, self._given_up.set)
            self._runner.kill.remote()

    async def _asked(self, call: Callable[[], Any]) -> Any:
        """What the runner answers. Raises RayError if it is dead, or given up."""
        async with first_of(self._ask(call), self._given_up.wait()) as asking:
            if not asking.done():
                raise RayError(f"its runner does not say within {_ENDS_WITHIN_S:g} s that it has ended")
            return asking.result()

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Again while the runner is only unavailable: in the end it answers, or Ray says that it is dead."""
        while True:
            try:
                return await call()
            except ActorUnavailableError:
                await asyncio.sleep(_ASK_AGAIN_S)

    def _release(self) -> None:
        """End the runner, which frees its resources of the node."""
        if self._runner is not None:
            in_background(partial(ray.kill, self._runner))
            self._runner = None

    async def _read(self) -> None:
        with contextlib.suppress(RayError):
            while self._runs:
                for line in await self._asked(lambda: self._runner.lines.remote(_LINES_WAIT_S)):
                    self._hear(line)


class Runners:
    """The runners that a launcher asks a cluster for, by name: one call at a time for each, and none that nobody knows
    of.

    | a call's answer                 | then |
    |---------------------------------|------|
    | comes while it is waited for    | that runner is used |
    | comes late, and is asked for again by then | the same |
    | comes late, and nobody asks     | that runner is ended; who asks while it ends gets a new one |
    | is an error                     | the next call finds what the cluster may have made |
    """

    def __init__(self) -> None:
        self._asking: dict[str, asyncio.Task[Any]] = {}  # by name, until the cluster has answered
        self._wanted: set[str] = set()

    async def named(self, name: str, options: dict[str, Any]) -> Any:
        """A new runner, or the one that has this name. Raises RayError, ValueError. Waits until it is cancelled."""
        if name not in self._asking:
            self._asking[name] = asyncio.create_task(self._ask(name, options), name=f"runner-{name}")
        asking = self._asking[name]
        self._wanted.add(name)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if asking.done():  # just now
                in_background(partial(end, name))
            raise
        finally:
            self._wanted.discard(name)

    async def _ask(self, name: str, options: dict[str, Any]) -> Any:
        try:
            while True:
                runner = await in_thread(lambda: ray.remote(Runner).options(name=name, **options).remote())
                if name in self._wanted:
                    return runner
                await in_thread(partial(end, name))
                if name not in self._wanted:  # nobody has asked for it meanwhile
                    return None
        except BaseException:  # of a launcher that ends too, which does not wait for the cluster
            if name not in self._wanted:
                in_background(partial(end, name))
            raise
        finally:
            del self._asking[name]


def end(name: str) -> None:
    """End the runner of this name, if there is one. Blocks."""
    with contextlib.suppress(ValueError, RayError, RuntimeError):
        ray.kill(ray.get_actor(name))
