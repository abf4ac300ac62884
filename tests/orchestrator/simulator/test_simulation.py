"""Whole simulated fleets: exact where a formula exists, complete and without leaks where not."""

import random
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from orchestrator.config.settings import ConfigError, SLOConfig
from orchestrator.policy.placement import claim_timeout_s
from orchestrator.policy.ratio import decision
from orchestrator.policy.ratio.load import INTERVAL_S
from orchestrator.simulator import faults, ratio_control
from orchestrator.simulator.engine.profile import PROFILES, Profile, load_profile
from orchestrator.simulator.engine.stay import Stay
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.report import goodput, report
from orchestrator.simulator.settings import SHIPPED, Settings, changed, stack, stack_names
from orchestrator.simulator.simulation import REPORT_AGE_S, Simulation
from orchestrator.simulator.trace import Arrival, Load, at_rate
from orchestrator.simulator.worker import Worker
from orchestrator.types import DesiredRatio, QueueDepth

PROFILE = Profile(
    name="test", origin="made up", step_s=0.01, prefill_s_per_token=0.0001, decode_s_per_seq=0.0005,
    kv_s_per_token=1e-7, blocks=2000, block_size=16, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=30_000,
    kv_bytes_per_token=1000, link_bytes_per_s=1e9, router_s=0.0, ttft_slo_s=1.0, tpot_slo_s=0.1,
)  # fmt: skip


def simulate(load: Load, policy="ours", prefill=2, decode=2, profile=PROFILE, seed=0, **sections) -> Simulation:
    """`sections`: keys of the configuration that are not the defaults, as in `kv={"transfer": "whole"}`."""
    chosen = stack(policy, changed(SHIPPED, sections))
    settings = Settings(prefill=prefill, decode=decode, profile=profile, stack=chosen, seed=seed)
    return Simulation(settings, load)


def assert_no_leaks(sim: Simulation) -> None:
    assert sim.left == 0 and all(job.outcome for job in sim.jobs)
    assert sim.router.queue == [] and sim.router.queue_tokens == 0 and sim.router.claimed == 0
    for worker in sim.workers.values():
        assert worker.idle and worker.kv.used == 0 and worker.pending_tokens == 0, worker.name
        assert worker.batch.empty, worker.name


def test_one_request_alone_takes_what_the_formula_says():
    load = Load("one", [Arrival(0.0, 1000, 101)])
    sim = simulate(load, "field:round_robin", 1, 1, kv={"transfer": "whole"}, routing={"first_token": "decode"}).run()
    job = sim.jobs[0]
    step = PROFILE.step_s + PROFILE.decode_s_per_seq
    prefill = PROFILE.step_s + 0.1
    transfer = 1000 * 1000 / 1e9
    assert job.first_at == pytest.approx(prefill + transfer + step + 999e-7)
    # 100 more tokens, the context growing from 1000 to 1099
    assert job.done_at - job.first_at == pytest.approx(100 * step + 1e-7 * (1000 + 1099) / 2 * 100)
    assert_no_leaks(sim)


REFUSING = {"remote_prefill_min_tokens": 500, "fallback": "refuse"}


def test_a_fleet_without_prefill_workers_refuses_what_it_must_not_prefill_elsewhere():
    load = Load("mixed", [Arrival(0.1 * n, 1000 if n % 2 else 100, 20) for n in range(40)])
    sim = simulate(load, prefill=0, decode=2, routing=REFUSING, ratio={"mode": "off"}).run()
    assert {(job.arrival.prompt_tokens, job.outcome) for job in sim.jobs} == {(1000, "rejected"), (100, "ok")}
    assert sim.router.reasons == {"reject:no_prefill_worker": 20, "local:short_prompt": 20}
    assert_no_leaks(sim)


def test_what_waits_too_long_is_refused_where_it_must_not_go_local():
    load = Load("burst", [Arrival(0.0, 8000, 2) for _ in range(40)])
    patient = {**REFUSING, "claim_timeout_s": 2.0}
    sim = simulate(load, prefill=1, decode=1, routing=patient, ratio={"mode": "off"}).run()
    outcomes, reasons = Counter(job.outcome for job in sim.jobs), sim.router.reasons
    assert reasons["reject:claim_timeout"] > 0
    assert outcomes["rejected"] == reasons["reject:claim_timeout"] + reasons["reject:queue_full"]
    assert outcomes["ok"] == 40 - outcomes["rejected"] > 0
    assert_no_leaks(sim)


