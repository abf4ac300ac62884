"""What the doctor checks in a fleet: its Redis, the ports of a host, and how well KV passes between two workers.

Running engines are left alone: what is measured has memory of its own, and their interface and environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from orchestrator.cli.doctor.host import DAMAGED, Check, ProbeFailed, at_least, at_most, probe_writes
from orchestrator.cli.handle import FleetHandle, OpenFleet, open_fleet
from orchestrator.cli.look.frontend import ask_registered, is_own_address
from orchestrator.config.engine_args import environment
from orchestrator.config.settings import Refused, parse_config
from orchestrator.config.values import labels_of, masked
from orchestrator.types import EngineIdentity, Role, WorkerInfo, link_of
from orchestrator.wire.addresses import addresses_of, in_url

_PINGS = 20
_CONNECT_S = 2.0
_TCP = "the network through TCP; with a faster one name it in workers.env: {UCX_NET_DEVICES: ...}"
_MEMORY = "a core that copies memory"
# By the beginning of a transport's name in UCX.
_LIMITS = {
    "tcp": _TCP,
    "cuda": "the links between GPUs",
    "rc": "the RDMA card",
    "dc": "the RDMA card",
    "ud": "the RDMA card",
    **dict.fromkeys(("cma", "sysv", "posix", "knem", "xpmem"), _MEMORY),
}


async def redis_checks(handle: FleetHandle) -> AsyncIterator[Check]:
    """Version, latency, and how far its clock is from this host's."""

    try:
        async with open_fleet(handle) as fleet:
            said, memory = await fleet.redis.info("server"), await fleet.redis.info("memory")
            took_s, skews_s = [], []
            for _ in range(_PINGS):
                before = time.time()
                seconds, microseconds = await fleet.redis.time()
                after = time.time()
                took_s.append(after - before)
                skews_s.append(seconds + microseconds / 1e6 - (before + after) / 2)
            reading = await fleet.registry.read()
    except Refused as error:
        yield Check("Redis", "fail", str(error), "start it, or set redis.url; requests go on without it")
        return
    version = said.get("valkey_version") or said.get("redis_version", "?")
    yield Check("Redis", "ok", f"{said.get('server_name', 'redis')} {version} at {masked(handle.redis_url or '')}")
    yield redis_memory(memory)
    median_ms, worst_ms = statistics.median(took_s) * 1e3, max(took_s) * 1e3
    fix = "run Redis nearer to the fleet: each remote prefill waits for two of its answers"
    yield at_most("Redis latency", median_ms, 5.0, 100.0, f"{median_ms:.2f} ms, worst {worst_ms:.2f} ms", fix)
    skew_ms = statistics.median(skews_s) * 1e3
    fix = "run an NTP client here: timestamps in logs and traces of several hosts are compared"
    yield at_most("Clock", abs(skew_ms), 50.0, 5000.0, f"{skew_ms:+.1f} ms against Redis", fix)
    roles = [worker.role for worker in reading.units.values()]
    of, named = (f"{handle.model}: ", f" --model {handle.namespace}") if handle.model else ("", "")
    there = f"{of}{roles.count(Role.PREFILL)} prefill, {roles.count(Role.DECODE)} decode workers"
    if reading.desired is not None and reading.desired.idle:
        yield Check("Workers", "ok", f"{there}: idle, the next request brings them back")
        return
    yield at_least("Workers", roles.count(Role.DECODE), 1, 1, there, f"`orchestrator scale decode=1{named}`")


def first_difference(one: EngineIdentity, other: EngineIdentity) -> str | None:
    """The first field in which they differ; None if they do not."""
    return next((name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)), None)


