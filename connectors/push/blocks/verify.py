"""`kv.verify`: checksums of what was shipped and of what arrived, over every kind of KV of a model.

Between engines whose blocks are alike (`writer.shards`); others cut blocks apart. On a GPU blocks are copied on a
stream of their own, so that neither the engine nor the writer waits for a copy.
"""

from __future__ import annotations

import functools
import queue
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import _SHARED_REGION_GROUP_ID
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.logger import init_logger

from connectors.push import actions as do
from connectors.push import wire
from connectors.push.actions import NO_BLOCK, Post
from connectors.push.blocks.chunks import Shard, pairs_of
from connectors.push.inbound import Inbound
from connectors.push.metadata import PushStats
from connectors.push.writer import is_state, kernel_blocks, shards

logger = init_logger("vllm.pd.push")

Event = Callable[[float], Iterable[Any]]
Record = Callable[[PushStats], None]


class Shipments:
    """Which local block went into which block of a rank of decode, by request and KV cache group, until the transfer
    ends."""

    def __init__(self) -> None:
        # request -> stream, and by rank theirs -> mine by group
        self._of: dict[str, tuple[str, dict[int, list[dict[int, int]]]]] = {}

    def add(self, worker: NixlPushConnectorWorker, post: Post) -> None:
        """Nothing where the two ends' blocks cannot be compared."""
        order = post.order
        for rank, shard in shards(worker, order.decode.engine_id).items():
            _, ranks = self._of.setdefault(order.request, (post.stream, {}))
            groups = ranks.setdefault(rank, [{} for _ in order.blocks])
            for at, (mine, theirs) in enumerate(pairs_of(post, shard)):
                held = set(theirs if worker.dcp_size == 1 else held_here(worker, order)[at])
                groups[at].update({block: own for own, block in zip(mine, theirs, strict=True) if block in held})

    def __bool__(self) -> bool:
        return bool(self._of)

    def ended_by(self, message: wire.Message) -> bool:
        """Whether this tells decode that nothing more comes of what was shipped: `Computing` says that more will."""
        return message.request in self._of and not isinstance(message, wire.Computing)

    def take(self, request: str) -> tuple[str, dict[int, list[list[int]]]]:
        """The stream, and by rank its local blocks in the order of decode's."""
        stream, ranks = self._of.pop(request)
        return stream, {
            rank: [[mine for theirs, mine in sorted(group.items()) if theirs != NO_BLOCK] for group in groups]
            for rank, groups in ranks.items()
        }

    def end(self, stream: str) -> None:
        self._of = {request: kept for request, kept in self._of.items() if kept[0] != stream}


def held_here(worker: NixlPushConnectorWorker, order: wire.Register) -> list[list[int]]:
    """By KV cache group those of decode's blocks in which a rank like this one has KV, in the order in which
    `Shipments.take` names prefill's."""
    block_size = worker.block_size * worker._physical_blocks_per_logical_kv_block
    shard, total = Shard(worker.dcp_rank, worker.dcp_size), -(-order.prompt_tokens // block_size)
    held = (shard.held(total, group) for group in order.blocks)
    return [sorted(block for block in group if block != NO_BLOCK) for group in held]


class Checksum:
    """CRC-32 of these logical blocks, by KV cache group, in all layers. `value` counts once it is `ready`."""

    def __init__(self, worker: NixlPushConnectorWorker, blocks: Sequence[Sequence[int]]) -> None:
        self._copied = None
        if worker.device_type == "cuda":
            stream = torch.cuda.Stream(worker.device_id)
            with torch.cuda.stream(stream):
                self._copies = [
                    torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
                    for part in _parts(worker, blocks)
                ]
            self._copied = stream.record_event()
        else:
            self._copies = list(_parts(worker, blocks))

    @property
    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())

    @property
    def value(self) -> int:
        crc = 0
        for copy in self._copies:
            crc = zlib.crc32(copy.numpy(), crc)
        return crc