def test_prefill_token_comes_before_transfer():
    load = Load("one", [Arrival(0.0, 1000, 101)])
    early, late = [
        simulate(load, "field:round_robin", 1, 1, kv={"transfer": "whole"}, routing={"first_token": way}).run()
        for way in ("prefill", "decode")
    ]
    assert early.jobs[0].first_at == pytest.approx(PROFILE.step_s + 0.1)
    assert early.jobs[0].done_at == late.jobs[0].done_at
    single = simulate(Load("one", [Arrival(0.0, 1000, 1)]), "field:round_robin", 1, 1, kv={"transfer": "whole"}).run()
    assert single.jobs[0].first_at == late.jobs[0].first_at  # decode sends the last token of an answer


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_runs_of_steps_cost_what_single_steps_cost(ahead):
    """The closed form against the same load simulated with every run cut to one step."""
    profile = msgspec.structs.replace(PROFILE, steps_ahead=ahead, prompt_s=0.002)
    load = at_rate(synthetic("bursty", 300, seed=3), 40)
    # This policy uses no predictions, which could differ between the two runs.
    quick = simulate(load, "field:least_tokens", profile=profile).run()
    slow = simulate(load, "field:least_tokens", profile=profile)
    for worker in slow.workers.values():
        worker.batch.max_run_steps = 1
    slow.run()
    for a, b in zip(quick.jobs, slow.jobs, strict=True):
        assert a.first_at == pytest.approx(b.first_at, abs=1e-6) and a.done_at == pytest.approx(b.done_at, abs=1e-6)


def test_workers_that_compute_at_once_slow_each_other():
    profile = msgspec.structs.replace(PROFILE, slowed_beside=(1.25,), kv_s_per_token=0.0)
    step_s = PROFILE.step_s + PROFILE.decode_s_per_seq
    one, two = [
        simulate(Load("few", [Arrival(0.0, 100, tokens) for tokens in outputs]), "round_robin", 0, 2, profile=profile)
        for outputs in ([101], [101, 21])
    ]
    (alone,), (long, short) = one.run().jobs, two.run().jobs
    assert alone.done_at - alone.first_at == pytest.approx(100 * step_s)
    assert short.done_at - short.first_at == pytest.approx(20 * 1.25 * step_s)
    assert long.done_at - long.first_at == pytest.approx((20 * 1.25 + 80) * step_s, rel=0.01), (
        "alone once the other ends"
    )


@pytest.mark.parametrize(("ahead", "waits"), [(0, 0.5), (1, 1.5), (2, 2.5)])
def test_what_arrives_waits_for_scheduled_steps(ahead, waits):
    """A prompt comes in the middle of the eleventh step of a running sequence; one that comes to an idle worker waits
    for nothing."""
    step_s = PROFILE.step_s + PROFILE.decode_s_per_seq
    profile = msgspec.structs.replace(PROFILE, steps_ahead=ahead, prompt_s=0.02, kv_s_per_token=0.0, attention_s=0.0)
    first_s = PROFILE.router_s + PROFILE.step_s + 0.02 + 100 * PROFILE.prefill_s_per_token
    second_at = first_s - PROFILE.router_s + 10.5 * step_s
    load = Load("two", [Arrival(0.0, 100, 100), Arrival(second_at, 100, 5)])
    first, second = simulate(load, "round_robin", 0, 1, profile=profile).run().jobs
    assert first.first_at == pytest.approx(first_s)
    alone_s = first_s + PROFILE.decode_s_per_seq  # the other sequence gets a token in the same step
    assert second.first_at - second_at == pytest.approx(alone_s + waits * step_s)


