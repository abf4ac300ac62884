"""One rank's host memory without an engine: whole blocks go there and come back, and what fails is said."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_wait import DEADLINE_S, until

pytestmark = pytest.mark.vllm

BLOCKS, HOST_BLOCKS, RATIO = 6, 4, 2  # of the device, of the host; a kernel's blocks in one of vLLM's
KERNEL_BYTES = (24, 40)  # of a kernel's block, by region


def rank(padding: int = 0) -> Any:
    """What vLLM's worker has after it has registered a cache of two layers, with random bytes."""
    torch = pytest.importorskip("torch")
    caches = {
        f"layer.{number}": torch.randint(0, 100, (BLOCKS * RATIO * size,), dtype=torch.int8)
        for number, size in enumerate(KERNEL_BYTES)
    }
    return SimpleNamespace(
        engine_id="E",
        tp_rank=0,
        device_type="cpu",
        _physical_blocks_per_logical_kv_block=RATIO,
        kv_caches_base_addr={"E": {0: [cache.data_ptr() for cache in caches.values()]}},
        region_names=list(caches),
        block_stride_per_layer=[size + padding for size in KERNEL_BYTES],
        block_len_per_layer=list(KERNEL_BYTES),
        device_kv_caches=caches,
    )


def memory(worker: Any, ended: Callable[[], None] = lambda: None) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

    from connectors.host.memory import HostMemory

    block_bytes = RATIO * sum(KERNEL_BYTES)
    tensor = KVCacheTensor(size=BLOCKS * block_bytes, layers=["layer.0"], layer_stride=0, block_stride=block_bytes)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[])
    return HostMemory(worker, config, HOST_BLOCKS * block_bytes, begin=lambda: None, ended=ended)


def orders(**values: Any) -> Any:
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

    return SimpleCPUOffloadMetadata(**values)


def rows(worker: Any) -> list[Any]:
    return [cache.view(BLOCKS, -1).clone() for cache in worker.device_kv_caches.values()]


@pytest.fixture
def world() -> Iterator[tuple[Any, Any, threading.Event]]:
    worker, woken = rank(), threading.Event()
    tier = memory(worker, woken.set)
    yield worker, tier, woken
    tier.close()


async def test_blocks_go_to_host_memory_and_back_to_other_blocks(world: Any) -> None:
    worker, tier, woken = world
    before = rows(worker)
    tier.store(orders(store_event=7, store_gpu_blocks=[1, 4], store_cpu_blocks=[3, 0]), None)
    await until(woken.is_set)
    assert tier.take_stored() == {7: 1} and tier.take_stored() == {}
    woken.clear()
    tier.load(orders(load_event=2, load_cpu_blocks=[0, 3], load_gpu_blocks=[5, 2], load_event_to_reqs={2: ["a", "b"]}))
    await until(woken.is_set)
    assert tier.take_loaded() == {"a", "b"} and tier.take_loaded() == set()
    for was, now in zip(before, rows(worker), strict=True):
        was[5], was[2] = was[4].clone(), was[1].clone()
        assert bool((was == now).all())


async def test_stores_run_where_a_core_is_idle_by_a_thread_without_python(world: Any) -> None:
    """A thread that waits for an idle core with Python's lock in its hands would hold up the engine."""
    _, tier, woken = world
    tasks = [path.parent for path in Path("/proc/self/task").glob("*/comm") if path.read_text() == "pd-host-idle\n"]
    assert [os.sched_getscheduler(int(task.name)) for task in tasks] == [os.SCHED_IDLE]
    ran = (tasks[0] / "schedstat").read_text()
    tier.store(orders(store_event=1, store_gpu_blocks=[1], store_cpu_blocks=[3]), None)
    await until(woken.is_set)
    assert (tasks[0] / "schedstat").read_text() != ran
    assert os.sched_getscheduler(int(tasks[0].name)) == os.SCHED_IDLE, "writing did not change it"
    policies = {threads.submit(os.sched_getscheduler, 0).result(DEADLINE_S) for threads in tier._threads}
    assert policies == {os.sched_getscheduler(0)}


