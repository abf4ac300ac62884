"""The writer thread with a NIXL that answers at once and device events that complete late, without an engine."""

from __future__ import annotations

import functools
import queue
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connectors.push import wire
from connectors.push.metadata import Computed, PushMetadata

pytestmark = pytest.mark.vllm

DECODE = wire.Endpoint("D", "host", 1)
AGENT = "decode-agent"
SOON_S = 0.5  # a turn of the thread takes milliseconds


class LateEvent:
    """A CUDA event that completes when the test says so. Who waits for it waits too long."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.happened.wait(10)


class Nixl:
    """Every WRITE is done as soon as it is posted."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, wire.Message]] = []
        self.arrived: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        self.posted: list[tuple[Any, ...]] = []

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> int:
        self.posted.append(args)
        return len(self.posted)

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        return "DONE"

    def get_xfer_telemetry(self, handle: int) -> None:
        return None

    def release_xfer_handle(self, handle: int) -> None:
        pass

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.sent.append((agent, wire.parse(notif_msg)))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived = []
        while not self.arrived.empty():
            arrived.append(wire.pack(self.arrived.get()))
        return {AGENT: arrived} if arrived else {}


@pytest.fixture
def nixl() -> Nixl:
    return Nixl()


@pytest.fixture
def worker(nixl: Nixl) -> Iterator[Any]:
    """A rank of a prefill engine on one CUDA device, connected to the decode engine."""
    pytest.importorskip("connectors.push.worker")  # imports vLLM, which takes seconds
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology

    from connectors.push.inbound import Inbound
    from connectors.push.metadata import PushOptions
    from connectors.push.outbound import Outbound
    from connectors.push.worker import PushWorker

    class Rank(PushWorker):
        """Without vLLM's part of the constructor, which registers memory with NIXL."""

        def __init__(self) -> None:
            self.engine_id, self.world_size, self.tp_rank, self.pp_size = "P", 1, 0, 1
            self.block_size, self._physical_blocks_per_logical_kv_block = 16, 1
            self.use_mla = self._has_mamba = self.use_host_buffer = False
            self._transfer_layer_group_ids: tuple[int, ...] = ()
            self.num_regions, self.region_names = 1, ["layer"]
            self.transfer_topo = TransferTopology(
                tp_rank=0,
                tp_size=1,
                block_size=16,
                engine_id="P",
                is_mla=False,
                is_mamba=False,
                total_num_kv_heads=8,
                attn_backends=[],
            )
            theirs = EngineTransferInfo(
                remote_tp_size=1, remote_block_size=16, remote_block_len=1, remote_physical_blocks_per_logical=1
            )
            self.transfer_topo.register_remote_engine("D", theirs)
            self.tp_mappings = {"D": None}
            self.dst_xfer_side_handles = {"D": {0: "theirs"}}
            self.dst_region_num_blocks = {"P": [100], "D": [100]}
            self.src_xfer_handles_by_block_size = {16: "mine"}
            self.kv_cache_config = types.SimpleNamespace(transfer_groups=[0])
            self.nixl_wrapper = nixl
            self.xfer_stats = types.SimpleNamespace()
            self._recving_metadata: dict[str, Any] = {}
            self._engine_last_active: dict[str, float] = {}
            self._unwritable: dict[str, str] = {}
            self._connecting: set[str] = set()
            self._to_forget: set[str] = set()
            self._handshake_lock = threading.RLock()
            self._remote_agents = {"D": {(0, 0): AGENT}}
            self._events, self._records, self._results = queue.SimpleQueue(), queue.SimpleQueue(), queue.SimpleQueue()
            self.news = threading.Event()
            self._writes: dict[int, tuple[str, Any]] = {}
            self._abandoned: list[Any] = []
            self._handle_count, self._shipped, self._layers_seen = 0, {}, set()
            self.options = PushOptions()
            self._outbound, self._inbound = Outbound(lease_s=30, expect_s=30), Inbound(timeout_s=30)
            self._stepped, self._drafts, self.device_type = False, False, "cpu"
            self._push_writer_stop, self._push_writer_wake = threading.Event(), threading.Event()
            self.steps: list[LateEvent] = []

        def _device_event(self) -> LateEvent:
            self.steps.append(LateEvent())
            return self.steps[-1]

    rank = Rank()
    rank._submit(functools.partial(rank._outbound.connected, "D", True))
    thread = threading.Thread(target=rank._push_writer_loop, daemon=True)
    thread.start()
    yield rank
    for step in rank.steps:
        step.happened.set()
    rank._push_writer_stop.set()
    rank._push_writer_wake.set()
    thread.join(5)


