"""Keys: the same for a prompt and for the events of an engine that cached it, in every process."""

import os
import subprocess
import sys

from orchestrator.policy.prefix_keys import EventTranslator, prefix_keys, reusable_keys, salt_of

TOKENS = list(range(40))


def test_engine_events_and_prompts_meet_in_the_same_keys():
    translator = EventTranslator(block_size=16)
    first = translator.stored([b"x"], None, TOKENS[:16])
    second = translator.stored([b"y"], b"x", TOKENS[16:32])
    assert first + second == prefix_keys(TOKENS, 16)  # the last 8 tokens fill no block
    assert translator.stored([b"z"], b"unknown", TOKENS[:16]) == []
    assert translator.removed([b"y", b"never"]) == second
    assert prefix_keys([9, *TOKENS[1:]], 16)[1] != second[0]


def test_an_equal_block_cached_twice_is_held_until_both_have_gone():
    translator = EventTranslator(block_size=4)
    stored = translator.stored([b"x"], None, TOKENS[:4])
    assert translator.stored([b"x"], None, TOKENS[:4]) == []
    assert translator.removed([b"x"]) == []
    assert translator.removed([b"x"]) == stored
    assert translator.stored([b"x"], None, TOKENS[:4]) == stored


def test_what_must_not_share_kv_shares_no_key():
    salts = [salt_of(*names) for names in ((None, None), ("a", None), (None, "a"), ("a", "b"), ("ab", None))]
    keys = [set(prefix_keys(TOKENS, 16, salt)) for salt in salts]
    assert len(set.union(*keys)) == sum(map(len, keys))
    assert salt_of("", "") == salt_of(None, None) == 0


def test_the_last_token_is_always_computed():
    assert len(reusable_keys(TOKENS[:32], 16)) == 1
    assert reusable_keys(TOKENS[:33], 16) == prefix_keys(TOKENS, 16)
    assert reusable_keys([], 16) == []


def test_every_process_gives_the_same_keys():
    code = (
        "from orchestrator.policy.prefix_keys import prefix_keys, salt_of\n"
        "print(prefix_keys(list(range(40)), 16, salt_of('lora', 'salt')))"
    )
    for seed in ("0", "1", "random"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == str(prefix_keys(TOKENS, 16, salt_of("lora", "salt")))
