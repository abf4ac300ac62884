"""The processes of a unit's ranks as one: they start together, and once one has ended, all end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from orchestrator.launch.host.process import Process
from orchestrator.process.parent import EXIT_AGAIN

# Ranks that leave in order wait for each other's last request. What remains then is to end their engines.
_PATIENCE_S = 10.0
_IN_ORDER = (0, EXIT_AGAIN)


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
            ending = (waits[wait].stop(_PATIENCE_S) for wait in others if first.result() in _IN_ORDER)
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
