"""The client and the embedded server: what is away, what comes back, what is left behind."""

import asyncio
import contextlib
import copy
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support_redis import RedisOnPort, running_server
from support_relay import Relay
from support_servers import free_port
from support_steering import set_desired
from support_tls import make_certificate
from support_wait import until

from orchestrator.config.settings import ConfigError
from orchestrator.config.values import masked
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.parent import started_ticks
from orchestrator.store.client import Redis, RedisAway, RedisUnfit, connect
from orchestrator.store.keys import QUEUE
from orchestrator.store.registry import Registry
from orchestrator.store.servers import Servers


@pytest.fixture
def server(tmp_path):
    with running_server(tmp_path) as server:
        yield server


def spawn(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def answers(redis) -> bool:
    with contextlib.suppress(RedisAway):
        return bool(await redis.ping())
    return False


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


# ---- the client ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def slow_link(url: str, bytes_per_s: float):
    """The URL of a port that passes so much to the server at once, and keeps little."""
    taken, pumps = 1 << 14, set()

    async def accept(reader, writer):
        there_reader, there = await asyncio.open_connection("127.0.0.1", port_of(url))

        async def forth():
            while data := await reader.read(taken):
                there.write(data)
                await asyncio.sleep(len(data) / bytes_per_s)

        async def back():
            while data := await there_reader.read(1 << 16):
                writer.write(data)

        pumps.update(asyncio.create_task(way()) for way in (forth, back))

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    server = await asyncio.start_server(accept, sock=listener, limit=taken)
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_long_command_has_the_time_to_be_taken(server, answers):
    """Jobs of prompts of a million tokens have megabytes: on a slow link they outlast the time for an answer."""
    body = os.urandom(6 << 20)
    async with slow_link(server.url, 4e6) as url:
        redis = await connect(url, 0.3)
        setting = asyncio.gather(redis.set("before", 1), redis.set("long", body), redis.get("before"))
        if answers:
            assert await setting == [True, True, b"1"]
            assert await redis.strlen("long") == len(body)
        else:  # the server stands still, whatever was taken by then
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(RedisAway):
                    await setting
            finally:
                os.kill(server.pid, signal.SIGCONT)
        await redis.aclose()


async def test_answers_reach_their_callers(redis):
    async def one(number: int) -> None:
        await redis.set(f"k{number}", number)
        assert await redis.get(f"k{number}") == str(number).encode()

    await asyncio.gather(*(one(number) for number in range(500)))
    assert (await redis.info("clients"))["connected_clients"] == 1


async def test_command_is_sent_before_busy_loop_continues(redis, server):
    asking = asyncio.create_task(redis.set("k", "v"))
    for _ in range(2):  # turns of the loop
        await asyncio.sleep(0)
    host, _, port = server.url.removeprefix("redis://").rpartition(":")
    with socket.create_connection((host, int(port))) as other:  # while our loop stands still
        deadline, answer = time.monotonic() + 5, b""
        while b"v" not in answer and time.monotonic() < deadline:
            other.sendall(b"GET k\r\n")
            answer = other.recv(100)
    assert b"v" in answer
    await asking


async def test_stalled_loop_does_not_take_server_for_away(server):
    timeout_s = 2.0
    redis = await connect(server.url, timeout_s)
    os.kill(server.pid, signal.SIGSTOP)
    asking = asyncio.create_task(redis.set("k", "v"))
    for _ in range(2):  # turns of the loop: it is sent
        await asyncio.sleep(0)
    os.kill(server.pid, signal.SIGCONT)
    time.sleep(1.5 * timeout_s)  # noqa: ASYNC251 - our loop stands still, and the server answers
    assert await asking
    assert await redis.get("k") == b"v", "and the connection is still used"
    assert (await redis.info("clients"))["connected_clients"] == 1
    await redis.aclose()


async def test_a_refused_command_fails_alone(redis):
    await redis.set("text", "x")
    good, bad, after = await asyncio.gather(
        redis.get("text"), redis.hget("text", "f"), redis.get("text"), return_exceptions=True
    )
    assert good == after == b"x"
    assert isinstance(bad, RedisAway) and "it refused HGET: WRONGTYPE" in str(bad)


async def test_an_argument_that_cannot_be_sent_fails_alone(redis):
    good, bad = await asyncio.gather(redis.set("a", 1), redis.execute_command("SET", "b", None), return_exceptions=True)
    assert good is True
    assert isinstance(bad, TypeError)


async def test_a_cancelled_caller_does_not_shift_the_answers(redis):
    await redis.mset({"a": 1, "b": 2})
    cancelled = asyncio.create_task(redis.get("a"))
    kept = asyncio.create_task(redis.get("b"))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await kept == b"2"
    assert await redis.get("a") == b"1"


async def test_an_emptied_server_compiles_a_library_once_for_all_its_clients(server):
    """Each time takes a millisecond of the server's one thread: thousands of clients saw it away, and came again."""
    admin = await connect(server.url, 30.0)
    clients = [await connect(server.url, 30.0) for _ in range(200)]
    try:
        await asyncio.gather(*(client.call(QUEUE, "depth", "pd:{x}:") for client in clients))
        await admin.execute_command("FUNCTION FLUSH")
        await admin.execute_command("CONFIG RESETSTAT")
        depths = await asyncio.gather(*(client.call(QUEUE, "depth", "pd:{x}:") for client in clients))
        assert depths == [[0, 0, 0]] * len(clients)
        loads = (await admin.info("commandstats"))["cmdstat_function|load"]
        assert loads["calls"] - loads["failed_calls"] == 1, loads
    finally:
        for client in (admin, *clients):
            await client.aclose()


async def test_a_library_of_our_name_that_is_not_ours_is_replaced(redis):
    name = QUEUE.name
    function = f"redis.register_function('{name}_other', function() return 1 end)"
    await redis.execute_command("FUNCTION FLUSH")
    await redis.execute_command("FUNCTION LOAD", f"#!lua name={name}\n{function}")
    assert await redis.call(QUEUE, "depth", "pd:{x}:") == [0, 0, 0]


async def test_two_releases_on_one_server_call_their_own_functions(redis):
    assert await redis.call(QUEUE, "depth", "pd:{x}:") == [0, 0, 0]
    other = copy.copy(QUEUE)
    other.name, other.text = "pd_queue_other", QUEUE.text.replace(QUEUE.name, "pd_queue_other")
    assert await redis.call(other, "depth", "pd:{x}:") == [0, 0, 0]
    assert len(await redis.execute_command("FUNCTION LIST", "LIBRARYNAME", "pd_queue_*")) == 2
    assert await redis.call(QUEUE, "depth", "pd:{x}:") == [0, 0, 0]


async def test_missing_function_permission_names_acl(redis, server):
    await redis.execute_command("ACL SETUSER", "weak", "on", ">pw", "~*", "+@all", "-function")
    weak = await connect(server.url.replace("redis://", "redis://weak:pw@"), 2.0)
    with pytest.raises(RedisAway, match=r"refused FUNCTION LOAD: .*\+fcall and \+function\|load") as caught:
        await weak.call(QUEUE, "depth", "pd:{x}:")
    assert "\n" not in str(caught.value)
    await weak.aclose()


async def test_after_a_fail_over_the_new_primary_is_found_and_gets_the_functions(server, tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("replica")) as other:
        relay = Relay("127.0.0.1", port_of(server.url))  # an address, as a name or a virtual IP is one
        async with relay.listening() as port:
            redis = await connect(f"redis://127.0.0.1:{port}", 2.0)
            registry = Registry(redis, "t")
            old, new = await connect(server.url, 2.0), await connect(other.url, 2.0)
            events = registry.watch()
            try:
                await set_desired(registry, 1, 1, "before")
                await anext(events)  # it listens
                relay.target = "127.0.0.1", port_of(other.url)
                await old.execute_command("REPLICAOF", *relay.target)

                async def settable() -> bool:
                    with contextlib.suppress(RedisAway):
                        await set_desired(registry, 1, 2, "after")
                        return True
                    return False

                await until(settable, "the desired ratio can be set")
                assert (await Registry(new, "t").desired()).decode == 2
                assert len(await new.execute_command("FUNCTION LIST")) == 1, "it came without functions"

                await anext(events)  # the subscription leads to the new primary, too
            finally:
                await events.aclose()
                await old.execute_command("REPLICAOF", "NO", "ONE")  # or its primary waits for it when it ends
                for client in (redis, old, new):
                    await client.aclose()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_clients_of_a_server_that_restarts_do_not_come_back_at_one_moment(scheme, monkeypatch):
    """When each asks again, of twenty that have failed together; of their subscriptions too."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"{scheme}://127.0.0.1:{closed.getsockname()[1]}"
    clients = [Redis(url, Servers(url, 2.0)) for _ in range(20)]
    loop, means = asyncio.get_running_loop(), []
    for _ in range(5):
        pauses = []
        for client in clients:
            client._away_until = 0.0
            with pytest.raises(RedisAway):
                await client.ping()
            pauses.append(client._away_until - loop.time())
        assert max(pauses) > 1.5 * min(pauses), "each at another time"
        means.append(sum(pauses) / len(pauses))
    assert means[4] > 1.5 * means[0], "a server that stays away is asked more rarely"
    assert max(pauses) < 1.0, "within a heartbeat, since operators wait for two"
    asked = []
    monkeypatch.setattr(
        "orchestrator.store.subscriptions.backoff_s", lambda failures, *limits: asked.append(failures) or 0
    )
    async with contextlib.aclosing(clients[0].listen("c")) as events:
        listener = asyncio.ensure_future(anext(events))
        await until(lambda: len(asked) >= 3)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
    assert asked[:3] == [1, 2, 3], "a subscription too"


@pytest.mark.parametrize("refusal", ["MOVED 1 h:1", "CLUSTERDOWN down", "MASTERDOWN no", "READONLY no", "LOADING it"])
async def test_replaced_server_is_left(refusal):
    """One connection for each attempt; other refusals keep the connection."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(OSError):
            while command := await reader.readline():
                parts = [(await reader.readline(), await reader.readline())[1] for _ in range(int(command[1:]))]
                name = parts[0].strip().upper()
                answers = {b"PING": b"+PONG", b"INFO": b"$0\r\n", b"GET": f"-{refusal}".encode(), b"LLEN": b"-ERR no"}
                writer.write(answers.get(name, b"+OK") + b"\r\n")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    redis = await connect(f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}", 2.0)
    try:
        for _ in range(3):
            with pytest.raises(RedisAway):
                await redis.llen("k")
        assert connections == 1
        for attempt in (1, 2):
            with pytest.raises(RedisAway):
                await redis.get("k")
            await until(lambda: answers(redis), "the pause after a failure is over")
            assert connections == 1 + attempt
    finally:
        await redis.aclose()
        listening.close()


async def test_a_restarted_server_is_used_without_an_error(redis, server):
    await redis.set("k", 1)
    server.stop()
    server.start()
    assert await redis.get("k") is None


async def test_calls_fail_while_the_server_is_away_and_work_when_it_is_back(redis, server):
    server.stop()
    with pytest.raises(RedisAway) as caught:
        await redis.ping()
    assert isinstance(caught.value, ConnectionError)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)
    results = await asyncio.gather(*(redis.ping() for _ in range(100)), return_exceptions=True)
    assert all(isinstance(result, RedisAway) for result in results)
    server.start()
    await until(lambda: answers(redis), "the client finds the server again")


