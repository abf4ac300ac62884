"""A worker as the registry describes it, and a request as its line does: for tests that need no process behind them."""

from typing import Any

import msgspec

from orchestrator.fleet.view import Fleet
from orchestrator.process.telemetry.requests import RequestLine
from orchestrator.types import EngineIdentity, KVEndpoint, Role, WorkerInfo, WorkerState


def worker_info(name: str, role: Role = Role.DECODE, engine_id: str = "", **changes: Any) -> WorkerInfo:
    """`changes`: fields of the worker, or of its identity."""
    of_identity = {field: changes.pop(field) for field in EngineIdentity.__struct_fields__ if field in changes}
    identity = EngineIdentity("m", "float32", "auto", 16, 4096, "sim", "1", 1)
    endpoint = KVEndpoint(engine_id or f"{name}-engine", "127.0.0.1", 1)
    info = WorkerInfo(
        name, role, WorkerState.READY, "h", 1, "tcp://a", "tcp://b", identity, endpoint, 100, 64, 2048, 1000
    )
    changes = {"identity": msgspec.structs.replace(identity, **of_identity), **changes}
    return msgspec.structs.replace(info, **changes)


def fleet_of(*infos: WorkerInfo) -> Fleet:
    """The view of a frontend "f" that is connected to these workers."""
    fleet = Fleet("f")
    for info in infos:
        connects(fleet, info)
    return fleet


def connects(fleet: Fleet, info: WorkerInfo, now: float = 0.0) -> None:
    """The view has this worker, and its frontend is connected to it."""
    fleet.upsert(info, now)
    fleet.workers[info.id].note_connected(True)


def request_line(name: str = "abc", total_ms: float = 800.0) -> RequestLine:
    """Of a request that was prefilled remotely."""
    return RequestLine(
        id=name, outcome="finished", decision="remote", reason="cost", prompt_tokens=400, output_tokens=8, attempts=1,
        decode_worker="decode-0", prefill_worker="prefill-0", total_ms=total_ms, ttft_ms=560.0, queued_ms=46.0,
        claim_ms=4.0, prefill_ms=500.0, exposed_ms=40.0, decode_ms=240.0, arrived_at=1000.0, frontend_ms=5.0,
        sent_ms=60.0,
    )  # fmt: skip
