"""Detokenizers that begin with the end of the prompt say what vLLM's say, which begin with all of it."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from orchestrator.config.model import resolve_model
from orchestrator.config.settings import ConfigError
from orchestrator.frontend.plain import streaming
from orchestrator.frontend.plain.streaming import FleetDetokenizer, end_of_prompt, install_detokenizer, use_backend

pytestmark = pytest.mark.vllm

WORDS = "a the Fleet of engines , answers 12 quickly . \n".split(" ")
TEXT = "naïve café, 漢字, 👍🏽 and 🧑‍🚀 as one word"
SPECIAL = ["<|begin|>", "<|end|>"]


def byte_level() -> Tokenizer:
    """As GPT-2's, where each byte is a token and some words are: a character spreads over up to four."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"Ġ{word}": len(vocab) + number for number, word in enumerate(WORDS) if word.isalnum()}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """As Llama 2's: characters that are no token are bytes, and the first token loses its space."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz,", *(f"▁{word}" for word in WORDS)]:
        vocab.setdefault(piece, len(vocab))
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    made = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


def metaspace() -> Tokenizer:
    pieces = [(piece, -1.0) for piece in ["<unk>", "▁", *WORDS, *(f"▁{word}" for word in WORDS)]]
    made = Tokenizer(models.Unigram(pieces, 0))
    made.decoder = decoders.Metaspace()
    return made


TOKENIZERS = [byte_level, byte_fallback, word_piece, metaspace]


def told(kind: type[FastIncrementalDetokenizer], tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> object:
    """The text after each token of the answer."""
    request = SimpleNamespace(request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams())
    made = kind(SimpleNamespace(_tokenizer=tokenizer), request)
    return [(made.update([token], False), made.get_next_output_text(False, True)) for token in answer]


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("special", [0.0, 0.5, 1.0], ids=["plain", "half special", "ends special"])
def test_same_text_as_vllm(make: object, special: float) -> None:
    tokenizer = make()  # type: ignore[operator]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    plain = range(tokenizer.get_vocab_size() - len(SPECIAL))
    specials = [tokenizer.token_to_id(token) for token in SPECIAL]
    rng = random.Random(7)
    characters = [tokenizer.encode(char, add_special_tokens=False).ids for char in TEXT]
    for _ in range(300):
        prompt = rng.choices(plain, k=rng.randint(1, 40))
        for _ in range(rng.randint(0, 30)):  # of which the end is text rather than chance, often
            prompt += rng.choice(characters)
        prompt += rng.choices(specials, k=int(rng.randint(0, 40) * special)) if special == 1.0 else []
        prompt = [rng.choice(specials) if special == 0.5 and rng.random() < 0.2 else token for token in prompt]
        answer = rng.choices(plain, k=8) + [token for char in TEXT for token in tokenizer.encode(char).ids]
        whole = told(FastIncrementalDetokenizer, tokenizer, prompt, answer)
        assert told(FleetDetokenizer, tokenizer, prompt, answer) == whole, prompt


@pytest.mark.parametrize("make", TOKENIZERS)
def test_decodes_a_few_tokens_of_a_long_prompt(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    word = tokenizer.get_vocab_size() - 2
    assert len(end_of_prompt(tokenizer, [word] * 1000, True)) <= 32


def test_incomplete_character_needs_more_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    end, half = tokenizer.token_to_id(SPECIAL[1]), tokenizer.encode("字").ids[:2]
    word = tokenizer.encode("word").ids
    assert end_of_prompt(tokenizer, word * 20 + [end] * 40, True) == word * 20 + [end] * 40
    assert end_of_prompt(tokenizer, word * 20 + half, True) == word * 20 + half
    cut = word * 20 + tokenizer.encode("字").ids + word + word[:2]  # the last eight begin within a character
    assert end_of_prompt(tokenizer, cut, True) == cut[-16:]


def test_vllm_uses_our_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenizer, "FastIncrementalDetokenizer", FastIncrementalDetokenizer)
    install_detokenizer()
    assert detokenizer.FastIncrementalDetokenizer is FleetDetokenizer


def test_a_backend_that_is_not_installed_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "find_spec", lambda name: None)
    monkeypatch.delenv("VLLM_USE_FASTOKENS", raising=False)
    with pytest.raises(ConfigError, match=r"^frontend\.tokenizer_backend: .*pip install fastokens"):
        use_backend("fastokens")
    use_backend("huggingface")
    assert "VLLM_USE_FASTOKENS" not in os.environ


def tokens_and_text(texts: list[str]) -> list[object]:
    """The tokens of each text, and what a frontend's detokenizer tells of its second half."""
    tokenizer = get_tokenizer(resolve_model("demo"))
    found: list[object] = []
    for text in texts:
        tokens = tokenizer(text)["input_ids"]
        half = len(tokens) // 2  # the prompt, and the answer
        request = SimpleNamespace(request_id="r", prompt_token_ids=tokens[:half], sampling_params=SamplingParams())
        made = FleetDetokenizer(tokenizer, request)
        made.update(tokens[half:], False)
        found.append([tokens, made.get_next_output_text(True, False)])
    return found


def test_fastokens_gives_the_same_tokens_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    fastokens = pytest.importorskip("fastokens", reason="there is none for this machine")
    rng = random.Random(3)
    letters = TEXT + "".join(map(chr, range(32, 127))) + "\t\n  ßøñ–…«»日本語한국어עبריתالعربيةहिन्दी🎉\u200d\u0301"
    texts = ["".join(rng.choices(letters, k=rng.randint(1, 400))) for _ in range(200)]
    texts += [Path(__file__).read_text(), Path(random.__file__).read_text()]
    texts += [TEXT * 40, " " * 300, "<|im_start|>user\nhi"]
    expected = tokens_and_text(texts)
    monkeypatch.setenv("VLLM_USE_FASTOKENS", "0")  # so that it is as it was afterwards
    use_backend("fastokens")
    try:
        found = tokens_and_text(texts)
        assert "fastokens" in type(get_tokenizer(resolve_model("demo"))._tokenizer).__module__
    finally:
        fastokens.unpatch_transformers()
    assert found == expected
