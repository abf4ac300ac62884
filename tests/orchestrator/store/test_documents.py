"""Documents in Redis, changed by compare-and-set, against a real server."""

import asyncio

import msgspec
import pytest
from support_redis import fresh_namespace

from orchestrator.store.client import Redis, RedisAway
from orchestrator.store.documents import Document
from orchestrator.store.keys import KEPT_S, Keys


class Words(msgspec.Struct, frozen=True):
    words: list[str] = []


@pytest.fixture
def document(redis: Redis) -> Document[Words]:
    return Document(redis, fresh_namespace(), "adapters", Words)


async def test_of_two_who_have_seen_the_same_one_changes_it(document: Document[Words]) -> None:
    assert await document.read() is None
    assert await document.change(None, Words(["a"]))
    assert not await document.change(None, Words(["b"])), "its author has not seen a"
    assert await document.read() == Words(["a"])
    assert await document.change(Words(["a"]), Words(["a", "b"]))
    assert not await document.change(Words(["a"]), Words())
    assert await document.read() == Words(["a", "b"])
    await document.write(Words(["c"]))
    assert await document.read() == Words(["c"])
    assert not await document.delete(Words(["a", "b"])), "its author has not seen c"
    assert await document.delete(Words(["c"])) and await document.read() is None
    assert await document.delete(None)


@pytest.mark.parametrize("odd", [b"{", b"\xff", b'{"words": 1}', b"[]", b'{"new": ' + b"[" * 100_000])
async def test_what_cannot_be_read_counts_as_none_and_is_replaced(
    document: Document[Words], redis: Redis, odd: bytes
) -> None:
    await redis.set(document._key, odd)
    assert await document.read() is None
    assert await document.change(None, Words(["a"]))
    assert await document.read() == Words(["a"])
    assert 0 < await redis.ttl(document._key) <= KEPT_S


async def test_what_is_put_back_replaces_nothing(document: Document[Words], redis: Redis) -> None:
    """A launcher of an older release cannot read what a newer one wrote."""
    await redis.set(document._key, b'{"words": 1}')
    assert await document.read() is None and not await document.put_back(Words(["a"]))
    assert await document.delete(None), "of the next fleet, though it cannot be read"
    assert await document.put_back(Words(["a"])) and await document.read() == Words(["a"])


async def test_what_another_release_wrote_otherwise_can_be_changed(document: Document[Words], redis: Redis) -> None:
    await redis.set(document._key, b'{"words": ["a"], "later": 1}')
    assert (seen := await document.read()) == Words(["a"])
    assert await document.change(seen, Words(["b"])) and not await document.change(seen, Words(["c"]))


async def test_a_key_of_another_type_is_replaced_too(document: Document[Words], redis: Redis) -> None:
    await redis.hset(document._key, "a", "b")
    with pytest.raises(RedisAway, match="WRONGTYPE"):
        await document.read()
    assert await document.change(None, Words(["a"]))
    assert await document.read() == Words(["a"])


async def test_a_change_is_told_at_once(document: Document[Words]) -> None:
    told = document.changes()
    await anext(told)  # the subscription
    waiting = asyncio.ensure_future(anext(told))
    await document.change(None, Words(["a"]))
    await waiting
    await told.aclose()


async def test_it_stays_in_its_namespace(document: Document[Words], redis: Redis) -> None:
    other = Document(redis, fresh_namespace(), "adapters", Words)
    await document.change(None, Words(["a"]))
    assert await other.read() is None
    assert document._key.startswith(Keys("").prefix[:4])
