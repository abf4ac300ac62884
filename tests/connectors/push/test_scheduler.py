"""The scheduler half without an engine: what it tells the worker half of truncated and of preempted prefills."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from connectors.push import wire

pytestmark = pytest.mark.vllm

SOURCE = {"endpoint": {"engine_id": "P", "host": "host", "port": 1}, "key": "x"}


STATE = "state"


def scheduler(
    *,
    mamba: bool = False,
    stages: int = 1,
    windows: tuple[int | str | None, ...] = (None,),
    lookahead: int = 0,
    shards: int = 1,
) -> Any:
    """`windows`: of each KV cache group; None for one that attends to everything, STATE for a recurrent one, with a
    scratch block for speculation. `lookahead`: tokens of the prompt that a drafter reads ahead. `shards`: how many
    ranks share each block."""
    pytest.importorskip("vllm")  # takes seconds
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    from connectors.push.scheduler import PushScheduler

    def init_without_an_engine(self: Any, config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self.engine_id, self.block_size, self.vllm_config = engine_id, 16, config
        self.side_channel_host, self.side_channel_port = "host", 1
        self._is_hma_required = self._has_mamba = mamba or STATE in windows
        self._bounded_replay = False
        self.kv_cache_config = kv_cache_config
        self.get_exchange_clipped_blocks = lambda blocks: blocks

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda key, default: default),
        parallel_config=SimpleNamespace(
            use_ubatching=False,
            tensor_parallel_size=shards,
            pipeline_parallel_size=stages,
            decode_context_parallel_size=shards,
        ),
        num_prefill_lookahead_tokens=lookahead,
    )
    layout = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    made = {None: FullAttentionSpec(**layout)}
    made[STATE] = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,), num_speculative_blocks=1)
    specs = [made.get(it) or SlidingWindowSpec(**layout, sliding_window=it) for it in windows]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    caches = SimpleNamespace(transfer_groups=groups, kv_cache_groups=groups)
    with patch.object(NixlPushConnectorScheduler, "__init__", init_without_an_engine):
        return PushScheduler(config, "E", caches)


class Request(SimpleNamespace):
    def __init__(self, tokens: int, **params: Any) -> None:
        super().__init__(
            request_id="x",
            kv_transfer_params=params,
            prompt_token_ids=list(range(tokens)),
            prompt_embeds=None,
            _all_token_ids=list(range(tokens)),
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            num_preemptions=0,
            max_tokens=1,
            status=None,
        )

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


def prefilling(tokens: int, **engine: Any) -> tuple[Any, Request]:
    """A prefill scheduler, and a request that it has begun."""
    prefill, request = scheduler(**engine), Request(tokens, do_remote_decode=True)
    prefill.on_new_request(request)
    prefill.update_state_after_alloc(request, None, 0)
    return prefill, request


def step(prefill: Any, tokens: int, *blocks: list[int], preempted: set[str] | None = None) -> Any:
    """What the workers are told with a step that computes so many tokens of x. `blocks`: which it has in each group."""
    state = SimpleNamespace(get_block_ids=lambda key: blocks)
    scheduled = {"x": tokens} if tokens else {}
    return prefill.build_connector_meta(
        SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=scheduled, preempted_req_ids=preempted)
    )


def ended(prefill: Any, request: Request, *blocks: int) -> tuple[bool, Any]:
    """Whether these are kept, and what is said of it."""
    from vllm.v1.request import RequestStatus

    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    found: tuple[bool, Any] = prefill.request_finished(request, (list(blocks),))
    return found


def reserved(decode: Any, tokens: int, *blocks: list[int]) -> wire.Register:
    """For what is to come of a prompt, in each group."""
    request = Request(tokens, do_remote_prefill=True, kv_source=SOURCE)
    decode.on_new_request(request)
    loaded, _ = decode.get_num_new_matched_tokens(request, 0)
    allocated = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: list(blocks))
    decode.update_state_after_alloc(request, allocated, loaded)
    (found,) = decode._next.reserved
    assert found.order.prompt_tokens == loaded
    order: wire.Register = found.order
    return order


@pytest.mark.parametrize("mamba", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_truncated_prompt_has_same_blocks_on_both_ends(tokens: int, mamba: bool) -> None:
    prefill, request = prefilling(tokens, mamba=mamba)
    (started,) = prefill._next.started
    truncated = mamba and tokens > 1
    assert started.prompt_tokens == tokens - truncated
    assert started.prompt_tokens == reserved(scheduler(mamba=mamba), tokens, [1, 2, 3]).prompt_tokens
    held, said = ended(prefill, request, 1)
    assert held and bool(said and said["prompt_truncated"]) is truncated


def test_a_prefill_that_waits_to_be_scheduled_is_told_and_one_that_is_scheduled_at_once_is_not() -> None:
    prefill, nothing = scheduler(), SimpleNamespace(preempted_req_ids=None, kv_connector_block_state=None)
    request = Request(32, do_remote_decode=True)
    prefill.on_new_request(request)
    assert prefill.build_connector_meta(nothing).arrived == {"x"}
    prefill.update_state_after_alloc(request, None, 0)
    assert not prefill.build_connector_meta(nothing).arrived
    again = scheduler()
    again.on_new_request(Request(32, do_remote_prefill=True, kv_source=SOURCE))
    again.on_new_request(request)
    again.update_state_after_alloc(request, None, 0)
    assert not again.build_connector_meta(nothing).arrived


def test_blocks_reserved_for_tokens_to_come_are_not_shipped() -> None:
    """A drafter has some; decode reserves none, and takes the last blocks for the prompt's."""
    prefill, request = prefilling(32, stages=2)
    assert ended(prefill, request, 4, 5, 6) == (True, None)
    (computed,) = prefill._next.earlier
    assert computed.whole and computed.blocks == ((4, 5),)


