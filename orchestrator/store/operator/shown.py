"""A worker, and the prefill queue, as operators see them. What asks the queue raises RedisAway."""

from __future__ import annotations

from typing import Any

from orchestrator.store.fields import fields_of, text
from orchestrator.store.queue import PrefillQueue
from orchestrator.types import WorkerInfo, WorkerLoad


def worker_status(info: WorkerInfo, load: WorkerLoad | None = None, connected: bool = True) -> dict[str, Any]:
    """One worker as `/fleet` and `orchestrator status` show it. None stands for an unknown load."""
    return {
        "id": info.id,
        "role": info.role,
        "state": info.state if connected else "unreachable",
        "engine": info.identity.engine,
        "host": info.host,
        "pid": info.pid,
        "blocks_total": load.blocks_total if load else info.blocks_total,
        "blocks_free": load.blocks_free if load else None,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "step_ms": round(load.step_ms, 2) if load else None,
        "generation": info.generation,  # of its configuration
        "unit": info.unit,  # by which operators steer it
        "rank": info.ranks.index(info.id) if info.ranks else 0,  # its place in the unit
        "ranks": max(1, len(info.ranks)),  # of the unit
        "group": load.group if load else None,  # of the first of the ranks that step together
        "labels": info.labels,  # where it is, as zone=a
        "block_size": info.identity.block_size,  # tokens
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "max_model_len": info.identity.max_model_len,  # tokens
        "adapter_slots": info.adapter_slots,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "link_bytes_per_s": load.kv.link_bytes_per_s if load else None,  # as `KVCounters` has it
    }


MAX_PEEK = 1000  # one call holds up every other client


async def peek(queue: PrefillQueue, limit: int) -> list[dict[str, Any]]:
    """The head of the queue: id, tokens, uncached, age_s, score, attempt, reply_to."""
    rows = await queue.call("peek", min(limit, MAX_PEEK)) if limit > 0 else []
    return [
        {
            "id": text(request_id),
            "tokens": tokens,
            "uncached": uncached,
            "age_s": round(float(age_s), 3),
            "score": float(place),
            "attempt": attempt,
            "reply_to": text(reply_to),
        }
        for request_id, tokens, uncached, age_s, place, attempt, reply_to in rows
    ]


async def show(queue: PrefillQueue, request_id: str) -> dict[str, Any] | None:
    """One job, waiting or claimed: its fields as text or numbers, `age_s`, `body_bytes`."""
    reply = await queue.call("show", request_id)
    if reply is None:
        return None
    now, body_bytes, fields = reply
    shown = {"id": request_id, **{name: _number(value) for name, value in fields_of(fields).items()}}
    if isinstance(shown.get("arrived_at"), (int, float)):
        shown["age_s"] = round(float(now) - shown["arrived_at"], 3)
    return {**shown, "body_bytes": body_bytes}


def _number(said: str) -> Any:
    for kind in (int, float):
        try:
            return kind(said)
        except ValueError:
            continue
    return said