@pytest.mark.parametrize(("ahead", "waits"), [(1, 3), (2, 5)])
def test_kv_that_arrives_waits_for_the_step_that_finds_it(ahead, waits):
    """So many whole steps longer than where no step is scheduled ahead, while another sequence decodes."""
    # The second prompt takes longer than the decode worker needs to reserve its blocks.
    load = Load("two", [Arrival(0.0, 100, 200), Arrival(1.0, 400, 5)])
    first_at = []
    for steps in (0, ahead):
        profile = msgspec.structs.replace(PROFILE, steps_ahead=steps, kv_s_per_token=0.0)
        sim = simulate(load, "field:round_robin", 1, 1, profile=profile, routing={"first_token": "decode"}).run()
        assert_no_leaks(sim)
        first_at.append(sim.jobs[1].first_at)
    step_s = PROFILE.step_s + PROFILE.decode_s_per_seq
    assert first_at[1] - first_at[0] == pytest.approx(waits * step_s)


@pytest.mark.parametrize("policy", stack_names())
def test_every_policy_serves_everything_and_leaves_nothing_behind(policy):
    sim = simulate(at_rate(synthetic("bursty", 600, seed=1), 12), policy).run()
    figures = report(sim)
    assert_no_leaks(sim)
    assert figures.finished + figures.rejected == 600
    assert 0 < figures.ttft_p50_s <= figures.ttft_p99_s and 0 < figures.itl_p50_s <= figures.itl_p99_s
    assert figures.imbalance >= 1 and 0 < figures.usage < 1


def test_a_run_can_be_repeated_exactly():
    load = at_rate(synthetic("heavy_tailed", 400, seed=2), 15)
    first, second = (report(simulate(load, seed=7).run()) for _ in range(2))
    assert first == second


def test_memory_pressure_preempts_and_still_finishes():
    tight = msgspec.structs.replace(PROFILE, blocks=300)
    load = at_rate(Load("long", [Arrival(i / 10, 300, 600) for i in range(60)]), 5)
    sim = simulate(load, "field:round_robin", 1, 1, profile=tight).run()
    assert report(sim).preemptions > 0
    assert_no_leaks(sim)


def test_generated_tokens_are_those_of_all_answers():
    """The ratio takes the length of answers from them. Halfway, some answers are under way."""
    load = at_rate(synthetic("chat", 300, seed=3), 20)
    sim = simulate(load, prefill=1, decode=3)
    seen = []

    def look(ended: int) -> None:
        if ended == 100 and not seen:
            seen.append(sum(worker.generated_by(sim.now) for worker in sim.workers.values()))

    sim.run(look)
    ended_first = sum(job.arrival.output_tokens for job in sorted(sim.jobs, key=lambda job: job.done_at)[:100])
    assert ended_first < seen[0] < sum(job.arrival.output_tokens for job in sim.jobs)
    assert sum(worker.generated_by(sim.now) for worker in sim.workers.values()) == sum(
        job.arrival.output_tokens for job in sim.jobs
    )


def test_cached_prefixes_are_not_computed_again():
    keys = (1, 2, 3)
    load = Load("same", [Arrival(i * 2.0, 1600, 5, keys) for i in range(10)], unit_tokens=512)
    figures = report(simulate(load, "kv_prefix").run())
    assert figures.prefix_hit > 0.6


def test_a_fleet_of_agents_near_its_limit_meets_its_objectives():
    """At a tenth more requests per second it meets them for four in five."""
    profile, slo = load_profile(PROFILES / "h100-llama-8b.json"), SLOConfig(ttft_s=1.0, tpot_s=0.05)
    settings = Settings(prefill=4, decode=4, profile=profile, stack=stack("ours"), slo=slo)
    attained = []
    for seed in range(3):
        load = at_rate(synthetic("agents", 3500, seed), 31.0)
        attained.append(report(Simulation(settings, load).run(), warm_up=0.25).attained)
    assert min(attained) > 0.95


def test_the_split_changes_after_two_samples_of_a_new_load():
    """As in a fleet, which was observed before: it has the first sample 2 s after the first request."""
    profile, slo = load_profile(PROFILES / "h100-llama-8b.json"), SLOConfig(ttft_s=1.0, tpot_s=0.05)
    settings = Settings(prefill=4, decode=4, profile=profile, stack=stack("ours"), slo=slo)
    sim = Simulation(settings, at_rate(synthetic("code", 400), 60.0)).run()
    first = sim.ratio.decisions[0]
    assert first.more > 0 and first.after.set_at == pytest.approx(2 * INTERVAL_S, abs=REPORT_AGE_S)