def test_a_prefill_that_is_preempted_after_its_last_chunk_is_shipped_again() -> None:
    prefill, request = prefilling(32)
    (last,) = step(prefill, 32, [4, 5]).computed
    assert last.closed and last.epoch == 0
    request.num_preemptions = 1
    assert [(p.key, p.epoch) for p in step(prefill, 0, [], preempted={"x", "another"}).preempted] == [("x", 1)]
    (again,) = step(prefill, 16, [7]).computed
    assert (again.epoch, again.start, again.blocks, again.closed) == (1, 0, ((7,),), False)
    request.num_computed_tokens = 16
    (last,) = step(prefill, 16, [7, 8]).computed
    assert (last.epoch, last.start, last.blocks, last.closed) == (1, 1, ((8,),), True)


def test_a_prefill_that_a_reset_preempts_before_it_is_aborted_ships_nothing_of_what_it_has_lost() -> None:
    """Between two steps: the next one may give its blocks to others."""
    from vllm.v1.request import RequestStatus

    prefill, request = prefilling(32)
    request.num_preemptions, request.status = 1, RequestStatus.FINISHED_ABORTED
    assert prefill.request_finished(request, ([],)) == (False, None)
    told = prefill.build_connector_meta(SimpleNamespace(preempted_req_ids={"x"}, kv_connector_block_state=None))
    assert [(one.key, one.epoch) for one in told.preempted] == [("x", 1)]


def test_a_window_is_shipped_from_the_first_block_that_the_prompts_last_token_attends_to() -> None:
    """100 tokens in 7 blocks of 16; a window of 40 begins in block 3."""
    prefill, request = prefilling(100, windows=(None, 40))
    shipped = []
    # The window's manager has given block 20 away by the second step, and 21 and 22 by the third.
    for tokens, window in ((40, [20, 21, 22]), (40, [0, 21, 22, 23, 24]), (20, [0, 0, 0, 23, 24, 25, 26])):
        (computed,) = step(prefill, tokens, [*range(10, 10 + len(window))], window).computed
        shipped.append((computed.start, computed.blocks, computed.closed))
        request.num_computed_tokens += tokens
    assert shipped == [
        (0, ((10, 11), (0, 0)), False),
        (2, ((12, 13, 14), (0, 23, 24)), False),
        (5, ((15, 16), (25, 26)), True),
    ]