async def test_without_an_idle_thread_or_a_file_in_memory_stores_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(13, "refused")

    for name in ("memfd_create", "sched_setscheduler", "posix_fallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuses)
            worker, woken = rank(), threading.Event()
            tier = memory(worker, woken.set)
        assert "refused" in caplog.messages[-1] and len(caplog.messages) == 1
        caplog.clear()
        before = rows(worker)
        tier.store(orders(store_event=1, store_gpu_blocks=[1], store_cpu_blocks=[3]), None)
        await until(woken.is_set)
        woken.clear()
        tier.load(orders(load_event=1, load_cpu_blocks=[3], load_gpu_blocks=[5], load_event_to_reqs={1: ["a"]}))
        await until(woken.is_set)
        for was, now in zip(before, rows(worker), strict=True):
            assert bool((now[5] == was[1]).all())
        tier.close()


def test_a_copy_that_ends_early_is_an_error() -> None:
    from connectors.host.memory import IdleFile

    file, pages = IdleFile(8192, lambda: None), mmap.mmap(-1, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + 4096), 4096, 0) == 0
    # On a thread of its own: no signal reaches it from then on, nor the processes that it would start.
    with ThreadPoolExecutor(1) as thread, pytest.raises(OSError, match="ended early"):
        thread.submit(file.write, [address], [0], [8192]).result(DEADLINE_S)


async def test_a_store_in_pieces_counts_once_and_the_engine_makes_what_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that stores has no core here: the engine's own thread does it, as it asks for what has ended."""
    from connectors.host import memory as host

    monkeypatch.setattr(host, "_PIECE_BYTES", 1)
    monkeypatch.setattr(host, "_LATE_S", DEADLINE_S)
    worker, woken = rank(), []
    tier, core = memory(worker, lambda: woken.append(1)), threading.Event()
    try:
        before = rows(worker)
        tier._threads[0].submit(core.wait, DEADLINE_S)
        tier.store(orders(store_event=1, store_gpu_blocks=[1, 4], store_cpu_blocks=[3, 0]), None)
        assert tier.take_stored() == {}, "it is not late yet"
        monkeypatch.setattr(host, "_LATE_S", 0.0)
        assert tier.take_stored() == {}, "a piece in each step"
        assert tier.take_stored() == {1: 1} and len(woken) == 1
        core.set()
        tier.load(orders(load_event=1, load_cpu_blocks=[0, 3], load_gpu_blocks=[5, 0], load_event_to_reqs={1: ["a"]}))
        await until(lambda: len(woken) == 2)
        for was, now in zip(before, rows(worker), strict=True):
            assert bool((now[5] == was[4]).all() and (now[0] == was[1]).all())
        assert tier.take_stored() == {}, "no piece was made twice"
    finally:
        core.set()
        tier.close()


class LateEvent:
    """A CUDA event; `asked`: somebody waits for it."""

    def __init__(self, blocking: bool = False) -> None:
        self.done = threading.Event()

    def record(self, stream: Any) -> None:
        stream.work.submit(self.done.set)

    def synchronize(self) -> None:
        LateStream.asked.set()
        assert self.done.wait(DEADLINE_S)


class LateStream:
    """A CUDA stream, which does nothing of what is queued on it before the device `runs`."""

    runs, asked = threading.Event(), threading.Event()

    def __init__(self, device: Any, priority: int) -> None:
        self.work = ThreadPoolExecutor(1)
        self.work.submit(self.runs.wait, DEADLINE_S)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_event(self, event: LateEvent) -> None:
        self.work.submit(event.done.wait, DEADLINE_S)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, threading.Event]]:
    """The same world on a CUDA device that does its work late."""
    import torch

    from connectors.host import memory as host

    def copy_blocks(sources: Sequence[int], targets: Sequence[int], parameters: Any) -> None:
        source, target, stream = parameters
        for name in source:
            stream.work.submit(lambda name: target[name].__setitem__(targets, source[name][sources]), name)

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(host.current_platform, "set_device", lambda device: None, raising=False)
    monkeypatch.setattr(host, "pin_tensor", lambda rows: None)
    monkeypatch.setattr(host, "build_params", lambda source, target, stream, order: (source, target, stream))
    monkeypatch.setattr(host, "copy_blocks", copy_blocks)
    worker, woken = rank(), threading.Event()
    worker.device_type, worker.device_id = "cuda", 0
    LateStream.runs.clear()
    LateStream.asked.clear()
    tier = memory(worker, woken.set)
    yield worker, tier, woken
    LateStream.runs.set()
    tier.close()


