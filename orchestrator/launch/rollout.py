"""Carries a rollout out: workers are restarted with the new configuration, few at a time, and frontends after them.

The rollout itself is in Redis, so whichever launchers there are go on with it. One of them orders the restarts, once
all have what is to be run (`Replacer`); each starts its own processes with that. A new worker that cannot start
turns the rollout back, and so does whatever it waits for in vain. A restart is a rollout to what runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from orchestrator.config.settings import Config, ConfigError
from orchestrator.config.shared import merged, shared
from orchestrator.launch.commands import Setup
from orchestrator.launch.decisions.replacement import MissingByHand, Unchanged, to_replace
from orchestrator.launch.pools.frontend_pool import OfModel
from orchestrator.launch.pools.worker_pool import WorkerPool
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.launch.supervise import Stage, Supervised, describe
from orchestrator.process.tasks import cancelled
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import WorkerOrders
from orchestrator.store.planned import Reading, launched, loading_by_hand, of_launchers
from orchestrator.store.registry import Registry

log = logging.getLogger("pd.launcher")

STARTS_BEFORE_GIVING_UP = 3


def cannot_start(process: Supervised) -> bool:
    """Whether it can never work, or died again and again."""
    end = process.last_exit
    if end is None or end.was_ready or process.stage is Stage.READY:
        return False
    return end.final or process.crashes >= STARTS_BEFORE_GIVING_UP


class Replacer:
    """Orders restarts for whoever leads: a launcher, or a command where there is none. `follow` every reading."""

    def __init__(self, registry: Registry, patience_s: float) -> None:
        """`patience_s`: within it a worker drains and its successor loads, or is ended by who runs it."""
        self.patience_s, self._registry = patience_s, registry
        self._by_hand = MissingByHand()
        self._unchanged = Unchanged()
        self.was_away = self._unchanged.was_away  # Redis was, or nobody led: nobody restarted anything, nor could tell

    def forget(self) -> None:
        """No rollout is under way."""
        self._by_hand = MissingByHand()

    async def follow(self, reading: Reading, rollout: Rollout, loading: int, now: float, leads: bool) -> bool:
        """Whether all are replaced. If not, the one that leads restarts as many as may be, and gives up if nothing has
        changed for longer than any step takes. `loading`: not registered yet; `now`: monotonic. Raises RedisAway."""
        units, launchers, managed = reading.units, of_launchers(reading.launchers), launched(reading.launchers)
        old = [name for name, info in units.items() if rollout.replaces(info)]
        drained = [name for name, orders in reading.orders.items() if orders.drain]
        by_hand = units.keys() - managed
        away = loading + self._by_hand.missing(by_hand, drained, loading_by_hand(reading.launchers))
        if units and not away and not old:
            return True
        if leads:
            behind = sorted(name for name, it in launchers.items() if it.generation != rollout.target.generation)
            states = {name: (info.process, info.state) for name, info in units.items()}
            picture = (rollout.target.generation, rollout.phase, states, behind, launchers.keys())
            if self._unchanged.look(picture, now) > self.patience_s:
                self.forget()  # no worker is waited for any more
                if rollout.phase is Phase.FORWARD:
                    why = f"launcher {behind[0]} is not prepared" if behind else "a worker told to restart is not back"
                    await self.give_up(rollout, f"nothing has changed for {self.patience_s:g} s: {why}")
                    return False
            elif behind:
                return False  # what it starts again would have the old configuration
            await self._order(reading, to_replace(units, old, reading.orders.keys(), away, rollout.max_unavailable))
        else:
            self.was_away()
        return False

    async def _order(self, reading: Reading, chosen: list[str]) -> None:
        restart = dict.fromkeys(chosen, WorkerOrders(restart=True))
        if chosen and await self._registry.steer(reading.seen, restart) is not None:  # else the next reading decides
            for worker_id in chosen:
                log.info("%s: drains, and starts again", worker_id)

    async def end(self, rollout: Rollout) -> bool:
        """All members are as they were to be. Raises RedisAway."""
        ended = Phase.DONE if rollout.phase is Phase.FORWARD else Phase.UNDONE
        return await self._registry.rollout.change(rollout, rollout.to(ended))

    async def give_up(self, rollout: Rollout, why: str) -> None:
        if await self._registry.rollout.change(rollout, rollout.given_up(why)):
            if rollout.restart:
                log.info("no more restarts: %s", why)  # the command that ordered them says it
            else:
                log.error("going back to generation %d: %s", rollout.old.generation, why)


class RolloutRunner:
    """`follow` every snapshot once the fleet is ready."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        workers: WorkerPool,
        frontends: OfModel,
        prepare: Callable[[Config, int], Awaitable[Setup]],
    ) -> None:
        """`config` is this launcher's own. `prepare` finds its model and writes the file; it raises ConfigError."""
        self._config, self._registry = config, registry
        self._workers, self._frontends = workers, frontends
        self._prepare = prepare
        self._preparing: asyncio.Task[Setup] | None = None
        self._prepared_for, self._prepare_by = -1, 0.0  # generation; monotonic
        self._known: Rollout | None = None
        self._cannot = ""  # go back: why, as it was said last
        self._replacer = Replacer(registry, config.workers.drain_timeout_s + config.workers.start_timeout_s)
        self.version = Version(workers.setup.generation, shared(config))  # what starts now

    async def begin(self, alone: bool) -> None:
        """Start with what was rolled out last, not this file. `alone`: nothing runs. Raises ConfigError, RedisAway."""
        rollout = await self._registry.rollout.read()
        if rollout is None:
            return
        if alone and not rollout.under_way:
            if not await self._registry.rollout.delete(rollout):
                await self.begin(alone=False)  # somebody has begun another
            return
        if rollout.under_way:
            log.warning("going on with the %s; `orchestrator rollout --abort` goes back", rollout.name)
        if not rollout.settled.config:
            return  # what was restarted runs what its own file says
        if not rollout.under_way:
            log.warning("the fleet runs what was rolled out last, not this file's configuration")
        self.version = rollout.settled
        self._workers.setup = self._frontends.setup = await self._set_up(self.version)

    async def follow(self, snapshot: Snapshot, leads: bool) -> None:
        rollout = snapshot.rollout
        if rollout is None:  # none, none that this release can read, or Redis was restarted and has forgotten
            if self._known is not None:
                await self._registry.rollout.put_back(self._known)
            return
        self._known = rollout
        target = rollout.target
        if self._workers.setup.generation != target.generation:
            await self._switch(rollout, snapshot.read_at)
            return
        if not rollout.under_way:
            self._replacer.forget()
            self._frontends.setup = self._workers.setup
            return
        if rollout.phase is Phase.FORWARD and (failed := self._failed(rollout)) is not None:
            assert failed.last_exit is not None
            await self._replacer.give_up(rollout, f"{failed.name} cannot start: it {describe(failed.last_exit)}")
            return
        self._replacer.patience_s = self._patience_s(rollout)
        if snapshot.was_away:
            self._replacer.was_away()
        if not await self._replacer.follow(snapshot, rollout, self._loading(snapshot), snapshot.read_at, leads):
            return
        self._frontends.setup = self._workers.setup
        ours = (frontend for frontend in snapshot.frontends.values() if not frontend.by_hand)
        all_new = all(frontend.generation == target.generation for frontend in ours)
        if leads and all_new and self._frontends.renewed and await self._replacer.end(rollout):
            log.info("all run generation %d", target.generation)

    def _patience_s(self, rollout: Rollout) -> float:
        """A worker drains by the configuration that it was started with, and its successor loads by the next."""
        configs = [merged(self._config, version.config) for version in (rollout.old, rollout.new)]
        times = [config.workers for config in (self._workers.setup.config, *configs)]
        return max(it.drain_timeout_s for it in times) + max(it.start_timeout_s for it in times)

    async def _switch(self, rollout: Rollout, now: float) -> None:
        """Let what starts from now on be of the target generation. Raises RedisAway."""
        target, within_s = rollout.target, self._config.workers.start_timeout_s
        if self._prepared_for != target.generation:
            await cancelled(self._preparing)
            self._preparing, self._prepared_for, self._prepare_by = None, target.generation, now + within_s
        if self._preparing is None:  # a task: it may take minutes to fetch a model
            self._preparing = asyncio.create_task(self._set_up(target), name="rollout-setup")
        if not self._preparing.done():
            if now > self._prepare_by and rollout.phase is Phase.FORWARD:
                why = f"a launcher is not prepared within workers.start_timeout_s ({within_s:g} s)"
                await self._replacer.give_up(rollout, why)
            return
        try:
            setup = self._preparing.result()
        except (ConfigError, OSError) as error:
            if rollout.phase is Phase.FORWARD:
                await self._replacer.give_up(rollout, str(error))
                return
            if (why := str(error)) != self._cannot:
                self._cannot = why
                log.error("cannot go back to generation %d: %s; tried again", target.generation, why)
            return
        finally:
            self._preparing = None
        self._cannot = ""
        log.info("workers start with generation %d from now on", target.generation)
        self._workers.setup, self.version = setup, target
        self._workers.restart_now()
        await self._workers.hold_ids()  # which tells that we are prepared
        await self._registry.configuration.write(target)

    async def _set_up(self, version: Version) -> Setup:
        return await self._prepare(merged(self._config, version.config), version.generation)

    def _failed(self, rollout: Rollout) -> Supervised | None:
        generation, slots = rollout.target.generation, self._workers.slots
        ours = [slot.process for slot in slots.values() if slot.generation == generation]
        if rollout.restart:
            ours = [process for process in ours if process.name in rollout.restart]
        else:
            ours += self._frontends.of_generation(generation)
        return next((process for process in ours if cannot_start(process)), None)

    def _loading(self, snapshot: Snapshot) -> int:
        """Workers that are not registered yet, but for those that wait for a machine with room. Ours are known before
        the registry tells of them: in place of a launcher that has just died, say."""
        claimed = {name for launcher in snapshot.launchers.values() for name in launcher.workers}
        claimed |= self._workers.slots.keys()
        return len(claimed - snapshot.units.keys() - self._workers.waiting_for_room)

    async def close(self) -> None:
        await cancelled(self._preparing)
