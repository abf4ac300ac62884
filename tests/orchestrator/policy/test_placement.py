"""Local, remote or rejected, and why."""

import random

import msgspec
import pytest

from orchestrator.config.settings import RoutingConfig, SLOConfig
from orchestrator.policy import placement
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import (
    LATENESS_TOLERANCE,
    ROOM_SHARE,
    Local,
    PrefillView,
    Reject,
    Remote,
    is_full,
    place,
    reject_all,
)
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import EngineSpeed, QueueDepth


@pytest.fixture(autouse=True)
def four_may_wait(monkeypatch):
    monkeypatch.setattr(placement, "MAX_WAITING", 4)


ROUTING = RoutingConfig(remote_prefill_min_tokens=256)
SHIPPED_SLO = SLOConfig(ttft_s=1.0, tpot_s=0.05)
IDLE = PrefillView(workers_ready=1, queue=QueueDepth(requests=0, tokens=0, claimed=0))


def request(tokens: int, local_only: str | None = None) -> RequestInfo:
    return RequestInfo(id="r", prompt_tokens=tokens, max_new_tokens=64, arrived_at=0.0, local_only=local_only)


def worker(name: str = "d0", free: int = 1000, waiting: int = 0, cached: int = 0) -> Candidate:
    return Candidate(name, 1000, free, 16, running=0, waiting=waiting, waiting_tokens=0, cached_tokens=cached)


def decide(req: RequestInfo, *workers: Candidate, prefill: PrefillView = IDLE):
    return place(req, workers, prefill, ROUTING, decode_choice("kv_blocks"), Predictor())


def test_length_decides_between_local_and_remote():
    assert decide(request(255), worker()) == Local("d0", "short_prompt")
    assert decide(request(256), worker()) == Remote("long_prompt")


def test_prefix_hit_shortens_prompt_on_its_worker_only():
    assert decide(request(2000), worker("a", free=900), worker("b", free=500, cached=1900)) == Local(
        "b", "short_prompt"
    )
    full = worker("b", free=0, waiting=4, cached=1900)
    assert decide(request(2000), worker("a"), full) == Remote("long_prompt")


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        (PrefillView(0, QueueDepth(0, 0, 0)), "no_prefill_worker"),
        (PrefillView(1, None), "queue_unavailable"),
        (PrefillView(1, QueueDepth(9, 9_900_000, 0)), "queue_full"),
    ],
)
def test_long_prompts_stay_local_when_they_cannot_go_remote(prefill, reason):
    assert decide(request(300), worker(), prefill=prefill) == Local("d0", reason)


REFUSING = msgspec.structs.replace(ROUTING, fallback="refuse")
AWAY = [
    (PrefillView(0, QueueDepth(0, 0, 0)), "no_prefill_worker"),
    (PrefillView(1, None), "queue_unavailable"),
    (PrefillView(1, QueueDepth(9, 9_950_000, 0)), "queue_full"),
    (PrefillView(1, QueueDepth(0, 0, 0), blocked="claim_timeout"), "claim_timeout"),
]


def refusing(req: RequestInfo, *workers: Candidate, prefill: PrefillView, routing: RoutingConfig = REFUSING):
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    return place(req, workers, prefill, routing, decode_choice("kv_blocks"), predictor)


@pytest.mark.parametrize(("prefill", "reason"), AWAY)
def test_long_prompts_are_refused_when_they_cannot_go_remote_and_must_not_stay(prefill, reason):
    refused = refusing(request(300), worker(), prefill=prefill)
    assert refused == Reject(reason, refused.retry_after_s, no_fallback=True) and refused.retry_after_s > 0
    # What no prefill worker would get anyhow stays.
    assert refusing(request(255), worker(), prefill=prefill) == Local("d0", "short_prompt")
    assert refusing(request(5000), worker(cached=4900), prefill=prefill) == Local("d0", "short_prompt")
    assert refusing(request(5000, local_only="n"), worker(), prefill=prefill) == Local("d0", "n")
    full = refusing(request(100), worker(free=2, waiting=4), prefill=prefill)
    assert isinstance(full, Reject) and full.reason == "decode_full" and not full.no_fallback
    assert refusing(request(300), worker(), prefill=IDLE) == Remote("long_prompt")


