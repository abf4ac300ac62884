"""The last hour of a fleet, a point each second, and who watches."""

import asyncio
import json

import msgspec
import pytest
from support_info import fleet_of, worker_info
from support_siblings import alone, queue_of

from orchestrator.frontend.dashboard import history as module
from orchestrator.frontend.dashboard.history import HOUR_S, MAX_WATCHERS, History, samples
from orchestrator.process.tasks import cancelled
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.process.telemetry.requests import Recent
from orchestrator.types import DesiredRatio, QueueDepth, Role, WorkerLoad


@pytest.fixture
def recent() -> Recent:
    return Recent()


@pytest.fixture
def history(recent: Recent) -> History:
    fleet = fleet_of(worker_info("p0", Role.PREFILL), worker_info("d0"))
    fleet.take_load(WorkerLoad("d0", 1, 100, 25, 2, 1, 30, 5.0), 0.0)
    fleet.desired = DesiredRatio(1, 2, "scale")
    return History("m", alone(recent), fleet, queue_of(QueueDepth(3, 4000, 1)))


def test_point_counts_since_previous_point(history: History, recent: Recent):
    history.take(100.0)
    for seconds in (0.1, 0.2, 0.4):
        recent.ttft.add(seconds)
    recent.output_tokens += 7
    metrics = Metrics()
    metrics.placements.labels("remote", "cost").inc()
    metrics.requests.labels("finished").inc(2)
    history.take(101.0)
    history.take(102.0)
    first, second, third = history.points
    assert (first.ttft_p50, first.requests, first.decisions) == (None, first.requests, first.decisions)
    assert second.ttft_p50 == pytest.approx(200, rel=0.1) and second.ttft_p99 == pytest.approx(400, rel=0.1)
    assert (second.output_tokens, second.requests, second.decisions) == (7, 2, {"remote: cost": 1})
    assert (third.output_tokens, third.requests, third.decisions) == (0, 0, {})
    assert third.ttft_p50 == second.ttft_p50, "percentiles are of the last ten seconds"
    assert (third.queue_requests, third.prefill_ready, third.decode_ready, third.decode_desired) == (3, 1, 1, 2)
    assert (third.prefill_kv, third.decode_kv) == (None, 0.75)


async def test_a_defect_in_a_point_ends_no_frontend(history: History, monkeypatch: pytest.MonkeyPatch):
    """Those that it serves would lose their answers for a page that nobody may look at."""
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    broken = iter((True, True, False))
    take, taken = history.take, asyncio.Event()

    def defective(at: float) -> None:
        if next(broken):
            raise ZeroDivisionError
        take(at)
        taken.set()

    monkeypatch.setattr(history, "take", defective)
    running = asyncio.create_task(history.run())
    await asyncio.wait({running, asyncio.create_task(taken.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done() and len(history.points) == 1
    await cancelled(running)


def test_shares_within_objectives_are_those_of_the_last_minute_by_class(history: History, recent: Recent):
    history.take(0.0)
    assert history.in_time() == {}
    recent.judged.update({"chat": 4, "": 2})
    recent.met.update({"chat": 3, "": 2})
    history.take(1.0)
    recent.judged.update({"batch": 1, "chat": 4})
    recent.met["chat"] += 4
    history.take(2.0)
    assert history.in_time() == {"": 1.0, "batch": 0.0, "chat": 0.875}
    for second in range(59):
        history.take(3.0 + second)
    assert history.in_time() == {"batch": 0.0, "chat": 1.0}, "the first ones ended more than a minute ago"
    history.take(100.0)
    assert history.in_time() == {}


def test_history_keeps_one_hour(history: History):
    history.take(0.0)
    history.points.extend([*history.points] * HOUR_S)
    history.take(1.0)
    columns = history.columns()
    assert (columns["at"][0], columns["at"][-1]) == (0.0, 1.0)
    assert {len(column) for column in columns.values()} == {HOUR_S}


async def test_watchers_get_samples_with_transfers(history: History, recent: Recent, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    ended = False
    with history.watching() as watcher:
        recent.transferred["p0 d0"] += 5
        history.take(1.0)
        stream = samples(watcher, lambda: ended)
        name, _, data = (await anext(stream)).partition(b"\ndata: ")
        sample = json.loads(data)
        assert name == b"event: sample"
        assert sample["flows"] == [{"source": "p0", "target": "d0", "bytes": 5000}]
        assert [worker["id"] for worker in sample["workers"]] == ["d0", "p0"]
        for at in range(100):
            history.take(2.0 + at)  # a slow one misses samples, and holds up nobody
        assert watcher.qsize() < 10
        ended = True
        assert [sample async for sample in stream] == []


async def test_watchers_are_limited(history: History):
    watching = [history.watching() for _ in range(MAX_WATCHERS)]
    queues = [one.__enter__() for one in watching]
    assert None not in queues
    with history.watching() as watcher:
        assert watcher is None
    for one in watching:
        one.__exit__(None, None, None)
    with history.watching() as watcher:
        assert isinstance(watcher, asyncio.Queue)


async def test_a_sample_is_encoded_once_for_all_watchers(history: History, monkeypatch: pytest.MonkeyPatch):
    encoded: list[object] = []
    monkeypatch.setattr(module, "event", lambda name, data: encoded.append(data) or b"event")
    with history.watching() as first, history.watching() as second:
        history.take(1.0)
        assert first is not None and second is not None
        assert (first.get_nowait(), second.get_nowait(), len(encoded)) == (b"event", b"event", 1)


def test_groups_are_counted_as_the_desired_ratio_counts_them(recent: Recent):
    """Units, of which all ranks are ready; each rank has its card."""
    ranks = ("g0", "g0.1")
    infos = [msgspec.structs.replace(worker_info(name), ranks=ranks) for name in ranks]
    half = msgspec.structs.replace(worker_info("g1"), ranks=("g1", "g1.1"))
    fleet = fleet_of(*infos, half, worker_info("p0", Role.PREFILL))
    history = History("m", alone(recent), fleet, queue_of(None))
    history.take(1.0)
    assert (history.points[-1].prefill_ready, history.points[-1].decode_ready) == (1, 1)