def test_decode_reserves_no_block_outside_of_the_window() -> None:
    """vLLM's own bound for a window has a block more where that begins with a block."""
    ids = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15], [21, 22, 23]]  # of the third it has the earlier ones cached
    order = reserved(scheduler(windows=(None, 40, 64)), 100, *ids)
    assert order.blocks == [[1, 2, 3, 4, 5, 6, 7], [12, 13, 14, 15], [21, 22, 23]]


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
def test_no_block_that_is_shipped_is_given_away_while_the_prompt_is_computed(window: int) -> None:
    """By vLLM's own rule, wherever a step begins; and the prompt's last token attends to none before."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    prefill, rule = scheduler(windows=(window,)), SimpleNamespace(sliding_window=window, extra_retained_tokens=0)
    for tokens in range(1, 100):
        (first,) = prefill._positions.first_kept(tokens)
        skipped = [SlidingWindowManager.get_num_skipped_tokens(rule, computed) // 16 for computed in range(tokens)]
        assert max(skipped) == first


def test_a_recurrent_state_is_shipped_with_the_last_chunk() -> None:
    """It moves from block to block while the prompt is computed, and nobody needs those that it leaves."""
    prefill, request = prefilling(101, windows=(None, STATE))
    assert prefill._next.started[0].prompt_tokens == 100, "decode computes the last token from the state before it"
    shipped = []
    for tokens, states in ((40, [0, 0, 30, 90]), (40, [0, 0, 30, 0, 31, 90]), (20, [0, 0, 0, 0, 31, 0, 32, 90])):
        attention = [*range(10, 10 + len(states) - 1)]
        (computed,) = step(prefill, tokens, attention, states).computed
        shipped.append((computed.start, computed.blocks, computed.closed))
        request.num_computed_tokens += tokens
    assert shipped == [
        (0, ((10, 11), (0, 0)), False),
        (2, ((12, 13, 14), (0, 0, 0)), False),
        (5, ((15, 16), (0, 32)), True),
    ]


def test_ranks_that_share_prompts_have_a_block_for_as_many_tokens_together() -> None:
    """100 tokens in 4 blocks of 2 x 16."""
    assert reserved(scheduler(shards=2), 100, [2, 3, 4, 5]).blocks == [[2, 3, 4, 5]]
    prefill, _ = prefilling(100, shards=2)
    assert prefill._next.started[0].total_blocks == 4
    (computed,) = step(prefill, 60, [11, 12]).computed
    assert (computed.start, computed.blocks, computed.closed) == (0, ((11,),), False)


@pytest.mark.parametrize("differing", [{"windows": (None, STATE)}, {"shards": 2}])
def test_what_no_other_engine_could_use_alone_is_not_lent(differing: dict[str, Any]) -> None:
    """The state of a prefix is not cached as a rule, and would be one of more tokens than were asked for; a rank that
    shares prompts has a part of each."""
    lends = scheduler(**differing)
    assert lends.by_position and not lends.lends
    lends.lend("k", [b"0" * 32], 16)
    (finished,) = lends._next.finished
    assert not finished.ok and not finished.held


@pytest.mark.parametrize(("prompt_tokens", "hit"), [(65, 64), (66, 0)])
def test_what_decode_has_without_its_state_is_no_hit(prompt_tokens: int, hit: int) -> None:
    """vLLM's own cache, after a push: the state that came is that of all tokens but the last, which is the state of a
    whole block for a prompt of 65 tokens only. The next prompt gets what it lacks: that of 66 its state alone."""
    decode = scheduler(windows=(None, STATE))
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request as VllmRequest

    attention, state = (group.kv_cache_spec for group in decode.kv_cache_config.kv_cache_groups)
    state = dataclasses.replace(state, mamba_cache_mode="align", num_speculative_blocks=0)
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["s"], state)]
    manager = KVCacheManager(
        KVCacheConfig(64, [], groups, cache_hit_alignment_tokens=16),
        max_model_len=1024,
        scheduler_block_size=16,
        hash_block_size=16,
        enable_caching=True,
    )
    init_none_hash(sha256)

    def asks(key: str, tokens: list[int]) -> tuple[list[int], int]:
        """How many blocks of each group are reserved for a push, and how many tokens vLLM takes for cached."""
        manager.new_step_starts()
        request = VllmRequest(key, tokens, SamplingParams(), None, block_hasher=get_request_block_hasher(16, sha256))
        alone = manager.get_computed_blocks(request)[1]
        cached, local, _, diverged = manager.get_computed_blocks_for_connector(request)
        assert diverged == (local > alone)
        asked = Request(len(tokens), do_remote_prefill=True, kv_source=SOURCE)
        pushed, _ = decode.get_num_new_matched_tokens(asked, local)
        assert manager.allocate_slots(
            request, 0, local, cached, num_external_computed_tokens=pushed, delay_cache_blocks=True
        )
        decode.update_state_after_alloc(asked, manager.get_blocks(key), pushed)
        manager.cache_blocks(request, local + pushed)
        manager.free(request)
        return [len(group) for group in decode._next.reserved.pop().order.blocks], alone

    assert asks("first", list(range(prompt_tokens))) == ([-(-(prompt_tokens - 1) // 16), 1], 0)
    assert asks("second", [*range(prompt_tokens), *range(1000, 1020)]) == ([2, 1], hit)


@pytest.mark.parametrize(
    ("differing", "streams"),
    [
        ({}, True),
        ({"windows": (None, 40)}, True),
        ({"windows": (None, STATE)}, True),
        ({"stages": 2}, False),
        ({"lookahead": 2}, False),
    ],
)
def test_what_streams(differing: dict[str, Any], streams: bool) -> None:
    assert scheduler(**differing).by_position is streams


def test_a_prefill_that_has_ended_is_dropped_once_while_its_blocks_are_held() -> None:
    prefill, request = prefilling(32)
    prefill.drop(["x"])
    assert prefill._next.unwanted == []  # vLLM aborts it
    assert ended(prefill, request, 1, 2)[0]
    prefill.drop(["x", "another"])
    prefill.drop(["x"])
    assert prefill.has_pending_push_work() and prefill._next.unwanted == ["x"]
    prefill.update_connector_output(output(finished_sending={"x"}))
    assert prefill._held == set()


def output(**said: Any) -> SimpleNamespace:
    """Of all ranks of a step."""
    nothing = {"finished_recving": None, "finished_sending": None, "kv_connector_worker_meta": None}
    return SimpleNamespace(**nothing | said)


def test_transfer_given_up_by_one_rank_ends_on_all() -> None:
    """Once: the other ranks may wait for what the peer of that rank would say."""
    from connectors.push.metadata import RankReport

    decode = scheduler()
    reserved(decode, 32, [1, 2])
    reports = RankReport(unreceived=frozenset({"x", "gone"})).aggregate(RankReport(withdrawing_blocks=2))
    decode.update_connector_output(output(kv_connector_worker_meta=reports))
    assert decode.has_pending_push_work() and decode._next.withdrawn == {"x": "another rank gave it up"}
    decode.update_connector_output(output(finished_recving={"x"}, kv_connector_worker_meta=reports))
    assert decode._next.withdrawn.keys() == {"x"} and not decode._reserved

    prefill, request = prefilling(32)
    assert ended(prefill, request, 1, 2)[0]
    prefill.update_connector_output(output(kv_connector_worker_meta=RankReport(unpushed=frozenset({"x", "gone"}))))
    assert prefill._next.unwanted == ["x"]


def test_withdrawing_blocks_are_reported_on_change() -> None:
    from connectors.push.metadata import PushStats, RankReport

    decode = scheduler()
    told = []
    for blocks in (None, 5, 5, 7, None, 0, 0):
        report = None if blocks is None else RankReport(withdrawing_blocks=blocks)
        decode.update_connector_output(output(kv_connector_worker_meta=report))
        stats = decode.take_stats()
        told.append(0 if stats is None else sum(stats.data[PushStats.WITHDRAWING_BLOCKS]))
    assert told == [0, 5, 0, 2, 0, -7, 0]


def lender(blocks: int = 16, cached: int = 4) -> tuple[Any, Any, list[Any]]:
    """An engine of so many blocks with a prompt of `cached` blocks in its cache, and the blocks' hashes."""
    lends = scheduler()
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    lends.lending.pool = pool = BlockPool(blocks, enable_caching=True, hash_block_size=16)
    hashes = [bytes([number]) * 32 for number in range(cached)]
    computed = pool.get_new_blocks(cached)
    for block, block_hash in zip(computed, hashes, strict=True):
        keyed = make_block_hash_with_group_id(block_hash, 0)
        pool._insert_block_hash(keyed, block, 16)
    pool.free_blocks(reversed(computed))
    return lends, pool, hashes


