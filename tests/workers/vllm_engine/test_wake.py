"""An engine that only waits for KV takes no steps until an input or one of its ranks wakes it."""

import asyncio
import multiprocessing
import queue
import statistics
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from support_vllm import Driver, counted_steps, frames
from support_wait import until

pytestmark = pytest.mark.vllm

QUIET_S = 0.3  # in which an engine that polls takes dozens of steps
STEPS = 8


class WaitingEngine:
    """An engine's loop over a request that waits for KV. Its ranks are in other processes."""

    def __init__(self, step: Callable[[Any], bool]) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        from vllm.v1.request import RequestStatus

        self.waiting = SimpleNamespace(status=RequestStatus.WAITING_FOR_REMOTE_KVS)
        self.connector = SimpleNamespace(host_tier=None, has_pending_push_work=lambda: False)
        self.scheduler = SimpleNamespace(
            has_requests=lambda: True,
            requests={"waiting": self.waiting},
            running=[],
            finished_req_ids=set(),
            finished_recving_kv_req_ids=set(),
            get_kv_connector=lambda: self.connector,
        )
        self.steps, self.batch_queue_size = 0, 2
        self._step = step
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self.steps += 1
        return {}, False

    def post_step(self, executed: bool) -> None: ...

    def _run(self) -> None:
        while not self._stop:
            while not self.input_queue.empty():
                self.input_queue.get()
            self._step(self)

    def is_quiet(self) -> bool:
        """Whether it takes no more steps by itself."""
        before = self.steps
        self._thread.join(QUIET_S)
        return self.steps == before

    def stop(self) -> None:
        self._stop = True
        self.input_queue.put_nowait("stop")
        self._thread.join()


@pytest_asyncio.fixture
async def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[WaitingEngine]:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from workers.vllm_engine import loop

    monkeypatch.setattr(loop, "_WOKEN_S", 60.0)
    monkeypatch.setenv("PD_WAKE_SOCKET", "")  # given back afterwards
    config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=1))
    loop.name_socket(str(tmp_path), MultiprocExecutor, config)
    engine = WaitingEngine(loop.process_engine_step)
    await until(engine.is_quiet)
    yield engine
    engine.stop()


async def test_an_input_wakes_it(engine: WaitingEngine) -> None:
    before = engine.steps
    engine.input_queue.put_nowait("a request")
    await until(lambda: engine.steps > before)


@pytest.mark.parametrize("queued", [1, 2, 3])
async def test_what_a_step_has_collected_is_noted_and_nothing_else_is_looked_for(
    engine: WaitingEngine, queued: int
) -> None:
    engine.batch_queue_size = queued
    before = engine.steps
    engine.input_queue.put_nowait("a request")
    await until(lambda: engine.steps > before)
    await until(engine.is_quiet)
    assert engine.steps - before == queued


@pytest.mark.parametrize("news", ["running", "finished", "received", "connector", "preempted"])
async def test_what_the_next_step_may_do_is_not_waited_with(engine: WaitingEngine, news: str) -> None:
    from vllm.v1.request import RequestStatus

    engine.batch_queue_size, scheduler = 1, engine.scheduler
    match news:
        case "running":
            scheduler.running.append(engine.waiting)
        case "finished":
            scheduler.finished_req_ids.add("waiting")
        case "received":
            scheduler.finished_recving_kv_req_ids.add("waiting")
        case "connector":
            engine.connector.has_pending_push_work = lambda: True
        case "preempted":
            engine.waiting.status = RequestStatus.PREEMPTED
    before = engine.steps
    engine.input_queue.put_nowait("a request")
    await until(lambda: engine.steps > before + 1)
    await until(engine.is_quiet)  # also where it lasts


async def test_a_grammar_is_looked_for_since_nobody_says_that_it_is_compiled(engine: WaitingEngine) -> None:
    from vllm.v1.request import RequestStatus

    engine.waiting.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    before = engine.steps
    engine.input_queue.put_nowait("a request with it")
    await until(lambda: engine.steps > before + STEPS)
    engine.waiting.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    await until(engine.is_quiet)


def report() -> None:
    """Runs in the process of a rank."""
    from connectors.wake import WakeEvent

    WakeEvent().set()


async def test_a_rank_in_another_process_wakes_it(engine: WaitingEngine) -> None:
    for _ in range(2):
        before = engine.steps
        rank = multiprocessing.get_context("fork").Process(target=report)
        rank.start()
        await until(lambda before=before: engine.steps > before)
        rank.join()
        await until(engine.is_quiet)


async def test_ranks_of_other_hosts_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from workers.vllm_engine import loop

    monkeypatch.setenv("PD_WAKE_SOCKET", "")
    config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=2))
    loop.name_socket(str(tmp_path), MultiprocExecutor, config)
    engine = WaitingEngine(loop.process_engine_step)
    await until(lambda: engine.steps > STEPS)
    engine.stop()


def test_a_rank_whose_engine_has_ended_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from connectors.wake import WakeEvent

    monkeypatch.setenv("PD_WAKE_SOCKET", str(tmp_path / "nobody"))
    event = WakeEvent()
    event.set()
    assert event.is_set()


@pytest.mark.slow
async def test_a_remote_request_costs_few_steps_that_compute_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real engines: decode reserves blocks, collects what has come, and ends; prefill ends, and gives its blocks back.
    Where a notice comes during a step, one more looks for it."""
    from workers.vllm_engine import loop

    process_step, counts = loop.process_engine_step, {}
    monkeypatch.setattr(loop, "_WOKEN_S", 60.0)
    engines = {}
    for name in ("prefill", "decode"):
        empty = counts[name] = multiprocessing.get_context("fork").Value("q", 0)

        def counted(engine: Any, empty: Any = empty) -> bool:
            executed = process_step(engine)
            empty.value += not executed
            return executed

        monkeypatch.setattr(loop, "process_engine_step", counted)
        engines[name] = await Driver.start(model, name=name)
    prefill, decode = engines["prefill"], engines["decode"]
    try:
        found: dict[str, list[int]] = {name: [] for name in counts}
        for number in range(8):
            before = {name: empty.value for name, empty in counts.items()}
            body, key = frames(list(range(3 + number, 103 + number))), f"costs-{number}#1"
            await decode.decode(key, body, prefill.source(key))
            await prefill.prefill(key, body)
            await decode.done(key)
            await asyncio.sleep(QUIET_S)
            for name, empty in counts.items():
                found[name].append(empty.value - before[name])
        most = {name: statistics.median(steps) for name, steps in found.items()}
        assert most["decode"] <= 4 and most["prefill"] <= 3, found
    finally:
        await decode.stop()
        await prefill.stop()


@pytest.mark.slow
async def test_two_ranks_take_no_steps_until_kv_has_arrived(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine, whose processes are forked from this one, and inherit what is changed here."""

    async def is_quiet() -> bool:
        before = steps.value
        await asyncio.sleep(QUIET_S)
        return steps.value == before

    prefill = await Driver.start(model, name="prefill")
    steps = counted_steps(monkeypatch)
    decode = await Driver.start(model, name="decode", tensor_parallel_size=2)
    try:
        for number in range(2):
            body, key = frames(list(range(3 + number, 103 + number))), f"waits-{number}#1"
            await decode.decode(key, body, prefill.source(key))
            await until(is_quiet)
            await prefill.prefill(key, body)
            await decode.done(key)
            assert decode.stats[key].num_external_cached_tokens == 100
        assert steps.value
    finally:
        await decode.stop()
        await prefill.stop()
