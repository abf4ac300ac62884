"""Copies of a tokenizer are what its deep copies are, and none sets the truncation of another."""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, tokenization_utils_tokenizers
from vllm.renderers import hf as renderer
from vllm.tokenizers import hf

from orchestrator.config.model import resolve_model
from orchestrator.frontend.codec import copies

pytestmark = pytest.mark.vllm

WORDS = "[UNK] [CLS] fleet of engines answers quick ##ly . naive".split()
ADDED = [
    AddedToken("<|end|>", special=True),
    AddedToken("Engines", normalized=True),
    AddedToken("of", single_word=True),  # which is in the vocabulary already
    AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("<|begin|>", special=True),
]
TEXT = "<|begin|>A  fleet of Engines <tool> answers quickly, naïve; offleet<|end|>"


def demo() -> Tokenizer:
    return AutoTokenizer.from_pretrained(resolve_model("demo"))._tokenizer


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[CLS]", 1), ("[CLS]", 1))
    made.decoder, made.encode_special_tokens = decoders.WordPiece(), True  # no copy has the latter
    made.add_tokens(ADDED)
    made.enable_truncation(12, stride=2, direction="left")
    made.enable_padding(length=20, pad_id=3, pad_token="of", direction="left")
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((f"▁{word}", -2.0) for word in WORDS)], 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_tokens(ADDED[::-1])
    return made


@pytest.mark.parametrize("make", [demo, word_piece, unigram])
def test_a_copy_is_as_a_deep_copy(make) -> None:
    tokenizer = make()
    deep, ours = copy.deepcopy(tokenizer), copies.with_same_vocabulary(tokenizer)
    assert ours.to_str() == deep.to_str() and not ours.encode_special_tokens
    assert ours.get_vocab() == deep.get_vocab() and ours.get_added_tokens_decoder() == deep.get_added_tokens_decoder()
    one, other = ours.encode(TEXT), deep.encode(TEXT)
    assert (one.ids, one.tokens, one.offsets, one.special_tokens_mask) == (
        other.ids, other.tokens, other.offsets, other.special_tokens_mask,
    )  # fmt: skip
    assert ours.decode(one.ids) == deep.decode(one.ids)
    before = tokenizer.encode(TEXT).ids
    ours.no_padding()
    ours.enable_truncation(4)
    assert len(ours.encode(TEXT).ids) == 4 and tokenizer.encode(TEXT).ids == before


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """How often a vocabulary is shared."""
    for module in (hf, renderer, tokenization_utils_tokenizers):
        monkeypatch.setattr(module, "copy", copy)  # given back afterwards
    monkeypatch.setattr(copies, "with_same_vocabulary", made := Mock(wraps=copies.with_same_vocabulary))
    copies.install()
    return made


def test_what_vllm_copies_shares_a_vocabulary_and_serves_threads_at_once(installed: Mock) -> None:
    tokenizer = hf.get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=demo()))
    assert installed.call_count == 2, "by transformers, twice: it was read, and made anew of what was read"
    texts = [f"{TEXT} {number}" * 20 for number in range(40)]
    lengths = [number + 1 for number in range(40)]
    alone = [tokenizer(text, truncation=True, max_length=at).input_ids for text, at in zip(texts, lengths, strict=True)]
    pool = hf.maybe_make_thread_pool(tokenizer, 2)
    assert installed.call_count == 4
    with ThreadPoolExecutor(2) as threads:
        at_once = threads.map(lambda text, at: pool(text, truncation=True, max_length=at).input_ids, texts, lengths)
        assert list(at_once) == alone


def test_a_copy_has_what_transformers_and_vllm_keep_of_its_tokenizer() -> None:
    tokenizer = hf.get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=demo(), bos_token="<|im_start|>"))
    deep, shallow = copies.deep_copy(tokenizer), copies.shallow_copy(tokenizer)
    for made in (deep, shallow):
        assert type(made) is type(tokenizer) and made.__dict__.keys() == tokenizer.__dict__.keys()
        assert made.get_vocab() is tokenizer.get_vocab() and made.all_special_ids == tokenizer.all_special_ids
    assert shallow._tokenizer is tokenizer._tokenizer is not deep._tokenizer
    deep.padding_side, deep.init_kwargs["more"] = "left", 1
    assert tokenizer.padding_side == "right" and "more" not in tokenizer.init_kwargs


def test_a_vocabulary_that_has_grown_is_listed_anew(installed: Mock) -> None:
    tokenizer = hf.get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=demo()))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|embeds|>"]})
    for made in (copies.deep_copy(tokenizer), copies.shallow_copy(tokenizer)):
        assert "<|embeds|>" in made.get_vocab() and len(made) == len(tokenizer) + 1


def test_the_tokenizer_of_another_library_is_copied_whole() -> None:
    of = SimpleNamespace(_tokenizer=SimpleNamespace(words=["a"]))
    made = copies.deep_copy(of)
    assert made == of and made._tokenizer.words is not of._tokenizer.words
    assert copies.shallow_copy(of)._tokenizer is of._tokenizer
