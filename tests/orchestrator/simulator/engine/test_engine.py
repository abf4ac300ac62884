"""The model of an engine, step by step."""

from types import SimpleNamespace

import msgspec
import pytest

from orchestrator.simulator.engine.engine import Engine
from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.engine.stay import Stay

PROFILE = Profile(
    name="test", origin="made up", step_s=0.01, prefill_s_per_token=0.001, blocks=100, block_size=10, max_num_seqs=8,
    max_num_batched_tokens=100, kv_bytes_per_token=1, link_bytes_per_s=1.0,
)  # fmt: skip


class LoadingEngine(Engine):
    """Its loads from the host tier end when the test says so."""

    def load_prefix(self, stay: Stay, tokens: int, now: float) -> None:
        self.loading = (stay, tokens)


def engine_of(host_blocks: int = 0, **profile: int) -> LoadingEngine:
    ignore = lambda *_: None  # noqa: E731
    events = SimpleNamespace(on_start=ignore, on_prefilled=ignore, on_first=ignore, on_done=ignore)
    return LoadingEngine(msgspec.structs.replace(PROFILE, **profile), 10, events, host_blocks)


def stay_of(
    engine: Engine, tokens: int, order: float = 0.0, phase: str = "local", key: int = 0, adapter: int = 0
) -> Stay:
    """`key`: of the first block; 0: it shares nothing."""
    keys = range(key, key + tokens // 10) if key else ()
    stay = Stay(None, phase, tokens, 50, keys, order, adapter=adapter)  # type: ignore[arg-type]
    engine.add(stay)
    return stay


def step(engine: Engine) -> list[int]:
    """The prompt tokens of each prompt in a step of its own."""
    run = engine.next_step(0.0)
    assert run is not None and engine.kv.used <= engine.kv.total
    tokens = [tokens for _, tokens in engine.chunks]
    engine.finish(1, 0.0)
    assert engine.kv.used <= engine.kv.total
    return tokens


def test_a_prefix_is_found_from_the_step_on_that_computes_it() -> None:
    engine = engine_of()
    first, same = stay_of(engine, 250, key=1), stay_of(engine, 250, 1.0, key=1)
    assert [step(engine), step(engine)] == [[100], [100]] and not same.started
    assert step(engine) == [50, 10], "as of vLLM's, the last block is computed to sample a token"
    assert (first.hit_tokens, same.hit_tokens) == (0, 240)
    late = stay_of(engine, 250, 2.0, key=1)
    engine.next_step(0.0)
    assert engine.leave(late) and engine.kv.hit_units(late.keys) == 25


def test_what_leaves_before_it_is_computed_is_not_cached() -> None:
    engine = engine_of()
    stay = stay_of(engine, 250, key=1)
    step(engine)
    assert engine.next_step(0.0) is not None and engine.leave(stay)
    engine.finish(1, 0.0)
    engine.free(stay)
    assert engine.kv.hit_units(stay.keys) == 20 and engine.kv.used == 0 and engine.pending_tokens == 0
    receiver = stay_of(engine, 100, phase="remote", key=100)
    assert engine.next_step(0.0) is None and engine.kv.used == 10
    engine.lose(receiver)
    assert engine.kv.used == 0 and engine.kv.hit_units(receiver.keys) == 0
    assert step(engine) == [100] and receiver.phase == "local"


def test_kv_that_came_is_cached_from_the_step_on_that_is_scheduled_with_it() -> None:
    engine = engine_of()
    running = [stay_of(engine, 10) for _ in range(PROFILE.max_num_seqs)]
    step(engine)
    receiver = stay_of(engine, 100, 1.0, phase="remote", key=100)
    step(engine)
    engine.receive(receiver)
    step(engine)
    assert receiver not in engine.running and engine.kv.hit_units(receiver.keys) == 0, "no sequence is free"
    assert engine.leave(running[0])
    engine.next_step(0.0)
    assert receiver in engine.running and engine.kv.hit_units(receiver.keys) == 10


@pytest.mark.parametrize("phase", ["local", "prefill"])
@pytest.mark.parametrize("tokens", [81, 95, 100])
def test_a_prompt_loads_from_the_host_tier_into_blocks_of_its_own_when_it_is_admitted(phase: str, tokens: int) -> None:
    engine = engine_of(blocks=12, host_blocks=40)
    earlier = stay_of(engine, 80, key=1, phase="prefill")
    step(engine)
    engine.free(earlier)
    busy, stay = stay_of(engine, 100, phase="prefill"), stay_of(engine, tokens, 1.0, phase, key=1)
    step(engine)
    assert engine.kv.hit_units(stay.keys) == 2 and not stay.started, "evicted while it waits"
    engine.free(busy)
    assert engine.next_step(0.0) is None and engine.loading == (stay, 60)
    assert engine.kv.used == -(-tokens // 10) and engine.kv.hit_units(stay.keys) == 2
    stay_of(engine, 120, 2.0)
    assert engine.next_step(0.0) is None, "its blocks are not for others meanwhile"
    engine.receive(stay)
    assert step(engine) == [tokens - 80] and engine.pending_tokens == 120
    assert engine.kv.hit_units(stay.keys) == len(stay.keys)


def test_a_prompt_that_leaves_while_it_loads_takes_nothing_along() -> None:
    engine = engine_of(blocks=12, host_blocks=40)
    for n, key in enumerate((1, 0)):
        other = stay_of(engine, 100, n, "prefill", key)
        step(engine)
        engine.free(other)
    stay = stay_of(engine, 100, key=1)
    assert engine.next_step(0.0) is None and engine.leave(stay)
    engine.free(stay)
    assert engine.kv.used == engine.pending_tokens == engine.held == 0 and engine.kv.hit_units(stay.keys) == 2


def test_a_step_that_preempts_admits_nobody() -> None:
    engine = engine_of(blocks=11)
    early, late = stay_of(engine, 50), stay_of(engine, 50, 1.0)
    step(engine)
    small = stay_of(engine, 10, 0.5)
    step(engine)
    assert engine.preemptions == 1 and engine.waiting == [small, late] and list(engine.running) == [early]


def test_one_alone_that_finds_no_block_waits_for_those_of_others() -> None:
    engine = engine_of(blocks=12)
    stay, receiver = stay_of(engine, 60), stay_of(engine, 60, 1.0, phase="remote")
    step(engine)
    assert engine.kv.free == 0
    assert engine.next_step(0.0) is None and engine.waiting == [stay] and engine.preemptions == 1
    assert engine.leave(receiver)
    engine.free(receiver)
    assert step(engine) == [61]


def test_decodes_share_a_step_with_the_chunks_of_a_prompt() -> None:
    engine = engine_of()
    early = stay_of(engine, 10)
    step(engine)
    late = stay_of(engine, 250, 1.0)
    assert [step(engine), step(engine), step(engine)] == [[99], [99], [52]], "beside one token of the other"
    assert (engine.generated(early), engine.generated(late)) == (4, 1)
    assert engine.next_step(0.0) is not None and engine.run.first_s == pytest.approx(PROFILE.step_s)


@pytest.mark.parametrize("phase", ["local", "remote"])
def test_those_of_other_adapters_overtake_those_that_wait_for_a_slot(phase: str) -> None:
    engine = engine_of(adapter_slots=2, max_num_seqs=5)
    first = stay_of(engine, 10, adapter=1)
    step(engine)
    if phase == "local":
        second = stay_of(engine, 10, adapter=2)
        step(engine)
    behind = [stay_of(engine, 10, order, phase, adapter=adapter) for order, adapter in enumerate((3, 3, 3, 1, 1, 0))]
    step(engine)
    waiting = engine.waiting
    if phase == "remote":
        assert set(engine.receiving) == set(behind), "while they have no slot they take none"
        second = stay_of(engine, 10, 9.0, adapter=2)
        step(engine)
        for stay in behind:
            engine.receive(stay)
        step(engine)
        waiting = engine.arrived
    assert waiting == behind[:3] and list(engine.running) == [first, second, *behind[3:]]
    assert engine.leave(second)
    step(engine)
    assert list(engine.running)[-1] is behind[0] and len(engine.running) == 5