LONG_ANSWERS = [Arrival(0.1 * n, 100, 2000) for n in range(4)]  # decode takes more than 20 s
LONG_PROMPTS = [Arrival(5.0 + 0.01 * n, 4000, 2) for n in range(20)]


@pytest.mark.parametrize(("begin", "end"), [((1, 2), (2, 1)), ((2, 1), (1, 2))])
def test_a_worker_that_changes_its_role_does_both_for_a_while(monkeypatch, begin, end):
    changes = [SimpleNamespace(after=DesiredRatio(*end), more=end[0] - begin[0])]
    monkeypatch.setattr(ratio_control, "desired_ratio", lambda *_, **__: changes.pop() if changes else None)
    sim = simulate(
        Load("both", LONG_ANSWERS + LONG_PROMPTS, 0), prefill=begin[0], decode=begin[1], ratio={"mode": "auto"}
    )
    seen = []

    def look(_: int) -> None:
        computes = {name for name in sim.workers if sim.workers[name].prefilling}
        decodes = {name for name in sim.workers if len(sim.workers[name].running) > len(sim.workers[name].prefilling)}
        prefill = {worker.name for worker in sim.router.prefill.workers()}
        seen.append((len(prefill), computes & decodes & prefill))

    sim.run(look)
    assert_no_leaks(sim)
    assert all(job.outcome == "ok" for job in sim.jobs)
    assert {count for count, _ in seen} == {begin[0], end[0]}, "no worker is between the roles"
    if end[0] > begin[0]:
        assert any(both for _, both in seen), "a prefill worker computes prompts beside answers of its former role"


def test_answers_of_the_former_role_get_their_tokens_within_the_objective(monkeypatch):
    """Steps of the former role take 0.21 s, with a batch of 2,048 prompt tokens."""
    changes = [SimpleNamespace(after=DesiredRatio(2, 1), more=1)]
    monkeypatch.setattr(ratio_control, "desired_ratio", lambda *_, **__: changes.pop() if changes else None)
    sim = simulate(Load("both", LONG_ANSWERS + LONG_PROMPTS, 0), prefill=1, decode=2, ratio={"mode": "auto"})
    beside, wake = [], Worker.wake

    def watch(worker: Worker, now: float) -> None:
        if worker.batch.sequences and worker.chunks and worker.name in sim.router.prefill:
            beside.append(now - worker.run.started_at)
        wake(worker, now)

    monkeypatch.setattr(Worker, "wake", watch)
    sim.run()
    assert len(beside) > 10 and max(beside) <= PROFILE.tpot_slo_s
    assert_no_leaks(sim)


def test_the_ratio_follows_the_load():
    prompts_only = at_rate(Load("prompts", [Arrival(i, 3000, 2) for i in range(1500)]), 25)
    sim = simulate(prompts_only, prefill=2, decode=6, ratio={"mode": "auto"}).run()
    assert sim.ratio.decisions and sim.ratio.decisions[-1].after.prefill > 2
    assert_no_leaks(sim)


def quiet(seconds: float, seed: int) -> list[Arrival]:
    """A short request now and then."""
    rng, now, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while (now := now + rng.expovariate(0.7)) < seconds:
        arrivals.append(Arrival(now, 30, 8))
    return arrivals


def test_the_last_prefill_worker_stays_where_nothing_else_holds_back_long_prompts():
    """Without it more could be in time, if the longest documents did not come."""
    profile, slo = load_profile(PROFILES / "h100-llama-8b.json"), SLOConfig(ttft_s=1.0, tpot_s=0.05)
    settings = Settings(prefill=1, decode=1, profile=profile, stack=stack("ours"), slo=slo)
    sim = Simulation(settings, at_rate(synthetic("documents", 2100, seed=1), 14.0)).run()
    assert sim.ratio.decisions == [] and report(sim, warm_up=0.25).attained > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_nearly_idle_fleet_keeps_its_split(seed):
    """Its steps take nearly the objective by themselves, so that the model sees little headroom in any split."""
    slow = msgspec.structs.replace(PROFILE, step_s=0.045, decode_s_per_seq=0.02)
    chosen, load = stack("ours", changed(SHIPPED, {"ratio": {"mode": "auto"}})), Load("quiet", quiet(900, seed), 0)
    slo = SLOConfig(ttft_s=1.0, tpot_s=0.053)
    settings = Settings(prefill=1, decode=1, profile=slow, stack=chosen, seed=seed, slo=slo)
    assert [str(decision) for decision in Simulation(settings, load).run().ratio.decisions] == []


