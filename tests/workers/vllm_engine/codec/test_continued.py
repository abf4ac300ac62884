"""An answer that goes on: each part of what vLLM is given of it, by vLLM's own code and without an engine."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support_vllm import frames, scheduler_of
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from workers.engine import EngineRequest, Phase

pytestmark = pytest.mark.vllm


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None], type, str], None]:
    """Applies a part of `continue_answers`, which replaces the attribute of a class; it is given back afterwards."""

    def patch(part: Callable[[], None], owner: type, name: str) -> None:
        monkeypatch.setattr(owner, name, owner.__dict__[name])
        part()

    return patch


def core(prompt: list[int], sent: list[int], **sampling: Any) -> Any:
    from workers.vllm_engine.codec.messages import RequestCodec

    request = EngineRequest("r#2", Phase.DECODE, frames(prompt, **sampling), resume_tokens=sent)
    return RequestCodec(max_model_len=512, vocabulary=500).decode(request)


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_sent_are_output_and_their_blocks_are_those_of_a_prompt_with_them(
    tmp_path: Path, patched: Any, ahead: bool
) -> None:
    """By vLLM's scheduler: what it finds cached reaches into the answer, and limits count from the first token on."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.utils import check_stop

    from workers.vllm_engine.codec.continued import _make_requests

    patched(_make_requests, Request, "from_engine_core_request")
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    prompt, sent = list(range(3, 33)), list(range(100, 120))
    scheduler = scheduler_of(tmp_path / "tiny", 64, ahead=ahead)
    first = Request.from_engine_core_request(core([*prompt, *sent], [], max_tokens=30), hasher)
    first.request_id = "before"
    scheduler.add_request(first)
    scheduler.schedule()
    goes_on = Request.from_engine_core_request(core(prompt, sent, max_tokens=22, min_tokens=21), hasher)
    assert (goes_on.num_prompt_tokens, list(goes_on.output_token_ids)) == (30, sent)
    assert goes_on.block_hashes == first.block_hashes and len(first.block_hashes) == 3
    scheduler.add_request(goes_on)
    output = scheduler.schedule()
    (new,) = output.scheduled_new_reqs
    assert (new.prompt_token_ids, new.num_computed_tokens) == (prompt, 48) and goes_on.prefill_stats is None
    assert output.num_scheduled_tokens["r#2"] == 2  # what is left of the answer so far is computed again
    goes_on.append_output_token_ids(7)
    assert not check_stop(goes_on, 512)
    goes_on.append_output_token_ids(7)
    assert check_stop(goes_on, 512) and goes_on.num_output_tokens == 22


def test_repetition_is_found_in_what_an_earlier_attempt_has_begun(patched: Any) -> None:
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_stop

    from workers.vllm_engine.codec.continued import _make_requests

    patched(_make_requests, Request, "from_engine_core_request")
    wanted = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=2, min_count=3)
    goes_on = Request.from_engine_core_request(
        core([3, 4], [5, 6, 5, 6, 5], max_tokens=30, repetition_detection=wanted), None
    )
    goes_on.append_output_token_ids(6)
    assert check_stop(goes_on, 512) and goes_on.stop_reason == "repetition_detected"


@pytest.mark.parametrize("embedded", [False, True])
def test_the_first_model_runner_has_tokens_sent_behind_the_prompt(patched: Any, embedded: bool) -> None:
    from workers.vllm_engine.codec.continued import _make_states

    patched(_make_states, CachedRequestState, "__post_init__")
    params = core([3, 4, 5], [8, 9], bad_words=[], presence_penalty=1.0).sampling_params
    prompt, embeds = (None, torch.zeros(3, 8)) if embedded else ([3, 4, 5], None)
    state = CachedRequestState("r#2", prompt, [], params, None, ([1],), 0, [], prompt_embeds=embeds)
    assert (state.num_prompt_tokens, state.output_token_ids, state.num_tokens) == (3, [8, 9], 5)
    assert CachedRequestState("r", [3], [], SamplingParams(), None, ([1],), 0, []).output_token_ids == []
    assert CachedRequestState("r", [3], [], None, None, ([1],), 0, []).output_token_ids == []


