"""Who is there, on real sockets and a scripted registry: joining, dying, restarting, and Redis losing its mind."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import msgspec
import pytest
import support_info
from support_doors import Doors
from support_wait import until

from orchestrator.fleet import membership
from orchestrator.fleet.membership import RECONNECT_S, Membership
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import PrefixView
from orchestrator.store.client import RedisAway
from orchestrator.types import Role, WorkerLoad
from orchestrator.wire.addresses import Listening
from orchestrator.wire.messages import Hello, Welcome
from orchestrator.wire.transport import Disconnected, FrontendTransport, WorkerTransport


class ScriptedRegistry:
    def __init__(self):
        self.registered = {}
        self.away = False
        self.events = asyncio.Queue()

    async def workers(self):
        if self.away:
            raise RedisAway("redis://test: gone; start it")
        return dict(self.registered)

    async def watch(self):
        while True:
            yield await self.events.get()


def block_the_loop(pause_s):
    time.sleep(pause_s)


def worker_info(name, engine_id, request_address="tcp://127.0.0.1:1", load_address="tcp://127.0.0.1:2"):
    return support_info.worker_info(
        name, engine_id=engine_id, request_address=request_address, load_address=load_address
    )


class LivingWorker:
    """A worker's sockets, answering greetings and publishing load."""

    def __init__(self, name, engine_id, load_address=""):
        self.transport = WorkerTransport(Listening("127.0.0.1"), keys=None)
        addresses = self.transport.request_address, load_address or self.transport.load_address
        self.info = worker_info(name, engine_id, *addresses)
        self.sequence = 0
        self.speak()

    def speak(self):
        self.tasks = [asyncio.create_task(self._greet()), asyncio.create_task(self._publish())]

    async def _greet(self):
        while True:
            frontend_id, message, _ = await self.transport.receive()
            if isinstance(message, Hello):
                self.transport.send(frontend_id, Welcome())

    async def _publish(self):
        while True:
            self.sequence += 1
            self.transport.publish(WorkerLoad(self.info.id, self.sequence, 100, 50, 0, 0, 0, 1.0))
            await asyncio.sleep(0.05)

    def mute(self):
        """Hang: the sockets stay open, nothing is said any more."""
        for task in self.tasks:
            task.cancel()

    def die(self):
        self.mute()
        self.transport.close()


class Scene:
    def __init__(self):
        self.registry, self.fleet = ScriptedRegistry(), Fleet("f")
        self.transport = FrontendTransport("f", keys=None)
        self.lost, self.quiet, self.reset = [], [], []
        self.lost_together = []
        self.membership = Membership(
            self.registry,
            self.fleet,
            self.transport,
            PrefixView(self.transport.send),
            1.0,
            self._take_lost,
            lambda *quiet: self.quiet.extend(quiet),
            self.reset.append,
        )
        self.living = []
        self.tasks = [asyncio.create_task(self.membership.run()), asyncio.create_task(self._receive())]

    def _take_lost(self, *lost):
        self.lost_together.append(set(lost))
        self.lost += lost

    async def _receive(self):
        while True:
            worker_id, message, _ = await self.transport.receive()
            if isinstance(message, Disconnected):
                self.membership.disconnected(worker_id)
            else:
                self.membership.on_welcome(worker_id)

    async def start(self, name, engine_id="e1"):
        worker = LivingWorker(name, engine_id)
        self.living.append(worker)
        self.registry.registered[name] = worker.info
        await self.changed()
        await self.heard(name)
        return worker

    async def heard(self, name):
        """Its load, from now on."""
        if name in self.fleet.workers:
            self.fleet.workers[name].load = None
        await until(lambda: name in self.fleet.workers and self.fleet.workers[name].load)
        await until(lambda: self.fleet.workers[name].connected)

    async def changed(self):
        await self.registry.events.put(None)


@pytest.fixture
async def scene():
    scene = Scene()
    yield scene
    for task in scene.tasks:
        task.cancel()
    for worker in scene.living:
        worker.die()
    scene.transport.close()


async def test_a_worker_is_usable_once_it_has_answered(scene):
    worker = await scene.start("d")
    view = scene.fleet.workers["d"]
    assert view.usable_as is Role.DECODE and view.candidate.blocks_free == 50 and view.info == worker.info
    assert scene.lost == []


