"""An engine that only waits for KV takes no steps until an input or one of its ranks wakes it."""

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from support_vllm import Driver, frames
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
        self.scheduler = SimpleNamespace(has_requests=lambda: True, requests={"waiting": self.waiting})
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

    from workers.vllm_engine import loop, plugin

    monkeypatch.setattr(loop, "_WOKEN_S", 60.0)
    monkeypatch.setenv("PD_WAKE_SOCKET", "")  # given back afterwards
    config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=1))
    loop.name_socket(str(tmp_path), MultiprocExecutor, config)
    engine = WaitingEngine(plugin._process_engine_step)
    await until(engine.is_quiet)
    yield engine
    engine.stop()


async def test_an_input_wakes_it(engine: WaitingEngine) -> None:
    before = engine.steps
    engine.input_queue.put_nowait("a request")
    await until(lambda: engine.steps > before)


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

    from workers.vllm_engine import loop, plugin

    monkeypatch.setenv("PD_WAKE_SOCKET", "")
    config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=2))
    loop.name_socket(str(tmp_path), MultiprocExecutor, config)
    engine = WaitingEngine(plugin._process_engine_step)
    await until(lambda: engine.steps > STEPS)
    engine.stop()


def test_a_rank_whose_engine_has_ended_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from connectors.wake import WakeEvent

    monkeypatch.setenv("PD_WAKE_SOCKET", str(tmp_path / "nobody"))
    event = WakeEvent()
    event.set()
    assert event.is_set()


@pytest.mark.slow
async def test_two_ranks_take_no_steps_until_kv_has_arrived(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine, whose processes are forked from this one, and inherit what is changed here."""
    from workers.vllm_engine import loop, plugin

    steps, process_step = multiprocessing.get_context("fork").Value("q", 0), plugin._process_engine_step

    def counted(engine: Any) -> bool:
        steps.value += 1
        return process_step(engine)

    async def is_quiet() -> bool:
        before = steps.value
        await asyncio.sleep(QUIET_S)
        return steps.value == before

    prefill = await Driver.start(model, name="prefill")
    monkeypatch.setattr(loop, "_WOKEN_S", 60.0)
    monkeypatch.setattr(plugin, "_process_engine_step", counted)
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
