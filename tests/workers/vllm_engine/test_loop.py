"""A vLLM engine of a group: its scheduler's limits follow the board, and the board gets each of its steps."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from board_in_vllm.board_in_vllm import install
from support_here import run_here
from support_vllm import scheduler_of

from orchestrator.policy.choices.steps import prompt_tokens_beside
from workers.load.board import _RING, _RINGS, Board, announce

pytestmark = pytest.mark.vllm

LIMIT = 2048


class FakeEngine:
    """What `Steps` uses of vLLM's engine. `seen`: the limits of each call of `schedule`."""

    def __init__(self) -> None:
        self.dp_group, self.current_wave, self.dummies, self.batch_queue_size = object(), 3, 0, 1
        self.seen: list[tuple[int, int]] = []
        self.output = SimpleNamespace(total_num_scheduled_tokens=30, num_scheduled_tokens={"prompt": 30})
        self.scheduler = SimpleNamespace(
            running=[],
            waiting=[],
            kv_holding_waiting=[],
            schedule=self.schedule,
            num_spec_tokens=0,
            num_prefill_lookahead=0,
            max_num_active_reqs=8,
            max_num_scheduled_tokens=LIMIT,
            adaptive_long_prefill_threshold=False,
            scheduler_config=SimpleNamespace(
                long_prefill_token_threshold=0, enable_chunked_prefill=True, disable_chunked_mm_input=False
            ),
            has_unfinished_requests=lambda: bool(self.scheduler.running or self.scheduler.waiting),
        )

    def schedule(self, throttle: bool = False) -> Any:
        at = self.scheduler
        self.seen.append((at.max_num_scheduled_tokens, at.scheduler_config.long_prefill_token_threshold))
        return self.output

    def execute_dummy_batch(self) -> None:
        self.dummies += 1


def steps_of(engine: FakeEngine) -> Any:
    """What plans its steps, of an engine that has that."""
    from workers.vllm_engine import steps

    found = steps.steps_of(engine)
    assert found is not None
    return found


def request(tokens: int, computed: int, status: str = "WAITING", remote: bool = False) -> Any:
    from vllm.v1.request import RequestStatus

    params = {"do_remote_prefill": True} if remote else None
    state = getattr(RequestStatus, status)
    return SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed, status=state, kv_transfer_params=params)


@pytest.fixture
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Of two ranks; this process's is the first."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    found = []
    for rank in (1, 0):
        announce("n-g-1", rank, 2, True)
        board = Board.here()
        assert board is not None
        board.note(1, 1.0, 1)
        found.insert(0, board)
    yield found
    os.environ.pop("PD_RANK_BOARD", None)


def test_a_long_prompt_is_cut_and_what_waits_for_kv_keeps_its_place(boards: list[Board]) -> None:
    engine = FakeEngine()
    for backlogs in ((0, 0), (850, 60)):
        for board, decodes, backlog in zip(boards, (1, 20), backlogs, strict=True):
            board.plan(decodes, backlog, full=False)
        for board in boards:
            board.note(1, 1.0, 1)
    steps = steps_of(engine)
    assert steps_of(engine) is steps
    engine.scheduler.running = [request(101, 100, "RUNNING"), request(1000, 200, "RUNNING")]
    engine.scheduler.waiting = [
        request(50, 0),
        request(400, 0, remote=True),
    ]
    engine.scheduler.kv_holding_waiting = [request(400, 0, "WAITING_FOR_REMOTE_KVS")]
    engine.scheduler.schedule(False)
    # The other rank can reach 80 tokens; this one decodes one, and has two requests that wait for KV.
    assert engine.seen == [(80 + 2, 79)]
    assert engine.scheduler.max_num_scheduled_tokens == LIMIT
    assert engine.scheduler.scheduler_config.long_prefill_token_threshold == 0
    # What it has then, the others read at the next step; and once it has nothing, that.
    steps.ended(True, 1.0)
    goes_on(boards[1])
    assert boards[1]._plans()[0][:2] == (1, 850)
    engine.scheduler.running, engine.scheduler.waiting = [], []
    engine.execute_dummy_batch()
    goes_on(boards[1])
    assert boards[1]._plans()[0] == (0, 0, 0)


def goes_on(board: Board) -> None:
    """Takes a step."""
    board.plan(20, 0, full=False)
    board.note(20, 1.0, 1)


