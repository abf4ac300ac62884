"""The ranks of a group find each other, each once and all of one attempt, and end together."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import uvloop
from support_redis import fresh_namespace
from support_wait import DEADLINE_S, until

from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import connect
from orchestrator.store.fields import Rendezvous
from orchestrator.store.registry import Registry
from orchestrator.wire.addresses import Listening
from workers.engine import EngineDead, EngineStartFailed, Group
from workers.unit import link as module
from workers.unit.link import GroupLink, release_here
from workers.unit.messages import Peer

RANKS, OTHER = ("d", "d.1", "d.2"), "protocol 9 with vLLM 0.1"
HERE, THERE = "127.0.0.1", "127.0.0.2"


class Rank:
    """Its engine is there at once, and says where it was told to meet the others."""

    def __init__(self, link: GroupLink) -> None:
        self.link, self.drained, self.ended = link, False, asyncio.Event()
        self.ended_without_a_word = False
        start: Any = link.start(self, DEADLINE_S, asyncio.Event())  # type: ignore[arg-type]
        self.started: asyncio.Task[Group] = asyncio.create_task(start)
        self.watched: asyncio.Task[None] | None = None

    async def start(self, group: Group) -> Group:
        return group

    async def ended_suddenly(self) -> bool:
        return self.ended_without_a_word

    async def stop(self) -> None: ...

    async def meets(self) -> Group:
        """It serves from then on."""
        group = await asyncio.wait_for(self.started, DEADLINE_S)
        self.watched = asyncio.create_task(self.link.watch(lambda: self.drained, self.ended.set))
        return group

    async def dies(self) -> None:
        tasks = [task for task in (self.started, self.watched) if task is not None]
        await cancelled(*tasks)
        await self.link.close()

    async def ends_because(self) -> str:
        assert self.watched is not None
        with pytest.raises(EngineDead) as caught:
            await asyncio.wait_for(self.watched, DEADLINE_S)
        return str(caught.value)


class Ranks:
    def __init__(self, url: str) -> None:
        self.url, self.namespace, self._all = url, fresh_namespace(), list[Rank]()

    async def begin(self, name: str, host: str = HERE, ranks: tuple[str, ...] = RANKS, **more: Any) -> Rank:
        security = {"trust_network": more.get("trusted", False)}
        tree = {"model": "demo", "namespace": self.namespace, "security": security, "workers": {"timeout_s": 0.5}}
        redis = await connect(self.url, 5)
        link = GroupLink(parse_config(tree), redis, name, ranks, Listening(host), more.get("generation", 0))
        self._all.append(rank := Rank(link))
        return rank

    async def all(self, *hosts: str, **more: Any) -> list[Rank]:
        return [await self.begin(name, host, **more) for name, host in zip(RANKS, hosts or [HERE] * 3, strict=True)]

    async def serving(self, *hosts: str, **more: Any) -> list[Rank]:
        ranks = await self.all(*hosts, **more)
        await asyncio.gather(*(rank.meets() for rank in ranks))
        return ranks

    async def until_waits_for(self, first: Rank, *others: str) -> None:
        await until(lambda: set(first.link._peers) == set(others), f"{others} have come")

    async def close(self) -> None:
        for rank in self._all:
            await rank.dies()


@pytest_asyncio.fixture
async def group(redis_server: EmbeddedRedis) -> AsyncIterator[Ranks]:
    made = Ranks(redis_server.url)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def board_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.delenv("PD_RANK_BOARD", raising=False)
    monkeypatch.setattr(module, "_BEAT_S", 0.1)
    yield
    os.environ.pop("PD_RANK_BOARD", None)


async def test_ranks_of_one_host_meet_there_and_share_a_board(group: Ranks) -> None:
    ranks = await group.all()
    met = await asyncio.gather(*(rank.meets() for rank in ranks))
    assert [(each.rank, each.size, each.host) for each in met] == [(n, 3, "127.0.0.1") for n in range(3)]
    assert len({each.port for each in met}) == 1 and "PD_RANK_BOARD" in os.environ


async def test_ranks_of_several_hosts_meet_at_the_first_one_and_have_no_board(group: Ranks) -> None:
    ranks = await group.all(THERE, HERE, HERE, trusted=True)
    assert {(await rank.meets()).host for rank in ranks} == {THERE}
    assert "PD_RANK_BOARD" not in os.environ


async def test_engines_of_one_host_follow_each_other_whatever_the_order_of_their_ids(group: Ranks) -> None:
    met = await asyncio.gather(*(rank.meets() for rank in await group.all(THERE, HERE, THERE, trusted=True)))
    assert [each.rank for each in met] == [0, 2, 1]


async def test_several_hosts_need_a_network_of_their_own(group: Ranks) -> None:
    for rank in await group.all(HERE, THERE, HERE):
        with pytest.raises(ConfigError, match=r"security.trust_network: .*\(127.0.0.1, 127.0.0.2\)"):
            await rank.meets()


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_one_that_ends_ends_all_and_they_meet_anew(group: Ranks, gone: int) -> None:
    ranks = await group.serving()
    before = ranks[0].link._token
    await ranks[gone].dies()
    for rank in ranks:
        if rank is not ranks[gone]:
            assert "has ended" in await rank.ends_because()
    again = await group.serving()
    assert again[0].link._token != before


@pytest.mark.parametrize("name", ["d", "d.1"])
async def test_rank_that_dies_before_all_have_come_does_not_count(group: Ranks, name: str) -> None:
    others = {each: await group.begin(each) for each in ("d", "d.1")}
    await group.until_waits_for(others["d"], "d.1")
    await others[name].dies()
    others[name] = await group.begin(name)
    await group.until_waits_for(others["d"], "d.1")
    assert not any(rank.started.done() for rank in others.values())
    last = await group.begin("d.2")
    met = await asyncio.gather(*(rank.meets() for rank in (*others.values(), last)))
    assert len({(each.host, each.port) for each in met}) == 1


async def test_rank_that_starts_again_unnoticed_ends_the_old_group_and_is_of_the_next(group: Ranks) -> None:
    """Its old connection lives on, as that of a host which lost its power."""
    first, second, third = await group.serving()
    new = await group.begin("d.1")
    assert "d.1 has started again" in await first.ends_because()
    assert "d has ended" in await third.ends_because() and "d has ended" in await second.ends_because()
    assert not new.started.done()
    fresh = [await group.begin("d"), await group.begin("d.2")]
    met = await asyncio.gather(*(rank.meets() for rank in (fresh[0], new, fresh[1])))
    assert [each.rank for each in met] == [0, 1, 2]


async def test_silent_rank_is_given_up(group: Ranks) -> None:
    first, second, _ = await group.serving()
    second.link._tasks[0].cancel()  # its signs of life
    assert "d.1 has been silent for 2 s" in await first.ends_because()


@pytest.mark.parametrize("cause", [0, 1, 2])
async def test_of_engines_that_die_together_the_first_alone_is_to_blame(group: Ranks, cause: int) -> None:
    """Those of the others, which step with it, die of its end: none of their requests is the cause."""
    ranks = await group.serving()
    first = asyncio.create_task(ranks[cause].link.died())
    await until(ranks[0].link._broken.done, "the first rank has heard of it")
    others = [rank.link.died() for rank in ranks if rank is not ranks[cause]]
    assert await asyncio.wait_for(asyncio.gather(first, *others), DEADLINE_S) == [True, False, False]
    for rank in ranks:
        await rank.ends_because()


@pytest.mark.parametrize("killed", [0, 1])
async def test_an_engine_whose_process_ended_without_a_word_is_to_blame_whoever_was_heard_first(
    group: Ranks, killed: int
) -> None:
    """What the others die of by it is noticed earlier: its files are closed before its process has ended."""
    ranks = await group.serving()
    ranks[killed].ended_without_a_word = True
    heard = asyncio.create_task(ranks[2].link.died())
    await until(ranks[0].link._broken.done, "the first rank has heard of another")
    died = await asyncio.wait_for(asyncio.gather(*(rank.link.died() for rank in ranks[:2]), heard), DEADLINE_S)
    assert died == [killed == 0, killed == 1, True]


async def test_an_engine_that_dies_of_a_rank_that_has_ended_is_not_to_blame(group: Ranks) -> None:
    first, second, third = await group.serving()
    await third.dies()  # its whole process
    for rank in (first, second):
        assert "has ended" in await rank.ends_because() and not await rank.link.died()


async def test_where_nobody_knows_which_engine_died_first_each_may_be_the_cause(
    group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, third = await group.serving()
    monkeypatch.setattr(module, "_VERDICT_S", 0.1)
    for rank in (second, third):
        monkeypatch.setattr(rank.link, "tell", lambda message: None)  # the first rank hears nothing
        assert await rank.link.died()


async def test_a_worker_that_is_alone_is_to_blame(group: Ranks) -> None:
    assert await (await group.begin("d", ranks=())).link.died()


def test_a_connection_that_has_broken_can_be_closed() -> None:
    """Else the rank would not end, and its requests wait for the silence of the other: uvloop, with which workers run,
    has no socket of it any more."""

    async def close() -> None:
        came = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(lambda _, writer: came.set_result(writer), HERE, 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            (await came).transport.abort()
            writer.write(b"x")
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            await until(lambda: writer.get_extra_info("socket") is None, "it has broken")
            Peer(writer).close()

    uvloop.run(close())


async def test_drained_rank_leaves_in_order_with_the_others(group: Ranks) -> None:
    first, second, third = await group.serving()
    for rank in (first, second, third):
        rank.drained = True
    await second.dies()
    for rank in (first, third):
        await asyncio.wait_for(rank.ended.wait(), DEADLINE_S)
        assert rank.watched is not None and not rank.watched.done()


async def test_who_is_no_rank_of_it_is_not_let_in(group: Ranks) -> None:
    first, defects = await group.begin("d"), list[dict[str, Any]]()
    other = await group.begin("d.1", ranks=("d", "d.1"))
    with pytest.raises(EngineStartFailed, match="d.1 was started with --ranks d,d.1 and configuration 0"):
        await other.meets()
    place = await Registry(await connect(group.url, 5), group.namespace).rendezvous("d")
    assert place is not None
    asyncio.get_running_loop().set_exception_handler(lambda _, met: defects.append(met))
    come = {"type": "come", "token": "none", "worker_id": "d.1"}
    nested = b'{"type":"beat","new":' + b"[" * 60_000
    for said in (b"\n", b"x" * 100_000, nested, json.dumps(come).encode()):
        reader, writer = await asyncio.open_connection(place.host, place.port)
        writer.write(said + b"\n")
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()
    assert not first.link._peers and not defects


NO_PORT = msgspec.json.encode(Rendezvous(HERE, 1 << 20, "t", release_here()))


@pytest.mark.parametrize("place", [b"{}", b'{"host":"h","port":"1","token":3}', b"\xff", NO_PORT])
async def test_rank_waits_where_the_first_one_says_what_cannot_be_read(group: Ranks, place: bytes) -> None:
    """As after an upgrade: the first one's next attempt, or another first one, says what can be."""
    redis = await connect(group.url, 5)
    await redis.set(Registry(redis, group.namespace).keys.rendezvous("d"), place)
    joins = await group.begin("d.1")
    await asyncio.sleep(0.1)
    assert not joins.started.done()
    ranks = [await group.begin("d"), joins, await group.begin("d.2")]
    assert [each.rank for each in await asyncio.gather(*(rank.meets() for rank in ranks))] == [0, 1, 2]