async def kv_checks(handle: FleetHandle, source: str, target: str) -> AsyncIterator[Check]:
    """Whether KV can pass from one worker to another, as seen from this host. Raises Refused."""
    async with open_fleet(handle) as fleet:
        workers = await fleet.registry.workers()
        a, b = _named(source, workers), _named(target, workers)
        field = first_difference(a.identity, b.identity)
        if field is None:
            model = handle.config.name_served if handle.config is not None else a.identity.model
            same = f"{model}, {a.identity.dtype}, blocks of {a.identity.block_size} tokens"
            yield Check("Layout", "ok", f"both {same}")
        else:
            mine, theirs = getattr(a.identity, field), getattr(b.identity, field)
            yield Check("Layout", "fail", f"{field}: {mine!r} and {theirs!r}", "start both with the same configuration")
        if not b.can_be(Role.DECODE):
            said = f"{b.id} has {b.kv.pp_size} pipeline stages"
            yield Check("Receives", "fail", said, "set pipeline_parallel_size=1 for workers that decode")
        if not a.can_be(Role.PREFILL):
            said = f"{a.id} shares each prompt among {a.kv.shards} ranks"
            yield Check("Sends", "fail", said, "set decode_context_parallel_size=1 for workers that prefill")
        ranks = f"{a.kv.tp_size} and {b.kv.tp_size} ranks"
        fits = a.kv.tp_size % b.kv.tp_size == 0 or b.kv.tp_size % a.kv.tp_size == 0
        yield Check("Ranks", "ok" if fits else "fail", ranks, "" if fits else "let one divide the other")
        for worker in (a, b):
            yield await _port("KV port", worker.id, worker.kv.host, worker.kv.port)
            address = urlsplit(worker.request_address)
            yield await _port("Requests", worker.id, address.hostname or "", address.port or 0)
        yield transferred(a, (await ask_registered(handle, fleet, "/metrics", bytes.decode))[1])
        yield learned(a, b, (await ask_registered(handle, fleet, "/predictions"))[1])
        if a.identity.engine == "vllm":
            async for check in written(fleet, a, b):
                yield check


async def port_checks(handle: FleetHandle, host: str) -> AsyncIterator[Check]:
    """Whether each port of the fleet's processes on this host, and of groups that wait there, is reached."""
    async with open_fleet(handle) as fleet:
        workers, frontends = await fleet.registry.workers(), await fleet.registry.frontends()
        loading = [name for holder in (await fleet.registry.launchers()).values() for name in holder.workers]
        waiting = {unit: place for unit in loading if (place := await fleet.registry.rendezvous(unit)) is not None}
    try:
        addresses = addresses_of(host)
    except OSError as error:
        raise Refused(f"{host!r} has no address ({error.strerror}); name one of the fleet's hosts") from None
    ports = [
        (name, worker.id, url)
        for worker in workers.values()
        for name, url in (
            ("Requests", worker.request_address),
            ("Load reports", worker.load_address),
            ("KV port", f"tcp://{in_url(worker.kv.host)}:{worker.kv.port}"),
        )
    ]
    ports += [("Group", unit, f"tcp://{in_url(place.host)}:{place.port}") for unit, place in waiting.items()]
    ports += [("HTTP", frontend.id, frontend.url) for frontend in frontends.values() if frontend.url]
    there = [(name, process, urlsplit(url)) for name, process, url in ports if urlsplit(url).hostname in addresses]
    if not there:
        hosts = sorted({urlsplit(url).hostname or "" for _, _, url in ports})
        raise Refused(f"nothing of this fleet runs on {addresses[0]}; its hosts: {', '.join(hosts) or 'none'}")
    for name, process, at in there:
        yield await _port(name, process, at.hostname or "", at.port or 0)


def redis_memory(told: dict[str, Any]) -> Check:
    """Of what the server tells with `INFO memory`: it should refuse jobs, not drop keys nor be killed."""
    policy, most, used = str(told.get("maxmemory_policy")), int(told.get("maxmemory", 0)), int(told["used_memory"])
    said = f"{used / 2**20:.0f} MiB used of {f'{most / 2**20:.0f}' if most else 'no bound'}, {policy}"
    if policy != "noeviction":
        return Check("Redis memory", "warn", said, "set maxmemory-policy noeviction: others drop jobs and members")
    fix = "set maxmemory below what its machine or container has, or the kernel kills it and the queue is lost"
    return Check("Redis memory", "ok" if most else "warn", said, "" if most else fix)


def _named(worker_id: str, workers: dict[str, WorkerInfo]) -> WorkerInfo:
    if worker_id not in workers:
        raise Refused(f"worker {worker_id!r} is not in the fleet; its workers: {', '.join(sorted(workers)) or 'none'}")
    return workers[worker_id]