class Grammar:
    """Accepts the letters of a word, one after the other."""

    def __init__(self, word: list[int]) -> None:
        self.left = list(word)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(self.left and self.left.pop(0) == token for token in tokens)


THOUGHT, END = 50, 60


class Reasoner:
    def __init__(self, tokenizer: Any = None) -> None: ...

    def is_reasoning_end(self, tokens: list[int]) -> bool:
        return END in tokens

    def is_reasoning_end_streaming(self, tokens: list[int], delta: list[int]) -> bool:
        return bool(delta) and delta[-1] == END and list(tokens[-len(delta) :]) == list(delta)


@pytest.mark.parametrize(
    ("thinks", "sent", "left", "ended"),
    [
        (False, [10, 11], [12, 13], True),
        (True, [THOUGHT, 10], [10, 11, 12, 13], False),
        (True, [THOUGHT, END], [10, 11, 12, 13], True),
        (True, [THOUGHT, END, 10, 11, 12], [13], True),
    ],
)
def test_a_grammar_goes_on_where_the_tokens_sent_have_brought_it(
    patched: Any, thinks: bool, sent: list[int], left: list[int], ended: bool
) -> None:
    """By vLLM's manager, which makes grammars in a thread and has none of them before that ends."""
    from vllm.sampling_params import StructuredOutputsParams

    from workers.vllm_engine.codec.continued import _advance_grammars, _make_requests

    patched(_make_requests, Request, "from_engine_core_request")
    patched(_advance_grammars, StructuredOutputManager, "_create_grammar")
    manager: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.backend = SimpleNamespace(compile_grammar=lambda *_, **__: Grammar([10, 11, 12, 13]))
    manager.reasoner_cls, manager.enable_in_reasoning, manager.tokenizer = Reasoner if thinks else None, False, None
    asked = StructuredOutputsParams(regex="abcd")
    request = Request.from_engine_core_request(core([3, 4], sent, structured_outputs=asked), None)
    assert request.structured_output_request is not None
    request.structured_output_request.grammar = making = Future[Any]()
    making.set_result(manager._create_grammar(request))
    made: Any = request.structured_output_request.grammar
    assert made.left == left and bool(request.structured_output_request.reasoning_ended) is ended
    request.append_output_token_ids(next_token := left[0] if ended else END)
    assert manager.accept_tokens(request, [next_token]) and made.left == (left[1:] if ended else left)
    assert list(request.output_token_ids) == [*sent, next_token]


