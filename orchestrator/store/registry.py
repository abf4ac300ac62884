"""Membership in Redis: the fleet's members, their roles and orders, and the desired ratio.

A member is a hash with a time to live, which only its owner refreshes. Not responsible for load, which workers publish
over ZMQ, nor for carrying out orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.process.tasks import Turns, cancelled, ticks
from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.configuration import AdapterList, Rollout, Version
from orchestrator.store.documents import Document, answered
from orchestrator.store.fields import (
    Departed,
    Frontend,
    Heartbeat,
    Launcher,
    Rendezvous,
    WorkerOrders,
    desired_ratio,
    fields_of,
    heartbeat,
    launcher_from_fields,
    launcher_to_fields,
    member,
    milliseconds,
    orders_of,
    text,
    worker_from_fields,
    worker_to_fields,
)
from orchestrator.store.keys import REGISTRY, Keys
from orchestrator.store.planned import Holder, Reading, Seen, in_role_of_unit, plan
from orchestrator.types import ALWAYS_EQUAL, DesiredRatio, EngineIdentity, Role, WorkerInfo

log = logging.getLogger("pd.registry")

PRUNE_S = 1.0  # a member whose key expires announces nothing: heartbeats of workers, and watchers, ask for it
STAYS = 9  # heartbeats that only say that the entry stands, after one that writes it: whatever was damaged is mended
_OFFERED = "offered_"  # before the names of a frontend's counts, which change without an event
# Not strict: Lua gives some numbers as text, which keeps all their digits.
_ratio: msgspec.json.Decoder[DesiredRatio] = msgspec.json.Decoder(DesiredRatio, strict=False)
Refuse = Callable[[WorkerInfo], Awaitable[None]]  # raises where this other worker of the same id may live
_PAIRED = {  # the mends of what two engines need not have alike, but must fit each other in
    "kv_tp_size": "let one of them divide the other",
    "kv_pp_size": "ranks cannot share prompts that pipeline stages compute: set decode_context_parallel_size or "
    "pipeline_parallel_size to 1",
}
_IDENTITY = [*ALWAYS_EQUAL, *(name for name in EngineIdentity.__struct_fields__ if name not in ALWAYS_EQUAL)]


class IncompatibleWorker(Exception):
    """A worker that cannot exchange KV with another. One line: the field, both values, the fix."""


class Registry:
    """Every method but `watch` raises RedisAway."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self.keys = Keys(namespace)
        self.configuration = Document(redis, namespace, "config", Version)  # for workers on other hosts
        self.rollout = Document(redis, namespace, "rollout", Rollout)  # the last one that was ordered
        self.adapters = Document(redis, namespace, "adapters", AdapterList)
        self._redis = redis
        self._warned: dict[str, str] = {}
        self._version = b"0"  # of what was read last: another, once something of a worker has changed
        self._seen: dict[str, tuple[WorkerInfo | None, WorkerOrders]] = {}
        self._told: DesiredRatio | None = None  # the desired ratio, by an event
        self._written: tuple[WorkerInfo | None, int] = (None, 0)  # in full by `refresh`, and how often not since then

    # ---- workers -----------------------------------------------------------------------------------------------

    async def join(self, info: WorkerInfo, ttl_s: float) -> None:
        """Register a worker, without orders. Raises IncompatibleWorker if it cannot exchange KV with a live worker."""
        await self._put_worker(info, ttl_s, fresh=True)

    async def replace(self, info: WorkerInfo, ttl_s: float, refuse: Refuse) -> None:
        """`join`, and replace the worker that is registered under this id. Also raises what `refuse` raises."""
        other, mine = await self.worker(info.id), (info.kv.engine_id, info.request_address)
        # With its engine only the answer to `join` was lost; with its address the entry is damaged.
        if other is not None and other.kv.engine_id != mine[0] and other.request_address != mine[1]:
            await refuse(other)
        await self.join(info, ttl_s)

    async def refresh(self, info: WorkerInfo, ttl_s: float, heard: str = "", refuse: Refuse | None = None) -> Heartbeat:
        """The heartbeat: stay registered for `ttl_s` more, with this role and state. Returns the uncleared orders, and
        the workers that left after the departure `heard` (none if `heard` is empty). Registers again with `join` if
        Redis has lost this worker, or with `replace` if another one took its id."""
        (written, times), self._written = self._written, (None, 0)  # if this fails, the stored entries are not known
        reply = None
        if written == info and times < STAYS:
            reply = await self._call("stay", heard, info.id, milliseconds(ttl_s), info.kv.engine_id)
        if reply is None:
            told, times = await self._put_worker(info, ttl_s, fresh=False, heard=heard), 0
            if told is None:
                await (self.replace(info, ttl_s, refuse) if refuse is not None else self.join(info, ttl_s))
                return Heartbeat(last_departure=heard)
        else:
            told, times = heartbeat(reply), times + 1
        self._written = info, times
        return told

    async def leave(self, worker_id: str, engine_id: str = "") -> None:
        """Remove a worker at once; with an engine id, only that engine's entry. Idempotent."""
        await self._call("remove_member", "worker", worker_id, engine_id)

    async def known_for_s(self) -> float:
        """For how long Redis has known the fleet, seconds; after it has lost its data, or no member could renew its
        entry, since the first came back."""
        return float(await self._call("known_for"))

    async def is_known(self) -> bool:
        """Whether the time since when is kept: not where all members left long ago."""
        return bool(await self._redis.execute_command("EXISTS", self.keys.prefix + "begun"))

    async def has_settings(self) -> bool:
        """Whether there is something that a launcher replaces that starts alone."""
        names = (self.keys.prefix + name for name in ("desired", "rollout", "log_levels"))
        return bool(await self._redis.execute_command("EXISTS", *names))

    async def workers(self) -> dict[str, WorkerInfo]:
        """All live workers. One whose hash cannot be read is logged and left out."""
        return (await self.read()).workers

    async def read(self) -> Reading:
        """Workers, orders, and the desired ratio, in one reading: of two, one could show a drain without its order."""
        for since in (self._version, b"0"):  # those that changed since they were read last
            self._version, ids, rows, holders, ratio = await self._call("read", since)
            names, seen = [text(name) for name in ids], self._seen
            seen |= {(name := text(row[0])): self._parse_worker(name, fields_of(row[1])) for row in rows}
            self._seen = {name: seen[name] for name in names if name in seen}
            if len(self._seen) == len(names):  # else a member was away for a while, and came back unchanged
                break
        workers = in_role_of_unit({name: info for name, (info, _) in self._seen.items() if info is not None})
        told = {name: one for name, (_, one) in self._seen.items() if one.role or one.drain or one.restart}
        launchers = {text(name): launcher_from_fields(fields_of(fields)) for name, fields in holders}
        return Reading(workers, told, launchers, desired_ratio(ratio), self._version)

    def _parse_worker(self, worker_id: str, fields: dict[str, str]) -> tuple[WorkerInfo | None, WorkerOrders]:
        orders = orders_of(fields.get("order_role"), fields.get("order_drain"), fields.get("order_sequence"))
        return self._read_worker(worker_id, fields), orders

    async def worker(self, worker_id: str) -> WorkerInfo | None:
        """One live worker; None when there is none by that id, or its hash cannot be read (which is logged)."""
        raw: dict[bytes, bytes] = await self._redis.execute_command("HGETALL", self.keys.worker(worker_id))
        return self._read_worker(worker_id, {text(name): text(value) for name, value in raw.items()}) if raw else None

    def _read_worker(self, worker_id: str, fields: dict[str, str]) -> WorkerInfo | None:
        try:
            return worker_from_fields(worker_id, fields)
        except (KeyError, ValueError) as error:
            self._warn_once(worker_id, f"{type(error).__name__}: {error}")
            return None

    async def steer(
        self,
        seen: Seen,
        orders: Mapping[str, WorkerOrders] = {},
        desired: DesiredRatio | None = None,
        holder: Holder | None = None,
        by_operator: bool = False,
    ) -> list[str] | None:
        """Order units, set the desired ratio, and claim ids for new ones, at once: nobody sees a part of it.
        Orders stay until they are carried out. Returns the ids; None, and nothing is done, where what was seen is
        not so any more, or a unit that is ordered is not in the fleet. `by_operator`: see `answered`."""
        planned = plan(seen, orders, desired, holder)
        prefix, redis = self.keys.prefix, self._redis
        claimed = await (answered(redis, prefix, "steer", planned) if by_operator else self._call("steer", planned))
        return [text(worker_id) for worker_id in claimed] if claimed is not None else None

    async def clear_orders(self, worker_id: str, sequence: int) -> None:
        """Remove the orders up to `sequence`, which are done. Newer ones stay."""
        await self._call("clear_orders", worker_id, sequence)

    async def ordered(self, unit: str) -> AsyncGenerator[None, None]:
        """Yields when there may be orders for this unit, which its next heartbeat returns. Never ends, never raises."""
        async with contextlib.aclosing(self._redis.listen(self.keys.orders(unit))) as orders:
            async for _ in orders:
                yield

    async def endpoints(self, worker_id: str) -> Departed | None:
        """Where the worker listens that is registered under this id, with claims or not; None if there is none."""
        if (info := await self.worker(worker_id)) is None:
            return None
        return Departed(worker_id, info.kv.engine_id, info.request_address, info.kv.host, info.kv.port, False)

    async def _put_worker(self, info: WorkerInfo, ttl_s: float, fresh: bool, heard: str = "") -> Heartbeat | None:
        """Write a worker's entry. Returns None if another engine is registered under this id."""
        arguments = member("worker", info.id, ttl_s, fresh, _IDENTITY, fields := worker_to_fields(info))
        reply = await self._call("put_worker", heard, *arguments)
        if (outcome := reply[0]) == b"taken":
            return None
        if outcome != b"ok":
            field, theirs, other = (text(part) for part in reply[1:4])
            why = f"{field} is {fields[field]!r}, but the fleet's is {theirs!r} (worker {other})"
            mend = f"start it with the same {field}" if outcome == b"differs" else _PAIRED[field]
            raise IncompatibleWorker(f"worker {info.id}: {why}; {mend}, or under another namespace")
        return heartbeat(reply)

    # ---- frontends ---------------------------------------------------------------------------------------------

    async def refresh_frontend(self, frontend: Frontend, ttl_s: float) -> WorkerOrders:
        """A frontend's heartbeat: register for `ttl_s` more. Returns whether it was ordered to drain."""
        told = msgspec.structs.asdict(frontend)
        frontend_id, offered = told.pop("id"), msgspec.structs.asdict(told.pop("offered"))
        del told["since"]
        told |= {"cpu": f"{frontend.cpu:.3f}", "idle_s": f"{frontend.idle_s:.1f}"} | {
            _OFFERED + name: value for name, value in offered.items()
        }
        fields = {name: str(value) for name, value in told.items()}
        reply = await self._call("put_member", *member("frontend", frontend_id, ttl_s, False, [], fields))
        return orders_of(*(text(part) for part in reply[1:4]))

    async def order_frontend_drain(self, frontend_id: str) -> None:
        """Order a frontend to take no new connections and to end with its last request. Idempotent."""
        await self._call("steer", plan(Seen(), {frontend_id: WorkerOrders(drain=True)}, None, None, "frontend"))

    async def leave_frontend(self, frontend_id: str) -> None:
        """Remove a frontend. The queue's sweep drops its waiting jobs. Idempotent."""
        await self._call("remove_member", "frontend", frontend_id)

    async def frontends(self) -> dict[str, Frontend]:
        """All live frontends. One whose hash cannot be read is logged and left out."""
        found = {}
        for frontend_id, fields in await self._members("frontend"):
            try:
                counts = {n.removeprefix(_OFFERED): v for n, v in fields.items() if n.startswith(_OFFERED)}
                read = fields | {"id": frontend_id, "offered": counts}
                found[frontend_id] = msgspec.convert(read, Frontend, strict=False)
            except ValueError as error:
                self._warn_once(frontend_id, f"{type(error).__name__}: {error}")
        return found

    async def frontends_of(self, mesh_keys: Sequence[str]) -> dict[str, str]:
        """The ids of the live frontends that have these public keys, by key."""
        found = await self._redis.execute_command("MGET", *map(self.keys.frontend_key, mesh_keys))
        return {key: text(name) for key, name in zip(mesh_keys, found, strict=True) if name is not None}

    async def refresh_launcher(self, launcher_id: str, launcher: Launcher, ttl_s: float) -> None:
        """A launcher's heartbeat: register for `ttl_s` more, with exactly these workers."""
        await self._call("put_member", *member("launcher", launcher_id, ttl_s, False, [], launcher_to_fields(launcher)))

    async def leave_launcher(self, launcher_id: str) -> None:
        """Remove a launcher, and free its worker ids. Idempotent."""
        await self._call("remove_member", "launcher", launcher_id)

    async def launchers(self) -> dict[str, Launcher]:
        return {launcher_id: launcher_from_fields(fields) for launcher_id, fields in await self._members("launcher")}

    async def claim_id(self, launcher_id: str, role: Role, ttl_s: float, worker_id: str) -> bool:
        """Claim a worker id for this launcher. False if it is in use. `steer` claims ids that nobody chose."""
        return bool(await self._call("claim_id", launcher_id, milliseconds(ttl_s), role.value, worker_id))

    # ---- the desired ratio -------------------------------------------------------------------------------------

    async def tell_rendezvous(self, unit: str, place: Rendezvous, ttl_s: float) -> None:
        await self._redis.set(self.keys.rendezvous(unit), msgspec.json.encode(place), px=milliseconds(ttl_s))

    async def rendezvous(self, unit: str) -> Rendezvous | None:
        """None where the first rank does not wait, or, of another release, says what cannot be read here."""
        told = await self._redis.get(self.keys.rendezvous(unit))
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(told, type=Rendezvous) if told else None
        return None

    async def lead(self, frontend_id: str, lease_s: float) -> float | None:
        """Become or stay the frontend that decides the ratio, for `lease_s` more. Returns the server's clock (unix
        seconds), or None while another frontend leads."""
        now = await self._call("lead", frontend_id, milliseconds(lease_s))
        return float(now) if now else None

    async def desired(self) -> DesiredRatio | None:
        """The desired ratio. None if none was set, or its hash cannot be read."""
        return desired_ratio(await self._call("desired") or [])

    async def restored(self, held: DesiredRatio | None, found: DesiredRatio | None) -> DesiredRatio | None:
        """The newest of the ratio that this process has read before, the one that `watch` was told of, and the one that
        it finds now. It is set again where Redis has lost it."""
        known = [ratio for ratio in (found, held, self._told) if ratio is not None]
        newest = max(known, key=lambda ratio: ratio.set_at, default=None)
        if newest is not None and newest is not found:
            set_at = f"{newest.set_at:.6f}"
            await self._call("restore_desired", newest.prefill, newest.decode, newest.set_by, set_at, newest.why)
        return newest

    # ---- events ------------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yields first, when the registry may have changed, and after each reconnection. Never ends, never raises."""
        pruner = asyncio.create_task(self._prune(), name="registry-pruner")
        try:
            async with contextlib.aclosing(self._redis.listen(self.keys.events)) as payloads:
                async for payload in payloads:
                    if payload:
                        # What cannot be read was not said by us.
                        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                            self._told = _ratio.decode(payload)
                    yield
        finally:
            await cancelled(pruner)

    async def _prune(self) -> None:
        turns = Turns(log, "looking for silent members")  # who watches does not notice its end
        async for _ in ticks(PRUNE_S):
            with turns.turn(), contextlib.suppress(RedisAway):
                await self._call("prune")

    async def forget_log_levels(self) -> None:
        """Delete the log levels that were set in a fleet that has ended."""
        await self._redis.execute_command("DEL", self.keys.log_levels)

    # ---- shared ------------------------------------------------------------------------------------------------

    async def _members(self, kind: str) -> list[tuple[str, dict[str, str]]]:
        return [(text(name), fields_of(fields)) for name, fields in await self._call("members", kind)]

    def _warn_once(self, name: str, why: str) -> None:
        if self._warned.get(name) != why:  # once, not at every look
            self._warned[name] = why
            log.warning("left out %s, its Redis hash cannot be read: %s", name, why)

    async def _call(self, verb: str, *args: Any) -> Any:
        return await self._redis.call(REGISTRY, verb, self.keys.prefix, *args)
