"""The time of a plain NIXL WRITE of a given size between two processes: the least that any KV transfer takes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any


def _agent(name: str, device: str, size: int) -> tuple[Any, Any, Any]:
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(num_threads=4, enable_prog_thread=False))
    memory = torch.ones(size, dtype=torch.uint8, device=device)
    registered = agent.register_memory(memory)
    return agent, memory, registered


def _target(pipe: Connection, device: str, size: int, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    agent, memory, _ = _agent("target", device, size)
    pipe.send((agent.get_agent_metadata(), memory.data_ptr(), max(0, memory.get_device())))
    while not pipe.poll(0.0005):
        agent.get_new_notifs()  # without a progress thread the receiving side progresses only in calls


def raw_write_s(
    sizes: list[int], *, device: str = "cpu", piece: int = 64 << 10, cores: tuple[int, int] | None = None
) -> dict[int, float]:
    """Median seconds per size in bytes, written in descriptors of `piece` bytes as KV blocks are."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    largest = max(sizes)
    target = context.Process(target=_target, args=(there, device, largest, cores[1] if cores else None), daemon=True)
    target.start()
    if cores:
        os.sched_setaffinity(0, {cores[0]})
    try:
        agent, memory, _ = _agent("initiator", device, largest)
        if not here.poll(60):
            raise RuntimeError("the receiving process of the raw WRITE did not start within 60 s")
        metadata, address, device_id = here.recv()
        remote = agent.add_remote_agent(metadata)
        kind = "VRAM" if device.startswith("cuda") else "DRAM"
        return {size: _measure(agent, memory, remote, address, device_id, kind, size, piece) for size in sizes}
    finally:
        here.send("stop")
        target.join(10)
        if target.is_alive():
            target.kill()


def _measure(
    agent: Any, memory: Any, remote: Any, address: int, device_id: int, kind: str, size: int, piece: int
) -> float:
    # Every other piece first: KV blocks are rarely neighbours on both sides, so NIXL must not merge them all.
    starts = [*range(0, size, 2 * piece), *range(piece, size, 2 * piece)]
    mine = [(memory.data_ptr() + at, min(piece, size - at), max(0, memory.get_device())) for at in starts]
    theirs = [(address + at, min(piece, size - at), device_id) for at in starts]
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(mine, kind))
    far = agent.prep_xfer_dlist(remote, agent.get_xfer_descs(theirs, kind))
    indices = list(range(len(starts)))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("WRITE", local, indices, far, indices)
        agent.transfer(handle)
        while (state := agent.check_xfer_state(handle)) == "PROC":
            pass
        if state != "DONE":
            raise RuntimeError(f"a raw WRITE of {size} bytes ended as {state}")
        times.append(time.perf_counter() - began)
        agent.release_xfer_handle(handle)
    return statistics.median(times[1:])


if __name__ == "__main__":
    for size, seconds in raw_write_s([int(argument) << 20 for argument in sys.argv[1:]]).items():
        print(f"{size >> 20} MiB: {seconds * 1e3:.1f} ms, {size / seconds / 1e9:.2f} GB/s")