@pytest.mark.parametrize("queued", [1, 2])
def test_a_plan_is_for_the_step_that_begins_when_its_own_has_ended_at_the_latest(
    boards: list[Board], queued: int
) -> None:
    """An engine that schedules asynchronously begins a step before the one before it has ended."""
    engine = FakeEngine()
    engine.batch_queue_size = queued
    other = Board.here(queued)
    assert other is not None
    other._rank, other._own = 1, other._rows[1]
    steps = steps_of(engine)
    engine.scheduler.running = [request(101, 100, "RUNNING")]
    for step in range(1, 4):
        assert [plan[0] for plan in other._plans()] == ([1, 20] if step > queued else [])
        engine.scheduler.schedule(False)
        steps.ended(True, 1.0)
        goes_on(other)


@pytest.mark.parametrize(("places", "drafts", "least"), [(2, 0, 0), (3, 0, 900), (3, 3, 900)])
def test_where_no_place_is_free_a_prompt_may_take_as_long_as_it_likes(
    boards: list[Board], places: int, drafts: int, least: int
) -> None:
    """`max_num_active_seqs` may be less than `max_num_seqs`. Drafts are no sequences that wait for it."""
    engine = FakeEngine()
    engine.scheduler.num_spec_tokens = drafts
    steps = steps_of(engine)
    engine.scheduler.running = [request(101, 100, "RUNNING"), request(1000, 100, "RUNNING")]
    engine.scheduler.max_num_active_reqs = places
    engine.scheduler.schedule(False)
    steps.ended(True, 1.0)
    goes_on(boards[1])
    assert boards[1]._plans()[0] == (1 + drafts, 900, least)


def test_a_prompt_for_another_engine_whose_last_chunk_is_in_the_step_decodes_nothing(boards: list[Board]) -> None:
    """Else the ranks of a prefill group would compute long prompts whole beside short ones."""
    engine = FakeEngine()
    steps = steps_of(engine)
    engine.scheduler.running = [goes_elsewhere(1000, 1000), goes_elsewhere(500, 200)]
    engine.scheduler.schedule(False)
    steps.ended(True, 1.0)
    goes_on(boards[1])
    assert boards[1]._plans()[0][:2] == (0, 300)


def test_without_prompts_the_limits_are_vllms(boards: list[Board]) -> None:
    engine = FakeEngine()
    steps_of(engine)
    engine.scheduler.running = [request(101, 100, "RUNNING")]
    engine.scheduler.schedule(False)
    assert engine.seen == [(LIMIT, 0)]


def test_steps_and_dummy_batches_are_counted(boards: list[Board]) -> None:
    engine = FakeEngine()
    steps = steps_of(engine)
    engine.scheduler.schedule(False)
    steps.ended(True, 500.0)
    boards[1].note(15, 0.5, 4)
    engine.execute_dummy_batch()
    boards[1].note(8, 0.5, 4)
    counted = boards[0].counters()
    assert counted is not None and engine.dummies == 1
    assert (counted.steps, counted.mean_tokens, counted.most_tokens) == (3, 1 + 22.5 + 4, 1 + 30 + 8)
    assert (counted.dummies, counted.waves) == (1, 4)
    of_prompts = list(boards[0]._own[_RINGS + 2 * _RING :])
    assert of_prompts[:4] == [0, 29, 0, 0], "one of the 30 is decoded"


@pytest.mark.parametrize("begins", [False, True], ids=["drained", "another-begins"])
def test_the_last_step_that_was_begun_ahead_is_learned_as_long_as_it_took(boards: list[Board], begins: bool) -> None:
    """With asynchronous scheduling a turn begins a step and waits for the one before it. The turn that waits for the
    last one begins none, and a dummy batch follows; another rank may begin a step instead, and return at once."""
    engine = FakeEngine()
    engine.batch_queue_size = 2
    steps, other = steps_of(engine), boards[1]
    other._ahead = 2
    board = steps._board

    def turn(tokens: int, seconds: float, theirs_s: float) -> None:
        engine.output = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens=dict.fromkeys("a", 1))
        if tokens:
            engine.scheduler.schedule(False)
            steps.ended(True, seconds * 1e3)
        else:
            steps.ended(False, seconds * 1e3)
            engine.execute_dummy_batch()
        other.plan(0, 0, False)
        other.note(0, theirs_s, 1)

    for period in range(60):
        tokens = 10 + 10 * (period % 3)
        took_s = 0.01 + 1e-3 * tokens
        turn(tokens, 5e-4, 0.0)  # nothing to wait for yet
        for _ in range(2):
            turn(tokens, took_s, 0.0)
        turn(0, took_s, 5e-4 if begins else 0.0)
        turn(0, 1e-5, 0.0)
    for tokens in (10, 20, 30):
        assert board._worth._without.at(tokens) == pytest.approx(0.01 + 1e-3 * tokens, rel=0.03)