async def test_a_killed_worker_is_lost_though_the_registry_still_lists_it(scene):
    worker = await scene.start("d")
    worker.die()
    await until(lambda: scene.lost)
    assert scene.lost == ["d"] and scene.fleet.ready(Role.DECODE) == 0


async def test_a_worker_that_hangs_is_lost(scene):
    worker = await scene.start("d")
    worker.mute()
    await until(lambda: scene.lost == ["d"])


@pytest.mark.parametrize("left", [True, False])
async def test_a_worker_that_leaves_by_itself_is_told_of_without_a_warning(scene, caplog, left):
    """A drained one leaves Redis and ends at once: nobody may have seen it drain. One that died stays in Redis."""
    caplog.set_level("INFO", "pd.membership")
    worker = await scene.start("d")
    if left:
        scene.registry.registered.clear()
        await scene.changed()
    worker.die()
    await until(lambda: scene.lost == ["d"])
    *_, told = [record for record in caplog.records if "worker d " in record.getMessage()]
    assert (told.levelname, "has left" in told.getMessage()) == ("INFO" if left else "WARNING", left)


async def test_a_worker_whose_entry_ran_out_while_it_hung_is_told_of_with_a_warning(scene, caplog):
    caplog.set_level("INFO", "pd.membership")
    worker = await scene.start("d")
    worker.mute()
    await until(lambda: scene.fleet.workers["d"].quiet)
    scene.registry.registered.clear()
    await scene.changed()
    await until(lambda: scene.lost == ["d"])
    assert [record.levelname for record in caplog.records if "is gone" in record.getMessage()] == ["WARNING"]


async def test_workers_that_are_lost_together_are_told_of_together(scene, monkeypatch):
    """Each call looks at every request: a rack of five hundred would hold up a frontend of many for seconds."""
    for name in "de":
        await scene.start(name)
    monkeypatch.setattr(scene.fleet, "silent", lambda *_: [*scene.fleet.workers])
    await until(lambda: scene.lost)
    assert scene.lost_together[0] == {"d", "e"}


class Unconnected:
    """A transport of which no test needs a socket."""

    def connect(self, worker_id, *_):
        pass

    def greet(self, worker_id):
        pass

    def disconnect(self, worker_id):
        pass

    def is_coming(self, worker_id):
        return False


def told_of(*names):
    """A membership with these workers that report, and those that it tells to be lost."""
    fleet, lost, registry = Fleet("f"), [], ScriptedRegistry()
    for name in names:
        registry.registered[name] = worker_info(name, "e1")
        fleet.upsert(registry.registered[name], time.monotonic())
        fleet.take_load(WorkerLoad(name, 1, 100, 50, 0, 0, 0, 1.0), time.monotonic())
    prefixes = PrefixView(lambda *_: True)
    return Membership(
        registry, fleet, Unconnected(), prefixes, 1.0, lambda *ids: lost.extend(ids), lambda *_: None, lost.append
    ), lost


def failing_at(call, worker_id):
    """The same call, which raises at its end for this worker."""

    def defective(name, *more):
        result = call(name, *more)
        return result if name != worker_id else 1 // 0

    return defective


