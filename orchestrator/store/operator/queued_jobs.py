"""The prefill queue as operators look at it: its head, and one job with all its fields. Both raise RedisAway."""

from __future__ import annotations

from typing import Any

from orchestrator.store.fields import fields_of, text
from orchestrator.store.queue import PrefillQueue

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
