"""The simulated scheduler as a pure state machine: blocks are conserved, nobody starves, every token is right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.simulated import Simulated
from orchestrator.policy.choices.steps import prompt_tokens_beside
from orchestrator.types import FinishReason, KVEndpoint, KVSource
from workers.engine import EngineLoad, InvalidEngineRequest, Phase
from workers.sim.caches import LOAD_S
from workers.sim.request import SimRequest, SimState, TokenStream
from workers.sim.scheduler import SimScheduler

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
    held = sum(request.blocks for request in scheduler.requests.values())
    assert held + scheduler.blocks_free == scheduler.config.blocks
    assert scheduler.blocks_free >= 0
    assert all(r.state is SimState.RUNNING for r in scheduler.running)
    assert all(r.state is SimState.WAITING for r in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    for request in scheduler.requests.values():
        assert request.blocks * scheduler.config.block_size >= request.computed


def step(scheduler: SimScheduler, tokens: dict[str, list[int]]) -> bool:
    """One engine step. False when there is nothing to do."""
    batch, receiving = scheduler.schedule()
    assert sum(item.tokens for item in batch) <= scheduler.config.max_num_batched_tokens
    check(scheduler)
    for sampled in scheduler.complete(batch):
        tokens.setdefault(sampled.request.key, []).append(sampled.token)
    check(scheduler)
    return bool(batch or receiving)


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
        scheduler.add(request_of(key, 20))
    scheduler.complete(scheduler.schedule()[0])
    board.grant = 30
    scheduler.add(request_of("long", 100))
    scheduler.add(request_of("short", 25))
    scheduler.add(request_of("remote", 50, remote=True))
    batch, _ = scheduler.schedule()
    assert [(item.request.key, item.tokens) for item in batch] == [("a", 1), ("b", 1), ("long", 30)]
    assert board.told == (2, 125, 1000) and board.planned == (2, 95, False)
    scheduler.complete(batch)
    board.grant = 80
    batch, receiving = scheduler.schedule()
    assert [(item.request.key, item.tokens) for item in batch] == [("a", 1), ("b", 1), ("long", 70), ("short", 10)]
    assert [request.key for request in receiving] == ["remote"]
    assert board.planned == (3, 15, True), "the long one will decode"
    scheduler.complete(batch)
    board.planned = (0, 0, False)
    assert scheduler.schedule(paused=True) == ([], [])
    assert board.planned == (3, 15, True), "a rank that is paused tells what it has, at each step"


def test_a_prompt_for_another_engine_leaves_room_for_those_that_decode_beside_it() -> None:
    """Only beside them, and only such a prompt: what a decode worker prefills itself is computed as vLLM does."""
    scheduler = SimScheduler(Simulated(max_num_seqs=4, max_num_batched_tokens=1000), tpot_s=0.1)
    scheduler.add(request_of("stream", 500))
    scheduler.complete(scheduler.schedule()[0], 500 * 1e-3)
    scheduler.complete(scheduler.schedule()[0], 0.01)
    scheduler.add(request_of("local", 900))
    assert sum(item.tokens for item in scheduler.schedule()[0]) == 901
    scheduler.free(scheduler.requests["local"])
    scheduler.add(request_of("prefill", 900, phase=Phase.PREFILL))
    batch, _ = scheduler.schedule()
    chunk = prompt_tokens_beside(0.1, 0.01, 1e-3)
    assert [(item.request.key, item.tokens) for item in batch] == [("stream", 1), ("prefill", chunk)]
    scheduler.free(scheduler.requests["stream"])
    assert [item.tokens for item in scheduler.schedule()[0]] == [900], "nothing decodes any more"


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
        return sorted(scheduler.awaiting, key=lambda r: r.key)

    for action in actions:
        kind, *values = action
        if kind in ("add", "prefill"):
            key = f"r{len(added)}"
            if kind == "add":
                length, wanted, remote, resume = values
                request = request_of(key, length, wanted, remote=remote, resume=resume)  # type: ignore[arg-type]
            else:
                request = request_of(key, values[0], phase=Phase.PREFILL)  # type: ignore[arg-type]
            scheduler.add(request)
            added[key] = request
        elif kind == "step":
            for _ in range(values[0]):  # type: ignore[call-overload]
                step(scheduler, tokens)
        elif kind in ("arrive", "fail") and awaiting():
            request = awaiting()[values[0] % len(awaiting())]  # type: ignore[operator]
            (scheduler.kv_arrived if kind == "arrive" else scheduler.kv_failed)(request)
        elif kind == "abort" and scheduler.requests:
            request = list(scheduler.requests.values())[values[0] % len(scheduler.requests)]  # type: ignore[operator]
            aborted.add(request.key)
            scheduler.leave(request)
            check(scheduler)
            scheduler.free(request)
        check(scheduler)

    for _ in range(3000):  # whatever waits for KV gets it, whoever is being pushed is fetched
        for request in awaiting():
            scheduler.kv_arrived(request)
        for request in [r for r in scheduler.requests.values() if r.state is SimState.PUSHING]:
            scheduler.free(request)
        if not step(scheduler, tokens) and not scheduler.requests:
            break
    assert not scheduler.requests and scheduler.blocks_free == 20
    for key, request in added.items():
        if key in aborted:
            continue
        start = request.resume_tokens
        assert tokens[key] == [request.stream.token(start + i) for i in range(request.max_tokens)]


def test_decodes_share_a_step_with_a_prefill_in_chunks() -> None:
    scheduler = SimScheduler(Simulated(max_num_batched_tokens=32))
    tokens: dict[str, list[int]] = {}
    scheduler.add(request_of("a", 16, max_tokens=10))
    step(scheduler, tokens)
    scheduler.add(request_of("b", 80))
    steps = 0
    while "b" not in tokens:
        step(scheduler, tokens)
        steps += 1
    assert steps == 3  # 31 tokens beside one decode: 31 + 31 + 18
    assert len(tokens["a"]) == 4


def test_a_stop_token_ends_it_only_after_min_tokens() -> None:
    stream = TokenStream(list(range(1, 17)))
    first = stream.token(0)
    appears = [i for i in range(200) if stream.token(i) == first]
    request = request_of("a", 16, max_tokens=200)
    request.stop_token_ids, request.min_tokens = frozenset({first}), appears[1]
    scheduler = SimScheduler(Simulated())
    scheduler.add(request)
    finish = None
    while finish is None:
        for sampled in scheduler.complete(scheduler.schedule()[0]):
            finish = sampled.finish
    assert request.generated == appears[1] + 1 and finish is FinishReason.STOP


def test_impossible_request_is_refused() -> None:
    scheduler = SimScheduler(Simulated(blocks=4, max_model_len=64))
    for request, why in [
        (request_of("a", 64), "longest sequence is 64"),
        (request_of("a", 60, resume=10), "has 70 tokens"),
        (request_of("a", 0), "no tokens"),
    ]:
        with pytest.raises(InvalidEngineRequest, match=why):
            scheduler.add(request)
    scheduler.add(request_of("a", 10))
    with pytest.raises(InvalidEngineRequest, match="in use"):
        scheduler.add(request_of("a", 10))


def test_tokens_depend_on_the_whole_prompt() -> None:
    one, other = TokenStream([1, *range(2, 100)]), TokenStream([0, *range(2, 100)])
    assert [one.token(i) for i in range(20)] != [other.token(i) for i in range(20)]
    assert all(TokenStream([7, 7, 7], eos_token_id=7).token(i) == 6 for i in range(10))


def test_a_step_has_at_most_so_many_adapters_and_others_go_first():
    scheduler, loads, order = SimScheduler(Simulated(max_loras=2)), list[float](), list[str]()
    for number, adapter in enumerate([1, 2, 3, 1, 0, 3]):
        request = request_of(f"{number}", 20, max_tokens=3)
        request.adapter = adapter
        scheduler.add(request)
    while scheduler.requests:
        batch, _ = scheduler.schedule()
        assert len({item.request.adapter for item in batch} - {0}) <= 2
        order += [item.request.key for item in batch if item.request.key not in order]
        loads.append(scheduler.adapters.load_s(item.request.adapter for item in batch) / LOAD_S)
        scheduler.complete(batch)
        check(scheduler)
    assert order == ["0", "1", "3", "4", "2", "5"]
    assert [number for number in loads if number] == [2.0, 1.0]
    shown = scheduler.adapters.use.shown(EngineLoad(0, 0, 0, 0.0))
    assert len(shown.adapters) == 2 and shown.adapters[3] == 0
    assert shown.adapter_load_s == pytest.approx(LOAD_S)