async def test_a_server_that_hangs_is_away_within_the_timeout(server):
    redis = await connect(server.url, 0.3)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        results = await asyncio.gather(*(redis.ping() for _ in range(50)), return_exceptions=True)
        assert all(isinstance(result, RedisAway) for result in results)
        assert time.monotonic() - started < 10, "the time-outs are not one after another"
        with pytest.raises(RedisAway):
            await redis.ping()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: answers(redis), "the client recovers")
    await redis.set("a", "right")
    assert await redis.get("a") == b"right", "no answer of an earlier command is taken for this one"
    await redis.aclose()


@pytest.mark.parametrize("url", ["http://x", "nonsense", "redis://host:notaport", "redis://127.0.0.1:1"])
async def test_connect_says_what_is_wrong_in_one_line(url):
    """And whether it can work later as it is."""
    with pytest.raises(RedisAway) as caught:
        await connect(url, 0.5)
    assert masked(url) in str(caught.value) and "redis.url" in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, RedisUnfit) is (url != "redis://127.0.0.1:1")


async def test_passwords_are_masked_and_wrong_ones_refused(redis, server):
    await redis.config_set("requirepass", "secret")
    for url in (server.url.replace("redis://", "redis://:wrong-one@"), server.url):
        with pytest.raises(RedisUnfit) as caught:
            await connect(url, 1.0)
        assert "wrong-one" not in str(caught.value)
    right = await connect(server.url.replace("redis://", "redis://:secret@"), 1.0)
    assert await right.ping()
    await right.aclose()