async def _port(name: str, process: str, host: str, port: int) -> Check:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        why = str(error) or "no answer"
        fix = "open it in the firewall; see workers.bind and workers.advertise"
        return Check(name, "fail", f"{process}: {in_url(host)}:{port}: {why}", fix)
    took_ms = (time.perf_counter() - began) * 1e3
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Check(name, "ok", f"{process}: {in_url(host)}:{port} answers in {took_ms:.1f} ms")


def transferred(source: WorkerInfo, metrics: str | None) -> Check:
    """What the worker has pushed so far. `metrics`: a frontend's; None: none answers."""
    if metrics is None:
        return Check("Transfers", "warn", "no frontend answers", "`orchestrator status`")
    figures = {}
    for line in metrics.splitlines():
        name, found, value = line.partition(f'{{worker="{source.id}"}} ')
        if found:
            figures[name] = float(value)
    count = figures.get("pd_kv_transfer_seconds_count", 0.0)
    failed = figures.get("pd_kv_transfer_failures_total", 0.0)
    if not count and not failed:
        return Check("Transfers", "ok", f"{source.id} has pushed nothing yet")
    mean_ms = 1e3 * figures.get("pd_kv_transfer_seconds_sum", 0.0) / (count or 1)
    sent = figures.get("pd_kv_transfer_bytes_total", 0.0)
    said = f"{source.id}: {count:.0f} pushed, {sent / 1e9:.2f} GB, {mean_ms:.1f} ms each, {failed:.0f} failed"
    if failed:
        return Check("Transfers", "warn", said, "see the reason in `orchestrator logs`")
    return Check("Transfers", "ok", said)


def learned(a: WorkerInfo, b: WorkerInfo, predictions: dict[str, Any] | None) -> Check:
    """What a frontend has learned of links like the one between them. `predictions`: its page; None: none answers."""
    link = link_of(labels_of(a.host, a.labels), labels_of(b.host, b.labels))
    between = f"both have the same {' and '.join(link)}" if link else "they have no label in common"
    if predictions is None:
        return Check("Link", "warn", f"{between}; no frontend answers", "`orchestrator status`")
    fixed_s, s_per_token, transfers = predictions.get("links", {}).get(",".join(link), (0.0, 0.0, 0))
    if not transfers:
        return Check("Link", "ok", f"{between}; no transfer over such a link yet")
    said = f"{between}; {transfers} transfers between such workers: {fixed_s * 1e3:.1f} ms"
    return Check("Link", "ok", f"{said} and {s_per_token * 1e6:.2f} ms per 1,000 tokens after the prefill")


async def written(fleet: OpenFleet, a: WorkerInfo, b: WorkerInfo) -> AsyncIterator[Check]:
    """WRITEs between two processes of this host, where both workers run here; else how to measure between two."""
    if not all(is_own_address(f"http://{in_url(worker.host)}:1") for worker in (a, b)):
        probe = "python -m workers.vllm_engine.kv_probe"
        how = f"run `{probe} --listen {b.host}` on {b.host}, and what it prints behind `{probe} --address {a.host}` on "
        yield Check("WRITE", "ok", f"not measured: they are not both on this host. To do so {how}{a.host}")
        return
    version = await fleet.registry.configuration.read()
    given = environment(parse_config(version.config), a.role) if version is not None else {}
    try:
        told = await asyncio.to_thread(probe_writes, "--address", a.host, env=given)
    except ProbeFailed as failed:
        yield Check("WRITE", "fail", f"a WRITE between two processes here {failed}", "see `orchestrator doctor --host`")
        return
    rate = f"{told['bytes'] >> 20} MiB at {told['gb_per_s']:.2f} GB/s, 8 bytes in {told['latency_us']:.1f} us"
    mend = "" if told["intact"] else DAMAGED
    yield Check("WRITE", "fail" if mend else "ok", f"between two processes here: {rate}", mend)
    limits = {_LIMITS.get(name.partition("_")[0].partition("/")[0], name) for name in told["carriers"]}
    said = f"{', '.join(told['carriers']) or 'unknown'}: what limits it is {' and '.join(sorted(limits)) or 'unknown'}"
    yield Check("Transport", "ok", said)
