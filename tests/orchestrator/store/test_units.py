"""A unit of several ranks in the registry: its orders and role are its first rank's, and all take a role at once."""

import msgspec
import pytest
from support_redis import fresh_namespace, worker

from orchestrator.store.client import Redis
from orchestrator.store.fields import WorkerOrders
from orchestrator.store.planned import Reading, Seen
from orchestrator.store.registry import Registry
from orchestrator.types import Role, WorkerInfo

RANKS = ("d", "d.1", "d.2")
TTL_S = 60.0


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis, fresh_namespace())


def rank(name: str, **changes: object) -> WorkerInfo:
    return msgspec.structs.replace(worker(name, Role.DECODE), ranks=RANKS, **changes)


def test_unit_is_there_once_all_its_ranks_are() -> None:
    workers = {name: rank(name) for name in RANKS}
    alone = worker("p")
    assert Reading(workers=workers | {"p": alone}).units == {"d": workers["d"], "p": alone}
    for missing in RANKS:
        present = {name: info for name, info in workers.items() if name != missing}
        assert Reading(workers=present).units == {}


async def test_orders_reach_all_ranks_and_are_the_units(registry: Registry) -> None:
    for name in RANKS:
        await registry.join(rank(name), TTL_S)
    assert await registry.steer(Seen(), {"d": WorkerOrders(role=Role.PREFILL)}) is not None
    assert (await registry.read()).orders.keys() == {"d"}
    told = [await registry.refresh(rank(name), TTL_S) for name in RANKS]
    assert {one.orders.role for one in told} == {Role.PREFILL} and len({one.orders.sequence for one in told}) == 1
    assert [(one.role, one.ranks) for one in told] == [(Role.DECODE, 3)] * 3


async def test_rank_is_told_how_many_others_have_drained(registry: Registry) -> None:
    for name in RANKS:
        await registry.join(rank(name), TTL_S)
    drained = [
        (await registry.refresh(rank(name, drained=has), TTL_S)).drained
        for name, has in [("d", True), ("d.1", False), ("d.1", True), ("d.2", True), ("d", True)]
    ]
    assert drained == [0, 1, 1, 2, 2]


async def test_all_ranks_are_read_in_the_role_of_the_first_at_once(registry: Registry) -> None:
    for name in RANKS:
        await registry.join(rank(name), TTL_S)
    await registry.refresh(rank("d.1", role=Role.PREFILL), TTL_S)  # too early, or late
    assert {info.role for info in (await registry.workers()).values()} == {Role.DECODE}
    await registry.refresh(rank("d", role=Role.PREFILL), TTL_S)
    assert {info.role for info in (await registry.workers()).values()} == {Role.PREFILL}
    assert (await registry.refresh(rank("d.2"), TTL_S)).role is Role.PREFILL


async def test_missing_rank_is_noticed(registry: Registry) -> None:
    for name in RANKS:
        await registry.join(rank(name), TTL_S)
    await registry.leave("d.1")
    assert (await registry.refresh(rank("d"), TTL_S)).ranks == 2
