"""Faults of the machine: no CPU time, a full disk, a removed run folder, and unread output of the launcher."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.world import World
from orchestrator.launch.host.run_folder import RunFolder, base_folder
from orchestrator.types import Role

LASTS_S = 4.5
BUSY_PER_CORE = 10
_STOP, _GO_ON = b"\x13", b"\x11"  # Ctrl-S and Ctrl-Q
_FILL_BYTES = 1 << 16


async def starved(world: World) -> None:
    """Run ten busy processes for each core, at the fleet's own priority. No worker may count as dead."""
    before = {role: sorted(world.pids(role)) for role in Role}
    command = [sys.executable, "-c", "while True: pass"]
    busy = [await asyncio.create_subprocess_exec(*command) for _ in range(BUSY_PER_CORE * (os.cpu_count() or 1))]
    try:
        await asyncio.sleep(world.starve_s)
    finally:
        for process in busy:
            process.kill()
            await process.wait()
    world.seen.false_losses += sum("is gone: it fell silent" in line for line in world.launched.process_lines())
    world.seen.false_losses += sum(sorted(world.pids(role)) != pids for role, pids in before.items())


async def disk_full(world: World) -> None:
    """Fill the disk of the run folder and the log. A worker dies meanwhile, so that the launcher has something to
    write."""
    filler = base_folder() / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(_FILL_BYTES))
        await _with_a_death(world)
    finally:
        filler.unlink()


async def terminal_stopped(world: World) -> None:
    """Press Ctrl-S on the launcher's terminal."""
    fleet = world.launched
    os.write(fleet.output, _STOP)
    fleet.reading.clear()
    try:
        await _with_a_death(world)
    finally:
        fleet.reading.set()
        os.write(fleet.output, _GO_ON)


async def pipe_unread(world: World) -> None:
    """Stop reading the launcher's output."""
    fleet = world.launched
    fleet.reading.clear()
    try:
        await _with_a_death(world)
    finally:
        fleet.reading.set()


async def folder_removed(world: World) -> None:
    """Remove the run folder and the log, as a logout or a cleaner of temporary files does."""
    folder = RunFolder(world.fleet.namespace)
    gone = Path(folder.path).rename(f"{folder.path}.removed")  # all at once: the launcher puts its files back
    await asyncio.to_thread(shutil.rmtree, gone)
    folder.log_path.unlink(missing_ok=True)
    await _with_a_death(world)


async def _with_a_death(world: World) -> None:
    await asyncio.sleep(LASTS_S / 3)
    world.kill(world.random.choice([pid for pid in world.pids(Role.PREFILL) if pid not in world.spared]))
    await asyncio.sleep(LASTS_S * 2 / 3)
