"""One rank's share of the host tier: its memory, and the copies of blocks between it and the device.

The memory is this process's own, and ends with it. On CPUs copies to it take only time for which no core has anything
else to do (`IdleFile`; Linux, glibc).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import queue
import signal
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    build_params,
    copy_blocks,
    pin_tensor,
)
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

Rows = dict[str, torch.Tensor]  # by region of the device's cache: (blocks, bytes of one there), int8

logger = init_logger("vllm.pd.host")

_PIECE_BYTES = 8 << 20  # of a store on CPUs: what an engine's step may wait for
_LATE_S = 0.5  # a store that no core was idle for is made by the engine's own thread: its blocks cannot be evicted


# Of a store: since when it waits, what `Way.copy` takes, and what is called at its end.
_Piece = tuple[float, Sequence[int], Sequence[int], Any, Callable[[float], None]]


class Way(Protocol):
    """Copies blocks in one direction, and returns once they are there."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], computed: Any) -> None:
        """`computed`: a device event that comes first, if any."""
        ...


class HostMemory:
    """Each direction has a thread, so that no load waits for stores.

    On CPUs stores are made only while a core has nothing else to do (`IdleFile`). It may be any of the machine's, also
    one where a step of another engine computes, whose KV has just been pushed there.
    """

    def __init__(
        self,
        worker: NixlPushConnectorWorker,
        config: KVCacheConfig,
        capacity_bytes: int,
        *,
        begin: Callable[[], None],
        ended: Callable[[], None],
        loaded: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        """`worker` has registered the device's cache. `begin`: called on each new thread; `ended`: after each load and
        store; `loaded(bytes, seconds)`: after each load. Raises ValueError where the cache cannot be copied."""
        device = _regions(worker, config.num_blocks)
        # The scheduler half counts blocks by the same function.
        blocks = SimpleCPUOffloadScheduler._derive_cpu_config(config, capacity_bytes).num_blocks
        self._block_bytes = sum(rows.shape[1] for rows in device.values())
        if (needed := blocks * self._block_bytes) > capacity_bytes:
            raise ValueError(f"kv.host_tier_bytes: this model's blocks would take {needed} bytes; set it to 0")
        self._store, self._load, self._store_now = _ways(worker, device, blocks, begin)
        self._piece = max(1, _PIECE_BYTES // self._block_bytes) if self._store_now else blocks
        self._threads = [
            ThreadPoolExecutor(1, "pd-host-store", initializer=begin),
            ThreadPoolExecutor(1, "pd-host-load", initializer=begin),
        ]
        self._waiting = deque[_Piece]()
        self._ended, self._note_load = ended, loaded
        self._loaded: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._stored: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def load(self, orders: SimpleCPUOffloadMetadata) -> None:
        """What this step has reserved blocks for."""
        requests, size = orders.load_event_to_reqs[orders.load_event], len(orders.load_gpu_blocks) * self._block_bytes

        def told(seconds: float) -> None:
            self._note_load(size, seconds)
            self._loaded.put(requests)
            self._ended()

        copy = functools.partial(self._load.copy, orders.load_cpu_blocks, orders.load_gpu_blocks, None)
        self._threads[1].submit(self._run, copy, told)

    def store(self, orders: SimpleCPUOffloadMetadata, computed: Any) -> None:
        """What earlier steps, or this one, have computed. `computed`: an event after this step; None on CPUs."""
        sources, targets = orders.store_gpu_blocks, orders.store_cpu_blocks
        starts = range(0, len(sources), self._piece)
        left = itertools.count(len(starts) - 1, -1)  # pieces, once one more has ended

        def told(seconds: float) -> None:
            if next(left) == 0:
                self._stored.put(orders.store_event)
                self._ended()

        now = time.monotonic()
        for some in (slice(start, start + self._piece) for start in starts):
            self._waiting.append((now, sources[some], targets[some], computed, told))
            self._threads[0].submit(self._store_next, self._store)

    def _is_late(self) -> bool:
        with contextlib.suppress(IndexError):  # the other thread has taken the last one
            return self._waiting[0][0] + _LATE_S <= time.monotonic()
        return False

    def _store_next(self, way: Way) -> None:
        with contextlib.suppress(IndexError):
            _, sources, targets, computed, told = self._waiting.popleft()
            self._run(functools.partial(way.copy, sources, targets, computed), told)

    def _run(self, copy: Callable[[], None], told: Callable[[float], None]) -> None:
        began = time.perf_counter()
        try:
            copy()
            told(time.perf_counter() - began)
        except Exception as error:
            self._failed.put(error)
            self._ended()

    def take_loaded(self) -> set[str]:
        """The requests whose blocks have been loaded since the last call. Raises RuntimeError if a copy has failed: its
        blocks would stay reserved, and a device that cannot copy cannot compute either."""
        if not self._failed.empty():
            raise RuntimeError("the host tier could not copy KV") from self._failed.get()
        return {key for _ in range(self._loaded.qsize()) for key in self._loaded.get()}

    def take_stored(self) -> dict[int, int]:
        """The stores that have ended since the last call, by their numbers, 1 each: all ranks' are added. Makes one
        piece that is late: it is called in each step, which is not to take much longer."""
        if self._store_now is not None and self._is_late():
            self._store_next(self._store_now)
        return Counter(self._stored.get() for _ in range(self._stored.qsize()))

    def close(self) -> None:
        for threads in self._threads:
            threads.shutdown(cancel_futures=True)


def _regions(worker: NixlPushConnectorWorker, blocks: int) -> Rows:
    """The device's cache, by the regions that are pushed. Raises ValueError where blocks are not contiguous in them."""
    ratio = worker._physical_blocks_per_logical_kv_block
    found: Rows = {}
    for index, (address, name, stride, length) in enumerate(
        zip(
            worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank],
            worker.region_names,
            worker.block_stride_per_layer,
            worker.block_len_per_layer,
            strict=True,
        )
    ):
        if stride != length:
            raise ValueError("kv.host_tier_bytes: this model's layers share their blocks' memory; set it to 0")
        cache = worker.device_kv_caches[name]
        memory = torch.empty(0, dtype=torch.int8, device=cache.device).set_(cache.untyped_storage())
        start, size = address - memory.data_ptr(), length * ratio
        found[f"{index}"] = memory[start : start + blocks * size].view(blocks, size)
    return found


def _ways(
    worker: NixlPushConnectorWorker, device: Rows, blocks: int, begin: Callable[[], None]
) -> tuple[Way, Way, Way | None]:
    """From the device to so many blocks of the host, and back; and where the first waits for an idle core, another that
    does not."""
    sizes = {name: rows.shape[1] for name, rows in device.items()}
    if worker.device_type != "cuda":
        try:
            file = IdleFile(blocks * sum(sizes.values()), begin)
        except OSError as error:
            logger.warning("kv.host_tier_bytes: stores take time from engines' steps, without idle cores: %s", error)
        else:
            parts = file.memory.split([blocks * size for size in sizes.values()])
            host = {name: part.view(blocks, -1) for name, part in zip(sizes, parts, strict=True)}
            return _WhenIdle(device, host, file), _Memmove(host, device), _Memmove(device, host)
    host = {name: torch.zeros((blocks, size), dtype=torch.int8, device="cpu") for name, size in sizes.items()}
    if worker.device_type != "cuda":
        return _Memmove(device, host), _Memmove(host, device), _Memmove(device, host)
    for rows in host.values():
        pin_tensor(rows)
    where = torch.device("cuda", worker.device_id)
    return (
        _Dma(device, host, where, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM),
        _Dma(host, device, where, CU_MEMCPY_SRC_ACCESS_ORDER_ANY),
        None,
    )


class _Memmove:
    """Where host and device are one memory."""

    def __init__(self, source: Rows, target: Rows) -> None:
        self._pairs = [(source[name], target[name]) for name in source]

    def copy(self, sources: Sequence[int], targets: Sequence[int], computed: Any) -> None:
        for source, target in self._pairs:
            size = source.shape[1]
            for old, new in zip(sources, targets, strict=True):
                ctypes.memmove(target[new].data_ptr(), source[old].data_ptr(), size)


class _WhenIdle:
    """The same, while a core is idle."""

    def __init__(self, source: Rows, target: Rows, file: IdleFile) -> None:
        self._file, self._sizes = file, [rows.shape[1] for rows in source.values()]
        self._addresses = _places(source)
        self._offsets = _places(target) - file.memory.data_ptr()

    def copy(self, sources: Sequence[int], targets: Sequence[int], computed: Any) -> None:
        old, new = self._addresses[:, list(sources)], self._offsets[:, list(targets)]
        self._file.write(old.ravel(), new.ravel(), np.repeat(self._sizes, len(sources)))


def _places(rows: Rows) -> np.ndarray:
    """Addresses by region and block."""
    return np.array([each.data_ptr() + np.arange(len(each)) * each.shape[1] for each in rows.values()])


class _Dma:
    """On a stream of its own, which yields to the model's."""

    def __init__(self, source: Rows, target: Rows, device: torch.device, access_order: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=torch.cuda.Stream.priority_range()[0])
        self._memory = source, target  # which the parameters only point to
        self._parameters = build_params(source, target, self._stream, access_order)

    def copy(self, sources: Sequence[int], targets: Sequence[int], computed: Any) -> None:
        current_platform.set_device(self._device)
        if computed is not None:
            self._stream.wait_event(computed)
        copy_blocks(list(sources), list(targets), self._parameters)
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()


# ---- copies that take idle time only -------------------------------------------------------------------------------


_NAME, _FOREVER_S = "pd-host-idle", 2**30
_AT_ONCE = 512  # writes in one call: it walks its list for each of them
_LIO_WAIT, _LIO_WRITE, _SIGEV_NONE = 0, 1, 1
# struct aiocb of aio.h, with 64 bits.
_CONTROL: np.dtype[np.void] = np.dtype(
    {
        "names": ["file", "operation", "buffer", "size", "notify", "written", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 44, 120, 128],
        "itemsize": 168,
    }
)


class _Settings(ctypes.Structure):
    """struct aioinit."""

    _fields_ = [(name, ctypes.c_int) for name in ("threads", "num", "locks", "usedba", "debug", "users", "idle_s", "_")]


class IdleFile:
    """Memory of so many bytes, as a file in memory, to which copies are made while a core is idle.

    A thread of such a priority must run no Python: where all cores are busy it would wait for one with the
    interpreter's lock in its hands, and so would every other thread of the process. Nor can it be given back its
    priority without a privilege. So the copies are made by the thread of glibc's asynchronous I/O.
    """

    def __init__(self, size: int, begin: Callable[[], None]) -> None:
        """`begin`: called on the thread from which the one that writes inherits what it may use. Raises OSError where
        the system has no such memory or thread, or refuses it."""
        self._rt = ctypes.CDLL("librt.so.1", use_errno=True)  # of newer systems' it leads to libc, which has all
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)
        os.posix_fallocate(self._file, 0, size)  # an error now, not a signal later
        self.memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.int8)
        with ThreadPoolExecutor(1) as starting:
            starting.submit(self._start, begin).result()

    def _start(self, begin: Callable[[], None]) -> None:
        """The first thread that writes starts glibc's, which inherits its name. That takes over the priority of whoever
        writes only when it changes, so what is set from here on stays."""
        begin()
        name = Path("/proc/thread-self/comm")
        name.write_text(_NAME)
        settings = _Settings(threads=1, num=1024, idle_s=_FOREVER_S)
        self._rt.aio_init(ctypes.byref(settings))
        self.write([self.memory.data_ptr()], [0], [1])
        name.write_text("pd-host-start")
        there = [task for task in Path("/proc/self/task").iterdir() if _name(task) == _NAME]
        if not there:
            raise OSError("no thread of glibc's was started")
        for task in there:
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))

    def write(self, addresses: Sequence[int] | np.ndarray, offsets: Sequence[int] | np.ndarray, sizes: object) -> None:
        """Returns when these bytes from anywhere in this process's memory are there. From then on no signal reaches the
        thread that calls it. Raises OSError."""
        controls: np.ndarray = np.zeros(len(addresses), _CONTROL)
        controls["file"], controls["operation"], controls["notify"] = self._file, _LIO_WRITE, _SIGEV_NONE
        controls["buffer"], controls["offset"], controls["size"] = addresses, offsets, sizes
        each: np.ndarray = controls.ctypes.data + np.arange(len(controls), dtype=np.uint64) * _CONTROL.itemsize
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one would end the wait
        for some in (each[start : start + _AT_ONCE] for start in range(0, len(each), _AT_ONCE)):
            if self._rt.lio_listio(_LIO_WAIT, ctypes.c_void_p(some.ctypes.data), len(some), None):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
        if (short := controls["written"] != controls["size"]).any():
            raise OSError(f"{int(short.sum())} of {len(controls)} copies to host memory ended early")


def _name(task: Path) -> str | None:
    with contextlib.suppress(OSError):  # it has ended
        return (task / "comm").read_text().strip()
    return None
