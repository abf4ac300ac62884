"""The time of a plain NIXL WRITE of a given size between two processes: the least that any KV transfer takes.

    python -m benchmarks.kv_raw 64 --piece 16    # MiB, and KiB of a descriptor

prints it for descriptors that NIXL cannot join, and for neighbours from the last to the first and from the first on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

# Where descriptors are, one after the other: those that are neighbours upwards NIXL joins.
ORDERS: dict[str, Callable[[Sequence[int]], list[int]]] = {
    "apart": lambda starts: [*starts[::2], *starts[1::2]],
    "downwards": lambda starts: list(reversed(starts)),
    "upwards": list,
}


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
    # KV blocks may be neighbours on neither side, so NIXL must not join them all.
    return {size: times[0] for size, times in _raw(sizes, device, piece, cores, "apart").items()}


def _raw(
    sizes: list[int], device: str, piece: int, cores: tuple[int, int] | None, order: str
) -> dict[int, tuple[float, float]]:
    """Median seconds and CPU seconds of the writing process per size, with descriptors in this order."""
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
        return {size: _measure(agent, memory, remote, address, device_id, kind, size, piece, order) for size in sizes}
    finally:
        here.send("stop")
        target.join(10)
        if target.is_alive():
            target.kill()


def _measure(
    agent: Any, memory: Any, remote: Any, address: int, device_id: int, kind: str, size: int, piece: int, order: str
) -> tuple[float, float]:
    starts = ORDERS[order](range(0, size, piece))
    mine = [(memory.data_ptr() + at, min(piece, size - at), max(0, memory.get_device())) for at in starts]
    theirs = [(address + at, min(piece, size - at), device_id) for at in starts]
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(mine, kind))
    far = agent.prep_xfer_dlist(remote, agent.get_xfer_descs(theirs, kind))
    indices = list(range(len(starts)))
    times, cpu = [], []
    for _ in range(5):
        began, used = time.perf_counter(), time.process_time()
        handle = agent.make_prepped_xfer("WRITE", local, indices, far, indices)
        agent.transfer(handle)
        while (state := agent.check_xfer_state(handle)) == "PROC":
            pass
        if state != "DONE":
            raise RuntimeError(f"a raw WRITE of {size} bytes ended as {state}")
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        agent.release_xfer_handle(handle)
    return statistics.median(times[1:]), statistics.median(cpu[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sizes", type=int, nargs="+", help="MiB")
    parser.add_argument("--piece", type=int, default=64, help="KiB of a descriptor")
    options = parser.parse_args()
    sizes = [size << 20 for size in options.sizes]
    for order in ORDERS:
        for size, (seconds, cpu_s) in _raw(sizes, "cpu", options.piece << 10, None, order).items():
            rate, cost = size / seconds / 1e9, cpu_s / size * 1e12
            print(f"{size >> 20} MiB, {order}: {seconds * 1e3:.1f} ms, {rate:.2f} GB/s, {cost:.0f} ms CPU per GB")


if __name__ == "__main__":
    main()
