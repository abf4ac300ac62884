"""vLLM's KV cache events as prefix keys: event by event, and those of a real engine against what it then reuses."""

import random
from pathlib import Path
from typing import Any

import pytest
from support_vllm import BLOCK_SIZE, Driver, frames
from support_wait import until

from orchestrator.policy.prefix_keys import Medium, prefix_keys, reusable_keys, salt_of

pytestmark = pytest.mark.vllm
TOKENS = list(range(64))


@pytest.fixture
def collector() -> Any:
    from vllm.distributed.kv_events import NullEventPublisher

    from workers.vllm_engine.codec.messages import PrefixCollector

    return PrefixCollector(16, NullEventPublisher())


def publish(collector: Any, *events: Any) -> Any:
    from vllm.distributed.kv_events import KVEventBatch

    collector.publish(KVEventBatch(ts=0.0, events=list(events)))
    return collector.changes.take()


def stored(hashes: list[bytes], parent: bytes | None = None, start: int = 0, **more: Any) -> Any:
    from vllm.distributed.kv_events import BlockStored

    defaults = {
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": TOKENS[start : start + 16 * len(hashes)],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return BlockStored(**(defaults | more))


def removed(*hashes: bytes, group: int = 0, medium: str = "GPU") -> Any:
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=list(hashes), medium=medium, group_idx=group)


def test_blocks_get_the_keys_of_their_prompt(collector: Any) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared

    keys = prefix_keys(TOKENS, 16)
    assert publish(collector, stored([b"a", b"b"])).stored == keys[:2]
    assert publish(collector, stored([b"c"], b"b", 32)).stored == keys[2:3]
    assert publish(collector, removed(b"c", b"unknown")).removed == keys[2:3]
    delta = publish(collector, AllBlocksCleared(), stored([b"a"]))
    assert delta.cleared and delta.stored == keys[:1]
    assert publish(collector, stored([b"c"], b"b", 32)).stored == []  # its parent went with the rest


def test_a_block_in_host_memory_is_cached_until_both_media_have_lost_it(collector: Any) -> None:
    keys = publish(collector, stored([b"a", b"b"])).stored
    copies = [stored([block], token_ids=[], medium="CPU") for block in (b"a", b"b")]
    assert not publish(collector, *copies).stored
    assert publish(collector, removed(b"a")).removed == []
    assert publish(collector, removed(b"a", medium="CPU")).removed == keys[:1]
    assert publish(collector, removed(b"b", medium="CPU")).removed == []
    assert publish(collector, removed(b"b")).removed == keys[1:]


def test_a_lora_and_a_cache_salt_have_keys_of_their_own(collector: Any) -> None:
    lora = stored([b"a", b"b"], lora_name="l", lora_id=1, extra_keys=[("l", "s"), ("l",)])
    assert publish(collector, lora).stored == prefix_keys(TOKENS, 16, salt_of("l", "s"))[:2]
    salted = stored([b"c", b"d"], extra_keys=[("s",), None])
    assert publish(collector, salted).stored == prefix_keys(TOKENS, 16, salt_of(None, "s"))[:2]
    plain = stored([b"e"], lora_name="l", lora_id=1, extra_keys=[("l",)])
    assert publish(collector, plain).stored == prefix_keys(TOKENS, 16, salt_of("l", None))[:1]


def test_blocks_have_the_marks_of_their_images(collector: Any) -> None:
    media = [Medium("red", 19, 20), Medium("blue", 60, 90)]
    keys = prefix_keys(TOKENS, 16, salt_of("l", "s"), media)
    parts = [("l", "s"), ("l", ("red", 3)), ("l", ("red", -13)), ("l", ("blue", 12))]
    image = stored([b"a", b"b", b"c"], lora_name="l", lora_id=1, extra_keys=parts[:3])
    assert publish(collector, image).stored == keys[:3]
    rest = stored([b"d"], b"c", 48, lora_name="l", lora_id=1, extra_keys=parts[3:])
    assert publish(collector, rest).stored == keys[3:]
    assert publish(collector, removed(b"b")).removed == keys[1:2]
    first = stored([b"e"], extra_keys=[(("red", 3), "s")])
    assert publish(collector, first).stored == prefix_keys(TOKENS[:16], 16, salt_of(None, "s"), [Medium("red", 3, 9)])


def test_blocks_from_the_first_embedding_on_have_no_keys(collector: Any) -> None:
    embedded = stored([b"a", b"b", b"c"], extra_keys=[None, (("red", 3), b"digest"), None])
    assert publish(collector, embedded).stored == prefix_keys(TOKENS, 16)[:1]
    assert publish(collector, stored([b"d"], b"c", 48)).stored == []
    assert publish(collector, stored([b"e"], extra_keys=[(b"digest",)])).stored == []


def test_only_whole_blocks_of_the_full_attention_cache_count(collector: Any) -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    assert publish(collector, stored([b"a"], **window)).stored == []
    assert publish(collector, stored([b"a"])).stored == prefix_keys(TOKENS, 16)[:1]
    assert publish(collector, removed(b"a", group=1)).removed == []
    assert publish(collector, stored([b"p"], b"a", 16, block_size=8, token_ids=TOKENS[16:24])).stored == []
    assert publish(collector, stored([b"b", b"c"], b"a", 16, token_ids=TOKENS[16:64])).stored == []


def test_previous_publisher_gets_every_batch() -> None:
    from vllm.distributed.kv_events import EventPublisher

    from workers.vllm_engine.codec.messages import PrefixCollector

    class Inner(EventPublisher):
        def publish(self, events: Any) -> None:
            batches.append(events)

        def shutdown(self) -> None:
            batches.append("shutdown")

    batches: list[Any] = []
    collector = PrefixCollector(16, Inner())
    publish(collector, stored([b"a"]))
    collector.shutdown()
    assert len(batches) == 2 and batches[1] == "shutdown"


async def test_a_real_engine_reuses_exactly_what_its_events_say(model: Path) -> None:
    rng = random.Random(0)
    # Sixty-four blocks, so that most of what is cached is evicted again.
    engine = await Driver.start(model, max_model_len=1024, kv_cache_memory_bytes=2 << 20)
    trunks = [rng.choices(range(3, 500), k=700) for _ in range(4)]
    hits = 0
    try:
        for number in range(40):
            prompt = rng.choice(trunks)[: rng.randrange(40, 700)] + rng.choices(range(3, 500), k=rng.randrange(40))
            believed = 0
            for key in reusable_keys(prompt, BLOCK_SIZE):
                if key not in engine.prefix_keys:
                    break
                believed += BLOCK_SIZE
            await engine.decode(f"r{number}", frames(prompt, 4))
            await engine.done(f"r{number}")
            assert engine.stats[f"r{number}"].num_cached_tokens == believed, number
            assert set(prefix_keys(prompt, BLOCK_SIZE)) <= engine.prefix_keys
            assert len(engine.prefix_keys) <= engine.info.blocks_total
            hits += believed > 0
        assert 5 < hits < 40
        await engine.idle()
        await engine.engine.call("reset_prefix_cache", [], {})
        await engine.decode("after", frames([9] * 40, 1))
        await engine.done("after")
        await until(lambda: engine.prefix_keys == set(prefix_keys([9] * 40, BLOCK_SIZE)), what="the cleared cache")
    finally:
        await engine.stop()
