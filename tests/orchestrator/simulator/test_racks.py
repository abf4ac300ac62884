"""Racks between which KV passes slowly: pairing keeps transfers within them, and loses no requests by it."""

import pytest

from orchestrator.policy import policies
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.report import Report, report
from orchestrator.simulator.settings import SHIPPED, Settings, changed, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import at_rate

PROFILE = load_profile(PROFILES / "h100-llama-8b.json")


def simulated(pairing: str = "cost", racks: int = 2, fetch: str = "off") -> tuple[Report, Simulation]:
    config = changed(SHIPPED, {"routing": {"pairing": pairing}, "kv": {"fetch": fetch}})
    settings = Settings(
        prefill=4, decode=4, profile=PROFILE, stack=stack("ours:fixed", config), racks=racks, between_racks=8.0
    )
    sim = Simulation(settings, at_rate(synthetic("code", 1500, 1), 14.0)).run()
    return report(sim, 0.1), sim


def test_pairing_halves_the_exposed_time_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    paired, sim = simulated()
    monkeypatch.setattr(policies, "pair", lambda request, candidates, links, choose, *_: choose(request, candidates))
    blind, _ = simulated()
    assert paired.exposed_p99_s < 0.5 * blind.exposed_p99_s and paired.attained >= 0.98 * blind.attained
    lines = sim.router.predictor.links.lines
    assert lines[()].slope > 3 * lines[("rack",)].slope, "both kinds of links were measured"


def test_strict_pairing_never_leaves_the_rack() -> None:
    _, sim = simulated("strict:rack", fetch="auto")
    assert set(sim.router.predictor.links.lines) == {("rack",)}


def test_without_racks_there_is_one_kind_of_link() -> None:
    _, sim = simulated(racks=1)
    assert set(sim.router.predictor.links.lines) == {()}