def test_burst_after_quiet_time_moves_workers_as_soon_as_ever(monkeypatch):
    burst = [Arrival(300 + n / 12, 100, 400) for n in range(2000)]
    moved = []
    for nearly_idle in (decision.NEARLY_IDLE, 0.0):
        monkeypatch.setattr(decision, "NEARLY_IDLE", nearly_idle)
        sim = simulate(Load("burst", quiet(300, 0) + burst, 0), ratio={"mode": "auto"}).run()
        moved.append([(change.after.prefill, change.after.set_at) for change in sim.ratio.decisions])
    assert moved[0] and moved[0] == moved[1]


def test_requests_use_free_decode_workers():
    """The load is eight times what the one prefill worker can serve, but the whole fleet can serve it."""
    load = at_rate(Load("long", [Arrival(float(n), 4000, 50) for n in range(400)]), 8)
    sim = simulate(load, "ours:fixed", prefill=1, decode=15).run()
    figures = report(sim)
    assert figures.ttft_p99_s < 3.0 and figures.ttft_max_s < 5.0, figures
    assert_no_leaks(sim)


def test_queued_requests_are_recalled_as_in_the_router():
    sim = simulate(Load("many", [Arrival(0.0, 4000, 10) for _ in range(20)]), "ours:fixed", prefill=1)
    router = sim.router
    for job in sim.jobs:
        router._enqueue(job, 4000, later_s=0.0)
    queued = [(entry[2].id, router._waiting(entry[2])) for entry in router.queue]
    depth = QueueDepth(len(router.queue), router.queue_tokens, router.claimed)
    recalled = [job for job, _, _ in router.policies.recalled(queued, depth, 1)]
    waited = {entry[2].id for entry in router.queue}
    router.recall()
    assert recalled and waited - {entry[2].id for entry in router.queue} == set(recalled)
    sim.now = 1.0 + claim_timeout_s(SHIPPED.routing, router.slo)
    router.recall()  # jobs past their claim deadline leave at once
    assert router.queue == [] and router.queue_tokens == 0


def test_goodput_is_the_edge_of_attainment():
    load = synthetic("heavy_tailed", 300, seed=5)
    found = goodput(lambda rate: report(simulate(at_rate(load, rate), "least_requests").run()), 5, 10, tolerance=0.1)
    assert found.at is not None and found.at.attained >= 0.9
    above = [run for run in found.runs if run.rate > found.rate * 1.01]
    assert above and above[0].attained < 0.9


@pytest.mark.parametrize(
    ("prefill", "decode", "policy", "word"),
    [(1, 0, "ours", "1P0D"), (-1, 2, "ours", "decode worker"), (0, 2, "field:round_robin", "pushes")],
)
def test_impossible_fleets_are_refused(prefill, decode, policy, word):
    with pytest.raises(ConfigError, match=word):
        simulate(synthetic("bursty", 5), policy, prefill, decode)


def test_a_request_that_no_worker_can_hold_is_refused_at_once():
    sim = simulate(Load("huge", [Arrival(0.0, 40_000, 5), Arrival(0.1, 100, 5)])).run()
    assert [job.outcome for job in sim.jobs] == ["too_long", "ok"]


def conversations(turns: int = 6, count: int = 12, unit_tokens: int = 160) -> Load:
    """Each turn repeats what was said, and adds a unit and a few tokens; 3 s lie between two turns."""
    arrivals = [
        Arrival(
            3.0 * turn + 0.2 * number,
            unit_tokens * (12 + turn) + 40,
            20,
            tuple(range(100 * number, 100 * number + 12 + turn)),
        )
        for turn in range(turns)
        for number in range(count)
    ]
    return Load("conversations", arrivals, unit_tokens)


