"""The engine follows the fleet's pause, as the engines of all ranks of its group do.

vLLM's ranks pause together, and go on together: in both calls each waits for all others. So they have to go through the
same states in the same order, though messages of several operators reach each in another one. The first rank decides:
it takes what it hears, from frontends and from the other ranks, unless it has a newer state, and tells the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from orchestrator.types import PauseState
from workers.engine import Engine
from workers.unit.link import GroupLink, Paused

log = logging.getLogger("pd.worker")

CALL_TIMEOUT_S = 55.0


class EnginePause:
    """`set` what frontends say, while it runs."""

    def __init__(
        self, engine: Engine, link: GroupLink, heard: Callable[[PauseState], None], cleared: Callable[[], None]
    ) -> None:
        """`heard`: called at once with each state that is newer than all before. `cleared`: called when the engine has
        dropped its prefix cache."""
        self._engine, self._link, self._heard, self._cleared = engine, link, heard, cleared
        self._newest = self._reached = PauseState()
        self._failed: Exception | None = None  # why the engine is not in the state that it has reached
        self._waiting: list[tuple[PauseState, asyncio.Future[None]]] = []

    async def set(self, state: PauseState) -> None:
        """Returns when the engine has reached this state, or a newer one. Raises what its call raised, also to whoever
        asks for the same again."""
        self._note(state)
        if state == self._reached and self._failed is not None:
            raise self._failed
        if state <= self._reached:
            return
        if self._link.leads:
            self._link.pauses.put_nowait(state)
        else:
            self._link.tell(Paused(state))
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((state, reached))
        await reached

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            state = await self._link.pauses.get()
            if state > self._reached:
                self._note(state)
                if self._link.leads:
                    self._link.tell(Paused(state))
                self._failed = await self._follow(state)
            for waits_for, reached in self._waiting:
                if waits_for <= self._reached and not reached.done():
                    reached.set_exception(self._failed) if self._failed else reached.set_result(None)
            self._waiting = [(state, reached) for state, reached in self._waiting if not reached.done()]

    def _note(self, state: PauseState) -> None:
        if state > self._newest:
            self._newest = state
            self._heard(state)

    async def _follow(self, state: PauseState) -> Exception | None:
        """Returns why the engine has not, or not in time."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if state.engines:
                    what = {"mode": state.mode, "clear_cache": state.clear_cache}
                    await self._engine.call("pause_scheduler", [], what)
                    if state.clear_cache:
                        self._cleared()
                elif self._reached.engines:
                    await self._engine.call("resume_scheduler", [], {})
        except Exception as error:  # every error of the engine goes to the caller, who may have left
            log.error("could not follow the fleet's pause: %s", str(error) or type(error).__name__)
            return error
        finally:
            self._reached = state  # also if the call failed: it may have had an effect
        return None
