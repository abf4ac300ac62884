"""The prefill queue under a million waiting jobs: claim latency, and enqueue + claim + ack cycles a second.

One client process against the embedded server, or any other with --url (a namespace of its own, removed again).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from orchestrator.config import QueueConfig
from orchestrator.policy.claims import choose_claims
from orchestrator.queue import Claim, PrefillQueue
from orchestrator.redis_client import EmbeddedRedis, Redis, connect
from orchestrator.types import PrefillJob

NAMESPACE = "bench-queue"
WAITING, SECONDS, BODY_BYTES = 1_000_000, 10.0, 512
CLAIMERS, WINDOW = 64, QueueConfig().affinity_window
TARGET_CLAIM_P99_MS, TARGET_CYCLES_PER_S = 2.0, 5000.0


def job(number: int, body: bytes, random_: random.Random, affine: bool = False) -> PrefillJob:
    """`affine`: half of its prompt is cached on one of the claiming workers."""
    tokens = int(random_.lognormvariate(6.5, 1.0)) + 1
    cached = {f"worker-{random_.randrange(CLAIMERS)}": tokens // 2} if affine else {}
    return PrefillJob(f"chatcmpl-{number:032x}", 1, tokens, tokens, 0.0, "frontend-1", body, cached=cached)


async def claim(queue: PrefillQueue, worker: str, affine: bool) -> list[Claim]:
    """One job, as a worker's claim loop takes it."""
    claims, window = await queue.claim_or_look(worker, 1, 1, WINDOW if affine else 0)
    return await queue.claim_chosen(worker, choose_claims(window, 1, True, 0.0005)) if window else claims


def quantiles_ms(latencies_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies_s, n=1000)
    return {"p50": cuts[499] * 1e3, "p99": cuts[989] * 1e3, "p99.9": cuts[998] * 1e3}


async def fill(queue: PrefillQueue, waiting: int, body: bytes, affine: bool = False) -> float:
    """Enqueue `waiting` jobs, 200 at a time. Returns jobs a second."""
    random_, started = random.Random(0), time.perf_counter()
    numbers = iter(range(waiting))

    async def producer() -> None:
        for number in numbers:
            await queue.enqueue(job(number, body, random_, affine))

    await asyncio.gather(*(producer() for _ in range(200)))
    return waiting / (time.perf_counter() - started)


async def cycle(
    queue: PrefillQueue, seconds: float, clients: int, rate: float, body: bytes, first: int, affine: bool = False
) -> dict[str, Any]:
    """Enqueue, claim and ack one job after another in `clients` tasks, the depth staying the same.

    `rate` 0 goes as fast as it can, which is the throughput; else cycles start evenly at `rate` a second, which
    is the latency of a fleet that is not saturated. A claim's latency counts from when it was asked for.
    """
    latencies: list[float] = []
    random_, started = random.Random(first), time.perf_counter()
    until, number, done = started + seconds, first, 0

    async def client(worker: str, offset: int) -> None:
        nonlocal number, done
        turn = offset
        while time.perf_counter() < until:
            if rate:
                await asyncio.sleep(max(started + turn / rate - time.perf_counter(), 0))
                turn += clients
            number += 1
            await queue.enqueue(job(number, body, random_, affine))
            asked = time.perf_counter()
            claims = await claim(queue, worker, affine)
            latencies.append(time.perf_counter() - asked)
            for claimed in claims:
                acked = await queue.ack(worker, claimed.job.request_id, claimed.job.attempt)
                done += acked

    await asyncio.gather(*(client(f"worker-{n}", n) for n in range(clients)))
    per_s = done / (time.perf_counter() - started)
    return {"clients": clients, "asked_per_s": rate or None, "cycles_per_s": per_s, "claim_ms": quantiles_ms(latencies)}


async def do_nothing(redis: Redis, seconds: float, clients: int, rate: float) -> dict[str, float]:
    """Latency of a command that does nothing, as often as `cycle` sends any: what client, server and machine add."""
    latencies: list[float] = []
    started = time.perf_counter()

    async def client(offset: int) -> None:
        turn = offset
        while time.perf_counter() < started + seconds:
            await asyncio.sleep(max(started + turn / rate - time.perf_counter(), 0))
            turn += clients
            for _ in range(3):
                asked = time.perf_counter()
                await redis.execute_command("PING")
                latencies.append(time.perf_counter() - asked)

    await asyncio.gather(*(client(n) for n in range(clients)))
    return quantiles_ms(latencies)