@pytest.mark.parametrize(("prefill", "reason"), AWAY)
def test_by_cost_what_an_idle_prefill_worker_would_get_is_refused(prefill, reason):
    by_times = msgspec.structs.replace(REFUSING, remote_prefill_min_tokens=None)
    busy, idle = decoding("busy", 60), decoding("idle", 0)
    refused = refusing(request(4000), busy, prefill=prefill, routing=by_times)
    assert isinstance(refused, Reject) and refused.reason == reason and refused.no_fallback
    assert refusing(request(4000), busy, idle, prefill=prefill, routing=by_times) == Local("idle", "cost")
    assert isinstance(refusing(request(4000), busy, prefill=IDLE, routing=by_times), Remote)


def test_local_only_request_keeps_its_reason():
    assert decide(request(5000, local_only="n"), worker()) == Local("d0", "n")


def test_full_fleet_rejects_request_that_cannot_go_remote():
    full = worker(free=2, waiting=4)
    away = PrefillView(1, None)
    decision = decide(request(300), full, prefill=away)
    assert isinstance(decision, Reject) and decision.reason == "decode_full" and decision.retry_after_s > 0
    assert decide(request(300), full) == Remote("long_prompt")
    assert decide(request(100), full) == Remote("decode_full")
    # It lacks blocks, but one more request may wait there.
    assert decide(request(300), worker(free=2, waiting=3), prefill=away) == Local("d0", "queue_unavailable")


def test_no_worker_at_all_rejects():
    decision = decide(request(10))
    assert isinstance(decision, Reject) and decision.reason == "no_decode_worker"


def by_cost(
    tokens: int,
    *workers: Candidate,
    queued: int = 0,
    prefill: PrefillView | None = None,
    itl_s: float = 0.02,
    kind: type[Predictor] = Predictor,
):
    predictor = kind(prior_s_per_token=0.001, prior_itl_s=itl_s)
    routing = RoutingConfig()
    view = prefill or PrefillView(1, QueueDepth(1, queued, 0))
    slo = SLOConfig(ttft_s=2.0, tpot_s=0.1)
    return place(request(tokens), workers, view, routing, decode_choice("kv_blocks"), predictor, slo)


def remote_by_cost(decision) -> bool:
    return isinstance(decision, Remote) and decision.reason == "cost"


def decoding(name: str, running: int, waiting_tokens: int = 0) -> Candidate:
    return Candidate(name, 1000, 900, 16, running, 0, waiting_tokens)


def test_cost_takes_lower_ttft():
    assert by_cost(1000, worker(), queued=5000) == Local("d0", "cost")
    assert by_cost(1000, worker("a", cached=900)) == Local("a", "cost")
    waiting = msgspec.structs.replace(worker(), waiting=1, waiting_tokens=3000)
    assert by_cost(1000, waiting, queued=0) == Remote("cost", pytest.approx(1.02))


class Thorough(Predictor):
    """Works out the ITL of every candidate."""

    def local_s(self, candidates, prompt_tokens, by_sequences=False, most_s=0.0):
        return super().local_s(candidates, prompt_tokens, by_sequences)


def test_a_worker_on_which_the_prompt_takes_longer_than_remotely_changes_no_decision():
    rng, local = random.Random(7), 0
    for _ in range(500):
        tokens, queued = rng.randrange(10, 4000), rng.choice((0, 200, 2000))
        workers = [
            msgspec.structs.replace(decoding(f"d{n}", rng.randrange(4), rng.randrange(3000)), cached_tokens=cached)
            for n, cached in enumerate(rng.choices(range(tokens), k=4))
        ]
        decision = by_cost(tokens, *workers, queued=queued)
        local += isinstance(decision, Local)
        assert decision == by_cost(tokens, *workers, queued=queued, kind=Thorough)
    assert 50 < local < 450


def test_a_tie_is_local():
    for tokens in (10, 300, 8000):
        assert by_cost(tokens, worker()) == Local("d0", "cost")


def test_a_prompt_leaves_those_alone_that_decode_while_the_prefill_workers_have_room():
    assert by_cost(100, decoding("idle", 0)) == Local("idle", "cost")
    assert remote_by_cost(by_cost(100, decoding("busy", 8)))
    # The nearer the sequences are to their objective, the fewer of them keep it away.
    assert by_cost(100, decoding("slack", 3), queued=60, itl_s=0.01) == Local("slack", "cost")
    assert remote_by_cost(by_cost(100, decoding("tight", 3), queued=60, itl_s=0.07))


def test_harm_within_objectives_counts_no_more_once_the_queue_grows():
    free_s = ROOM_SHARE * 2.0
    assert by_cost(100, decoding("busy", 8), queued=int(free_s * 1000)) == Local("busy", "cost")
    assert remote_by_cost(by_cost(100, decoding("busy", 8), queued=int(free_s * 300)))