ODD = ("redis://:seCr#eT@127.0.0.1:1", "redis://:seCr?eT@127.0.0.1:1", "redis://:s@seCr/eT@127.0.0.1:1")


async def test_password_with_slash_is_masked():
    """The mend is said: it is easily forgotten, and what base64 makes has slashes."""
    for url in ("redis://:seCr/eT@127.0.0.1:1", "redis+sentinel://u:12/eT@127.0.0.1:1/name", *ODD):
        with pytest.raises(RedisAway, match="a password's / is written %2F") as caught:
            await connect(url, 0.5)
        assert not any(piece in str(caught.value) for piece in ("seCr", "eT@", ":12"))


def test_masked():
    assert masked("redis://user:pw@host:1/0") == "redis://user:***@host:1/0"
    assert masked("redis://:pw@host") == "redis://:***@host"
    assert masked("redis://host:6379") == "redis://host:6379"
    assert masked("redis://user:a/b:c@d@host:6379/0") == "redis://user:***@host:6379/0"
    assert masked("unix:///run/r.sock?password=pw&db=1") == "unix:///run/r.sock?password=***&db=1"


async def test_tls(server, tmp_path):
    """Our side of it: the embedded server is built without TLS, so a proxy that has it stands before the server."""
    certificate, key = make_certificate(tmp_path, "DNS:localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with Relay("127.0.0.1", port_of(server.url)).listening(ssl=context) as port:
        url = f"rediss://localhost:{port}"
        with pytest.raises(RedisAway, match="certificate verify failed"):
            await connect(url, 2.0)
        redis = await connect(f"{url}?ssl_ca_certs={certificate}", 2.0)
        assert await redis.set("a", b"x" * 100_000) and len(await redis.get("a")) == 100_000
        registry = Registry(redis, "tls")
        events = registry.watch()
        await anext(events)  # it listens
        await set_desired(registry, 1, 2, "test")
        await anext(events)  # functions and subscriptions too
        assert await registry.restored(None, None) == await registry.desired() is not None
        await events.aclose()
        await redis.aclose()


async def test_old_servers_are_refused():
    async def answer(reader, writer):
        while line := await reader.readline():
            if line.strip() in (b"PING", b"INFO"):
                body = b"redis_version:6.2.7\r\n"
                writer.write(b"+PONG\r\n" if b"PING" in line else b"$%d\r\n%s\r\n" % (len(body), body))
        writer.close()

    fake = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = fake.sockets[0].getsockname()[1]
    with pytest.raises(RedisUnfit, match=r"version 6\.2\.7: upgrade it to 7\.0 or newer"):
        await connect(f"redis://127.0.0.1:{port}", 2.0)
    fake.close()
    await fake.wait_closed()


# ---- subscriptions ---------------------------------------------------------------------------------------------


async def test_listener_can_be_cancelled_at_any_moment(redis):
    async def listen():
        async for _ in redis.listen("news"):
            pass

    for turns in range(60):  # of the loop: connecting, subscribing and being subscribed are among them
        task = asyncio.create_task(listen())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        _, left = await asyncio.wait([task], timeout=5)
        assert not left, f"cancelled after {turns} turns, it still listens"


async def test_subscription_survives_restart_and_reports_gap(redis, server):
    received = []

    async def listen():
        async for payload in redis.listen("news"):
            received.append(payload)

    task = asyncio.create_task(listen())
    await until(lambda: len(received) >= 1, "subscribed")
    await redis.publish("news", "one")
    await until(lambda: len(received) >= 2, "received")
    server.stop()
    server.start()
    await until(lambda: len(received) >= 3, "subscribed again")
    await redis.publish("news", "two")
    await until(lambda: len(received) >= 4, "received again")
    assert received == [None, b"one", None, b"two"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Heard:
    """What each of these channels brings."""

    def __init__(self, redis, *channels):
        self.of = {channel: [] for channel in channels}
        self.tasks = {channel: asyncio.create_task(self._listen(redis, channel)) for channel in channels}

    async def _listen(self, redis, channel):
        async with contextlib.aclosing(redis.listen(channel)) as payloads:
            async for payload in payloads:
                self.of[channel].append(payload)

    async def leave(self, *channels):
        for channel in channels:
            self.tasks[channel].cancel()
        await asyncio.gather(*[self.tasks.pop(channel) for channel in channels], return_exceptions=True)


async def subscribers(redis):
    """Connections that hear."""
    return len(await redis.client_list(_type="pubsub"))


async def test_all_subscriptions_of_a_client_share_a_connection(redis):
    """A frontend has three of each of its models."""
    channels = [f"c{number}" for number in range(50)]
    first, later = channels[:25], channels[25:]
    heard = Heard(redis, *first)
    await until(lambda: all(heard.of.values()), "all of the first are subscribed to")
    more = Heard(redis, *later)
    await until(lambda: all(more.of.values()), "and those that come later")
    assert await subscribers(redis) == 1
    for channel in channels:
        await redis.publish(channel, f"to {channel}")
    await until(lambda: all(len(got) == 2 for got in (heard.of | more.of).values()), "each has its own")
    assert heard.of | more.of == {channel: [None, f"to {channel}".encode()] for channel in channels}
    await heard.leave(*first)

    async def left() -> bool:
        return await redis.publish(first[-1], "?") == 0

    await until(left, "those that were left are")
    assert await redis.publish(later[-1], "more") == 1
    await until(lambda: more.of[later[-1]][-1] == b"more")
    await more.leave(*later)

    async def closed() -> bool:
        return await subscribers(redis) == 0

    await until(closed, "the connection ends with the last of them")


async def test_a_channel_that_is_refused_costs_the_others_nothing(redis, server, monkeypatch):
    monkeypatch.setattr("orchestrator.store.subscriptions._IDLE_S", 0.05)
    await redis.execute_command("ACL SETUSER", "some", "on", ">pw", "~*", "+@all", "resetchannels", "&mine")
    weak = await connect(server.url.replace("redis://", "redis://some:pw@"), 2.0)
    heard = Heard(weak, "theirs", "mine")
    await until(lambda: heard.of["mine"], "it is subscribed to")
    await redis.publish("mine", "a")
    await until(lambda: len(heard.of["mine"]) == 2)
    assert heard.of == {"theirs": [], "mine": [None, b"a"]}, "nor is it connected anew"
    await redis.execute_command("ACL SETUSER", "some", "&theirs")
    await until(lambda: heard.of["theirs"], "the other one is asked for again")
    ours = weak._subscriptions
    await ours._send("SUBSCRIBE", [b"left"])  # as for one whose listener leaves before the answer
    await until(lambda: not ours._asked, "it is refused")
    assert not ours._refused, "and not asked for again"
    await heard.leave("theirs", "mine")
    await weak.aclose()
    await redis.execute_command("ACL DELUSER", "some")


async def test_a_subscription_that_is_closed_as_it_is_about_to_ping_is_made_again(redis, monkeypatch, caplog):
    """A ping on a closed connection connects by itself, and is answered for ever, subscribed to nothing."""
    monkeypatch.setattr("orchestrator.store.subscriptions._IDLE_S", 0.05)
    heard = Heard(redis, "c")
    await until(lambda: heard.of["c"], "it is subscribed to")
    connection = redis._subscriptions._connection
    read, send, closed = connection.read_response, connection.send_command, []

    async def read_and_close(**options):
        message = await read(**options)
        if message is None and not closed:
            closed.append(True)
            await redis._subscriptions.reconnect()
        return message

    async def send_if_open(*command, **options):
        assert connection.is_connected, "else it connects"
        await send(*command, **options)

    monkeypatch.setattr(connection, "read_response", read_and_close)
    monkeypatch.setattr(connection, "send_command", send_if_open)
    await until(lambda: heard.of["c"] == [None, None], "it is subscribed to again")
    assert "defect" not in caplog.text
    await redis.publish("c", "a")
    await until(lambda: heard.of["c"][2:] == [b"a"])
    await heard.leave("c")


async def test_who_does_not_take_messages_has_lost_them(redis, monkeypatch):
    monkeypatch.setattr("orchestrator.store.subscriptions._MOST_UNREAD", 3)
    async with contextlib.aclosing(redis.listen("c")) as payloads:
        assert await anext(payloads) is None
        ((queue,),) = redis._subscriptions._listeners.values()
        for number in range(4):
            await redis.publish("c", str(number))
        await until(lambda: queue.qsize() == 1, "too many are dropped")
        await redis.publish("c", "5")
        assert [await anext(payloads), await anext(payloads)] == [None, b"5"]


# ---- the embedded server ---------------------------------------------------------------------------------------


async def test_the_embedded_server_starts_and_leaves_nothing(tmp_path):
    embedded = RedisOnPort()
    assert embedded.pid is None and not embedded.alive
    url = await embedded.start(tmp_path)
    assert url.startswith("redis://127.0.0.1:") and embedded.url == url
    assert await embedded.start(tmp_path) == url, "already running"
    pid = embedded.pid
    redis = await connect(url, 2.0)
    await redis.set("a", 1)
    await redis.aclose()
    await embedded.stop()
    await embedded.stop()
    assert started_ticks(pid) is None and not embedded.alive
    assert {path.name for path in tmp_path.iterdir()} == {"redis.log"}


async def test_embedded_server_socket_is_private():
    """Functions, the subscription and INFO work as over TCP."""
    folder = Path(tempfile.mkdtemp(prefix="pd-"))  # a path short enough for a socket
    embedded = EmbeddedRedis()
    try:
        url = await embedded.start(folder, f"{folder}/redis.sock")
        assert url == f"unix://{folder}/redis.sock" and embedded.reachable
        assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
        listening = [c for c in psutil.Process(embedded.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening == []
        redis = await connect(url, 2.0)
        registry = Registry(redis, "ns")
        events = registry.watch()
        await anext(events)  # it listens
        await set_desired(registry, 2, 3, "test")
        await anext(events)
        assert await registry.restored(None, None) == await registry.desired() is not None
        await events.aclose()
        await redis.aclose()
        (folder / "redis.sock").unlink()
        assert embedded.alive and not embedded.reachable
    finally:
        await embedded.stop()
        shutil.rmtree(folder)


async def test_a_socket_whose_path_is_too_long_is_refused(tmp_path):
    """Whoever is on this host could use a port."""
    embedded = EmbeddedRedis()
    with pytest.raises(ConfigError, match=r"ü/redis.sock has \d+ bytes, .* at most 107; set XDG_RUNTIME_DIR to a"):
        await embedded.start(tmp_path, f"{tmp_path}/{'x' * 50}/{'ü' * 20}/redis.sock")
    assert not embedded.alive


async def test_foreign_server_is_not_ours(tmp_path):
    other = RedisOnPort()
    url = await other.start(tmp_path)
    with pytest.raises(ConfigError):
        await EmbeddedRedis().start(tmp_path, int(url.rpartition(":")[2]))
    await other.stop()


async def test_embedded_server_dies_with_its_parent(tmp_path):
    program = (
        "import asyncio, pathlib, sys, time\n"
        "from orchestrator.launch.host.redis_server import EmbeddedRedis\n"
        "server = EmbeddedRedis()\n"
        f"asyncio.run(server.start(pathlib.Path({str(tmp_path)!r}), {free_port()}))\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = spawn(sys.executable, "-c", program)
    pid = int(parent.stdout.readline())
    assert started_ticks(pid) is not None
    parent.kill()
    parent.communicate()
    await until(lambda: started_ticks(pid) is None, "the server is gone too")
