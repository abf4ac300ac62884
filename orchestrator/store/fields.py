"""Members' hashes in Redis: one flat field for each value, as text. A worker's orders are in its hash too."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from orchestrator.types import (
    ALWAYS_EQUAL,
    DesiredRatio,
    EngineIdentity,
    EngineSpeed,
    KVEndpoint,
    Offered,
    Role,
    WorkerInfo,
)

_ROLES = {role.value for role in Role}
_DIGITS = 16
NOTHING = -1  # in place of a revision: it takes no requests yet
_LISTS = ("supported_tasks", "ranks", "labels")
_KV, _SPEED = "kv_", "speed_"  # before the names of a KV endpoint's fields, and of a speed's


class WorkerOrders(msgspec.Struct, frozen=True):
    """What a worker was told to do and has not done yet. `sequence` grows with every order; 0 means there was none."""

    role: Role | None = None
    drain: bool = False
    restart: bool = False  # drain, and say by the exit code that another process is to follow
    sequence: int = 0


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the first rank of a data-parallel group waits for the others."""

    host: str
    port: int
    token: str  # of this attempt to start the group: whoever does not have it from Redis is no rank of it
    release: str  # that the first rank runs, and all others must


class Launcher(msgspec.Struct, frozen=True):
    """Who holds ids of workers: a launcher, or a worker that was started by hand, while it loads."""

    workers: dict[str, Role] = {}  # those that are not registered yet included
    generation: int = 0  # of the configuration that it starts workers with
    room: int | None = None  # the most workers that its machine holds; None: not known, as of a cluster that grows


class Frontend(msgspec.Struct, frozen=True):
    id: str
    url: str  # empty while it takes no new requests
    process: str  # which it is, as `orchestrator.process.parent` tells processes apart
    since: float = 0.0  # unix seconds; the registry's clock
    offered: Offered = Offered()  # load offered to it since it started
    mesh_key: str = ""  # its public key
    generation: int = 0  # of the configuration that it was started with
    by_hand: bool = False  # no launcher runs it, so a rollout does not replace it
    cpu: float = 0.0  # cores that it used since a heartbeat half a second before this one, or more
    in_flight: int = 0  # requests that it has
    reaches: int = 0  # workers that it is connected to
    idle_s: float = 0.0  # for so long it has had no request of this model
    adapters: int = NOTHING  # the revision of the list of LoRA adapters that it serves


class Departed(msgspec.Struct, frozen=True, array_like=True):
    """A worker that left the registry, or whose entry expired: its ids, and the ports that show whether it lives."""

    worker_id: str
    engine_id: str
    request_address: str
    kv_host: str
    kv_port: int
    claims: bool  # whether it held claims in the prefill queue


class Heartbeat(msgspec.Struct, frozen=True):
    """What a worker is told when it says that it is there. So it need not hear of all others. Orders are its unit's."""

    orders: WorkerOrders = WorkerOrders()
    workers: int = 1  # in the fleet, itself included
    decodes: bool = True  # KV of it could pass to a decode worker, or all workers are of one domain
    departed: list[Departed] = []  # since the departure that it named
    last_departure: str = ""  # to name next time
    role: Role | None = None  # its unit's
    ranks: int = 1  # of its unit that are registered, itself included
    drained: int = 0  # other ranks of its unit that have drained


def worker_to_fields(info: WorkerInfo) -> dict[str, str]:
    """Identity fields under their own names, the KV endpoint's under `kv_...`, the speed's under `speed_...`, items of
    lists separated by commas. Of what follows from others `domain`, by which the functions in Redis count."""
    flat: dict[str, Any] = msgspec.to_builtins(info)
    identity, kv, speed = flat.pop("identity"), flat.pop("kv"), flat.pop("speed")
    flat |= {name: ",".join(flat[name]) for name in _LISTS}
    flat |= identity | {_KV + name: value for name, value in kv.items()}
    flat |= {_SPEED + name: value for name, value in speed.items()} | {"domain": info.domain}
    return {name: str(value) for name, value in flat.items() if value is not None}