@pytest.mark.parametrize("defective", ["_fleet.remove", "_transport.disconnect", "_heartbeat_slack"])
async def test_workers_that_were_removed_are_told_of_whatever_the_same_look_meets(defective, monkeypatch):
    """Nobody finds them a second time: their requests would wait ten minutes for the next token."""
    membership, lost = told_of("a", "b")
    if defective == "_heartbeat_slack":  # of a look at one that has left the registry
        membership._unregistered = {"b"}
        monkeypatch.setattr(membership._fleet, "silent", lambda *_: ["a"])
        monkeypatch.setattr(membership, defective, lambda: 1 // 0)
    else:
        part, name = defective.split(".")
        there = getattr(membership, part)
        monkeypatch.setattr(there, name, failing_at(getattr(there, name), "a"))
    with contextlib.suppress(ZeroDivisionError):
        membership._look(time.monotonic() + 2)
    assert lost == (["a"] if defective == "_heartbeat_slack" else ["a", "b"])
    assert membership._fleet.workers.keys() == {"a", "b"} - {*lost}


@pytest.mark.parametrize("defective", ["mark_silent_quiet", "Membership._tell_unreached"])
async def test_a_defect_that_lasts_keeps_no_worker_from_being_lost(defective, monkeypatch):
    membership, lost = told_of("a", "b")
    monkeypatch.setattr(f"orchestrator.fleet.membership.{defective}", lambda *_: 1 // 0)
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            membership._look(time.monotonic() + 2)
    assert lost == ["a", "b"]


async def test_a_worker_that_started_again_is_told_of_whatever_another_entry_meets(monkeypatch):
    membership, lost = told_of("a", "b")
    registered = membership._registry.registered
    registered["a"] = worker_info("a", "e2")
    registered["b"] = msgspec.structs.replace(worker_info("b", "e2"), labels=("zone",))
    monkeypatch.setattr(membership._transport, "disconnect", lambda _: 1 // 0)
    with contextlib.suppress(ZeroDivisionError):
        await membership._resync()
    assert lost == ["a", "b"] and membership._fleet.workers.keys() == {"a"}


async def test_a_worker_that_is_slow_becomes_quiet_and_is_usable_again_once_heard(scene):
    worker = await scene.start("d")
    assert scene.quiet == []
    worker.mute()
    await until(lambda: scene.quiet == ["d"])
    assert scene.fleet.workers["d"].quiet and scene.lost == []
    worker.speak()
    await until(lambda: not scene.fleet.workers["d"].quiet)
    assert scene.lost == []


async def test_reconnection_is_reported(scene):
    await scene.start("d")
    scene.membership.disconnected("d")
    scene.membership.on_welcome("d")
    assert scene.reset == ["d"] and scene.lost == []
    scene.membership.on_welcome("d")
    assert scene.reset == ["d"]


@pytest.mark.slow
async def test_heard_workers_survive_lost_redis(scene):
    await scene.start("d")
    scene.registry.away = True
    await scene.changed()
    scene.registry.away = False
    scene.registry.registered.clear()
    await scene.changed()
    await until(scene.registry.events.empty)
    for _ in range(20):  # longer than it takes to lose a dead one
        await asyncio.sleep(0.1)
        assert scene.fleet.ready(Role.DECODE) == 1
    assert scene.lost == []


@pytest.mark.slow
async def test_unregistered_silent_worker_has_left(scene):
    worker = await scene.start("d")
    del scene.registry.registered["d"]
    worker.mute()
    await until(lambda: scene.lost == ["d"])


async def test_a_worker_that_its_launcher_saw_die_is_lost_as_soon_as_its_connection_breaks(scene, monkeypatch):
    """Either alone may pass: Redis lost its data, or a link was cut for a moment."""
    monkeypatch.setattr("orchestrator.fleet.membership.RECONNECT_S", 3600.0)
    await scene.start("d")
    scene.membership.disconnected("d")
    view = scene.fleet.workers["d"]
    heard_at = view.last_heard_at
    await until(lambda: view.last_heard_at > heard_at, "it reports as ever")
    assert scene.lost == []
    del scene.registry.registered["d"]
    await scene.changed()
    await until(lambda: scene.lost == ["d"])


async def test_restarted_worker_loses_requests_of_old_process(scene):
    old = await scene.start("d", "e1")
    fresh = LivingWorker("d", "e2")
    scene.living.append(fresh)
    scene.registry.registered["d"] = fresh.info
    await scene.changed()
    await until(lambda: scene.lost == ["d"] and scene.fleet.ready(Role.DECODE))
    assert scene.fleet.workers["d"].info.kv.engine_id == "e2"
    old.die()
    await until(lambda: scene.fleet.workers["d"].load)
    assert scene.fleet.workers["d"].usable_as is Role.DECODE and scene.lost == ["d"]


async def test_a_worker_that_took_its_predecessors_ports_is_used_once_it_is_registered(scene, monkeypatch):
    """It was greeted before: without keys, the connection was made again to another process than was known."""
    old = await scene.start("d", "e1")
    ports = [int(each.rpartition(":")[2]) for each in (old.info.request_address, old.info.load_address)]
    old.die()

    def bind_again(socket, listening):
        socket.bind(f"tcp://{listening.bind}:{ports[0]}")
        return ports.pop(0)

    monkeypatch.setattr("orchestrator.wire.transport.bind", bind_again)
    fresh = LivingWorker("d", "e2")
    scene.living.append(fresh)
    await until(lambda: scene.reset == ["d"])
    scene.registry.registered["d"] = fresh.info
    await scene.changed()
    await until(lambda: scene.lost == ["d"] and scene.fleet.ready(Role.DECODE))
    assert scene.fleet.workers["d"].info.kv.engine_id == "e2"


@pytest.mark.slow
async def test_blocked_loop_declares_no_worker_dead(scene):
    worker = await scene.start("d")
    for pause_s in (0.3, 2.5):  # longer than the second after which silence is death
        worker.mute()  # in this process it could not publish anyway
        block_the_loop(pause_s)
        worker.speak()
        await scene.heard("d")
    assert scene.lost == [] and scene.fleet.ready(Role.DECODE) == 1
    worker.mute()
    await until(lambda: scene.lost == ["d"])


async def test_a_worker_is_found_though_this_process_stood_still_while_it_read(scene, monkeypatch):
    # A frontend that starts builds its app meanwhile, which takes seconds.
    stood_still_s = 0.0

    async def workers():
        nonlocal stood_still_s
        stood_still_s += 600.0
        return await reading()

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s)
    monkeypatch.setattr(membership, "time", clock)
    reading = scene.registry.workers
    monkeypatch.setattr(scene.registry, "workers", workers)
    await scene.changed()
    await until(lambda: stood_still_s)
    monkeypatch.setattr(scene.registry, "workers", reading)
    await scene.start("d")
    assert scene.fleet.ready(Role.DECODE) == 1


async def test_a_worker_whose_load_cannot_be_heard_is_never_used_and_given_up(scene):
    worker = LivingWorker("d", "e1", load_address="tcp://127.0.0.1:9")
    scene.living.append(worker)
    scene.registry.registered["d"] = worker.info
    await scene.changed()
    used = []
    await until(lambda: used.append(scene.fleet.ready(Role.DECODE)) or scene.lost == ["d"])
    assert not any(used)


@pytest.mark.slow
async def test_a_worker_that_cannot_be_reached_is_told_of_once_and_again_once_it_was_there(scene, caplog):
    unreached = worker_info("w", "e1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")  # nothing listens there
    scene.registry.registered["w"] = unreached

    def told():
        return [record.getMessage() for record in caplog.records if "no connection to" in record.getMessage()]

    await scene.changed()
    await until(told, "it is told of")
    await asyncio.sleep(0.3)
    (line,) = told()
    assert line.startswith("worker w is registered, but no connection to tcp://127.0.0.1:1 comes about: it gets no")
    worker = await scene.start("w", "e2")
    await asyncio.sleep(1.0)  # so that it was there for as long
    worker.die()
    await until(lambda: scene.lost == ["w", "w"])
    assert len(told()) == 1, "one whose connection breaks is gone: another line says so"
    scene.registry.registered["w"] = unreached
    await scene.changed()
    await until(lambda: len(told()) == 2, "it is told of again")


@pytest.mark.slow
async def test_time_in_which_this_process_stood_still_is_not_counted_against_one_that_connects(scene, caplog):
    """As a frontend does that makes its app."""
    scene.registry.registered["w"] = worker_info("w", "e1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    await scene.changed()
    await until(lambda: "w" in scene.fleet.workers)
    time.sleep(1.5)  # noqa: ASYNC251 - longer than a worker may be silent
    await asyncio.sleep(0.3)
    assert "no connection to" not in caplog.text
    await until(lambda: "no connection to" in caplog.text, "it is told of once it has had the time")


async def test_a_worker_with_a_bad_address_is_left_out_with_one_line(scene, caplog):
    scene.registry.registered["bad"] = msgspec.structs.replace(
        worker_info("bad", "e9"), request_address="tcp://nonsense"
    )
    await scene.start("d")
    await scene.changed()
    await scene.start("d2")
    assert scene.fleet.workers.keys() == {"d", "d2"}
    assert [record.getMessage() for record in caplog.records].count(
        "left out worker bad: 'tcp://nonsense' is not an address like tcp://127.0.0.1:5000"
    ) == 1


async def test_a_worker_whose_entry_is_damaged_is_left_out_with_one_line(scene, caplog):
    """Whatever it is in it that trips: the others are taken all the same."""
    damaged = LivingWorker("a-zone", "e9")
    scene.living.append(damaged)
    scene.registry.registered["a-zone"] = msgspec.structs.replace(damaged.info, labels=("zone",))
    await scene.start("d")
    await scene.changed()
    await scene.start("d2")
    assert scene.fleet.workers.keys() == {"d", "d2"}
    told = [record for record in caplog.records if "left out worker a-zone: " in record.getMessage()]
    assert len(told) == 1 and not told[0].exc_info


async def test_a_worker_whose_first_entry_was_damaged_is_used_once_it_is_mended(scene):
    """Its connection was made and greeted while nothing was known of it, and stays."""
    worker = LivingWorker("d", "e1")
    scene.living.append(worker)
    greeted = asyncio.Event()
    greet = scene.membership.on_welcome
    scene.membership.on_welcome = lambda worker_id: (greet(worker_id), greeted.set())
    scene.registry.registered["d"] = msgspec.structs.replace(worker.info, labels=("zone",))
    await scene.changed()
    await greeted.wait()
    assert "d" not in scene.fleet.workers
    scene.registry.registered["d"] = worker.info
    await scene.changed()
    await scene.heard("d")
    assert scene.lost == scene.reset == []


async def test_a_worker_that_starts_again_with_a_damaged_entry_is_lost(scene, caplog):
    """Its requests would wait for a process that has ended, and what is sent there go to one that is left out."""
    await scene.start("d")
    again = LivingWorker("d", "e2")
    scene.living.append(again)
    scene.registry.registered["d"] = msgspec.structs.replace(again.info, labels=("zone",))
    await scene.changed()
    await until(lambda: scene.lost == ["d"])
    assert "d" not in scene.fleet.workers and not scene.transport.is_coming("d")
    scene.registry.registered["d"] = again.info
    await scene.changed()
    await scene.heard("d")
    assert scene.lost == ["d"]


async def test_a_defect_that_leaves_a_worker_out_is_logged_with_where_it_happened(scene, caplog, monkeypatch):
    monkeypatch.setattr(scene.fleet, "upsert", lambda info, now: {}["nothing"])
    scene.registry.registered["d"] = worker_info("d", "e1")
    await scene.changed()
    await until(lambda: "left out worker d: 'nothing'" in caplog.text)
    assert "KeyError" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize(("workers", "before_a_request_asks"), [(200, True), (40, False)])
async def test_reports_of_many_workers_are_applied_before_requests(workers, before_a_request_asks):
    ranked = []

    def standing(candidate):
        ranked.append(candidate.worker_id)
        return 0.0

    class Published:
        """One batch of reports, then silence."""

        batches = [[WorkerLoad(f"d{number}", 2, 100, 50, 3, 0, 0, 1.0) for number in range(workers)]]

        async def receive_published(self, pause_s):
            return self.batches.pop() if self.batches else await asyncio.Event().wait()

    fleet = Fleet("f", standing)
    for number in range(workers):
        info = worker_info(f"d{number}", f"e{number}")
        fleet.upsert(info, 0.0)
        fleet.take_load(WorkerLoad(info.id, 1, 100, 90, 0, 0, 0, 1.0), 0.0)
        fleet.workers[info.id].note_connected(True)
    assert fleet.ready(Role.DECODE) == workers
    ranked.clear()
    lost: list[str] = []
    tell = lost.append
    membership = Membership(None, fleet, Published(), PrefixView(lambda *_: True), 10.0, tell, tell, tell)
    hearing = asyncio.create_task(membership._receive_reports())
    await until(lambda: all(view.load.sequence == 2 for view in fleet.workers.values()))
    assert (len(ranked) == workers) is before_a_request_asks
    assert fleet.ready(Role.DECODE) == workers and len(ranked) == workers and lost == []
    hearing.cancel()


async def test_a_worker_that_is_slow_to_connect_again_is_not_lost(scene):
    doors = Doors()
    doors.open_all()
    worker = LivingWorker("d", "e1")
    scene.living.append(worker)
    worker.info = msgspec.structs.replace(worker.info, request_address=await doors.to(worker.info.request_address))
    scene.registry.registered["d"] = worker.info
    await scene.changed()
    await scene.heard("d")
    doors.break_all()
    await until(lambda: doors.shut)
    await asyncio.sleep(3 * RECONNECT_S)
    assert scene.lost == [] and not scene.fleet.ready(Role.DECODE)
    doors.open_all()
    await until(lambda: scene.fleet.ready(Role.DECODE))
    assert scene.reset == ["d"] and scene.lost == []
    await doors.close()