# Every prompt is prefilled remotely, and the prefill worker's cache holds few of the conversations.
SMALL = {"routing": {"remote_prefill_min_tokens": 50, "decode_choice": "round_robin"}, "ratio": {"mode": "off"}}


def forgetful(way: str, link_bytes_per_s: float = 1e9) -> Simulation:
    profile = msgspec.structs.replace(PROFILE, link_bytes_per_s=link_bytes_per_s)
    sim = simulate(conversations(), prefill=1, decode=2, profile=profile, kv={"fetch": way}, **SMALL)
    sim.workers["p0"].kv.total = 600
    return sim.run()


def test_a_fetched_prefix_is_not_computed_and_takes_its_time_of_the_link():
    off, on = forgetful("off"), forgetful("auto")
    assert off.fetches.outcomes == {} and off.fetches.fetched_tokens == 0
    assert on.fetches.outcomes["fetched"] > 20 and not on.fetches.outcomes["missed"]
    computed = [sum(worker.computed_tokens for worker in sim.workers.values()) for sim in (off, on)]
    assert computed[1] == pytest.approx(computed[0] - on.fetches.fetched_tokens, rel=0.05)
    assert computed[1] < 0.7 * computed[0]
    assert report(on).ttft_p50_s < 0.7 * report(off).ttft_p50_s
    for sim in (off, on):
        assert_no_leaks(sim)
        assert not any(worker.fetching for worker in sim.workers.values())
    slow = forgetful("auto", link_bytes_per_s=1e7)  # as slow as computing, once it is known
    assert slow.fetches.fetched_tokens < on.fetches.fetched_tokens / 4
    assert_no_leaks(slow)


def test_a_fleet_that_pushes_nothing_fetches_too():
    """Nobody has measured its links before the first fetch. Its engines compute a token in 36 us."""
    profile, load = load_profile(PROFILES / "h100-llama-8b.json"), at_rate(synthetic("agents", 400, 1), 15.0)
    sim = simulate(load, prefill=0, decode=4, profile=profile, kv={"fetch": "auto"}, ratio={"mode": "off"}).run()
    assert sim.fetches.outcomes["fetched"] > 5
    assert sim.router.link_bytes_per_s.at(sim.now) == profile.link_bytes_per_s, "which a fetch tells"


def test_a_decode_worker_that_prefills_fetches_and_counts_what_waits_for_it():
    """Two decode workers by turns, without a prefill worker: each lacks what the other generated."""
    load = conversations(count=11)  # an odd number: the next turn is on the other worker
    off, on = (simulate(load, prefill=0, kv={"fetch": way}, **SMALL) for way in ("off", "auto"))
    waited: list[tuple[int, int]] = []
    begin = on.fetches.begin

    def begun(stay: Stay, worker: Worker) -> bool:
        tokens = worker.pending_tokens
        if fetches := begin(stay, worker):
            waited.append((worker.pending_tokens - tokens, stay.context - stay.job.hits.get(worker.name, 0)))
        return fetches

    on.router._fetch = begun
    for sim in (off, on):
        sim.run()
        assert_no_leaks(sim)
    assert on.fetches.outcomes == {"fetched": 11} and len(waited) == 11, "each conversation once: a turn is too short"
    assert all(counted == tokens for counted, tokens in waited), "in the worker's load"
    computed = [sum(worker.computed_tokens for worker in sim.workers.values()) for sim in (off, on)]
    assert computed[1] == pytest.approx(computed[0] - on.fetches.fetched_tokens, rel=0.01)


def test_workers_that_die_during_fetches_lose_no_request():
    sim = simulate(conversations(), prefill=2, decode=2, kv={"fetch": "auto"}, **SMALL)
    for worker in ("p0", "p1"):
        sim.workers[worker].kv.total = 600
    for number, name in enumerate(("p0", "d0", "p1", "d1") * 3):
        faults.kill(sim, name, 3.05 + 1.1 * number, 0.6)
    sim.run()
    sim.finish_events()
    assert sim.fetches.outcomes["fetched"] > 5
    assert {job.outcome for job in sim.jobs} == {"ok"}
    assert sim.left == 0 and sim.router.claimed == 0 and not any(it.fetching for it in sim.workers.values())