def test_known_transfer_time_needs_smaller_gain():
    predictor = Predictor(prior_s_per_token=0.001, prior_itl_s=0.02)
    a_little_longer = msgspec.structs.replace(worker(), waiting=1, waiting_tokens=15)

    def decision():
        return place(request(1000), [a_little_longer], IDLE, RoutingConfig(), decode_choice("kv_blocks"), predictor)

    assert decision() == Local("d0", "cost")
    for tokens in range(500, 2000, 100):
        predictor.observe_transfer(tokens, 0.001)
    assert remote_by_cost(decision())


def test_cost_counts_decoding_sequences():
    assert remote_by_cost(by_cost(4000, decoding("busy", 60), queued=1000))
    assert by_cost(4000, decoding("idle", 0), queued=1000) == Local("idle", "cost")
    # A worker that misses the TPOT objective is excluded, however long the queue is.
    assert remote_by_cost(by_cost(4000, decoding("busy", 10), queued=14_000, itl_s=0.095))


def test_cost_without_queue_takes_least_loaded_worker():
    away = PrefillView(1, None)
    assert by_cost(1000, decoding("a", 5, 9000), decoding("b", 5, 0), prefill=away) == Local("b", "queue_unavailable")


@pytest.mark.parametrize(("running", "waiting", "full"), [(8, 4, True), (8, 3, False), (7, 4, False), (0, 12, True)])
def test_worker_is_full_when_batch_and_waiting_are_full(running, waiting, full):
    candidate = Candidate("a", 1000, 900, 16, running, waiting, waiting_tokens=0, max_num_seqs=8)
    routing = RoutingConfig()
    assert is_full(request(100), candidate) is full
    away = PrefillView(0, None)
    assert (reject_all([candidate], away, routing, Predictor(), SLOConfig()) is not None) is full


def stay_local(predictor: Predictor, tokens: int, *workers: Candidate) -> str:
    alone = PrefillView(0, QueueDepth(0, 0, 0))
    slo = SLOConfig(ttft_s=1.0, tpot_s=0.05)
    decision = place(request(tokens), workers, alone, RoutingConfig(), decode_choice("kv_prefix"), predictor, slo)
    assert isinstance(decision, Local) and decision.reason == "no_prefill_worker"
    return decision.worker_id


def measured() -> Predictor:
    """40 us per prompt token; TPOT is 10 ms for one sequence and 20 ms for 100."""
    predictor = Predictor()
    predictor.set_prior(EngineSpeed(0.0, 4e-5, 0.01, 1e-4))
    for _ in range(50):
        predictor.observe_itl("d0", 0.02, 100)
    return predictor


def decode_worker(name: str, running: int, cached: int = 0, waiting: int = 0, free: int = 20_000) -> Candidate:
    return Candidate(name, 25_000, free, 16, running, waiting, 0, cached_tokens=cached, max_num_seqs=256)


@pytest.mark.parametrize(
    ("ttft_s", "running", "local"),
    [
        (2.0, 100, True),  # 20 ms a token, as measured
        (2.0, 400, False),  # 50 ms with so many: they came in a burst, and have not been measured yet
        (0.5, 400, True),  # a remote prefill might be late
    ],
)
def test_burst_keeps_prompts_off_decode_while_remote_prefill_is_in_time(ttft_s, running, local):
    slo, queue = SLOConfig(ttft_s=ttft_s, tpot_s=0.05), QueueDepth(5, 8000, 0)
    busy, choose = decode_worker("d0", running), decode_choice("kv_prefix")
    decision = place(request(400), [busy], PrefillView(1, queue), RoutingConfig(), choose, measured(), slo)
    assert isinstance(decision, Local) is local


@pytest.mark.parametrize(("output_tokens", "local"), [(6, False), (600, True)])
def test_prefill_on_an_empty_worker_delays_those_that_come_meanwhile(output_tokens, local):
    """Each found 0.4 others there: with answers of six tokens five come in a second, with 600 one in 20 seconds."""
    predictor = Predictor()
    predictor.set_prior(EngineSpeed(0.0, 5e-5, 0.013))
    for number in range(500):
        predictor.observe_output(output_tokens)
        predictor.observe_itl("d0", 0.013, 1 + (number % 5 < 2))
    slo, queue = SLOConfig(ttft_s=5.0, tpot_s=0.05), QueueDepth(1, 6000, 0)  # a wait of 0.3 s
    choose = decode_choice("kv_prefix")
    decision = place(
        request(9000), [decode_worker("d0", 0)], PrefillView(1, queue), RoutingConfig(), choose, predictor, slo
    )
    assert isinstance(decision, Local) is local