def test_steps_of_vllms_own_server_are_counted_too(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `benchmarks/bench_ranks.py` measures them."""
    from vllm.v1.engine.core import DPEngineCoreProc

    def take_step(engine: Any) -> bool:
        return bool(engine.scheduler.schedule(False).total_num_scheduled_tokens)

    monkeypatch.setattr(DPEngineCoreProc, "_process_engine_step", take_step)
    install()
    engine: Any = FakeEngine()
    engine.dp_rank = 0
    assert DPEngineCoreProc._process_engine_step(engine)
    boards[1].note(15, 0.5, 4)
    counted = boards[0].counters()
    assert counted is not None
    assert (counted.steps, counted.mean_tokens, counted.most_tokens) == (2, 1 + 22.5, 1 + 30)


def details(prompts: int, prompt_tokens: int, decode: int, again: int = 0) -> Any:
    """`again`: tokens of answers that are computed again, which vLLM counts among those that decode."""
    return SimpleNamespace(
        num_ctx_requests=prompts,
        num_ctx_tokens=prompt_tokens,
        num_generation_requests=decode,
        num_generation_tokens=decode + again,
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine that steps alone and has learned what its steps take: 10 ms, and 0.1 ms for each prompt token."""
    from workers.vllm_engine.steps import TPOT

    monkeypatch.setenv(TPOT, "0.1")
    engine = FakeEngine()
    del engine.dp_group
    steps = steps_of(engine)
    for _ in range(50):
        steps.ended(True, 10.0, details(0, 0, 2))
    # Of an engine that begins steps ahead the last one ends in a turn that begins none.
    steps.ended(False, 110.0, details(1, 1001, 0))
    return engine


CHUNK = prompt_tokens_beside(0.1, 0.01, 1e-4)


def goes_elsewhere(tokens: int, computed: int) -> Any:
    prompt = request(tokens, computed, "RUNNING")
    prompt.kv_transfer_params = {"do_remote_decode": True}
    return prompt


def test_prompts_for_other_engines_are_cut_beside_those_that_decode(alone: FakeEngine) -> None:
    scheduler, decodes = alone.scheduler, request(101, 100, "RUNNING")
    scheduler.running = [decodes, request(1000, 200, "RUNNING")]
    scheduler.kv_holding_waiting = [request(400, 0, "WAITING_FOR_REMOTE_KVS")]
    scheduler.schedule(False)
    scheduler.running = [decodes, goes_elsewhere(1000, 200)]
    scheduler.schedule(False)
    scheduler.running, scheduler.waiting = [decodes], Waiting(goes_elsewhere(1000, 0))
    scheduler.schedule(False)
    assert alone.seen == [(LIMIT, 0), (CHUNK + 2, CHUNK), (CHUNK + 2, CHUNK)]


def test_a_prompt_whose_last_step_is_under_way_is_none_that_decodes(alone: FakeEngine) -> None:
    """As with asynchronous scheduling, which counts tokens as computed when their step begins."""
    alone.scheduler.running, alone.scheduler.waiting = [goes_elsewhere(1000, 1000)], Waiting(goes_elsewhere(500, 0))
    alone.scheduler.schedule(False)
    assert alone.seen == [(LIMIT, 0)]


def test_an_answer_that_is_computed_again_is_no_token_that_takes_long(alone: FakeEngine) -> None:
    steps, scheduler = steps_of(alone), alone.scheduler
    for _ in range(50):
        steps.ended(True, 110.0, details(0, 0, 2, again=1000))
    scheduler.running = [request(101, 100, "RUNNING"), goes_elsewhere(1000, 200)]
    scheduler.schedule(False)
    assert alone.seen[-1][1] == pytest.approx(CHUNK, rel=0.01)


def test_a_first_prompt_that_waited_for_a_compiler_is_forgotten_by_an_engine_too(alone: FakeEngine) -> None:
    """vLLM tells tokens of prompts and requests that have them, of which one may have the first token after its KV."""
    steps, scheduler, decodes = steps_of(alone), alone.scheduler, request(101, 100, "RUNNING")
    scheduler.running = [goes_elsewhere(9000, 200), goes_elsewhere(9000, 200), decodes]
    steps.ended(True, 60_000.0, details(1, 1001, 1))
    for _ in range(40):
        scheduler.schedule(False)
        (tokens, share), prompts = alone.seen[-1], 2
        assert tokens >= prompts * share + 1, "those that decode have their place behind them"
        steps.ended(True, 10.0 + 0.1 * 2 * share, details(2, 2 * share, 1))
    assert alone.seen[-1][1] == pytest.approx(CHUNK / 2, rel=0.1)


def test_drafts_and_what_they_look_ahead_are_not_cut_off(alone: FakeEngine) -> None:
    """vLLM ends at a request whose KV has come and that is given less than a token and its drafts."""
    alone.scheduler.num_spec_tokens, alone.scheduler.num_prefill_lookahead = CHUNK + 10, CHUNK + 20
    alone.scheduler.running = [request(101, 100, "RUNNING"), goes_elsewhere(5000, 200)]
    alone.scheduler.schedule(False)
    assert alone.seen == [(CHUNK + 20 + CHUNK + 11, CHUNK + 20)]


@pytest.mark.parametrize("wanted", [{"enable_chunked_prefill": False}, {"disable_chunked_mm_input": True}])
def test_what_is_to_be_computed_whole_is_not_cut(alone: FakeEngine, wanted: dict[str, bool]) -> None:
    vars(alone.scheduler.scheduler_config).update(wanted)
    alone.scheduler.running = [request(101, 100, "RUNNING"), goes_elsewhere(1000, 200)]
    alone.scheduler.schedule(False)
    assert alone.seen == [(LIMIT, 0)]


class Waiting(list[Any]):
    def __init__(self, *requests: Any) -> None:
        super().__init__(requests)

    def peek_request(self) -> Any:
        return self[0]


def test_without_an_objective_an_engine_that_steps_alone_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm_engine.steps import TPOT, steps_of

    monkeypatch.setenv(TPOT, "0")
    engine = FakeEngine()
    del engine.dp_group
    assert steps_of(engine) is None and engine.scheduler.schedule == engine.schedule


@pytest.mark.parametrize(("chunk", "left", "shares"), [(24, 168, (12, 12)), (24, 6, (6, 18)), (1, 168, (2, 2))])
def test_of_several_prompts_none_takes_the_place_of_those_that_decode_behind_it(
    tmp_path: Path, chunk: int, left: int, shares: tuple[int, int]
) -> None:
    """By vLLM's own scheduler, which takes what runs in the order in which it has begun."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from workers.vllm_engine.steps import schedule_at_most

    init_none_hash(sha256)
    scheduler, hasher = scheduler_of(tmp_path / "tiny", blocks=50), get_request_block_hasher(16, sha256)
    for place, (name, tokens) in enumerate({"first": 32 + left, "second": 200, "decodes": 16}.items()):
        prompt, sampling = [7 + place] * tokens, SamplingParams(max_tokens=9)
        scheduler.add_request(Request(name, prompt, sampling, None, arrival_time=place, block_hasher=hasher))
    step = scheduler.schedule()
    keys = list(step.num_scheduled_tokens)
    sampled = ModelRunnerOutput(keys, {key: at for at, key in enumerate(keys)}, [[], [], [7]])
    scheduler.update_from_output(step, sampled)
    scheduler.adaptive_long_prefill_threshold = True  # as `long_prefill_token_threshold_adaptive` sets it
    step = schedule_at_most(scheduler, chunk, 1, scheduler.schedule)
    assert scheduler.adaptive_long_prefill_threshold
    assert step.num_scheduled_tokens == {"first": shares[0], "second": shares[1], "decodes": 1}


def makes_one() -> None:
    from workers.vllm_engine import loop, plugin

    for name in [name for name in os.environ if name.startswith(("PD_", "VLLM_RPC"))]:
        del os.environ[name]
    told, made = list[str](), list[str]()
    worker = SimpleNamespace(peer_addresses=SimpleNamespace(spare_connections=lambda: told.append(made[-1])))
    loop.has_kv_transfer_group = lambda: True
    loop.get_kv_transfer_group = lambda: SimpleNamespace(connector_worker=worker)
    plugin.die_with_parent = plugin.register = plugin.patch_as_configured = lambda *_: None
    plugin.EngineCoreProc.__init__ = lambda self: made.append("its sockets")
    plugin._vllm_target = lambda **_: plugin.EngineCoreProc()
    plugin.run_engine_core(vllm_config=None)
    assert told == ["its sockets"], told
    loop.get_kv_transfer_group = lambda: SimpleNamespace(connector_worker=None)  # its ranks are other processes
    loop.spare_sockets()
    loop.get_kv_transfer_group = lambda: SimpleNamespace()  # another connector
    loop.spare_sockets()


def test_an_engine_that_has_been_made_spares_its_own_connections() -> None:
    """In a process of its own: it changes vLLM's classes."""
    made = run_here(makes_one)
    assert made.returncode == 0, made.stderr
