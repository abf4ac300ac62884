"""Keys: the same for a prompt and for the events of an engine that cached it, on every host."""

import xxhash

from orchestrator.policy.prefix_keys import (
    EventTranslator,
    Medium,
    key_of_beginning,
    prefix_keys,
    reusable_keys,
    salt_of,
)

TOKENS = list(range(40))


def test_engine_events_and_prompts_have_same_keys():
    translator = EventTranslator(block_size=16)
    first = translator.stored([b"x"], None, TOKENS[:16])
    second = translator.stored([b"y"], b"x", TOKENS[16:32])
    assert first + second == prefix_keys(TOKENS, 16)  # the last 8 tokens fill no block
    assert translator.stored([b"z"], b"unknown", TOKENS[:16]) == []
    assert translator.removed([b"y", b"never"]) == (second, [])
    assert prefix_keys([9, *TOKENS[1:]], 16)[1] != second[0]


def test_block_cached_twice_is_held_until_both_are_removed():
    translator = EventTranslator(block_size=4)
    stored = translator.stored([b"x"], None, TOKENS[:4])
    assert translator.stored([b"x"], None, TOKENS[:4]) == []
    assert translator.removed([b"x"]) == ([], [])
    assert translator.removed([b"x"]) == (stored, [])
    assert translator.stored([b"x"], None, TOKENS[:4]) == stored


def test_what_one_medium_loses_the_other_still_has():
    translator = EventTranslator(block_size=4)
    keys = translator.stored([b"x", b"y"], None, TOKENS[:8])
    translator.copied([b"x", b"unknown"])
    assert translator.removed([b"y", b"unknown"], from_host=True) == ([], []), "it has no copy there"
    assert translator.removed([b"x", b"y"]) == (keys[1:], keys[:1])
    assert translator.stored([b"z"], b"x", TOKENS[8:12]), "a block after it has a key, too"
    assert translator.stored([b"x"], None, TOKENS[:4]) == keys[:1], "loaded from there"
    assert translator.removed([b"x"], from_host=True) == ([], [])
    assert translator.removed([b"x"]) == (keys[:1], [])
    translator.stored([b"x"], None, TOKENS[:4])
    translator.copied([b"x"])
    assert translator.removed([b"x"]) == ([], keys[:1])
    assert translator.removed([b"x"], from_host=True) == (keys[:1], [])


def test_different_salts_share_no_key():
    salts = [salt_of(*names) for names in ((None, None), ("a", None), (None, "a"), ("a", "b"), ("ab", None))]
    keys = [set(prefix_keys(TOKENS, 16, salt)) for salt in salts]
    assert len(set.union(*keys)) == sum(map(len, keys))
    assert salt_of("", "") == salt_of(None, None) == 0


def test_the_last_token_is_always_computed():
    assert len(reusable_keys(TOKENS[:32], 16)) == 1
    assert reusable_keys(TOKENS[:33], 16) == prefix_keys(TOKENS, 16)
    assert reusable_keys([], 16) == []


def test_the_format_is_the_same_on_every_host():
    """Literal values: hosts, Python versions and byte orders must agree on them."""
    assert prefix_keys(TOKENS, 16) == [0x79C2079C74A8EE4D, 0x909F26211E4EF238]
    assert prefix_keys(list(range(512)), 128) == [
        *(0x24B21CB5803A6432, 0x919130110157F9CE),
        *(0xF8DB70D65719651F, 0xB2AC91A5C7D9979D),
    ]
    assert salt_of("lora", "salt") == 0x9FC9126DADCA3B62 and salt_of("\u00e4", None) == 0xCB76289F9B9024E4
    assert prefix_keys([2**32 - 1, 70_000, 1, 0], 4, salt_of("lora", "salt")) == [0x145E90899E884197]


def test_the_format_is_what_the_module_says():
    first, second = prefix_keys([1, 256, 2, 70_000], 2)
    assert first == xxhash.xxh3_64_intdigest(b"\x01\x00\x00\x00\x00\x01\x00\x00", seed=0)
    assert second == xxhash.xxh3_64_intdigest(b"\x02\x00\x00\x00\x70\x11\x01\x00", seed=first)
    assert salt_of("a", "bc") == xxhash.xxh3_64_intdigest(b"\x01\x00\x00\x00a\x02\x00\x00\x00bc")
    assert all(0 <= key < 2**64 for key in prefix_keys(TOKENS, 4))


def test_images_tell_blocks_apart_from_the_first_that_has_a_part_of_one():
    """Their tokens are all the same."""
    tokens = [1, 2, 3, *[9] * 6, 4, 5, 6]

    def keys(*media: tuple[str, int, int]) -> list[int]:
        return prefix_keys(tokens, 4, media=[Medium(*each) for each in media])

    plain, red, blue = prefix_keys(tokens, 4), keys(("red", 3, 6)), keys(("blue", 3, 6))
    assert not {*plain} & {*red} and not {*red} & {*blue} and len({*plain, *red, *blue}) == 9
    later = keys(("red", 4, 4))
    assert later[0] == plain[0] and later[1] not in (plain[1], red[1])
    assert keys(("red", 4, 4), ("blue", 8, 1))[:2] == later[:2]
    assert keys(("red", 4, 5))[2] != keys(("red", 4, 4), ("blue", 8, 1))[2]
    assert keys(("red", 4, 1 << 40))[1] == later[1], "also one that reaches beyond the prompt"
    assert len(reusable_keys(tokens, 4, media=[Medium("red", 4, 4)])) == 2


def test_a_mark_of_an_image_is_what_the_module_says():
    first, second = prefix_keys([1, 9, 9, 9], 2, media=[Medium("ab", 1, 3)])
    mark = b"\x02\x00\x00\x00ab"
    assert first == xxhash.xxh3_64_intdigest(b"\x01\0\0\0\x09\0\0\0" + mark + b"\x01\0\0\0", seed=0)
    assert second == xxhash.xxh3_64_intdigest(b"\x09\0\0\0" * 2 + mark + b"\xff\xff\xff\xff", seed=first)


def test_a_salt_may_be_any_text_that_json_can_hold():
    assert salt_of(None, "\ud800") not in (0, salt_of(None, "?"))


def test_same_beginning_gives_same_key():
    same, other = list(range(256)), list(range(1, 257))
    for block_tokens in (16, 128, 256):
        keys = [prefix_keys(begin + [end] * 512, block_tokens) for begin in (same, other) for end in (1, 2)]
        one, two, three, four = (key_of_beginning(each, block_tokens) for each in keys)
        assert one == two != three == four
    assert key_of_beginning([7], 16) == 7, "of as many blocks as there are"
    assert key_of_beginning([7, 8], 512) == 7, "of one block at least"
    assert key_of_beginning([], 0) is None
