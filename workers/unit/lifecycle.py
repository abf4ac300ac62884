"""The states of a worker process, the table of legal transitions, and how they are carried out.

Every engine can do both roles at once. So a role says only which new work a worker takes: it changes at once, and what
runs of the old role goes on to its end. A worker drains only to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Awaitable, Callable

from orchestrator.config.settings import Config
from orchestrator.process.tasks import cancelled
from orchestrator.store.fields import Heartbeat
from orchestrator.types import Role, WorkerInfo, WorkerState
from workers.claims import ClaimLoop
from workers.engine import EngineDead
from workers.prefills import Parts, Prefills
from workers.serving import Serving

log = logging.getLogger("pd.worker")

POLL_S = 0.02


class LifecycleState(enum.Enum):
    STARTING = "starting"  # the engine loads its model
    READY = "ready"
    LEAVING = "leaving"  # finishes its requests, then exits
    GONE = "gone"  # sends and receives nothing any more


LEGAL: dict[LifecycleState, frozenset[LifecycleState]] = {
    LifecycleState.STARTING: frozenset({LifecycleState.READY, LifecycleState.GONE}),
    LifecycleState.READY: frozenset({LifecycleState.LEAVING, LifecycleState.GONE}),
    LifecycleState.LEAVING: frozenset({LifecycleState.GONE}),
    LifecycleState.GONE: frozenset(),
}


class IllegalMove(RuntimeError):
    """A transition that is not in the table: a bug in the agent."""


class Lifecycle:
    """The state and the role of this worker. No I/O."""

    def __init__(self, role: Role) -> None:
        self.state = LifecycleState.STARTING
        self.role = role

    @property
    def registered(self) -> WorkerState:
        return WorkerState.READY if self.state is LifecycleState.READY else WorkerState.DRAINING

    @property
    def claims(self) -> bool:
        """Whether it claims prefill jobs."""
        return self.state is LifecycleState.READY and self.role is Role.PREFILL

    def can_enter(self, state: LifecycleState) -> bool:
        return state in LEGAL[self.state]

    def enter(self, state: LifecycleState) -> None:
        """Raises IllegalMove."""
        if not self.can_enter(state):
            raise IllegalMove(f"a worker that is {self.state.value} cannot become {state.value}")
        self.state = state


class Drain:
    """Waits for a worker's requests to end, and at a deadline (monotonic seconds) gives the rest back."""

    def __init__(self, parts: Parts, claims: ClaimLoop, prefills: Prefills, serving: Serving) -> None:
        self._engine, self._blocks_total, self._attempts = parts.engine, parts.info.blocks_total, parts.attempts
        self._claims, self._prefills, self._serving = claims, prefills, serving

    @property
    def requests(self) -> int:
        """How many requests have not ended."""
        return len(self._attempts)

    def begin(self) -> None:
        """From now on no submission is taken."""
        self._serving.leaves = True

    async def end_attempts(self, deadline: float) -> None:
        """Wait for all attempts to end. At the deadline give the rest back, for other workers. Raises EngineDead."""
        while len(self._attempts) or self._claims.busy or self._prefills.busy:
            if time.monotonic() >= deadline:
                log.warning("drain deadline: giving %d requests back", len(self._attempts))
                await self._prefills.give_back("drained")
                await self._serving.give_back("drained")
                return
            await asyncio.sleep(POLL_S)

    async def end_pushes(self, deadline: float) -> None:
        """Wait until receivers have their KV: otherwise they would have to prefill. Raises EngineDead."""
        while (held := self._blocks_total - (await self._engine.load()).blocks_free) > 0:
            if time.monotonic() >= deadline:
                log.warning("drain deadline: %d KV blocks are still held; who waits for them prefills anew", held)
                return
            await asyncio.sleep(POLL_S)


class Moves:
    """Carries out one change of state at a time. Each of its steps has a deadline."""

    def __init__(
        self,
        life: Lifecycle,
        drain: Drain,
        config: Config,
        *,
        info: WorkerInfo,
        clear_orders: Callable[[int], Awaitable[None]],
        announce: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """`info`: what does not change of it. `clear_orders(sequence)`: removes the orders up to it from the
        registry. `announce`: registers the new state now. `end`: lets the process exit."""
        self.info, self._leads = info, info.id == info.unit
        self._others = max(0, len(info.ranks) - 1)  # ranks of the unit
        self._life, self._drain, self._config = life, drain, config.workers
        self._clear_orders, self._announce, self._end = clear_orders, announce, end
        self.restarts = False  # it leaves in order to be started again
        self._move: asyncio.Task[None] | None = None
        self._done = 0  # the last role order that was carried out, by sequence
        self._all_drained = asyncio.Event()  # all ranks of the unit that are there
        self.drained = False  # and waits for the other ranks of its unit to have drained too

    async def carry_out(self, told: Heartbeat, knew: WorkerInfo) -> None:
        """Carry out the orders of this worker's unit. They come again until cleared. `knew`: what the registry had of
        this worker when it told this. The first rank takes a role that was ordered, the others follow it. Raises
        RedisAway."""
        orders = told.orders
        if knew.drained and told.drained >= told.ranks - 1:
            self._all_drained.set()
        if orders.drain or orders.restart:
            self.restarts = orders.restart and not orders.drain
            self.leave(self._config.drain_timeout_s)
        elif not self._leads:
            self._take_role(told.role or self._life.role)
        elif orders.role is not None:
            if orders.sequence > self._done:
                self._done = orders.sequence
                self._take_role(orders.role)
            if knew.role is self._life.role:  # else the registry would have neither the order nor the new role
                await self._clear_orders(self._done)

    def _take_role(self, role: Role) -> None:
        """From now on, for new work. A role that the engine cannot take is refused."""
        if role is self._life.role or self._life.state is not LifecycleState.READY:
            return
        if not self.info.can_be(role):
            log.error("stays a %s worker: its engine cannot take the role %s", self._life.role.value, role.value)
            return
        self._life.role = role
        log.info("is a %s worker now, with %d requests still to end", role.value, self._drain.requests)
        self._announce()

    def leave(self, timeout_s: float) -> None:
        """Drain and end. Does nothing if it is leaving already."""
        if self._life.can_enter(LifecycleState.LEAVING):
            self._life.enter(LifecycleState.LEAVING)
            self._drain.begin()
            self._start(self._drain_and_end(time.monotonic() + timeout_s), "leave")

    async def _drain_and_end(self, deadline: float) -> None:
        log.info("draining %d requests to leave", self._drain.requests)
        try:
            await self._drain.end_attempts(deadline)
            await self._drain.end_pushes(deadline)
            log.info("drained")
            if self._others:
                await self._wait_for_others(deadline)
        except EngineDead as error:
            log.error("left before it was drained: %s", error)
        finally:
            self._end()

    async def _wait_for_others(self, deadline: float) -> None:
        """Until the other ranks of the unit have drained too, or have given back what is left: they go on as long as
        all take steps, and heard of the order up to a heartbeat later."""
        self.drained = True
        self._announce()
        deadline += 2 * self._config.heartbeat_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                await self._all_drained.wait()

    def _start(self, move: Awaitable[None], name: str) -> None:
        if self._move is not None:
            self._move.cancel()
        self._move = asyncio.ensure_future(move)
        self._move.set_name(name)
        self._announce()

    async def close(self) -> None:
        await cancelled(self._move)
