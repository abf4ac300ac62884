"""Connections between simulated engines: who is there, who is not, and messages in order."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support_sim import SimFixture, collect, request_of
from support_wait import until

from connectors.push import wire
from workers.sim import connections
from workers.sim.connections import SimConnections


class End:
    """One engine's connections, and what they reported."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.connections = SimConnections(engine, self)
        self.events: list[tuple[str, ...]] = []
        self.messages: list[tuple[str, wire.Message]] = []
        self.port = 0

    def connected(self, engine: str) -> None:
        self.events.append(("connected", engine))

    def unreachable(self, engine: str, why: str) -> None:
        self.events.append(("unreachable", engine, why))

    def lost(self, engine: str) -> None:
        self.events.append(("lost", engine))

    def received(self, engine: str, data: bytes) -> None:
        self.messages.append((engine, wire.parse(data)))

    def endpoint(self, engine: str | None = None) -> wire.Endpoint:
        return wire.Endpoint(engine or self.engine, "127.0.0.1", self.port)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[End, End]]:
    ends = End("one"), End("other")
    for end in ends:
        end.port = await end.connections.listen("127.0.0.1", 0)
    yield ends
    for end in ends:
        await end.connections.close()


async def test_messages_sent_before_connection_arrive_in_order(pair: tuple[End, End]) -> None:
    one, other = pair
    sent: list[wire.Message] = [wire.Landed(f"r{index}") for index in range(100)]
    one.connections.connect(other.endpoint())
    assert all(one.connections.send("other", message) for message in sent[:50])
    await until(lambda: one.events)
    assert one.events == [("connected", "other")] and one.connections.is_connected("other")
    assert all(one.connections.send("other", message) for message in sent[50:])
    await until(lambda: len(other.messages) == len(sent))
    assert other.messages == [("one", message) for message in sent]
    one.connections.connect(other.endpoint())  # stands already
    assert one.events == [("connected", "other")] * 2


async def test_ended_process_is_reported(pair: tuple[End, End]) -> None:
    one, other = pair
    one.connections.connect(other.endpoint())
    await until(lambda: one.events)
    await other.connections.close()
    await until(lambda: len(one.events) == 2)
    assert one.events[1] == ("lost", "other")
    assert not one.connections.send("other", wire.Landed("r"))
    one.connections.connect(other.endpoint())
    await until(lambda: len(one.events) == 3)
    assert one.events[2][:2] == ("unreachable", "other")


async def test_other_engine_at_address_is_refused(pair: tuple[End, End]) -> None:
    one, other = pair
    one.connections.connect(other.endpoint("an-earlier-process"))
    await until(lambda: one.events)
    ((event, engine, why),) = one.events
    assert (event, engine) == ("unreachable", "an-earlier-process") and "engine other is here now" in why


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 1 << 20), ("x" * 70, 1)])
async def test_peer_that_names_no_address_is_unreachable(pair: tuple[End, End], host: str, port: int) -> None:
    one, _ = pair
    one.connections.connect(wire.Endpoint("odd", host, port))
    await until(lambda: one.events)
    assert one.events[0][:2] == ("unreachable", "odd")


async def test_silent_peer_is_given_up(pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT_S", 0.05)
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda reader, writer: accepted.append(writer), "127.0.0.1", 0)
    one, _ = pair
    one.connections.connect(wire.Endpoint("silent", "127.0.0.1", silent.sockets[0].getsockname()[1]))
    await until(lambda: one.events)
    ((event, _, why),) = one.events
    assert event == "unreachable" and why.endswith("no answer")
    for writer in accepted:
        writer.close()
    silent.close()


@pytest.mark.parametrize(("frame", "bad_messages"), [(b"\0\0\0\7garbage", 1), (b"\xff\xff\xff\xff", 0)])
async def test_garbage_is_counted_and_harms_no_other_peer(frame: bytes, bad_messages: int) -> None:
    sims = SimFixture()
    engine, info = await sims.start()
    reader, writer = await asyncio.open_connection(info.kv.host, info.kv.port)
    writer.write(b"\0\0\0\1x" + frame)
    if bad_messages:
        await sims.until(lambda load: load.kv.bad_messages == bad_messages, engine)
    else:  # no frame can be found after it
        await reader.read()
    writer.close()
    await engine.submit(request_of("a#1", [1, 2, 3], max_tokens=2))
    assert len((await collect(engine, "a#1")).tokens) == 2
    await sims.assert_no_leaks()
    await sims.close()
