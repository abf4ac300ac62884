"""A `PushWorker` on a fake NIXL: vLLM's own plans for unequal ranks, without an engine, memory or network."""

import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connectors.push import wire
from connectors.push.metadata import PushMetadata, PushStats
from connectors.push.worker import PushWorker

BLOCKS = 100  # of every engine
BLOCK_TOKENS = 16
KV_HEADS = 8


class FakeNixl:
    def __init__(self) -> None:
        self.sent: list[tuple[str, wire.Message]] = []
        self.heard: dict[str, list[bytes]] = {}
        self.registered: dict[str, list[wire.Register]] = defaultdict(list)  # by agent, what was heard
        self.writes: dict[int, str] = {}  # handle -> state
        self.posted: list[tuple[Any, Any]] = []  # descriptors here and there, of each
        self.sides: list[str] = []  # and whose memory
        self.broken: set[str] = set()  # agents, and descriptor lists of their memory
        self.removed: list[str] = []

    def make_prepped_xfer(self, operation: str, mine: Any, my_ids: Any, side: str, ids: Any, notif_msg: bytes = b""):
        if side in self.broken:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.writes[len(self.writes) + 1] = "PROC"
        self.posted.append((my_ids, ids))
        self.sides.append(side)
        return len(self.writes)

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        return self.writes[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None: ...

    def release_dlist_handle(self, handle: Any) -> None: ...

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        if agent in self.broken:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        message = wire.parse(notif_msg)
        if isinstance(message, wire.Hello):  # decode registers again
            again = [msgspec.structs.replace(order, epoch=message.epoch) for order in self.registered[agent]]
            self.heard.setdefault(agent, []).extend(wire.pack(order) for order in again)
            return
        self.registered[agent] = [order for order in self.registered[agent] if order.request != message.request]
        self.sent.append((agent, message))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        heard, self.heard = self.heard, {}
        return heard

    def remove_remote_agent(self, agent: str) -> None:
        self.removed.append(agent)

    def told(self) -> list[wire.Message]:
        """What was sent since the last call."""
        told, self.sent = [message for _, message in self.sent], []
        return told


_CONFIG = {
    "kv_transfer_config": SimpleNamespace(get_from_extra_config=lambda key, default: default),
    "speculative_config": None,
    "parallel_config": SimpleNamespace(use_ubatching=False),
}


def _init_without_an_engine(self: Any, config: Any, engine_id: str, kv_cache_config: Any) -> None:
    """What vLLM's constructor leaves behind, without a model, a device and NIXL."""
    rank, tp_size = config.rank, config.tp_size
    self.engine_id, self.world_size, self.tp_rank, self.pp_size = "P", tp_size, rank, 1
    self.block_size, self._physical_blocks_per_logical_kv_block = BLOCK_TOKENS, 1
    self.dcp_size, self.dcp_rank = 1, 0
    self.use_mla = self._has_mamba = self._is_csa_linear = self.use_host_buffer = False
    self._uses_region_group_mapping = False
    self._group_spec_types = (FullAttentionSpec,)
    self._transfer_layer_group_ids, self._ssm_region_indices, self._conv_decomp = (), [], None
    self.num_regions, self.block_len_per_layer, self.region_group_ids = 1, [1], [0]
    self.kv_cache_config = SimpleNamespace(transfer_groups=[0])
    self.transfer_topo = TransferTopology(
        tp_rank=rank,
        tp_size=tp_size,
        block_size=BLOCK_TOKENS,
        engine_id="P",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=KV_HEADS,
        attn_backends=[],
    )
    self.tp_mappings, self.dst_xfer_side_handles = {}, defaultdict(dict)
    self.dst_num_blocks, self.dst_region_num_blocks = {"P": BLOCKS}, {"P": [BLOCKS]}
    self.dst_region_group_ids, self.dst_uses_region_group_mapping = {}, {}
    self.dst_region_mem_types, self.kv_caches_base_addr = {}, {}
    self.src_xfer_handles_by_block_size, self.src_xfer_handles_by_tp_ratio = {BLOCK_TOKENS: "mine"}, {}
    self._sending_transfers, self._send_failures = defaultdict(list), set()
    self._sending_transfers_lock, self._handshake_lock = threading.Lock(), threading.RLock()
    self._recving_metadata, self._remote_agents, self._engine_by_address, self._engine_last_active = {}, {}, {}, {}
    self._engine_clock_offset, self._failed_remote_engines, self._invalid_remote_engines = {}, set(), set()
    self._engine_ttl, self.device_type = 0.0, "cpu"
    self._push_writer_stop = threading.Event()
    self._push_writer_thread = None
    self.nixl_wrapper, self.xfer_stats = FakeNixl(), PushStats()
    self._handshake_initiation_executor = ThreadPoolExecutor(1)
    self._handshake_futures = {}


class FakeWorker(PushWorker):
    """Rank `rank` of engine "P". `handshakes` are the answers to come: an error, or None for a good one."""

    def __init__(self, rank: int, tp_size: int) -> None:
        self.handshakes: list[Exception | None] = []
        with patch.object(NixlPushConnectorWorker, "__init__", _init_without_an_engine):
            super().__init__(SimpleNamespace(rank=rank, tp_size=tp_size, **_CONFIG), "P", None)
        self._push_writer_wake.wait = lambda timeout: self._push_writer_stop.set()

    def __del__(self) -> None: ...

    def turn(self) -> None:
        """One turn of the writer thread."""
        self._push_writer_stop.clear()
        self._push_writer_loop()
        if self.nixl_wrapper.heard:
            self.turn()

    def step(self, **news: Any) -> None:
        """An engine step with this metadata, and what follows on the writer thread."""
        metadata = PushMetadata()
        for name, values in news.items():
            setattr(metadata, name, values)
        self.start_load_kv(metadata)
        self.on_computed(metadata)
        self.turn()

    def hear(self, agent: str, *messages: wire.Message) -> None:
        self.nixl_wrapper.heard[agent] = [wire.pack(message) for message in messages]
        self.nixl_wrapper.registered[agent] += [order for order in messages if isinstance(order, wire.Register)]
        self.turn()

    def end_writes(self, state: str = "DONE") -> None:
        for handle in self.nixl_wrapper.writes:
            self.nixl_wrapper.writes[handle] = state
        self.turn()  # they are seen to have ended
        self.turn()  # and that follows

    def know(self, engine: str, tp_size: int, ranks: list[int], shards: int = 1) -> None:
        """A full handshake with these ranks of `engine` has succeeded. So many of them share each prompt."""
        topology = self.transfer_topo
        topology.register_remote_engine(
            engine,
            EngineTransferInfo(
                remote_tp_size=tp_size,
                remote_block_size=BLOCK_TOKENS,
                remote_block_len=1,
                remote_physical_blocks_per_logical=1,
                remote_dcp_size=shards,
            ),
        )
        self.tp_mappings[engine] = compute_tp_mapping(topology, tp_size, self._group_spec_types)
        self.dst_xfer_side_handles[engine] = {rank: f"{engine}/{rank}" for rank in ranks}
        self.dst_num_blocks[engine], self.dst_region_num_blocks[engine] = BLOCKS, [BLOCKS]
        self.dst_region_group_ids[engine], self.dst_uses_region_group_mapping[engine] = [0], False
        self.src_xfer_handles_by_tp_ratio[topology.tp_ratio(tp_size), BLOCK_TOKENS] = [f"mine-{i}" for i in ranks]
        self._remote_agents[engine] = {(0, rank): f"{engine}/{rank}" for rank in ranks}
        self._engine_last_active[engine] = time.perf_counter()

    def _ensure_handshake(self, engine: str, *args: Any, **options: Any) -> Future[Any] | None:
        self._evict_stale_engines()  # as vLLM's does
        if engine in self._remote_agents:
            return None
        answer: Future[Any] = Future()
        error = self.handshakes.pop(0)
        if error is not None:
            answer.set_exception(error)
        else:
            self.know(engine, args[2], list(range(args[2])) if args[2] > self.world_size else [self.tp_rank])
            self.nixl_wrapper.broken -= set(self._remote_agents[engine].values())
            answer.set_result(None)
        return answer
