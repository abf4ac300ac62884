"""Answers that another engine has begun, on real ones: they end as if nobody had interrupted them."""

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from support_fleet import DEMO_VOCABULARY, small_model
from support_vllm import INTERPRETED, Driver, frames
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 24
THINKS, ENDS = "<think>", "</think> so"  # of several tokens each
PROMPT = random.Random(8).choices(range(3, 500), k=120)
FEW = {"allowed_token_ids": list(range(1000, 1024))}  # so that some come again
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "sizes"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": "<call=look>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</call>",
}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "schema": {"grammar": {"json": json.dumps(SCHEMA)}},
    "pattern": {"grammar": {"regex": "[a-f]{4}-[0-9]{6}(x|yz)+"}},
    "choice": {"grammar": {"choice": ["apple pie with cream", "apple pie with custard", "banana"]}},
    "rules": {"grammar": {"grammar": 'root ::= "SELECT " name (", " name)* \nname ::= [a-z]+'}},
    "call": {"grammar": {"structural_tag": json.dumps({"type": "structural_tag", "format": CALL})}},
    "penalties": FEW | {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "words": FEW | {"words": [[a, b] for a in range(1000, 1024) for b in range(1000, 1024) if (a + b) % 5 == 0]},
    "stop": FEW | {"min_tokens": 12, "stop_token_ids": list(range(1000, 1012))},
    "repetition": {"allowed_token_ids": [1000], "repetition_detection": (1, 10)},
    "thoughts": {"thinking_token_budget": 8, "thinks": True},
    "log-probabilities of the prompt": {"prompt_logprobs": 1},
}


def asked(
    model: str, seed: int | None, grammar: dict[str, Any] | None = None, words: Any = None, **sampling: Any
) -> list[bytes]:
    """As a frontend sends it, which compiles what needs a tokenizer."""
    from vllm.sampling_params import RepetitionDetectionParams

    if counts := sampling.pop("repetition_detection", None):
        sampling["repetition_detection"] = RepetitionDetectionParams(counts[0], 0, counts[1])
    begins = sampling.pop("thinks", False)
    drawn = {} if seed is None else {"temperature": 1.0, "seed": seed}
    core = MsgpackDecoder(EngineCoreRequest).decode(frames(PROMPT, TOKENS, **drawn, **sampling))
    if begins:
        core.prompt_token_ids += get_tokenizer(model).encode(THINKS, add_special_tokens=False)
    if grammar is not None:
        core.sampling_params.structured_outputs = StructuredOutputsParams(**grammar)
        core.sampling_params.structured_outputs._backend = "xgrammar"
    core.sampling_params._bad_words_token_ids = words
    return [bytes(frame) for frame in MsgpackEncoder().encode(core)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Interpreted kernels take time for every thousand tokens of a vocabulary, and many or few thousands are alike.
    vocabulary = DEMO_VOCABULARY // 4 if INTERPRETED else DEMO_VOCABULARY
    return small_model(tmp_path_factory.mktemp("model") / "small", vocabulary)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(small: str) -> AsyncIterator[tuple[Driver, Driver]]:
    """One that answers alone, and prefills for the other."""
    own = {"skip_tokenizer_init": False, "reasoning_config": {"reasoning_start_str": THINKS, "reasoning_end_str": ENDS}}
    drivers = [await Driver.start(Path(small), name=name, **own) for name in ("whole", "rest")]
    yield drivers[0], drivers[1]
    for driver in drivers:
        await driver.stop()


@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "seeded"])
@pytest.mark.parametrize("what", list(ASKED))
async def test_an_answer_ends_as_that_of_one_engine(
    small: str, pair: tuple[Driver, Driver], what: str, seed: int | None
) -> None:
    whole, rest = pair
    body, key = asked(small, seed, **ASKED[what]), f"{what}-{seed}"
    await whole.decode(key, body)
    answer = await whole.done(key)
    if ASKED[what]:
        unlike = FEW if "allowed_token_ids" in ASKED[what] else {}
        await whole.decode(f"{key}-free", asked(small, seed, **unlike))
        assert what.startswith("log") or await whole.done(f"{key}-free") != answer, "what is asked makes a difference"
    points = sorted({1, 2, 5, min(9, len(answer) - 1), len(answer) - 1})
    for sent in points:
        await rest.decode(f"{key}-{sent}", body, resume_tokens=answer[:sent])
    for sent in points:
        assert answer[:sent] + await rest.done(f"{key}-{sent}") == answer, sent
        assert rest.finished[f"{key}-{sent}"] == whole.finished[key]
        assert f"{key}-{sent}" not in rest.stats, "its prompt was counted with the first token"
    await rest.idle()


async def test_the_kv_of_the_prompt_may_come_from_elsewhere(small: str, pair: tuple[Driver, Driver]) -> None:
    """The rest is computed here, as after a preemption."""
    whole, rest = pair
    body = asked(small, 5, **ASKED["schema"])
    await whole.decode("one", body)
    answer = await whole.done("one")
    await rest.engine.call("reset_prefix_cache", [], {})
    await whole.prefill("two", body)
    await rest.decode("two", body, whole.source("two"), resume_tokens=answer[:7])
    assert answer[:7] + await rest.done("two") == answer
    assert rest.engine.kv_totals["pd_receives_failed_count"] == 0
    for driver in pair:
        await driver.idle()


@pytest.mark.parametrize(
    "drawn", [{}, {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5}], ids=["greedy", "seeded"]
)
async def test_an_answer_to_embeddings_goes_on(model: Path, drawn: dict[str, Any]) -> None:
    core = MsgpackDecoder(EngineCoreRequest).decode(frames([3], TOKENS, **drawn))
    core.prompt_token_ids, core.prompt_embeds = None, torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    body = [bytes(frame) for frame in MsgpackEncoder().encode(core)]
    engine = await Driver.start(model, name="embedded", enable_prompt_embeds=True, enable_prefix_caching=False)
    await engine.decode("whole", body)
    answer = await engine.done("whole")
    for sent in (1, 5, TOKENS - 1):
        await engine.decode(f"{sent}", body, resume_tokens=answer[:sent])
        assert answer[:sent] + await engine.done(f"{sent}") == answer, sent
    await engine.idle()
    await engine.stop()
