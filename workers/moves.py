"""How a worker changes role in place, and how it leaves: drain, then move, every step with a deadline.

The engine can do both roles, so a change of role is a drain and a registry update; weights stay loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from orchestrator.config.settings import Config
from orchestrator.store.registry import Registry, WorkerOrders
from orchestrator.types import Role
from workers.attempts import Attempts
from workers.claims import ClaimLoop
from workers.engine import EngineDead
from workers.lifecycle import Life, Lifecycle
from workers.serving import Serving

log = logging.getLogger("pd.worker")

DRAIN_POLL_S = 0.02


class Moves:
    """Owns the one move that is going on."""

    def __init__(
        self,
        worker_id: str,
        life: Lifecycle,
        config: Config,
        registry: Registry,
        attempts: Attempts,
        serving: Serving,
        claims: ClaimLoop,
        pushed: Callable[[float], Awaitable[None]],
        *,
        announce: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """`pushed(deadline)`: waits until KV that is being pushed has arrived. `announce`: register now. `end`: the
        process may exit."""
        self._worker_id, self._life, self._config, self._registry = worker_id, life, config, registry
        self._attempts, self._serving, self._claims, self._pushed = attempts, serving, claims, pushed
        self._announce, self._end = announce, end
        self._move: asyncio.Task[None] | None = None
        self._begun = 0  # the last role order that was begun, and the last that was done, by sequence
        self._done = 0

    async def obey(self, orders: WorkerOrders) -> None:
        """What the registry says this worker was told; the same orders come again until cleared. Raises RedisAway."""
        if orders.drain:
            self.leave(self._config.workers.drain_timeout_s)
        elif orders.role is not None and orders.sequence > self._begun:
            self._flip(orders.role, orders.sequence)
        if orders.role is not None and orders.sequence <= self._done:
            await self._registry.clear_orders(self._worker_id, self._done)

    def _flip(self, role: Role, sequence: int) -> None:
        """Take the role once everything held has ended. Told to stay what it is, it stays: also half-way."""
        if self._life.state is Life.READY:
            if role is self._life.role:
                self._begun = self._done = sequence
                return
            self._life.enter(Life.FLIPPING)
        elif self._life.state is not Life.FLIPPING:
            return
        self._begun = sequence
        self._start(self._change_role(role, sequence), "change-role")

    async def _change_role(self, role: Role, sequence: int) -> None:
        began = time.monotonic()
        if role is not self._life.role:
            log.info("draining %d requests to become a %s worker", len(self._attempts), role.value)
            await self._drain(began + self._config.workers.drain_timeout_s)
        self._life.role = role
        self._life.enter(Life.READY)
        self._done = sequence
        log.info("is a %s worker now, after %.2f s", role.value, time.monotonic() - began)
        self._announce()

    def leave(self, timeout_s: float) -> None:
        """Drain and end. Does nothing when it is leaving already."""
        if self._life.can_enter(Life.LEAVING):
            self._life.enter(Life.LEAVING)
            self._start(self._drain_and_end(time.monotonic() + timeout_s), "leave")

    async def _drain_and_end(self, deadline: float) -> None:
        log.info("draining %d requests to leave", len(self._attempts))
        try:
            await self._drain(deadline)
            await self._pushed(deadline)
            log.info("drained")
        except EngineDead as error:
            log.error("left before it was drained: %s", error)
        finally:
            self._end()

    async def _drain(self, deadline: float) -> None:
        """Until nothing is held; at the deadline what is left is given back, for others to continue."""
        while len(self._attempts) or not self._claims.settled:
            if time.monotonic() >= deadline:
                log.warning("drain deadline: giving %d requests back", len(self._attempts))
                await self._claims.give_back("drained")
                await self._serving.give_back("drained")
                return
            await asyncio.sleep(DRAIN_POLL_S)

    def _start(self, move: Awaitable[None], name: str) -> None:
        if self._move is not None:
            self._move.cancel()
        self._move = asyncio.ensure_future(move)
        self._move.set_name(name)
        self._announce()

    async def close(self) -> None:
        if self._move is not None:
            self._move.cancel()
            await asyncio.gather(self._move, return_exceptions=True)