async def test_a_load_has_ended_once_the_device_has_copied_it(late: Any) -> None:
    """Until then it is neither computed with nor sent."""
    worker, tier, woken = late
    tier.load(orders(load_event=1, load_cpu_blocks=[0], load_gpu_blocks=[5], load_event_to_reqs={1: ["a"]}))
    await until(LateStream.asked.is_set)
    assert tier.take_loaded() == set() and not woken.is_set()
    LateStream.runs.set()
    await until(woken.is_set)
    assert tier.take_loaded() == {"a"}
    assert not any(bool(cache[5].any()) for cache in rows(worker)), "what host memory had: zeros"


async def test_a_store_copies_what_the_device_has_computed_by_its_event(late: Any) -> None:
    worker, tier, woken = late
    computed = LateEvent()
    LateStream.runs.set()
    tier.store(orders(store_event=3, store_gpu_blocks=[1], store_cpu_blocks=[2]), computed)
    await until(LateStream.asked.is_set)
    assert tier.take_stored() == {} and not woken.is_set()
    for cache in worker.device_kv_caches.values():
        cache.view(BLOCKS, -1)[1] = 101  # as the last step of the device does
    computed.done.set()
    await until(woken.is_set)
    assert tier.take_stored() == {3: 1}
    woken.clear()
    tier.load(orders(load_event=1, load_cpu_blocks=[2], load_gpu_blocks=[4], load_event_to_reqs={1: ["a"]}))
    await until(woken.is_set)
    assert all(bool((cache[4] == 101).all()) for cache in rows(worker))


async def test_a_copy_that_fails_is_said_and_wakes_the_engine(world: Any) -> None:
    _, tier, woken = world
    tier.store(orders(store_event=1, store_gpu_blocks=[1], store_cpu_blocks=[HOST_BLOCKS]), None)
    await until(woken.is_set)
    with pytest.raises(RuntimeError, match="the host tier could not copy KV"):
        tier.take_loaded()
    assert tier.take_stored() == {}


def test_layers_that_share_their_blocks_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^kv\.host_tier_bytes: .*; set it to 0"):
        memory(rank(padding=8))


@pytest.mark.parametrize(
    "kinds", [["window"], ["state"], ["full", "state"], ["full", "part"], ["full", "odd"], ["full", "replayed"]]
)
def test_a_model_whose_kv_the_tier_cannot_take_is_refused(kinds: list[str]) -> None:
    torch = pytest.importorskip("torch")
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    from connectors.host.tier import HostTier

    layout = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    specs = {
        "full": FullAttentionSpec(**layout),
        "part": ChunkedLocalAttentionSpec(**layout, attention_chunk_size=64),
        "window": SlidingWindowSpec(**layout, sliding_window=32),
        "odd": SlidingWindowSpec(**layout, sliding_window=33),
        "replayed": SlidingWindowMLASpec(**layout, sliding_window=32, bounded_replay=True),
        "state": MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,)),
    }
    groups = [SimpleNamespace(kv_cache_spec=specs[kind]) for kind in kinds]
    with pytest.raises(ValueError, match=r"^kv\.host_tier_bytes: .*; set it to 0"):
        HostTier(SimpleNamespace(), SimpleNamespace(kv_cache_groups=groups), 1 << 20)


def test_a_store_has_ended_once_all_ranks_have_told_so() -> None:
    from connectors.push.metadata import RankReport, RankReports

    one, other = RankReports().take({1: 1, 2: 1}), RankReports().take({2: 1})
    assert one is not None and other is not None
    report = one.aggregate(other)
    assert isinstance(report, RankReport) and report.stored == {1: 1, 2: 2}