@pytest.mark.parametrize("outdated", ["d", "d.1"])
async def test_ranks_that_a_group_over_hosts_refused_meet_once_all_have_one_release(
    group: Ranks, outdated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade of its hosts one by one, whichever is the first."""
    redis = await connect(group.url, 5)
    registry = Registry(redis, group.namespace)

    async def began(name: str, release: str) -> Rank:
        """As of this release, which the first rank has told."""
        with monkeypatch.context() as patch:
            patch.setattr(module, "release_here", lambda: release)
            rank = await group.begin(name)
            if name == "d":
                await until(lambda: told(release), "the first rank waits")
            else:
                await asyncio.wait({rank.started})
        return rank

    async def told(release: str) -> bool:
        place = await registry.rendezvous("d")
        return place is not None and place.release == release

    ours = release_here()
    of_first, of_other = (OTHER, ours) if outdated == "d" else (ours, OTHER)
    first, other = await began("d", of_first), await began("d.1", of_other)
    why = f"d runs {of_first}, d.1 {of_other}: start all ranks of a group with one release; .* start their ranks again"
    with pytest.raises(EngineStartFailed, match=why):
        await other.meets()
    assert not first.link._peers and not first.started.done()
    if outdated == "d":
        await first.dies()
        first = await began("d", ours)
    await redis.aclose()
    new = [first, await group.begin("d.1"), await group.begin("d.2")]
    assert [each.rank for each in await asyncio.gather(*(rank.meets() for rank in new))] == [0, 1, 2]


async def test_first_rank_of_an_older_configuration_starts_again(group: Ranks) -> None:
    first = await group.begin("d")
    newer = await group.begin("d.1", generation=1)
    for rank, said in ((newer, "and configuration 1, the first rank"), (first, "another rank has a newer")):
        with pytest.raises(EngineStartFailed, match=said):
            await rank.meets()
