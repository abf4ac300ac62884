"""The cost of encrypted messages: CPU time and rate of messages from a worker to a frontend, both in this process.

Alternates `security.mesh: curve` and `none`, and prints medians over rounds. Compare CPU time, not rates, on a machine
that does other work too.

    python -m benchmarks.bench_mesh [--rounds 7] [--messages 8000] [--sizes 300 8000]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence

from orchestrator.wire.addresses import Listening
from orchestrator.wire.curve import KeyPair
from orchestrator.wire.messages import Outputs
from orchestrator.wire.transport import FrontendTransport, WorkerTransport

DEADLINE_S = 60
BURST = 16  # messages that are sent before other tasks run


async def measure(encrypted: bool, messages: int, size: int) -> tuple[float, float]:
    """Returns (CPU microseconds per message at both ends, messages per second)."""
    keys, own = (KeyPair.new(), KeyPair.new()) if encrypted else (None, None)

    async def find(asking: Sequence[str]) -> dict[str, str]:
        return {public: "f" for public in asking if own and public == own.public}

    worker = WorkerTransport(Listening("127.0.0.1"), keys=keys, find_frontends=find)
    frontend = FrontendTransport("f", keys=own)
    frontend.connect("w", worker.request_address, worker.load_address, keys.public if keys else "")
    async with asyncio.timeout(DEADLINE_S):
        await worker.receive()  # its greeting
        cpu, began = time.process_time(), time.monotonic()

        async def receive() -> None:
            for _ in range(messages):
                await frontend.receive()

        receiving = asyncio.create_task(receive())
        message, payload = Outputs([1] * 8, 1.0), [bytes(size)]
        for number in range(messages):
            assert worker.send("f", message, payload)
            if number % BURST == 0:
                await asyncio.sleep(0)
        await receiving
    cost = (time.process_time() - cpu) / messages * 1e6, messages / (time.monotonic() - began)
    frontend.close()
    worker.close()
    return cost


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=8000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 8000], help="bytes of payload")
    options = parser.parse_args()
    cases = list(itertools.product(options.sizes, (False, True)))
    costs: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for size, encrypted in cases:
            costs[size, encrypted].append(await measure(encrypted, options.messages, size))
    for (size, encrypted), found in costs.items():
        cpu_us, rate = (statistics.median(values) for values in zip(*found, strict=True))
        mesh = "curve" if encrypted else "none"
        print(f"{size:6} bytes, {mesh:5}: {cpu_us:6.1f} us of CPU per message, {rate:8.0f} messages/s")


if __name__ == "__main__":
    asyncio.run(main())