def test_conversation_leaves_worker_near_tpot_objective():
    idle = decode_worker("idle", 10)
    assert stay_local(measured(), 3100, decode_worker("holder", 40, cached=3000), idle) == "holder"
    assert stay_local(measured(), 1000, decode_worker("holder", 240, cached=900), idle) == "idle"


def test_long_prompt_stays_where_it_is_cached():
    holder, empty = decode_worker("holder", 120, cached=8000), decode_worker("empty", 60)
    assert stay_local(measured(), 8100, holder, empty) == "holder"
    # The empty worker has no sequences now, but the prefill would delay the requests that arrive during it.
    assert stay_local(measured(), 8100, holder, decode_worker("empty", 0)) == "holder"


def test_prompt_leaves_full_worker():
    full = decode_worker("full", 255, waiting=30, cached=64)
    assert stay_local(measured(), 100, full, decode_worker("other", 250)) == "other"
    full = decode_worker("full", 240, cached=64, free=10)
    assert stay_local(measured(), 100, full, decode_worker("other", 250, free=10_000)) == "other"


def lateness(taken: Candidate, workers: list[Candidate], prompt_tokens: int, predictor: Predictor) -> float:
    """The growth of total lateness, straight from its definition: the squares of times over their objectives."""

    def tpot_s(c: Candidate, tokens: float = 0, sequences: int = 0) -> float:
        fixed_s, each_s = predictor.tpot_line
        lost_s = predictor.s_per_token / predictor.ahead_tokens
        there = c.waiting_tokens + c.placed_tokens + tokens
        return fixed_s + each_s * (c.running + c.waiting + sequences) + lost_s * there

    def late(tpot: float) -> float:
        return (tpot / SHIPPED_SLO.tpot_s) ** 2

    tokens, sequences = max(0, prompt_tokens - taken.cached_tokens), taken.running + taken.waiting
    grown = prompt_tokens + taken.waiting_tokens + (sequences + 2) * predictor.ahead_tokens
    lacking = grown / taken.block_size - taken.blocks_free
    must_end = max(
        0.0,
        lacking / max(1, taken.blocks_total - taken.blocks_free),
        (sequences + 1 - taken.max_num_seqs) / max(1, taken.running),
    )
    (ttft_s,) = predictor.local_ttft_s([taken], prompt_tokens)
    ttft_s += must_end * 2 * predictor.ahead_tokens * tpot_s(taken)
    own = (ttft_s / SHIPPED_SLO.ttft_s) ** 2 + late(tpot_s(taken, tokens, 1))
    others = taken.running * (late(tpot_s(taken, sequences=1)) - late(tpot_s(taken)))
    mean_running = sum(c.running for c in workers) / len(workers)
    met_s = max(tpot_s(taken), sum(map(tpot_s, workers)) / len(workers))
    lost_s = predictor.s_per_token / predictor.ahead_tokens * tokens
    return own + others + max(taken.running, mean_running) * (late(met_s + lost_s) - late(met_s))


def test_request_goes_where_total_lateness_grows_least():
    rng, predictor, nobody = random.Random(4), Predictor(0.00004), PrefillView(0, QueueDepth(0, 0, 0))
    for n in range(300):
        predictor.observe_itl(f"d{n % 4}", rng.uniform(0.01, 0.03), rng.randrange(1, 100))
        predictor.observe_local(f"d{n % 4}", rng.randrange(100, 9000), rng.random())
    for _ in range(200):
        workers = [
            Candidate(
                worker_id=f"d{n}",
                blocks_total=24_800,
                blocks_free=rng.choice([rng.randrange(2000), rng.randrange(24_800)]),
                block_size=16,
                running=rng.randrange(128),
                waiting=rng.randrange(3),
                waiting_tokens=rng.randrange(9000),
                cached_tokens=rng.choice([0, 2000, 5000]),
                max_num_seqs=128,
                placed_tokens=rng.choice([0, 500]),
            )
            for n in range(8)
        ]
        taken = place(
            request(4000), workers, nobody, RoutingConfig(), decode_choice("kv_prefix"), predictor, SHIPPED_SLO
        )
        late = {c.worker_id: lateness(c, workers, 4000, predictor) for c in workers}
        assert late[taken.worker_id] <= min(late.values()) * LATENESS_TOLERANCE * (1 + 1e-9)