def soon(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {SOON_S} s"
        time.sleep(0.001)


def register(nixl: Nixl, stream: str) -> None:
    nixl.arrived.put(wire.Register(stream, f"{stream}-decode", DECODE, [[7, 8]], 32, 30.0))


def begin(worker: Any, stream: str) -> None:
    worker._submit(functools.partial(worker._outbound.start, stream, 2, 32))


def step(worker: Any, *computed: Computed) -> None:
    metadata = PushMetadata()
    metadata.computed.extend(computed)
    worker.start_load_kv(metadata)
    worker.on_computed(metadata)


def test_a_finished_write_is_told_while_the_next_step_computes(worker: Any, nixl: Nixl) -> None:
    for stream in "ab":
        begin(worker, stream)
        register(nixl, stream)
    # Asynchronous scheduling: the step that computes b is launched before the one that computes a has ended.
    step(worker, Computed("a", 0, 0, ((1, 2),), closed=True))
    step(worker, Computed("b", 0, 0, ((3, 4),), closed=True))
    worker.steps[0].happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert len(nixl.posted) == 1
    worker.steps[1].happened.set()
    soon(lambda: (AGENT, wire.Landed("b-decode")) in nixl.sent, "the news that b has landed")


def test_registrations_and_withdrawals_are_answered_while_a_step_computes(worker: Any, nixl: Nixl) -> None:
    begin(worker, "a")
    register(nixl, "a")
    soon(lambda: worker._outbound.engines() == {"D"}, "the registration of a")
    step(worker, Computed("a", 0, 0, ((1, 2),), closed=True))
    soon(worker._events.empty, "the news of a step")
    nixl.arrived.put(wire.Unregister("a", "a-decode", DECODE))
    soon(lambda: (AGENT, wire.Gone("a-decode", "withdrawn by decode")) in nixl.sent, "the answer to a withdrawal")
    worker.steps[0].happened.set()
    begin(worker, "b")
    register(nixl, "b")
    step(worker, Computed("b", 0, 0, ((3, 4),), closed=True))
    worker.steps[1].happened.set()
    soon(lambda: (AGENT, wire.Landed("b-decode")) in nixl.sent, "the news that b has landed")
    assert len(nixl.posted) == 1  # nothing of a was written once decode had its answer


def test_a_whole_prompt_waits_for_no_step(worker: Any, nixl: Nixl) -> None:
    begin(worker, "a")
    register(nixl, "a")
    metadata = PushMetadata()
    metadata.computed.append(Computed("a", 0, 0, ((1, 2),), closed=True, whole=True))
    worker.start_load_kv(metadata)  # an earlier step has computed it; an unrelated one is about to run
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    worker.on_computed(metadata)
    assert not worker.steps and len(nixl.posted) == 1


def test_a_whole_prompt_waits_for_the_drafter(worker: Any, nixl: Nixl) -> None:
    worker._drafts = True
    begin(worker, "a")
    register(nixl, "a")
    metadata = PushMetadata()
    metadata.computed.append(Computed("a", 0, 0, ((1, 2),), closed=True, whole=True))
    worker.start_load_kv(metadata)
    assert len(worker.steps) == 1 and not nixl.posted
    worker.steps[0].happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