def test_a_cached_prefix_is_lent_and_given_back_once_it_is_sent() -> None:
    lends, pool, hashes = lender()
    free = pool.get_num_free_blocks()
    lends.lend("k", hashes, 64)
    (started,), (computed,), (finished,) = lends._next.started, lends._next.earlier, lends._next.finished
    assert (started.key, started.total_blocks, started.prompt_tokens) == ("k", 4, 64)
    assert computed.closed and computed.lent and len(computed.blocks[0]) == 4
    assert finished.ok and finished.held
    assert pool.get_num_free_blocks() == free - 4 and lends.has_pending_push_work()
    lends.lend("k", hashes, 64)
    assert len(lends._next.started) == 1 and pool.get_num_free_blocks() == free - 4, "it is lent already"
    lends._next = type(lends._next)()
    assert lends.has_pending_push_work(), "the engine goes on until the blocks are back"
    output = SimpleNamespace(finished_recving=None, finished_sending={"k", "x"}, kv_connector_worker_meta=None)
    lends.update_connector_output(output)
    assert output.finished_sending == {"x"}, "vLLM has no request of the key of a prefix that was lent"
    assert pool.get_num_free_blocks() == free and not lends.has_pending_push_work()


@pytest.mark.parametrize("lost", ["a block", "the memory", "the cache", "half a block"])
def test_what_cannot_be_lent_is_refused_at_once(lost: str) -> None:
    lends, pool, hashes = lender()
    free = pool.get_num_free_blocks()
    tokens = 64
    if lost == "a block":
        hashes[2] = b"another" * 5
    elif lost == "the memory":
        used = pool.get_new_blocks(free - 5)
        assert pool.get_num_free_blocks() == 5 and (free := 5) and used
    elif lost == "the cache":
        lends.lending.pool = None
    else:
        tokens = 60
    lends.lend("k", hashes, tokens)
    (finished,) = lends._next.finished
    assert not finished.ok and not finished.held and not lends._next.started and not lends._next.earlier
    assert pool.get_num_free_blocks() == free