def _parts(worker: Any, blocks: Sequence[Sequence[int]]) -> Iterable[torch.Tensor]:
    """Copies of the bytes that NIXL transfers: of each region, the blocks of the groups that it holds."""
    ratio = worker._physical_blocks_per_logical_kv_block
    addresses = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    for region, name in enumerate(worker.region_names):
        cache = worker.device_kv_caches[name]
        memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        start = addresses[region] - memory.data_ptr()
        for group, ids in enumerate(blocks):
            if not ids or worker.region_group_ids[region] not in (group, _SHARED_REGION_GROUP_ID):
                continue
            stride, length = worker.block_stride_per_layer[region], worker.block_len_per_layer[region]
            if is_state(worker, group):  # one per logical block, and padding
                rows, stride, length = np.asarray(ids), stride * ratio, sum(worker._mamba_ssm_size)
            else:
                rows = kernel_blocks(ids, ratio)
            all_rows = memory.as_strided(((len(memory) - start - length) // stride + 1, length), (stride, 1), start)
            yield all_rows[torch.as_tensor(rows, device=cache.device)]


class Verifying(NixlPushConnectorWorker):
    """What a worker does for it: `Landed` carries a checksum, and counts once decode has compared it. The writer thread
    waits for none."""

    _inbound: Inbound
    _records: queue.SimpleQueue[Record]
    _shipments: Shipments | None  # None: nothing is verified
    # Decode requests whose KV is here, while its checksum is computed: the stream, and the actions that wait for it.
    _signing: dict[str, tuple[str, list[Any]]]
    _checks: list[tuple[Checksum, Callable[[int], None]]]

    def _run(self, event: Event) -> None:
        raise NotImplementedError

    def _carry_out_all(self, actions: list[Any]) -> None:
        raise NotImplementedError

    def _agents(self, engine: str) -> dict[tuple[int, int], str]:
        raise NotImplementedError

    def _check(self, blocks: list[list[int]], then: Callable[[int], None]) -> None:
        self._checks.append((Checksum(self, blocks), then))

    def _is_put_off(self, action: Any, rest: list[Any]) -> bool:
        """Whether `action` and `rest`, which may give blocks back, are carried out once their checksum is known."""
        if isinstance(action, do.Release):
            for stream, later in self._signing.values():
                if stream == action.stream:  # this prefill has ended since its KV landed
                    later += [action, *rest]
                    return True
        if self._shipments and isinstance(action, do.Tell) and self._shipments.ended_by(action.message):
            self._sign(action, self._shipments, rest)
            return True
        return False

    def _sign(self, tell: do.Tell, shipments: Shipments, rest: list[Any]) -> None:
        """Says `Landed` with the checksum of what was shipped to each rank, and then does `rest`."""
        request = tell.message.request
        stream, shipped = shipments.take(request)
        if not isinstance(tell.message, wire.Landed):
            self._carry_out_all([tell, *rest])
            return
        agents = self._agents(tell.engine)
        signed: list[do.Tell] = []

        def sign(rank: int, digest: int) -> None:
            peer = agents.get((0, rank), tell.peer)
            for_all = peer is None and len(shipped) > 1  # the connection was lost meanwhile: it is told unsigned
            signed.append(do.Tell(tell.engine, wire.Landed(request, None if for_all else digest), peer))
            if len(signed) == len(shipped):
                self._carry_out_all([*signed, *rest, *self._signing.pop(request)[1]])

        self._signing[request] = stream, []
        try:
            for rank, blocks in shipped.items():
                self._check(blocks, functools.partial(sign, rank))
        except Exception:
            del self._signing[request]  # decode asks again, and hears it unsigned
            raise

    def _arriving(self, request: str) -> list[list[int]]:
        """The blocks of this request into which this rank gets KV; empty for an unknown request."""
        order = self._inbound.order_of(request)
        return held_here(self, order) if order is not None else []

    def _on_checksum(
        self, request: str, agent: str, expected: int, blocks: list[list[int]], found: int, now: float
    ) -> Iterable[Any]:
        if self._arriving(request) != blocks:
            return ()  # it was given up, and its blocks may belong to other requests by now
        if found == expected:
            self._records.put(lambda s: s.record(PushStats.VERIFIED))
            return self._inbound.landed(request, agent, now)
        logger.error("KV of %s is corrupt", request)
        self._records.put(lambda s: s.record(PushStats.CORRUPT))
        return self._inbound.gone(request, agent, "the KV that came differs from what was sent", now)

    def _finish_checks(self) -> None:
        for check in [check for check in self._checks if check[0].ready]:
            self._checks.remove(check)  # each by itself: if one raises, the others' blocks are given back all the same
            checksum, then = check
            then(checksum.value)
