"""Two engines' schedulers, vLLM's own with this connector's half, over symbolic KV: each slot of a block holds a mark
of the tokens up to its position and of their adapter. No step may read another mark than its request's, and in the end
all blocks are free. What the engines compute and send is played here, in random order, with aborts and failures; with
asynchronous scheduling a step is begun while the one before waits for the device, and WRITEs wait for neither."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support_vllm import scheduler_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK, STEPS, SETTLED_AFTER = 16, 120, 3000
RECEIVE, SEND = {"do_remote_prefill": True, "do_remote_decode": False}, {"do_remote_decode": True}


def marks(tokens: list[int], adapter: int) -> list[int]:
    """Of each position: what its KV depends on."""
    return list(itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=adapter))[1:]


def sampled_after(tokens: list[int]) -> int:
    return 3 + abs(hash(tuple(tokens))) % 9


class Stream:
    """What a prefill engine sends of one request."""

    def __init__(self, total: int) -> None:
        self.total, self.epoch, self.pending = total, 0, list[Any]()
        self.closed = self.given_up = self.landed = False
        self.ended: Any = None

    def preempted(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.pending, self.closed = epoch, [], False


@dataclass
class Step:
    """One that was begun. `work`: key, known tokens, first and last position, block tables, whether it samples."""

    scheduled: Any
    connector_output: Any
    work: list[tuple[str, list[int], int, int, list[list[int]], bool]]
    sampled: list[list[int]] | None = None  # once the device has computed it


class Engine:
    def __init__(self, name: str, world: World, folder: Path, blocks: int, window: int | None, ahead: int) -> None:
        from vllm.config import KVTransferConfig

        kv = KVTransferConfig(
            kv_connector="PushConnector",
            kv_connector_module_path="connectors.push.connector",
            engine_id=name,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"transfer": "auto", "kv_transfer_timeout_s": 30.0},
        )
        limits = {"max_num_batched_tokens": 96, "max_num_seqs": 8, "kv_transfer_config": kv}
        self.name, self.world, self.windows = name, world, [None, window][: 1 if window is None else 2]
        self.scheduler = scheduler_of(folder, blocks, window, ahead=ahead > 1, **limits)
        self.ahead, self.begun = ahead, collections.deque[Step]()
        self.connector = self.scheduler.connector
        self.slots: dict[int, list[int | None]] = collections.defaultdict(lambda: [None] * BLOCK)
        self.streams: dict[str, Stream] = {}
        self.awaited: dict[str, Any] = {}  # what was registered with the other engine, by request
        self.withdrawn = set[str]()
        self.sent, self.received, self.failed, self.unpushed, self.unreceived = (set[str]() for _ in range(5))

    def add(self, key: str, prompt: list[int], adapter: int, max_tokens: int, params: dict[str, Any] | None) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        lora = LoRARequest(f"a{adapter}", adapter, f"/a{adapter}") if adapter else None
        at = self.world.random.random()
        request = Request(key, prompt, sampling, None, at, lora_request=lora, block_hasher=self.world.hasher)
        self.world.adapters[key] = adapter
        self.scheduler.add_request(request)

    def abort(self) -> None:
        from vllm.v1.request import RequestStatus

        if live := [key for key, request in self.scheduler.requests.items() if not request.is_finished()]:
            key = self.world.random.choice(live)
            self.scheduler.finish_requests(key, RequestStatus.FINISHED_ABORTED)
            self.connector.connector_scheduler.drop([key])

    @property
    def busy(self) -> bool:
        return bool(self.begun) or self.scheduler.has_requests()

    def step(self) -> None:
        if len(self.begun) < self.ahead and self.scheduler.has_requests():
            self._schedule()
        if self.ahead == 1 or self.world.random.random() < 0.4:
            self._finish(self.begun.popleft())
        elif self.world.random.random() < 0.3:
            self._execute(self.begun[0])

    def _schedule(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        from connectors.push.metadata import RankReport

        step, requests = self.scheduler.schedule(), self.scheduler.requests
        self.world.preempted += len(step.preempted_req_ids or ())
        if step.kv_connector_metadata is not None:
            self._begin(step.kv_connector_metadata)
        work = []
        for key, count in step.num_scheduled_tokens.items():
            request, tables = requests[key], self.scheduler.kv_cache_manager.get_block_ids(key)
            end = request.num_computed_tokens  # vLLM counts what it has scheduled
            tokens, samples = list(request.all_token_ids), not request.is_prefill_chunk
            work.append((key, tokens, end - count, end, [list(table) for table in tables], samples))
        kv = KVConnectorOutput(
            finished_sending=self.sent or None,
            finished_recving=(self.received | self.failed) or None,
            failed_recving=set(self.failed),
            kv_connector_worker_meta=RankReport(frozenset(self.unreceived), frozenset(self.unpushed), 0, {}),
        )
        self.sent, self.received, self.failed, self.unpushed, self.unreceived = (set[str]() for _ in range(5))
        self.begun.append(Step(step, kv, work))

    def _execute(self, step: Step) -> None:
        if step.sampled is not None:
            return
        for block in step.scheduled.new_block_ids_to_zero or ():
            self.slots.pop(block, None)
        step.sampled = []
        for key, tokens, begin, end, tables, samples in step.work:
            while len(tokens) < end:  # steps that had not ended when this one was begun have sampled these
                tokens.append(sampled_after(tokens))
            self._compute(key, tokens, begin, end, tables)
            step.sampled.append([sampled_after(tokens[:end])] if samples else [])
        meta = step.scheduled.kv_connector_metadata
        for computed in meta.computed if meta is not None else ():
            self._computed(computed)

    def _finish(self, step: Step) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self._execute(step)
        ids = [key for key, *_ in step.work]
        index = {key: at for at, key in enumerate(ids)}
        output = ModelRunnerOutput(
            ids, index, sampled_token_ids=step.sampled, kv_connector_output=step.connector_output
        )
        self.scheduler.update_from_output(step.scheduled, output)

    def _begin(self, meta: Any) -> None:
        for lost in meta.preempted:
            if lost.key in self.streams:
                self.streams[lost.key].preempted(lost.epoch)
        for started in meta.started:
            self.streams[started.key] = Stream(started.total_blocks)
        for computed in meta.earlier:
            self._computed(computed)
        for reserved in meta.reserved:
            self.awaited[reserved.order.request] = reserved
        for unused in meta.unused:
            if stream := self.world.engines[unused.source.engine_id].streams.get(unused.order.stream):
                stream.given_up = True
        self.withdrawn |= meta.withdrawn.keys() & self.awaited.keys()
        for finished in meta.finished:
            if (stream := self.streams.get(finished.key)) is None:
                self.sent |= {finished.key} if finished.held else set()
                continue
            stream.ended, stream.given_up = finished, stream.given_up or not finished.ok
        for key in meta.unwanted:
            if key in self.streams:
                self.streams[key].given_up = True

    def _computed(self, computed: Any) -> None:
        from connectors.push.actions import Chunk

        stream = self.streams.get(computed.key)
        if stream is not None and computed.epoch >= stream.epoch:
            stream.preempted(computed.epoch)
            stream.pending.append(Chunk(computed.start, computed.blocks, whole=computed.whole))
            stream.closed |= computed.closed

    def _compute(self, key: str, tokens: list[int], begin: int, end: int, tables: list[list[int]]) -> None:
        known = marks(tokens, self.world.adapters[key])
        for window, table in zip(self.windows, tables, strict=True):
            for at in range(0 if window is None else max(0, begin - window + 1), begin):
                held = self.slots[table[at // BLOCK]][at % BLOCK]
                assert table[at // BLOCK] and held == known[at], f"{self.name}: {key} reads {at} of {begin}: {held}"
            for at in range(begin, end):
                if table[at // BLOCK]:  # else the window has passed it
                    self.slots[table[at // BLOCK]][at % BLOCK] = known[at]


class World:
    def __init__(self, seed: int, hasher: Callable[..., Any], *engine: Any) -> None:
        self.random, self.hasher, self.adapters = random.Random(seed), hasher, dict[str, int]()
        self.engines = {name: Engine(name, self, *engine) for name in "AB"}
        self.numbers, self.landed, self.preempted = itertools.count(), 0, 0
        self.prefixes = [[self.random.randrange(60, 500) for _ in range(length)] for length in (48, 100, 160)]

    def act(self) -> None:
        from connectors.push.wire import Endpoint, Source

        draw, key = self.random, f"r{next(self.numbers)}"
        prefill, decode = draw.sample(list(self.engines.values()), 2)
        prompt = draw.choice([*self.prefixes, []]) + [
            draw.randrange(60, 500) for _ in range(draw.choice([1, 16, 65, 140]))
        ]
        adapter, tokens = draw.choice([0, 0, 1, 2]), draw.choice([1, 2, 5, 40])
        match draw.choice(["remote", "remote", "local", "abort"]):
            case "remote":
                source = msgspec.to_builtins(Source(Endpoint(prefill.name, "h", 1), f"{key}p"))
                decode.add(f"{key}d", prompt, adapter, tokens, RECEIVE | {"kv_source": source})
                if draw.random() < 0.6:  # else it has crashed
                    prefill.add(f"{key}p", prompt, adapter, 1, SEND | {"do_remote_prefill": False})
            case "local":
                decode.add(f"{key}l", prompt, adapter, tokens, None)
            case "abort":
                decode.abort()

    def transfer(self) -> None:
        for decode in self.engines.values():
            for key, reserved in list(decode.awaited.items()):
                prefill = self.engines[reserved.source.engine_id]
                self._receive(decode, prefill, key, reserved.order)
        for prefill in self.engines.values():
            for key, stream in list(prefill.streams.items()):
                if (stream.landed or stream.given_up or self.random.random() < 0.01) and stream.ended is not None:
                    del prefill.streams[key]
                    prefill.unpushed |= set() if stream.landed else {key}
                    prefill.sent |= {key} if stream.ended.held else set()

    def _receive(self, decode: Engine, prefill: Engine, key: str, order: Any) -> None:
        stream, chance = prefill.streams.get(order.stream), self.random.random()
        if stream is None or stream.given_up or key in decode.withdrawn or chance < 0.01:
            if stream is not None and stream.pending and not stream.given_up and stream.ended is None:
                self._write(decode, prefill, stream, order)  # lands after all the same
            if chance < (0.03 if stream is None else 0.5):
                if stream is not None:
                    stream.given_up = True
                decode.withdrawn.discard(key)
                del decode.awaited[key]
                decode.failed.add(key)
                decode.unreceived.add(key)
            return
        if stream.pending and chance < 0.6:
            self._write(decode, prefill, stream, order)
        if stream.closed and not stream.pending and stream.ended is not None and not stream.landed:
            stream.landed = True
            del decode.awaited[key]
            decode.received.add(key)
            self.landed += 1

    def _write(self, decode: Engine, prefill: Engine, stream: Stream, order: Any) -> None:
        from connectors.push.actions import Post
        from connectors.push.blocks.chunks import pairs_of

        count = self.random.randrange(1, len(stream.pending) + 1)
        for chunk in stream.pending[:count]:
            for ours, theirs in pairs_of(Post(order.stream, order, (chunk,), stream.total)):
                for block, into in zip(ours, theirs, strict=True):
                    decode.slots[into] = list(prefill.slots[block])
        del stream.pending[:count]

    def run(self) -> None:
        for turn in range(STEPS + SETTLED_AFTER):
            if turn < STEPS and self.random.random() < 0.8:
                self.act()
            elif turn >= STEPS and not any(engine.busy for engine in self.engines.values()):
                break
            for engine in self.engines.values():
                if engine.busy and self.random.random() < 0.85:
                    engine.step()
            self.transfer()
        for engine in self.engines.values():
            left = {key: str(request.status) for key, request in engine.scheduler.requests.items()}
            pool = engine.scheduler.kv_cache_manager.block_pool
            assert (left, pool.get_num_free_blocks()) == ({}, pool.num_gpu_blocks - 1)


@pytest.mark.parametrize(
    ("blocks", "window", "ahead"),
    [(30, None, 1), (30, 40, 1), (28, None, 2), (44, 40, 2)],
    ids=["short of memory", "windows", "asynchronous", "asynchronous with windows"],
)
def test_no_step_reads_others_kv_and_all_blocks_are_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, window: int | None, ahead: int
) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler

    from workers.vllm_engine import patches

    for name in ("_preempt_request", "_update_from_kv_xfer_finished"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))  # given back afterwards
    patches.cache_only_what_is_computed()
    patches.free_what_did_not_come()
    init_none_hash(sha256)
    landed = preempted = 0
    for seed in range(8):
        hasher = get_request_block_hasher(BLOCK, sha256)
        world = World(seed, hasher, tmp_path / "tiny", blocks, window, ahead)
        world.run()
        landed, preempted = landed + world.landed, preempted + world.preempted
    assert landed > 10 and preempted > 10, "the worlds try what they are for"
