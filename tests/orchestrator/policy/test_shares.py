"""Shares of tenants: who asks for more than its own goes behind, and delays nobody else."""

import random
import statistics

import pytest

from orchestrator.config.settings import SLOConfig, parse_config
from orchestrator.policy.choices.named import decode_choice
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import Local, PrefillView, Remote
from orchestrator.policy.policies import Policies
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.shares import Shares
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.job import Job
from orchestrator.simulator.settings import SHIPPED, Settings, changed, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load
from orchestrator.types import EngineSpeed, QueueDepth

WARM_UP_S = 10.0  # while times are learned


def test_a_tenant_leads_by_its_work_over_its_share():
    shares = Shares({"big": 3.0, "*": 1.0})
    shares.count("big", 0.1, 0.0, most_s=10.0)
    shares.count("small", 0.1, 0.0, most_s=10.0)  # a quarter of the fleet is its
    shares.count("big", 0.3, 1.0, most_s=10.0)
    assert shares.lead_s("small", 0.0) == pytest.approx(0.4) and shares.lead_s("small", 0.3) == pytest.approx(0.1)
    assert shares.lead_s("small", 1.0) == 0.0 and shares.lead_s("big", 1.0) == pytest.approx(0.4)
    assert shares.lead_s("new", 1.0) == 0.0


def test_a_lead_is_bounded_and_counts_only_while_others_ask():
    shares = Shares({"*": 1.0})
    for _ in range(100):
        shares.count("flood", 1.0, 0.0, most_s=5.0)
    assert shares.lead_s("flood", 0.0) == 0.0, "nobody else wants anything"
    shares.count("other", 0.001, 1.0, most_s=5.0)
    assert shares.lead_s("flood", 1.0) == pytest.approx(4.0)
    shares.count("flood", 1.0, 40.0, most_s=5.0)
    shares.count("flood", 1.0, 40.0, most_s=5.0)
    assert shares.lead_s("flood", 40.0) == 0.0, "the other has asked for nothing for long"


def jobs(
    rates: dict[str, float], tokens: tuple[int, int], ttft_s: float, seconds: float = 190.0
) -> dict[str, list[Job]]:
    """By tenant, of simulated H100s in 1P1D. They carry about 14 prompts of 2,000 tokens a second, 4 of 8,000."""
    arrivals = []
    for tenant, rate in rates.items():
        random_, at = random.Random(tenant), 0.0
        while (at := at + random_.expovariate(rate)) < seconds:
            arrivals.append(Arrival(at, random_.randint(*tokens), random_.randint(50, 150), tenant=tenant))
    settings = Settings(
        prefill=1,
        decode=1,
        profile=load_profile(PROFILES / "h100-llama-8b.json"),
        stack=stack("ours:fixed", changed(SHIPPED, {"limits": {"shares": {"*": 1}}})),
        slo=SLOConfig(ttft_s=ttft_s, tpot_s=0.05),
    )
    simulation = Simulation(settings, Load("tenants", sorted(arrivals, key=lambda arrival: arrival.at)))
    simulation.run()
    learned = [job for job in simulation.jobs if job.arrival.at > WARM_UP_S]
    return {tenant: [job for job in learned if job.arrival.tenant == tenant] for tenant in rates}


def ttfts(found: list[Job]) -> list[float]:
    return [job.first_at - job.arrival.at for job in found if job.first_at is not None]


def in_time(found: list[Job], within_s: float) -> float:
    return sum(ttft_s <= within_s for ttft_s in ttfts(found)) / len(found)


@pytest.mark.parametrize(
    ("tokens", "share", "ttft_s", "most"), [((1000, 3000), 14 / 3, 1.0, 1.2), ((7000, 9000), 4 / 3, 2.0, 1.4)]
)
def test_who_floods_delays_nobody_else_and_gets_its_share(tokens, share, ttft_s, most):
    calm = dict.fromkeys("ab", share / 2)
    alone, flooded = jobs(calm, tokens, ttft_s), jobs(calm | {"flood": 10 * share}, tokens, ttft_s)
    for tenant in calm:
        assert statistics.median(ttfts(flooded[tenant])) <= most * statistics.median(ttfts(alone[tenant]))
        assert in_time(flooded[tenant], ttft_s) >= 0.98 * in_time(alone[tenant], ttft_s)
    served = ttfts(flooded["flood"])
    assert len(served) > 0.7 * share * 180
    assert sorted(served)[int(0.9 * len(served))] <= ttft_s, "what is not refused is in time"


def test_a_tenant_that_is_alone_has_the_whole_fleet():
    served = ttfts(jobs({"flood": 12.0}, (1000, 3000), 1.0)["flood"])
    assert len(served) > 0.95 * 12 * 180


@pytest.mark.parametrize("prefill_workers", [0, 2])
@pytest.mark.parametrize("tokens", [50, 200, 400, 600, 800, 2000])  # from what is handed over for longest
def test_who_exceeds_its_share_has_an_idle_fleet(tokens, prefill_workers):
    """While nobody else has a request there, and one asked a moment ago."""
    routing = {"remote_prefill_min_tokens": 1} if prefill_workers else {}
    limits, slo = {"shares": {"*": 1}}, {"ttft_s": 1.0, "tpot_s": 0.05}
    config = parse_config({"model": "m", "limits": limits, "slo": slo, "routing": routing})
    predictor = Predictor()
    predictor.set_prior(EngineSpeed(0.0084, 3.6e-5, 0.0084, 3e-5))
    policies = Policies(config, decode_choice("kv_prefix"), predictor)
    idle = [Candidate(f"d{n}", 20_000, 20_000, 16, 0, 0, 0) for n in range(4)]

    def asks(tenant: str, tokens: int) -> object:
        request = RequestInfo("r", tokens, 100, 0.0, tenant=tenant)
        prefill = PrefillView(prefill_workers, QueueDepth(0, 0, 0), decode_ready=4)
        return policies.decide(request, idle, prefill, 0.0).decision

    asks("other", 100)
    for _ in range(800):
        asks("flood", 2000)
    assert isinstance(asks("flood", tokens), Remote if prefill_workers else Local)
