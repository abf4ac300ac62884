"""The simulated scheduler as a pure state machine: blocks are conserved, nobody starves, every token is right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.simulated import Simulated
from orchestrator.policy.choices.steps import prompt_tokens_beside
from orchestrator.policy.prefix_keys import prefix_keys
from orchestrator.types import FinishReason, KVEndpoint, KVSource
from workers.engine import InvalidEngineRequest, Phase
from workers.sim.request import SimRequest, TokenStream
from workers.sim.scheduler import LOAD_S, SimScheduler

SOURCE = KVSource(KVEndpoint("peer", "h", 1), "k")


def request_of(
    key: str, tokens: int, max_tokens: int = 8, phase: Phase = Phase.DECODE, remote: bool = False, resume: int = 0
) -> SimRequest:
    prompt = list(range(1, tokens + 1))
    return SimRequest(
        key=key,
        phase=phase,
        prompt=prompt,
        resume_tokens=resume,
        max_tokens=max_tokens,
        min_tokens=0,
        eos_token_id=None,
        stop_token_ids=frozenset(),
        stream=TokenStream(prompt),
        kv_source=SOURCE if remote else None,
    )


def check(scheduler: SimScheduler) -> None:
    """What each request holds, prefixes that several have once, and what a step that runs has allocated already."""
    kv, batch = scheduler.kv, scheduler.batch
    holding = [request.stay for request in scheduler.requests.values() if request.stay not in scheduler.waiting]
    blocks = 0
    for stay in holding:
        decodes = stay in scheduler.running and stay not in scheduler.prefilling
        tokens = stay.context + (batch.steps - stay.first_step if decodes else 0)
        blocks += scheduler.blocks_for(tokens) - len(stay.keys)
    keys = {key for stay in holding for key in stay.keys}
    assert kv.used == blocks + len(keys) + (batch.next_blocks() if scheduler.chunks else 0)
    assert 0 <= kv.used <= kv.total and kv.unwritten <= keys
    assert len(scheduler.running) <= scheduler.profile.max_num_seqs


def begin(scheduler: SimScheduler) -> tuple[list[tuple[str, int]], list[str]]:
    """Tokens of each request in the next step, and those that now have blocks to receive KV into."""
    step, receiving = scheduler.schedule(0.0)
    chunks = dict(scheduler.chunks)
    tokens = {stay.job.key: chunks.get(stay, 0 if stay in scheduler.prefilling else 1) for stay in scheduler.running}
    assert (step is not None) == any(tokens.values())
    return [item for item in tokens.items() if item[1]], [request.key for request in receiving]


def run(scheduler: SimScheduler, tokens: dict[str, list[int]] | None = None, seconds: float = 0.0) -> bool:
    """One engine step. False when there is nothing to do."""
    batch, receiving = begin(scheduler)
    assert sum(count for _, count in batch) <= scheduler.profile.max_num_batched_tokens
    check(scheduler)
    if batch:
        end(scheduler, tokens, seconds)
    return bool(batch or receiving)


def end(scheduler: SimScheduler, tokens: dict[str, list[int]] | None = None, seconds: float = 0.0) -> None:
    for sampled in scheduler.complete(seconds, 0.0):
        if tokens is not None:
            tokens.setdefault(sampled.request.key, []).append(sampled.token)
    check(scheduler)


class LevelBoard:
    """Grants so many prompt tokens in each step; keeps what it was told."""

    def __init__(self, grant: int) -> None:
        self.grant, self.told, self.planned = grant, (0, 0, 0), (0, 0, False)

    def budget(self, generating: int, backlog: int, max_tokens: int) -> int:
        self.told = (generating, backlog, max_tokens)
        return self.grant

    def plan(self, generating: int, backlog: int, full: bool) -> None:
        self.planned = (generating, backlog, full)


def test_a_levelled_step_cuts_prompts_and_nothing_else() -> None:
    board = LevelBoard(grant=1000)
    scheduler = SimScheduler(Simulated(max_num_seqs=4, max_num_batched_tokens=1000), board)  # type: ignore[arg-type]
    for key in ("a", "b"):
        scheduler.submit(request_of(key, 20))
    run(scheduler)
    board.grant = 30
    scheduler.submit(request_of("long", 100))
    scheduler.submit(request_of("remote", 50, remote=True))
    scheduler.submit(request_of("short", 25))
    assert begin(scheduler) == ([("a", 1), ("b", 1), ("long", 30)], ["remote"])
    assert board.told == (2, 125, 1000) and board.planned == (2, 95, False)
    end(scheduler)
    board.grant = 80
    assert begin(scheduler) == ([("a", 1), ("b", 1), ("long", 70), ("short", 10)], [])
    assert board.planned == (3, 15, True), "the long one will decode"
    end(scheduler)
    board.planned = (0, 0, False)
    assert scheduler.schedule(0.0, paused=True) == (None, [])
    assert board.planned == (3, 15, True), "a rank that is paused tells what it has, at each step"


def test_a_prompt_for_another_engine_that_ends_in_a_step_decodes_nothing_there() -> None:
    board = LevelBoard(grant=1000)
    scheduler = SimScheduler(Simulated(max_num_seqs=4, max_num_batched_tokens=1000), board)  # type: ignore[arg-type]
    scheduler.submit(request_of("p", 20, phase=Phase.PREFILL))
    assert begin(scheduler) == ([("p", 20)], [])
    assert board.planned == (0, 0, False)


def test_a_prompt_for_another_engine_leaves_room_for_those_that_decode_beside_it() -> None:
    """Only beside them, and only such a prompt: what a decode worker prefills itself is computed as vLLM does."""
    scheduler = SimScheduler(Simulated(max_num_seqs=4, max_num_batched_tokens=1000), tpot_s=0.1)
    stream, local = request_of("stream", 500), request_of("local", 900, max_tokens=1)
    prefill = request_of("prefill", 900, phase=Phase.PREFILL)
    scheduler.submit(stream)
    run(scheduler, seconds=500 * 1e-3)
    run(scheduler, seconds=0.01)
    scheduler.submit(local)
    assert begin(scheduler)[0] == [("stream", 1), ("local", 900)]
    scheduler.forget(local)
    end(scheduler, seconds=0.91)
    scheduler.submit(prefill)
    assert begin(scheduler)[0] == [("stream", 1), ("prefill", prompt_tokens_beside(0.1, 0.01, 1e-3))]
    end(scheduler)
    scheduler.forget(stream)
    assert begin(scheduler)[0] == [("prefill", prefill.stay.compute)], "nothing decodes any more"


_action = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 120), st.integers(1, 40), st.booleans(), st.sampled_from([0, 0, 17])),
    st.tuples(st.just("prefill"), st.integers(1, 120)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("arrive"), st.integers(0, 5)),
    st.tuples(st.just("fail"), st.integers(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)


@settings(max_examples=150)
@given(st.lists(_action, max_size=40))
def test_blocks_are_conserved_and_everything_ends(actions: list[tuple[object, ...]]) -> None:
    scheduler = SimScheduler(
        Simulated(blocks=20, block_size=8, max_model_len=160, max_num_seqs=4, max_num_batched_tokens=48)
    )
    tokens: dict[str, list[int]] = {}
    added: dict[str, SimRequest] = {}
    aborted = set()

    def awaiting() -> list[SimRequest]:
        return [stay.job for stay in scheduler.receiving]

    for action in actions:
        kind, *values = action
        if kind in ("add", "prefill"):
            key = f"r{len(added)}"
            if kind == "add":
                length, wanted, remote, resume = values
                request = request_of(key, length, wanted, remote=remote, resume=resume)  # type: ignore[arg-type]
            else:
                request = request_of(key, values[0], phase=Phase.PREFILL)  # type: ignore[arg-type]
            request.prefix = prefix_keys(request.prompt, 8)
            scheduler.submit(request)
            added[key] = request
        elif kind == "step":
            for _ in range(values[0]):  # type: ignore[call-overload]
                run(scheduler, tokens)
        elif kind in ("arrive", "fail") and awaiting():
            request = awaiting()[values[0] % len(awaiting())]  # type: ignore[operator]
            scheduler.kv_came(request, kind == "arrive")
        elif kind == "abort" and scheduler.requests:
            step, _ = scheduler.schedule(0.0)  # an abort comes in the middle of a step, too
            request = list(scheduler.requests.values())[values[0] % len(scheduler.requests)]  # type: ignore[operator]
            aborted.add(request.key)
            held = scheduler.withdraw(request)
            assert held == (request.key in scheduler.requests)
            scheduler.forget(request)
            if step is not None:
                end(scheduler, tokens)
        check(scheduler)

    for _ in range(3000):  # whatever waits for KV gets it, whoever is being pushed is fetched
        for request in awaiting():
            scheduler.kv_came(request, True)
        for request in list(scheduler.requests.values()):
            if request.phase is Phase.PREFILL and request.sampled:
                scheduler.forget(request)
        if not run(scheduler, tokens) and not scheduler.requests:
            break
    assert not scheduler.requests and scheduler.kv.used == 0 and scheduler.pending_tokens == 0
    assert scheduler.batch.empty and not scheduler.kv.unwritten
    for key, request in added.items():
        if key in aborted:
            continue
        start = request.resume_tokens
        most = 1 if request.phase is Phase.PREFILL else min(request.max_tokens, 160 - start - len(request.prompt))
        assert tokens[key] == [request.stream.token(start + i) for i in range(most)]


def test_a_stop_token_ends_it_only_after_min_tokens() -> None:
    stream = TokenStream(list(range(1, 17)))
    first = stream.token(0)
    appears = [i for i in range(200) if stream.token(i) == first]
    request = request_of("a", 16, max_tokens=200)
    request.stop_token_ids, request.min_tokens = frozenset({first}), appears[1]
    scheduler = SimScheduler(Simulated())
    scheduler.submit(request)
    finish = None
    while finish is None:
        begin(scheduler)
        for sampled in scheduler.complete(0.0, 0.0):
            finish = sampled.finish
    assert request.sampled == appears[1] + 1 and finish is FinishReason.STOP
    assert (sampled.token, sampled.stop_token) == (first, first)


def test_impossible_request_is_refused() -> None:
    scheduler = SimScheduler(Simulated(blocks=4, max_model_len=64))
    for request, why in [
        (request_of("a", 64), "longest sequence is 64"),
        (request_of("a", 60, resume=10), "has 70 tokens"),
        (request_of("a", 0), "no tokens"),
    ]:
        with pytest.raises(InvalidEngineRequest, match=why):
            scheduler.submit(request)
    scheduler.submit(request_of("a", 10))
    with pytest.raises(InvalidEngineRequest, match="in use"):
        scheduler.submit(request_of("a", 10))


def test_tokens_depend_on_the_whole_prompt() -> None:
    one, other = TokenStream([1, *range(2, 100)]), TokenStream([0, *range(2, 100)])
    assert [one.token(i) for i in range(20)] != [other.token(i) for i in range(20)]
    assert all(TokenStream([7, 7, 7], eos_token_id=7).token(i) == 6 for i in range(10))


def test_its_load_has_the_adapters_of_its_requests_and_what_loading_one_takes() -> None:
    scheduler = SimScheduler(Simulated(max_loras=1, speed=2))
    for adapter in (1, 2):
        request = request_of(f"of {adapter}", 20, max_tokens=1)
        request.adapter = adapter
        scheduler.submit(request)
    assert scheduler.load().adapters == {1: 1, 2: 1} and scheduler.load().adapter_load_s == 0
    assert [begin(scheduler)[0], end(scheduler)] == [[("of 1", 20)], None], "the other one has no slot"
    assert scheduler.load().adapters == {1: 0, 2: 1} and scheduler.load().adapter_load_s == LOAD_S / 2
