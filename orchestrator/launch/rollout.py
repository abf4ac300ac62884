"""Carries a rollout out: workers are restarted with the new configuration, few at a time, and frontends after them.

The rollout itself is in Redis, so whichever launchers there are go on with it. One of them orders the restarts, once
all have what is to be run; each starts its own processes with that. A new worker that cannot start turns the rollout
back, and so does whatever it waits for in vain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from orchestrator.config.settings import Config, ConfigError
from orchestrator.config.shared import merged, shared
from orchestrator.launch.decisions.replacement import MissingByHand, replaced, to_replace
from orchestrator.launch.machines import Setup
from orchestrator.launch.pools.frontend_pool import FrontendPool, OfModel
from orchestrator.launch.pools.worker_pool import WorkerPool
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Supervised, describe
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import WorkerOrders
from orchestrator.store.planned import loading_by_hand, of_launchers
from orchestrator.store.registry import Registry

log = logging.getLogger("pd.launcher")

STARTS_BEFORE_GIVING_UP = 3


def cannot_start(process: Supervised) -> bool:
    """Whether it can never work, or died again and again."""
    end = process.last_exit
    return end is not None and not end.was_ready and (end.final or process.crashes >= STARTS_BEFORE_GIVING_UP)


class RolloutRunner:
    """`follow` every snapshot once the fleet is ready."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        workers: WorkerPool,
        frontends: FrontendPool | OfModel,
        prepare: Callable[[Config, int], Awaitable[Setup]],
    ) -> None:
        """`config` is this launcher's own. `prepare` finds its model and writes the file; it raises ConfigError."""
        self._config, self._registry = config, registry
        self._workers, self._frontends = workers, frontends
        self._prepare = prepare
        self._preparing: asyncio.Task[Setup] | None = None
        self._prepared_for = -1  # generation
        self._known: Rollout | None = None
        self._by_hand = MissingByHand()
        self._picture: object = None  # of the fleet, as it was when it last changed
        self._changed_at = 0.0  # monotonic
        # A worker drains and its successor loads within this time, or is ended by who runs it.
        self._patience_s = config.workers.drain_timeout_s + config.workers.start_timeout_s
        self.version = Version(workers.setup.generation, shared(config))  # what starts now

    async def begin(self, alone: bool) -> None:
        """Start with what the fleet runs, where a rollout has changed that, not with this launcher's file. `alone`:
        nothing of this fleet runs. Raises ConfigError, RedisAway."""
        rollout = await self._registry.configuration.rollout()
        if rollout is None:
            return
        if rollout.under_way:
            generation = rollout.new.generation
            log.warning(
                "going on with the rollout to generation %d; `orchestrator rollout --abort` goes back", generation
            )
        elif alone:
            await self._registry.configuration.forget_rollout()
            return
        else:
            log.warning("the fleet runs what was rolled out last, not this file's configuration")
        self.version = rollout.settled
        self._workers.setup = self._frontends.setup = await self._set_up(self.version)

    async def follow(self, snapshot: Snapshot, leads: bool) -> None:
        """Raises RedisAway."""
        rollout = snapshot.rollout
        if rollout is None:  # there was none, or Redis was restarted and has forgotten
            if self._known is not None:
                await self._registry.configuration.change_rollout(None, self._known)
            return
        self._known = rollout
        target = rollout.target
        if self._workers.setup.generation != target.generation:
            await self._switch(rollout)
            return
        if not rollout.under_way:
            self._by_hand = MissingByHand()
            self._frontends.setup = self._workers.setup
            return
        if rollout.phase is Phase.FORWARD and (failed := self._failed(target.generation)) is not None:
            assert failed.last_exit is not None
            await self._roll_back(rollout, f"{failed.name} cannot start: it {describe(failed.last_exit)}")
            return
        loading = self._loading(snapshot)
        if not replaced(snapshot.units, loading, target.generation):
            if leads:
                await self._replace(snapshot, rollout, loading)
            return
        self._frontends.setup = self._workers.setup
        ours = (frontend for frontend in snapshot.frontends.values() if not frontend.by_hand)
        all_new = all(frontend.generation == target.generation for frontend in ours)
        if leads and all_new and self._frontends.renewed:
            ended = Phase.DONE if rollout.phase is Phase.FORWARD else Phase.UNDONE
            if await self._registry.configuration.change_rollout(rollout, rollout.to(ended)):
                log.info("all run generation %d", target.generation)

    async def _replace(self, snapshot: Snapshot, rollout: Rollout, loading: int) -> None:
        """Restart as many workers as may be; turn back if nothing has changed for longer than any step takes. Raises
        RedisAway."""
        generation, launchers = rollout.target.generation, of_launchers(snapshot.launchers)
        behind = sorted(name for name, launcher in launchers.items() if launcher.generation != generation)
        states = {name: (info.process, info.state) for name, info in snapshot.units.items()}
        picture = (generation, rollout.phase, states, behind, snapshot.launchers.keys())
        if picture != self._picture:
            self._picture, self._changed_at = picture, snapshot.read_at
        if snapshot.read_at - self._changed_at > self._patience_s:
            if rollout.phase is Phase.FORWARD:
                why = f"launcher {behind[0]} is not prepared" if behind else "a worker told to restart is not back"
                await self._roll_back(rollout, f"nothing has changed for {self._patience_s:g} s: {why}")
                return
            self._by_hand = MissingByHand()  # no worker is waited for any more
        elif behind:
            return  # what it starts again would have the old configuration
        managed = {name for launcher in launchers.values() for name in launcher.workers}
        drained = [name for name, orders in snapshot.orders.items() if orders.drain]
        by_hand = snapshot.units.keys() - managed
        away = loading + self._by_hand.missing(by_hand, drained, loading_by_hand(snapshot.launchers))
        most = rollout.max_unavailable
        chosen = to_replace(snapshot.units, snapshot.orders.keys(), away, generation, most)
        restart = dict.fromkeys(chosen, WorkerOrders(restart=True))
        if chosen and await self._registry.steer(snapshot.seen, restart) is not None:
            for worker_id in chosen:
                log.info("%s: drains, and starts again with generation %d", worker_id, generation)

    async def _switch(self, rollout: Rollout) -> None:
        """Let what starts from now on be of the target generation. Raises RedisAway."""
        target = rollout.target
        if self._preparing is None or self._prepared_for != target.generation:
            if self._preparing is not None:
                self._preparing.cancel()
            self._prepared_for = target.generation
            # A task: it may take minutes to fetch a model.
            self._preparing = asyncio.create_task(self._set_up(target), name="rollout-setup")
        if not self._preparing.done():
            return
        try:
            setup = self._preparing.result()
        except ConfigError as error:
            if rollout.phase is Phase.FORWARD:
                await self._roll_back(rollout, str(error))
            return
        finally:
            self._preparing = None
        log.info("workers start with generation %d from now on", target.generation)
        self._workers.setup, self.version = setup, target
        self._workers.restart_now()
        await self._workers.hold_ids()  # which tells that we are prepared
        await self._registry.configuration.write(target)

    async def _set_up(self, version: Version) -> Setup:
        return await self._prepare(merged(self._config, version.config), version.generation)

    async def _roll_back(self, rollout: Rollout, why: str) -> None:
        if await self._registry.configuration.change_rollout(rollout, rollout.to(Phase.BACK, why)):
            log.error("going back to generation %d: %s", rollout.old.generation, why)

    def _failed(self, generation: int) -> Supervised | None:
        ours: Iterable[Supervised] = (
            slot.process for slot in self._workers.slots.values() if slot.generation == generation
        )
        ours = [*ours, *self._frontends.of_generation(generation)]
        return next((process for process in ours if cannot_start(process)), None)

    def _loading(self, snapshot: Snapshot) -> int:
        """Workers that are not registered yet, but for those that wait for a machine with room. Ours are known before
        the registry tells of them: in place of a launcher that has just died, say."""
        claimed = {name for launcher in snapshot.launchers.values() for name in launcher.workers}
        claimed |= self._workers.slots.keys()
        return len(claimed - snapshot.units.keys() - self._workers.waiting_for_room)

    async def close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
