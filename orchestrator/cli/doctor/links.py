"""How fast KV passes between two workers: what their frontends have learned, and WRITEs between processes of this host.

Running engines are left alone: what is measured here has memory of its own, and their interface and environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from orchestrator.cli.doctor.check import Check
from orchestrator.cli.doctor.host import DAMAGED, ProbeFailed, probe_writes
from orchestrator.cli.handle import OpenFleet
from orchestrator.cli.look.frontend import is_own_address
from orchestrator.config.engine_args import environment
from orchestrator.config.settings import parse_config
from orchestrator.config.values import labels_of, link_of
from orchestrator.types import WorkerInfo
from orchestrator.wire.addresses import in_url

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