def test_tokens_that_a_grammar_does_not_accept_end_the_request(patched: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from workers.vllm_engine.codec.continued import _advance_grammars, _make_requests

    patched(_make_requests, Request, "from_engine_core_request")
    patched(_advance_grammars, StructuredOutputManager, "_create_grammar")
    manager: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.backend = SimpleNamespace(compile_grammar=lambda *_, **__: Grammar([10, 11]))
    manager.reasoner_cls, manager.enable_in_reasoning = None, False
    asked = StructuredOutputsParams(regex="ab")
    request = Request.from_engine_core_request(core([3, 4], [10, 12], structured_outputs=asked), None)
    with pytest.raises(ValueError, match="r#2: its grammar does not accept the tokens that its client has"):
        manager._create_grammar(request)


@pytest.mark.parametrize(("native", "wide"), [(True, False), (True, True), (False, True)])
def test_a_seed_is_drawn_on_from_where_it_stopped(native: bool, wide: bool) -> None:
    """By vLLM's own sampler, as on a GPU, and on a CPU; `../test_continued.py` has the way that draws by a kernel."""
    from workers.vllm_engine.codec.continued import _draw

    sampler, vocabulary = TopKTopPSampler(use_fp64_gumbel=wide), 300
    if native:
        sampler.forward = sampler.forward_native
    model = SimpleNamespace(get_vocab_size=lambda: vocabulary)
    parts = SimpleNamespace(topk_topp_sampler=sampler)
    runner = SimpleNamespace(sampler=parts, model_config=model, device=torch.device("cpu"))

    def sampled(after: int, tokens: int) -> list[int]:
        generator = torch.Generator().manual_seed(5)
        _draw(runner, generator, after)
        return [int(sampler.forward(torch.zeros(1, vocabulary), {0: generator}, None, None)[0]) for _ in range(tokens)]

    whole = sampled(0, 8)
    assert len(set(whole)) > 4 and sampled(3, 5) == whole[3:]


def test_many_draws_are_made_at_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 seeded answers of 2,000 tokens may move to one engine in one step."""
    from workers.vllm_engine.codec import continued

    class Philox:
        offset, draws = 400, 0

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

    class Noise:
        def exponential_(self, generator: Philox) -> None:
            generator.offset, generator.draws = generator.offset + 12, generator.draws + 1

    monkeypatch.setattr(continued.torch, "empty", lambda *_, **__: Noise())
    sampler = SimpleNamespace(use_fp64_gumbel=False, forward="native", forward_cpu="cpu")
    parts, model = SimpleNamespace(topk_topp_sampler=sampler), SimpleNamespace(get_vocab_size=lambda: 300)
    runner: Any = SimpleNamespace(sampler=parts, model_config=model, device=torch.device("cuda"))
    generator: Any = Philox()
    continued._draw(runner, generator, 2000)
    assert (generator.offset, generator.draws) == (400 + 2000 * 12, 1)


MARKS = [([1], [2]), ([1], [2, 3]), ([1, 4], [2]), ([1, 4], [2, 3, 5])]
STEPS = 14


@pytest.mark.parametrize(("start", "end"), MARKS)
def test_a_budget_for_thinking_is_counted_on(patched: Any, start: list[int], end: list[int]) -> None:
    """By vLLM's own count of its first model runner: where thinking begins in the prompt, with the answer or in it,
    whether it ends by itself, and wherever another engine goes on."""
    from workers.vllm_engine.codec.continued import _count_thoughts

    patched(_count_thoughts, ThinkingBudgetStateHolder, "_update_think_state")
    prompts = [7], [7, *start], [7, *start, 8, 9], [7, *start, 8, *end]
    for prompt, begins, ends, budget in itertools.product(prompts, (None, 0, 2), (None, 5, 9), (0, 1, 4)):
        wanted = {place: 10 + place for place in range(STEPS)}
        for at, mark in ((begins, start), (ends, end)):
            wanted |= {at + place: token for place, token in enumerate(mark)} if at is not None else {}
        whole = thought(start, end, budget, prompt, wanted, [])
        for taken in range(1, STEPS):
            assert thought(start, end, budget, prompt, wanted, whole[:taken]) == whole, (prompt, wanted, budget, taken)


def thought(
    start: list[int], end: list[int], budget: int, prompt: list[int], wanted: dict[int, int], sent: list[int]
) -> list[int]:
    """The tokens of a model that wants these, by place, after those that are sent."""
    marks: Any = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    holder = ThinkingBudgetStateHolder(marks, 1, 0, torch.device("cpu"), False)
    answer = list(sent)
    added = [(0, SimpleNamespace(thinking_token_budget=budget), prompt, answer)]
    holder.sync_batch(cast(Any, SimpleNamespace(removed=[], added=added, moved=[])))
    for place in range(len(sent), STEPS):
        logits = torch.zeros(1, 40)
        logits[0, wanted[place]] = 1.0
        holder.update_state([answer], None, None)
        answer.append(int(holder.apply_to_logits(logits, False, None).argmax()))
    return answer