def tiered(first: int, last: int = 5) -> tuple[Any, Any, list[Any], Any]:
    """A lender with two of five blocks in its cache, the blocks' hashes, and a tier that has those from `first` to
    `last`; what it would tell a rank to load are its `_reqs_to_load`."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    from connectors.host.tier import HostTier

    lends, pool, hashes = lender(blocks=32, cached=2)
    hashes += [bytes([number]) * 32 for number in range(10, 13)]
    lends.lending.tier = tier = HostTier.__new__(HostTier)
    tier.cpu_block_pool = BlockPool(16, enable_caching=True, hash_block_size=16)
    tier._gpu_block_pool, tier._reqs_to_load, tier._abandoned_reqs_to_load = pool, {}, {}
    tier._load_event_to_reqs, tier._interval_load_blocks_completed, tier._expected_worker_count = {}, 0, 1
    tier._store_event_pending_counts = {}
    held = tier.cpu_block_pool.get_new_blocks(last - first)
    for block, block_hash in zip(held, hashes[first:last], strict=True):
        tier.cpu_block_pool._insert_block_hash(make_block_hash_with_group_id(block_hash, 0), block, 16)
    tier.cpu_block_pool.free_blocks(reversed(held))
    return lends, pool, hashes, tier


def loaded(lends: Any, tier: Any, key: str) -> None:
    """All ranks have loaded it, as the connector passes it on."""
    output = SimpleNamespace(finished_recving={key, "x"}, finished_sending=None, kv_connector_worker_meta=None)
    tier.copied(output.finished_recving, {})
    lends.update_connector_output(output)
    assert output.finished_recving == {"x"}, "vLLM has no request of that key"


def test_what_is_given_up_before_it_is_sent_is_not_lent_again_meanwhile() -> None:
    lends, pool, hashes = lender()
    free = pool.get_num_free_blocks()
    lends.lend("k", hashes, 64)
    lends.drop(["k"])
    lends.lend("k", hashes, 64)
    assert pool.get_num_free_blocks() == free - 4
    lends.update_connector_output(output(finished_sending={"k"}))
    assert pool.get_num_free_blocks() == free and not lends.lending.pinned


@pytest.mark.parametrize("wanted", [True, False])
def test_what_only_host_memory_has_is_lent_once_it_is_loaded(wanted: bool) -> None:
    lends, pool, hashes, tier = tiered(1)
    free, host_free = pool.get_num_free_blocks(), tier.cpu_block_pool.get_num_free_blocks()
    lends.lend("k", hashes, 80)
    assert not lends._next.has_news() and lends.has_pending_push_work()
    assert pool.get_num_free_blocks() == free - 5
    assert tier.loading_blocks == 3 and tier.cpu_block_pool.get_num_free_blocks() == host_free - 3
    lends.lend("k", hashes, 80)
    assert pool.get_num_free_blocks() == free - 5, "it is being loaded already"
    if not wanted:
        lends.drop(["k"])
        (finished,) = lends._next.finished
        assert not finished.ok and not finished.held, "the asker hears so at once"
        assert pool.get_num_free_blocks() == free - 5, "a copy into these blocks may run"
    targets = tier._reqs_to_load["k"].transfer_meta.gpu_block_ids
    loaded(lends, tier, "k")
    assert not tier.loading_blocks and tier.cpu_block_pool.get_num_free_blocks() == host_free
    if wanted:
        (computed,), (finished,) = lends._next.earlier, lends._next.finished
        assert finished.ok and finished.held and list(computed.blocks[0][2:]) == targets
        sent = SimpleNamespace(finished_recving=None, finished_sending={"k"}, kv_connector_worker_meta=None)
        lends.update_connector_output(sent)
    assert not lends._next.earlier or wanted
    assert pool.get_num_free_blocks() == free and not lends.lending.pinned


@pytest.mark.parametrize("lost", ["a block", "the memory", "the time"])
def test_what_cannot_be_loaded_to_be_lent_is_refused_at_once(lost: str) -> None:
    """`the time`: the tier loads a sixth of the device's memory for others."""
    lends, pool, hashes, tier = tiered(2, 4 if lost == "a block" else 5)
    if lost == "the memory":
        pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    elif lost == "the time":
        targets, held = pool.get_new_blocks(5), tier.cpu_block_pool.get_new_blocks(5)
        tier.load("another", held, targets)
    free, host_free = pool.get_num_free_blocks(), tier.cpu_block_pool.get_num_free_blocks()
    lends.lend("k", hashes, 80)
    (finished,) = lends._next.finished
    assert not finished.ok and not finished.held and not lends._next.started
    assert pool.get_num_free_blocks() == free and tier.cpu_block_pool.get_num_free_blocks() == host_free
    assert "k" not in tier._reqs_to_load


def test_what_takes_too_long_to_load_is_refused_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from connectors import lending

    def build() -> Any:
        return lends.build_connector_meta(SimpleNamespace(preempted_req_ids=None, kv_connector_block_state=None))

    lends, pool, hashes, tier = tiered(2)
    free = pool.get_num_free_blocks()
    lends.lend("k", hashes, 80)
    assert not build().finished, "there is time"
    now = time.monotonic()
    monkeypatch.setattr(lending, "time", SimpleNamespace(monotonic=lambda: now + 3.0))
    (finished,) = build().finished
    assert not finished.ok and not finished.held
    assert not build().finished, "it is said once"
    assert pool.get_num_free_blocks() == free - 5 and lends.has_pending_push_work(), "the copy may run"
    loaded(lends, tier, "k")
    assert pool.get_num_free_blocks() == free and not lends.has_pending_push_work()
