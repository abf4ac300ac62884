"""Many workers in one process: each is a real agent with its own sockets, keys and connection to Redis, and a simulated
engine. The process prints `made`, and starts all workers when it reads a line.

python -m benchmarks.scale.workers FILE URL FIRST COUNT PREFILL
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import uvloop

from orchestrator.config.engine_args import engine_args
from orchestrator.config.settings import Config, load_config
from orchestrator.config.simulated import simulated
from orchestrator.process.parent import die_with_parent
from orchestrator.store.client import connect
from orchestrator.types import Role
from orchestrator.wire.addresses import Listening
from workers.agent import Agent
from workers.sim.engine import SimEngine


async def run(config: Config, url: str, ids: range, prefill: int) -> None:
    """Run the workers until killed. Those with a number below `prefill` are prefill workers."""
    agents = []
    for number in ids:
        role = Role.PREFILL if number < prefill else Role.DECODE
        engine = SimEngine(simulated(config.sim, engine_args(config, role)), config.model, kv=config.kv)
        redis = await connect(url, config.redis.timeout_s)
        agents.append(
            Agent(engine, redis, config, f"{role.value}-{number}", role, Listening("127.0.0.1"), generation=0)
        )
    print("made", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(agent.run() for agent in agents))


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    file, url, *numbers = sys.argv[1:]
    first, count, prefill = map(int, numbers)
    uvloop.run(run(load_config(Path(file)), url, range(first, first + count), prefill))
