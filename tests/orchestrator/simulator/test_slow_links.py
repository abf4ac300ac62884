"""A link that becomes slow is avoided, tried now and then, and used again when it is as fast as before."""

import random

import pytest

from orchestrator.policy.predict import estimates
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.settings import SHIPPED, Settings, changed, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load

SLOW_AT_S, SLOW_FOR_S, END_S, TIMES_SLOWER = 90.0, 240.0, 540.0, 200.0
SETTLED_S = 30.0  # by then answers have shown that the link is slow


def simulate(slow_for_s: float) -> Simulation:
    """2P2D with six requests per second, which two workers can bear alone, so that a slow link can be avoided."""
    rng, now, arrivals = random.Random(1), 0.0, []
    while now < END_S:
        now += rng.expovariate(6)
        arrivals.append(Arrival(now, rng.randrange(200, 6000), rng.randrange(50, 250)))
    fixed = changed(SHIPPED, {"ratio": {"mode": "off"}})
    profile = load_profile(PROFILES / "h100-llama-8b.json")
    sim = Simulation(
        Settings(prefill=2, decode=2, profile=profile, stack=stack("ours", fixed)), Load("steady", arrivals, 0)
    )

    def carry(link_bytes_per_s: float, _: None) -> None:
        sim.link_bytes_per_s = link_bytes_per_s

    sim.at(SLOW_AT_S, carry, profile.link_bytes_per_s / TIMES_SLOWER)
    sim.at(SLOW_AT_S + slow_for_s, carry, profile.link_bytes_per_s)
    return sim.run()


def remote_share(sim: Simulation, begin_s: float, end_s: float) -> float:
    jobs = [job for job in sim.jobs if begin_s <= job.arrival.at < end_s]
    return sum(job.claimed for job in jobs) / len(jobs)


def test_link_that_was_slow_for_minutes_is_used_again():
    sim = simulate(SLOW_FOR_S)
    before = remote_share(sim, 0, SLOW_AT_S)
    recovered_s = SLOW_AT_S + SLOW_FOR_S
    assert before > 0.2
    assert 0 < remote_share(sim, SLOW_AT_S + SETTLED_S, recovered_s) < 0.03
    assert remote_share(sim, recovered_s + 2 * estimates.STALE_S, END_S) > before / 2
    assert {job.outcome for job in sim.jobs} == {"ok"}


def test_link_that_stays_slow_has_a_small_share():
    sim = simulate(END_S)
    tries = sum(job.claimed and job.arrival.at > SLOW_AT_S + SETTLED_S for job in sim.jobs)
    assert 0 < tries <= 3 * (END_S - SLOW_AT_S) / estimates.STALE_S
    assert remote_share(sim, SLOW_AT_S + SETTLED_S, END_S) < 0.02


def test_ratio_control_measures_links_and_forgets_unused_ones():
    sim = simulate(0.0)
    speed, link = sim.settings.profile.link_bytes_per_s, sim.router.link_bytes_per_s
    assert link.at(END_S) == pytest.approx(speed)
    assert link.at(END_S + 2 * estimates.LINK_AGE_S) == 0