async def measure_affine(redis: Redis, seconds: float, body: bytes) -> dict[str, Any]:
    """Every job has a prefix cached somewhere, so that each claim looks at a window first."""
    queue = PrefillQueue(redis, NAMESPACE + "-affine", QueueConfig(max_requests=100_000, lease_s=600.0))
    for number in range(CLAIMERS):
        await redis.hset(queue.keys.worker(f"worker-{number}"), mapping={"role": "prefill", "state": "ready"})
    await fill(queue, 10_000, body, affine=True)
    return await cycle(queue, seconds, CLAIMERS, 1000.0, body, 10**9, affine=True)


async def measure(redis: Redis, waiting: int, seconds: float, body_bytes: int) -> dict[str, Any]:
    body = random.Random(1).randbytes(body_bytes)
    queue = PrefillQueue(redis, NAMESPACE, QueueConfig(max_requests=waiting + 100_000, lease_s=600.0))
    before = int((await redis.info("memory"))["used_memory"])
    filled_per_s = await fill(queue, waiting, body)
    used = int((await redis.info("memory"))["used_memory"]) - before
    runs = {
        "one at a time": await cycle(queue, seconds, 1, 0, body, 10**9),
        "at the target rate": await cycle(queue, seconds, CLAIMERS, TARGET_CYCLES_PER_S, body, 2 * 10**9),
        "as fast as it can, 8": await cycle(queue, seconds, 8, 0, body, 3 * 10**9),
        "as fast as it can": await cycle(queue, seconds, CLAIMERS, 0, body, 4 * 10**9),
    }
    nothing_ms = await do_nothing(redis, seconds, CLAIMERS, TARGET_CYCLES_PER_S)
    depth = await queue.depth()
    assert depth.requests == waiting and depth.claimed == 0, f"the queue's books do not balance: {depth}"
    runs["chosen by prefix, 1,000/s"] = await measure_affine(redis, seconds, body)
    return {
        "waiting_jobs": waiting,
        "body_bytes": body_bytes,
        "filled_per_s": filled_per_s,
        "bytes_per_job": used / waiting if waiting else 0,
        "runs": runs,
        "ping_ms": nothing_ms,
    }


def report(result: dict[str, Any]) -> str:
    lines = [
        f"{result['waiting_jobs']:,} waiting jobs, bodies of {result['body_bytes']} B: filled at "
        f"{result['filled_per_s']:,.0f}/s, {result['bytes_per_job']:,.0f} B of server memory each",
        f"{'':26} {'clients':>7} {'cycles/s':>9} {'claim P50':>10} {'P99':>8} {'P99.9':>8}  (ms)",
    ]
    for name, run in result["runs"].items():
        claim = run["claim_ms"]
        lines.append(
            f"{name:26} {run['clients']:>7} {run['cycles_per_s']:>9,.0f} "
            f"{claim['p50']:>10.2f} {claim['p99']:>8.2f} {claim['p99.9']:>8.2f}"
        )
    ping = result["ping_ms"]
    lines.append(f"{'PING at the target rate':46} {ping['p50']:>10.2f} {ping['p99']:>8.2f} {ping['p99.9']:>8.2f}")
    p99 = result["runs"]["at the target rate"]["claim_ms"]["p99"]
    per_s = result["runs"]["as fast as it can"]["cycles_per_s"]
    lines.append(
        f"claim P99 {p99:.2f} ms at {TARGET_CYCLES_PER_S:,.0f}/s (target < {TARGET_CLAIM_P99_MS:g}): "
        f"{'met' if p99 < TARGET_CLAIM_P99_MS else 'MISSED'}; {per_s:,.0f} cycles/s "
        f"(target > {TARGET_CYCLES_PER_S:,.0f}): {'met' if per_s > TARGET_CYCLES_PER_S else 'MISSED'}"
    )
    return "\n".join(lines)


async def run(
    url: str | None = None, waiting: int = WAITING, seconds: float = SECONDS, body_bytes: int = BODY_BYTES
) -> dict[str, Any]:
    """The whole benchmark, on an embedded server where no URL is given."""
    embedded = EmbeddedRedis()
    with tempfile.TemporaryDirectory() as folder:
        redis = await connect(url or await embedded.start(Path(folder)), timeout_s=5.0)
        try:
            return await measure(redis, waiting, seconds, body_bytes)
        finally:
            if url:
                async for key in redis.scan_iter(match=f"pd:{{{NAMESPACE}*", count=5000):
                    await redis.unlink(key)
            await redis.aclose()
            await embedded.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server instead of an embedded one")
    parser.add_argument("--waiting", type=int, default=WAITING, help="jobs waiting throughout")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="per run")
    parser.add_argument("--body-bytes", type=int, default=BODY_BYTES, help="size of each job's request")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    result = uvloop.run(run(options.url, options.waiting, options.seconds, options.body_bytes))
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
