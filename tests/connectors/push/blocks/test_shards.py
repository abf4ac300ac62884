"""Decode context parallelism: every token's KV lands at the rank and in the slot where vLLM looks for it."""

from __future__ import annotations

import importlib.util
import random
import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connectors.push.actions import Chunk
from connectors.push.blocks.chunks import Shard, pair_blocks
from connectors.push.wire import Endpoint, Landed, Register

pytestmark = pytest.mark.vllm


class Pointer:
    """Of a Triton kernel, into a tensor."""

    def __init__(self, memory: Any, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)


def slots(tokens: int, table: list[int], block_size: int, shard: Shard) -> list[int]:
    """Of each token of a request with this block table, -1 for those of other ranks: by vLLM's kernel for GPUs, run as
    Python on tensors."""
    torch = pytest.importorskip("torch")
    spec = importlib.util.find_spec("vllm.v1.worker.block_table")
    assert spec and spec.loader
    # A copy: who builds a configuration for CPUs replaces the kernel of the original.
    block_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(block_table)

    def load(pointer: Pointer, mask: Any = None, other: int = 0) -> Any:
        if mask is None:
            return pointer.memory[pointer.at]
        return torch.where(mask, pointer.memory[torch.where(mask, pointer.at, 0)], other)

    def store(pointer: Pointer, values: Any, mask: Any) -> None:
        pointer.memory[pointer.at[mask]] = values[mask]

    language = SimpleNamespace(
        program_id=lambda axis: 0, num_programs=lambda axis: 2, load=load, store=store,
        arange=torch.arange, where=torch.where, int64=torch.int64,
    )  # fmt: skip
    block_table.tl = language  # type: ignore[attr-defined]
    found = torch.full((tokens,), -2)
    block_table.ComputeSlotMappingKernel.kernel(
        tokens, tokens, Pointer(torch.tensor([0, tokens])), Pointer(torch.arange(tokens)), Pointer(torch.tensor(table)),
        len(table), Pointer(found), block_size, shard.size, shard.rank, block_size, -1, 64,
    )  # fmt: skip
    return found.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_lands_where_its_rank_looks_for_it(ranks: int, seed: int) -> None:
    rng, block_size = random.Random(seed), 4
    tokens = rng.randrange(1, 100)
    total, theirs = -(-tokens // block_size), -(-tokens // (block_size * ranks))
    mine, table = rng.sample(range(1, 200), total), rng.sample(range(1, 200), theirs)
    cached = rng.randrange(theirs)  # of decode's blocks
    cuts = [0, *sorted(rng.sample(range(1, total), min(3, total - 1))), total]
    chunks = [Chunk(start, (tuple(mine[start:end]),)) for start, end in zip(cuts, cuts[1:], strict=False)]
    held = {block: list(range(at * block_size, (at + 1) * block_size)) for at, block in enumerate(mine)}
    landed: set[int] = set()
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        memory: dict[int, list[int]] = {}
        for chunk in chunks:  # each in a WRITE of its own
            pairs = pair_blocks([chunk], total, table[cached:], 0, shard)
            memory |= {block: held[own] for own, block in zip(*pairs, strict=True)}
        assert sorted(memory) == sorted(shard.held(total, table[cached:])), "and into no block in which it has no token"
        for token, slot in enumerate(slots(tokens, table, block_size, shard)):
            if slot >= 0 and token >= cached * block_size * ranks:
                assert memory[slot // block_size][slot % block_size] == token
                landed.add(token)
    assert landed == set(range(cached * block_size * ranks, tokens))


@pytest.mark.parametrize(
    ("prefill", "decode", "found"),
    [
        ((0, 1, 1), (2, 2, [0, 1]), {0: Shard(0, 2), 1: Shard(1, 2)}),
        ((1, 2, 1), (4, 4, [2, 3]), {2: Shard(2, 4), 3: Shard(3, 4)}),
        ((1, 2, 2), (2, 2, [1]), {1: Shard()}),  # both ends share prompts alike
        ((0, 2, 2), (2, 1, [0]), {}),
        ((0, 2, 1), (4, 1, [0, 1]), {}),  # unequal ranks whose heads differ
    ],
)
def test_what_a_rank_writes_to(
    prefill: tuple[int, int, int], decode: tuple[int, int, list[int]], found: dict[int, Shard]
) -> None:
    """`prefill`: a rank, how many there are, and how many share each prompt. `decode`: the last two, and to which of
    them that rank is connected."""
    push = pytest.importorskip("support_push")
    from connectors.push import writer
    from connectors.push.actions import Post

    rank, ranks, shared = prefill
    worker = push.FakeWorker(rank, ranks)
    worker.dcp_size, worker.dcp_rank = shared, rank % shared
    worker.know("D", decode[0], decode[2], shards=decode[1])
    assert writer.shards(worker, "D") == found
    if shared != decode[1]:
        with pytest.raises(writer.LayoutError, match=f"{decode[1]} ranks of decode share .*, and {shared} of prefill"):
            writer.post_whole(worker, Post("s", ORDER, (Chunk(0, ((1,),), whole=True),), 1))


TOTAL, RANKS = 10, 4  # blocks of the prompt, the last one not full; ranks of decode
ORDER = Register("s", "r", Endpoint("D", "host", 1, RANKS), [[21, 20]], 16 * TOTAL - 11)  # its first block is cached


class Crc:
    """Of a worker's blocks, as `memory` has them by number."""

    ready = True

    def __init__(self, worker: Any, blocks: list[list[int]]) -> None:
        self.value = zlib.crc32(b"".join(worker.memory[block] for group in blocks for block in group))


@pytest.mark.parametrize("corrupt", [None, 0, 3])
def test_each_rank_of_decode_compares_what_it_has_got(monkeypatch: pytest.MonkeyPatch, corrupt: int | None) -> None:
    """One rank prefills for four that share each prompt. The last two have no part of the prompt's last block."""
    push = pytest.importorskip("support_push")
    from connectors.push.blocks import verify
    from connectors.push.metadata import Computed, Finished, Reserved, Started

    monkeypatch.setattr(verify, "Checksum", Crc)
    prefill = push.FakeWorker(0, 1)
    prefill.know("D", RANKS, list(range(RANKS)), shards=RANKS)
    prefill._shipments = verify.Shipments()
    prefill.memory = {block: bytes([block]) * 16 for block in range(1, TOTAL + 1)}
    decodes = []
    for rank in range(RANKS):
        decode = push.FakeWorker(rank, RANKS)
        decode.dcp_size, decode.dcp_rank, decode.memory = RANKS, rank, {20: b"old", 21: b"old"}
        decode.know("P2", 1, [0])
        decode.step(reserved=[Reserved(ORDER, Endpoint("P2", "host", 2, 1))])
        decodes.append(decode)
        prefill.hear(f"D/{rank}", msgspec.structs.replace(ORDER, valid_s=60.0, epoch=1))
    blocks = tuple(range(1, TOTAL + 1))
    prefill.step(
        started=[Started("s", TOTAL, ORDER.prompt_tokens)], computed=[Computed("s", 0, 0, (blocks[:6],), closed=False)]
    )
    prefill.step(computed=[Computed("s", 0, 6, (blocks[6:],), closed=True)], finished=[Finished("s", True, True)])
    nixl = prefill.nixl_wrapper
    for side, (mine, theirs) in zip(nixl.sides, nixl.posted, strict=True):
        memory = decodes[int(side.partition("/")[2])].memory
        memory |= {block: prefill.memory[own] for own, block in zip(mine.tolist(), theirs.tolist(), strict=True)}
    found = [[decode.memory[21][0], decode.memory[20][0]] for decode in decodes]
    assert found == [[5, 9], [6, 10], [7, b"o"[0]], [8, b"o"[0]]]
    if corrupt is not None:
        decodes[corrupt].memory[21] = b"bad"
    prefill.end_writes()
    landed = [(agent, message) for agent, message in nixl.sent if isinstance(message, Landed)]
    assert sorted(agent for agent, _ in landed) == [f"D/{rank}" for rank in range(RANKS)]
    for agent, message in landed:
        rank = int(agent.partition("/")[2])
        decodes[rank].hear("P2/0", message)
        results = decodes[rank].get_transfer_results()
        assert (results.finished_recving, bool(results.failed_recving)) == ({"r"}, rank == corrupt)