def worker_from_fields(worker_id: str, fields: dict[str, str]) -> WorkerInfo:
    """Unknown fields are ignored. Raises ValueError for a missing or wrong one, naming it."""
    if fields.get("id") != worker_id:
        raise ValueError(f"id is {fields.get('id')!r} in the hash of {worker_id!r}")
    own: dict[str, Any] = {name: fields[name] for name in WorkerInfo.__struct_fields__ if name in fields}
    own |= {name: [item for item in fields.get(name, "").split(",") if item] for name in _LISTS}
    own["identity"] = {name: fields[name] for name in EngineIdentity.__struct_fields__ if name in fields}
    own["speed"] = {n: fields[_SPEED + n] for n in EngineSpeed.__struct_fields__ if _SPEED + n in fields}
    own["kv"] = {name: fields[_KV + name] for name in KVEndpoint.__struct_fields__ if _KV + name in fields}
    # msgspec.ValidationError is a ValueError; strict=False reads numbers from their text.
    return msgspec.convert(own, WorkerInfo, strict=False)


def fields_of(flat: list[bytes]) -> dict[str, str]:
    """A hash out of what HGETALL gives in a function: names and values by turns."""
    return {text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def text(value: bytes) -> str:
    return value.decode(errors="replace")


def whole(value: str) -> int:
    """A count, of which the functions in Redis have none above 2^53; 0 for what is none."""
    return int(value) if value.isdecimal() and len(value) <= _DIGITS else 0


def member(
    kind: str, member_id: str, ttl_s: float, fresh: bool, identity: list[str], fields: dict[str, str]
) -> list[Any]:
    """The arguments of the registry's function `put_member`."""
    how = ("join" if fresh else "refresh", len(identity), len(ALWAYS_EQUAL))
    pairs = (part for pair in fields.items() for part in pair)
    return [kind, member_id, milliseconds(ttl_s), *how, *identity, *pairs]


def milliseconds(seconds: float) -> int:
    """A time to live as Redis takes it: whole, and not 0."""
    return max(1, round(seconds * 1000))


def launcher_to_fields(launcher: Launcher) -> dict[str, str]:
    ids = " ".join(f"{worker_id}={role.value}" for worker_id, role in launcher.workers.items())
    room = "" if launcher.room is None else str(launcher.room)
    return {"ids": ids, "generation": str(launcher.generation), "room": room}


def launcher_from_fields(fields: dict[str, str]) -> Launcher:
    """The launcher of a hash. Workers that cannot be read are left out."""
    pairs = (part.partition("=") for part in fields.get("ids", "").split())
    workers = {name: Role(role) for name, _, role in pairs if role in _ROLES}
    room = fields.get("room", "")
    return Launcher(workers, whole(fields.get("generation", "")), whole(room) if room.isdecimal() else None)


def order_field(order: WorkerOrders) -> tuple[str, str]:
    """A single order, as the field of the worker's hash and its value."""
    if order.role is not None:
        return "order_role", order.role.value
    return "order_drain", "yes" if order.drain else "restart"


def desired_ratio(values: list[bytes]) -> DesiredRatio | None:
    """The ratio that the registry's function `desired` returns, if any."""
    if not values:
        return None
    return DesiredRatio(int(values[0]), int(values[1]), text(values[2]), float(values[3]), text(values[4]))


def orders_of(role: str | None, drain: str | None, sequence: str | None) -> WorkerOrders:
    known_role = Role(role) if role in _ROLES else None
    return WorkerOrders(known_role, drain == "yes", drain == "restart", whole(sequence or ""))


def heartbeat(reply: list[Any]) -> Heartbeat:
    """The heartbeat that `tell` of the registry's functions returns."""
    orders, departed = orders_of(*(text(part) for part in reply[1:4])), []
    for row in reply[7]:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # of a later version
            departed.append(msgspec.json.decode(row, type=Departed, strict=False))
    role, there, drained = reply[8:11]
    unit_role = Role(text(role)) if text(role) in _ROLES else None
    return Heartbeat(orders, reply[4], bool(reply[5]), departed, text(reply[6]), unit_role, there, drained)
